"""A rank's connection with the members of an epoch: bound tensors, executors, and the CPU messages of all members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial

import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule, bind
from mcore_reshard.kernels.errors import BindError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup
from mcore_reshard.kernels.rendezvous.polling import NOTICE_S, DeadlineThread
from mcore_reshard.kernels.rendezvous.rendezvous import Rendezvous
from mcore_reshard.kernels.transports.base import (
    Executor,
    Transport,
    TransportContext,
    close_all,
    connect_all,
    connect_group,
)
from mcore_reshard.kernels.transports.broadcast import Tree
from mcore_reshard.kernels.transports.group_ranks import group_names
from mcore_reshard.kernels.transports.kept import Kept
from mcore_reshard.kernels.transports.registry import resolve
from mcore_reshard.kernels.transports.source_checks import SourceChecks
from mcore_reshard.planner.plan.schedule import Schedule

EVERYTHING, TRAINABLE = "everything", "trainable parameters"  # what a refit moves, as reports say it


@dataclass(frozen=True, slots=True)
class Program:
    """What one kind of refit moves, and by what. Golden moves all tensors by name: it has neither."""

    moved: str
    names: Sequence[str] | None  # of what moves by name; None: everything
    bound: BoundSchedule | None = None
    executor: Executor | None = None
    checks: SourceChecks | None = None


@dataclass(slots=True)
class Connection:
    """Everything that an epoch opens, and `close` frees."""

    epoch: str
    replicas: tuple[int, ...]
    schedule: Schedule
    transport: Transport
    group: GlooGroup
    programs: Sequence[Program]  # of everything; then, if parameters are frozen, of the others
    thread: DeadlineThread  # executors run on it
    is_moving: bool = False  # whether a run is still under way, although this is closed
    fastest_s: dict[str, float] = field(default_factory=dict)  # of the runs of each program, by what it moves

    @property
    def executors(self) -> list[Executor]:
        return [program.executor for program in self.programs if program.executor is not None]

    @property
    def scratch_bytes(self) -> int:
        """Memory that the transport holds besides the model."""
        return sum(executor.scratch_bytes for executor in self.executors)

    def tree(self) -> Tree:
        """The way of whole tensors: training rank 0 is the root; generation ranks follow."""
        names = group_names(self.schedule)
        ranks = (0, *range(self.schedule.train_ranks, len(names)))
        position = self.schedule.rank + 1 if self.schedule.world == "gen" else 0
        return Tree(position, ranks, tuple(names[rank] for rank in ranks))

    def close(self, *, failed: bool = False) -> None:
        """End all messages, and free the transport. After a failure, or where it is at work, wait NOTICE_S at most for it:
        others wait for this rank, and NCCL takes seconds to abort.
        """
        self.group.close()
        if failed or self.thread.is_busy:  # a run keeps what it uses until it ends; gloo's ends with the group
            run_ended = self.thread.start(lambda: None)
            wait([self.thread.start(partial(close_all, self.executors))], NOTICE_S)
            self.is_moving = not run_ended.done()
        else:
            close_all(self.executors)


def bind_part(
    schedule: Schedule,
    tensors: Mapping[str, torch.Tensor],
    options: Options,
    moves_by_name: str | None,
    before: BoundSchedule | None,
    kept: Kept,
) -> tuple[Transport, BoundSchedule | None]:
    """The transport of a session, and a rank's tensors bound for it; None under golden.

    `moves_by_name`: the argument that lacks a function to move whole tensors by name; None if there is one. `before`: the
    rank's tensors as they were bound for other replicas. Raises `BindError` and `TransportUnavailable`.
    """
    devices = (tensors[local.name].device.type for local in schedule.tensors if local.name in tensors)
    transport = resolve(options.transport, next(devices, "cpu"))
    if (transport.connect is None or schedule.misc) and moves_by_name is not None:
        route = f"{len(schedule.misc)} parameters on the misc route" if transport.connect else transport.name
        missing = f"{route}, and no function to move whole tensors by name was given: {moves_by_name}="
        raise BindError(schedule.name, [missing])
    if not transport.connect:
        return transport, None
    bound = None if before is None else before.again(schedule, tensors)
    kept.counts["tensors bound" if bound is None else "tensors kept"] += len(schedule.tensors)
    return transport, bind(schedule, tensors) if bound is None else bound


def connect_members(
    rendezvous: Rendezvous,
    epoch: str,
    replicas: tuple[int, ...],
    schedule: Schedule,
    transport: Transport,
    bound: BoundSchedule | None,
    options: Options,
    kept: Kept,
) -> Connection:
    """Connect with all members of an epoch, which do the same at this time."""
    group = connect_group(rendezvous.store_for("gloo"), schedule, options.timeout_s)
    thread = DeadlineThread("refit")
    if bound is None or transport.connect is None:
        return Connection(epoch, replicas, schedule, transport, group, [Program(EVERYTHING, None)], thread)
    kept.connect(rendezvous.store_for("memory"), bound.by_name)
    bound_by_name = {transport.name: bound}
    try:
        if schedule.later is not None:
            bound_by_name[f"{transport.name}-later"] = bound.part(schedule.later)
        contexts = [
            TransportContext(rendezvous.store_for(name), group, part, options, kept)
            for name, part in bound_by_name.items()
        ]
        checks = [SourceChecks(part, options) for part in bound_by_name.values()]
        executors = connect_all(map(transport.connect, contexts))
    except BaseException:
        group.close()
        raise
    programs = [
        Program(moved, part.schedule.misc, part, executor, check)
        for moved, part, executor, check in zip(
            (EVERYTHING, TRAINABLE), bound_by_name.values(), executors, checks, strict=False
        )
    ]
    return Connection(epoch, replicas, schedule, transport, group, programs, thread)
