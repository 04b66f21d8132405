"""Cut a table of copies into tiles: the work list of the GPU kernel.

A tile is a part of a copy, small enough for one CTA at a time: rows at one stride on either side, absolute addresses and
the widest word that these allow. Tiles of many copies lie in one array, in the order in which they are to start.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.copy_table import COPY, OUTER_DIMS

Ints = NDArray[np.int64]

WIDEST_WORD = 16  # bytes; the widest load and store of a GPU thread
_EVEN = 1.05  # sources give alike if the largest has at most this many times the tiles of the smallest
ROW, INNER_LOOP = OUTER_DIMS, OUTER_DIMS - 1  # dims of a box of bytes

TILE = np.dtype(  # the struct Tile of copy_kernel.cu, 48 bytes
    [
        ("src", np.uint64),  # addresses of the first byte
        ("dst", np.uint64),
        ("src_stride", np.int64),  # bytes from row to row
        ("dst_stride", np.int64),
        ("words", np.uint32),  # of all rows
        ("row_words", np.uint32),
        ("word_bytes", np.uint32),  # 1, 2, 4, 8 or 16
        ("copy", np.uint32),  # the copy it was cut from
    ]
)


def check_tile_bytes(tile_bytes: int) -> int:
    if not WIDEST_WORD <= tile_bytes <= 1 << 30 or tile_bytes % WIDEST_WORD:
        raise ValueError(
            f"tile_bytes must be a multiple of {WIDEST_WORD} between {WIDEST_WORD} and 1 GiB: {tile_bytes}"
        )
    return tile_bytes


def cut_tiles(copies: NDArray[np.void], addresses: NDArray[np.uint64], tile_bytes: int) -> NDArray[np.void]:
    """The tiles (dtype TILE) of `copies` (dtype COPY), each at most `tile_bytes`, copy by copy.

    `addresses` [bases] is where each base begins, so that `copies["src"]` and `copies["dst"]` index it. The order of
    the tiles of a copy is that of its bytes at the source.
    """
    assert copies.dtype == COPY
    check_tile_bytes(tile_bytes)
    tiles = Boxes.of(copies, addresses).split_unaligned().cut(tile_bytes)
    table = np.zeros(len(tiles.copy), TILE)
    word = tiles.word_bytes()
    row_words = tiles.extents[:, ROW] // word
    table["src"], table["dst"], table["copy"] = tiles.src, tiles.dst, tiles.copy
    table["src_stride"], table["dst_stride"] = tiles.src_strides[:, INNER_LOOP], tiles.dst_strides[:, INNER_LOOP]
    table["words"], table["row_words"] = row_words * tiles.extents[:, INNER_LOOP], row_words
    table["word_bytes"] = word
    return table


def interleaved(source: Ints, first: int, together: int | None = None) -> Ints:
    """An order of tiles that takes from all sources in proportion, `together` tiles at a time, from source `first` on.

        source [0, 0, 1, 1], first 1, together 1 -> [2, 0, 3, 1]

    `source` [tiles] is the rank that each tile comes from. `first` counts the ranks that occur in it, modulo their number.
    Receivers that begin at different sources and keep pace then never all read from the same one.

    By default, sources that give alike are read one after the other, so that each serves one receiver at a time (four
    H200s: 1.3% faster than tile by tile). Where they do not give alike, receivers would meet at the large ones, so turns
    are of one tile.
    """
    if not len(source):
        return np.zeros(0, np.int64)
    source = np.unique(source, return_inverse=True)[1].reshape(-1)
    counts = np.bincount(source)
    if together is None:
        together = len(source) if counts.max() <= _EVEN * counts.min() else 1
    by_source = np.argsort(source, kind="stable")
    number = np.empty(len(source), np.int64)  # of a tile among those of its source
    number[by_source] = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    turn = (source - first) % len(counts)
    return np.lexsort((number, turn, (number // together * together + 0.5) / counts[source]))


class Boxes:
    """Copies as four-dimensional boxes of bytes: three loops and the row. Every attribute has a row for each box.

    Where copies cast, rows are of elements, and `cut` counts these.
    """

    def __init__(self, copy: Ints, src: Ints, dst: Ints, extents: Ints, src_strides: Ints, dst_strides: Ints) -> None:
        self.copy = copy
        self.src, self.dst = src, dst  # addresses as int64: user space ends far below 2 ** 63
        self.extents, self.src_strides, self.dst_strides = extents, src_strides, dst_strides  # [boxes, 4]

    @classmethod
    def of(cls, copies: NDArray[np.void], addresses: NDArray[np.uint64]) -> Boxes:
        base = addresses.astype(np.int64)
        one = np.ones((len(copies), 1), np.int64)
        extents = np.concatenate([copies["extents"], copies["row_bytes"][:, None]], axis=1)
        return cls(
            np.arange(len(copies)),
            base[copies["src"]] + copies["src_offset"],
            base[copies["dst"]] + copies["dst_offset"],
            extents,
            np.where(extents > 1, np.concatenate([copies["src_strides"], one], axis=1), 0),
            np.where(extents > 1, np.concatenate([copies["dst_strides"], one], axis=1), 0),
        )

    def word_bytes(self) -> Ints:
        """The widest word that divides every address, stride and row of each box."""
        return _lowest_bit(self._loop_bits() | self.src | self.dst | self.extents[:, ROW])

    def split_unaligned(self) -> Boxes:
        """Split off the bytes in which rows begin or end off a wide word on both sides alike; the rest is wide.

        Rows of 100 bytes at addresses 0x1008 and 0x2008 become rows of 8, 80 and 12 bytes.
        """
        wide = _lowest_bit(self._loop_bits() | (self.src - self.dst))
        row = self.extents[:, ROW]
        pays = (wide > self.word_bytes()) & (row >= 4 * wide)
        head = np.where(pays, -self.src % wide, 0)
        body = np.where(pays, (row - head) // wide * wide, row)
        starts = np.stack([np.zeros_like(head), head, head + body])
        parts = [
            self._part(np.arange(len(row)), ROW, start, extent)
            for start, extent in zip(starts, (head, body, row - head - body), strict=True)
        ]
        order = np.argsort(np.concatenate([part.copy for part in parts]), kind="stable")
        return _joined(parts)._taken(order)._without_empty()

    def cut(self, tile_bytes: int) -> Boxes:
        """Cut rows, or the loop of rows where several fit a tile, in equal steps; the outer loops one by one."""
        boxes = np.arange(len(self.copy))
        row = self.extents[:, ROW]
        level = np.where(row <= tile_bytes, INNER_LOOP, ROW)
        size, unit = self.extents[boxes, level], np.where(level == ROW, 1, row)
        pieces = -(-size // (tile_bytes // unit))
        step = -(-size // pieces)
        step = np.where(level == ROW, -(-step // WIDEST_WORD) * WIDEST_WORD, step)
        pieces = -(-size // step)
        outside = [np.where(dim < level, self.extents[:, dim], 1) for dim in range(ROW)]
        counts = pieces * outside[0] * outside[1] * outside[2]

        owner = np.repeat(boxes, counts)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        rest, piece = np.divmod(number, pieces[owner])
        level = level[owner]
        start = piece * step[owner]
        tiles = self._part(owner, level, start, np.minimum(step[owner], size[owner] - start))
        for dim in reversed(range(ROW)):
            rest, at = np.divmod(rest, outside[dim][owner])
            tiles = tiles._part(np.arange(len(owner)), dim, at, np.where(dim < level, 1, tiles.extents[:, dim]))
        return tiles

    def _part(self, boxes: Ints, dim: Any, start: Ints, extent: Ints) -> Boxes:
        """`[start, start + extent)` of the given boxes along `dim`, which is one number or one for each."""
        rows = np.arange(len(boxes))
        extents, src, dst = self.extents[boxes], self.src_strides[boxes], self.dst_strides[boxes]
        extents[rows, dim] = extent
        return Boxes(
            self.copy[boxes],
            self.src[boxes] + start * src[rows, dim],
            self.dst[boxes] + start * dst[rows, dim],
            extents,
            src,
            dst,
        )

    def _loop_bits(self) -> Ints:
        strides = np.concatenate([self.src_strides[:, :ROW], self.dst_strides[:, :ROW]], axis=1)
        bits: Ints = np.bitwise_or.reduce(strides, axis=1)
        return bits

    def _taken(self, boxes: NDArray[Any]) -> Boxes:
        return Boxes(*(column[boxes] for column in self._columns()))

    def _without_empty(self) -> Boxes:
        return self._taken(np.flatnonzero((self.extents > 0).all(axis=1)))

    def _columns(self) -> tuple[Ints, ...]:
        return self.copy, self.src, self.dst, self.extents, self.src_strides, self.dst_strides


def _joined(parts: list[Boxes]) -> Boxes:
    return Boxes(*(np.concatenate(columns) for columns in zip(*(part._columns() for part in parts), strict=True)))


def _lowest_bit(bits: Ints) -> Ints:
    """The largest power of two, at most WIDEST_WORD, that divides each number."""
    bits = bits | WIDEST_WORD
    return bits & -bits
