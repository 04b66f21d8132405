"""Whole tensors that travel by their Hugging Face names, on the misc route and under golden.

A stream must hold every requested tensor, and no other. The trainer checks this of its export, the engine of all that
arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from mcore_reshard.kernels.copies.tensors import dtype_name
from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.planner.model.precision import FP8

NamedTensors = Iterable[tuple[str, torch.Tensor]]

_EXPORT_PAIRS = "export must yield quantized pairs, see trainers.megatron.quantized_pairs.export_with_pairs"


def check_stream(
    names: Sequence[str] | None, tensors: NamedTensors, pairs: Mapping[str, tuple[str, str]], verb: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass `tensors` through; raise `SessionError` unless they are `names`, each once. None: any names, each once.

    `pairs` maps each weight that the engine keeps quantized to (name, dtype) of its scales. Both must come, in the
    engine's dtypes: its loader would silently narrow an unquantized weight and keep old scales.
    `verb` begins messages: "export yielded" or "there arrived".
    """
    expected = None if names is None else set(names)
    if expected is not None:
        pairs = {weight: scales for weight, scales in pairs.items() if weight in expected}
    dtypes = dict.fromkeys(pairs, FP8) | dict(pairs.values())
    seen: set[str] = set()
    for name, tensor in tensors:
        if name in seen or (expected is not None and name not in expected):
            raise SessionError(f"{verb} {name} {'twice' if name in seen else 'unasked'}")
        if (dtype := dtype_name(tensor.dtype)) != dtypes.get(name, dtype):
            raise SessionError(f"{verb} {name} in {dtype}, the engine keeps it in {dtypes[name]}: {_EXPORT_PAIRS}")
        seen.add(name)
        yield name, tensor
    if missing := (expected or set()) - seen:
        raise SessionError(f"{verb} {len(seen)} of {len(expected or ())} tensors, without {', '.join(sorted(missing))}")
    if alone := [weight for weight, (scales, _) in pairs.items() if (weight in seen) != (scales in seen)]:
        raise SessionError(
            f"{verb} {len(alone)} weights without scales or the other way round, first {alone[0]}: {_EXPORT_PAIRS}"
        )


def exhaust(tensors: NamedTensors) -> None:
    """Consume a stream for its side effects: an export runs collectives, and other ranks wait in them."""
    for _ in tensors:
        pass
