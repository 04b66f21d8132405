"""Checks that the ranks of a session agree before anything moves.

Every rank publishes a word, a small dict. All ranks check the words of all ranks, so all of them raise, or none. `words`
are by rank name: {"train:0": {"version": 3}, "gen:0": {"version": 3}}.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from operator import index
from typing import Any

import torch

from mcore_reshard.kernels.errors import KvScalesError, SessionError
from mcore_reshard.planner.bounded_json import shown

Words = Mapping[str, Mapping[str, Any]]

_ALIKE: Mapping[str, Any] = {
    "digest": str,
    "transport": str,
    "bucket_bytes": int,
    "checksums": bool,
    "retries": int,
    "commit": str,
    "train_ranks": int,
    "gen_ranks": int,
}
_OTHERS: Mapping[str, Any] = {
    "process": str,
    "place": str,
    "epoch": str | None,
    "committed": int | None,
    "version": int | None,
    "wrong_version": str,
    "everything": bool,
    "rollback": bool,
    "in_background": bool,
    "kv_scales": dict,
    "wrong_kv_scales": str,
    "lacks": list | None,
}


def parse_word(word: Any) -> dict[str, Any]:
    """A rank's word as it comes from JSON. Raises TypeError for what no rank writes: other types, and numbers beyond 64 bits."""
    types = {**_ALIKE, **_OTHERS}
    for field, value in word.items():
        if not isinstance(value, types.get(field, object)) or (isinstance(value, (int, float)) and abs(value) >= 2**63):
            raise TypeError(f"{field} is {shown(value)}")
    if not all(isinstance(scale, (int, float)) for scale in word.get("kv_scales", {}).values()):
        raise TypeError("kv_scales are no numbers")
    if not all(type(number) is int and 0 <= number < 2**31 for number in word.get("lacks") or ()):
        raise TypeError("lacks has no numbers")
    return dict(word)


def check_alike(words: Words) -> None:
    """Raise `SessionError` unless all ranks have the same plan and options; the message says which rank has what."""
    values = {field: _ranks_by(words, field) for field in _ALIKE}
    if problems := [f"different {field}: {_list_ranks(ranks)}" for field, ranks in values.items() if len(ranks) > 1]:
        heading = "the ranks of this session do not fit together, give all of them the same:"
        raise SessionError("\n  ".join((heading, *problems)))


def version_word(version: Any) -> dict[str, Any]:
    """A rank's word about the version that its caller gave: an integer of 64 bits, also one of numpy or torch."""
    try:
        number = None if version is None else index(version)
    except TypeError:
        number = 2**63
    if isinstance(version, bool) or abs(number or 0) >= 2**63:
        return {"version": None, "wrong_version": f"{version!r:.40}"}
    return {"version": number}


def kv_scales_word(scales: Mapping[str, Any] | None) -> dict[str, Any]:
    """A rank's word about the scales of the KV cache that its caller gave, if any."""
    if not isinstance(scales, Mapping | None):
        return {"wrong_kv_scales": f"a {type(scales).__name__} in place of a mapping of names to scales"}
    given = dict(scales or {})
    wrong = {name: scale for name, scale in given.items() if not (isinstance(name, str) and is_positive_float32(scale))}
    if wrong:
        return {"wrong_kv_scales": ", ".join(f"{name} is {scale!r:.40}" for name, scale in wrong.items())}
    return {"kv_scales": {name: float(scale) for name, scale in given.items()}} if given else {}


def agreed_kv_scales(words: Words, sender: str) -> dict[str, float]:
    """The scales of the KV cache that `sender`, training rank 0, sends.

    Raises `KvScalesError` for scales that are no positive numbers, and if another rank has different ones: these would be
    lost.
    """
    wrong = _ranks_by(words, "wrong_kv_scales")
    wrong.pop(None, None)
    if wrong:
        raise KvScalesError(f"scales of the KV cache are positive float32 numbers by name, and {_list_ranks(wrong)}")
    sent: dict[str, float] = words[sender].get("kv_scales", {})
    if others := [rank for rank, word in words.items() if word.get("kv_scales", sent) != sent]:
        raise KvScalesError(
            f"scales of the KV cache travel from {sender}, which was given {len(sent)}: others were given on"
            f" {', '.join(others)}; give all of them on {sender}"
        )
    return sent


def check_kv_names(words: Words, scales: Collection[str]) -> None:
    """Raise `KvScalesError` unless all generation ranks take scales and each name is that of one of them.

    The word of each generation rank lists the names that it `lacks`, by number; None if it takes no scales.
    """
    lacking = {rank: word["lacks"] for rank, word in words.items() if "lacks" in word}
    came = f"{len(scales)} scales of the KV cache"
    if unable := ", ".join(rank for rank, lacks in lacking.items() if lacks is None):
        missing = f"no function to set them was given on {unable}: give set_kv_scales= and kv_scale_names="
        raise KvScalesError(f"{came} came with the refit, and {missing}")
    nowhere = set.intersection(*map(set, lacking.values())) if lacking else set(range(len(scales)))
    if wrong := [name for number, name in enumerate(scales) if number in nowhere]:
        raise KvScalesError(
            f"{len(wrong)} of {came} are of no attention layer of any generation rank whose"
            f" cache has scales: {', '.join(wrong)}; name the engine's own, as in model.layers.0.self_attn.attn.k_scale, and"
            " start it with a quantized cache (kv_cache_dtype)"
        )


def is_positive_float32(scale: Any) -> bool:
    """Whether a scale of the KV cache is above 0 and finite in float32, in which engines keep it."""
    try:
        in_float32 = torch.tensor(float(scale), dtype=torch.float32).item()
        return not isinstance(scale, (bool, str)) and 0 < in_float32 < math.inf
    except (TypeError, ValueError, ArithmeticError, RuntimeError):  # RuntimeError: a tensor of several numbers
        return False


def _ranks_by(words: Words, field: str) -> dict[Any, list[str]]:
    """Each value that ranks have in a field -> the names of these ranks."""
    ranks: dict[Any, list[str]] = {}
    for rank, word in words.items():
        ranks.setdefault(word.get(field), []).append(rank)
    return ranks


def _list_ranks(ranks: Mapping[Any, list[str]]) -> str:
    return "; ".join(f"{value} on {', '.join(names)}" for value, names in ranks.items())
