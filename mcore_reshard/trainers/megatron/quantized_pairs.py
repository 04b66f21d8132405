"""Export whole FP8 pairs from a live Megatron-Core model, by Hugging Face name, for the misc route and golden.

Megatron-Bridge (0.3.1) dequantizes the weights that Transformer Engine quantized, and knows no scales. But its mappings
rearrange elements of any dtype. So a quantized parameter goes through them twice: as the bytes of its data, and as the
float32 scale of every element. Then each block of the checkpoint's weight must hold one scale:

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
from mcore_reshard.trainers.quantized_export import Pairs, Scales, quantize_pair
from mcore_reshard.trainers.world import gather_from_all

from .model import export_tasks, hf_names, select_tasks


def export_with_pairs(
    bridge: Any, model_chunks: Sequence[torch.nn.Module], pairs: Pairs, names: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """As `export_hf`, with each weight of `pairs` as float8_e4m3fn data, followed by its float32 scales.

    Weights that the trainer holds quantized keep their data and scales. But a block of the checkpoint may span several
    blocks of the trainer: small heads in the fused QKV tensor. Such a weight is dequantized and quantized again, which
    rounds. Weights in bfloat16 are quantized by the engine's arithmetic (`kernels.copies.cast_arithmetic`).

    Raises as `export_hf`, and ValueError for other blocks than the plan's.
    """
    if names is not None:  # scales come with their weights
        weight_of = {scales.name: weight for weight, scales in pairs.items()}
        names = {weight_of.get(name, name) for name in names}
    tasks = select_tasks(bridge, model_chunks, names)
    by_bytes = sorted(set().union(*gather_from_all(_quantized_tasks(tasks, pairs))))  # collective: all ranks must agree
    others = [task for index, task in enumerate(tasks) if index not in by_bytes]
    for name, tensor in export_tasks(bridge, model_chunks, others, names):
        yield from quantize_pair(name, tensor, pairs[name]) if name in pairs else ((name, tensor),)
    # A mapping remembers the dtype that it exchanged between pipeline stages, so data and scales need separate tasks.
    again = select_tasks(bridge, model_chunks, names)
    data_tasks, scale_tasks = [], []
    for index in by_bytes:
        block = next((pairs[name].block for name in hf_names(tasks[index]) if name in pairs), (0, 0))
        data_tasks.append(_with_weight(tasks[index], lambda weight: weight._rowwise_data.detach().view(torch.uint8)))
        scale_tasks.append(_with_weight(again[index], partial(_scale_of_elements, block=block)))
    halves = (export_tasks(bridge, model_chunks, half, names) for half in (data_tasks, scale_tasks))
    for (name, values), (name_of_scale, scale) in zip(*halves, strict=True):
        assert name == name_of_scale, f"Bridge yields {name} beside {name_of_scale}"
        yield from pair_of_elements(name, values.view(torch.float8_e4m3fn), scale, pairs.get(name))


def _quantized_tasks(tasks: Sequence[Any], pairs: Pairs) -> set[int]:
    """The numbers of the tasks whose weight this rank holds in block FP8 and the engine keeps as a pair."""
    numbers = set()
    for index, task in enumerate(tasks):
        scales = getattr(task.param_weight, "_rowwise_scale_inv", None)
        # Bridge itself dequantizes MXFP8, whose scales are bytes.
        in_blocks = isinstance(scales, torch.Tensor) and scales.dtype is torch.float32
        if in_blocks and not pairs.keys().isdisjoint(hf_names(task)):
            numbers.add(index)
    return numbers


def _with_weight(task: Any, read: Callable[[Any], torch.Tensor]) -> Any:
    """The task with `read(weight)` in the place of its weight."""
    weight = task.param_weight
    if weight is None:  # it is on another pipeline stage
        return task
    tensor = read(weight)
    for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
        if hasattr(weight, attribute):
            setattr(tensor, attribute, getattr(weight, attribute))
    return replace(task, param_weight=tensor)


def _scale_of_elements(weight: Any, block: Block) -> torch.Tensor:
    scales, shape = weight._rowwise_scale_inv.detach(), tuple(weight._rowwise_data.shape)
    down, across = grid_of((shape[0], shape[1]), block)
    if scales.dtype is not torch.float32 or scales.shape[0] != down or scales.shape[1] < across:
        raise ValueError(
            f"a weight {shape} of the trainer has scales {tuple(scales.shape)} {scales.dtype}, which do not fit blocks of"
            f" {block[0]}x{block[1]}: quantize trainer and engine in the same blocks"
        )
    return over_elements(scales, block, shape)


def pair_of_elements(
    name: str, data: torch.Tensor, scale: torch.Tensor, pair: Scales | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The pair from E4M3 data [M, K] and the scale of every element, float32 [M, K]; without `pair` the bfloat16 weight."""
    if pair is not None:
        scales = scale[:: pair.block[0], :: pair.block[1]].contiguous()
        if torch.equal(over_elements(scales, pair.block, scale.shape), scale):
            yield from ((name, data), (pair.name, scales.reshape(pair.shape)))
            return
    weight = (data.float() * scale).bfloat16()
    yield from ((name, weight),) if pair is None else quantize_pair(name, weight, pair)
