"""Whole FP8 pairs out of a live Megatron-Core model, by their Hugging Face names: what a plan's misc route sends.

Megatron-Bridge (0.3.1) dequantizes what Transformer Engine quantized and knows no scales. But its mappings gather and
rearrange elements of any dtype. So a quantized parameter goes through them twice: its data as bytes, and the scale of
every element as a matrix of the same shape. What arrives is the checkpoint's weight, and scales of which each block's
must be equal:

    trainer's linear_qkv, blocks of 2 rows      q_proj
    q0 a    k0 b                                q0 a
    q1 a    k1 b                                q1 a    -> scale a
    ...                                         ...
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mcore_reshard.kernels.copies.cast_arithmetic import over_elements
from mcore_reshard.planner.model.precision import Block, grid_of
from mcore_reshard.trainers.quantized_export import Pairs, Scales, quantized_pair

from .model import conversion_tasks, export_tasks, hf_names
from .world import told_by_all

NamedTensors = Iterator[tuple[str, torch.Tensor]]


def export_with_pairs(
    bridge: Any, model_chunks: Sequence[torch.nn.Module], pairs: Pairs, names: Collection[str] | None = None
) -> NamedTensors:
    """As `export_hf`, with each weight of `pairs` as float8_e4m3fn data, followed by its float32 scales.

    Data and scales of a trainer that holds the weight quantized arrive as they are. Where a block of the checkpoint holds
    parts of several blocks of the trainer (heads smaller than a block, in the fused QKV tensor), it has no scale of its
    own: the weight is dequantized and quantized again, which rounds. Weights that the trainer holds in bfloat16 are
    quantized. Both are done as the engine would (`kernels.precision`).
    A weight takes the memory of its element-wise scales meanwhile, four bytes an element.

    Collective, as `export_hf`. Raises KeyError for names that nothing yields, ValueError for other blocks than the plan's.
    """
    wanted = None if names is None else _weights_of(names, pairs)
    tasks = conversion_tasks(bridge, model_chunks, wanted)
    by_bytes = _quantized_tasks(tasks, pairs)
    others = [task for index, task in enumerate(tasks) if index not in by_bytes]
    for name, tensor in export_tasks(bridge, model_chunks, others, wanted):
        yield from quantized_pair(name, tensor, pairs[name]) if name in pairs else ((name, tensor),)
    # a mapping remembers the dtype that it exchanged between pipeline stages, so either half has tasks of its own
    again = conversion_tasks(bridge, model_chunks, wanted)
    data = [_carrying(tasks[index], _data) for index in sorted(by_bytes)]
    scales = [_carrying(again[index], partial(_scale_of_elements, block=_block_of(again[index], pairs)))
              for index in sorted(by_bytes)]  # fmt: skip
    halves = (export_tasks(bridge, model_chunks, half, wanted) for half in (data, scales))
    for (name, values), (of_scales, scale) in zip(*halves, strict=True):
        assert name == of_scales, f"Bridge yields {name} beside {of_scales}"
        yield from pair_of_elements(name, values.view(torch.float8_e4m3fn), scale, pairs.get(name))


def _weights_of(names: Collection[str], pairs: Pairs) -> set[str]:
    """Names without those of scales, which come with their weights."""
    weights = {pair.name: name for name, pair in pairs.items()}
    return {weights.get(name, name) for name in names}


def _quantized_tasks(tasks: Sequence[Any], pairs: Pairs) -> set[int]:
    """Which tasks have a weight of a pair that the trainer holds quantized. Tasks are collective: all ranks agree."""
    mine = {
        index
        for index, task in enumerate(tasks)
        if _has_blocks(task.param_weight) and not pairs.keys().isdisjoint(hf_names(task))
    }
    return set().union(*told_by_all(mine))


def _has_blocks(weight: Any) -> bool:
    """Whether this is Transformer Engine's block FP8. MXFP8, whose scales are bytes, Bridge dequantizes well enough."""
    scales = getattr(weight, "_rowwise_scale_inv", None)
    return isinstance(scales, torch.Tensor) and scales.dtype is torch.float32


def _block_of(task: Any, pairs: Pairs) -> Block:
    return next((pairs[name].block for name in hf_names(task) if name in pairs), (0, 0))


def _carrying(task: Any, part: Callable[[Any], torch.Tensor]) -> Any:
    """The task with a part of its weight in the place of the weight."""
    weight = task.param_weight
    if weight is None:  # it is on another pipeline stage
        return task
    tensor = part(weight)
    for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
        if hasattr(weight, attribute):
            setattr(tensor, attribute, getattr(weight, attribute))
    return replace(task, param_weight=tensor)


def _data(weight: Any) -> torch.Tensor:
    data: torch.Tensor = weight._rowwise_data.detach()
    return data.view(torch.uint8)


def _scale_of_elements(weight: Any, block: Block) -> torch.Tensor:
    scales, shape = weight._rowwise_scale_inv.detach(), tuple(weight._rowwise_data.shape)
    down, across = grid_of((shape[0], shape[1]), block)
    if scales.dtype is not torch.float32 or scales.shape[0] != down or scales.shape[1] < across:
        raise ValueError(
            f"a weight {shape} of the trainer has scales {tuple(scales.shape)} {scales.dtype}, which are not those of"
            f" blocks of {block[0]}x{block[1]}"
        )
    return over_elements(scales, block, shape)


def pair_of_elements(name: str, data: torch.Tensor, scale: torch.Tensor, pair: Scales | None) -> NamedTensors:
    """From E4M3 data [M, K] and the scale of every element, float32 [M, K]: the pair, or without one what they stand for."""
    if pair is None:
        yield name, (data.float() * scale).bfloat16()
        return
    scales = scale[:: pair.block[0], :: pair.block[1]].contiguous()
    if torch.equal(over_elements(scales, pair.block, scale.shape), scale):
        yield from ((name, data), (pair.name, scales.reshape(pair.shape)))
    else:
        yield from quantized_pair(name, (data.float() * scale).bfloat16(), pair)
