"""Whole tensors for an engine that is quantised, from a trainer's export that is not: the misc route and golden.

export = quantised_export(lambda names: export_hf(bridge, model_chunks, names), plan)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .kernels.precision import block_scales, scaled_to_e4m3
from .planner.plan import Plan
from .refit import Export, NamedTensors


@dataclass(frozen=True, slots=True)
class _Scales:
    """The scales of one weight: their name, shape and blocks."""

    name: str
    shape: tuple[int, ...]
    block: tuple[int, int]


def quantised_export(export: Export, plan: Plan) -> Export:
    """An export that yields the weights of the plan's pairs in E4M3, each followed by its scales.

    Whole matrices are quantised as the source of a cast does it, block by block. Where the trainer itself is in FP8,
    Megatron-Bridge exports what it dequantises, so that these weights are rounded twice. Raises ValueError for a plan
    with scales that are not float32 (MXFP8), which nothing computes.
    """
    scales_of = dict(_pairs(plan))
    computed = {scales.name for scales in scales_of.values()}

    def run(names: Sequence[str] | None) -> NamedTensors:
        asked = None if names is None else [name for name in names if name not in computed]
        for name, tensor in export(asked):
            if name in scales_of:
                yield from _quantised(name, tensor, scales_of[name])
            else:
                yield name, tensor

    return run


def _pairs(plan: Plan) -> Iterator[tuple[str, _Scales]]:
    for pair in plan.pairs:
        group = plan.groups[pair.scales]
        if group.dtype != "float32":
            raise ValueError(f"{group.pattern} is {group.dtype}: nothing computes the scales of MXFP8")
        names = zip(plan.groups[pair.weight].names(), group.names(), strict=True)
        yield from ((weight, _Scales(scales, group.shape, pair.block)) for weight, scales in names)


def _quantised(name: str, weight: torch.Tensor, scales: _Scales) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, E4M3 data) and (name of the scales, float32) of a matrix."""
    rows, columns = scales.block
    grid = block_scales(weight, scales.block)
    data = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for number, held in enumerate(grid):
        at = slice(number * rows, (number + 1) * rows)
        data[at] = scaled_to_e4m3(weight[at], held.repeat_interleave(columns)[: weight.shape[1]])
    yield name, data
    yield scales.name, grid.reshape(scales.shape)
