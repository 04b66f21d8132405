"""Fit a refit over nccl into bounded scratch: plain numbers, no device.

A round is one group of NCCL messages: those of one window (see `window_of`) on one stream, in one communicator. A rank is
in one communicator of a stream (see `shared_gpus`). A stream has at least two slots, so that one round is packed or unpacked
while another is on the wire.

    windows      0    1    2    3    4        a rank with few peers: a window is a round, on the streams in turn
    stream 0     a0        a2        a4
    stream 1          a1        a3

    stream 0     a0   a1   a2   a3   a4       ranks with many peers: half of the pairs on each stream, and
    stream 1     b0   b1   b2   b3   b4       longer windows, which are filled more evenly

On one stream NCCL uses half of its channels for messages of this size, and the wire idles between two rounds. Four H200s
reach 297 GB/s with one stream, 321 with two.

All ranks take the same number of windows: the fewest with which the fullest round of every rank fits into a slot. Ranks
with few peers take at least as many as the pair with the most buckets has, so that all streams have rounds; in waves, which
have few buckets, half as many.

Replicas that pass bytes on do so in the rounds of the trainer's next waves. One group has what a rank receives from the
trainer and from replicas, and what it sends to these. The fuller side of the fullest rank decides how long such a round
takes. In many parts pairs exchange much alike: each has one bucket in every window, so that all windows take equally long.
In few parts messages are smaller, or only those over NVLink; and pairs keep a pace: the number of buckets of the trainer's
pair with the most, and for replicas a multiple of it. Pairs have so many, half as many, a quarter (see `cut_buckets`). The
trainer's pace, its half, or a multiple is the number of windows:

    own numbers      20 of the trainer's, 128 of a replica's, 64 windows        4 or 5 of 16 pairs of the trainer in a window
    in pace          20 of the trainer's, 140 of a replica's, 40 windows        8 of 16

With other numbers, the buckets of all pairs would come together at some moments, and none would at others. What a rank with
many peers gets in many waves keeps a pace as well. Where ranks share GPUs, replicas pass on in rounds of a stream of their
own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.buckets import (
    Bucket,
    Size,
    aligned,
    cut_buckets,
    fewest_buckets,
    pace_of,
    pair_bytes,
)
from mcore_reshard.kernels.copies.casts import Casts, bound_casts
from mcore_reshard.kernels.copies.copy_table import COPY, SCRATCH, Ints, joined
from mcore_reshard.kernels.options import ALIGNMENT, DEFAULT_SCRATCH_BYTES, MAX_BUCKET_BYTES
from mcore_reshard.kernels.transports.rounds import (
    bucket_bytes_within,
    joined_phase_of,
    phase_of,
    turn_with,
    window_of,
)
from mcore_reshard.planner.plan.paths import HopKind
from mcore_reshard.planner.plan.schedule import Schedule

from .shared_gpus import SharedGpus

DIGEST_BYTES = 16  # after each bucket, where buckets are checked
_MOST_MESSAGES = 16  # that a slot holds at their full size: of 512 MiB, 8 MiB each
_MOST_OF_MANY = 12  # the same where a rank has many peers, and replicas share: 10.7 MiB each
_MOST_PACED = 48  # the same where pairs keep a pace: 2.7 MiB each
_MOST_LARGE = 7  # the same where pairs of many peers do: 18.3 MiB each, as equal numbers leave some messages less full
_SO_MANY_PEERS = 48
_SO_MANY_PARTS = 16  # of a refit, from which on a rank with so many peers has little for each of them in a part;
_FEWER_PEERS = 128  # if a rank has as many, messages stay large
_OF_SHARES = 6  # Messages within a domain are so many times smaller than those of 10.7 MiB: NVLink has them at once.
_SEGMENTS = 16  # of a full message, if many are to be equally full: whole transfers of 7 MiB would fill two thirds
_LEAST_SEGMENT_BYTES = 64 << 10  # If scratch is small, segments would take more copies than they are worth.
_LEAST_SEGMENTS = 4  # of a full message, even so, where pairs keep a pace
_LEAST_PACED_BYTES = 1024  # of a message: alignment takes too much of smaller ones
_MANY_PEERS = 4  # for each stream, from which on a pair keeps to one
_MOST_OF_A_PAIR = 8  # of its buckets in a window, where pairs keep to a stream
_FEW_BUCKETS = 32  # of the pair with the most, as in a wave: if it has fewer, windows may have two of it
_LEAST_WINDOWS = 4  # these, so that both streams have rounds
_LEAST_HALVED = 16  # windows, if every pair has two buckets in each, or four
_GROWTH, _GROWTHS = 1.1, 88  # the numbers of windows that are tried


Floats = NDArray[np.float64]


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
    """How scratch is divided among peers; a function of what all ranks said, so equal on all of them."""

    bucket_bytes: int
    budget: ScratchBudget
    members: tuple[int, ...]  # group ranks that have peers, or beside them a NIC that those use, ascending
    keeps_streams: bool  # whether a pair keeps to one stream
    hops: tuple[HopKind, ...] = ()  # in which replicas send as well
    of_shares: int = 1  # so many times smaller are buckets that they send within their domain
    segments: int = 1  # of a full bucket; fewer where they would be too small
    keeps_pace: bool = False  # whether pairs of a hop have as many buckets, half as many, or a quarter
    is_even: bool = False  # whether all pairs have equally many, one for each window; keeps_pace then as well
    most: tuple[int, int] | None = None  # buckets of the pair with the most, once known: of the trainer's, of replicas
    windows: int = 1
    shared: SharedGpus | None = None  # where members of both sides share GPUs

    @property
    def passes_on(self) -> bool:
        return bool(self.hops)

    @property
    def streams(self) -> int:
        return self.budget.streams if self.shared is None else self.shared.streams(self.budget.streams)

    @property
    def slot_bytes(self) -> int:
        return self.budget.scratch_bytes // (self.streams * self.budget.slots)

    def communicators(self) -> dict[int, tuple[int, ...]]:
        """The group ranks in each communicator, ascending, by its number."""
        return {0: self.members} if self.shared is None else self.shared.communicators(self.members)

    def streams_with(self, communicator: int) -> tuple[int, ...]:
        """The streams that have a communicator of this number."""
        streams = self.budget.streams
        return tuple(range(streams)) if self.shared is None else self.shared.streams_of(communicator, streams)

    def communicator_of(self, src: Any, dst: Any, turn: Any) -> Any:
        """The communicator of a message between two group ranks. Also of arrays."""
        return 0 * turn if self.shared is None else self.shared.communicator_of(src, dst, turn)

    def streams_of(self, turn: int, communicator: int) -> tuple[int, ...]:
        """The streams that a pair's messages take."""
        streams = self.streams_with(communicator)
        return (int(_stream_of_pair(turn, len(streams))),) if self.keeps_streams and len(streams) > 1 else streams

    def stream_of(self, window: Any, turn: Any, communicator: Any) -> Any:
        """The stream of a message. Also of arrays."""
        streams = self.budget.streams
        own = _stream_of_pair(turn, streams) if self.keeps_streams else window % streams
        return own if self.shared is None else self.shared.stream_of(communicator, own, streams)

    def cut_sizes(self, hop: HopKind) -> tuple[int, int]:
        """Bytes of the largest bucket of a hop, and of the largest segment in it."""
        bucket_bytes = _part_of(self.bucket_bytes, self.of_shares if hop == "share" else 1)
        least_bytes = min(_LEAST_SEGMENT_BYTES, _part_of(bucket_bytes, _LEAST_SEGMENTS if self.keeps_pace else 1))
        return bucket_bytes, max(_part_of(bucket_bytes, self.segments), least_bytes)

    def with_most(self, most: Iterable[Sequence[int]]) -> Division:
        """The division once it is known how many buckets the pairs with the most have, by rank."""
        of_train, of_replicas = (max(each) for each in zip(*most, strict=True))
        if self.is_even:
            of_train = of_replicas = max(2, of_train, of_replicas)  # both streams have rounds
        elif self.keeps_pace:
            of_train, of_all = pace_of(of_train), max(1, pace_of(of_train or of_replicas))
            of_replicas = -(-of_replicas // of_all) * of_all
        return replace(self, most=(of_train, of_replicas))

    def pace(self, hop: HopKind) -> int:
        """The pace of the pairs of a hop; 0: they keep none."""
        return self.most[hop != "train"] if self.keeps_pace and self.most else 0

    def buckets_of(self, schedule: Schedule) -> tuple[Bucket, ...]:
        """The buckets of a rank in one hop; none yet where pairs keep a pace that is not known."""
        if self.keeps_pace and self.most is None:
            return ()
        kind = schedule.hop_kind
        return cut_buckets(schedule, *self.cut_sizes(kind), pace=self.pace(kind), equal=self.is_even)

    def windows_needed(self, nbytes: Size, pairs: Size) -> Size:
        """In how many windows slots have room for so many bytes of a rank, if each of its pairs has a bucket in every one.

        A bucket may be larger than the others by a segment. Segments are half full or more, and each is aligned.
        """
        _, segment_bytes = self.cut_sizes("train")
        room = np.maximum(self.slot_bytes - pairs * (segment_bytes + DIGEST_BYTES), self.slot_bytes // 2)
        padded = nbytes + 2 * ALIGNMENT * (nbytes // segment_bytes)
        return -(-padded // np.minimum(room, MAX_BUCKET_BYTES - segment_bytes))  # type: ignore[return-value]

    def phase_of(self, turn: Any, stage: Any, ranks: Any) -> Any:
        """Where in its part a bucket's moment is; `ranks` as in `joined_phase_of`. Also of arrays."""
        return joined_phase_of(turn, stage, ranks) if self.passes_on else phase_of(turn)


@dataclass(frozen=True, slots=True, eq=False)
class HopEnd:
    """What a rank sends in one hop, or receives, in buckets."""

    schedule: Schedule
    buckets: tuple[Bucket, ...]
    relays: bool  # whether its peers are replicas, in a session with a trainer
    first_own: int  # where rank 0 of this side stands in the session's group
    first_peer: int  # and rank 0 of its peers

    @classmethod
    def cut(cls, part: Sequence[Schedule], division: Division, train_ranks: int) -> list[HopEnd]:
        """The ends of a part in a session of so many training ranks: first with the other world, then with replicas."""
        return [
            cls(
                schedule,
                division.buckets_of(schedule),
                number > 0,
                train_ranks if number or schedule.world == "gen" else 0,
                train_ranks if number or schedule.world == "train" else 0,
            )
            for number, schedule in enumerate(part)
        ]

    @property
    def sends(self) -> bool:
        return self.schedule.world == "train"

    @property
    def own(self) -> int:
        """The rank itself, in the session's group."""
        return self.first_own + self.schedule.rank

    def most_buckets(self, division: Division) -> int:
        """How many buckets the pair with the most has; or needs, if pairs keep a pace."""
        if not division.keeps_pace:
            return max(Counter((bucket.stage, bucket.peer) for bucket in self.buckets).values(), default=0)
        sizes = division.cut_sizes(self.schedule.hop_kind)
        return int(fewest_buckets(self.pair_bytes(), *sizes).max(initial=0))

    def pair_bytes(self) -> Ints:
        """Bytes that pass with each peer in each stage, where any do."""
        pairs = [pair_bytes(table.peer, table.nbytes) for table in self.schedule.tables]
        nbytes = np.concatenate([np.zeros(0, np.int64), *pairs])
        return nbytes[nbytes > 0]

    def way(self, peer: Any) -> tuple[Any, Any]:
        """The group ranks of the sender and the receiver of a message with a peer. Also of arrays."""
        own, other = self.own, self.first_peer + peer
        return (own, other) if self.sends else (other, own)


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """What decides on the rounds of one rank's messages; every column has one entry a message."""

    number: Ints  # among those of its stage and peer
    count: Ints  # how many these are
    turn: Ints
    phase: Floats
    nbytes: Ints  # in a slot
    communicator: Ints | int = 0

    @classmethod
    def of(cls, ends: Sequence[HopEnd], division: Division) -> Messages:
        """The messages of these ends, one end after the other."""
        columns: list[Ints] = []
        for end in ends:
            rows = [(each.number, each.stage, each.peer, each.nbytes) for each in end.buckets]
            number, stage, peer, nbytes = np.array(rows, np.int64).reshape(-1, 4).T
            _, pair, counts = np.unique(
                stage * (peer.max(initial=0) + 1) + peer, return_inverse=True, return_counts=True
            )
            ranks = end.schedule.gen_ranks if end.relays else 0
            of_end = number, counts[pair], turn_with(end.schedule, peer), stage, ranks, nbytes, *end.way(peer)
            columns.append(np.stack(np.broadcast_arrays(*of_end)))
        number, count, turn, stage, of_ranks, nbytes, src, dst = np.concatenate(columns, axis=1)
        phase = division.phase_of(turn, stage, of_ranks)
        in_slot = aligned(message_bytes(nbytes, division.budget))
        return cls(number, count, turn, phase, in_slot, division.communicator_of(src, dst, turn))

    def windows(self, windows: int) -> Ints:
        """The window of each message."""
        return np.asarray(window_of(self.number, self.count, self.phase, windows), np.int64)


@dataclass(frozen=True, slots=True)
class PlacedMessage:
    """One bucket in its round, from or into either a place in the slot or, without a copy, a tensor."""

    bucket: Bucket
    end: int  # index of the hop's end that it belongs to
    member: int  # the peer's rank in the round's communicator
    message_bytes: int
    tensor: int | None  # index into the end's Schedule.tensors; None: it lies in the slot
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


@dataclass(frozen=True, slots=True)
class Round:
    """The messages that a rank sends and receives in one NCCL group: by turn, and of one peer by stage and number."""

    window: int
    stream: int
    communicator: int  # of the stream
    slot: int  # of the stream
    after: int | None  # index of the round that leaves the slot to this one
    placed_messages: tuple[PlacedMessage, ...]

    @property
    def stages(self) -> frozenset[tuple[int, int]]:
        """Of its messages: (end, index into its Schedule.stages)."""
        return frozenset((placed.end, placed.bucket.stage) for placed in self.placed_messages)

    @property
    def received(self) -> tuple[PlacedMessage, ...]:
        return tuple(placed for placed in self.placed_messages if not placed.bucket.sends)

    @property
    def staged(self) -> tuple[PlacedMessage, ...]:
        return tuple(placed for placed in self.placed_messages if placed.tensor is None)

    def staged_of(self, end: int) -> tuple[PlacedMessage, ...]:
        return tuple(placed for placed in self.staged if placed.end == end)

    def copies(self, end: int) -> NDArray[np.void]:
        """The copies (dtype COPY) between an end's tensors and the round's slot, which is their SCRATCH."""
        return joined([placed.bucket.copies_at(SCRATCH, placed.offset) for placed in self.staged_of(end)])


def pair_count(schedule: Schedule) -> int:
    """With how many peers bytes pass, counted in each stage."""
    tables = [table for stage in schedule.stages for table in (stage.sends, stage.recvs)]
    return sum(len(np.unique(table.peer[table.nbytes > 0])) for table in tables)


def divide(
    budget: ScratchBudget,
    pairs: Sequence[int],
    *,
    parts: int = 1,
    hops: Collection[HopKind] = (),
    members: tuple[int, ...] = (),
    shared: SharedGpus | None = None,
) -> Division:
    """Divide scratch so that the rank with the most peers fits. `pairs[r]` is the `pair_count` of group rank `r`.

    A slot has a place for one bucket of each peer, or for 16. With 2 streams of 2 slots, 4 peers and 512 MiB, buckets have 32
    MiB. Where replicas send as well, in these `hops`, a slot has up to 48. Pairs then keep a pace; in a refit of 16 `parts` or
    more, each has a bucket in every window. They also keep a pace where a rank has many peers: 48 or more. Then slots have 7
    places, but 48 for up to 127 peers in 16 parts. Where many peers have replicas that send within their domain alone, slots
    have 12 places, and pairs keep no pace.

    `members` are the ranks with peers in any part, by default in this one. `shared` says which ranks are beside them, and may
    forward. Where ranks of both sides share GPUs, there may be more streams.
    Raises ValueError if less than one element fits.
    """
    with_peers = tuple(rank for rank, count in enumerate(pairs) if count)
    members = members or with_peers
    if shared is not None:
        members = shared.members(members)
        shared = shared if shared.is_needed(members) else None
    counts = [pairs[rank] for rank in with_peers] or [1]
    has_many = max(counts) >= _SO_MANY_PEERS
    has_little = has_many and max(counts) < _FEWER_PEERS and parts >= _SO_MANY_PARTS
    is_fine = has_little or (bool(hops) and not (has_many and {*hops} == {"share"}))
    is_large = has_many and not is_fine and not hops
    most_messages = (
        _MOST_LARGE if is_large else _MOST_PACED if is_fine else _MOST_OF_MANY if has_many else _MOST_MESSAGES
    )
    slots = (budget.streams if shared is None else shared.streams(budget.streams)) * budget.slots
    digest_bytes = DIGEST_BYTES if budget.checksums else 0
    places = min(max(counts), most_messages)
    is_roomy = budget.scratch_bytes >= 2 * _LEAST_PACED_BYTES * slots * most_messages
    is_even = bool(is_fine and hops) and parts >= _SO_MANY_PARTS and is_roomy
    if is_even:
        places = most_messages  # so that segments are small
    bucket_bytes = bucket_bytes_within(budget.scratch_bytes, places, slots, digest_bytes)
    keeps_pace = (is_fine or is_large) and bucket_bytes >= _LEAST_PACED_BYTES
    keeps_streams = min(counts) >= _MANY_PEERS * budget.streams or (shared is not None and shared.digits > 1)
    return Division(
        bucket_bytes,
        budget,
        members,
        keeps_streams and not hops and not keeps_pace,
        tuple(sorted(hops)),
        of_shares=_OF_SHARES if hops and not is_fine else 1,
        segments=_SEGMENTS if has_many or is_fine else 1,
        keeps_pace=keeps_pace,
        is_even=is_even,
        shared=shared,
    )


def _part_of(nbytes: int, parts: int) -> int:
    """One of so many equal parts, down to a multiple of ALIGNMENT."""
    return max(ALIGNMENT, nbytes // parts // ALIGNMENT * ALIGNMENT)


def _stream_of_pair(turn: Any, streams: int) -> Any:
    """The stream that a pair keeps to: the sum of the digits of its turn, counted in `streams`. Also of arrays.

        turn                0  1  2  3  4  5  6  7
        stream of two       0  1  1  0  1  0  0  1

    A rank may exchange most with every second or fourth peer; these are on all streams as well.
    """
    return _streams_of_turns(int(np.max(turn, initial=0)).bit_length(), streams)[turn]


@cache
def _streams_of_turns(bits: int, streams: int) -> Ints:
    """The streams of all turns of so many bits; these are few, and messages many."""
    turn = np.arange(1 << bits)
    stream = turn % streams
    while streams > 1 and turn.any():
        turn = turn // streams
        stream += turn % streams
    return np.asarray(stream % streams, np.int64)


def most_buckets(ends: Iterable[HopEnd], division: Division) -> tuple[int, int]:
    """Buckets of the pair with the most among a rank's: of those with the other world, of those of replicas.

    If all pairs have equally many, so many windows as the rank needs.
    """
    if division.is_even:
        pairs = np.concatenate([end.pair_bytes() for end in ends])
        windows = int(division.windows_needed(int(pairs.sum()), len(pairs)))
        return windows, windows
    first, *others = (end.most_buckets(division) for end in ends)
    return first, max(others, default=0)


def windows_that_fit(division: Division, messages: Messages, rank: Ints | int = 0) -> Iterator[int]:
    """Numbers of windows, ascending, of which a rank's fullest round fits into a slot.

    `rank` [messages], if they are of several.
    """
    tried = _windows_to_try(division, [_bytes_of_rank(messages, rank)])
    return (windows for windows in tried if _fits(division, messages, windows, rank))


def _windows_to_try(division: Division, bytes_of_ranks: Iterable[int]) -> list[int]:
    """The numbers of windows, ascending, that have room for these bytes of ranks.

    `division` knows how many buckets the pair with the most has.
    """
    assert division.most is not None
    growths = [_GROWTH**growth for growth in range(_GROWTHS)]
    most = fewest = max(1, *division.most)
    if division.keeps_pace:
        pace = max(1, division.most[0] or division.most[1])
        tried = {pace * int(growth) for growth in growths} - {1}  # both streams have rounds
        while pace >= 2 * _LEAST_HALVED and pace % 2 == 0:
            pace //= 2
            tried.add(pace)
    else:
        if division.keeps_streams:
            fewest = max(1, most // _MOST_OF_A_PAIR)
        elif most < _FEW_BUCKETS:
            fewest = max(min(most, _LEAST_WINDOWS), most // 2)
        tried = {most, *(int(fewest * growth) for growth in growths)}
    one_stream = not division.keeps_streams and division.shared is None  # in a window
    most_of_window = division.slot_bytes * (1 if one_stream else division.streams)
    most_of_rank = max(bytes_of_ranks, default=0)
    return sorted(windows for windows in tried if windows * most_of_window >= most_of_rank)


def _bytes_of_rank(messages: Messages, rank: Ints | int = 0) -> int:
    """Bytes of a rank's messages in slots; where they are of several, of the rank with the most."""
    return int(np.bincount(np.broadcast_to(rank, messages.nbytes.shape), messages.nbytes).max(initial=0))


def with_windows(division: Division, fitting: Iterable[Iterable[int]]) -> Division:
    """The division with the fewest windows that fit all ranks. Raises ValueError if none does."""
    fits_all = set.intersection(*map(set, fitting))
    if not fits_all:
        raise ValueError(f"no rounds fit into {division.budget.scratch_bytes} bytes of scratch: give more")
    return replace(division, windows=min(fits_all))


def divide_windows(
    division: Division, ranks: Sequence[Sequence[Schedule]], train_ranks: int
) -> tuple[Division, list[list[HopEnd]]]:
    """What all ranks agree on, where one process has the schedules of all: the division with its windows, and the ends
    of each rank. Raises as `with_windows`.
    """
    ends = [HopEnd.cut(of_rank, division, train_ranks) for of_rank in ranks]
    division = division.with_most(most_buckets(of_rank, division) for of_rank in ends)
    if division.keeps_pace:
        ends = [HopEnd.cut(of_rank, division, train_ranks) for of_rank in ranks]
    messages = [Messages.of(of_rank, division) for of_rank in ends]
    tried = _windows_to_try(division, map(_bytes_of_rank, messages))
    fit_all = (each for each in tried if all(_fits(division, rank, each) for rank in messages))
    return with_windows(division, [islice(fit_all, 1)]), ends


def _fits(division: Division, messages: Messages, windows: int, rank: Ints | int = 0) -> bool:
    """Whether the fullest round of so many windows fits into a slot."""
    window = messages.windows(windows)
    lane = rank * division.streams + division.stream_of(window, messages.turn, messages.communicator)
    return bool(np.bincount(lane * windows + window, messages.nbytes).max(initial=0) <= division.slot_bytes)


def divided_rounds(
    ends: Sequence[HopEnd], division: Division, *, in_place: Sequence[Sequence[bool]]
) -> tuple[Round, ...]:
    """The rank's rounds in order. `in_place` [ends][tensors]: which tensors messages may leave or enter without a copy."""
    casts = [bound_casts(end.schedule) for end in ends]
    messages = Messages.of(ends, division)
    window = messages.windows(division.windows)
    stream = division.stream_of(window, messages.turn, messages.communicator)
    buckets = [(number, bucket) for number, end in enumerate(ends) for bucket in end.buckets]
    places = (np.broadcast_to(each, window.shape).tolist() for each in (window, stream, messages.communicator))
    together: dict[tuple[int, ...], list[tuple[int, tuple[int, Bucket]]]] = {}
    for *place, turn, bucket in zip(*places, messages.turn.tolist(), buckets, strict=True):
        together.setdefault(tuple(place), []).append((turn, bucket))
    members = {
        number: {rank: place for place, rank in enumerate(ranks)} for number, ranks in division.communicators().items()
    }
    rounds: list[Round] = []
    on_stream: dict[int, list[int]] = {}  # the stream's rounds so far
    slots = division.budget.slots
    for (number, lane, communicator), of_round in sorted(together.items(), key=lambda each: each[0]):
        of_round.sort(key=lambda each: (each[0], each[1][1].stage, each[1][1].number))
        buckets_of_round = [bucket for _, bucket in of_round]
        placed = _placed_messages(ends, casts, division, members[communicator], buckets_of_round, in_place)
        earlier = on_stream.setdefault(lane, [])
        after = earlier[-slots] if len(earlier) >= slots else None
        rounds.append(Round(number, lane, communicator, len(earlier) % slots, after, placed))
        earlier.append(len(rounds) - 1)
    return tuple(rounds)


def _placed_messages(
    ends: Sequence[HopEnd],
    casts: Sequence[Casts],
    division: Division,
    members: Mapping[int, int],
    buckets: Sequence[tuple[int, Bucket]],
    in_place: Sequence[Sequence[bool]],
) -> tuple[PlacedMessage, ...]:
    checksums = division.budget.checksums
    messages: list[PlacedMessage] = []
    slot_end = 0
    for end, bucket in buckets:
        of_end = casts[end]
        is_cast = bucket.sends and bool(of_end) and bool(np.isin(bucket.copies["src"], [*of_end]).any())
        nbytes = message_bytes(bucket.nbytes, division.budget)
        member = members[ends[end].first_peer + bucket.peer]
        place = None if checksums or is_cast else bucket.place
        tensor, offset = place if place is not None and in_place[end][place[0]] else (None, slot_end)
        messages.append(PlacedMessage(bucket, end, member, nbytes, tensor, offset))
        if tensor is None:
            slot_end += aligned(nbytes)
    return tuple(messages)


def message_bytes(bucket_bytes: Size, budget: ScratchBudget) -> Size:
    """Bytes of a message; behind its bucket comes a digest, where buckets are checked."""
    return aligned(bucket_bytes) + DIGEST_BYTES if budget.checksums else bucket_bytes


def slot_bytes(rounds: Sequence[Round]) -> dict[tuple[int, int], int]:
    """(stream, slot) -> bytes: the largest round that goes through it."""
    needed: dict[tuple[int, int], int] = {}
    for each in rounds:
        place = each.stream, each.slot
        ends = [placed.offset + aligned(placed.message_bytes) for placed in each.staged]
        needed[place] = max([needed.get(place, 0), *ends])
    return needed
