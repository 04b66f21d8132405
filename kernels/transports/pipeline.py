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

from mcore_reshard.kernels.copies.bind import BoundSchedule, Bucket, PeerCopies
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

    def reports(self, bound: BoundSchedule) -> tuple[StageReport, ...]:
        """What the program moved, with the times taken here."""
        return tuple(
            StageReport(
                stage.pp_stage,
                stage.transfers,
                sum(len(peer_copies.buckets) for peer_copies in stage.peer_copies),
                stage.nbytes,
                self.seconds(index),
            )
            for index, stage in enumerate(bound.stages)
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
class BucketMessage:
    """One bucket of one lane, and what to say if it never comes."""

    stage: int  # index into BoundSchedule.stages
    number: int  # of the bucket in its lane
    peer_copies: PeerCopies
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


def bucket_messages(bound: BoundSchedule) -> tuple[BucketMessage, ...]:
    """The rank's buckets in the session-wide order."""
    schedule = bound.schedule
    rotation = max(schedule.train_ranks, schedule.gen_ranks)

    def turn(bucket_message: BucketMessage) -> tuple[int, int, int]:
        src, dst = (
            (schedule.rank, bucket_message.peer_copies.peer)
            if bucket_message.peer_copies.sends
            else (bucket_message.peer_copies.peer, schedule.rank)
        )
        return bucket_message.stage, bucket_message.number, (dst - src) % rotation

    return tuple(
        sorted(
            (
                BucketMessage(index, number, peer_copies, bucket, _waiting(bound, stage.pp_stage, peer_copies, bucket))
                for index, stage in enumerate(bound.stages)
                for peer_copies in stage.peer_copies
                for number, bucket in enumerate(peer_copies.buckets)
            ),
            key=turn,
        )
    )


def _waiting(bound: BoundSchedule, pp_stage: int, peer_copies: PeerCopies, bucket: Bucket) -> Waiting:
    peer = bound.schedule.name_of(other_world(bound.schedule.world), peer_copies.peer)
    return Waiting(bound.rank_name, peer, pp_stage, bound.parameter(bucket), peer_copies.sends)
