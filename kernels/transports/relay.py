"""Two hops: from the trainer to one replica of each part of the weights, and from there to the other replicas.

In the second hop each generation rank sends what landed on it from the trainer, and receives what landed on other
replicas. Where the schedule has waves, one is passed on while the next one lands:

    from the trainer       wave 0   wave 1   wave 2
    among replicas                  wave 0   wave 1   wave 2
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from threading import Semaphore

import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.read_back import Executed
from mcore_reshard.kernels.cuda.streams import in_callers_context
from mcore_reshard.kernels.errors import first_of
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup
from mcore_reshard.kernels.rendezvous.store_keys import FailFastStore
from mcore_reshard.planner.plan.schedule import Schedule

from .base import Executor, StageReport, TransportContext, close_all, connect_all, connect_group, merge_reports

Connect = Callable[[TransportContext], Executor]


def connect_relayed(connect: Connect, context: TransportContext) -> Executor:
    """Connect the executor of a plan, with two hops where the plan relays.

    Every wave and hop may use all of a rank's scratch. Only casts take any, and all casts are in one wave of the first hop.
    """
    schedule = context.bound.schedule
    if not schedule.relayed:
        return connect(context)
    assert schedule.view is not None
    waves = [context.bound.part(wave) for wave in schedule.view.waves()] or [context.bound]
    views = [wave.schedule.view for wave in waves if schedule.world == "gen"]
    relays = [view.relay() for view in views if view is not None]
    first = _connect_waves(connect, replace(context, store=FailFastStore("first", context.store)), waves)
    try:
        ends = ([relay.sends for relay in relays], [relay.receives for relay in relays])
        return RelayedExecutor(first, _connect_roles(connect, context, ends) if relays else [], context.bound.device)
    except BaseException:
        close_all(first)
        raise


def connect_unrelayed(connect: Connect, context: TransportContext) -> Executor:
    """Connect the executor of a plan. Every byte comes from the trainer: NCCL refuses a GPU twice in one communicator."""
    schedule = context.bound.schedule
    if not schedule.relayed:
        return connect(context)
    assert schedule.view is not None
    return connect(replace(context, bound=context.bound.part(schedule.view.unrelayed())))


@dataclass(frozen=True)
class Role:
    """One end of the second hop: its executor in every wave, and the group of its own."""

    waves: Sequence[Executor]
    group: GlooGroup

    def run(self, landed: Semaphore, failures: list[BaseException]) -> list[tuple[StageReport, ...]]:
        """Run wave after wave, each once it has `landed`. Stop if the rank has `failures`; append an own failure to them."""
        reports: list[tuple[StageReport, ...]] = []
        try:
            for executor in self.waves:
                landed.acquire()
                if failures:
                    break
                reports.append(executor.run())
        except BaseException as error:
            failures.append(error)
        if failures:
            self.group.close()  # so that peers end too, and the peers of these
        return reports

    def close(self) -> None:
        close_all([*self.waves, self.group])


class RelayedExecutor:
    """The waves of the first hop and, behind them, those of the second. A training rank has no `roles` in the second."""

    def __init__(self, first: Sequence[Executor], roles: Sequence[Role], device: torch.device | None) -> None:
        self._first, self._roles, self._device = first, roles, device
        self._threads = ThreadPoolExecutor(max(1, len(roles)), thread_name_prefix="relay")
        self.name = first[0].name
        # The largest wave of each hop: gloo's waves share their slots, and all casts are in one wave.
        hops = (first, *(role.waves for role in roles))
        self.scratch_bytes = sum(max(executor.scratch_bytes for executor in waves) for waves in hops)

    @property
    def written_bytes(self) -> int:
        hops = (self._first, *(role.waves for role in self._roles))
        return sum(executor.written_bytes for waves in hops for executor in waves)

    @property
    def executed(self) -> tuple[Executed, ...]:
        hops = (self._first, *(role.waves for role in self._roles))
        return tuple(
            replace(table, wave=wave)
            for waves in hops
            for wave, executor in enumerate(waves)
            for table in executor.executed
        )

    def run(self) -> tuple[StageReport, ...]:
        """Run both hops to their end. Raises the rank's first failure: later ones may be its consequences."""
        start = time.perf_counter()
        reports: list[tuple[StageReport, ...]] = []
        failures: list[BaseException] = []
        landed = [Semaphore(0) for _ in self._roles]
        second_hop = [
            self._threads.submit(in_callers_context(partial(role.run, landed_waves, failures), self._device))
            for role, landed_waves in zip(self._roles, landed, strict=True)
        ]
        try:
            for executor in self._first:  # to the end, even if the second hop fails: the trainer may wait for this rank
                reports.append(executor.run())
                for landed_waves in landed:
                    landed_waves.release()
        except BaseException as error:
            failures.append(error)
        for landed_waves in landed:
            landed_waves.release()  # after a failure: for a wave that never lands
        for role_reports in second_hop:
            reports += role_reports.result()
        if failures:
            raise first_of(failures)
        seconds = time.perf_counter() - start
        return tuple(
            replace(total, seconds=seconds if total.transfers else 0.0, start=start) for total in merge_reports(reports)
        )

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        close_all([*self._first, *self._roles])


def _connect_waves(connect: Connect, context: TransportContext, waves: Sequence[BoundSchedule]) -> list[Executor]:
    return connect_all(
        connect(replace(context, bound=bound, store=FailFastStore(f"wave/{number}", context.store)))
        for number, bound in enumerate(waves)
    )


def _connect_roles(connect: Connect, context: TransportContext, ends: Sequence[Sequence[Schedule]]) -> list[Role]:
    """Connect both roles at the same time: each waits for the opposite roles of other ranks."""
    threads = ThreadPoolExecutor(len(ends), thread_name_prefix="relay")
    roles = [
        threads.submit(in_callers_context(partial(_connect_role, connect, context, waves), context.bound.device))
        for waves in ends
    ]
    threads.shutdown(wait=False)
    ended, _ = wait(roles, return_when=FIRST_EXCEPTION)
    failures = [error for role in ended if (error := role.exception()) is not None]
    if failures:  # at once: the other role may wait for its deadline
        for role in roles:
            role.add_done_callback(_close)
        raise failures[0]
    return [role.result() for role in roles]


def _close(role: Future[Role]) -> None:
    if role.exception() is None:
        role.result().close()


def _connect_role(connect: Connect, context: TransportContext, waves: Sequence[Schedule]) -> Role:
    """Connect one role of this rank in every wave; all waves have the same ranks."""
    store = FailFastStore("second", context.store)
    group = connect_group(FailFastStore("group", store), waves[0], context.options.timeout_s)
    try:
        bound = [context.bound.part(wave) for wave in waves]
        return Role(_connect_waves(connect, replace(context, group=group, store=store), bound), group)
    except BaseException:
        group.close()
        raise
