"""Scales of block-FP8 experts that vLLM cuts inside of blocks: it makes the blocks smaller and repeats their scales.

A plan moves the checkpoint's scales, those of every block that a rank has a part of, into a tensor beside the engine's
own; `refine` repeats them from there into what the kernels read. Source: vllm/model_executor/layers/fused_moe/oracle/fp8.py
(refine_fp8_moe_block_shape) and routed_experts.py (weight_loader), 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mcore_reshard.planner.layout.vllm_scales import CHECKPOINT_BLOCKS

_SUFFIX = "_weight_scale_inv"
_NOTHING = -1.0  # no scale is negative
_BESIDE = "_checkpoint_blocks"  # attribute of a layer: its tensors by the names of its parameters


@dataclass(frozen=True, slots=True)
class _Refined:
    """One parameter of refined scales: for each of its rows and columns, those of the tensor beside it."""

    name: str
    parameter: torch.nn.Parameter  # [experts, rows, columns]
    blocks: torch.Tensor  # float32 [experts, touched rows, touched columns]
    rows: torch.Tensor
    columns: torch.Tensor


def blocks_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """`...w13_weight_scale_inv.blocks` -> the tensor that a plan fills; made on the first call, negative until it is filled."""
    return {entry.name + CHECKPOINT_BLOCKS: entry.blocks for entry in _refined(model)}


def refine(model: torch.nn.Module) -> None:
    """Repeat what a plan has put beside refined scales into these, once; what no refit has put there since stays as it is.

    A NaN is a scale as any other: weights that are NaN have such.
    """
    with torch.no_grad():
        for entry in _refined(model):
            if not (entry.blocks < 0).any():
                entry.parameter.copy_(entry.blocks.index_select(1, entry.rows).index_select(2, entry.columns))
                entry.blocks.fill_(_NOTHING)  # the loader may write the parameter next, as it does under golden


def refined_names(model: torch.nn.Module) -> set[str]:
    """Parameters that `refine` fills."""
    return {entry.name for entry in _refined(model)}


def _refined(model: torch.nn.Module) -> Iterator[_Refined]:
    for prefix, layer in model.named_modules():
        method = getattr(layer, "quant_method", None) if layer._parameters else None
        if getattr(method, "weight_scale_refine", None) is None:
            continue
        for leaf in ("w13", "w2"):
            yield _entry(f"{prefix}.{leaf}{_SUFFIX}", leaf, layer, method)


def _entry(name: str, leaf: str, layer: Any, method: Any) -> _Refined:
    parameter = getattr(layer, f"{leaf}{_SUFFIX}")
    beside = layer.__dict__.setdefault(_BESIDE, {})
    if leaf not in beside:
        beside[leaf] = _made_beside(leaf, layer, method, parameter)
    return _Refined(name, parameter, *beside[leaf])


def _made_beside(leaf: str, layer: Any, method: Any, parameter: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A tensor for the checkpoint's scales of one parameter, and which row and column of it each of the parameter's has."""
    coarse, fine = method.weight_block_size, method.moe_block_shape
    width = layer.moe_config.intermediate_size_per_partition
    start = layer.moe_config.tp_rank * width
    cut = 0 if leaf == "w13" else 1  # dim of the matrix that is cut
    mine = torch.arange(start, start + width, fine[cut]) // coarse[cut]
    mine -= start // coarse[cut]
    touched = int(mine[-1]) + 1
    if leaf == "w13":
        stacked = parameter.shape[1] // len(mine)  # gate and up, or up alone
        rows = torch.cat([mine + number * touched for number in range(stacked)])
        columns = torch.arange(parameter.shape[2]) * fine[1] // coarse[1]
        shape = (parameter.shape[0], stacked * touched, int(columns[-1]) + 1)
    else:
        rows = torch.arange(parameter.shape[1]) * fine[0] // coarse[0]
        columns = mine
        shape = (parameter.shape[0], int(rows[-1]) + 1, touched)
    nothing = torch.full(shape, _NOTHING, dtype=parameter.dtype, device=parameter.device)
    return nothing, rows.to(parameter.device), columns.to(parameter.device)
