"""Two hops: from the trainer to one replica of each part, and from there to the others.

The second hop is a refit of its own, in which every generation rank takes both parts: it sends what landed on it, and
receives what landed on other replicas. Where the schedule has waves, one is passed on while the next one lands:

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
from mcore_reshard.kernels.rendezvous.fail_fast_store import FailFastStore
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup
from mcore_reshard.planner.plan.schedule import Relay, Schedule

from .base import Executor, StageReport, TransportContext, group_names, group_rank, merged_reports

Connect = Callable[[TransportContext], Executor]


def relayed(connect: Connect, context: TransportContext) -> Executor:
    """Connect what the plan moves, by two hops where it relays.

    All parts of a rank are given the same scratch: only what a trainer casts takes any, and that is one wave of one hop.
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
    """Connect what the plan moves, all of it from the trainer, also where the plan relays.

    For nccl: a rank that passes on takes two parts, and NCCL refuses a GPU twice in one communicator.
    """
    schedule = context.bound.schedule
    if not schedule.relayed:
        return connect(context)
    assert schedule.view is not None
    return connect(replace(context, bound=context.bound.part(schedule.view.unrelayed())))


@dataclass(frozen=True)
class Role:
    """One end of the second hop: its part in every wave, and the group that is its own."""

    waves: tuple[Executor, ...]
    group: GlooGroup

    def run(self, landed: Semaphore, failures: list[BaseException]) -> list[tuple[StageReport, ...]]:
        """Wave after wave, each once it has `landed`, up to the first of the rank's `failures`; adds its own to them.

        One that ends early leaves its group at once: those who wait for it end too, and so does whoever waits for them.
        """
        reports: list[tuple[StageReport, ...]] = []
        try:
            for part in self.waves:
                landed.acquire()
                if failures:
                    break
                reports.append(part.run())
        except BaseException as error:
            failures.append(error)
        if failures:
            self.group.close()
        return reports

    def close(self) -> None:
        with ExitStack() as closing:
            for part in self.waves:
                closing.callback(part.close)
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
        """One wave's at a time: gloo's waves share it, and what is cast moves in one."""
        hops = (self._first, *(role.waves for role in self._roles))
        return sum(max(part.scratch_bytes for part in waves) for waves in hops)

    def run(self) -> tuple[StageReport, ...]:
        """Both hops; bytes that are passed on count on both ranks, as bytes sent and as bytes received.

        Raises the rank's first failure, once everything on it has ended: what fails later may be a consequence.
        """
        start = time.perf_counter()
        reports: list[tuple[StageReport, ...]] = []
        failures: list[BaseException] = []
        landed = [Semaphore(0) for _ in self._roles]
        passing = [
            self._threads.submit(in_callers_context(partial(role.run, turn, failures), self._device))
            for role, turn in zip(self._roles, landed, strict=True)
        ]
        try:
            for part in self._first:  # to the end, whatever fails in the second hop: the trainer may wait for this rank
                reports.append(part.run())
                for turn in landed:
                    turn.release()
        except BaseException as error:
            failures.append(error)
        for turn in landed:
            turn.release()  # after a failure: for a wave that never lands
        for passed in passing:
            reports += passed.result()
        if failures:
            raise first_of(failures)
        seconds = time.perf_counter() - start
        return tuple(replace(total, seconds=seconds if total.transfers else 0.0) for total in merged_reports(reports))

    def close(self) -> None:
        """Close both hops. May be called twice."""
        with ExitStack() as closing:
            closing.callback(self._threads.shutdown, wait=False)
            for part in self._first:
                closing.callback(part.close)
            for role in self._roles:
                closing.callback(role.close)


def _second_hop(connect: Connect, context: TransportContext, relays: Sequence[Relay]) -> list[Role]:
    """Both roles connect at the same time: each waits for the other roles of other ranks."""
    threads = ThreadPoolExecutor(2, thread_name_prefix="relay")
    coming = [
        threads.submit(in_callers_context(partial(_role, connect, context, schedules), context.bound.device))
        for schedules in ([relay.sends for relay in relays], [relay.receives for relay in relays])
    ]
    threads.shutdown(wait=False)
    ended, _ = wait(coming, return_when=FIRST_EXCEPTION)
    failures = [error for role in ended if (error := role.exception()) is not None]
    if failures:  # at once: the other role may wait for its deadline
        for role in coming:
            role.add_done_callback(_close)
        raise failures[0]
    return [role.result() for role in coming]


def _close(role: Future[Role]) -> None:
    if role.exception() is None:
        role.result().close()


def _role(connect: Connect, context: TransportContext, waves: Sequence[Schedule]) -> Role:
    """Connect one role of this rank in every wave."""
    role = waves[0]
    store = FailFastStore("second", context.another_store())
    group = GlooGroup(
        FailFastStore("group", store),
        group_rank(role, role.world, role.rank),
        group_names(role),
        timeout_s=context.options.timeout_s,
    )
    with ExitStack() as undone:
        undone.callback(group.close)
        parts: list[Executor] = []
        for wave in waves:
            here = FailFastStore(f"wave/{len(parts)}", store)
            bound = context.bound.part(wave)
            parts.append(connect(replace(context, bound=bound, group=group, store=here)))
            undone.callback(parts[-1].close)
        undone.pop_all()
    return Role(tuple(parts), group)
