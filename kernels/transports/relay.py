"""Several hops: from the trainer to one replica of each part of the weights, and from there to the other replicas.

In a later hop each generation rank sends what has landed on it before, and receives what landed on other replicas. There
may be one hop between NVLink domains and one within them (see planner/plan/paths.py). Where the schedule has waves, one is
passed on while the next one lands:

    from the trainer       wave 0   wave 1   wave 2
    among replicas                  wave 0   wave 1   wave 2

Each later hop has threads, connections and executors of its own. Over nccl it cannot: two kernels that wait for each other
must not wait for one GPU as well. So later hops may join the first: a column above is then one part, whose messages are in
the same windows, and a rank passes on what the part before brought.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition

import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.carried import PLACES
from mcore_reshard.kernels.copies.read_back import Executed
from mcore_reshard.kernels.cuda.streams import in_callers_context
from mcore_reshard.kernels.errors import first_of
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup
from mcore_reshard.kernels.rendezvous.store_keys import FailFastStore
from mcore_reshard.planner.plan.schedule import Relay, Schedule

from .base import (
    Executor,
    Queued,
    StageReport,
    TransportContext,
    close_all,
    connect_all,
    connect_group,
    connect_together,
    merge_reports,
)
from .rounds import in_parts

Connect = Callable[[TransportContext], Executor]
# Connects the executors of parts, which run one after another; the schedules of a part move together. All ranks call it
# with as many parts.
ConnectParts = Callable[[TransportContext, Sequence[Sequence[BoundSchedule]]], Sequence[Executor]]


def connect_each(connect: Connect) -> ConnectParts:
    """Connect an executor of its own for each part, which is one schedule."""

    def connect_parts(context: TransportContext, parts: Sequence[Sequence[BoundSchedule]]) -> Sequence[Executor]:
        return connect_all(
            connect(replace(context, bound=bound, store=FailFastStore(f"wave/{number}", context.store)))
            for number, (bound,) in enumerate(parts)
        )

    return connect_parts


def connect_relayed(
    trainer: ConnectParts, replicas: ConnectParts, context: TransportContext, *, joined: int = 0
) -> Executor:
    """Connect the executor of a plan, with several hops where replicas pass on.

    `trainer` connects the first hop, wave by wave, and so many later ones, which are `joined` with it; `replicas` connects
    the others. Every wave and hop may use all of a rank's scratch. Only nccl and casts take any; all casts are
    in one wave of the first hop.
    """
    schedule = context.bound.schedule
    if not schedule.relayed:
        (whole,) = trainer(context, [[context.bound]])
        return whole
    assert schedule.view is not None
    waves = [context.bound.part(wave) for wave in schedule.view.waves()] or [context.bound]
    views = [wave.schedule.view for wave in waves if schedule.world == "gen"]
    hops = [*zip(*(view.relays() for view in views if view is not None), strict=True)]  # of each, the waves
    parts = _joined(context.bound, waves, hops, joined)
    first = trainer(replace(context, store=FailFastStore("first", context.store)), parts)
    roles: list[Role] = []
    try:
        for hop, relays in [*enumerate(hops, 1)][joined:]:
            ends = [relay.sends for relay in relays], [relay.receives for relay in relays]
            store = FailFastStore(f"hop/{hop}", context.store)
            roles += _connect_roles(replicas, replace(context, store=store), hop, ends)
        carries = bool(schedule.carried)
        return RelayedExecutor(first, roles, context.bound.device, joined=joined, carries=carries)
    except BaseException:
        close_all([*first, *roles])
        raise


def connect_joined(parts: ConnectParts, context: TransportContext) -> Executor:
    """Connect the executor of a plan, with all its hops joined."""
    return connect_relayed(parts, parts, context, joined=len(context.bound.schedule.later_hops))


def _joined(
    bound: BoundSchedule, waves: Sequence[BoundSchedule], hops: Sequence[Sequence[Relay]], joined: int
) -> list[list[BoundSchedule]]:
    """The parts of a rank, as in `in_parts`. Nobody passes on to trainers."""
    ends = [[(bound.part(relay.sends), bound.part(relay.receives)) for relay in relays] for relays in hops[:joined]]
    return in_parts(waves, ends, [waves[-1].part(waves[-1].schedule.with_peers(()))] * joined)


def connect_unrelayed(trainer: ConnectParts, context: TransportContext) -> Executor:
    """Connect the executor of a plan. Every byte comes from the trainer."""
    bound = context.bound
    if bound.schedule.relayed:
        assert bound.schedule.view is not None
        bound = bound.part(bound.schedule.view.unrelayed())
    (whole,) = trainer(replace(context, bound=bound), [[bound]])
    return whole


class Progress:
    """How many waves have landed on this rank by each hop, and what has failed."""

    def __init__(self, hops: int, sending: Iterable[int] = ()) -> None:
        self.failures: list[BaseException] = []
        self.begun: list[Executor] = []  # the others still count the bytes of the run before
        self._waves = [0] * hops
        self._passed_on = dict.fromkeys(sending, 0)  # waves, by hop
        self._changed = Condition()

    def landed(self, hop: int) -> None:
        """Say that one more wave of a hop has landed."""
        with self._changed:
            self._waves[hop] += 1
            self._changed.notify_all()

    def passed_on(self, hop: int) -> None:
        """Say that others have got one more wave from this rank, in a hop."""
        with self._changed:
            self._passed_on[hop] += 1
            self._changed.notify_all()

    def wait_for_place(self, wave: int) -> None:
        """Wait until what this rank carries for others in a wave may land: it takes the place of an earlier one."""
        with self._changed:
            self._changed.wait_for(lambda: self.failures or min(self._passed_on.values(), default=wave) > wave - PLACES)

    def failed(self, error: BaseException) -> None:
        """Say that a hop has failed: nobody waits for anything any more."""
        with self._changed:
            self.failures.append(error)
            self._changed.notify_all()

    def wait(self, hop: int, wave: int) -> bool:
        """Wait until a wave has landed by all hops before this one. False: something has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.failures or min(self._waves[:hop]) > wave)
            return not self.failures


@dataclass(frozen=True)
class Role:
    """One end of a later hop: its executor in every wave, and the group of its own."""

    hop: int
    sends: bool
    waves: Sequence[Executor]
    group: GlooGroup

    def run(self, progress: Progress) -> list[tuple[StageReport, ...]]:
        """Run wave after wave, each once it has landed. Stop if the rank has failed, and say so if it fails here."""
        reports: list[tuple[StageReport, ...]] = []
        try:
            for wave, executor in enumerate(self.waves):
                if not progress.wait(self.hop, wave):
                    break
                progress.begun.append(executor)
                reports.append(executor.run())
                if self.sends:
                    progress.passed_on(self.hop)
                else:
                    progress.landed(self.hop)
        except BaseException as error:
            progress.failed(error)
        if progress.failures:
            self.group.close()  # so that peers end too, and the peers of these
        return reports

    def close(self) -> None:
        close_all([*self.waves, self.group])


class RelayedExecutor:
    """The waves of the first hop and, behind them, those of the later hops. A training rank has no `roles` in these.

    Where later hops are `joined` with the first, `first` has their parts: one more than there are waves for each. A rank that
    `carries` for others lets a wave land once it has passed on the one whose place it takes.
    """

    def __init__(
        self,
        first: Sequence[Executor],
        roles: Sequence[Role],
        device: torch.device | None,
        *,
        joined: int = 0,
        carries: bool = False,
    ) -> None:
        self._first, self._roles, self._device, self._joined = first, roles, device, joined
        self._carries = carries
        # Behind each other, if these bring all that a later part passes on. The device need not wait for the host then.
        queued = [executor for executor in first if isinstance(executor, Queued)]
        self._queued: Sequence[Queued] = queued if len(queued) == len(first) else ()
        self._progress = Progress(1)  # of the last run
        self._threads = ThreadPoolExecutor(max(1, len(roles)), thread_name_prefix="relay")
        names = {name for _, waves in self._hops for executor in waves for name in executor.name.split("+")}
        self.name = "+".join(sorted(names))
        # The largest wave of each hop: gloo's waves share their slots, and all casts are in one wave.
        self.scratch_bytes = sum(max(executor.scratch_bytes for executor in waves) for _, waves in self._hops)

    @property
    def _hops(self) -> list[tuple[int, Sequence[Executor]]]:
        """(hop, waves), once for the trainer's and for each role."""
        return [(0, self._first), *((role.hop, role.waves) for role in self._roles)]

    @property
    def written_bytes(self) -> int:
        return sum(executor.written_bytes for executor in self._progress.begun)

    @property
    def executed(self) -> tuple[Executed, ...]:
        waves = len(self._first) - self._joined
        found: list[Executed] = []
        for own_hop, executors in self._hops:
            for number, executor in enumerate(executors):
                for table in executor.executed:
                    hop = own_hop or table.bound.schedule.hop  # part k of the first has wave k - h of a hop
                    wave = number - (hop - own_hop)
                    found.append(replace(table, wave=max(0, hop - 1) * waves + wave))
        return tuple(found)

    def run(self) -> tuple[StageReport, ...]:
        """Run all hops to their end. Raises the rank's first failure: later ones may be its consequences."""
        start = time.perf_counter()
        reports: list[tuple[StageReport, ...]] = []
        sending = [role.hop for role in self._roles if role.sends]
        progress = self._progress = Progress(1 + max([self._joined, *(role.hop for role in self._roles)]), sending)
        later = [
            self._threads.submit(in_callers_context(partial(role.run, progress), self._device)) for role in self._roles
        ]
        try:
            # To the end, even if a later hop fails: the trainer may wait for this rank.
            for part, executor in enumerate(self._begun(progress)):
                reports.append(executor.run())
                for hop in range(1 + min(self._joined, part)):
                    progress.landed(hop)
        except BaseException as error:
            progress.failed(error)
        for role_reports in later:
            reports += role_reports.result()
        if progress.failures:
            raise first_of(progress.failures)
        seconds = time.perf_counter() - start
        return tuple(
            replace(total, seconds=seconds if total.transfers else 0.0, start=start) for total in merge_reports(reports)
        )

    def _begun(self, progress: Progress) -> Iterator[Executor]:
        """The executors of the first hop, each once it has begun. Where they are queued, so has the next one."""
        if not self._queued:
            for number, executor in enumerate(self._first):
                if self._carries:
                    progress.wait_for_place(number)
                progress.begun.append(executor)
                yield executor
            return
        for number, queued in enumerate(self._queued):
            if self._carries:
                progress.wait_for_place(number)
            progress.begun.append(self._first[number])
            queued.queue()
            if number:
                yield self._first[number - 1]
        yield self._first[-1]

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        close_all([*self._first, *self._roles])


def _connect_roles(
    connect: ConnectParts, context: TransportContext, hop: int, ends: Sequence[Sequence[Schedule]]
) -> list[Role]:
    """Connect both roles of a hop at the same time: each waits for the opposite roles of other ranks."""
    return connect_together(
        [partial(_connect_role, connect, context, hop, waves) for waves in ends], context.bound.device
    )


def _connect_role(connect: ConnectParts, context: TransportContext, hop: int, waves: Sequence[Schedule]) -> Role:
    """Connect one role of this rank in every wave; all waves have the same ranks."""
    group = connect_group(FailFastStore("group", context.store), waves[0], context.options.timeout_s)
    try:
        executors = connect(replace(context, group=group), [[context.bound.part(wave)] for wave in waves])
        return Role(hop, waves[0].world == "train", executors, group)
    except BaseException:
        group.close()
        raise
