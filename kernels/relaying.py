"""Two hops: from the trainer to one replica of each shard, and from there to the others.

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
from itertools import zip_longest

import torch

from mcore_reshard.planner.schedule import Relay, Schedule

from .gloo import GlooGroup
from .joined import JoinedExecutor, in_context_of, is_cuda, merged
from .pipeline import Executor, StageReport, group_names, group_rank
from .program import Program, bind
from .shelf import Shelf
from .transport import Link

Connect = Callable[[Link], Executor]

_PARTS = 3  # executors on a rank that relays, which share its scratch


def relayed(connect: Connect, link: Link) -> Executor:
    """Connect what the plan moves, by two hops where it relays."""
    if not link.program.schedule.relayed:
        return connect(link)
    waves = [_part(link.program, wave()) for wave in link.program.schedule.waves] or [link.program]
    shared = replace(link, scratch_bytes=link.scratch_bytes // _PARTS // len(waves))
    with ExitStack() as undone:
        first: list[Executor] = []
        for program in waves:
            store = Shelf(f"first/{len(first)}", link.store)
            first.append(connect(replace(shared, program=program, store=store)))
            undone.callback(first[-1].close)
        relays = [wave.schedule.relay() for wave in waves if wave.schedule.relay is not None]
        roles = _second_hop(connect, shared, relays) if relays else []
        undone.pop_all()
    return RelayedExecutor(first, roles, link.program.device)


def unrelayed(connect: Connect, link: Link) -> Executor:
    """Connect what the plan moves, all of it from the trainer, also where the plan relays.

    For nccl: a rank that passes on takes two parts, and NCCL refuses a GPU twice in one communicator.
    """
    program = link.program
    if program.schedule.unrelayed is None:
        return connect(link)
    straight = bind(program.schedule.unrelayed(), program.by_name, bucket_bytes=program.bucket_bytes)
    return connect(replace(link, program=straight))


@dataclass(frozen=True)
class Role:
    """One end of the second hop: its part in every wave, and the group that is its own."""

    waves: tuple[Executor, ...]
    group: GlooGroup

    def close(self) -> None:
        self.group.close()
        for part in self.waves:
            part.close()


class RelayedExecutor:
    """The waves of the first hop one after another and, a wave behind, those of the second.

    `roles` are both ends of the second hop on a generation rank; a training rank has none.
    """

    def __init__(self, first: Sequence[Executor], roles: Sequence[Role], device: torch.device | None) -> None:
        self._first, self._roles, self._device = tuple(first), tuple(roles), device
        self._second = [JoinedExecutor(parts, device) for parts in zip(*(role.waves for role in roles), strict=True)]
        self._passing = ThreadPoolExecutor(1, thread_name_prefix="relay")
        self.name = self._first[0].name

    @property
    def scratch_bytes(self) -> int:
        return sum(executor.scratch_bytes for executor in (*self._first, *self._second))

    def run(self) -> tuple[StageReport, ...]:
        """Both hops; bytes that are passed on count on both ranks, as bytes sent and as bytes received."""
        start = time.perf_counter()
        stream = torch.cuda.current_stream(self._device) if is_cuda(self._device) else None
        reports: list[tuple[StageReport, ...]] = []
        passed: list[Future[tuple[StageReport, ...]]] = []
        try:
            for first, second in zip_longest(self._first, self._second):
                if any(future.done() and future.exception() is not None for future in passed):
                    break
                reports.append(first.run())
                if second is not None:
                    passed.append(self._passing.submit(in_context_of(stream, second.run)))
        finally:
            _, left = wait(passed, return_when=FIRST_EXCEPTION)
            for future in left:  # another wave has failed: they would wait for ranks that have given up
                future.cancel()
            wait(left)
        reports += [future.result() for future in passed]
        seconds = time.perf_counter() - start
        return tuple(replace(total, seconds=seconds if total.transfers else 0.0) for total in merged(reports))

    def close(self) -> None:
        """Close both hops. May be called twice."""
        with ExitStack() as closing:
            for part in (*self._first, *self._second, *self._roles):
                closing.callback(part.close)
        self._passing.shutdown(wait=False)


def _part(program: Program, schedule: Schedule) -> Program:
    """Some of the program's transfers, with the tensors that these touch."""
    held = program.by_name
    return bind(
        schedule, {local.name: held[local.name] for local in schedule.tensors}, bucket_bytes=program.bucket_bytes
    )


def _second_hop(connect: Connect, link: Link, relays: Sequence[Relay]) -> list[Role]:
    """Both roles connect at the same time: each waits for the other roles of other ranks."""
    device = link.program.device
    stream = torch.cuda.current_stream(device) if is_cuda(device) else None
    threads = ThreadPoolExecutor(2, thread_name_prefix="relay")
    coming = [
        threads.submit(in_context_of(stream, partial(_role, connect, link, schedules)))
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


def _role(connect: Connect, link: Link, waves: Sequence[Schedule]) -> Role:
    """Connect one role of this rank in every wave."""
    role = waves[0]
    store = Shelf("second", link.another_store())
    group = GlooGroup(
        Shelf("group", store),
        group_rank(role, role.world, role.rank),
        group_names(role),
        timeout_s=link.timeout_s,
    )
    with ExitStack() as undone:
        undone.callback(group.close)
        parts: list[Executor] = []
        for wave in waves:
            here = Shelf(f"wave/{len(parts)}", store)
            program = _part(link.program, wave)
            parts.append(connect(replace(link, program=program, group=group, store=here)))
            undone.callback(parts[-1].close)
        undone.pop_all()
    return Role(tuple(parts), group)
