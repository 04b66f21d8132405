"""Two hops: from the trainer to one replica of each part of the weights, and from there to the other replicas.

The second hop is a refit among generation ranks. Each of them sends what landed on it from the trainer, and receives
what landed on other replicas. Where the schedule has waves, one is passed on while the next one lands:

    from the trainer       wave 0   wave 1   wave 2
    among replicas                  wave 0   wave 1   wave 2
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from threading import Semaphore

import torch

from mcore_reshard.kernels.cuda.streams import in_callers_context
from mcore_reshard.kernels.errors import first_of
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup
from mcore_reshard.kernels.rendezvous.store import FailFastStore
from mcore_reshard.planner.plan.schedule import Relay, Schedule

from .base import Executor, StageReport, TransportContext, connect_group, merged_reports

Connect = Callable[[TransportContext], Executor]


def relayed(connect: Connect, context: TransportContext) -> Executor:
    """Connect the executor of a plan, with two hops where the plan relays.

    Every wave and hop of a rank is given all of its scratch. Only casts take any, and only one wave of the first hop casts
    at a time.
    """
    schedule = context.bound.schedule
    if not schedule.relayed:
        return connect(context)
    assert schedule.view is not None
    waves = [context.bound.part(wave) for wave in schedule.view.waves()] or [context.bound]
    with ExitStack() as undone:
        first: list[Executor] = []
        for bound in waves:
            store = FailFastStore(f"first/{len(first)}", context.store)
            first.append(connect(replace(context, bound=bound, store=store)))
            undone.callback(first[-1].close)
        views = [wave.schedule.view for wave in waves if schedule.world == "gen"]
        relays = [view.relay() for view in views if view is not None]
        roles = _second_hop(connect, context, relays) if relays else []
        undone.pop_all()
    return RelayedExecutor(first, roles, context.bound.device)


def unrelayed(connect: Connect, context: TransportContext) -> Executor:
    """Connect the executor of a plan. Every byte comes from the trainer, also where the plan relays.

    For nccl: a rank that passes on plays two roles, and NCCL refuses a GPU twice in one communicator.
    """
    schedule = context.bound.schedule
    if not schedule.relayed:
        return connect(context)
    assert schedule.view is not None
    return connect(replace(context, bound=context.bound.part(schedule.view.unrelayed())))


@dataclass(frozen=True)
class Role:
    """One end of the second hop: its executor in every wave, and the group of its own."""

    waves: tuple[Executor, ...]
    group: GlooGroup

    def run(self, landed: Semaphore, failures: list[BaseException]) -> list[tuple[StageReport, ...]]:
        """Run wave after wave, each once it has `landed`, until the rank has `failures`; append an own one to them.

        A role that ends early leaves its group at once, so that its peers end too, and the peers of these.
        """
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
            self.group.close()
        return reports

    def close(self) -> None:
        with ExitStack() as closing:
            for executor in self.waves:
                closing.callback(executor.close)
            closing.callback(self.group.close)


class RelayedExecutor:
    """The waves of the first hop one after another and, behind them, those of the second.

    `roles` are both ends of the second hop on a generation rank; a training rank has none.
    """

    def __init__(self, first: Sequence[Executor], roles: Sequence[Role], device: torch.device | None) -> None:
        self._first, self._roles, self._device = tuple(first), tuple(roles), device
        self._threads = ThreadPoolExecutor(max(1, len(self._roles)), thread_name_prefix="relay")
        self.name = self._first[0].name

    @property
    def scratch_bytes(self) -> int:
        """The largest wave of each hop: gloo's waves share their slots, and all casts are in one wave."""
        hops = (self._first, *(role.waves for role in self._roles))
        return sum(max(executor.scratch_bytes for executor in waves) for waves in hops)

    def run(self) -> tuple[StageReport, ...]:
        """Run both hops. Bytes that are passed on count on both ranks, as sent and as received.

        Raises the rank's first failure once everything on it has ended: a later failure may be a consequence.
        """
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
        return tuple(replace(total, seconds=seconds if total.transfers else 0.0) for total in merged_reports(reports))

    def close(self) -> None:
        """Close both hops. May be called twice."""
        with ExitStack() as closing:
            closing.callback(self._threads.shutdown, wait=False)
            for executor in self._first:
                closing.callback(executor.close)
            for role in self._roles:
                closing.callback(role.close)


def _second_hop(connect: Connect, context: TransportContext, relays: Sequence[Relay]) -> list[Role]:
    """Connect both roles at the same time: each waits for the opposite roles of other ranks."""
    threads = ThreadPoolExecutor(2, thread_name_prefix="relay")
    roles = [
        threads.submit(in_callers_context(partial(_role, connect, context, schedules), context.bound.device))
        for schedules in ([relay.sends for relay in relays], [relay.receives for relay in relays])
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


def _role(connect: Connect, context: TransportContext, waves: Sequence[Schedule]) -> Role:
    """Connect one role of this rank in every wave."""
    schedule = waves[0]  # all waves have the same ranks
    store = FailFastStore("second", context.another_store())
    group = connect_group(FailFastStore("group", store), schedule, context.options.timeout_s)
    with ExitStack() as undone:
        undone.callback(group.close)
        executors: list[Executor] = []
        for wave in waves:
            wave_store = FailFastStore(f"wave/{len(executors)}", store)
            bound = context.bound.part(wave)
            executors.append(connect(replace(context, bound=bound, group=group, store=wave_store)))
            undone.callback(executors[-1].close)
        undone.pop_all()
    return Role(tuple(executors), group)
