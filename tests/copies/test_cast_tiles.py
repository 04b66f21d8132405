"""Tiles of casts, walked in plain Python as the kernel walks them, against the interpreter; and blocks of scales."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.casting import WEIGHTS, scale_blocks_of, train_schedule, trainer_tensors, transfers_with_casts
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import BoundSchedule, bind
from mcore_reshard.kernels.copies.buckets import Bucket, cut_buckets
from mcore_reshard.kernels.copies.cast_arithmetic import compute_scales, narrowed, scaled_to_e4m3, widened
from mcore_reshard.kernels.copies.cpu import run_copies
from mcore_reshard.kernels.copies.tensors import byte_array
from mcore_reshard.kernels.cuda.cast_tiles import (
    BLOCK,
    CAST_KINDS,
    CAST_TILE,
    cut_cast_tiles,
    split_casts,
)

KINDS = {kind: pair for pair, kind in CAST_KINDS.items()}
BITS = {"bfloat16": np.uint16, "float32": np.uint32, "float8_e4m3fn": np.uint8}


def bound_of(seed: int) -> tuple[BoundSchedule, tuple[Bucket, ...]]:
    schedule = train_schedule(transfers_with_casts(np.random.default_rng(seed), (1, 2)), 0, (1, 2))
    bound = bind(schedule, trainer_tensors(schedule, seed))
    compute_scales(bound.casts, bound.tensors)
    return bound, cut_buckets(schedule, 4096)


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

    def walk(self, tile: np.void) -> None:
        box, (src, to) = tile["box"], KINDS[int(tile["kind"])]
        word = int(box["word_bytes"])
        for number in range(int(box["words"])):
            row, at = divmod(number, int(box["row_words"]))
            source = int(box["src"]) + row * int(box["src_stride"]) + at * word * np.dtype(BITS[src]).itemsize
            target = int(box["dst"]) + row * int(box["dst_stride"]) + at * word * np.dtype(BITS[to]).itemsize
            bits = self.read(source, BITS[src], word)
            if to == "float8_e4m3fn":
                block = (int(tile["first_column"]) + at * word) // int(tile["block_columns"])
                scale = torch.from_numpy(self.read(int(tile["scales"]) + 4 * block, np.float32, 1))
                values = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
                written = scaled_to_e4m3(values[None], scale.expand(word)).view(torch.uint8).numpy()[0]
            else:
                written = (narrowed if to == "bfloat16" else widened)(bits)
            self.bytes[target : target + written.nbytes] = written.view(np.uint8)


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
        for tile in tiles:
            arena.walk(tile)
        words |= {*tiles["box"]["word_bytes"].tolist()}
        np.testing.assert_array_equal(arena.read(int(arena.addresses[scratch]), np.uint8, bucket.nbytes), wanted)
    assert 1 in words


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
