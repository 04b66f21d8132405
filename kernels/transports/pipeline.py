"""What all transports share: messages between ranks, and the order in which a rank handles its buckets.

Every rank sorts its buckets by one key that all ranks agree on and keeps a window of them in flight. The smallest
bucket that is not done is then always at the front of both its ends' windows, so something can always move: no pattern
of peers deadlocks, with any window. The key visits peers in rotation, so that ranks do not all turn to the same one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from mcore_reshard.kernels.copies.bind import Bucket, Lane, Program
from mcore_reshard.kernels.errors import Waiting
from mcore_reshard.planner.plan.schedule import Schedule, World


class Message(Protocol):
    """A message under way. Its buffer belongs to the transport until `wait` returns."""

    def wait(self) -> None:
        """Raise `DeadlineError` or `PeerLostError` if it does not complete."""


class Group(Protocol):
    """Point-to-point messages between all ranks of a session: training ranks first, then generation ranks.

    Messages between two ranks arrive in the order they were sent. Buffers are contiguous uint8 tensors.
    """

    def send(self, buffer: torch.Tensor, peer: int, waiting: Waiting) -> Message: ...

    def recv(self, buffer: torch.Tensor, peer: int, waiting: Waiting) -> Message: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StageReport:
    """What one rank moved in one stage, and the time from its first message's start to its last one's end."""

    pp_stage: int
    transfers: int
    buckets: int
    nbytes: int
    seconds: float


class StageClock:
    """First start and last end of each stage; stages overlap, so these do not add up to the whole."""

    def __init__(self, stages: int) -> None:
        self._starts: list[float | None] = [None] * stages
        self._ends: list[float] = [0.0] * stages

    def started(self, stage: int) -> None:
        if self._starts[stage] is None:
            self._starts[stage] = time.perf_counter()

    def finished(self, stage: int) -> None:
        self._ends[stage] = time.perf_counter()

    def seconds(self, stage: int) -> float:
        start = self._starts[stage]
        return 0.0 if start is None else self._ends[stage] - start

    def reports(self, program: Program) -> tuple[StageReport, ...]:
        """What the program moved, with the times taken here."""
        return tuple(
            StageReport(
                stage.pp_stage,
                stage.transfers,
                sum(len(lane.buckets) for lane in stage.lanes),
                stage.nbytes,
                self.seconds(index),
            )
            for index, stage in enumerate(program.stages)
        )


class Executor(Protocol):
    """Runs a bound program, as often as its weights change."""

    @property
    def name(self) -> str:
        """The transports that it moves bytes by, as in "direct+nccl"."""

    @property
    def scratch_bytes(self) -> int: ...

    def run(self) -> tuple[StageReport, ...]:
        """Move every byte once; return when they are where they belong. A session calls it on a thread of its own."""

    def close(self) -> None:
        """Free scratch and connections of its own; the session's group is not its own."""


@dataclass(frozen=True, slots=True)
class Step:
    """One bucket of one lane, and what to say if it never comes."""

    stage: int  # index into Program.stages
    number: int  # of the bucket in its lane
    lane: Lane
    bucket: Bucket
    waiting: Waiting


def other_world(world: World) -> World:
    return "gen" if world == "train" else "train"


def group_rank(schedule: Schedule, world: World, rank: int) -> int:
    """Where a rank of a world stands in the session's group."""
    return rank if world == "train" else schedule.train_ranks + rank


def group_names(schedule: Schedule) -> list[str]:
    """How messages call the ranks of the session's group, in order."""
    train = [schedule.name_of("train", rank) for rank in range(schedule.train_ranks)]
    return [*train, *(schedule.name_of("gen", rank) for rank in range(schedule.gen_ranks))]


def steps(program: Program) -> tuple[Step, ...]:
    """The rank's buckets in the session-wide order."""
    schedule = program.schedule
    rotation = max(schedule.train_ranks, schedule.gen_ranks)

    def turn(step: Step) -> tuple[int, int, int]:
        src, dst = (schedule.rank, step.lane.peer) if step.lane.sends else (step.lane.peer, schedule.rank)
        return step.stage, step.number, (dst - src) % rotation

    return tuple(
        sorted(
            (
                Step(index, number, lane, bucket, _waiting(program, stage.pp_stage, lane, bucket))
                for index, stage in enumerate(program.stages)
                for lane in stage.lanes
                for number, bucket in enumerate(lane.buckets)
            ),
            key=turn,
        )
    )


def _waiting(program: Program, pp_stage: int, lane: Lane, bucket: Bucket) -> Waiting:
    peer = program.schedule.name_of(other_world(program.schedule.world), lane.peer)
    return Waiting(program.rank, peer, pp_stage, program.parameter(bucket), lane.sends)
