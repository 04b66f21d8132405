"""Whole tensors for a quantized engine, from the export of an unquantized trainer: for the misc route and golden.

    export = quantized_export(lambda names: export_hf(bridge, model_chunks, names), plan)

For a trainer that is itself in FP8 see `mcore_reshard.trainers.megatron.quantized_pairs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from mcore_reshard.kernels.copies.cast_arithmetic import quantized
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.session.endpoints import Export
from mcore_reshard.session.whole_tensors import NamedTensors


class Scales(NamedTuple):
    """The scales of one weight."""

    name: str
    shape: tuple[int, ...]
    block: tuple[int, int]


Pairs = Mapping[str, Scales]  # by the weight's name


def pairs_by_name(plan: Plan) -> dict[str, Scales]:
    """The scales of every quantized weight of a plan. Raises ValueError for MXFP8, whose scales are not float32."""
    pairs: dict[str, Scales] = {}
    for pair in plan.pairs:
        group = plan.groups[pair.scales]
        if group.dtype != "float32":
            remedy = "nothing computes the scales of MXFP8; let the engine hold FP8"
            raise ValueError(f"{group.name_pattern} is {group.dtype}: {remedy}")
        names = zip(plan.groups[pair.weight].names(), group.names(), strict=True)
        pairs |= {weight: Scales(scales, group.shape, pair.block) for weight, scales in names}
    return pairs


def quantized_export(export: Export, plan: Plan) -> Export:
    """An export that yields the weights of the plan's pairs in E4M3, each followed by its scales.

    It quantizes whole matrices, block by block, as a cast on the way does. Raises ValueError as `pairs_by_name`.
    """
    pairs = pairs_by_name(plan)
    computed = {scales.name for scales in pairs.values()}

    def run(names: Sequence[str] | None) -> NamedTensors:
        exported = None if names is None else [name for name in names if name not in computed]
        for name, tensor in export(exported):
            yield from quantize_pair(name, tensor, pairs[name]) if name in pairs else ((name, tensor),)

    return run


def quantize_pair(name: str, weight: torch.Tensor, scales: Scales) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, E4M3 data), then (name of the scales, float32 scales) of a matrix."""
    data, grid = quantized(weight, scales.block)
    yield name, data
    yield scales.name, grid.reshape(scales.shape)
