"""Loaders that write into the tensors that they are given."""

from __future__ import annotations

import torch

from mcore_reshard.planner.layout.strided import StridedCopy
from mcore_reshard.planner.layout.traces import HfTensor
from mcore_reshard.tracing.recorder import Recorder


def test_what_a_loader_zeroes_before_it_copies_is_padding() -> None:
    """As vLLM does with the bias of gpt-oss's down projection, on all tensor-parallel ranks but the first."""
    recorder, parameter = Recorder(), torch.empty(6, 4, device="meta", dtype=torch.bfloat16)
    with torch.no_grad(), recorder:
        given = recorder.source("bias", HfTensor((6, 4), "bfloat16"))
        given[2:].zero_()
        parameter.copy_(given)
    traced = recorder.read("bias", parameter)
    assert traced.copies == (("bias", StridedCopy((8,), 0, (1,), 0, (1,))),)
    assert [(box.dst_offset, box.elements) for box in traced.padding] == [(8, 16)] and not traced.computed


def test_what_a_loader_computes_in_place_is_computed() -> None:
    recorder, parameter = Recorder(), torch.empty(6, device="meta", dtype=torch.bfloat16)
    with torch.no_grad(), recorder:
        given = recorder.source("norm", HfTensor((6,), "bfloat16"))
        given += 1
        parameter.copy_(given)
    traced = recorder.read("norm", parameter)
    assert traced.computed.startswith("aten.add_") and traced.parameters == ("norm",) and not traced.copies
