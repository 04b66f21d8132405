"""What one rank writes into the memory of another, wave by wave: the rank that pushes, and the one that is written.

    who is written   READY: all that it had queued is done; bytes land already                               hears DONE
    who pushes                                 queues its waves                     they have ended: DONE

Along a chain of replicas everything is pushed so (see `chain`). Training ranks push what they cast, unless it goes through `slots`,
and everything to GPUs that would read each other. They push at once, and who is written hears DONE in the next run, or if it takes
long: an event says earlier that all has landed.

    who is written   READY                                     returns when the event has happened
    who pushes                 queues all, records the event, READY          it has happened: DONE

A rank that fails ends its own pushes before it closes its connections, so that its peers know that they are written no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.copy_table import Ints
from mcore_reshard.kernels.copies.peer_table import PeerTable, peer_table
from mcore_reshard.kernels.copies.read_back import Executed
from mcore_reshard.kernels.copies.tensors import gpu_of
from mcore_reshard.kernels.cuda.cast_tiles import cut_rounds
from mcore_reshard.kernels.cuda.copy_kernel import DeviceGather, KernelShape, own_gpu_shape
from mcore_reshard.kernels.cuda.device_memory import is_plain
from mcore_reshard.kernels.cuda.executed_tiles import NameOf, PlacedCopies, computed_problems, tile_problems
from mcore_reshard.kernels.cuda.exported import Export
from mcore_reshard.kernels.cuda.ipc import export_event, open_event, withdraw_event
from mcore_reshard.kernels.cuda.streams import joined
from mcore_reshard.kernels.cuda.tiles import interleaved
from mcore_reshard.kernels.errors import DeadlineError, TransferError
from mcore_reshard.kernels.rendezvous.polling import CLOSE_S, EventPoller
from mcore_reshard.kernels.transports.kept import Kept, Mappings
from mcore_reshard.planner.plan.schedule import Schedule

from .event_wait import EventWait
from .peer_signals import PeerSignals, Signal
from .pull import DirectOptions, Pull, has_engine, parameter_of
from .shared_memory import addresses_of, fetch_exports, share_memory
from .staging import PUSHED_TILE_BYTES
from .waves import push_share, push_turns, waves_of

_EVENTS = "events/"  # of the keys under which a rank that pushes at once publishes its event
# Called when a wave is queued: it has been pushed, with all waves before, when these events have happened.
Pushed = Callable[[Sequence[torch.cuda.Event]], None]


class Pushes:
    """What a rank writes to others: its kernels, a copy engine's part, and the mappings that they write.

    `parts` of the schedule are bytes as they lie here, and what is cast; `waves` are those of their transfers, as
    `joined_transfers` has them. Ranks that are written have published their memory under `prefix`.
    """

    def __init__(
        self,
        bound: BoundSchedule,
        parts: tuple[Schedule, Schedule],
        waves: Sequence[Ints],
        signals: PeerSignals,
        kept: Kept,
        options: DirectOptions,
        *,
        prefix: str = "",
    ) -> None:
        device = bound.device or torch.device("cuda", torch.cuda.current_device())
        self._signals = signals
        self.peers: Set[int] = parts[0].peers | parts[1].peers  # that it writes to
        count = 1 + max(int(wave.max(initial=0)) for wave in waves)
        share, streams = push_share(count, options.engine_share)
        self._stream, *self._engine_streams = (torch.cuda.Stream(device) for _ in range(1 + streams))
        self._pushed = torch.cuda.Event(interprocess=True)
        self._mappings = kept.mappings(device)
        self._pushing = EventWait(signals, "the push")
        try:
            exports = fetch_exports(signals, kept, self.peers, prefix=prefix)
            gpus = {peer: {block.gpu for block in exported.allocations} for peer, exported in exports.items()}
            plain, cast = (
                _Part.of(bound.rows(part), wave, exports, self._mappings)
                for part, wave in zip(parts, waves, strict=True)
            )
            self._plain, found = _plain_waves(plain, device, options, share, gpus, self._engine_streams)
            self._cast, of_casts = _cast_waves(cast, device)
        except BaseException:
            self._mappings.close()
            raise
        self.table_bytes = sum(copies.nbytes for copies in self._plain.values())
        self.table_bytes += sum(gather.nbytes for gather in self._cast.values())
        self.executed = tuple(
            Executed(part.bound, reaches=part.table, device_problems=tuple(problems))
            for part, problems in ((plain, found), (cast, of_casts))
        )

    @classmethod
    def at_once(
        cls,
        bound: BoundSchedule,
        parts: tuple[Schedule, Schedule],
        signals: PeerSignals,
        kept: Kept,
        options: DirectOptions,
        *,
        prefix: str,
    ) -> Pushes:
        """All in one wave. Who is written can see on the GPU when it has ended."""
        waves = waves_of(parts, dict.fromkeys(parts[0].peers | parts[1].peers, 1))
        made = cls(bound, parts, waves, signals, kept, options, prefix=prefix)
        try:
            signals.publish(export_event(made._pushed, made._stream.device), prefix=_EVENTS)
        except BaseException:
            made.close()
            raise
        return made

    def prepare(self, settled: torch.cuda.Event) -> None:
        """Queue what may happen before others may be written: scales of casts. Everything comes after `settled`."""
        for stream in (self._stream, *self._engine_streams):  # now, not when others wait for what is pushed
            stream.wait_event(settled)
        for gather in self._cast.values():
            gather.launch_scales(self._stream)

    def begin(self, run: int) -> dict[int, float]:
        """Wait until all who are written are ready. Returns for how many seconds each goes on waiting.

        Raises an error where one of them has given up meanwhile, or left.
        """
        waits_s = self._signals.hear(run, Signal.READY, self.peers)
        for peer, left_s in waits_s.items():
            if left_s < 0:
                raise DeadlineError(self._signals.peers[peer], f"it gave up {-left_s:.0f} s before others were ready")
        self._signals.check_here(self.peers)
        return waits_s

    def launch(self, waves: Iterable[int], pushed: Pushed = lambda events: None) -> None:
        """Queue waves as they come. `pushed` is called for each of them."""
        with joined(self._stream, self._engine_streams):
            for wave in waves:
                if wave in self._plain:
                    self._plain[wave].queue(self._stream)
                if wave in self._cast:
                    self._cast[wave].launch_copies(self._stream)
                pushed([stream.record_event() for stream in (self._stream, *self._engine_streams)])
        self._pushed.record(self._stream)

    def end(self) -> None:
        """Wait until all pushes have ended."""
        self._pushing.wait(dict.fromkeys(self.peers, self._pushed))

    def close(self) -> None:
        """End all pushes, and unmap what they write."""
        is_used = True
        try:
            is_used = not EventPoller(CLOSE_S).until(self._stream.query)
        finally:  # also where the GPU is broken
            self._mappings.close(is_used=is_used)
            withdraw_event(self._pushed)


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows that a rank pushes of a part of its schedule: where they lie on both ends, and the wave of each."""

    bound: BoundSchedule
    table: PeerTable
    addresses: NDArray[np.uint64]  # of the bases of its copies
    placed: PlacedCopies
    wave: Ints  # [copies]

    @classmethod
    def of(cls, bound: BoundSchedule, wave: Ints, exports: Mapping[int, Export], mappings: Mappings) -> _Part:
        """`wave` is that of each transfer."""
        table = peer_table(bound.schedule)
        addresses = addresses_of(table, bound, exports, mappings)
        return cls(bound, table, addresses, PlacedCopies.of(table.copies, addresses), wave[table.transfer])

    def by_wave(self) -> Iterator[tuple[int, Ints]]:
        """The copies of each wave that has some, in order."""
        for number in np.unique(self.wave).tolist():
            yield number, np.flatnonzero(self.wave == number)

    def expected(self, rows: Ints) -> tuple[PlacedCopies, NameOf]:
        """What a device is to have of these copies, and the parameter of each."""
        return self.placed.only(rows), lambda copy: parameter_of(self.bound, self.table, int(rows[copy]))


def _plain_waves(
    part: _Part,
    device: torch.device,
    options: DirectOptions,
    share: float,
    gpus: Mapping[int, Collection[str]],
    engine_streams: Sequence[torch.cuda.Stream],
) -> tuple[dict[int, Pull], list[str]]:
    """Bytes as they lie here: (the copies of each wave, how what the device and the driver are told differs from the table).

    A copy engine writes large rows to other GPUs, its `share` of all, and a kernel everything else. An engine pushes or pulls at
    390 GB/s, and does one at a time: one that does both takes twice as long.
    """
    own, rank = gpu_of(device), part.bound.schedule.rank
    far = [peer for peer, of_peer in gpus.items() if own not in of_peer]
    # In virtual memory a row may go through several allocations.
    helps = has_engine(options) and all(map(is_plain, part.bound.tensors))
    turns = push_turns(rank, far) if helps else {}
    own_gpu = not far
    shape = options.shape or (own_gpu_shape(device) if own_gpu else KernelShape())
    options = replace(options, engine_share=share if helps else 0.0)
    waves: dict[int, Pull] = {}
    problems: list[str] = []
    for number, rows in part.by_wave():
        copies = waves[number] = Pull(
            part.table.copies[rows], part.addresses, device, shape, options,
            peer=part.table.peer[rows], by_engine=turns, first=rank, together=1, own_gpu=own_gpu,
            engine_streams=engine_streams,
        )  # fmt: skip
        problems += tile_problems(copies.read_back(), *part.expected(rows))
    return waves, problems


# All of a GPU that casts into others' memory. Each of two H200s did so for two more at 370 GB/s with 528 CTAs, 369 with 264,
# 352 with 198 and 326 with 88; with tiles of 128 KiB at 1% less. It made no difference that these pulled the rest meanwhile.
_SHAPE = KernelShape(ctas=528, threads=256)


def _cast_waves(part: _Part, device: torch.device) -> tuple[dict[int, DeviceGather], list[str]]:
    """What a training rank casts straight into the memory of others, and the scales; returns as `_plain_waves` does.

    It takes no scratch: the GPU reads a block, casts it in registers, and writes it over NVLink, as fast as others would pull
    what was cast before.
    """
    own, table = [tensor.data_ptr() for tensor in part.bound.tensors], part.table
    elements = [tensor.numel() for tensor in part.bound.tensors]
    rows_of = {}
    for number, rows in part.by_wave():
        # In turn to all readers, of which each begins at another source.
        rows_of[number] = rows[interleaved(table.peer[rows].astype(np.int64), part.bound.schedule.rank, together=1)]
    copies = [table.copies[rows] for rows in rows_of.values()]
    waves: dict[int, DeviceGather] = {}
    problems: list[str] = []
    cut = cut_rounds(copies, part.addresses, part.bound.casts, PUSHED_TILE_BYTES, elements)
    for (number, rows), tables in zip(rows_of.items(), cut, strict=True):
        gather = waves[number] = DeviceGather(tables, device, _SHAPE)
        placed, name_of = part.expected(rows)
        problems += gather.problems(placed, part.bound.casts, own, name_of)
    if not problems:
        problems = computed_problems(part.bound, copies, (gather.computed() for gather in waves.values()))
    return waves, problems


class Target:
    """What others write here: the `parts` of a schedule. Memory is published under `prefix`."""

    def __init__(
        self, bound: BoundSchedule, parts: Sequence[Schedule], signals: PeerSignals, kept: Kept, *, prefix: str = ""
    ) -> None:
        self._device = bound.device or torch.device("cuda", torch.cuda.current_device())
        self._signals = signals
        self._peers = frozenset[int]().union(*(part.peers for part in parts))
        self._settling = EventWait(signals, "what was queued before the refit")
        self._settled = torch.cuda.Event()
        self._pushing = EventWait(signals, "the push")
        self._pushed: dict[int, torch.cuda.Event] = {}  # happened: a peer's last push has ended
        self._not_done: int | None = None  # the run whose DONE has not been received yet
        self._run, self._left = 0, set[int]()  # the last run, and who may write here still
        self._is_overdue = False  # a wait was: then gloo has closed its connection, and the writer may not know it yet
        share_memory(signals, kept, bound.by_name, prefix=prefix)
        self.executed = tuple(Executed(bound.rows(part), exposed=part) for part in parts)

    def fetch_events(self) -> None:
        """Get the events of those who push here at once."""
        parse = partial(open_event, device=self._device)
        self._pushed = {peer: self._signals.fetch(peer, parse, prefix=_EVENTS) for peer in self._peers}

    def settle(self) -> None:
        """Note what is queued on the caller's stream by now."""
        self._settled.record(torch.cuda.current_stream(self._device))

    def await_settled(self) -> None:
        """Wait until what was noted is done."""
        self._settling.wait(dict.fromkeys(self._peers, self._settled))

    def admit(self, run: int) -> None:
        """Let others write here."""
        self._run, self._left = run, {*self._peers}
        self._signals.tell(run, Signal.READY, self._peers)

    def hear(self, run: int, signal: int, peers: Collection[int] | None = None) -> None:
        """Wait until those who write here, by default all, have sent `signal`."""
        try:
            self._signals.hear(run, signal, self._peers if peers is None else peers)
        except DeadlineError:
            self._is_overdue = True
            raise

    def await_pushed(self, begin: float) -> None:
        """Wait for the events of those who push here at once; all had said so by `begin`. If it takes long, for their words."""
        self._not_done = self._run
        self._pushing.wait(self._pushed, begin, when_late=self.hear_done)
        self._left.clear()

    def hear_done(self) -> None:
        """Hear what those who push here said when they were done: in this run, or in the one before, of which all has landed."""
        run, self._not_done = self._not_done, None
        if run == self._run:
            self.end(run)
        elif run is not None:
            self.hear(run, Signal.DONE)

    def end(self, run: int) -> None:
        """Wait until others say that they have written everything."""
        for peer in self._peers:
            self.hear(run, Signal.DONE, [peer])
            self._left.discard(peer)

    def close(self) -> None:
        """Returns once this rank is written no more. After a failure it waits CLOSE_S at most."""
        deadline = time.monotonic() + CLOSE_S
        if self._left and self._is_overdue:
            time.sleep(CLOSE_S)
        while self._left:  # each says that it is done, or closes the connection when it is
            with suppress(TransferError):
                peer = self._left.pop()
                self._signals.hear_last(self._run, Signal.DONE, peer, deadline - time.monotonic())
