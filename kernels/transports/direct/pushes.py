"""What one rank writes into the memory of another, wave by wave: the rank that pushes, and the one that is written.

    who is written   READY: all that it had queued is done; bytes land already                               hears DONE
    who pushes                                 queues its waves                     they have ended: DONE

Training ranks push what they cast. Along a chain of replicas everything is pushed (see `chain`).
A rank that fails ends its own pushes before it closes its connections, so that its peers know that they are written no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.copy_table import Ints
from mcore_reshard.kernels.copies.peer_table import PeerTable, peer_table
from mcore_reshard.kernels.copies.read_back import Executed
from mcore_reshard.kernels.copies.tensors import gpu_of
from mcore_reshard.kernels.cuda.copy_kernel import DeviceGather, KernelShape, own_gpu_shape
from mcore_reshard.kernels.cuda.device_memory import is_plain
from mcore_reshard.kernels.cuda.engine_rows import ALL_ROWS
from mcore_reshard.kernels.cuda.executed_tiles import NameOf, PlacedCopies, tile_problems
from mcore_reshard.kernels.cuda.streams import forked
from mcore_reshard.kernels.cuda.tiles import interleaved
from mcore_reshard.kernels.errors import DeadlineError, TransferError
from mcore_reshard.kernels.rendezvous.polling import CLOSE_S, EventPoller
from mcore_reshard.kernels.transports.kept import Kept
from mcore_reshard.planner.plan.schedule import Schedule

from .event_wait import EventWait
from .peer_signals import PeerSignals, Signal
from .pull import DirectOptions, Pull, has_engine, parameter_of
from .shared_memory import addresses_of, fetch_exports, share_memory
from .staging import PUSHED_TILE_BYTES, new_weights
from .waves import waves_of

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
        # A single stream for the copy engine, which of several would take one to its end before it goes on with others.
        self._stream, self._engine_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._pushed = torch.cuda.Event()
        self.patience: dict[int, float] = {}  # seconds: for how long each of them waited when the last run began
        self._mappings = kept.mappings(device)
        self._pushing = EventWait(signals, "the push")
        plain, cast = (bound.rows(part) for part in parts)
        tables = peer_table(plain.schedule), peer_table(cast.schedule)
        try:
            exports = fetch_exports(signals, kept, self.peers, prefix=prefix)
            gpus = {peer: {block.gpu for block in exported.allocations} for peer, exported in exports.items()}
            addresses = [
                addresses_of(table, each, exports, self._mappings)
                for table, each in zip(tables, (plain, cast), strict=True)
            ]
            self._plain = _PlainWaves(
                plain, tables[0], waves[0], addresses[0], device, options, gpus, self._engine_stream
            )
            self._cast = _CastWaves(cast, tables[1], waves[1], addresses[1], device)
        except BaseException:
            self._mappings.close()
            raise
        self.table_bytes = self._plain.nbytes + self._cast.nbytes
        problems = tuple(self._plain.problems), tuple(self._cast.problems)
        self.executed = tuple(
            Executed(each, reaches=table, device_problems=found)
            for each, table, found in zip((plain, cast), tables, problems, strict=True)
        )

    @classmethod
    def of_casts(cls, bound: BoundSchedule, signals: PeerSignals, kept: Kept, *, prefix: str) -> Pushes:
        """All of a schedule, which is cast, at once."""
        parts = bound.schedule.with_peers(()), bound.schedule
        waves = waves_of(parts, dict.fromkeys(bound.schedule.peers, 1))
        return cls(bound, parts, waves, signals, kept, DirectOptions(), prefix=prefix)

    def prepare(self, settled: torch.cuda.Event) -> None:
        """Queue what may happen before others may be written, once `settled` has happened: scales of casts."""
        self._stream.wait_event(settled)
        self._cast.launch_scales(self._stream)

    def begin(self, run: int) -> None:
        """Wait until all who are written are ready. Raises an error where one of them has given up meanwhile, or left."""
        self.patience.update(self._signals.hear(run, Signal.READY, self.peers))
        for peer, left_s in self.patience.items():
            if left_s < 0:
                raise DeadlineError(self._signals.peers[peer], f"it gave up {-left_s:.0f} s before others were ready")
        self._signals.check_here(self.peers)

    def launch(self, waves: Iterable[int], pushed: Pushed = lambda events: None) -> None:
        """Queue waves as they come. `pushed` is called for each of them."""
        with forked(self._stream, [self._engine_stream]):
            for wave in waves:
                self._plain.launch(wave, self._stream)
                self._cast.launch(wave, self._stream)
                pushed([self._stream.record_event(), self._engine_stream.record_event()])

    def end(self) -> None:
        """Wait until all pushes have ended."""
        self._pushed.record(self._stream)
        self._pushing.wait(dict.fromkeys(self.peers, self._pushed))

    def close(self) -> None:
        """End all pushes, and unmap what they write."""
        is_used = True
        try:
            is_used = not EventPoller(CLOSE_S).until(self._stream.query)
        finally:  # also where the GPU is broken
            self._mappings.close(is_used=is_used)


class _PlainWaves:
    """Bytes as they lie here: a copy engine writes large rows to other GPUs, a kernel everything else.

    GPUs that push to each other do so at 391 GB/s by copy engines, and pull at 373 (H200s). An engine does one at a time: one that
    pulls and pushes takes twice as long.
    """

    def __init__(
        self,
        bound: BoundSchedule,
        table: PeerTable,
        wave: Ints,
        addresses: NDArray[np.uint64],
        device: torch.device,
        options: DirectOptions,
        gpus: Mapping[int, Collection[str]],
        engine_stream: torch.cuda.Stream,
    ) -> None:
        own, rank = gpu_of(device), bound.schedule.rank
        far = [peer for peer, of_peer in sorted(gpus.items()) if own not in of_peer]
        # In virtual memory a row may go through several allocations.
        helps = has_engine(options) and all(map(is_plain, bound.tensors))
        # To one after the other in each wave: ranks that push to the same ones begin with another one each.
        turns = {peer: (number - rank) % len(far) for number, peer in enumerate(far)} if helps else {}
        own_gpu = not far
        shape = options.shape or (own_gpu_shape(device) if own_gpu else KernelShape())
        options = replace(options, engine_share=ALL_ROWS if helps else 0.0)
        placed, name_of = PlacedCopies.of(table.copies, addresses), partial(parameter_of, bound, table)
        self._waves: dict[int, Pull] = {}
        self.problems: list[str] = []
        for number, rows in _by_wave(wave[table.transfer]):
            copies = self._waves[number] = Pull(
                table.copies[rows], addresses, device, shape, options,
                peer=table.peer[rows], by_engine=turns, first=rank, together=1, own_gpu=own_gpu, engine_streams=[engine_stream],
            )  # fmt: skip
            self.problems += tile_problems(copies.read_back(), placed.only(rows), partial(_name_of, name_of, rows))
        self.nbytes = sum(copies.nbytes for copies in self._waves.values())

    def launch(self, wave: int, stream: torch.cuda.Stream) -> None:
        """Queue a wave, the kernel's part on `stream`. Does not wait."""
        if wave in self._waves:
            self._waves[wave].queue(stream)


# All of a GPU that casts into others' memory. Each of two H200s did so for two more at 370 GB/s with 528 CTAs, 369 with 264,
# 352 with 198 and 326 with 88; with tiles of 128 KiB at 1% less. It made no difference that these pulled the rest meanwhile.
_SHAPE = KernelShape(ctas=528, threads=256)


class _CastWaves:
    """What a training rank casts straight into the memory of others, and the scales: no scratch.

    The GPU reads a block, casts it in registers, and writes it over NVLink, as fast as others would pull what was cast before.
    """

    def __init__(
        self,
        bound: BoundSchedule,
        table: PeerTable,
        wave: Ints,
        addresses: NDArray[np.uint64],
        device: torch.device,
    ) -> None:
        own, elements = [tensor.data_ptr() for tensor in bound.tensors], [tensor.numel() for tensor in bound.tensors]
        placed, name_of = PlacedCopies.of(table.copies, addresses), partial(parameter_of, bound, table)
        rows_of = {}
        for number, rows in _by_wave(wave[table.transfer]):
            # In turn to all readers, of which each begins at another source.
            rows_of[number] = rows[interleaved(table.peer[rows].astype(np.int64), bound.schedule.rank, together=1)]
        new = new_weights([table.copies[rows] for rows in rows_of.values()], bound.casts)
        self._waves: dict[int, DeviceGather] = {}
        self.problems: list[str] = []
        for (number, rows), computes in zip(rows_of.items(), new, strict=True):
            gather = self._waves[number] = DeviceGather(
                table.copies[rows], addresses, bound.casts, device, _SHAPE, PUSHED_TILE_BYTES,
                computes=computes, elements=elements,
            )  # fmt: skip
            self.problems += gather.problems(placed.only(rows), bound.casts, own, partial(_name_of, name_of, rows))
        self.nbytes = sum(gather.nbytes for gather in self._waves.values())

    def launch_scales(self, stream: torch.cuda.Stream) -> None:
        """Queue on `stream` what may happen before others may be written. Does not wait."""
        for gather in self._waves.values():
            gather.launch_scales(stream)

    def launch(self, wave: int, stream: torch.cuda.Stream) -> None:
        """Queue everything else of a wave on `stream`. Does not wait."""
        if wave in self._waves:
            self._waves[wave].launch_copies(stream)


def _name_of(name_of: NameOf, rows: Ints, copy: int) -> str:
    """The parameter of one of these rows of a table's copies."""
    return name_of(int(rows[copy]))


def _by_wave(wave: Ints) -> Iterator[tuple[int, Ints]]:
    """The rows of each wave that has some, in order."""
    for number in np.unique(wave).tolist():
        yield number, np.flatnonzero(wave == number)


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
        self._run, self._left = 0, set[int]()  # the last run, and who may write here still
        self._is_overdue = False  # a wait was: then gloo has closed its connection, and the writer may not know it yet
        share_memory(signals, kept, bound.by_name, prefix=prefix)
        self.executed = tuple(Executed(bound.rows(part), exposed=part) for part in parts)

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

    def hear(self, run: int, signal: int) -> None:
        """Wait until all who write here have sent `signal`."""
        for peer in self._peers:
            self._hear(run, signal, peer)

    def end(self, run: int) -> None:
        """Wait until others have written everything."""
        for peer in self._peers:
            self._hear(run, Signal.DONE, peer)
            self._left.discard(peer)

    def _hear(self, run: int, signal: int, peer: int) -> None:
        try:
            self._signals.hear(run, signal, [peer])
        except DeadlineError:
            self._is_overdue = True
            raise

    def close(self) -> None:
        """Returns once this rank is written no more. After a failure it waits CLOSE_S at most."""
        deadline = time.monotonic() + CLOSE_S
        if self._left and self._is_overdue:
            time.sleep(CLOSE_S)
        while self._left:  # each says that it is done, or closes the connection when it is
            with suppress(TransferError):
                peer = self._left.pop()
                self._signals.hear_last(self._run, Signal.DONE, peer, deadline - time.monotonic())
