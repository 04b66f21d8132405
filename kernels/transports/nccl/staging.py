"""Fit a refit over nccl into bounded scratch: plain numbers, no device.

A round (see `rounds`) is one group of NCCL messages. Its number and its stage decide on which stream it goes. A stream
has at least two slots, so that one bucket is packed or unpacked while another is on the wire.

Where there are fewer stages than streams, the rounds of a stage take several streams in turn. On one stream NCCL uses
half of its channels for messages of this size, and the wire idles between two rounds. Four H200s reach 297 GB/s with one
stream, 321 with two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.buckets import Bucket, aligned
from mcore_reshard.kernels.copies.casts import Casts, bound_casts
from mcore_reshard.kernels.copies.copy_table import COPY, SCRATCH, joined
from mcore_reshard.kernels.options import DEFAULT_SCRATCH_BYTES
from mcore_reshard.kernels.transports.group_ranks import peer_group_rank
from mcore_reshard.kernels.transports.rounds import bucket_bytes_within, stage_rounds
from mcore_reshard.planner.plan.schedule import Schedule

DIGEST_BYTES = 16  # after each bucket, where buckets are checked


@dataclass(frozen=True, slots=True)
class ScratchBudget:
    """The scratch that every rank may use; equal on all ranks."""

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
    budget: ScratchBudget
    streams: Mapping[int, tuple[int, ...]]  # stage index -> its streams, which its rounds take in turn
    members: Mapping[int, tuple[int, ...]]  # stage index -> group ranks in its communicators, ascending


@dataclass(frozen=True, slots=True)
class PlacedMessage:
    """One bucket in its round, from or into either a place in the slot or, without a copy, a tensor."""

    bucket: Bucket
    member: int  # the peer's rank in the stage's communicators
    message_bytes: int
    tensor: int | None  # index into Schedule.tensors; None: it lies in the slot
    offset: int  # where it begins there

    @property
    def executed(self) -> Bucket:
        """The bucket as it moves: without a copy it is one run of bytes of the tensor, told segment by segment.

        A run may go through the weights of several experts, and a copy is of one parameter.
        """
        if self.tensor is None:
            return self.bucket
        local, scratch = ("src", "dst") if self.bucket.sends else ("dst", "src")
        starts = self.bucket.copies[scratch + "_offset"]
        run = np.zeros(len(starts), COPY)
        run["extents"], run["row_bytes"] = 1, np.diff(starts, append=self.bucket.nbytes)
        run[local], run[local + "_offset"] = self.tensor, self.offset + starts
        run[scratch], run[scratch + "_offset"] = SCRATCH, starts
        return replace(self.bucket, copies=run)


class RoundPlace(NamedTuple):
    """Where a round is carried out; of a round's messages it depends on nothing but their stage and number."""

    stage: int  # index into Schedule.stages
    number: int
    stream: int
    slot: int  # of the stream
    after: int | None  # index of the round that leaves the slot to this one


@dataclass(frozen=True, slots=True)
class Round:
    """The messages that a rank sends and receives in one NCCL group."""

    stage: int  # index into Schedule.stages
    number: int
    stream: int
    slot: int  # of the stream
    after: int | None  # index of the round that leaves the slot to this one
    placed_messages: tuple[PlacedMessage, ...]

    @property
    def staged(self) -> tuple[PlacedMessage, ...]:
        return tuple(placed for placed in self.placed_messages if placed.tensor is None)

    @property
    def copies(self) -> NDArray[np.void]:
        """The copies (dtype COPY) between tensors and the round's slot, which is their SCRATCH."""
        return joined([placed.bucket.copies_at(SCRATCH, placed.offset) for placed in self.staged])


def peers_by_stage(schedule: Schedule) -> dict[int, int]:
    """Stage index -> number of peers that bytes pass to or from; stages without any are left out."""
    peers = {
        index: sum(len(np.unique(table.peer[table.nbytes > 0])) for table in (stage.sends, stage.recvs))
        for index, stage in enumerate(schedule.stages)
    }
    return {index: count for index, count in peers.items() if count}


def divide(budget: ScratchBudget, peers: Sequence[Mapping[int, int]]) -> Division:
    """Divide scratch so that the rank with the most peers fits. `peers[r]` is the `peers_by_stage` of group rank `r`.

    A slot has a place for one bucket of each peer of any stage. With 2 streams of 2 slots, at most 4 peers and 512 MiB,
    buckets have 32 MiB. Raises ValueError if less than one element fits.
    """
    members = {
        stage: tuple(rank for rank, of_rank in enumerate(peers) if of_rank.get(stage))
        for stage in sorted({stage for of_rank in peers for stage, count in of_rank.items() if count})
    }
    streams = {
        stage: tuple(range(turn, budget.streams, len(members))) or (turn % budget.streams,)
        for turn, stage in enumerate(members)
    }
    most_peers = max((count for of_rank in peers for count in of_rank.values()), default=1)
    bucket_bytes = bucket_bytes_within(
        budget.scratch_bytes, most_peers, budget.streams * budget.slots, DIGEST_BYTES if budget.checksums else 0
    )
    return Division(bucket_bytes, budget, streams, members)


def divided_rounds(
    schedule: Schedule, buckets: Sequence[Bucket], division: Division, *, in_place: Sequence[bool]
) -> tuple[Round, ...]:
    """The rank's rounds in order. `in_place` [tensors] says which tensors messages may leave or enter without a copy."""
    casts = bound_casts(schedule)
    rounds = {(each.stage, each.number): each.buckets for each in stage_rounds(schedule, buckets)}
    return tuple(
        Round(*place, _placed_messages(schedule, casts, division, rounds[place.stage, place.number], in_place))
        for place in round_places(division, rounds)
    )


def round_places(division: Division, rounds: Iterable[tuple[int, int]]) -> list[RoundPlace]:
    """The places of a rank's rounds, in the order in which it starts them; `rounds` are (stage, number), in any order."""
    places: list[RoundPlace] = []
    on_stream: dict[int, list[int]] = {}  # the stream's rounds so far
    slots = division.budget.slots
    for number, stage in sorted((number, stage) for stage, number in rounds):
        streams = division.streams[stage]
        stream = streams[number % len(streams)]
        earlier = on_stream.setdefault(stream, [])
        after = earlier[-slots] if len(earlier) >= slots else None
        earlier.append(len(places))
        places.append(RoundPlace(stage, number, stream, (len(earlier) - 1) % slots, after))
    return places


def _placed_messages(
    schedule: Schedule, casts: Casts, division: Division, buckets: Sequence[Bucket], in_place: Sequence[bool]
) -> tuple[PlacedMessage, ...]:
    members, checksums = division.members[buckets[0].stage], division.budget.checksums
    messages: list[PlacedMessage] = []
    slot_end = 0
    for bucket in buckets:
        is_cast = bucket.sends and bool(casts) and bool(np.isin(bucket.copies["src"], [*casts]).any())
        message_bytes = aligned(bucket.nbytes) + DIGEST_BYTES if checksums else bucket.nbytes
        member = members.index(peer_group_rank(schedule, bucket.peer))
        place = None if checksums or is_cast else place_in_tensor(bucket.copies, sends=bucket.sends)
        tensor, offset = place if place is not None and in_place[place[0]] else (None, slot_end)
        messages.append(PlacedMessage(bucket, member, message_bytes, tensor, offset))
        if tensor is None:
            slot_end += aligned(message_bytes)
    return tuple(messages)


def place_in_tensor(copies: NDArray[np.void], *, sends: bool) -> tuple[int, int] | None:
    """(tensor, byte offset) of a bucket that lies in one tensor in one piece, with nothing between the segments."""
    local, scratch = ("src", "dst") if sends else ("dst", "src")
    tensors = copies[local]
    if tensors[0] != tensors[-1] or copies["extents"][0].max() > 1:
        return None  # most buckets, of which there are 100,000 between many ranks
    rows, offsets, places = copies["row_bytes"], copies[local + "_offset"], copies[scratch + "_offset"]
    whole = len(copies) == 1 or (
        bool((copies["extents"] == 1).all())
        and bool((tensors == tensors[0]).all())
        and bool((offsets - places == offsets[0]).all())
        and np.array_equal(places, np.cumsum(rows) - rows)
    )
    return (int(tensors[0]), int(offsets[0])) if whole else None


def slot_bytes(rounds: Sequence[Round]) -> dict[tuple[int, int], int]:
    """(stream, slot) -> bytes: the largest round that goes through it."""
    needed: dict[tuple[int, int], int] = {}
    for each in rounds:
        place = each.stream, each.slot
        ends = [placed.offset + aligned(placed.message_bytes) for placed in each.staged]
        needed[place] = max([needed.get(place, 0), *ends])
    return needed
