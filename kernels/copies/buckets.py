"""A schedule's transfers, cut and packed into buckets: one message between two ranks each.

Transfers are packed in schedule order into buckets of at most `bucket_bytes`; a larger one is cut into segments first.
Small segments fill buckets, and where a pair of ranks has few, these are about equally full. Four transfers of 7 MiB:

    segments of up to 10 MiB      in buckets of 10     7    7    7    7
    segments of up to 640 KiB     in buckets of 10     9.5  9.5  9

A pace is how many buckets the pair with the most of all ranks needs, or a few more. With one, every pair has as many, or half,
or a quarter: the fewest that its bytes fit into. They are about equally full, so that pairs keep time with each other:

    pace 80, at least 80, 34, 10     in buckets     80  40  10

Where all pairs have equally many, each has its pace.

Extents and element sizes alone decide, and both ends have the same. So both compute the same buckets without a message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.errors import Waiting
from mcore_reshard.kernels.options import ALIGNMENT
from mcore_reshard.planner.layout.geometry import row_major_strides
from mcore_reshard.planner.plan.schedule import Schedule, StridedBox

from .casts import CastForm, CastKinds, box_copies, itemsizes
from .copy_table import SCRATCH, Ints, distinct, expand, expand_copies
from .peer_table import joined_transfers

_WHOLE_HALVINGS = 4  # of a pace of 128 or more; of smaller ones so many that 8 buckets are left

Size = TypeVar("Size", int, NDArray[np.int64])


@dataclass(frozen=True, eq=False)
class Bucket:
    """One message between this rank and a peer. Both ends give the buckets of a stage the same numbers.

    In `copies` (dtype COPY) base indices are those of `Schedule.tensors`, and SCRATCH is the bucket.
    """

    stage: int  # index into Schedule.stages
    number: int  # among the buckets of this stage and peer
    peer: int  # rank in the other world
    sends: bool
    copies: NDArray[np.void]
    nbytes: int  # up to the end of the last segment
    row: int  # in the stage's table: the transfer that it begins with
    place: tuple[int, int] | None  # tensor, and offset there, where it is one run of bytes of it
    schedule: Schedule

    @cached_property
    def waiting(self) -> Waiting:
        """For whom, and for the first parameter in it."""
        stage, schedule = self.schedule.stages[self.stage], self.schedule
        table = stage.sends if self.sends else stage.recvs
        peer = schedule.name_of("gen" if schedule.world == "train" else "train", self.peer)
        parameter = schedule.parameter_name(int(table.transfer_group[self.row]), int(table.member[self.row]))
        return Waiting(schedule.name, peer, stage.pp_stage, parameter, self.sends)

    def copies_at(self, base: int, offset: int) -> NDArray[np.void]:
        """Its copies for a bucket that begins `offset` bytes into base `base`."""
        copies = self.copies.copy()
        bucket_end = "dst" if self.sends else "src"
        copies[bucket_end] = base
        copies[bucket_end + "_offset"] += offset
        return copies


def cut_buckets(
    schedule: Schedule, bucket_bytes: int, segment_bytes: int | None = None, *, pace: int = 0, equal: bool = False
) -> tuple[Bucket, ...]:
    """All buckets of a rank by stage, peer and number, each of at most `bucket_bytes`, a multiple of ALIGNMENT.

    Segments have at most `segment_bytes`, by default a bucket's; with a `pace` a quarter of one, of 1 KiB or more. If all pairs
    have `equal` numbers, a bucket may be larger. `schedule` has no problems that `bind` would find.
    """
    return tuple(_Cutter(schedule, bucket_bytes, segment_bytes or bucket_bytes, pace, equal).buckets())


def pair_bytes(pair: NDArray[np.integer], nbytes: Ints) -> Ints:
    """[pairs, from 0 on]: bytes of the transfers of each, for `fewest_buckets`."""
    return np.bincount(pair, aligned(nbytes)).astype(np.int64)


def fewest_buckets(pair_bytes: Ints, bucket_bytes: int, segment_bytes: int) -> Ints:
    """How many buckets a pair needs if they keep a pace. `pair_bytes` [pairs] has the sizes of its transfers, each `aligned`.

    One has room for the segment that fills it up, and for what alignment takes between segments.
    """
    return -(-pair_bytes // (bucket_bytes - 2 * segment_bytes))


def paced(fewest: Ints, pace: int, *, equal: bool) -> Ints:
    """How many buckets pairs have that need so many: `pace`, halved as often as they allow, unless all have `equal` numbers."""
    if equal:
        return np.full_like(fewest, pace)
    halvings = np.frexp(pace // np.maximum(fewest, 1))[1] - 1
    return np.asarray(pace >> halvings, np.int64)


def pace_of(most: int) -> int:
    """The pace if the pair with the most buckets needs so many: a little more, so that halves of it are whole numbers."""
    halvings = 0
    while halvings < _WHOLE_HALVINGS and most >> (halvings + 4):
        halvings += 1
    return -(-most >> halvings) << halvings


def aligned(nbytes: Size) -> Size:
    """`nbytes`, rounded up to where a segment may start."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class _SegmentCopies(NamedTuple):
    """A segment of any transfer of one kind; offsets count from the transfer's first element."""

    nbytes: int  # on the wire
    offset: int  # bytes in the local tensor
    copies: NDArray[np.void]  # from the segment's beginning on both sides


class _Cutter:
    """Cuts the tables of all stages at once: Python runs once for each kind of transfer, numpy for each transfer.

    Transfers of a kind have one strided box, element size and cast. If blocks are cast, they also start at the same
    place of a matrix.
    """

    def __init__(self, schedule: Schedule, bucket_bytes: int, segment_bytes: int, pace: int, equal: bool) -> None:
        self._schedule = schedule
        self._itemsizes = itemsizes(schedule)
        self._bucket_bytes, self._segment_bytes, self._pace = bucket_bytes, segment_bytes, pace
        self._equal = equal
        self._casts = CastKinds.of(schedule)

    def buckets(self) -> Iterator[Bucket]:
        tables, sends = self._schedule.tables, self._schedule.world == "train"
        table, first_row = joined_transfers(tables), np.cumsum([0, *map(len, tables)])
        peers = int(table.peer.max(initial=0)) + 1
        pair = np.repeat(np.arange(len(tables)), np.diff(first_row)) * peers + table.peer
        order = np.argsort(pair, kind="stable")
        tensor, offset = table.tensor[order], table.offset[order]
        itemsize = self._itemsizes[tensor]
        kinds, kind_of = distinct(
            table.strided_box[order], itemsize, self._casts.form_of[tensor], offset % self._casts.period[tensor]
        )
        boxes, forms, segment_bytes = self._schedule.strided_boxes, self._casts.forms, self._segment_bytes
        segments = [
            _segments(boxes[box], size, forms[form], place, segment_bytes, sends=sends)
            for box, size, form, place in kinds
        ]
        known = [*chain.from_iterable(segments)]
        transfer, segment_of = expand(kind_of, np.array([len(of_kind) for of_kind in segments], np.int64))
        pair_of = pair[order[transfer]]
        nbytes = np.array([each.nbytes for each in known], np.int64)[segment_of]
        if self._pace:
            sums = pair_bytes(pair, table.nbytes)
            fewest = fewest_buckets(sums[sums > 0], self._bucket_bytes, self._segment_bytes)
            counts = paced(fewest, self._pace, equal=self._equal)
            starts, bucket_offsets = pack_evenly(pair_of, nbytes, counts)
        else:
            starts, bucket_offsets = pack(pair_of, nbytes, self._bucket_bytes, self._segment_bytes)

        segment, copies = expand_copies(segment_of, [each.copies for each in known])
        local, scratch = ("src", "dst") if sends else ("dst", "src")
        in_tensor = (offset * itemsize)[transfer] + np.array([each.offset for each in known], np.int64)[segment_of]
        copies[local] = tensor[transfer[segment]]
        copies[local + "_offset"] += in_tensor[segment]
        copies[scratch] = SCRATCH
        copies[scratch + "_offset"] += bucket_offsets[segment]

        bounds = np.append(starts, len(nbytes))
        first_copies, last = np.searchsorted(segment, bounds), bounds[1:] - 1
        stages, of_peers = np.divmod(pair_of[starts], peers)
        columns = (
            stages,
            np.arange(len(starts)) - np.searchsorted(pair_of[starts], pair_of[starts]),
            of_peers,
            bucket_offsets[last] + nbytes[last],
            order[transfer[starts]] - first_row[stages],  # the first transfer in each bucket
            first_copies[:-1],
            first_copies[1:],
        )
        places = places_in_tensors(copies, first_copies[:-1], sends=sends)
        rows = zip(*(column.tolist() for column in columns), places, strict=True)
        for stage, number, peer, size, row, first, stop, place in rows:
            yield Bucket(stage, number, peer, sends, copies[first:stop], size, row, place, self._schedule)


def places_in_tensors(copies: NDArray[np.void], first: Ints, *, sends: bool) -> list[tuple[int, int] | None]:
    """Of each bucket: (tensor, byte offset) if it lies in one tensor in one piece, with nothing between the segments.

    `first` [buckets] says where in `copies` those of each begin.
    """
    local, scratch = ("src", "dst") if sends else ("dst", "src")
    tensors, offsets, places = copies[local], copies[local + "_offset"], copies[scratch + "_offset"]
    begin = np.repeat(first, np.diff(first, append=len(copies)))  # of each copy's bucket
    starts = np.cumsum(copies["row_bytes"]) - copies["row_bytes"]
    goes_on = (tensors == tensors[begin]) & (offsets - places == offsets[begin]) & (places == starts - starts[begin])
    is_whole = np.logical_and.reduceat(goes_on & (copies["extents"] == 1).all(axis=1), first).tolist()
    where = zip(tensors[first].tolist(), offsets[first].tolist(), strict=True)
    return [place if whole else None for place, whole in zip(where, is_whole, strict=True)]


@lru_cache(4096)  # the same in every wave and stage
def _segments(
    box: StridedBox, itemsize: int, cast: CastForm | None, place: int, segment_bytes: int, *, sends: bool
) -> tuple[_SegmentCopies, ...]:
    """The segments of a kind of transfers; `place` is where in a matrix they start, in elements."""
    wire_itemsize = cast.to_bytes if cast else itemsize
    segments = []
    for segment in cut(box.extents, wire_itemsize, segment_bytes):
        start = sum(index * stride for index, stride in zip(segment.start, box.strides, strict=True))
        packed = row_major_strides(segment.extents)
        sides = (box.strides, packed) if sends else (packed, box.strides)
        copies = box_copies(segment.extents, *sides, itemsize, cast, place + start)
        copies.flags.writeable = False
        segments.append(_SegmentCopies(prod(segment.extents) * wire_itemsize, start * itemsize, copies))
    return tuple(segments)


class Segment(NamedTuple):
    """A box of a transfer that travels in one bucket, in the transfer's own coordinates (wire order)."""

    start: tuple[int, ...]
    extents: tuple[int, ...]


def cut(extents: tuple[int, ...], itemsize: int, segment_bytes: int) -> Iterator[Segment]:
    """The segments of at most `segment_bytes` that make up a transfer, in wire order; none where it is empty."""
    nbytes = prod(extents) * itemsize
    if nbytes <= segment_bytes:
        if nbytes:
            yield Segment((0,) * len(extents), extents)
        return
    outer, inner = extents[0], extents[1:]
    rows = segment_bytes // (prod(inner) * itemsize)
    if rows:
        for start in range(0, outer, rows):
            yield Segment((start, *(0,) * len(inner)), (min(rows, outer - start), *inner))
        return
    inner_segments = tuple(cut(inner, itemsize, segment_bytes))
    for start in range(outer):
        for segment in inner_segments:
            yield Segment((start, *segment.start), (1, *segment.extents))


def pack_evenly(peers: NDArray[np.integer], nbytes: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """The same as `pack` returns, if each peer has so many buckets: `counts`, in the order of peers.

    A bucket begins with the first segment that begins in its part of the peer's bytes. It is larger than the average by a
    segment at most.
    """
    padded = aligned(nbytes)
    ends = np.cumsum(padded)
    starts = ends - padded
    first = np.flatnonzero(np.diff(peers, prepend=peers[:1] - 1))
    segments = np.diff(first, append=len(peers))
    before, of_peer = (
        np.repeat(each, segments) for each in (starts[first], ends[first + segments - 1] - starts[first])
    )
    part = (starts - before) * np.repeat(counts, segments) // of_peer
    begins = np.diff(part, prepend=-1) != 0
    begins[first] = True
    bucket_starts = np.flatnonzero(begins)
    return bucket_starts, starts - np.repeat(starts[bucket_starts], np.diff(bucket_starts, append=len(nbytes)))


def pack(peers: NDArray[np.integer], nbytes: Ints, bucket_bytes: int, segment_bytes: int) -> tuple[Ints, Ints]:
    """Where segments go: (first segment of each bucket [buckets], byte offset of each segment in its bucket [segments]).

    `peers` [segments] ascend; `nbytes` [segments] are sizes in order, each at most `segment_bytes`. A bucket is larger than
    the average of its peer's by a segment at most.
    """
    padded = aligned(nbytes)
    ends = np.cumsum(padded)
    starts = ends - padded
    first = np.flatnonzero(np.diff(peers, prepend=peers[:1] - 1))  # of each peer's next bucket; all peers at once
    peer_stop = np.append(first[1:], len(peers))[: len(first)]
    of_peer = ends[peer_stop - 1] - starts[first]
    even = -(-of_peer // -(-of_peer // bucket_bytes))
    most = np.minimum(bucket_bytes, even + segment_bytes)
    firsts = [first]
    while len(first):
        stop = np.minimum(np.searchsorted(ends, starts[first] + most, side="right"), peer_stop)
        goes_on = stop < peer_stop
        first, peer_stop, most = stop[goes_on], peer_stop[goes_on], most[goes_on]
        firsts.append(first)
    bucket_starts = np.sort(np.concatenate(firsts)).astype(np.int64)
    offsets = starts - np.repeat(starts[bucket_starts], np.diff(bucket_starts, append=len(nbytes)))
    return bucket_starts, offsets
