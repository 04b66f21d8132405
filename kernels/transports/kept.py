"""What a rank keeps from one connection to the next, so that a change of replicas costs only what has changed.

    who exports    the export of its own memory      while the tensors, and the allocations they lie in, are the same
    who maps       the exports of each peer          while the peer's process is the same; the peer names one by its digest
                   the peer's allocations, mapped    while the peer's process lives, and exports them

An allocation has a serial number that its process never gives twice. So memory that was freed and allocated again is
another allocation, also at the same address and under the same handle. A mapping is closed once nobody uses it any more.
One that a kernel may still use, after a failure, stays mapped until the process ends.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import sha256
from threading import RLock
from typing import Any, NamedTuple, Protocol

import torch

from mcore_reshard.kernels.cuda.exported import Allocation, Export, addresses_of
from mcore_reshard.kernels.errors import SessionError, TransportUnavailable, Waiting
from mcore_reshard.kernels.events import log_event
from mcore_reshard.kernels.rendezvous.exchange import fetch_content, seat_of
from mcore_reshard.kernels.rendezvous.store_keys import StoreKeys


class Memory(Protocol):
    """GPU memory that processes share: `kernels.cuda.ipc`."""

    def process(self) -> str: ...

    def export(self, tensors: Mapping[str, torch.Tensor]) -> Export: ...

    def serial_of(self, address: int) -> int | None: ...

    def mapping_for(self, device: torch.device) -> AbstractContextManager[None]: ...

    def open_memory(self, allocation: Allocation, owner: str) -> int: ...

    def close_memory(self, address: int) -> None: ...


class OwnExport(NamedTuple):
    """An export as peers read it."""

    exported: Export
    text: str
    digest: str  # of the text


_Place = tuple[str, str, str, Allocation]  # seat and process of the owner, the device that reads, the allocation


@dataclass(eq=False)
class _Mapping:
    """An allocation of a peer, mapped here."""

    place: _Place
    address: int
    device: torch.device
    users: set[Mappings] = field(default_factory=set)
    is_dropped: bool = False  # to be closed once nobody uses it
    is_stuck: bool = False  # a kernel may read it as long as this process lives


class Mappings:
    """Allocations of peers, for kernels of one device, until `close`. Without `stay` they are then unmapped at once."""

    def __init__(self, kept: Kept, device: torch.device, *, stay: bool) -> None:
        self.device = device
        self.used: set[_Mapping] = set()
        self._kept, self._stay = kept, stay

    def addresses(self, exported: Export, names: Iterable[str], owner: str) -> list[int]:
        """As `ipc.Mappings.addresses`."""
        bases: dict[int, int] = {}

        def base(index: int) -> int:
            if index not in bases:
                bases[index] = self._kept._base(self, exported, owner, exported.allocations[index])
            return bases[index]

        with self._kept._driver().mapping_for(self.device):
            return addresses_of(exported, names, owner, base)

    def close(self, *, is_used: bool = False) -> None:
        """Use them no more. `is_used`: a kernel may still use them, so that they must stay mapped."""
        self._kept._release(self, is_used, self._stay)
        self.used.clear()


class Kept:
    """One rank's cache, for all executors of its connections. Its owner closes it; they close their `Mappings`."""

    def __init__(self, memory: Memory | None = None) -> None:
        self.counts: Counter[str] = Counter()  # of what was made, and of what was found here
        self._memory = memory
        self._lock = RLock()  # both roles of a relay connect at the same time
        self._processes: dict[str, Any] = {}  # by seat: the process that it had when this rank last met it
        self._own: dict[tuple[Any, ...], OwnExport] = {}
        self._exports: dict[tuple[str, str], Export] = {}  # by seat and digest
        self._mapped: dict[_Place, _Mapping] = {}
        self._used: set[Any] = set()  # keys of the three, since `meet`
        # All that the driver has open, by process of the owner, device and handle: also what is forgotten, and still in use.
        self._open: defaultdict[tuple[str, str, str], set[_Mapping]] = defaultdict(set)
        self._keys: StoreKeys | None = None  # of the connection: where all its executors publish exports
        self._published: set[str] = set()  # digests
        self._tensors: Mapping[str, torch.Tensor] = {}  # that any of its executors may export

    # --- life of a connection -------------------------------------------------------------------------------------

    def meet(self, processes: Mapping[str, Any]) -> None:
        """Before a connection with these ranks, by seat: forget those that are gone, or are other processes by now."""
        with self._lock:
            gone = {seat for seat, process in self._processes.items() if processes.get(seat) != process}
            self._processes = dict(processes)
            self._used.clear()
            self._published.clear()
            self._keys, self._tensors = None, {}
            self._exports = {key: each for key, each in self._exports.items() if key[0] not in gone}
            self._drop([place for place in self._mapped if place[0] in gone])

    def connect(self, keys: StoreKeys, tensors: Mapping[str, torch.Tensor]) -> None:
        """Begin a connection. Whatever part of `tensors` an executor exports, all of them are exported, once."""
        self._keys, self._tensors = keys, tensors

    def sweep(self) -> None:
        """After a connection: forget what it does not use, as memory of tensors that have moved."""
        with self._lock:
            self._own = {key: each for key, each in self._own.items() if key in self._used}
            self._exports = {key: each for key, each in self._exports.items() if key in self._used}
            self._drop([place for place in self._mapped if place not in self._used])

    def close(self) -> None:
        """Forget everything. What executors still use is closed once they are."""
        with self._lock:
            self._own, self._exports = {}, {}
            self._keys, self._tensors = None, {}  # tensors may be a second copy of the weights
            self._drop([*self._mapped])

    # --- own memory -----------------------------------------------------------------------------------------------

    def export(self, tensors: Mapping[str, torch.Tensor]) -> OwnExport:
        """An export that has contiguous CUDA `tensors`: the one of before, or another one where something has moved.

        Raises `TransportUnavailable` as `ipc.export` does.
        """
        with self._lock:
            key = _places(tensors)
            if {*key} <= {*(whole := _places(self._tensors))}:
                tensors, key = self._tensors, whole
            own, memory = self._own.get(key), self._driver()
            if own is not None and all(
                memory.serial_of(each.address) == each.serial for each in own.exported.allocations
            ):
                self.counts["exports kept"] += 1
            else:
                exported = memory.export(tensors)
                text = exported.to_json()
                own = self._own[key] = OwnExport(exported, text, sha256(text.encode()).hexdigest())
                self.counts["exports made"] += 1
            self._used.add(key)
            return own

    def publish(self, own: OwnExport, rank_name: str, keys: StoreKeys) -> None:
        """Let peers read an export: under the connection's keys, once; without a connection, under `keys`."""
        with self._lock:
            if own.digest in self._published:
                return
            self._published.add(own.digest)
        (self._keys or keys).set(f"{seat_of(rank_name)}/{own.digest}", own.text)

    # --- memory of peers ------------------------------------------------------------------------------------------

    def export_of(self, waiting: Waiting, digest: str, keys: StoreKeys, timeout_s: float) -> Export:
        """The export that `waiting.peer` names by its digest: the one that this rank has read, or as `publish` has it.

        Raises `SessionError` where it is none, and `DeadlineError` where it does not come.
        """
        key = seat_of(waiting.peer), digest
        with self._lock:
            if exported := self._exports.get(key):
                self.counts["exports known"] += 1
            else:
                text = fetch_content(self._keys or keys, "/".join(key), waiting, timeout_s=timeout_s)
                if sha256(text).hexdigest() != digest:
                    raise SessionError(f"{waiting.peer} has published another export than it says: begin a new session")
                exported = self._exports[key] = Export.from_json(text)
                self.counts["exports read"] += 1
            self._used.add(key)
            return exported

    def mappings(self, device: torch.device, *, stay: bool = True) -> Mappings:
        """The mappings that one executor uses until it closes them, for kernels of `device`.

        They `stay` for the next connection, unless their memory is freed when this one ends.
        """
        return Mappings(self, device, stay=stay)

    def _base(self, mappings: Mappings, exported: Export, owner: str, allocation: Allocation) -> int:
        """Where an allocation begins here. Maps it for `mappings` unless it is mapped."""
        memory = self._driver()
        if exported.process == memory.process():
            return allocation.address
        place = seat_of(owner), exported.process, str(mappings.device), allocation
        with self._lock:
            mapped = self._mapped.get(place)
            if mapped is None:
                self._drop_reallocated(place, owner)
                address = memory.open_memory(allocation, owner)
                mapped = self._mapped[place] = _Mapping(place, address, mappings.device)
                self._open[_handle_of(place)].add(mapped)
                self.counts["allocations mapped"] += 1
            elif mappings not in mapped.users:
                self.counts["allocations kept"] += 1
            mapped.users.add(mappings)
            mappings.used.add(mapped)
            self._used.add(place)
            return mapped.address

    def _drop_reallocated(self, place: _Place, owner: str) -> None:
        """Close mappings of memory that the owner has freed since: the driver would hand them out again for its handle."""
        before = [each for each in self._open.get(_handle_of(place), ()) if each.place[3] != place[3]]
        if any(each.users or each.is_stuck for each in before):
            raise SessionError(
                f"{owner} has allocated its memory anew, and a refit that failed may still read or write what was there: restart"
                " this process"
            )
        self._drop([each.place for each in before])

    def _release(self, mappings: Mappings, is_used: bool, stay: bool) -> None:
        with self._lock:
            for mapped in mappings.used:
                mapped.users.discard(mappings)
                mapped.is_stuck |= is_used
                self._unmap_unused(mapped)
                if not stay and not mapped.users and self._mapped.get(mapped.place) is mapped:
                    self._drop([mapped.place])

    def _drop(self, places: Iterable[_Place]) -> None:
        for place in places:
            mapped = self._mapped.pop(place)
            mapped.is_dropped = True
            self._unmap_unused(mapped)

    def _unmap_unused(self, mapped: _Mapping) -> None:
        if mapped.is_dropped and not mapped.users and not mapped.is_stuck:
            key = _handle_of(mapped.place)
            self._open[key].discard(mapped)
            if not self._open[key]:
                del self._open[key]
            self.counts["allocations unmapped"] += 1
            try:
                with self._driver().mapping_for(mapped.device):
                    self._driver().close_memory(mapped.address)
            except (
                TransportUnavailable
            ) as error:  # the device is of no use any more, and what broke it is told elsewhere
                log_event("not_unmapped", logging.WARNING, owner=mapped.place[0], cause=f"{error}")

    def _driver(self) -> Memory:
        if self._memory is None:
            from mcore_reshard.kernels.cuda import ipc  # needs CUDA's Python packages

            self._memory = ipc
        return self._memory


def _handle_of(place: _Place) -> tuple[str, str, str]:
    """By what the driver knows a mapping: the owner's process, the device that reads, the handle."""
    _, process, device, allocation = place
    return process, device, allocation.handle


def _places(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[str, int, int], ...]:
    return tuple((name, tensor.data_ptr(), tensor.nbytes) for name, tensor in tensors.items())
