"""A generation rank that pulls its part of the weights from the trainer, and pushes it to the other replicas as it lands.

    train:0     |  read: wave 0   wave 1   wave 2
    gen:1       |  pulls wave 0   wave 1   wave 2
                |  pushes         wave 0   wave 1   wave 2        to gen:0 and gen:2, which push to gen:1

What a push waits for has happened on the replica's own GPU, so no word goes between ranks until the end. And GPUs that read
each other are slower than GPUs that write: into each of three H100s, from a fourth and from each other, 333 GB/s by pulls
alone, 345 where replicas push.

    who is written   READY: all that it had queued is done; bytes land already                               hears DONE
    who pushes                                 queues its waves                     they have ended: DONE

A rank that fails ends its own pushes before it closes its connections, so that its peers know that they are written no more.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.copy_table import Ints
from mcore_reshard.kernels.copies.peer_table import push_table
from mcore_reshard.kernels.copies.read_back import Executed
from mcore_reshard.kernels.cuda.copy_kernel import KernelShape
from mcore_reshard.kernels.cuda.executed_tiles import PlacedCopies, tile_problems
from mcore_reshard.kernels.errors import TransferError
from mcore_reshard.kernels.rendezvous.polling import CLOSE_S, EventPoller
from mcore_reshard.kernels.rendezvous.store_keys import FailFastStore
from mcore_reshard.kernels.transports.base import close_all, connect_together
from mcore_reshard.kernels.transports.kept import Kept

from .ends import EventWait, Reader, check_sums, parameter_of
from .peer_signals import PeerSignals, Signal
from .pull import DirectOptions, Waves
from .shared_memory import addresses_of, fetch_exports, share_memory
from .waves import waves_for

_LEAST_CTAS = 8  # of a kernel


class Replica:
    """One rank's end: a reader of the trainer, who also pushes, and is written. `signals` are those with the trainer."""

    scratch_bytes = 0

    def __init__(self, bound: BoundSchedule, signals: PeerSignals, options: DirectOptions, kept: Kept) -> None:
        assert bound.schedule.view is not None
        (relay,) = bound.schedule.view.relays()
        sends, receives = bound.part(relay.sends), bound.part(relay.receives)
        waves = waves_for(bound.nbytes + receives.nbytes)
        ctas = _divided((options.shape or KernelShape()).ctas, bound.nbytes, sends.nbytes)
        opened = ExitStack()
        with opened:
            self._reader = Reader(bound, signals, options, kept, waves=waves, ctas=ctas[0])
            opened.callback(self._reader.close)
            pushing = self._reader.pushing_waves(relay.sends)
            store = FailFastStore("replicas", signals.store)
            pushes = partial(_Pushes, sends, pushing, ctas[1], store, signals.timeout_s, options, kept)
            target = partial(_Target, receives, store, signals.timeout_s, kept)
            made: list[Any] = connect_together([pushes, target], bound.device)
            self._pushes: _Pushes = made[0]
            self._target: _Target = made[1]
            opened.pop_all()
        self.bound = (bound, sends, receives)
        self._admits = False  # whether others may write here in the run under way
        self.table_bytes = self._reader.table_bytes + self._pushes.table_bytes
        self.executed = (*self._reader.executed, *self._pushes.executed, *self._target.executed)

    @property
    def written_bytes(self) -> int:
        """All, once something is queued here, or others may write."""
        bound, _, receives = self.bound
        return bound.nbytes + receives.nbytes if self._reader.written_bytes or self._admits else 0

    def run(self, run: int) -> None:
        self._admits = False
        self._target.settle()
        self._reader.begin(run, partial(self._push, run))
        waves = self._reader.waves
        landed = [self._reader.launch(0)]
        for wave in range(waves):  # in the order in which they run, also where the GPU takes all from one queue
            if wave + 1 < waves:
                landed.append(self._reader.launch(wave + 1))
            self._push(run, landed[wave])
        self._reader.end(run)
        self._pushes.end(run)
        self._target.end(run)

    def _push(self, run: int, landed: torch.cuda.Event) -> None:
        """Queue the next wave, which begins when it has `landed`. Before the first one, all ranks let others write."""
        if not self._admits:
            self._admits = True
            self._target.admit(run)
            self._pushes.begin(run)
        self._pushes.launch(landed)

    def close(self) -> None:
        """Returns once this rank writes no more, and is written no more. After a failure it waits CLOSE_S at most for either."""
        close_all([self._reader, self._target, self._pushes])  # the last one first


class _Pushes:
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
        self._table = push_table(bound.schedule)
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


class _Target:
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


def _divided(ctas: int, pulled: int, pushed: int) -> tuple[int, int]:
    """Twice as many CTAs as one kernel has, for one that pulls and one that pushes so many bytes: in proportion to these.

    Else one holds up the other. Into each of three H100s: 345 GB/s with 32 and 64 CTAs, 344 with 24 and 48, 311 with 24 and
    64, 287 with 48 each.
    """
    if not pulled or not pushed:
        return ctas, ctas
    least = min(_LEAST_CTAS, ctas)
    first = round(2 * ctas * pulled / (pulled + pushed))
    first = min(max(first, least), 2 * ctas - least)
    return first, 2 * ctas - first
