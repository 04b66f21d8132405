"""The record that every executor walks: a strided copy between two base addresses.

A copy moves `extents[0] * extents[1] * extents[2]` rows of `row_bytes` contiguous bytes. A base is a bound tensor, a
bucket, or (for an executor that reads a peer's memory) a remote allocation; the record does not care which. Where the
source is a tensor with a cast, so is the copy: see `casts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

SCRATCH = -1  # base index of the bucket: interpreters append it after the tensors, so that -1 indexes it
OUTER_DIMS = 3

COPY = np.dtype(
    [
        ("src", np.int32),  # base index
        ("dst", np.int32),
        ("src_offset", np.int64),  # bytes from the base
        ("dst_offset", np.int64),
        ("extents", np.int64, (OUTER_DIMS,)),  # outermost first, unused ones are 1
        ("src_strides", np.int64, (OUTER_DIMS,)),  # bytes
        ("dst_strides", np.int64, (OUTER_DIMS,)),
        ("row_bytes", np.int64),  # contiguous on both sides
    ]
)


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """One copy relative to two starting points; all numbers are bytes except `extents`."""

    src_offset: int
    dst_offset: int
    extents: tuple[int, int, int]
    src_strides: tuple[int, int, int]
    dst_strides: tuple[int, int, int]
    row_bytes: int


@dataclass(frozen=True, slots=True)
class _Dim:
    extent: int
    src: int  # stride in bytes
    dst: int


def strided_copies(
    extents: Sequence[int],
    src_strides: Sequence[int],
    dst_strides: Sequence[int],
    itemsize: int,
    *,
    src_itemsize: int | None = None,
) -> tuple[StridedCopy, ...]:
    """The fewest copies that move a box of elements: `extents` with element strides on each side.

    Dims that are contiguous on both sides become one; the innermost, where contiguous, becomes the row. Boxes with more
    than three dims left are unrolled along the outermost ones. An empty box needs no copy. Where copies cast, elements
    have another size at the source, and rows are those of the destination.
    """
    src_itemsize = itemsize if src_itemsize is None else src_itemsize
    if any(extent == 0 for extent in extents):
        return ()
    dims = [
        _Dim(extent, src * src_itemsize, dst * itemsize)
        for extent, src, dst in zip(extents, src_strides, dst_strides, strict=True)
        if extent > 1
    ]
    dims = _merged(sorted(dims, key=lambda dim: (-dim.dst, -dim.src)))
    row_bytes = itemsize
    if dims and (dims[-1].src, dims[-1].dst) == (src_itemsize, itemsize):
        row_bytes *= dims.pop().extent
    unrolled, looped = dims[:-OUTER_DIMS], dims[-OUTER_DIMS:]
    looped = [_Dim(1, 0, 0)] * (OUTER_DIMS - len(looped)) + looped
    a, b, c = looped
    return tuple(
        StridedCopy(
            sum(index * dim.src for index, dim in zip(at, unrolled, strict=True)),
            sum(index * dim.dst for index, dim in zip(at, unrolled, strict=True)),
            (a.extent, b.extent, c.extent),
            (a.src, b.src, c.src),
            (a.dst, b.dst, c.dst),
            row_bytes,
        )
        for at in product(*(range(dim.extent) for dim in unrolled))
    )


def expand(kinds: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Replace every entry by the members of its kind: (index of the entry, index among all kinds' members).

    `counts` says how many members each kind has: kinds [1, 0, 1], counts [1, 2] -> [0, 0, 1, 2, 2], [1, 2, 0, 1, 2].
    """
    repeats = counts[kinds]
    owner = np.repeat(np.arange(len(kinds)), repeats)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    return owner, (np.cumsum(counts) - counts)[kinds][owner] + within


def _merged(dims: Sequence[_Dim]) -> list[_Dim]:
    merged: list[_Dim] = []
    for dim in dims:
        if merged and merged[-1].src == dim.extent * dim.src and merged[-1].dst == dim.extent * dim.dst:
            merged[-1] = _Dim(merged[-1].extent * dim.extent, dim.src, dim.dst)
        else:
            merged.append(dim)
    return merged
