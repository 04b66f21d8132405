"""Let other processes of this host read a process's GPU memory: CUDA IPC, one handle for each allocation.

A tensor lies in an allocation that the framework's allocator got from the driver. A rank exports each allocation of its
tensors once, and the offset of every tensor in it, as plain JSON. A reader maps each allocation once and computes
addresses. Tensors of the reader's own process keep their own addresses.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import torch
from cuda.bindings import driver

from mcore_reshard.kernels.copies.tensors import gpu_of
from mcore_reshard.kernels.errors import SessionError, TransportUnavailable
from mcore_reshard.kernels.host import host
from mcore_reshard.planner.bounded_json import MAX_WORD_BYTES, parse_json

from .exported import Allocation as Allocation
from .exported import Export as Export
from .exported import addresses_of

_PROCESS = uuid4().hex
_EVENT_BYTES = 64  # of a cudaIpcEventHandle_t
_own_events: dict[str, torch.cuda.Event] = {}  # a process cannot open its own; torch's events take no weak references


def process() -> str:
    return f"{_PROCESS}-{os.getpid()}"  # a forked child has its parent's uuid


def export(tensors: Mapping[str, torch.Tensor]) -> Export:
    """Export the allocations that contiguous CUDA `tensors` lie in.

    They must stay allocated until every reader has closed its mappings. Raises `TransportUnavailable` for memory that
    CUDA IPC cannot share: that of expandable segments, of cudaMallocAsync and of other virtual memory.
    """
    allocations: list[Allocation] = []
    numbers: dict[int, int] = {}  # index of an allocation by its address
    places: dict[str, tuple[int, int]] = {}
    for name, tensor in tensors.items():
        if not tensor.nbytes:
            continue
        with torch.cuda.device(tensor.device):
            base, nbytes = _allocation_of(name, tensor)
            if base not in numbers:
                handle = _check_call(driver.cuIpcGetMemHandle(base), f"export the memory of {name}")
                numbers[base] = len(allocations)
                allocations.append(
                    Allocation(bytes(handle.reserved).hex(), base, nbytes, gpu_of(tensor.device), _serial(base))
                )
        places[name] = (numbers[base], tensor.data_ptr() - base)
    return Export(host(), process(), tuple(allocations), places)


def _allocation_of(name: str, tensor: torch.Tensor) -> tuple[int, int]:
    """(address, bytes) of the allocation that a tensor lies in."""
    if not tensor.is_cuda:
        raise TransportUnavailable(f"{name} is on {tensor.device}: only CUDA memory can be mapped by other processes")
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
    if not _check_call(driver.cuPointerGetAttribute(attribute, tensor.data_ptr()), f"look up the memory of {name}"):
        raise TransportUnavailable(
            f"the memory of {name} cannot be shared through CUDA IPC: it is virtual memory, as PyTorch's allocator "
            "uses with expandable_segments:True or backend:cudaMallocAsync. Allocate the weights without these "
            "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False in the training processes), or use another transport"
        )
    base, nbytes = _check_call(driver.cuMemGetAddressRange(tensor.data_ptr()), f"look up the allocation of {name}")
    return int(base), int(nbytes)


def serial_of(address: int) -> int | None:
    """The serial number of the allocation that an address of this process lies in; None where none is there."""
    error, serial = driver.cuPointerGetAttribute(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID, address)
    return int(serial) if error == driver.CUresult.CUDA_SUCCESS else None


def _serial(address: int) -> int:
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
    return int(_check_call(driver.cuPointerGetAttribute(attribute, address), "number an allocation"))


@contextmanager
def mapping_for(device: torch.device) -> Iterator[None]:
    """What this thread opens and closes meanwhile is for kernels of `device`."""
    with torch.cuda.device(device):
        torch.cuda.current_stream(device)  # makes the device's context current
        yield


def open_memory(allocation: Allocation, owner: str) -> int:
    """Map an allocation of another process, under `mapping_for` a device, and return its address here.

    Raises `TransportUnavailable` if that is impossible.
    """
    handle = driver.CUipcMemHandle()
    handle.reserved = bytes.fromhex(allocation.handle)
    flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
    return int(_check_call(driver.cuIpcOpenMemHandle(handle, flags), f"map the memory of {owner}"))


def close_memory(address: int) -> None:
    """Unmap what `open_memory` returned, under `mapping_for` its device. Kernels that read it must have ended."""
    _check_call(driver.cuIpcCloseMemHandle(address), "unmap a peer's memory")


def export_event(event: torch.cuda.Event, device: torch.device) -> str:
    """An event that was made with `interprocess=True`, as JSON by which another process can query it.

    The event lives until `withdraw_event`.
    """
    with torch.cuda.device(device):
        handle: str = event.ipc_handle().hex()
    _own_events[handle] = event
    return json.dumps({"process": process(), "event": handle})


def withdraw_event(event: torch.cuda.Event) -> None:
    for handle in [handle for handle, own in tuple(_own_events.items()) if own is event]:  # other threads add theirs
        del _own_events[handle]


def open_event(text: str, device: torch.device) -> torch.cuda.Event:
    """The event of `export_event`. It has happened once all work before its owner's last record of it is done."""
    try:
        read: Any = parse_json(text, "it", max_bytes=MAX_WORD_BYTES)
        owner, handle = str(read["process"]), str(read["event"])
        if len(raw := bytes.fromhex(handle)) != _EVENT_BYTES:
            raise ValueError(f"a handle has not {_EVENT_BYTES} bytes")
    except (ValueError, TypeError, KeyError) as error:
        raise SessionError(f"not an export of an event: {error!r:.200}") from error
    if owner == process():
        return _own_events[handle]
    return torch.cuda.Event.from_ipc_handle(device, raw)


class Mappings:
    """Allocations of other processes, each mapped once until `close`, for kernels of one device to read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mapped: dict[str, int] = {}  # address here by handle

    def addresses(self, exported: Export, names: Iterable[str], owner: str) -> list[int]:
        """The address of the first byte of each named tensor of `owner` ("train:0"), for kernels of this device.

        Maps the allocations they lie in. Raises `TransportUnavailable` if that is impossible, `SessionError` for a
        name that is not exported.
        """
        with mapping_for(self._device):
            return addresses_of(exported, names, owner, lambda index: self._base(exported, index, owner))

    def close(self) -> None:
        """Unmap everything. Kernels that read the mappings must have ended."""
        while self._mapped:
            _, address = self._mapped.popitem()
            with mapping_for(self._device):
                close_memory(address)

    def _base(self, exported: Export, index: int, owner: str) -> int:
        """Where an allocation begins here."""
        allocation = exported.allocations[index]
        if exported.process == process():
            return allocation.address
        if allocation.handle not in self._mapped:
            self._mapped[allocation.handle] = open_memory(allocation, owner)
        return self._mapped[allocation.handle]


def _check_call(result: tuple[Any, ...], what: str) -> Any:
    """The values of a driver call; raise `TransportUnavailable` with the driver's reason if it failed."""
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(error)
        _, reason = driver.cuGetErrorString(error)
        unreachable = (
            driver.CUresult.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
            driver.CUresult.CUDA_ERROR_INVALID_DEVICE,
            driver.CUresult.CUDA_ERROR_INVALID_CONTEXT,
        )
        hint = " (the two GPUs must be able to access each other; containers must share their IPC namespace)"
        raise TransportUnavailable(
            f"cannot {what}: {_text(name)}: {_text(reason)}{hint if error in unreachable else ''}"
        )
    return values[0] if len(values) == 1 else tuple(values)


def _text(words: bytes | str | None) -> str:
    return words.decode() if isinstance(words, bytes) else str(words)
