"""The record that every executor walks: a strided copy between two base addresses.

A copy moves `extents[0] * extents[1] * extents[2]` rows of `row_bytes` contiguous bytes. A base is a bound tensor, a
bucket, or memory of a peer; the record does not care which. A copy from a tensor with a cast is a cast: see `casts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
End = Literal["src", "dst"]

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


_BYTES = np.dtype((np.void, COPY.itemsize))  # numpy compares fields one by one, which takes longer than to join tables


class _Dim(NamedTuple):
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
) -> NDArray[np.void]:
    """The fewest copies (dtype COPY) that move a box of elements: `extents` with element strides on each side.

    Bases are 0, and offsets count from the box's first element. Dims that are contiguous on both sides become one; the
    innermost, where contiguous, becomes the row. More than three dims are unrolled along the outermost ones. An empty
    box needs no copy. Where copies cast, elements have another size at the source; rows count the destination's bytes.
    """
    src_itemsize = itemsize if src_itemsize is None else src_itemsize
    if any(extent == 0 for extent in extents):
        return np.empty(0, COPY)
    all_dims = [
        _Dim(extent, src * src_itemsize, dst * itemsize)
        for extent, src, dst in zip(extents, src_strides, dst_strides, strict=True)
        if extent > 1
    ]
    dims: list[_Dim] = []
    for dim in sorted(all_dims, key=lambda dim: (-dim.dst, -dim.src)):
        if dims and (dims[-1].src, dims[-1].dst) == (dim.extent * dim.src, dim.extent * dim.dst):
            dim = dim._replace(extent=dims.pop().extent * dim.extent)
        dims.append(dim)
    row_bytes = itemsize
    if dims and (dims[-1].src, dims[-1].dst) == (src_itemsize, itemsize):
        row_bytes *= dims.pop().extent
    unrolled, looped = dims[:-OUTER_DIMS], dims[-OUTER_DIMS:]
    looped = [_Dim(1, 0, 0)] * (OUTER_DIMS - len(looped)) + looped
    copies = np.zeros(prod(dim.extent for dim in unrolled), COPY)
    indices = np.indices([dim.extent for dim in unrolled]).reshape(len(unrolled), len(copies))
    copies["src_offset"] = np.array([dim.src for dim in unrolled], np.int64) @ indices
    copies["dst_offset"] = np.array([dim.dst for dim in unrolled], np.int64) @ indices
    copies["extents"] = [dim.extent for dim in looped]
    copies["src_strides"] = [dim.src for dim in looped]
    copies["dst_strides"] = [dim.dst for dim in looped]
    copies["row_bytes"] = row_bytes
    return copies


def joined(tables: Sequence[NDArray[np.void]]) -> NDArray[np.void]:
    """One table of copies out of several, or of none."""
    return np.concatenate([np.empty(0, _BYTES), *(table.view(_BYTES) for table in tables)]).view(COPY)


def ends_of(copies: NDArray[np.void], side: str) -> Ints:
    """Where each copy ends on one side ("src" or "dst"), in bytes from its base. Rows count the destination's bytes."""
    last = ((copies["extents"] - 1) * copies[f"{side}_strides"]).sum(axis=1)
    ends: Ints = copies[f"{side}_offset"] + last + copies["row_bytes"]
    return ends


def distinct(*keys: NDArray[np.integer]) -> tuple[list[list[int]], Ints]:
    """The kinds of entries, each once, and the index of every entry's kind. `keys` are columns: a kind is a row of them."""
    columns = np.stack(keys)
    order = np.lexsort(columns[::-1])  # several times as fast as `np.unique` of rows
    columns = columns[:, order]
    is_first = np.append(True, (columns[:, 1:] != columns[:, :-1]).any(axis=0))[: len(order)]
    kind_of = np.empty(len(order), np.int64)
    kind_of[order] = np.cumsum(is_first) - 1
    return columns[:, is_first].T.tolist(), kind_of


def repeat(counts: Ints) -> tuple[Ints, Ints]:
    """Repeat every entry `counts` times: (its index, number among its repeats). [2, 1] -> [0, 0, 1], [0, 1, 0]."""
    entry = np.repeat(np.arange(len(counts)), counts)
    return entry, np.arange(len(entry)) - (np.cumsum(counts) - counts)[entry]


def expand(kind_of: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Replace every entry by the members of its kind: (index of the entry, index among all kinds' members).

    `counts` says how many members each kind has: kinds [1, 0, 1], counts [1, 2] -> [0, 0, 1, 2, 2], [1, 2, 0, 1, 2].
    """
    entry, number = repeat(counts[kind_of])
    return entry, (np.cumsum(counts) - counts)[kind_of][entry] + number


def expand_copies(kind_of: Ints, tables: Sequence[NDArray[np.void]]) -> tuple[Ints, NDArray[np.void]]:
    """Replace every entry by the copies of its kind: (index of the entry, its copies). `tables` has those of each kind."""
    entry, members = expand(kind_of, np.array([len(table) for table in tables], np.int64))
    return entry, joined(tables)[members]
