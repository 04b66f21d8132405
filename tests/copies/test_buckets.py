"""Both ends cut alike, nothing is lost between buckets, and no bucket is too large."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_reshard.kernels.copies.buckets import (
    Segment,
    aligned,
    cut,
    fewest_buckets,
    pace_of,
    paced,
    pack,
    pack_evenly,
)
from mcore_reshard.kernels.options import ALIGNMENT

MIB = 1 << 20

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@settings(deadline=None)
@given(extents=shapes, itemsize=st.sampled_from([1, 2, 4, 8]), bucket_bytes=st.integers(1, 20).map(lambda n: n * 16))
def test_parts_cover_a_transfer_once_and_in_wire_order(
    extents: tuple[int, ...], itemsize: int, bucket_bytes: int
) -> None:
    wire = np.arange(prod(extents)).reshape(extents)
    segments = [*cut(extents, itemsize, bucket_bytes)]
    boxes = [
        wire[tuple(slice(low, low + n) for low, n in zip(segment.start, segment.extents, strict=True))]
        for segment in segments
    ]
    assert all(0 < box.size * itemsize <= bucket_bytes for box in boxes)
    assert [int(n) for box in boxes for n in box.reshape(-1)] == list(range(prod(extents)))


def test_a_large_transfer_is_cut_along_its_outermost_dim() -> None:
    assert [*cut((5, 8), 2, 32)] == [Segment((0, 0), (2, 8)), Segment((2, 0), (2, 8)), Segment((4, 0), (1, 8))]


def test_rows_larger_than_a_bucket_are_cut_again() -> None:
    assert [*cut((2, 12), 2, 16)] == [
        Segment((0, 0), (1, 8)),
        Segment((0, 8), (1, 4)),
        Segment((1, 0), (1, 8)),
        Segment((1, 8), (1, 4)),
    ]


def test_what_fits_is_not_cut_and_what_is_empty_does_not_travel() -> None:
    assert [*cut((4, 4), 2, 32)] == [Segment((0, 0), (4, 4))]
    assert [*cut((), 4, 16)] == [Segment((), ())]
    assert [*cut((3, 0, 2), 4, 16)] == []


@settings(deadline=None)
@given(nbytes=st.lists(st.integers(1, 64), max_size=50), bucket_bytes=st.sampled_from([64, 80, 256]))
def test_packed_parts_are_aligned_and_never_overlap_or_overflow(nbytes: list[int], bucket_bytes: int) -> None:
    firsts, offsets = pack(np.zeros(len(nbytes), np.int64), np.array(nbytes, np.int64), bucket_bytes, bucket_bytes)
    assert len(offsets) == len(nbytes) and not np.any(offsets % ALIGNMENT)
    bounds = [*firsts.tolist(), len(nbytes)]
    assert bounds[0] == 0 and all(low < high for low, high in itertools.pairwise(bounds))
    for low, high in itertools.pairwise(bounds):
        end = 0
        for segment in range(low, high):
            assert offsets[segment] >= end
            end = int(offsets[segment]) + nbytes[segment]
        assert end <= bucket_bytes
        if high < len(nbytes):
            padded_end = -(-end // ALIGNMENT) * ALIGNMENT
            assert padded_end + nbytes[high] > bucket_bytes, "the next part would have fitted"


def test_small_parts_share_a_bucket() -> None:
    firsts, offsets = pack(np.zeros(4, np.int64), np.array([4, 16, 20, 40]), 64, 64)
    assert (firsts.tolist(), offsets.tolist()) == ([0, 3], [0, 16, 32, 0])


def test_peers_never_share_a_bucket() -> None:
    firsts, offsets = pack(np.array([1, 1, 3, 3, 3]), np.array([4, 16, 20, 40, 8]), 64, 64)
    assert (firsts.tolist(), offsets.tolist()) == ([0, 2, 3], [0, 16, 0, 0, 48])


def test_peers_are_packed_each_by_itself() -> None:
    rng = np.random.default_rng(5)
    peers = np.sort(rng.integers(0, 9, 400))
    nbytes = rng.integers(1, 129, 400)
    expected_firsts, expected_offsets = [], []
    for peer in np.unique(peers):
        firsts, offsets = pack(np.zeros((peers == peer).sum(), np.int64), nbytes[peers == peer], 256, 128)
        expected_firsts += [*(firsts + np.searchsorted(peers, peer))]
        expected_offsets += [*offsets]
    firsts, offsets = pack(peers, nbytes, 256, 128)
    assert (firsts.tolist(), offsets.tolist()) == (expected_firsts, expected_offsets)
    assert pack(peers[:0], nbytes[:0], 256, 128)[0].tolist() == []


def test_the_worked_example_of_small_segments() -> None:
    assert filled([7] * 4, 10, 10) == [7, 7, 7, 7]
    assert filled([7] * 4, 10, 0.625) == [9.5, 9.5, 9]


@settings(deadline=None)
@given(
    transfers=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    bucket_bytes=st.sampled_from([160, 320, 960]),
    segments=st.sampled_from([1, 4, 10]),
)
def test_small_segments_fill_buckets_evenly(transfers: list[int], bucket_bytes: int, segments: int) -> None:
    segment_bytes = bucket_bytes // segments // ALIGNMENT * ALIGNMENT
    nbytes = [ALIGNMENT * piece.extents[0] for each in transfers for piece in cut((each,), ALIGNMENT, segment_bytes)]
    firsts, _ = pack(np.zeros(len(nbytes), np.int64), np.array(nbytes, np.int64), bucket_bytes, segment_bytes)
    sizes = np.add.reduceat(nbytes, firsts)
    assert sizes.sum() == ALIGNMENT * sum(transfers) and sizes.max() <= bucket_bytes
    even = sizes.sum() / -(-sizes.sum() // bucket_bytes)
    assert sizes.max() <= even + segment_bytes
    assert (sizes[:-1] > min(even, bucket_bytes - segment_bytes)).all()


def filled(transfers: list[float], bucket: float, segment: float) -> list[float]:
    """The buckets that transfers of a pair fill, all in MiB."""
    rows = [(int(each * 16), 1 << 16) for each in transfers]
    nbytes = np.array([prod(piece.extents) for each in rows for piece in cut(each, 1, int(segment * MIB))])
    firsts, _ = pack(np.zeros(len(nbytes), np.int64), nbytes, int(bucket * MIB), int(segment * MIB))
    return [float(size) for size in np.add.reduceat(nbytes, firsts) / MIB]


@given(st.integers(1, 5000), st.lists(st.integers(1, 5000), min_size=1))
def test_pairs_in_pace_have_as_many_buckets_or_a_half_or_a_quarter_of_them(most: int, fewest: list[int]) -> None:
    pace = pace_of(most)
    assert most <= pace < most * 1.125 + 1
    halves = [pace >> halvings for halvings in range(pace.bit_length())]
    needed = np.minimum(fewest, most)
    for count, need in zip(paced(needed, pace, equal=False).tolist(), needed.tolist(), strict=True):
        assert count == min(half for half in halves if half >= need)
    assert (paced(needed, pace, equal=True) == pace).all()


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 400)), min_size=1, max_size=60),
    st.sampled_from([1024, 4096]),
    st.integers(1, 40),
)
def test_buckets_in_pace_are_about_equally_full(rows: list[tuple[int, int]], bucket_bytes: int, pace: int) -> None:
    peers, nbytes = np.array(sorted(rows), np.int64).T
    segment_bytes = 400
    _, first = np.unique(peers, return_index=True)
    totals = np.add.reduceat(aligned(nbytes), first)
    fewest = fewest_buckets(totals, bucket_bytes, segment_bytes)
    counts = paced(fewest, pace_of(max(pace, int(fewest.max()))), equal=False)
    starts, offsets = pack_evenly(peers, nbytes, counts)
    assert set(first.tolist()) <= set(starts.tolist())  # a bucket is of one peer
    bounds = np.append(starts, len(nbytes))
    sizes = offsets[bounds[1:] - 1] + nbytes[bounds[1:] - 1]
    of_bucket = np.searchsorted(first, starts, side="right") - 1
    assert (np.bincount(of_bucket) <= counts).all() and (offsets % ALIGNMENT == 0).all() and sizes.max() <= bucket_bytes
    assert (sizes <= (totals // counts)[of_bucket] + aligned(segment_bytes)).all()
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        assert offsets[begin] == 0 and (np.diff(offsets[begin:end]) == aligned(nbytes[begin : end - 1])).all()
