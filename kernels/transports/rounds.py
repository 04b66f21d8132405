"""The order of buckets. Every transport has one for all ranks, so that no pattern of pairs deadlocks.

Both ends cut a pair's transfers into the same buckets, so every rank knows the order without a message:

    gloo     by `moment_of` each bucket: those of a pair are spread over the whole refit
    nccl     by `window_of` each bucket: the refit is cut into windows of equal length, by the same moments
    direct   by number (what is cast alone; a pair's buckets are numbered through all its stages)

The first bucket in that order that has not arrived is next at both its ranks. It waits for nothing but bytes, so
something can always move.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.buckets import Bucket
from mcore_reshard.kernels.options import ALIGNMENT, MAX_BUCKET_BYTES
from mcore_reshard.planner.plan.schedule import Schedule

DEFAULT_SLOTS = 16  # of gloo; so many messages of a rank are under way, and one that is late holds up the others less
HEADER = struct.Struct(
    "<IIII"
)  # of gloo: CRC-32 of the rest, run, stage index, bucket number; 16 bytes keep parts aligned

_GOLDEN = (5**0.5 - 1) / 2  # between the phases of neighboring turns
_STEP = 2**0.5 - 1  # of all else that turns and stages decide

Rank = TypeVar("Rank", int, NDArray[np.int64])
T = TypeVar("T")


def in_rounds(buckets_of_peer: Mapping[int, Sequence[Bucket]]) -> list[tuple[Bucket, ...]]:
    """Round k: the k-th bucket of every peer that has as many. {0: a0 a1 a2, 1: b0 b1} -> [a0 b0] [a1 b1] [a2]."""
    count = max(map(len, buckets_of_peer.values()), default=0)
    return [
        tuple(buckets[number] for buckets in buckets_of_peer.values() if number < len(buckets))
        for number in range(count)
    ]


def in_parts(waves: Sequence[T], hops: Sequence[Sequence[tuple[T, T]]], after: Sequence[T]) -> list[list[T]]:
    """Part k: wave k from the trainer, and in hop h both ends of wave k - h. `after`: what comes from there after all waves."""
    parts = [[wave] for wave in (*waves, *after)]
    for hop, ends in enumerate(hops, 1):
        for part, both in zip(parts[hop:], ends, strict=False):
            part += both
    return parts


def turn_of(src: Rank, dst: Rank, ranks: int) -> Rank:
    """Where a pair comes in its round: gen:1 begins with train:1. `ranks` is the number of ranks of the larger world."""
    return (dst - src) % ranks


def turn_with(schedule: Schedule, peer: Any) -> Any:
    """The `turn_of` this rank and a peer. Also of an array."""
    ranks = max(schedule.train_ranks, schedule.gen_ranks)
    return turn_of(schedule.rank, peer, ranks) if schedule.world == "train" else turn_of(peer, schedule.rank, ranks)


def moment_of(number: Any, count: Any, turn: Any) -> Any:
    """When a bucket's turn comes, from 0 to 1: bucket `number` of the `count` that its pair has in the stage. Also of arrays.

        pair with 4 buckets, turn 1     0.10   0.35   0.60   0.85
        pair with 2 buckets, turn 2     0.41   0.91

    So pairs end together, however much they exchange, and a rank sends to all its peers, and receives from all stages, all
    the time. Multiples of an irrational number put the first buckets of neighboring turns far from each other.
    """
    return (number + turn * _STEP % 1.0) / count


def phase_of(turn: Any) -> Any:
    """Where in its pair's part of the refit a bucket of nccl is, from 0 to 1. Also of arrays.

    Simulated, windows of the pairs that keep to a stream are filled better with this step than with that of `moment_of`.
    """
    return turn * _GOLDEN % 1.0


def choice_of(turn: Any, choices: Any) -> Any:
    """Which of so many choices a pair takes, of which none makes a difference. Also of arrays.

    Multiples of an irrational number deal turns evenly, also where a rank has only every second or fourth one.
    """
    return (turn * _STEP % 1.0 * choices).astype(np.int64)


def joined_phase_of(turn: Any, stage: Any, ranks: Any) -> Any:
    """The same where messages of the trainer and of replicas share windows, so that stages are apart as well.

    `ranks`: of the engine, for messages between replicas; 0 for those of the trainer. A replica exchanges bytes with all
    others, so that their turns are equally far from each other, as 8, 16, ... 120 of 128; so are then their phases.
    """
    phase = np.where(ranks, turn / np.maximum(ranks, 1), phase_of(turn))
    return (phase + stage * _STEP) % 1.0


def window_of(number: Any, count: Any, phase: Any, windows: int) -> Any:
    """In which of `windows` windows of equal length the moment of a bucket lies. Also of arrays.

    Where all pairs have as many buckets as there are windows, window k has the k-th bucket of every pair.
    """
    return (number + phase) * windows // count


def in_moments(schedule: Schedule, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """The rank's buckets by `moment_of` each; of equal ones by stage and turn, which no two buckets of a rank share."""
    counts = Counter((bucket.stage, bucket.peer) for bucket in buckets)

    def key(bucket: Bucket) -> tuple[float, int, int]:
        turn = turn_with(schedule, bucket.peer)
        return moment_of(bucket.number, counts[bucket.stage, bucket.peer], turn), bucket.stage, turn

    return tuple(sorted(buckets, key=key))


def bucket_bytes_within(scratch_bytes: int, peers: int, slots: int, digest_bytes: int = 0) -> int:
    """The largest bucket size at which each of `slots` rounds holds a bucket and its digest for each of `peers`.

    512 MiB, 4 peers, 4 slots: 32 MiB. Raises ValueError if less than one element fits.
    """
    places = peers * slots
    bucket_bytes = min(scratch_bytes // places // ALIGNMENT * ALIGNMENT - digest_bytes, MAX_BUCKET_BYTES)
    if bucket_bytes < ALIGNMENT:
        raise ValueError(
            f"{scratch_bytes} bytes of scratch are too few for {places} buckets "
            f"({peers} peer{'s' * (peers != 1)}, {slots} slots): "
            f"give at least {places * (ALIGNMENT + digest_bytes)}"
        )
    return bucket_bytes


def gloo_window(buckets: Sequence[Bucket], slots: int = DEFAULT_SLOTS) -> tuple[int, int]:
    """(slots, bytes of each) through which a rank's buckets go over gloo, each behind its header."""
    return min(slots, len(buckets)), HEADER.size + max((bucket.nbytes for bucket in buckets), default=0)
