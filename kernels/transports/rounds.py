"""How the nccl transport fits a refit into bounded scratch: plain numbers, no device.

Round k of a stage carries the k-th bucket of every pair of its ranks, as one group of NCCL messages:

    train:0 -> gen:0  buckets a0 a1 a2        round 0: a0 b0 c0
    train:0 -> gen:1  buckets b0 b1           round 1: a1 b1
    train:1 -> gen:0  bucket  c0              round 2: a2

Rounds are ordered by (number, stage) on every rank, and these two also decide a round's stream. The first round in that
order that is not over is therefore next on its stream at all its ranks, and waits for nothing but bytes: no pattern of
pairs deadlocks. A stream has at least two slots, so that one bucket is packed or unpacked while another is on the wire.
Where there are fewer stages than streams, the rounds of a stage take several in turn: with one, NCCL uses half of its
channels for messages of this size, and the wire idles between two rounds (four H200s: 297 GB/s; with two, 321).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.copy_table import COPY
from mcore_reshard.kernels.options import ALIGNMENT, DEFAULT_SCRATCH_BYTES, MAX_BUCKET_BYTES

from .pipeline import BucketMessage, bucket_messages, group_rank, other_world

DIGEST_BYTES = 16  # after each bucket, where buckets are checked


@dataclass(frozen=True, slots=True)
class ScratchBudget:
    """What every rank may use; equal on all ranks."""

    scratch_bytes: int = DEFAULT_SCRATCH_BYTES  # of device memory, per rank
    streams: int = 2  # rounds that are on the wire at the same time
    slots: int = 2  # rounds of one stream that are under way at the same time
    checksums: bool = False

    def __post_init__(self) -> None:
        if self.streams < 1 or self.slots < 2:
            raise ValueError(f"at least one stream of two slots is needed to overlap packing with the wire: {self}")


@dataclass(frozen=True, slots=True)
class Division:
    """How scratch is divided among stages and peers; a function of what all ranks said, so equal on all of them."""

    bucket_bytes: int
    slots: int  # per stream
    checksums: bool
    streams: Mapping[int, tuple[int, ...]]  # stage index -> its streams, which its rounds take in turn
    members: Mapping[int, tuple[int, ...]]  # stage index -> group ranks in its communicators, ascending


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Where a whole bucket lies in one piece: bytes of a bound tensor."""

    tensor: int  # index into BoundSchedule.tensors
    offset: int


@dataclass(frozen=True, slots=True)
class PlacedMessage:
    """One bucket in its round, from or into either a place in the slot or, without a copy, a tensor."""

    bucket_message: BucketMessage
    member: int  # the peer's rank in the stage's communicators
    message_bytes: int
    run: ByteRange | None
    slot_offset: int  # unused with a run


@dataclass(frozen=True, slots=True)
class Round:
    """What a rank sends and receives in one group of messages."""

    stage: int  # index into BoundSchedule.stages
    number: int
    stream: int
    slot: int  # of the stream
    after: int | None  # index of the round that leaves the slot to this one
    placed_messages: tuple[PlacedMessage, ...]

    @property
    def staged(self) -> tuple[PlacedMessage, ...]:
        return tuple(placed for placed in self.placed_messages if placed.run is None)

    @property
    def slot_bytes(self) -> int:
        return max((p.slot_offset + aligned(p.message_bytes) for p in self.staged), default=0)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def peers_by_stage(bound: BoundSchedule) -> dict[int, int]:
    """Stage index -> number of peers; stages without any are left out. What a rank tells the others."""
    return {index: len(stage.peer_copies) for index, stage in enumerate(bound.stages) if stage.peer_copies}


def divide(budget: ScratchBudget, peers: Sequence[Mapping[int, int]]) -> Division:
    """Divide scratch so that the rank with the most peers fits. `peers[r]` is what group rank `r` said of itself.

    2 streams of 2 slots, at most 4 peers, 512 MiB: buckets of 32 MiB. A slot then has a place for a bucket of every
    peer of any stage, so no rank needs more than the budget, whatever its rounds are. Raises ValueError if less than
    one element fits.
    """
    members = {
        stage: tuple(rank for rank, mine in enumerate(peers) if mine.get(stage))
        for stage in sorted({stage for mine in peers for stage, count in mine.items() if count})
    }
    streams = {
        stage: tuple(range(turn, budget.streams, len(members))) or (turn % budget.streams,)
        for turn, stage in enumerate(members)
    }
    most_peers = max((count for mine in peers for count in mine.values()), default=1)
    places = budget.streams * budget.slots * most_peers
    place_bytes = budget.scratch_bytes // places // ALIGNMENT * ALIGNMENT
    digest_bytes = DIGEST_BYTES if budget.checksums else 0
    bucket_bytes = min(place_bytes - digest_bytes, MAX_BUCKET_BYTES)
    if bucket_bytes < ALIGNMENT:
        raise ValueError(
            f"{budget.scratch_bytes} bytes of scratch are too few for {places} buckets "
            f"({most_peers} peers, {places // most_peers} slots): give at least {places * (ALIGNMENT + digest_bytes)}"
        )
    return Division(bucket_bytes, budget.slots, budget.checksums, streams, members)


def rounds(bound: BoundSchedule, division: Division, *, in_place: Sequence[bool] | None = None) -> tuple[Round, ...]:
    """The rank's rounds in the order of the session. `bound` is bound with the division's bucket size.

    `in_place` [tensors] says which tensors messages may leave or enter without a copy; by default all.
    """
    assert bound.bucket_bytes == division.bucket_bytes
    ordered = sorted(bucket_messages(bound), key=lambda bucket_message: (bucket_message.number, bucket_message.stage))
    found: list[Round] = []
    on_stream: dict[int, list[int]] = {}  # the stream's rounds so far
    for (number, stage), together in groupby(
        ordered, key=lambda bucket_message: (bucket_message.number, bucket_message.stage)
    ):
        stream = division.streams[stage][number % len(division.streams[stage])]
        earlier = on_stream.setdefault(stream, [])
        after = earlier[-division.slots] if len(earlier) >= division.slots else None
        placed_messages = _placed_messages(bound, division, tuple(together), in_place)
        found.append(Round(stage, number, stream, len(earlier) % division.slots, after, placed_messages))
        earlier.append(len(found) - 1)
    return tuple(found)


def slot_bytes(found: Sequence[Round]) -> dict[tuple[int, int], int]:
    """(stream, slot) -> bytes: the largest round that goes through it."""
    needed: dict[tuple[int, int], int] = {}
    for each in found:
        place = each.stream, each.slot
        needed[place] = max(needed.get(place, 0), each.slot_bytes)
    return needed


def round_copies(each: Round) -> NDArray[np.void]:
    """The copies (dtype COPY) between tensors and the round's slot, which is their SCRATCH."""
    tables = []
    for placed in each.staged:
        bucket, peer_copies = placed.bucket_message.bucket, placed.bucket_message.peer_copies
        table = peer_copies.copies[bucket.first_copy : bucket.stop_copy].copy()
        table["dst_offset" if peer_copies.sends else "src_offset"] += placed.slot_offset
        tables.append(table)
    return np.concatenate(tables) if tables else np.empty(0, COPY)


def contiguous_run(copies: NDArray[np.void], *, sends: bool) -> ByteRange | None:
    """The bytes of a tensor that a bucket holds, if they lie in one piece, with nothing between the parts."""
    local, scratch = ("src", "dst") if sends else ("dst", "src")
    rows = copies["row_bytes"]
    offsets, places = copies[local + "_offset"], copies[scratch + "_offset"]
    whole = (
        bool((copies["extents"] == 1).all())
        and bool((copies[local] == copies[local][0]).all())
        and bool((offsets - places == offsets[0]).all())
        and np.array_equal(places, np.cumsum(rows) - rows)
    )
    return ByteRange(int(copies[local][0]), int(offsets[0])) if whole else None


def _placed_messages(
    bound: BoundSchedule, division: Division, together: tuple[BucketMessage, ...], in_place: Sequence[bool] | None
) -> tuple[PlacedMessage, ...]:
    schedule = bound.schedule
    members, checksums = division.members[together[0].stage], division.checksums
    found: list[PlacedMessage] = []
    slot_offset = 0
    for bucket_message in together:
        bucket, peer_copies = bucket_message.bucket, bucket_message.peer_copies
        copies = peer_copies.copies[bucket.first_copy : bucket.stop_copy]
        cast = peer_copies.sends and bool(bound.casts) and bool(np.isin(copies["src"], [*bound.casts]).any())
        run = None if checksums or cast else contiguous_run(copies, sends=peer_copies.sends)
        if run is not None and in_place is not None and not in_place[run.tensor]:
            run = None
        message_bytes = aligned(bucket.nbytes) + DIGEST_BYTES if checksums else bucket.nbytes
        member = members.index(group_rank(schedule, other_world(schedule.world), peer_copies.peer))
        found.append(PlacedMessage(bucket_message, member, message_bytes, run, slot_offset))
        if run is None:
            slot_offset += aligned(message_bytes)
    return tuple(found)
