"""Scales of block-FP8 experts where a tensor-parallel cut falls inside a block: vLLM repeats them for smaller blocks.

A plan moves the checkpoint's scales into a tensor beside the parameter: one for each block that the rank holds a part of.
`refine` repeats them from there:

    blocks of 128 columns, cut every 64     checkpoint's scales [a b]  ->  parameter of tp rank 1: [a], of tp rank 2: [b]

Source: vllm/model_executor/layers/fused_moe/, oracle/fp8.py (refine_fp8_moe_block_shape) and routed_experts.py, 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mcore_reshard.planner.layout.vllm_quantized import CHECKPOINT_BLOCKS

from .created import BESIDE
from .walked import Modules, Walked

_SUFFIX = "_weight_scale_inv"
_UNFILLED = -1.0  # no scale is negative
_BESIDE = "_checkpoint_blocks"  # attribute of a layer: its _Blocks by "w13" and "w2"


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The checkpoint's scales for one parameter; for each scale of the parameter, its row and column among them."""

    scales: torch.Tensor  # float32 [experts, rows of blocks, columns of blocks]
    rows: torch.Tensor
    columns: torch.Tensor


def blocks_of(model: Modules) -> dict[str, torch.Tensor]:
    """`...w13_weight_scale_inv.blocks` -> the tensor that a plan fills; the first call makes it, of negative numbers."""
    return {name + CHECKPOINT_BLOCKS: blocks.scales for name, _, blocks in _refined(model)}


def refine(model: Modules) -> None:
    """Repeat the scales that a refit put beside the parameters. A parameter without new scales stays as it is.

    NaN counts as a scale: a block with a NaN weight has it.
    """
    with torch.no_grad():
        for _, parameter, blocks in _refined(model):
            if not (blocks.scales < 0).any():
                parameter.copy_(blocks.scales.index_select(1, blocks.rows).index_select(2, blocks.columns))
                blocks.scales.fill_(_UNFILLED)  # the loader may write the parameter next, as it does under golden


def _refined(model: Modules) -> Iterator[tuple[str, torch.nn.Parameter, _Blocks]]:
    layer: Any
    for prefix, layer in Walked.of(model).once(_refined_layers):
        method = layer.quant_method
        beside = layer.__dict__.setdefault(_BESIDE, {})
        for leaf in ("w13", "w2"):
            name = f"{leaf}{_SUFFIX}"
            parameter = layer.__dict__.get(BESIDE, {}).get(name, getattr(layer, name))
            if leaf not in beside:
                beside[leaf] = _make_blocks(leaf, layer, method, parameter)
            yield f"{prefix}.{name}", parameter, beside[leaf]


def _refined_layers(seen: Walked) -> list[tuple[str, torch.nn.Module]]:
    methods = ((name, layer, getattr(layer, "quant_method", None)) for name, layer in seen.with_parameters())
    return [
        (name, layer) for name, layer, method in methods if getattr(method, "weight_scale_refine", None) is not None
    ]


def _make_blocks(leaf: str, layer: Any, method: Any, parameter: torch.Tensor) -> _Blocks:
    coarse, fine = method.weight_block_size, method.moe_block_shape
    width = layer.moe_config.intermediate_size_per_partition
    start = layer.moe_config.tp_rank * width
    cut, whole = (0, 1) if leaf == "w13" else (1, 0)  # dims of the matrix
    along_cut = torch.arange(start, start + width, fine[cut]) // coarse[cut] - start // coarse[cut]
    along_whole = torch.arange(parameter.shape[1 + whole]) * fine[whole] // coarse[whole]
    rows, columns = along_whole, along_cut
    if leaf == "w13":
        stacked = parameter.shape[1] // len(along_cut)  # gate and up, or up alone
        touched = int(along_cut[-1]) + 1
        rows, columns = torch.cat([along_cut + number * touched for number in range(stacked)]), along_whole
    shape = (parameter.shape[0], int(rows[-1]) + 1, int(columns[-1]) + 1)
    scales = torch.full(shape, _UNFILLED, dtype=parameter.dtype, device=parameter.device)
    return _Blocks(scales, rows.to(parameter.device), columns.to(parameter.device))
