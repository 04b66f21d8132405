"""The layout of a vLLM model, read off its own `load_weights`: run on a meta twin, with meta tensors of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mcore_reshard.planner.layout.traces import HfTensor, RankTrace
from mcore_reshard.tracing.loading import record_loading

from .created import parameters_as_created
from .model import loaded_tensors
from .rearranged import rearrange


def trace_loading(
    model: torch.nn.Module, checkpoint: Mapping[str, HfTensor], *, as_kernels_read: bool = False
) -> RankTrace:
    """Of which elements of `checkpoint` every tensor of this rank's model is made, as its own loader would place them.

    `as_kernels_read`: as they lie once backends have rearranged what was loaded (`rearranged`).

    The model may be live or on the meta device; it is not written. vLLM's parallel state must be that of the model's
    rank. Raises TraceError where the loader raises.
    """
    with parameters_as_created(model):
        recorder, twin = record_loading(model, checkpoint, "vLLM", *([rearrange] if as_kernels_read else []))
    return RankTrace(tuple(recorder.read(name, twin.get_parameter(name)) for name in loaded_tensors(model)))
