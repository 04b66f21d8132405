"""Tiles of casts, walked in plain Python as the kernel walks them, against the interpreter; and blocks of scales."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from helpers.casting import WEIGHTS, scale_blocks_of, train_schedule, trainer_tensors, transfers_with_casts
from helpers.tiles import run_blocks, run_cast_tiles, run_tiles
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import BoundSchedule, bind
from mcore_reshard.kernels.copies.buckets import Bucket, cut_buckets
from mcore_reshard.kernels.copies.cast_arithmetic import compute_scales
from mcore_reshard.kernels.copies.casts import CastForm, TensorCast, band_copies
from mcore_reshard.kernels.copies.copy_table import COPY, joined
from mcore_reshard.kernels.copies.cpu import run_copies
from mcore_reshard.kernels.copies.tensors import byte_array
from mcore_reshard.kernels.cuda.cast_tiles import (
    BLOCK,
    CAST_TILE,
    blocks_of,
    cut_cast_tiles,
    cut_rounds,
    cut_whole_blocks,
    split_casts,
)


def bound_of(seed: int) -> tuple[BoundSchedule, tuple[Bucket, ...]]:
    schedule = train_schedule(transfers_with_casts(np.random.default_rng(seed), (1, 2)), 0, (1, 2))
    bound = bind(schedule, trainer_tensors(schedule, seed))
    compute_scales(bound.casts, bound.tensors)
    return bound, cut_buckets(schedule, 4096)


def large_buckets(bound: BoundSchedule) -> list[Bucket]:
    return [each for each in cut_buckets(bound.schedule, 1 << 16) if each.peer == 0]


class Arena:
    """All bases in one array, at addresses that are offsets into it: 16-byte aligned, or off by `shift` bytes."""

    def __init__(self, bases: list[NDArray[np.uint8]], shift: int) -> None:
        self.addresses = np.zeros(len(bases), np.uint64)
        end = shift
        for number, base in enumerate(bases):
            self.addresses[number] = end
            end += -(-len(base) // 16) * 16 + 16
        self.bytes = np.full(end, 0xEE, np.uint8)
        for address, base in zip(self.addresses.tolist(), bases, strict=True):
            self.bytes[address : address + len(base)] = base

    def read(self, address: int, dtype: type, count: int) -> NDArray[np.generic]:
        return np.frombuffer(self.bytes, np.uint8)[address:][: count * np.dtype(dtype).itemsize].copy().view(dtype)

    @property
    def base(self) -> int:
        return self.bytes.ctypes.data


@pytest.mark.parametrize(
    ("seed", "tile_bytes", "shift"), [(0, 1 << 14, 0), (1, 256, 0), pytest.param(8, 1 << 20, 4, marks=pytest.mark.slow)]
)
def test_tiles_do_what_the_interpreter_does(seed: int, tile_bytes: int, shift: int) -> None:
    bound, buckets = bound_of(seed)
    tensors = [byte_array(tensor) for tensor in bound.tensors]
    scratch = len(tensors)
    words = set()
    for bucket in (bucket for bucket in buckets if bucket.peer == 0):
        _, copies = split_casts(bucket.copies, bound.casts)
        if not len(copies):
            continue
        copies["dst"] = scratch
        wanted = np.full(bucket.nbytes, 0xDD, np.uint8)
        arena = Arena([*tensors, wanted], shift)
        run_copies(copies, [*tensors, wanted], bound.casts)
        tiles = cut_cast_tiles(copies, arena.addresses, bound.casts, tile_bytes)
        assert tiles.dtype == CAST_TILE and CAST_TILE.itemsize == 64
        run_cast_tiles(tiles, arena.base)
        words |= {*tiles["box"]["word_bytes"].tolist()}
        np.testing.assert_array_equal(arena.read(int(arena.addresses[scratch]), np.uint8, bucket.nbytes), wanted)
    assert 1 in words


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rounds", [1, 5])
@pytest.mark.parametrize("seed", range(4))
def test_rounds_do_what_the_interpreter_does(seed: int, rounds: int) -> None:
    """Scales too: each is computed once, before it is used or sent, by the tiles of whole blocks or before them."""
    bound, _ = bound_of(seed)
    tensors = [byte_array(tensor) for tensor in bound.tensors]
    elements = [tensor.numel() for tensor in bound.tensors]
    copies = joined(
        [bucket.copies_at(len(tensors), number << 16) for number, bucket in enumerate(large_buckets(bound))]
    )
    wanted = np.full(len(large_buckets(bound)) << 16, 0xDD, np.uint8)
    run_copies(copies, [*tensors, wanted], bound.casts)
    arena = Arena([*tensors, np.full_like(wanted, 0xDD)], 0)
    cut = cut_rounds(np.array_split(copies, rounds), arena.addresses, bound.casts, 1 << 14, elements)
    assert len(cut) == rounds
    assert sum(len(tables.blocks) for tables in cut) and sum(len(tables.cast) for tables in cut)
    cast = np.unique(copies["src"][np.isin(copies["src"], [*bound.casts])]).tolist()
    for scales in (bound.casts[index].scales for index in cast):
        if scales is not None:
            start = int(arena.addresses[scales])
            arena.bytes[start : start + len(tensors[scales])] = 0xEE
    for tables in cut:
        for blocks in (tables.scales, blocks_of(tables.blocks)):
            for block in blocks:
                assert (arena.bytes[int(block["scale"]) : int(block["scale"]) + 4] == 0xEE).all(), "computed twice"
            run_blocks(blocks, arena.base)
        for tiles in (tables.blocks, tables.cast):
            run_cast_tiles(tiles, arena.base)
        run_tiles(tables.plain, arena.base)
    for number, (tensor, address) in enumerate(zip(tensors, arena.addresses.tolist(), strict=False)):
        np.testing.assert_array_equal(arena.read(address, np.uint8, len(tensor)), tensor, err_msg=str(number))
    np.testing.assert_array_equal(arena.read(int(arena.addresses[-1]), np.uint8, len(wanted)), wanted)


def rounds_of_a_weight(*rounds: Sequence[tuple[int, int] | str]) -> list[tuple[int, int, int]]:
    """Of each round, how many scales it computes (before, with whole blocks), and how many tiles cast by scales that are there.

    The weight has 4 blocks of 128 rows each. A round casts rows (first, count), or sends all "scales".
    """
    form = CastForm("bfloat16", "float8_e4m3fn", (512, 128), (128, 128))
    tables = []
    for each in rounds:
        copies = []
        for cast in each:
            if isinstance(cast, str):
                copies.append(np.array([(1, 3, 0, 0, (1, 1, 1), (0, 0, 0), (0, 0, 0), 16)], COPY))
                continue
            row, count = cast
            copies.append(band_copies(form, row * 128, (count, 128), (128, 1), (128, 1)))
            copies[-1]["src_offset"] += 2 * row * 128
            copies[-1]["dst"] = 2
        tables.append(joined(copies))
    addresses = np.array([1 << 20, 1 << 30, 1 << 31, 1 << 32], np.uint64)
    cut = cut_rounds(tables, addresses, {0: TensorCast(form, 1)}, 1 << 17, [512 * 128, 4])
    return [(len(each.scales), len(blocks_of(each.blocks)), len(each.cast)) for each in cut]


def test_a_scale_is_computed_with_its_block_or_before_all_of_its_weight() -> None:
    assert rounds_of_a_weight([(0, 512)]) == [(0, 4, 0)]
    assert rounds_of_a_weight([(0, 256)], [(256, 256)]) == [(0, 2, 0), (0, 2, 0)]
    assert rounds_of_a_weight([(0, 256)]) == [(2, 2, 0)]  # scales may be sent of what is not cast here
    assert rounds_of_a_weight([(0, 256)], [(256, 256), "scales"]) == [(0, 2, 0), (0, 2, 0)]
    assert rounds_of_a_weight([(0, 256), "scales"], [(256, 256)]) == [(2, 2, 0), (0, 0, 2)]  # sent before
    assert rounds_of_a_weight([(0, 192)], [(128, 256)]) == [(3, 1, 1), (0, 0, 2)]  # used before, for a part
    assert rounds_of_a_weight([(0, 256)], [(128, 384)], [(0, 512)]) == [(2, 2, 0), (0, 0, 3), (0, 0, 4)]  # cast again


def test_parts_of_blocks_large_blocks_and_second_copies_are_left_out() -> None:
    def left(block: tuple[int, int], boxes: list[tuple[int, int, int, int]], width: int = 512) -> list[bool]:
        """Of each box (first row, rows, first column, columns) of a weight with 300 rows, whether it is left out."""
        form = CastForm("bfloat16", "float8_e4m3fn", (300, width), block)
        copies = [
            band_copies(form, row * width + column, (rows, columns), (width, 1), (columns, 1))
            for row, rows, column, columns in boxes
        ]
        table = joined(copies)
        table["src_offset"] += np.repeat(
            [2 * (row * width + column) for row, _, column, _ in boxes], [*map(len, copies)]
        )
        addresses = np.array([1 << 20, 1 << 30], np.uint64)
        tiles, is_left = cut_whole_blocks(table, addresses, {0: TensorCast(form, 1)}, 1 << 17)
        assert len(tiles) >= (~is_left).sum() and (tiles["box"]["row_words"] * 8 * 2 * block[0] <= 1 << 17).all()
        return is_left.tolist()

    assert left((128, 128), [(0, 300, 0, 512)]) == [False] * 3  # the last band has 44 rows
    assert left((128, 128), [(0, 128, 0, 256), (0, 128, 256, 256)]) == [False, False]
    assert left((128, 128), [(0, 64, 0, 512), (64, 64, 0, 512)]) == [True, True]
    assert left((128, 128), [(0, 128, 0, 192), (0, 128, 192, 320)]) == [True, True]
    assert left((128, 128), [(0, 128, 0, 512), (0, 128, 0, 512), (128, 128, 0, 512)]) == [False, True, False]
    assert left((128, 128), [(0, 128, 0, 256), (0, 128, 128, 256)]) == [False, True]
    assert left((256, 128), [(0, 256, 0, 512)]) == [True]
    assert left((64, 4), [(0, 64, 0, 512)]) == [True]
    assert left((128, 128), [(0, 128, 0, 516)], 516) == [True]  # the last block has 4 columns


def test_aligned_rows_are_cast_in_wide_words() -> None:
    bound, buckets = bound_of(0)
    addresses = np.arange(len(bound.tensors) + 1, dtype=np.uint64) << 24
    copies = np.concatenate([split_casts(bucket.copies, bound.casts)[1] for bucket in buckets])
    copies["dst"] = len(bound.tensors)
    tiles = cut_cast_tiles(copies, addresses, bound.casts, 128 << 10)
    names = np.array([bound.schedule.tensors[n].name for n in copies["src"][tiles["box"]["copy"]].tolist()])
    widths = {weight.name: {*tiles["box"]["word_bytes"][names == weight.name].tolist()} for weight in WEIGHTS}
    assert widths["square"] == widths["ragged"] == widths["experts"] == {8}
    assert widths["odd"] == {1}
    assert widths["master"] <= {1, 4} and widths["bias"] <= {1, 4}


def test_no_casts_no_tiles() -> None:
    _, buckets = bound_of(0)
    plain, cast = split_casts(buckets[0].copies, {})
    assert len(plain) == len(buckets[0].copies) and not len(cast)
    assert not len(cut_cast_tiles(cast, np.zeros(1, np.uint64), {}, 128))


def test_blocks_cover_every_weight_once() -> None:
    bound, _ = bound_of(1)
    blocks = scale_blocks_of(bound)
    assert blocks.dtype == BLOCK and BLOCK.itemsize == 32
    for index, cast in bound.casts.items():
        weight = bound.tensors[index]
        if cast.scales is None:
            continue
        scales = bound.tensors[cast.scales]
        start = np.uint64(scales.data_ptr())
        mine = blocks[(blocks["scale"] >= start) & (blocks["scale"] < start + np.uint64(scales.nbytes))]
        assert len(mine) == scales.numel()
        elements = np.zeros(weight.numel(), np.int64)
        for block in mine:
            first = (int(block["src"]) - weight.data_ptr()) // 2
            at = first + np.add.outer(np.arange(block["rows"]) * (block["stride"] // 2), np.arange(block["columns"]))
            elements[at] += 1
            amax = weight.reshape(-1)[torch.from_numpy(at)].abs().max().float().clamp(1e-4)
            written = scales.reshape(-1)[(int(block["scale"]) - scales.data_ptr()) // 4]
            assert written == amax / 448.0
        assert (elements == 1).all()
