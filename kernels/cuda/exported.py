"""What a process says of the GPU memory that it lets others read: plain records, and their JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mcore_reshard.kernels.errors import SessionError, TransportUnavailable
from mcore_reshard.kernels.host import host
from mcore_reshard.planner.bounded_json import MAX_WORD_BYTES, parse_json

_HANDLE_BYTES = 64  # of a CUipcMemHandle
_MAX_ADDRESS = 1 << 64


class Allocation(NamedTuple):
    """A block of GPU memory as the driver handed it out."""

    handle: str  # the CUipcMemHandle's 64 bytes, in hex
    address: int  # in the process that owns it
    nbytes: int
    gpu: str  # its UUID
    serial: int  # of this allocation alone among all that the process ever makes, also at one address


@dataclass(frozen=True, slots=True)
class Export:
    """The memory that a process lets others read: allocations, and (allocation, byte offset) of every tensor."""

    host: str  # differs between hosts, and between boots of one
    process: str
    allocations: tuple[Allocation, ...]
    tensors: Mapping[str, tuple[int, int]]

    def to_json(self) -> str:
        said = {
            "host": self.host,
            "process": self.process,
            "allocations": self.allocations,
            "tensors": {**self.tensors},
        }
        return json.dumps(said)

    @classmethod
    def from_json(cls, text: str | bytes) -> Export:
        """Raises `SessionError` if `text` is not what `to_json` wrote."""
        try:
            read: Any = parse_json(text, "it", max_bytes=MAX_WORD_BYTES)
            allocations = tuple(
                Allocation(str(h), int(a), int(n), str(g), int(s)) for h, a, n, g, s in read["allocations"]
            )
            for handle, address, nbytes, *_ in allocations:
                if len(bytes.fromhex(handle)) != _HANDLE_BYTES:
                    raise ValueError(f"a handle has not {_HANDLE_BYTES} bytes")
                if not (address >= 0 and nbytes > 0 and address + nbytes <= _MAX_ADDRESS):
                    raise ValueError(f"an allocation of {nbytes} bytes at {address:#x}")
            tensors = {str(name): (int(index), int(offset)) for name, (index, offset) in read["tensors"].items()}
            for name, (index, offset) in tensors.items():
                if not (0 <= index < len(allocations) and 0 <= offset < allocations[index].nbytes):
                    raise SessionError(f"not an export of GPU memory: {name} lies in no allocation")
            return cls(str(read["host"]), str(read["process"]), allocations, tensors)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise SessionError(f"not an export of GPU memory: {error!r:.200}") from error

    def first_tensor(self) -> Export:
        """One tensor of these and its allocation; nothing, if all tensors are empty."""
        for name, (index, offset) in self.tensors.items():
            return replace(self, allocations=(self.allocations[index],), tensors={name: (0, offset)})
        return self

    def bytes_from(self, name: str) -> int:
        """The bytes from the beginning of a tensor to the end of its allocation. Raises `SessionError` if it is not exported."""
        if name not in self.tensors:
            raise SessionError(f"the export has no {name}")
        index, offset = self.tensors[name]
        return self.allocations[index].nbytes - offset


def addresses_of(exported: Export, names: Iterable[str], owner: str, base: Callable[[int], int]) -> list[int]:
    """The address of the first byte of each named tensor of `owner` ("train:0"); `base(i)` is where allocation i begins here.

    Raises `TransportUnavailable` for memory of another host, `SessionError` for a name that is not exported.
    """
    if exported.host != host():
        raise TransportUnavailable(f"{owner} runs on another host: its memory cannot be mapped here")
    addresses = []
    for name in names:
        if name not in exported.tensors:
            raise SessionError(f"{owner} does not export {name}")
        index, offset = exported.tensors[name]
        addresses.append(base(index) + offset)
    return addresses
