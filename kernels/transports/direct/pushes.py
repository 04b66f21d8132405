"""What one rank writes into the memory of another: the rank that pushes, and the one that is written.

    who is written   READY: all that it had queued is done; bytes land already                               hears DONE
    who pushes                                 queues its waves                     they have ended: DONE

A rank that fails ends its own pushes before it closes its connections, so that its peers know that they are written no more.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.copy_table import Ints
from mcore_reshard.kernels.copies.peer_table import peer_table
from mcore_reshard.kernels.copies.read_back import Executed
from mcore_reshard.kernels.cuda.copy_kernel import KernelShape
from mcore_reshard.kernels.cuda.executed_tiles import PlacedCopies, tile_problems
from mcore_reshard.kernels.errors import TransferError
from mcore_reshard.kernels.rendezvous.polling import CLOSE_S, EventPoller
from mcore_reshard.kernels.rendezvous.store_keys import FailFastStore
from mcore_reshard.kernels.transports.kept import Kept

from .event_wait import EventWait
from .peer_signals import PeerSignals, Signal
from .pull import DirectOptions, Waves, check_sums, parameter_of
from .shared_memory import addresses_of, fetch_exports, share_memory


class Pushes:
    """What a replica writes to others: its kernels, and the mappings that they write."""

    def __init__(
        self,
        bound: BoundSchedule,
        wave: Ints,
        ctas: int,
        store: FailFastStore,
        timeout_s: float,
        options: DirectOptions,
        kept: Kept,
    ) -> None:
        device = bound.device or torch.device("cuda", torch.cuda.current_device())
        self._bound, self._device = bound, device
        self._table = peer_table(bound.schedule)
        self._stream, self._pushed = torch.cuda.Stream(device), torch.cuda.Event()
        self._mappings = kept.mappings(device)
        self._signals = PeerSignals(store, bound, timeout_s)
        self._pushing = EventWait(self._signals, "the push")
        try:
            addresses = addresses_of(self._table, bound, fetch_exports(self._signals, kept), self._mappings)
            self._copies = Waves(
                self._table, wave[self._table.transfer], addresses, device,
                replace(options.shape or KernelShape(), ctas=ctas), options,
                first=bound.schedule.rank, together=1,
            )  # fmt: skip
        except BaseException:
            self._mappings.close()
            self._signals.close()
            raise
        self._queued = 0  # waves, in the run under way
        self.table_bytes = self._copies.nbytes
        placed, name_of = PlacedCopies.of(self._table.copies, addresses), partial(parameter_of, bound, self._table)
        problems = tile_problems(self._copies.read_back(), placed, name_of)
        self.executed = (Executed(bound, reaches=self._table, device_problems=tuple(problems)),)

    def begin(self, run: int) -> None:
        """Wait until all who are written are ready."""
        self._queued = 0
        self._signals.hear(run, Signal.READY)

    def launch(self, landed: torch.cuda.Event) -> None:
        """Queue the next wave, which begins when it has `landed`."""
        self._stream.wait_event(landed)
        if self._queued < len(self._copies):  # the last ones may have nothing to push
            self._copies.launch(self._queued, self._stream)
        self._queued += 1

    def end(self, run: int) -> None:
        """Wait until all pushes have ended, and tell whom they went to."""
        assert self._queued >= len(self._copies), "something was never pushed"
        self._pushed.record(self._stream)
        self._pushing.wait(dict.fromkeys(self._signals.peers, self._pushed))
        check_sums(self._bound, self._table, self._copies, self._signals)
        self._signals.tell_last(run, Signal.DONE)

    def close(self) -> None:
        """End all pushes, and only then the connections. What still waits for a cast copies nothing when that is done."""
        is_used = True
        try:
            if not self._stream.query():  # a run has failed
                emptying = torch.cuda.Stream(self._device)
                self._copies.empty(emptying)
                EventPoller(CLOSE_S).until(emptying.query)
            is_used = not EventPoller(CLOSE_S).until(self._stream.query)
        finally:  # also where the GPU is broken
            self._signals.close()
            self._mappings.close(is_used=is_used)


class Target:
    """What other replicas write here."""

    def __init__(self, bound: BoundSchedule, store: FailFastStore, timeout_s: float, kept: Kept) -> None:
        self._device = bound.device or torch.device("cuda", torch.cuda.current_device())
        self._signals = PeerSignals(store, bound, timeout_s)
        self._settling = EventWait(self._signals, "what was queued before the refit")
        self._settled = torch.cuda.Event()
        self._awaited: int | None = None  # the run in which others may write here still
        try:
            share_memory(self._signals, kept, bound.by_name)
        except BaseException:
            self._signals.close()
            raise
        self.executed = (Executed(bound, exposed=bound.schedule),)

    def settle(self) -> None:
        """Note what is queued on the caller's stream by now."""
        self._settled.record(torch.cuda.current_stream(self._device))

    def admit(self, run: int) -> None:
        """Let others write here, once what was noted is done."""
        self._settling.wait(dict.fromkeys(self._signals.peers, self._settled))
        self._awaited = run
        self._signals.tell(run, Signal.READY)

    def end(self, run: int) -> None:
        """Wait until others have written everything."""
        self._signals.hear(run, Signal.DONE)
        self._awaited = None

    def close(self) -> None:
        if self._awaited is not None:
            deadline = time.monotonic() + CLOSE_S
            for peer in self._signals.peers:  # each says that it is done, or closes the connection when it is
                with suppress(TransferError):
                    left_s = max(0.01, deadline - time.monotonic())
                    self._signals.hear(self._awaited, Signal.DONE, [peer], timeout_s=left_s)
        self._signals.close()
