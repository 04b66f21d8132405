"""A chain of replicas: the trainer pushes to the first, each replica to the one behind, as it lands.

    train:0 -> gen:0    wave 0   wave 1   wave 2
    gen:0 -> gen:1               wave 0   wave 1   wave 2       gen:0 has said that it has pushed a wave, gen:1 pushes it on

So every GPU is written by one other, and writes to one other: copy engines do both at 390 GB/s.
Where each of three replicas gets a third from the trainer and passes that on to two others, kernels reached 345. Copy engines
would need turns there: in phases of 2 ms, kept by words between the GPUs, they reached 308.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.copy_table import Ints
from mcore_reshard.kernels.copies.peer_table import joined_transfers
from mcore_reshard.kernels.copies.read_back import Executed
from mcore_reshard.kernels.cuda.streams import in_callers_context
from mcore_reshard.kernels.errors import DeadlineError
from mcore_reshard.kernels.rendezvous.polling import EventPoller
from mcore_reshard.kernels.rendezvous.store_keys import FailFastStore
from mcore_reshard.kernels.transports.base import close_all, connect_together
from mcore_reshard.kernels.transports.kept import Kept
from mcore_reshard.planner.plan.schedule import Relay

from .event_wait import EventWait
from .peer_signals import PeerSignals, Signal
from .pull import DirectOptions
from .pushes import Pushed, Pushes, Target
from .staging import parted, with_other_end
from .waves import parse_waves, passing_waves, told_waves, waves_for, waves_of

_WAVES = "waves/"  # of the keys under which a first replica says how many there are, and others what is in each


class ChainSource:
    """A training rank: it pushes to the first replica."""

    scratch_bytes = written_bytes = 0

    def __init__(self, bound: BoundSchedule, signals: PeerSignals, options: DirectOptions, kept: Kept) -> None:
        self._device = bound.device or torch.device("cuda", torch.cuda.current_device())
        self._signals = signals
        self._settling = EventWait(signals, "what was queued before the refit")
        counts = {peer: signals.fetch(peer, _parse_count, prefix=_WAVES) for peer in signals.peers}
        self._count = max(counts.values(), default=0)
        parts = parted(bound.schedule)
        self._pushes = Pushes(bound, parts, waves_of(parts, counts), signals, kept, options)
        self._telling = _Telling(signals, counts, bound.device)
        self.bound, self.executed = (bound,), self._pushes.executed
        self.table_bytes = self._pushes.table_bytes

    def run(self, run: int) -> None:
        settled = torch.cuda.current_stream(self._device).record_event()
        self._pushes.prepare(settled)
        self._settling.wait(dict.fromkeys(self._signals.peers, settled))
        self._signals.tell(run, Signal.READY)
        with self._telling.of(run, self._pushes.begin(run)) as pushed:
            self._pushes.launch(range(self._count), pushed)
        self._pushes.end()
        self._signals.tell_last(run, Signal.DONE)

    def end_writes(self) -> None:
        """Returns once this rank writes no more, and has unmapped what it wrote."""
        close_all([self._pushes, self._telling])  # the last one first

    def close(self) -> None:
        """Nothing is left: see `end_writes`."""


class Replica:
    """A generation rank. `bound` is what it gets from the trainer, `passes` what from the replica before, and to the one behind.

    `signals` are those with the trainer.
    """

    scratch_bytes = 0

    def __init__(
        self, bound: BoundSchedule, passes: Relay, signals: PeerSignals, options: DirectOptions, kept: Kept
    ) -> None:
        sends, receives = bound.part(passes.sends), bound.part(passes.receives)
        store = FailFastStore("replicas", signals.store)
        opened = ExitStack()
        with opened:
            behind, before = connect_together(
                [partial(PeerSignals, store, end, signals.timeout_s) for end in (sends, receives)], bound.device
            )
            opened.callback(close_all, [behind, before])
            is_first = not before.peers
            gets, sources = (bound, signals) if is_first else (receives, before)
            parts = parted(with_other_end(gets.schedule))
            self._target = Target(gets, parts, sources, kept)  # first, as others wait for its memory
            if is_first:
                self._count = waves_for(gets.nbytes)
                signals.publish(self._count, prefix=_WAVES)
                waves = waves_of(parts, dict.fromkeys(signals.peers, self._count))
            else:
                self._count, waves = _waves_told_by(before, receives)
            self._pushes: Pushes | None = None
            if behind.peers:
                passed = passing_waves(parts, waves, sends.schedule)
                behind.publish({"count": self._count, "waves": told_waves(passed)}, prefix=_WAVES)
                both = sends.schedule, sends.schedule.with_peers(())
                self._pushes = Pushes(sends, both, [passed, passed[:0]], behind, kept, options)
            opened.pop_all()
        self._signals, self._gets = (before, behind), gets
        self._telling = _Telling(behind, dict.fromkeys(behind.peers, self._count), bound.device)
        self.written_bytes = 0  # all, once others may write: nobody says how far they are
        self.bound = (bound, sends, receives)
        self.executed: tuple[Executed, ...] = self._target.executed
        self.table_bytes = 0
        if self._pushes is not None:
            self.executed += self._pushes.executed
            self.table_bytes = self._pushes.table_bytes

    def run(self, run: int) -> None:
        self.written_bytes = 0
        self._target.settle()
        self._target.hear(run, Signal.READY)  # before, nobody has anything to write
        self._target.await_settled()
        self.written_bytes = self._gets.nbytes
        self._target.admit(run)
        if self._pushes is None:
            for wave in range(self._count):
                self._target.hear(run, wave)
        else:
            self._signals[1].tell(run, Signal.READY)
            with self._telling.of(run, self._pushes.begin(run)) as pushed:
                self._pushes.launch(self._landed(run), pushed)
            self._pushes.end()
            self._signals[1].tell_last(run, Signal.DONE)
        self._target.end(run)

    def _landed(self, run: int) -> Iterator[int]:
        """Each wave, once it has landed here. Raises where the one behind awaits it no more."""
        for wave in range(self._count):
            self._target.hear(run, wave)
            self._telling.check()
            yield wave

    def end_writes(self) -> None:
        """Returns once this rank writes no more, and is written no more. After a failure it waits CLOSE_S at most for either."""
        before, behind = self._signals
        pushes = [] if self._pushes is None else [self._pushes]
        close_all([before, self._target, behind, *pushes, self._telling])  # the last one first

    def close(self) -> None:
        """Nothing is left: see `end_writes`."""


class _Telling:
    """Tells peers, from a thread of its own, which waves have been pushed to them: each of the first `counts`."""

    def __init__(self, signals: PeerSignals, counts: Mapping[int, int], device: torch.device | None) -> None:
        self._signals, self._counts, self._device = signals, counts, device
        self._waits_s: Mapping[int, float] = {}  # for how many seconds each peer waits for a wave, in the last run
        self._told: Future[None] | None = None
        self._last = 0.0  # when the peers heard of a wave, by `time.monotonic`
        self._stopped = False
        self._poller = EventPoller(signals.timeout_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="waves")

    @contextmanager
    def of(self, run: int, waits_s: Mapping[int, float]) -> Iterator[Pushed]:
        """What is to be called for each wave that is queued. Ends when everything is told.

        `waits_s` is for how many seconds each peer waits for a wave.
        """
        queued: SimpleQueue[Sequence[torch.cuda.Event] | None] = SimpleQueue()  # None: there are no more
        self._waits_s, self._stopped, self._last = waits_s, False, time.monotonic()
        told = self._told = self._thread.submit(in_callers_context(partial(self._tell, run, queued), self._device))
        try:
            yield queued.put
        except BaseException:
            self._stopped = True
            raise
        finally:
            queued.put(None)
            wait([told])
        told.result()

    def check(self) -> None:
        """Raise an error where a peer has left, or has waited too long for the next wave: nothing may be pushed to it then."""
        if self._told is not None and self._told.done():
            self._told.result()
        waited_s = time.monotonic() - self._last
        for peer, waits_s in self._waits_s.items():
            if waited_s > waits_s:
                raise DeadlineError(
                    self._signals.peers[peer], f"it gave up {waited_s - waits_s:.0f} s before this wave"
                )

    def _tell(self, run: int, queued: SimpleQueue[Sequence[torch.cuda.Event] | None]) -> None:
        wave = 0
        while (events := queued.get()) is not None and self._have_happened(events):
            self._signals.tell(run, wave, [peer for peer, count in self._counts.items() if wave < count])
            self._last = time.monotonic()
            wave += 1

    def _have_happened(self, events: Sequence[torch.cuda.Event]) -> bool:
        """Wait for them. False: the rank has failed, or its GPU; who queued them raises that."""
        try:
            in_time = self._poller.until(lambda: self._stopped or all(each.query() for each in events))
        except RuntimeError:  # of the GPU
            return False
        if not in_time:
            late = next(iter(self._signals.peers.values()))
            raise DeadlineError(late, f"a wave was not pushed within {self._signals.timeout_s:g} s")
        return not self._stopped

    def close(self) -> None:
        self._stopped = True
        self._thread.shutdown(wait=False)


def _parse_count(said: Any) -> int:
    if (count := int(said)) < 1:
        raise ValueError(f"{count} waves")
    return count


def _waves_told_by(before: PeerSignals, receives: BoundSchedule) -> tuple[int, list[Ints]]:
    """(how many waves the replica before passes on, what is in each: of transfers as they lie there, and of casts, none)."""
    transfers = len(joined_transfers(receives.schedule.tables))

    def parse(said: Any) -> tuple[int, Ints]:
        count = _parse_count(said["count"])
        return count, parse_waves(said["waves"], transfers, count)

    (peer,) = before.peers
    count, wave = before.fetch(peer, parse, prefix=_WAVES)
    return count, [wave, wave[:0]]
