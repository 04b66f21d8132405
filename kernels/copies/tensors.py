"""Checks of the tensors behind a schedule: that they fit when bound, and are unchanged when the bytes move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_reshard.planner.layout.geometry import row_major_strides
from mcore_reshard.planner.plan.schedule import LocalTensor


class Fingerprint(NamedTuple):
    """Where a tensor's bytes lie. Refits write there, so a changed fingerprint is a stale binding."""

    address: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Fingerprint:
        return cls(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def changes(self, tensor: torch.Tensor) -> str:
        """What differs at `tensor`, as in "address 64 -> 128, dtype bfloat16 -> float32"."""
        facts = zip(self._fields, self, Fingerprint.of(tensor), strict=True)
        return ", ".join(f"{field} {_text(was)} -> {_text(now)}" for field, was, now in facts if was != now)


def _text(fact: object) -> str:
    """As messages write it: sizes as plain tuples, dtypes as the planner spells them."""
    if isinstance(fact, torch.dtype):
        return dtype_name(fact)
    return str(tuple(fact) if isinstance(fact, torch.Size) else fact)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> 'bfloat16', the spelling of the planner."""
    return str(dtype).removeprefix("torch.")


def gpu_of(device: torch.device | int | None) -> str:
    """The UUID of a GPU, its name in all processes of a host; "" for a device that is no GPU."""
    if device is None or (isinstance(device, torch.device) and device.type != "cuda"):
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's own bytes, uint8 [nbytes]."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def byte_array(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The same for a CPU tensor, as numpy; it shares the tensor's memory."""
    array: NDArray[np.uint8] = byte_view(tensor).numpy()
    return array


def misfits(planned: LocalTensor, tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Why the tensor of `planned`'s name cannot be bound; nothing if it can."""
    tensor = tensors.get(planned.name)
    if tensor is None:
        yield "there is no such tensor"
        return
    if tuple(tensor.shape) != planned.shape:
        yield f"shape {tuple(tensor.shape)}, the plan says {planned.shape}"
    elif tensor.layout is torch.strided and not tensor.is_contiguous():
        yield f"strides {tuple(tensor.stride())}, the plan needs the row-major {row_major_strides(planned.shape)}"
    if dtype_name(tensor.dtype) != planned.dtype:
        yield f"dtype {dtype_name(tensor.dtype)}, the plan says {planned.dtype}"
    if tensor.layout is not torch.strided:
        yield f"layout {tensor.layout}, only strided tensors can be bound"
    elif tensor.is_meta:
        yield "it is on the meta device and has no bytes"
