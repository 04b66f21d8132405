"""How the transfers between two ranks share messages: a pure function of what both ends know.

Transfers are packed in schedule order into buckets of at most `bucket_bytes`; one that is larger is cut first. Cuts
depend on the extents and the element size alone, which are equal on both ends, so sender and receiver arrive at the
same buckets without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.options import ALIGNMENT, MAX_BUCKET_BYTES


@dataclass(frozen=True, slots=True)
class Segment:
    """A box of a transfer that travels in one bucket, in the transfer's own coordinates (wire order)."""

    start: tuple[int, ...]
    extents: tuple[int, ...]


def check_bucket_bytes(bucket_bytes: int) -> int:
    if not ALIGNMENT <= bucket_bytes <= MAX_BUCKET_BYTES or bucket_bytes % ALIGNMENT:
        raise ValueError(
            f"bucket_bytes must be a multiple of {ALIGNMENT} between {ALIGNMENT} and {MAX_BUCKET_BYTES}: {bucket_bytes}"
        )
    return bucket_bytes


def cut(extents: tuple[int, ...], itemsize: int, bucket_bytes: int) -> tuple[Segment, ...]:
    """The parts of at most `bucket_bytes` that make up a transfer, in wire order; none where it is empty."""
    if prod(extents) == 0:
        return ()
    return tuple(_cut(extents, itemsize, bucket_bytes))


def _cut(extents: tuple[int, ...], itemsize: int, bucket_bytes: int) -> Iterator[Segment]:
    if prod(extents) * itemsize <= bucket_bytes:
        yield Segment((0,) * len(extents), extents)
        return
    outer, inner = extents[0], extents[1:]
    rows = bucket_bytes // (prod(inner) * itemsize)
    if rows:
        for start in range(0, outer, rows):
            yield Segment((start, *(0,) * len(inner)), (min(rows, outer - start), *inner))
        return
    inner_parts = tuple(_cut(inner, itemsize, bucket_bytes))
    for start in range(outer):
        for segment in inner_parts:
            yield Segment((start, *segment.start), (1, *segment.extents))


def pack(nbytes: NDArray[np.int64], bucket_bytes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each part goes: (first part of each bucket [buckets], byte offset of each part in its bucket [parts]).

    `nbytes` [parts] are the sizes of the parts in order, each at most `bucket_bytes`.
    """
    padded = -(-nbytes // ALIGNMENT) * ALIGNMENT
    ends = np.cumsum(padded)
    starts = ends - padded
    firsts: list[int] = []
    offsets = np.empty(len(nbytes), np.int64)
    first = 0
    while first < len(nbytes):
        stop = int(np.searchsorted(ends, starts[first] + bucket_bytes, side="right"))
        firsts.append(first)
        offsets[first:stop] = starts[first:stop] - starts[first]
        first = stop
    return np.array(firsts, np.int64), offsets
