"""The direct transport without a GPU: its kernels walk their tiles on the CPU, in memory that all ranks share.

Ranks are forked from a process that has allocated the tensors of all of them in shared memory, so that each tensor has one
address everywhere. Streams and events are stand-ins: what is queued is done at once. Everything else is real.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import synthetic
import torch
from helpers.fake_memory import FakeMemory
from helpers.ranks import store_of
from helpers.tiles import run_blocks, run_cast_tiles, run_tiles
from helpers.ways import rounds_stand_in
from numpy.typing import NDArray

from mcore_reshard.kernels.copies import bind as binding
from mcore_reshard.kernels.copies.executed import executed_digests
from mcore_reshard.kernels.cuda import copy_engine, engine_rows
from mcore_reshard.kernels.cuda.cast_tiles import GatherTables, blocks_of
from mcore_reshard.kernels.cuda.exported import Allocation, Export
from mcore_reshard.kernels.errors import TransportUnavailable
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup
from mcore_reshard.kernels.transports import registry
from mcore_reshard.kernels.transports.base import Transport, TransportContext
from mcore_reshard.kernels.transports.group_ranks import group_names
from mcore_reshard.kernels.transports.kept import Kept
from mcore_reshard.kernels.transports.mixed import Way, connect_by_pair
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import World

REFITS = 2
SLAB, SLAB_BYTES = "slab", 8 << 20
SCRATCH_BYTES = 64 << 10
Tensors = Mapping[str, torch.Tensor]


class OneAddressSpace(FakeMemory):
    """Memory that has the same address in all processes."""

    def open_memory(self, allocation: Allocation, owner: str) -> int:
        self.open[allocation.address] = allocation
        return allocation.address


class UnmappedMemory(OneAddressSpace):
    """Memory that other processes cannot map."""

    def export(self, tensors: Tensors) -> Export:
        raise TransportUnavailable("virtual memory")


class CpuCopies:
    """DeviceCopies on the CPU."""

    def __init__(self, tiles: NDArray[np.void], *_: Any, **__: Any) -> None:
        self._tiles, self.nbytes = tiles.copy(), tiles.nbytes

    def launch(self, stream: Any) -> None:
        run_tiles(self._tiles)

    def read_back(self) -> NDArray[np.void]:
        return self._tiles.copy()

    def damaged(self) -> NDArray[np.int64]:
        return np.zeros(0, np.int64)


class CpuGather:
    """DeviceGather on the CPU."""

    nbytes = 0

    def __init__(self, tables: GatherTables, *_: Any) -> None:
        self._tables = GatherTables(*(table.copy() for table in tables))

    def launch(self, stream: Any) -> None:
        self.launch_scales(stream)
        self.launch_copies(stream)

    def launch_scales(self, stream: Any) -> None:
        run_blocks(self._tables.scales)

    def launch_copies(self, stream: Any) -> None:
        run_blocks(blocks_of(self._tables.blocks))
        for tiles in (self._tables.blocks, self._tables.cast):
            run_cast_tiles(tiles)
        run_tiles(self._tables.plain)

    def problems(self, *_: Any) -> list[str]:
        return []

    def computed(self) -> NDArray[np.void]:
        return np.concatenate([self._tables.scales, blocks_of(self._tables.blocks)])


class Slab:
    """Shared memory of one rank, for what it allocates after it was forked; torch in its place for everything else."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory, self._used = memory, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, nbytes: int, **_: Any) -> torch.Tensor:
        begin, self._used = self._used, self._used + -(-nbytes // 64) * 64
        assert self._used <= len(self._memory)
        return self._memory[begin : begin + nbytes]

    def zeros(self, shape: Sequence[int], *, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        return self.empty(prod(shape) * dtype.itemsize).zero_().view(dtype).reshape(*shape)

    def zeros_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.zeros(tensor.shape, dtype=tensor.dtype)


class Event:
    """An event that has happened."""

    def __init__(self, **_: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def ipc_handle(self) -> bytes:
        return id(self).to_bytes(64, "little")

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> Event:
        return cls()


class Stream:
    """A stream that is never behind."""

    device, cuda_stream = torch.device("cpu"), 0

    def __init__(self, *_: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> Event:
        return Event()

    def query(self) -> bool:
        return True


def copy_rows(dst: int, src: int, nbytes: int, count: int, *_: Any) -> int:
    """A call of the driver: copies are of bytes, and none fails."""
    for to, of, size in zip(
        *((ctypes.c_uint64 * count).from_address(each) for each in (dst, src, nbytes)), strict=True
    ):
        ctypes.memmove(to, of, size)
    return 0


def of_all_ranks(plan: Plan) -> list[Tensors]:
    """The tensors of every rank, training ranks first, in shared memory. Call it before ranks are forked."""
    worlds: list[tuple[World, int]] = [("train", plan.train.world), ("gen", plan.gen.world)]
    held = []
    for world, ranks in worlds:
        for rank in range(ranks):
            tensors = synthetic.allocate(schedule_of(plan, world, rank), torch.device("cpu"))
            if world == "train":
                synthetic.fill(plan, world, rank, tensors)
            slab = {SLAB: torch.empty(SLAB_BYTES, dtype=torch.uint8)} if world == "train" else {}
            held.append({name: tensor.share_memory_() for name, tensor in (tensors | slab).items()})
    return held


def import_no_cuda() -> None:
    """Of this process alone, as all that `refit` changes."""
    for name in ("cuda", "cuda.bindings", "cuda.core"):
        sys.modules[name] = MagicMock()


def refit(
    number: int,
    address: str,
    plan: Plan,
    held: list[Tensors],
    waves: int,
    *,
    by_pair: bool = False,
    early: bool = False,
    sleeping: Collection[int] = (),
    checksums: bool = False,
    engine: bool = False,
    apart: bool = False,
    gpus: Sequence[int] = (),
    shared: bool = False,
) -> tuple[str, str, dict[str, str], dict[str, int]]:
    """Rank `number` refits: (executor, end of it, digests of what it executes, wrong elements by parameter).

    With `by_pair` pairs in MCORE_RESHARD_UNREACHABLE go by a stand-in for nccl. `early`: replicas pass all on in the
    first wave.
    Nobody else can map the memory of engine ranks that are `sleeping`. `engine`: there is a copy engine. All sources are on
    one GPU, or on one each where they are `apart`, or on `gpus` [ranks]. `shared`: as on a GPU that both sides share.
    """
    import_no_cuda()
    torch.cuda.Stream, torch.cuda.Event = Stream, Event  # type: ignore[misc, assignment]
    torch.cuda.device = lambda device: nullcontext()  # type: ignore[assignment, misc]
    torch.cuda.current_device = lambda: 0  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda device: MagicMock(multi_processor_count=132, major=9, minor=0)  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda device=None: Stream()  # type: ignore[assignment, misc]
    from mcore_reshard.kernels.transports.direct import chain, ends, pull, pushes, slots

    pull.DeviceCopies = CpuCopies  # type: ignore[misc, assignment]
    ends.is_plain = pushes.is_plain = lambda tensor: True  # type: ignore[assignment]
    pull.is_available = lambda: engine  # type: ignore[assignment]
    engine_rows.LEAST_BYTES, engine_rows._ROW_COST_BYTES, engine_rows._ROW_COST_OVER_SEVERAL = 1, 0, 0
    copy_engine._batch_call = lambda: copy_rows  # type: ignore[assignment]
    chain.waves_for = lambda nbytes: waves  # type: ignore[assignment]
    if early:
        passing, launch = chain.passing_waves, pushes.Pushes.launch

        def launch_late(self: Any, waves: Iterable[int], *others: Any) -> None:
            launch(self, (time.sleep(0.2 * bool(wave)) or wave for wave in waves), *others)

        chain.passing_waves = lambda *given: np.zeros_like(passing(*given))
        pushes.Pushes.launch = launch_late  # type: ignore[method-assign]
    train = plan.train.world
    world, rank = ("train", number) if number < train else ("gen", number - train)
    schedule = schedule_of(plan, world, rank)  # type: ignore[arg-type]
    tensors = dict(held[number])
    slab = Slab(tensors.pop(SLAB, torch.empty(0, dtype=torch.uint8)))
    memory: FakeMemory = UnmappedMemory() if world == "gen" and rank in sleeping else OneAddressSpace()
    memory.gpu = f"GPU-{number}" if apart else f"GPU-{gpus[number]}" if gpus else memory.gpu
    slots.DeviceGather = pushes.DeviceGather = CpuGather  # type: ignore[misc, assignment]
    if shared:
        slots.gpu_of = lambda device: memory.gpu  # type: ignore[assignment]
    if gpus:
        ends.gpu_of = pushes.gpu_of = slots.gpu_of = lambda device: memory.gpu  # type: ignore[assignment]
    slots.torch, slots.export = slab, memory.export  # type: ignore[attr-defined, misc, assignment]
    binding.torch = slab  # type: ignore[assignment]  # scales that casts compute
    bound = binding.bind(schedule, tensors)
    store, options = store_of(address), Options(timeout_s=20.0, scratch_bytes=SCRATCH_BYTES, checksums=checksums)
    group = GlooGroup(store.under("group"), number, group_names(schedule), timeout_s=options.timeout_s)
    context = TransportContext(store.under("link"), group, bound, options, Kept(memory=memory))
    connect = registry._connect_whole
    if by_pair:
        direct = Transport("direct", frozenset({"cpu"}), "", lambda: None, connect)
        ways = Way(direct, registry._direct_parts), rounds_stand_in("far")
        connect = partial(connect_by_pair, direct=ways[0], nccl=ways[1])
    executor: Any = connect(context)
    wrong: dict[str, int] = {}
    for version in range(REFITS):
        if world == "gen":
            for tensor in tensors.values():
                tensor.view(torch.uint8).fill_(synthetic.POISON)
        store.set(f"poisoned/{version}/{number}", "")
        store.wait([f"poisoned/{version}/{other}" for other in range(len(held))])
        executor.run()
        if world == "gen":
            wrong |= synthetic.wrong_elements(plan, "gen", rank, tensors)
        store.set(f"read/{version}/{number}", "")
        store.wait([f"read/{version}/{other}" for other in range(len(held))])
    digests = executed_digests([(context.bound, executor.executed)])
    end = _described(getattr(executor, "_end", executor))
    name = executor.name
    executor.close()
    group.close()
    return name, end, digests, wrong


def _described(end: Any) -> str:
    name = type(end).__name__
    pushes = getattr(end, "_pushes", None)
    copies = [*pushes._plain.values()] if pushes is not None else []
    if name == "Source" and pushes is not None:
        name += " that pushes" if not pushes._cast else " that pushes casts" if not copies else " that pushes all"
    if name == "Reader":
        copies = [end._copies, *(each.copies for each in end._slots._rounds)]
    if any(each._engine is not None for each in copies):
        name += " with an engine"
    return f"{name} that is written" if name.startswith("Reader") and end._target is not None else name
