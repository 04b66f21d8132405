"""Cut a table of copies into tiles: the work list of the GPU kernel.

A tile is a part of a copy, small enough for one CTA at a time. It has rows at one stride on either side, absolute
addresses, and the widest word that these allow. Tiles of many copies lie in one array, in the order in which they start.
`cut_tiles` orders them by copy; the direct transport (executor.py and slots.py) reorders them by `interleaved`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.copy_table import COPY, OUTER_DIMS, Ints, repeat

DEFAULT_TILE_BYTES = 128 << 10
WIDEST_WORD = 16  # bytes; the widest load and store of a GPU thread
_EVEN = 1.05  # sources are of about equal size if the largest has at most this many times the tiles of the smallest
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


CHECKSUMS = 2  # of a tile that is checked: as it is read, and at its destination; 8 bytes each


def table_bytes(tiles: NDArray[np.void], *, checksums: bool = False) -> int:
    """Memory of tiles on a device, and of their checksums where they have them."""
    return tiles.nbytes + 8 * CHECKSUMS * len(tiles) * checksums


def check_tile_bytes(tile_bytes: int) -> None:
    if not WIDEST_WORD <= tile_bytes <= 1 << 30 or tile_bytes % WIDEST_WORD:
        raise ValueError(
            f"tile_bytes must be a multiple of {WIDEST_WORD} between {WIDEST_WORD} and 1 GiB: {tile_bytes}"
        )


def cut_tiles(copies: NDArray[np.void], addresses: NDArray[np.uint64], tile_bytes: int) -> NDArray[np.void]:
    """The tiles (dtype TILE) of `copies` (dtype COPY), each at most `tile_bytes`, copy by copy.

    `addresses` [bases] is where each base begins, so that `copies["src"]` and `copies["dst"]` index it. The order of
    the tiles of a copy is that of its bytes at the source.
    """
    assert copies.dtype == COPY
    check_tile_bytes(tile_bytes)
    boxes = Boxes.of(copies, addresses).split_unaligned().cut(tile_bytes)
    return boxes.tiles(boxes.word_bytes())


def interleaved(source: Ints, first: int, together: int | None = None) -> Ints:
    """An order of tiles that takes from all sources in proportion, `together` tiles at a time, from source `first` on.

        source [0, 0, 1, 1], first 1, together 1 -> [2, 0, 3, 1]

    `source` [tiles] is the rank that each tile comes from. `first` counts the ranks that occur in it, modulo their number.
    Receivers that begin at different sources and keep pace then never all read from the same one.

    By default, sources of about equal size are read one after the other, so that each serves one receiver at a time. On
    four H200s this is 1.3% faster than tile by tile. Where sizes differ, receivers would meet at the large sources, so
    turns are of one tile.
    """
    if not len(source):
        return np.zeros(0, np.int64)
    source = np.unique(source, return_inverse=True)[1].reshape(-1)
    counts = np.bincount(source)
    if together is None:
        together = len(source) if counts.max() <= _EVEN * counts.min() else 1
    by_source = np.argsort(source, kind="stable")
    number = np.empty(len(source), np.int64)  # of a tile among those of its source
    number[by_source] = repeat(counts)[1]
    turn = (source - first) % len(counts)
    return np.lexsort((number, turn, (number // together * together + 0.5) / counts[source]))


class Boxes(NamedTuple):
    """Copies as four-dimensional boxes of bytes: three loops and the row. Every column has a row for each box.

    Where copies cast, rows are of elements, and `cut` counts these.
    """

    copy: Ints  # the copy that it is a part of
    src: Ints  # addresses as int64: user space ends far below 2 ** 63
    dst: Ints
    extents: Ints  # [boxes, 4]
    src_strides: Ints
    dst_strides: Ints

    @classmethod
    def of(cls, copies: NDArray[np.void], addresses: NDArray[np.uint64]) -> Boxes:
        base = addresses.astype(np.int64)
        one = np.ones((len(copies), 1), np.int64)
        extents = np.concatenate([copies["extents"], copies["row_bytes"][:, None]], axis=1)
        src, dst = (base[copies[end]] + copies[end + "_offset"] for end in ("src", "dst"))
        strides = (np.concatenate([copies[end + "_strides"], one], axis=1) for end in ("src", "dst"))
        return cls(np.arange(len(copies)), src, dst, extents, *(np.where(extents > 1, each, 0) for each in strides))

    def word_bytes(self) -> Ints:
        """The widest word that divides every address, stride and row of each box."""
        return _lowest_bit(self._loop_bits() | self.src | self.dst | self.extents[:, ROW])

    def split_unaligned(self) -> Boxes:
        """Split off the ends of rows that are off a wide word by the same bytes on both sides; the rest is wide.

        Rows of 100 bytes at addresses 0x1008 and 0x2008 become rows of 8, 80 and 12 bytes.
        """
        wide = _lowest_bit(self._loop_bits() | (self.src - self.dst))
        row = self.extents[:, ROW]
        pays = (wide > self.word_bytes()) & (row >= 4 * wide)
        if not pays.any() and row.all():
            return self
        head = np.where(pays, -self.src % wide, 0)
        body = np.where(pays, (row - head) // wide * wide, row)
        starts = np.stack([np.zeros_like(head), head, head + body], axis=1).reshape(-1)
        extents = np.stack([head, body, row - head - body], axis=1).reshape(-1)
        parts = np.flatnonzero(extents)
        return self._part(parts // 3, ROW, starts[parts], extents[parts])

    def cut(self, tile_bytes: int) -> Boxes:
        """Cut rows, or the loop of rows where several fit a tile, in equal steps; the outer loops one by one."""
        row = self.extents[:, ROW]
        level = np.where(row <= tile_bytes, INNER_LOOP, ROW)
        size, unit = self.extents[np.arange(len(row)), level], np.where(level == ROW, 1, row)
        pieces = -(-size // (tile_bytes // unit))
        step = -(-size // pieces)
        step = np.where(level == ROW, -(-step // WIDEST_WORD) * WIDEST_WORD, step)
        pieces = -(-size // step)
        outside = [np.where(dim < level, self.extents[:, dim], 1) for dim in range(ROW)]
        owner, number = repeat(pieces * outside[0] * outside[1] * outside[2])
        rest, piece = np.divmod(number, pieces[owner])
        level = level[owner]
        start = piece * step[owner]
        tiles = self._part(owner, level, start, np.minimum(step[owner], size[owner] - start))
        for dim in reversed(range(ROW)):
            if (outside[dim] == 1).all():
                continue
            rest, start = np.divmod(rest, outside[dim][owner])
            tiles = tiles._part(np.arange(len(owner)), dim, start, np.where(dim < level, 1, tiles.extents[:, dim]))
        return tiles

    def tiles(self, word: Ints) -> NDArray[np.void]:
        """The tiles (dtype TILE) of boxes with two loops left; `word` is what `word_bytes` says of each."""
        row_words = self.extents[:, ROW] // word
        table = np.zeros(len(word), TILE)
        table["src"], table["dst"], table["copy"] = self.src, self.dst, self.copy
        table["src_stride"], table["dst_stride"] = self.src_strides[:, INNER_LOOP], self.dst_strides[:, INNER_LOOP]
        table["words"], table["row_words"] = row_words * self.extents[:, INNER_LOOP], row_words
        table["word_bytes"] = word
        return table

    def _part(self, boxes: Ints, dim: Any, start: Ints, extent: Ints) -> Boxes:
        """`[start, start + extent)` of the given boxes along `dim`, which is one number or one for each."""
        rows = np.arange(len(boxes))
        extents, src, dst = self.extents[boxes], self.src_strides[boxes], self.dst_strides[boxes]
        extents[rows, dim] = extent
        first_src, first_dst = self.src[boxes] + start * src[rows, dim], self.dst[boxes] + start * dst[rows, dim]
        return Boxes(self.copy[boxes], first_src, first_dst, extents, src, dst)

    def _loop_bits(self) -> Ints:
        strides = np.concatenate([self.src_strides[:, :ROW], self.dst_strides[:, :ROW]], axis=1)
        bits: Ints = np.bitwise_or.reduce(strides, axis=1)
        return bits


def _lowest_bit(bits: Ints) -> Ints:
    """The largest power of two, at most WIDEST_WORD, that divides each number."""
    bits = bits | WIDEST_WORD
    return bits & -bits
