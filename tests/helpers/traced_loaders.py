"""Loaders run twice: on real tensors whose elements are numbered, and on meta tensors under a recorder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product

import torch

from mcore_reshard.planner.layout.strided import StridedCopy
from mcore_reshard.planner.layout.traces import HfTensor, TracedTensor
from mcore_reshard.tracing.recorder import Recorder

SHAPES = {"a": (4, 6), "b": (2, 6)}
FIRST = {"a": 1.0, "b": 101.0}  # the numbers of their first elements; all below 256, which bfloat16 holds

Loader = Callable[[torch.Tensor, dict[str, torch.Tensor]], object]


def traced(
    shape: tuple[int, ...], load: Loader, *, dtype: torch.dtype = torch.bfloat16, run: bool = True
) -> tuple[TracedTensor, torch.Tensor]:
    """What a recorder says of a parameter that `load` fills, and what it holds after the same with real tensors."""
    recorder = Recorder()
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
    sources = {name: recorder.source(name, HfTensor(size, "bfloat16")) for name, size in SHAPES.items()}
    with torch.no_grad(), recorder:
        load(parameter, sources)
    real = torch.nn.Parameter(torch.full(shape, -1.0, dtype=dtype), requires_grad=False)
    if run:
        with torch.no_grad(), _MetaIsCpu():
            load(real, {name: numbered(name) for name in SHAPES})
    return recorder.read("parameter", parameter), real


class _MetaIsCpu(torch.overrides.TorchFunctionMode):
    """Loaders that ask for the meta device, as those that ask for the device of their weights, get the CPU."""

    def __torch_function__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")) == "meta":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)  # type: ignore[operator]


def numbered(name: str) -> torch.Tensor:
    size = torch.Size(SHAPES[name])
    return torch.arange(FIRST[name], FIRST[name] + size.numel(), dtype=torch.bfloat16).view(size)


def elements_of(tensor: TracedTensor, firsts: Mapping[str, float] = FIRST) -> list[float]:
    """The number of each element of a tensor, by its trace; -1 where the trace says nothing. Each is said once."""
    size = torch.Size(tensor.tensor.shape).numel()
    found = [-1.0] * size
    for first, copy in [(firsts[name], copy) for name, copy in tensor.copies] + [(None, box) for box in tensor.padding]:
        for src, dst in places(copy):
            assert found[dst] == -1, f"element {dst} is said twice"
            found[dst] = 0 if first is None else first + src
    return found


def places(copy: StridedCopy) -> list[tuple[int, int]]:
    return [
        (
            copy.src_offset + sum(i * s for i, s in zip(index, copy.src_strides, strict=True)),
            copy.dst_offset + sum(i * s for i, s in zip(index, copy.dst_strides, strict=True)),
        )
        for index in product(*map(range, copy.extents))
    ]
