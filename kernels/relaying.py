"""Two hops: from the trainer to one replica of each shard, and from there to the others.

The second hop is a refit of its own, in which every generation rank takes both parts: it sends what landed on it, and
receives what landed on other replicas. It starts on a rank once all that the rank was to get from the trainer is there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import torch
from torch.distributed import PrefixStore

from mcore_reshard.planner.schedule import Schedule

from .gloo import GlooGroup
from .joined import JoinedExecutor, in_context_of, merged
from .pipeline import Executor, StageReport, group_names, group_rank
from .program import bind
from .transport import Link

Connect = Callable[[Link], Executor]

_PARTS = 3  # executors on a rank that relays, which share its scratch


def relayed(connect: Connect, link: Link) -> Executor:
    """Connect what the plan moves, by two hops where it relays."""
    schedule = link.program.schedule
    if not schedule.relayed:
        return connect(link)
    shared = replace(link, scratch_bytes=link.scratch_bytes // _PARTS)
    first = connect(replace(shared, store=PrefixStore("first", link.store)))
    if schedule.relay is None:
        return first
    try:
        return RelayedExecutor(first, _second_hop(connect, shared))
    except BaseException:
        first.close()
        raise


def unrelayed(connect: Connect, link: Link) -> Executor:
    """Connect what the plan moves, all of it from the trainer, also where the plan relays.

    For nccl: a rank that passes on takes two parts, and NCCL refuses a GPU twice in one communicator.
    """
    program = link.program
    if program.schedule.unrelayed is None:
        return connect(link)
    straight = bind(program.schedule.unrelayed(), program.by_name, bucket_bytes=program.bucket_bytes)
    return connect(replace(link, program=straight))


class RelayedExecutor:
    """One executor after another."""

    def __init__(self, first: Executor, second: Executor) -> None:
        self._hops = first, second
        self.name = first.name

    @property
    def scratch_bytes(self) -> int:
        return sum(hop.scratch_bytes for hop in self._hops)

    def run(self) -> tuple[StageReport, ...]:
        """Both hops; bytes that are passed on count on both ranks, as bytes sent and as bytes received."""
        first, second = (hop.run() for hop in self._hops)
        return tuple(
            replace(total, seconds=one.seconds + two.seconds)
            for total, one, two in zip(merged([first, second]), first, second, strict=True)
        )

    def close(self) -> None:
        """Close both. May be called twice."""
        try:
            self._hops[1].close()
        finally:
            self._hops[0].close()


@dataclass(frozen=True)
class _Role:
    """One end of the second hop, with the group that is its own."""

    executor: Executor
    group: GlooGroup

    @property
    def name(self) -> str:
        return self.executor.name

    @property
    def scratch_bytes(self) -> int:
        return self.executor.scratch_bytes

    def run(self) -> tuple[StageReport, ...]:
        return self.executor.run()

    def close(self) -> None:
        self.group.close()
        self.executor.close()


def _second_hop(connect: Connect, link: Link) -> Executor:
    """Both roles connect at the same time: each waits for the other roles of other ranks."""
    assert link.program.schedule.relay is not None
    relay = link.program.schedule.relay()
    device = link.program.device
    stream = torch.cuda.current_stream(device) if device is not None and device.type == "cuda" else None
    threads = ThreadPoolExecutor(2, thread_name_prefix="relay")
    coming = [
        threads.submit(in_context_of(stream, lambda part=part: _role(connect, link, part)))  # type: ignore[misc]
        for part in (relay.sends, relay.receives)
    ]
    threads.shutdown(wait=False)
    ended, _ = wait(coming, return_when=FIRST_EXCEPTION)
    failures = [error for role in ended if (error := role.exception()) is not None]
    if failures:  # at once: the other role may wait for its deadline
        for role in coming:
            role.add_done_callback(_close)
        raise failures[0]
    return JoinedExecutor([role.result() for role in coming], device)


def _close(role: Future[_Role]) -> None:
    if role.exception() is None:
        role.result().close()


def _role(connect: Connect, link: Link, schedule: Schedule) -> _Role:
    program = bind(schedule, link.program.by_name, bucket_bytes=link.program.bucket_bytes)
    store = PrefixStore("second", link.another_store())
    group = GlooGroup(
        PrefixStore("group", store),
        group_rank(schedule, schedule.world, schedule.rank),
        group_names(schedule),
        timeout_s=link.timeout_s,
    )
    try:
        executor = connect(replace(link, program=program, group=group, store=store))
    except BaseException:
        group.close()
        raise
    return _Role(executor, group)
