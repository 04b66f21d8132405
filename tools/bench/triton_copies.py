"""The table of tiles walked by Triton kernels, as one would write the copy kernel in Triton.

A Triton kernel is compiled for one type of element. So a table of several word sizes is parted by word size, with a
launch for each. Words of 16 bytes have no type, and are two int64 side by side. `walk_flat` numbers the words of a tile
row by row, as our kernel does. `walk_rows` takes blocks of rows and columns: nothing is divided, but a block must fit
the rows. Here it is fitted to the widest rows of a launch. This favors it: rows of one word size are of one width in
these tables, and of several in those of a model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

_PARTS = {1: (tl.int8, 1), 2: (tl.int16, 1), 4: (tl.int32, 1), 8: (tl.int64, 1), 16: (tl.int64, 2)}  # of a word


@triton.jit(do_not_specialize=["count"])
def walk_flat(table, count, PART: tl.constexpr, PARTS: tl.constexpr, WORD: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.arange(0, PARTS)[None, :]
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        tile = table + number * 6
        src = tl.multiple_of(tl.load(tile).to(tl.pointer_type(PART)), WORD)
        dst = tl.multiple_of(tl.load(tile + 1).to(tl.pointer_type(PART)), WORD)
        src_stride = tl.multiple_of(tl.load(tile + 2), PARTS)
        dst_stride = tl.multiple_of(tl.load(tile + 3), PARTS)
        rows, row_words = tl.load(tile + 4).to(tl.int32), tl.load(tile + 5).to(tl.int32)
        words = rows * row_words
        for first in range(0, words, BLOCK):
            word = first + tl.arange(0, BLOCK)
            row, column = (word // row_words)[:, None], (word % row_words)[:, None] * PARTS + part
            valid = (word < words)[:, None]
            values = tl.load(src + (row * src_stride + column), mask=valid, eviction_policy="evict_first")
            tl.store(dst + (row * dst_stride + column), values, mask=valid, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["count"])
def walk_rows(
    table, count, PART: tl.constexpr, PARTS: tl.constexpr, WORD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        tile = table + number * 6
        src = tl.multiple_of(tl.load(tile).to(tl.pointer_type(PART)), WORD)
        dst = tl.multiple_of(tl.load(tile + 1).to(tl.pointer_type(PART)), WORD)
        src_stride = tl.multiple_of(tl.load(tile + 2), PARTS)
        dst_stride = tl.multiple_of(tl.load(tile + 3), PARTS)
        rows, row_parts = tl.load(tile + 4).to(tl.int32), tl.load(tile + 5).to(tl.int32) * PARTS
        for first_row in range(0, rows, ROWS):
            row = (first_row + tl.arange(0, ROWS))[:, None]
            for first in range(0, row_parts, COLUMNS * PARTS):
                column = (first + tl.arange(0, COLUMNS * PARTS))[None, :]
                valid = (row < rows) & (column < row_parts)
                values = tl.load(src + (row * src_stride + column), mask=valid, eviction_policy="evict_first")
                tl.store(dst + (row * dst_stride + column), values, mask=valid, eviction_policy="evict_first")


KERNELS: dict[str, Any] = {"flat": walk_flat, "rows": walk_rows}


def table_of(tiles: NDArray[np.void], word: int) -> NDArray[np.int64]:
    """Of the tiles with words of `word` bytes, [tiles, 6]: src, dst, their strides in parts, rows, words of a row."""
    tiles = tiles[tiles["word_bytes"] == word]
    part_bytes = word // _PARTS[word][1]
    strides = [tiles[name] // part_bytes for name in ("src_stride", "dst_stride")]
    columns = [tiles["src"], tiles["dst"], *strides, tiles["words"] // tiles["row_words"], tiles["row_words"]]
    return np.stack([column.astype(np.int64) for column in columns], axis=1)


def shape_of(walk: str, block: int, row_words: int) -> dict[str, int]:
    """The shape of a block of `block` words, a power of two, for rows of `row_words`."""
    if walk == "flat":
        return {"BLOCK": block}
    columns = min(block, triton.next_power_of_2(row_words))
    return {"ROWS": block // columns, "COLUMNS": columns}


class TritonCopies:
    """Tiles (dtype TILE) on a device, to be performed by the kernel `walk`: a launch for each size of words."""

    def __init__(
        self, tiles: NDArray[np.void], device: torch.device, walk: str, *, ctas: int, warps: int, block: int
    ) -> None:
        self._kernel, self._grid, self._warps = KERNELS[walk], (ctas,), warps
        self._parted = []
        for word in np.unique(tiles["word_bytes"]).tolist():
            table = table_of(tiles, word)
            shape = shape_of(walk, block, int(table[:, -1].max()))
            self._parted.append((word, torch.from_numpy(table).to(device), shape))
        self.launches = len(self._parted)

    def launch(self) -> None:
        """Queue the copies on the current stream of the current device."""
        for word, table, shape in self._parted:
            part, parts = _PARTS[word]
            self._kernel[self._grid](
                table, len(table), PART=part, PARTS=parts, WORD=word, num_warps=self._warps, **shape
            )
