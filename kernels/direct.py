"""Generation ranks read the weights straight out of the training ranks' memory: one NVLink domain, or one GPU.

Training ranks export their allocations once. Each generation rank maps what it needs and, in each refit, pulls
everything with one kernel launch: nothing is staged, and the host does nothing per parameter. One launch takes from all
stages and sources at once, a little from each in turn, so that no source has to serve all receivers while others idle.

Ordering takes two words of 16 bytes between each pair of ranks, over the session's CPU messages, which also find out
when a peer dies: a training rank says `ready` when all that it has queued on its current stream is done, and returns
when all its readers have said `done`, which they do when their kernel has ended. So a source is not read before it is
ready, and may be overwritten as soon as `run` returns. The cost is two host synchronisations and two messages on the
path, about a tenth of a millisecond in all.
"""

from __future__ import annotations

import json
import struct
import time
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import DistStoreError, Store

from mcore_reshard.planner.schedule import Schedule, TransferTable, World

from .device_copies import DeviceCopies, KernelShape
from .errors import ChecksumError, DeadlineError, SessionError, TransferError, TransportUnavailable, Waiting
from .ipc import Export, Mappings, export
from .pipeline import Group, StageReport, group_rank, other_world
from .program import Program, rank_name
from .pulling import pull_table
from .tiles import check_tile_bytes, cut_tiles, interleaved

DEFAULT_TILE_BYTES = 128 << 10
_WORD = struct.Struct("<qq")  # the run it belongs to, and _READY or _DONE
_READY, _DONE = 1, 2
_POLL_S = 50e-6
_NAPPING = 0.95  # share of the fastest refit's time that is slept through before polling


@dataclass(frozen=True, slots=True)
class DirectOptions:
    """How generation ranks pull. What training ranks are given does not matter."""

    shape: KernelShape = KernelShape()  # noqa: RUF009  `ctas` bounds what it takes of a GPU that generates meanwhile
    tile_bytes: int = DEFAULT_TILE_BYTES
    checksums: bool = False  # sum every tile as it is read and as it was written, and compare

    def __post_init__(self) -> None:
        check_tile_bytes(self.tile_bytes)


class DirectExecutor:
    """One rank's end of the direct transport. Constructed on all ranks at the same time; `store` is its own.

    Raises `TransportUnavailable` where memory cannot be exported or mapped, `SessionError` if a source failed to
    export, `DeadlineError` if one is silent. Tensors of training ranks must outlive the generation ranks' `close`.
    """

    def __init__(
        self,
        store: Store,
        group: Group,
        program: Program,
        *,
        timeout_s: float,
        options: DirectOptions = DirectOptions(),
    ) -> None:
        self._program = program
        self._ends = _Ends(group, program, timeout_s)
        self._runs = 0
        self._reader: _Reader | None = None
        if program.schedule.world == "train":
            _publish(store, program)
        else:
            self._reader = _Reader(store, program, self._ends.peers, timeout_s, options)

    @property
    def scratch_bytes(self) -> int:
        """0: bytes go from tensor to tensor. The kernel's table is `table_bytes`."""
        return 0

    @property
    def table_bytes(self) -> int:
        """GPU memory of what the kernel walks, and of its checksums."""
        return self._reader.table_bytes if self._reader else 0

    def run(self) -> tuple[StageReport, ...]:
        """Move every byte once. On a training rank: until all readers are done. Stages move together, in one launch.

        Raises `DeadlineError`, `PeerLostError` or `ChecksumError`. What a training rank's readers hold after an error
        is not known, and nor is when they stop reading: they may do so until the session is closed everywhere.
        """
        self._runs += 1
        start = time.perf_counter()
        if self._reader is None:
            _finish(_recorded(self._program.device), self._ends.timeout_s, 0.0, self._ends.any_waiting)
            self._ends.tell(self._runs, _READY)
            self._ends.hear(self._runs, _DONE)
        else:
            self._ends.hear(self._runs, _READY)
            self._reader.pull()
            self._ends.tell(self._runs, _DONE)
        seconds = time.perf_counter() - start
        return tuple(
            StageReport(stage.pp_stage, stage.transfers, 0, stage.nbytes, seconds if stage.transfers else 0.0)
            for stage in self._program.stages
        )

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


class _Ends:
    """The peers that this rank exchanges bytes with, and the words that pass between them."""

    def __init__(self, group: Group, program: Program, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._group = group
        self._schedule = program.schedule
        self._other: World = other_world(program.schedule.world)
        self._waiting = _waiting_by_peer(program)

    @property
    def peers(self) -> dict[int, Waiting]:
        return self._waiting

    @property
    def any_waiting(self) -> Waiting:
        return next(iter(self._waiting.values()), Waiting(_name(self._schedule), "nobody", None, "nothing", False))

    def tell(self, run: int, word: int) -> None:
        """Say `word` to every peer."""
        content = _WORD.pack(run, word)
        messages = [
            self._group.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), self._address(peer), waiting)
            for peer, waiting in self._waiting.items()
        ]
        for message in messages:
            message.wait()

    def hear(self, run: int, word: int) -> None:
        """Wait until every peer has said `word`."""
        buffers = {peer: torch.empty(_WORD.size, dtype=torch.uint8) for peer in self._waiting}
        messages = {
            peer: self._group.recv(buffer, self._address(peer), self._waiting[peer]) for peer, buffer in buffers.items()
        }
        for peer, message in messages.items():
            message.wait()
            if (heard := _WORD.unpack(buffers[peer].numpy().tobytes())) != (run, word):
                raise TransferError(self._waiting[peer], f"(run, word) {heard} came in place of {(run, word)}")

    def _address(self, peer: int) -> int:
        return group_rank(self._schedule, self._other, peer)


class _Reader:
    """A generation rank's kernel, and the mappings that it reads."""

    def __init__(
        self, store: Store, program: Program, sources: dict[int, Waiting], timeout_s: float, options: DirectOptions
    ) -> None:
        schedule = program.schedule
        if schedule.pulls is None:
            raise SessionError(f"{program.rank}: this schedule does not say where its bytes lie at their sources")
        self._program = program
        self._timeout_s = timeout_s
        self._sources = sources
        self._fastest_s = float("inf")
        self._table = pull_table(schedule, schedule.pulls())
        self._mappings: Mappings | None = None
        self._copies: DeviceCopies | None = None
        if not len(self._table.copies):
            return
        device = program.device
        assert device is not None, "there are copies, so there are tensors"
        self._mappings = Mappings(device)
        try:
            addresses = self._addresses({peer: _fetch(store, peer, sources[peer], timeout_s) for peer in sources})
            tiles = cut_tiles(self._table.copies, addresses, options.tile_bytes)
            order = interleaved(_numbered(self._table.peer[tiles["copy"]]), schedule.rank)
            self._copies = DeviceCopies(tiles[order], device, options.shape, checksums=options.checksums)
        except BaseException:
            self._mappings.close()
            raise
        self._stream = torch.cuda.Stream(device)

    @property
    def table_bytes(self) -> int:
        return self._copies.nbytes if self._copies else 0

    def pull(self) -> None:
        """Copy everything, after all that is queued on the current stream; return when it is in place."""
        if self._copies is None:
            return
        start = time.perf_counter()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._copies.launch(self._stream)
        expected_s = self._fastest_s if self._fastest_s < float("inf") else 0.0
        _finish(self._stream.record_event(), self._timeout_s, expected_s, next(iter(self._sources.values())))
        self._fastest_s = min(self._fastest_s, time.perf_counter() - start)
        for copy in self._copies.damaged().tolist():
            raise ChecksumError(self._waiting_for(copy), "other bytes were written than were read")

    def close(self) -> None:
        """Unmap the sources. After a kernel that never ended this waits as long as the kernel runs."""
        self._copies = None
        if self._mappings is not None:
            torch.cuda.synchronize(self._stream.device)
            self._mappings.close()

    def _addresses(self, exports: dict[int, Export]) -> NDArray[np.uint64]:
        """Where each base of the table's copies begins: own tensors, then sources."""
        assert self._mappings is not None
        own = [tensor.data_ptr() for tensor in self._program.tensors]
        theirs = np.zeros(len(self._table.sources), np.uint64)
        ranks = np.array([source.rank for source in self._table.sources])
        read = np.isin(np.arange(len(theirs)) + len(own), self._table.copies["src"])  # not: empty tensors
        for rank, exported in exports.items():
            rows = np.flatnonzero((ranks == rank) & read)
            names = (self._table.sources[row].tensor for row in rows.tolist())
            theirs[rows] = self._mappings.addresses(exported, names, rank_name("train", rank))
        return np.concatenate([np.array(own, np.uint64), theirs])

    def _waiting_for(self, copy: int) -> Waiting:
        table = self._table
        stage = self._program.stages[int(table.stage[copy])].pp_stage
        name = self._program.schedule.parameter_name(int(table.bundle[copy]), int(table.member[copy]))
        return Waiting(self._program.rank, rank_name("train", int(table.peer[copy])), stage, name, sends=False)


def _publish(store: Store, program: Program) -> None:
    """Tell readers where this rank's tensors are, or why they cannot be read."""
    schedule = program.schedule
    key = rank_name(schedule.world, schedule.rank)
    tensors = dict(zip((local.name for local in schedule.tensors), program.tensors, strict=True))
    try:
        exported = export(tensors)
    except TransportUnavailable as error:
        store.set(key, json.dumps({"failed": str(error)}))
        raise
    store.set(key, exported.to_json())


def _fetch(store: Store, rank: int, waiting: Waiting, timeout_s: float) -> Export:
    key = rank_name("train", rank)
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except DistStoreError as error:
        raise DeadlineError(waiting, f"{key} exported nothing within {timeout_s:g} s") from error
    text = store.get(key)
    if reason := json.loads(text).get("failed"):
        raise SessionError(f"{key} cannot be read: {reason}")
    return Export.from_json(text)


def _waiting_by_peer(program: Program) -> dict[int, Waiting]:
    """The ranks that this one moves bytes to or from, with the first parameter between them; in rotated order."""
    schedule = program.schedule
    found: dict[int, Waiting] = {}
    for stage in schedule.stages:
        sends = schedule.world == "train"
        table: TransferTable = stage.sends if sends else stage.recvs
        for peer, row in zip(*(column.tolist() for column in np.unique(table.peer, return_index=True)), strict=True):
            name = schedule.parameter_name(int(table.bundle[row]), int(table.member[row]))
            other = rank_name(other_world(schedule.world), peer)
            found.setdefault(peer, Waiting(_name(schedule), other, stage.pp_stage, name, sends))
    size = max(schedule.train_ranks, schedule.gen_ranks)
    return dict(sorted(found.items(), key=lambda item: (item[0] - schedule.rank) % size))


def _name(schedule: Schedule) -> str:
    return rank_name(schedule.world, schedule.rank)


def _numbered(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Values replaced by their rank among the distinct ones: [3, 7, 3] -> [0, 1, 0]."""
    return np.unique(values, return_inverse=True)[1].reshape(-1)


def _recorded(device: torch.device | None) -> torch.cuda.Event | None:
    return torch.cuda.current_stream(device).record_event() if device is not None else None


def _finish(event: torch.cuda.Event | None, timeout_s: float, expected_s: float, waiting: Waiting) -> None:
    """Wait for an event without keeping the CPU busy: sleep nearly as long as it should take, then look often."""
    if event is None:
        return
    deadline = time.monotonic() + timeout_s
    if not _happened(event, waiting):
        time.sleep(min(_NAPPING * expected_s, timeout_s))
    while not _happened(event, waiting):
        if time.monotonic() > deadline:
            raise DeadlineError(waiting, f"the GPU did not finish within {timeout_s:g} s")
        time.sleep(_POLL_S)


def _happened(event: torch.cuda.Event, waiting: Waiting) -> bool:
    try:
        return bool(event.query())
    except RuntimeError as error:
        raise TransferError(waiting, f"the GPU reports: {error}") from error
