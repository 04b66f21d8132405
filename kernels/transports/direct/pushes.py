"""What one rank writes into the memory of another: the rank that pushes, and the one that is written.

    who is written   READY: all that it had queued is done; bytes land already                               hears DONE
    who pushes                                 queues its waves                     they have ended: DONE

A rank that fails ends its own pushes before it closes its connections, so that its peers know that they are written no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from contextlib import suppress
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.copy_table import Ints
from mcore_reshard.kernels.copies.peer_table import PeerTable, peer_table
from mcore_reshard.kernels.copies.read_back import Executed
from mcore_reshard.kernels.cuda.copy_kernel import DeviceGather, KernelShape
from mcore_reshard.kernels.cuda.executed_tiles import NameOf, PlacedCopies
from mcore_reshard.kernels.cuda.tiles import interleaved
from mcore_reshard.kernels.errors import DeadlineError, TransferError
from mcore_reshard.kernels.rendezvous.polling import CLOSE_S, EventPoller
from mcore_reshard.kernels.transports.kept import Kept

from .event_wait import EventWait
from .peer_signals import PeerSignals, Signal
from .pull import Waves, check_sums, parameter_of
from .shared_memory import addresses_of, fetch_exports, share_memory
from .staging import PUSHED_TILE_BYTES, new_weights


class Pushes:
    """What a rank writes to others: its kernels, and the mappings that they write.

    `copies_of` makes the copies of the table, whose bases are at these addresses. Ranks that are written have published
    their memory under `prefix`.
    """

    def __init__(
        self,
        bound: BoundSchedule,
        copies_of: Callable[[PeerTable, NDArray[np.uint64], torch.device], Waves | CastWave],
        signals: PeerSignals,
        kept: Kept,
        *,
        prefix: str = "",
    ) -> None:
        device = bound.device or torch.device("cuda", torch.cuda.current_device())
        self._bound, self._device, self._signals = bound, device, signals
        self.peers: Set[int] = bound.schedule.peers  # that it writes to
        self._table = peer_table(bound.schedule)
        self._stream, self._pushed = torch.cuda.Stream(device), torch.cuda.Event()
        self._mappings = kept.mappings(device)
        self._pushing = EventWait(signals, "the push")
        try:
            exports = fetch_exports(signals, kept, self.peers, prefix=prefix)
            addresses = addresses_of(self._table, bound, exports, self._mappings)
            self._copies = copies_of(self._table, addresses, device)
            placed, name_of = PlacedCopies.of(self._table.copies, addresses), partial(parameter_of, bound, self._table)
            problems = self._copies.problems(placed, name_of)
        except BaseException:
            self._mappings.close()
            raise
        self._queued = 0  # waves, in the run under way
        self.table_bytes = self._copies.nbytes
        self.executed = (Executed(bound, reaches=self._table, device_problems=tuple(problems)),)

    def prepare(self, settled: torch.cuda.Event) -> None:
        """Queue what may happen before others may be written, once `settled` has happened: scales of casts."""
        self._stream.wait_event(settled)
        self._copies.prepare(self._stream)

    def begin(self, run: int) -> None:
        """Wait until all who are written are ready. Raises an error where one of them has given up meanwhile, or left."""
        for peer, left_s in self._signals.hear(run, Signal.READY, self.peers).items():
            if left_s < 0:
                raise DeadlineError(self._signals.peers[peer], f"it gave up {-left_s:.0f} s before others were ready")
        self._signals.check_here(self.peers)

    def launch(self, landed: torch.cuda.Event) -> None:
        """Queue the next wave, which begins when it has `landed`."""
        self._stream.wait_event(landed)
        if self._queued < len(self._copies):  # the last ones may have nothing to push
            self._copies.launch(self._queued, self._stream)
        self._queued += 1

    def end(self) -> None:
        """Wait until all pushes have ended."""
        assert self._queued >= len(self._copies), "something was never pushed"
        self._pushed.record(self._stream)
        self._pushing.wait(dict.fromkeys(self.peers, self._pushed))
        self._queued = 0
        check_sums(self._bound, self._table, self._copies.damaged(), self._signals)

    def close(self) -> None:
        """End all pushes. What still waits for a cast copies nothing when that is done."""
        is_used = True
        try:
            if not self._stream.query():  # a run has failed
                emptying = torch.cuda.Stream(self._device)
                self._copies.empty(emptying)
                EventPoller(CLOSE_S).until(emptying.query)
            is_used = not EventPoller(CLOSE_S).until(self._stream.query)
        finally:  # also where the GPU is broken
            self._mappings.close(is_used=is_used)


# All of a GPU that casts into others' memory. Each of two H200s did so for two more at 370 GB/s with 528 CTAs, 369 with 264,
# 352 with 198 and 326 with 88; with tiles of 128 KiB at 1% less. It made no difference that these pulled the rest meanwhile.
_SHAPE = KernelShape(ctas=528, threads=256)


class CastWave:
    """What a training rank casts straight into the memory of its readers, and the scales: one wave, and no scratch.

    The GPU reads a block, casts it in registers, and writes it over NVLink, as fast as others would pull what was cast before.
    """

    def __init__(
        self, bound: BoundSchedule, table: PeerTable, addresses: NDArray[np.uint64], device: torch.device
    ) -> None:
        # In turn to all readers, of which each begins at another source.
        self._order = interleaved(table.peer.astype(np.int64), bound.schedule.rank, together=1)
        copies = table.copies[self._order]
        self._casts, self._own = bound.casts, [tensor.data_ptr() for tensor in bound.tensors]
        self._gather = DeviceGather(
            copies, addresses, bound.casts, device, _SHAPE, PUSHED_TILE_BYTES,
            computes=next(new_weights([copies], bound.casts)),
            elements=[tensor.numel() for tensor in bound.tensors],
        )  # fmt: skip
        self.nbytes = self._gather.nbytes

    def __len__(self) -> int:
        return 1

    def prepare(self, stream: torch.cuda.Stream) -> None:
        """Queue on `stream` what may happen before others may be written."""
        self._gather.launch_scales(stream)

    def launch(self, wave: int, stream: torch.cuda.Stream) -> None:
        """Queue everything else on `stream`. Does not wait."""
        assert wave == 0
        self._gather.launch_copies(stream)

    def problems(self, placed: PlacedCopies, name_of: NameOf) -> list[str]:
        """How the tables on the device differ from `placed`, the copies of the table."""
        placed, order = placed.only(self._order), self._order
        return self._gather.problems(placed, self._casts, self._own, lambda copy: name_of(int(order[copy])))

    def empty(self, stream: torch.cuda.Stream) -> None:
        """Nothing: casts wait for nothing on the GPU, so they end soon."""

    def damaged(self) -> Ints:
        """None are summed."""
        return np.zeros(0, np.int64)


class Target:
    """What others write here: replicas what has landed there, training ranks what they cast.

    Memory is published under `prefix`.
    """

    def __init__(self, bound: BoundSchedule, signals: PeerSignals, kept: Kept, *, prefix: str = "") -> None:
        self._device = bound.device or torch.device("cuda", torch.cuda.current_device())
        self._signals = signals
        self._peers = bound.schedule.peers
        self._settling = EventWait(signals, "what was queued before the refit")
        self._settled = torch.cuda.Event()
        self._run, self._left = 0, set[int]()  # the last run, and who may write here still
        share_memory(signals, kept, bound.by_name, prefix=prefix)
        self.executed = (Executed(bound, exposed=bound.schedule),)

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

    def end(self, run: int) -> None:
        """Wait until others have written everything."""
        for peer in self._peers:
            self._signals.hear(run, Signal.DONE, [peer])
            self._left.discard(peer)

    def close(self) -> None:
        """Returns once this rank is written no more. After a failure it waits CLOSE_S at most."""
        deadline = time.monotonic() + CLOSE_S
        while self._left:  # each says that it is done, or closes the connection when it is
            with suppress(TransferError):
                peer = self._left.pop()
                self._signals.hear_last(self._run, Signal.DONE, peer, deadline - time.monotonic())
