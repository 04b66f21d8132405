"""Memory that processes could share, and a transport that shares it as `direct` does, on a CPU: gloo moves the bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from hashlib import sha512
from itertools import count
from threading import local
from typing import Any
from uuid import uuid4

import torch

from mcore_reshard.kernels.cuda.exported import Allocation, Export
from mcore_reshard.kernels.host import host
from mcore_reshard.kernels.rendezvous.store_keys import FailFastStore
from mcore_reshard.kernels.transports import registry
from mcore_reshard.kernels.transports.base import TransportContext
from mcore_reshard.kernels.transports.direct.peer_signals import PeerSignals
from mcore_reshard.kernels.transports.direct.shared_memory import fetch_exports, share_memory
from mcore_reshard.kernels.transports.gloo import GlooExecutor
from mcore_reshard.kernels.transports.kept import Kept
from mcore_reshard.kernels.transports.relay import connect_each, connect_relayed


class FakeMemory:
    """A driver: every tensor is an allocation of its own. A handle says its process and address, as CUDA's may."""

    gpu = "GPU-0"

    def __init__(self, process: str | None = None) -> None:
        self._process = process
        self._number = uuid4().hex
        self._serials = count(1)
        self.serials: dict[int, int] = {}  # by address
        self.addresses = count(1 << 40, 1 << 20)
        self.opened: list[tuple[str, str]] = []  # (owner, handle), ever
        self.open: dict[int, Allocation] = {}
        self._thread = local()  # device: that is mapped for

    def process(self) -> str:
        return self._process or f"{self._number}-{os.getpid()}"

    def allocate_anew(self, tensor: torch.Tensor) -> None:
        """As if the tensor's memory had been freed, and got the same address again."""
        self.serials[tensor.data_ptr()] = next(self._serials)

    def export(self, tensors: Mapping[str, torch.Tensor]) -> Export:
        allocations, places = [], {}
        for name, tensor in tensors.items():
            address = tensor.data_ptr()
            serial = self.serials.setdefault(address, next(self._serials))
            handle = sha512(f"{self.process()} {address}".encode()).hexdigest()
            places[name] = (len(allocations), 0)
            allocations.append(Allocation(handle, address, max(1, tensor.nbytes), self.gpu, serial))
        return Export(host(), self.process(), tuple(allocations), places)

    def serial_of(self, address: int) -> int | None:
        return self.serials.get(address)

    @contextmanager
    def mapping_for(self, device: torch.device) -> Iterator[None]:
        before, self._thread.device = self._device, device
        try:
            yield
        finally:
            self._thread.device = before

    @property
    def _device(self) -> torch.device | None:
        return getattr(self._thread, "device", None)

    def open_memory(self, allocation: Allocation, owner: str) -> int:
        assert self._device is not None, "the driver does not know for which device"
        for each in self.open.values():
            assert each.handle != allocation.handle or each == allocation, "CUDA would map what was there before"
        self.opened.append((owner, allocation.handle))
        address = next(self.addresses)
        self.open[address] = allocation
        return address

    def close_memory(self, address: int) -> None:
        assert self._device is not None, "the driver does not know on which device"
        del self.open[address]


class SharingExecutor(GlooExecutor):
    """Moves bytes by gloo, and exports and maps what `direct` would."""

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context.group, context.bound)
        self._own_kept = Kept()  # of a copy from another replica, which keeps nothing
        bound, kept = context.bound, context.kept or self._own_kept
        self._signals = PeerSignals(FailFastStore("signals", context.store), bound, context.options.timeout_s)
        self._mappings = kept.mappings(torch.device("cpu"))
        if bound.schedule.world == "train":
            share_memory(self._signals, kept, bound.by_name)
            return
        for peer, exported in fetch_exports(self._signals, kept, self._signals.peers).items():
            addresses = self._mappings.addresses(exported, exported.tensors, bound.schedule.name_of("train", peer))
            memory: Any = kept._memory
            mapped = [memory.open[address] for address in addresses]
            assert mapped == [*exported.allocations], "what is mapped is what the source exports now"

    def close(self) -> None:
        self._mappings.close()
        self._own_kept.close()
        self._signals.close()
        super().close()


def share_over_gloo() -> None:
    """Have `gloo` of this process share memory."""
    memory = FakeMemory()
    parts = connect_each(SharingExecutor)
    connect = partial(connect_relayed, parts, parts)
    registry._transports["gloo"] = replace(registry._transports["gloo"], connect=connect)
    Kept._driver = lambda self: _given(self, memory)  # type: ignore[method-assign]


def _given(kept: Kept, memory: FakeMemory) -> FakeMemory:
    kept._memory = memory
    return memory
