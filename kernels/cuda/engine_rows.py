"""What a copy engine takes of a table of copies, and what it leaves to the kernel.

An engine copies rows: contiguous on both sides, and large. Copies that touch on both sides become one row:

    gate and up projection of an expert, 3.1 MB each, one behind the other in both tensors    a row of 6.3 MB
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.copy_table import Ints

from .tiles import cut_tiles

ENGINE_SHARE = 0.97  # of the link's time: the kernel does its part meanwhile, and ends first
# In place of that where ranks push along a chain: there a kernel costs an engine more than it moves.
ALL_ROWS = 1e6
# A row takes an engine some time more than its bytes: these are the bytes of that time. Measured on H200s: over one stream
# 19,400 rows of 3.1 MB took 168 ms for 156 ms of bytes, and 17,800 rows of 1.6 MB took 91 ms for 72 ms. Over four streams the
# next rows begin while one ends: rows of 3 MiB went at 386 GB/s (over one at 366), of 1.5 MiB at 379 (354).
_ROW_COST_BYTES = 400_000
_ROW_COST_OVER_SEVERAL = 50_000
ENGINE_STREAMS = 4  # that rows go over, unless they come in rounds
LEAST_BYTES = 1 << 19  # of a row
_JOINED_BYTES = 16 << 20  # copies are joined up to here, so that an engine's share can be met


class Rows(NamedTuple):
    """What a copy engine copies, turn after turn, and the parts that rows were joined from, row by row."""

    src: NDArray[np.uint64]  # [rows] addresses of the first byte
    dst: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]
    turn: Ints
    row: Ints  # [parts]
    offset: Ints  # in bytes, from where the row begins
    copy: Ints


def divided(
    copies: NDArray[np.void],
    addresses: NDArray[np.uint64],
    tile_bytes: int,
    turn: Ints,
    share: float,
    *,
    streams: int,
) -> tuple[NDArray[np.void], Rows]:
    """(tiles for the kernel, rows for the copy engine), which together are `copies` (dtype COPY).

    `turn` [copies] is that in which the engine may take each; it takes none with -1. Of each turn it takes whole contiguous
    copies, the largest rows first. They keep it busy for `share` of the time that all bytes of the turn take on the link, over
    so many `streams`. `addresses` and `tile_bytes` are as for `cut_tiles`.
    """
    nbytes = copies["extents"].prod(axis=1) * copies["row_bytes"]
    most = share * np.bincount(turn + 1, nbytes, minlength=2)[1:]
    fits = np.flatnonzero((turn >= 0) & (copies["extents"] == 1).all(axis=1) & (nbytes > 0) & (nbytes <= most[turn]))
    fits = fits[np.lexsort((copies["dst_offset"][fits], copies["src"][fits], copies["dst"][fits], turn[fits]))]
    row, offset = _joined(copies[fits], nbytes[fits], turn[fits])
    row_bytes, row_turn = np.bincount(row, nbytes[fits]).astype(np.int64), turn[fits[offset == 0]]
    by_size = np.lexsort((-row_bytes, row_turn))
    by_size = by_size[row_bytes[by_size] >= LEAST_BYTES]
    is_chosen = np.zeros(len(row_bytes), bool)
    row_cost = _ROW_COST_BYTES if streams == 1 else _ROW_COST_OVER_SEVERAL
    for number, most_bytes in enumerate(most.tolist()):
        of_turn = by_size[row_turn[by_size] == number]
        is_chosen[of_turn[np.cumsum(row_bytes[of_turn] + row_cost) <= most_bytes]] = True
    taken = is_chosen[row]
    copy, row, offset = fits[taken], (np.cumsum(is_chosen) - 1)[row[taken]], offset[taken]
    src, dst = (
        addresses[copies[end][copy]] + copies[f"{end}_offset"][copy].astype(np.uint64) for end in ("src", "dst")
    )
    first = offset == 0
    rows = Rows(src[first], dst[first], row_bytes[is_chosen].astype(np.uint64), row_turn[is_chosen], row, offset, copy)
    left = np.delete(np.arange(len(copies)), copy)
    tiles = cut_tiles(copies[left], addresses, tile_bytes)
    tiles["copy"] = left[tiles["copy"]]
    return tiles, rows


def _joined(copies: NDArray[np.void], nbytes: Ints, turn: Ints) -> tuple[Ints, Ints]:
    """(row, offset in the row) of contiguous copies, sorted by turn and place: a row goes on while they touch on both sides.

    Copies of two bases never share a row: the driver refuses copies beyond an allocation.
    """
    goes_on = (copies["src"][1:] == copies["src"][:-1]) & (copies["dst"][1:] == copies["dst"][:-1])
    goes_on &= turn[1:] == turn[:-1]
    for end in ("src_offset", "dst_offset"):
        goes_on &= copies[end][:-1] + nbytes[:-1] == copies[end][1:]
    part = _placed(copies, goes_on)[1] // _JOINED_BYTES
    return _placed(copies, goes_on & (part[1:] == part[:-1]))


def _placed(copies: NDArray[np.void], goes_on: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    begins = np.append(np.ones(min(len(copies), 1), bool), ~goes_on)
    row = np.cumsum(begins) - 1
    return row, copies["dst_offset"] - copies["dst_offset"][begins][row]
