"""What the ranks of a session must say alike before anything moves. `words` are what each rank said, by its name.

Every rank looks at the same words, so all of them raise, or none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from mcore_reshard.kernels.errors import KvScalesError, SessionError, VersionError

Words = Mapping[str, Mapping[str, Any]]

_ALIKE = ("protocol", "digest", "transport", "bucket_bytes", "checksums", "train_ranks", "gen_ranks")

_TYPES: Mapping[str, tuple[type, ...]] = {
    "protocol": (int,),
    "digest": (str,),
    "transport": (str,),
    "bucket_bytes": (int,),
    "checksums": (bool,),
    "train_ranks": (int,),
    "gen_ranks": (int,),
    "version": (int, float),
    "kv_scales": (dict,),
    "wrong_kv_scales": (str,),
    "lacks": (list, type(None)),
}


def parse_word(word: Any) -> dict[str, Any]:
    """A rank's word as it comes from JSON. Raises TypeError for a field of a type that no rank writes."""
    for field, value in word.items():
        if not isinstance(value, _TYPES.get(field, (object,))):
            raise TypeError(f"{field} is {value!r:.40}")
    if not all(isinstance(scale, (int, float)) for scale in word.get("kv_scales", {}).values()):
        raise TypeError("kv_scales are no numbers")
    if not all(isinstance(number, int) for number in word.get("lacks") or ()):
        raise TypeError("lacks has no numbers")
    return dict(word)


def check_alike(words: Words) -> None:
    """All ranks must have been given the same; raises `SessionError` with who said what."""
    problems = []
    for field in _ALIKE:
        if len(ranks := _ranks_by(words, field)) > 1:
            problems.append(f"different {field}: {_who_said(ranks)}")
    if problems:
        raise SessionError("\n  ".join(("the ranks of this session do not fit together:", *problems)))


def check_versions(words: Words, rank: str, committed: int | None) -> None:
    """All ranks must refit one version, which follows the one committed last; raises `VersionError`. `rank` says so."""
    versions = _ranks_by(words, "version")
    if len(versions) > 1:
        raise VersionError(f"different versions are refitted at once: {_who_said(versions)}")
    (version,) = versions
    if committed is not None and version <= committed:
        raise VersionError(f"{rank}: version {version} does not follow {committed}")


def kv_scales_word(scales: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a rank says of the scales of the KV cache that it was given, if any."""
    if not isinstance(scales, Mapping | None):
        return {"wrong_kv_scales": f"a {type(scales).__name__} in place of a mapping of names to scales"}
    given = dict(scales or {})
    if wrong := [
        f"{name} is {scale!r:.40}"
        for name, scale in given.items()
        if not (isinstance(name, str) and is_positive_float32(scale))
    ]:
        return {"wrong_kv_scales": ", ".join(wrong)}
    return {"kv_scales": {name: float(scale) for name, scale in given.items()}} if given else {}


def agreed_kv_scales(words: Words, sender: str) -> dict[str, float]:
    """The scales of the KV cache that training rank 0, `sender`, sends.

    Raises `KvScalesError` where a rank was given others, which would be lost, or what is no positive number.
    """
    wrong = _ranks_by(words, "wrong_kv_scales")
    wrong.pop(None, None)
    if wrong:
        raise KvScalesError(f"scales of the KV cache are positive float32 numbers by name, and {_who_said(wrong)}")
    found: dict[str, float] = words[sender].get("kv_scales", {})
    if others := [rank for rank, word in words.items() if word.get("kv_scales", found) != found]:
        raise KvScalesError(
            f"scales of the KV cache travel from {sender}, which was given {len(found)}: others were given on"
            f" {', '.join(others)}; give all of them on {sender}"
        )
    return found


def kv_names_word(scales: Iterable[str], names: Collection[str] | None) -> dict[str, Any]:
    """What a generation rank says of the names of agreed scales: those that it lacks, by their numbers.

    `names` are its own; None if it takes no scales.
    """
    return {"lacks": None if names is None else [number for number, name in enumerate(scales) if name not in names]}


def check_kv_names(words: Words, scales: Collection[str]) -> None:
    """All generation ranks must take scales, and each name must be that of one of them; else raises `KvScalesError`."""
    lacking = {rank: word["lacks"] for rank, word in words.items() if "lacks" in word}
    if deaf := [rank for rank, lacks in lacking.items() if lacks is None]:
        raise KvScalesError(
            f"{len(scales)} scales of the KV cache came with the refit, and no function to set them was given on {', '.join(deaf)}"
        )
    nowhere = set.intersection(*map(set, lacking.values())) if lacking else set(range(len(scales)))
    if wrong := [name for number, name in enumerate(scales) if number in nowhere]:
        raise KvScalesError(
            f"{len(wrong)} of {len(scales)} scales of the KV cache are of no attention layer of any generation rank whose"
            f" cache has scales: {', '.join(wrong)}; name the engine's own, as in model.layers.0.self_attn.attn.k_scale, and"
            " start it with a quantized cache (kv_cache_dtype)"
        )


def is_positive_float32(scale: Any) -> bool:
    """Whether a scale of the KV cache can be kept as engines keep it: neither 0 nor inf as float32."""
    if isinstance(scale, (bool, str)):
        return False
    try:
        return 0 < torch.tensor(float(scale), dtype=torch.float32).item() < math.inf
    except (TypeError, ValueError, ArithmeticError, RuntimeError):  # RuntimeError: a tensor of several numbers
        return False


def _ranks_by(words: Words, field: str) -> dict[Any, list[str]]:
    """Ranks by what they said."""
    ranks: dict[Any, list[str]] = {}
    for rank, word in words.items():
        ranks.setdefault(word.get(field), []).append(rank)
    return ranks


def _who_said(ranks: Mapping[Any, list[str]]) -> str:
    return "; ".join(f"{said} on {', '.join(names)}" for said, names in ranks.items())
