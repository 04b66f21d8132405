"""A generation rank that pulls its part of the weights from the trainer, and pushes it to the other replicas as it lands.

    train:0     |  read: wave 0   wave 1   wave 2
    gen:1       |  pulls wave 0   wave 1   wave 2
                |  pushes         wave 0   wave 1   wave 2        to gen:0 and gen:2, which push to gen:1

What a push waits for has happened on the replica's own GPU, so no word goes between ranks until the end. And GPUs that read
each other are slower than GPUs that write: into each of three H100s, from a fourth and from each other, 333 GB/s by pulls
alone, 345 where replicas push.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.peer_table import PeerTable
from mcore_reshard.kernels.cuda.copy_kernel import KernelShape
from mcore_reshard.kernels.rendezvous.store_keys import FailFastStore
from mcore_reshard.kernels.transports.base import close_all, connect_together
from mcore_reshard.kernels.transports.kept import Kept

from .ends import Reader
from .peer_signals import PeerSignals, Signal
from .pull import DirectOptions, Waves
from .pushes import Pushes, Target
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
            self._signals: list[PeerSignals] = connect_together(
                [partial(PeerSignals, store, end, signals.timeout_s) for end in (sends, receives)], bound.device
            )
            opened.callback(close_all, self._signals)

            def copies_of(table: PeerTable, addresses: NDArray[np.uint64], device: torch.device) -> Waves:
                shape = replace(options.shape or KernelShape(), ctas=ctas[1])
                turn = {"first": bound.schedule.rank, "together": 1}
                return Waves(table, pushing[table.transfer], addresses, device, shape, options, **turn)

            self._target = Target(receives, self._signals[1], kept)  # first: others wait for its memory
            self._pushes = Pushes(sends, copies_of, self._signals[0], kept)
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
        self._reader.begin(run)
        waves = self._reader.waves
        landed = [self._reader.launch(0)]
        for wave in range(waves):  # in the order in which they run, also where the GPU takes all from one queue
            if wave + 1 < waves:
                landed.append(self._reader.launch(wave + 1))
            self._push(run, landed[wave])
        self._reader.pull_casts(run, partial(self._push, run))
        self._reader.end(run)
        self._pushes.end()
        self._signals[0].tell_last(run, Signal.DONE)
        self._target.end(run)

    def _push(self, run: int, landed: torch.cuda.Event) -> None:
        """Queue the next wave, which begins when it has `landed`. Before the first one, all ranks let others write."""
        if not self._admits:
            self._target.await_settled()
            self._admits = True
            self._target.admit(run)
            self._pushes.begin(run)
        self._pushes.launch(landed)

    def end_writes(self) -> None:
        """None are among the trainer's: those among replicas end in `close`."""

    def close(self) -> None:
        """Returns once this rank writes no more, and is written no more. After a failure it waits CLOSE_S at most for either."""
        sends, receives = self._signals
        close_all([self._reader, receives, self._target, sends, self._pushes])  # the last one first


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
