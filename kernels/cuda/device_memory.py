"""GPU memory straight from the driver, and which tensors lie in such memory.

A framework's allocator may hand out virtual memory: PyTorch with expandable segments, an engine that can put its weights
to sleep. NCCL treats the two kinds differently and needs the same kind at both ends of a message.
"""

from __future__ import annotations

from typing import Any

import torch
from cuda.bindings import driver


class PlainBuffer:
    """`nbytes` of the current device's memory, not virtual, until `free`. `tensor`, uint8 [nbytes], shows them."""

    def __init__(self, nbytes: int) -> None:
        torch.cuda.current_stream()  # makes the device's context current
        error, address = driver.cuMemAlloc(max(1, nbytes))
        if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            torch.cuda.empty_cache()  # gives back the memory that PyTorch keeps for later
            error, address = driver.cuMemAlloc(max(1, nbytes))
        if error != driver.CUresult.CUDA_SUCCESS:
            raise torch.OutOfMemoryError(f"no {nbytes} bytes of GPU memory for scratch: {error}")
        self._address = int(address)
        shown = {"shape": (nbytes,), "typestr": "|u1", "data": (self._address, False), "version": 3}
        self.__cuda_array_interface__ = shown
        self.tensor: torch.Tensor = torch.as_tensor(self, device="cuda")

    def free(self) -> None:
        """Give the memory back. Waits for the device; nothing may still read or write the memory."""
        driver.cuMemFree(self._address)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a CUDA tensor lies in memory that is not virtual. Empty tensors do."""
    if not tensor.nbytes:
        return True
    attribute: Any = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
    error, answer = driver.cuPointerGetAttribute(attribute, tensor.data_ptr())
    return error == driver.CUresult.CUDA_SUCCESS and bool(answer)
