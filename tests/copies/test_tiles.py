"""Tiles move what their copies move: the GPU's work list, walked on the CPU."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from helpers.tiles import run_tiles
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.copy_table import COPY, joined, strided_copies
from mcore_reshard.kernels.copies.cpu import run_copies
from mcore_reshard.kernels.cuda.tiles import TILE, cut_tiles, interleaved


def table(*rows: tuple[object, ...]) -> NDArray[np.void]:
    return np.array(list(rows), COPY)


def random_copies(rng: np.random.Generator, sources: int, source_bytes: int) -> tuple[NDArray[np.void], int]:
    """Copies from random boxes of `sources` bases to boxes that lie behind each other in one more base."""
    tables, used = [], 0
    for _ in range(12):
        itemsize = int(rng.choice([1, 2, 4, 8]))
        extents = tuple(int(n) for n in rng.integers(1, 9, int(rng.integers(1, 5))))
        order = rng.permutation(len(extents))
        src_strides, dst_strides = [0] * len(extents), [0] * len(extents)
        reach = int(rng.choice([1, 2]))
        for strides, dims, gap in ((src_strides, order, reach), (dst_strides, range(len(extents)), 1)):
            step = 1
            for dim in reversed([int(d) for d in dims]):
                strides[dim] = step
                step *= extents[dim] * gap
        box = itemsize * int(np.prod(extents)) * reach ** len(extents)
        if box > source_bytes:
            continue
        at = int(rng.integers(0, source_bytes - box + 1)) // itemsize * itemsize
        used += int(rng.integers(0, 20)) // itemsize * itemsize
        used = -(-used // itemsize) * itemsize
        copies = strided_copies(extents, src_strides, dst_strides, itemsize)
        copies["src"], copies["dst"] = int(rng.integers(sources)), sources
        copies["src_offset"] += at
        copies["dst_offset"] += used
        tables.append(copies)
        used += itemsize * int(np.prod(extents))
    return joined(tables), used


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("tile_bytes", [16, 64, 1 << 20])
def test_tiles_move_what_the_copies_move(seed: int, tile_bytes: int) -> None:
    rng = np.random.default_rng(seed)
    sources, size = 3, 20_000
    copies, used = random_copies(rng, sources, size)
    bases = [rng.integers(0, 256, size, np.uint8) for _ in range(sources)]
    wanted = np.full(used, 0xEE, np.uint8)
    run_copies(copies, [*bases, wanted])

    addresses = np.array([64 + n * (size + 17) for n in range(sources + 1)], np.uint64)
    memory = np.full(int(addresses[-1]) + used, 0xEE, np.uint8)
    for base, address in zip(bases, addresses.tolist(), strict=False):
        memory[address : address + size] = base
    tiles = cut_tiles(copies, addresses, tile_bytes)
    run_tiles(tiles, memory.ctypes.data)
    np.testing.assert_array_equal(memory[int(addresses[-1]) :], wanted)
    assert (tiles["words"].astype(np.int64) * tiles["word_bytes"] <= max(tile_bytes, 16)).all()
    moved = copies["extents"].prod(axis=1) * copies["row_bytes"]
    per_copy = np.bincount(tiles["copy"], tiles["words"].astype(np.int64) * tiles["word_bytes"], len(copies))
    np.testing.assert_array_equal(per_copy, moved)


def shapes(tiles: NDArray[np.void]) -> list[tuple[int, ...]]:
    return [tuple(int(tile[name]) for name in ("src", "dst", "words", "row_words", "word_bytes")) for tile in tiles]


def test_a_long_row_is_cut_in_equal_steps_of_wide_words() -> None:
    copies = table((0, 1, 0, 0, (1, 1, 1), (0, 0, 0), (0, 0, 0), 100))
    tiles = cut_tiles(copies, np.array([0x1000, 0x2000], np.uint64), 48)
    assert shapes(tiles) == [
        (0x1000, 0x2000, 3, 3, 16),
        (0x1030, 0x2030, 3, 3, 16),
        (0x1060, 0x2060, 1, 1, 4),
    ]


def test_short_rows_share_a_tile_and_outer_loops_have_their_own() -> None:
    copies = table((0, 1, 0, 0, (1, 2, 5), (0, 4096, 64), (0, 80, 16), 16))
    tiles = cut_tiles(copies, np.array([0x10000, 0x20000], np.uint64), 48)
    assert shapes(tiles) == [
        (0x10000, 0x20000, 3, 1, 16),
        (0x100C0, 0x20030, 2, 1, 16),
        (0x11000, 0x20050, 3, 1, 16),
        (0x110C0, 0x20080, 2, 1, 16),
    ]
    assert set(tiles["src_stride"].tolist()) == {64}
    assert set(tiles["dst_stride"].tolist()) == {16}


def test_unaligned_ends_are_split_off_where_both_sides_agree() -> None:
    row = ((1, 1, 1), (0, 0, 0), (0, 0, 0), 100)
    copies = table((0, 1, 8, 8, *row), (0, 1, 2, 200, *row))
    tiles = cut_tiles(copies, np.array([0x1000, 0x2000], np.uint64), 1 << 20)
    assert shapes(tiles) == [
        (0x1008, 0x2008, 1, 1, 8),
        (0x1010, 0x2010, 5, 5, 16),
        (0x1060, 0x2060, 3, 3, 4),
        (0x1002, 0x20C8, 50, 50, 2),  # two bytes apart: no wider word fits both
    ]


def test_regions_of_more_than_four_gib_keep_their_addresses() -> None:
    nbytes = (5 << 30) + 12
    copies = table((0, 1, 0, 0, (1, 1, 1), (0, 0, 0), (0, 0, 0), nbytes))
    tiles = cut_tiles(copies, np.array([1 << 40, 1 << 44], np.uint64), 1 << 20)
    sizes = tiles["words"].astype(np.int64) * tiles["word_bytes"]
    assert sizes.sum() == nbytes
    np.testing.assert_array_equal(tiles["src"][1:], tiles["src"][:-1] + sizes[:-1].astype(np.uint64))
    assert int(tiles["src"][-1]) + int(sizes[-1]) == (1 << 40) + nbytes


def test_sources_take_turns_from_the_first() -> None:
    assert interleaved(np.array([0, 0, 1, 1]), 1, 1).tolist() == [2, 0, 3, 1]
    assert interleaved(np.array([0, 0, 1, 1]), 1, 2).tolist() == [2, 3, 0, 1]
    assert interleaved(np.repeat([0, 1], [5, 4]), 0, 2).tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4]
    assert interleaved(np.zeros(0, np.int64), 0).tolist() == []
    order = interleaved(np.repeat([0, 1, 2], [30, 10, 10]), 0, 1)
    early = Counter(np.repeat([0, 1, 2], [30, 10, 10])[order[:10]].tolist())
    assert early == {0: 6, 1: 2, 2: 2}


def test_sources_that_give_the_same_are_read_one_after_the_other() -> None:
    assert interleaved(np.array([0, 1, 2, 0, 1, 2]), 1).tolist() == [1, 4, 2, 5, 0, 3]
    assert interleaved(np.array([0, 1, 0, 0]), 0).tolist() == interleaved(np.array([0, 1, 0, 0]), 0, 1).tolist()


@pytest.mark.parametrize("together", [None, 1, 3])
def test_receivers_are_never_all_at_one_source(together: int | None) -> None:
    source = np.repeat(np.arange(4), 8)
    turns = np.stack([source[interleaved(source, rank, together)] for rank in range(4)])
    assert all(len(set(turn)) == 4 for turn in turns.T.tolist())


def test_the_record_is_the_kernels() -> None:
    assert TILE.itemsize == 48


def test_tiles_of_no_whole_words_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        cut_tiles(np.empty(0, COPY), np.zeros(1, np.uint64), 40)
