"""Tensors as a trace says that they are made, of the bytes of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mcore_reshard.planner.layout.strided import StridedCopy
from mcore_reshard.planner.layout.traces import HfTensor, RankTrace
from mcore_reshard.validation.engine.slices import poison


def hf_tensors(checkpoint: Mapping[str, torch.Tensor]) -> dict[str, HfTensor]:
    return {
        name: HfTensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in checkpoint.items()
    }


def assembled(trace: RankTrace, checkpoint: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every tensor of a rank by name, poisoned where the trace has nothing for it."""
    tensors = {}
    for traced in trace.tensors:
        assert not traced.computed, f"{traced.tensor.name}: {traced.computed}"
        tensor = poison(torch.empty(traced.tensor.shape, dtype=getattr(torch, traced.tensor.dtype)))
        for box in traced.padding:
            _dst(tensor, box).zero_()
        for name, copy in traced.copies:
            source = checkpoint[name].contiguous()
            _dst(tensor, copy).copy_(source.as_strided(copy.extents, copy.src_strides, copy.src_offset))
        tensors[traced.tensor.name] = tensor
    return tensors


def wrong_tensors(
    trace: RankTrace, checkpoint: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]
) -> list[str]:
    """Names of live tensors that hold other bytes than their trace says; those that are computed are left out."""
    said = assembled(RankTrace(tuple(traced for traced in trace.tensors if not traced.computed)), checkpoint)
    assert said
    return differences(said, {name: live[name] for name in said})


def _dst(tensor: torch.Tensor, copy: StridedCopy) -> torch.Tensor:
    return tensor.as_strided(copy.extents, copy.dst_strides, copy.dst_offset)


def differences(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are missing, or differ in dtype, shape or any byte."""
    return sorted(
        name
        for name in found.keys() | expected.keys()
        if name not in found or name not in expected or not _same_bytes(found[name], expected[name])
    )


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    same_kind = left.dtype == right.dtype and left.shape == right.shape
    return same_kind and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
