"""What a device will do is read back from its tables: each damage to a tile, a cast or a scale is found and named."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from copies.test_executed import CAST, LLAMA, MOE, refusal
from copies.test_tiles import random_copies
from helpers.casting import places_of, scale_blocks_of, train_schedule, trainer_tensors, transfers_with_casts
from helpers.handmade import allocate
from helpers.plans import Case
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import BoundSchedule, bind
from mcore_reshard.kernels.copies.buckets import cut_buckets
from mcore_reshard.kernels.copies.copy_table import COPY
from mcore_reshard.kernels.copies.executed import Executed
from mcore_reshard.kernels.copies.peer_table import PeerTable, peer_table
from mcore_reshard.kernels.cuda import copy_engine, engine_rows
from mcore_reshard.kernels.cuda.cast_tiles import blocks_of, cut_cast_tiles, cut_rounds, cut_whole_blocks
from mcore_reshard.kernels.cuda.executed_tiles import (
    PlacedCopies,
    cast_tile_problems,
    computed_problems,
    names_of,
    scale_problems,
    tile_problems,
)
from mcore_reshard.kernels.cuda.tiles import cut_tiles, interleaved
from mcore_reshard.planner.plan.make_schedule import schedule_of

Table = NDArray[np.void]
Damage = Callable[[Table], Table]
TILE_BYTES = 256


def later(field: str, nbytes: int) -> Damage:
    """One tile's field is off."""

    def change(tiles: Table) -> Table:
        tiles[field][len(tiles) // 2] += np.array(nbytes).astype(tiles[field].dtype)
        return tiles

    return change


def shifted(tiles: Table) -> Table:
    """The whole table lies two bytes later: what a wrong pointer reads."""
    return np.roll(tiles.view(np.uint8), 2).view(tiles.dtype)


def all_later(end: str) -> Damage:
    def change(tiles: Table) -> Table:
        tiles[end] += 2
        return tiles

    return change


def dropped(tiles: Table) -> Table:
    return np.delete(tiles, len(tiles) // 2)


def doubled(tiles: Table) -> Table:
    return np.concatenate([tiles, tiles[-1:]])


def overwritten(tiles: Table) -> Table:
    """One tile in another's place: as many tiles as before."""
    tiles[0] = tiles[-1]
    return tiles


def exchanged(field: str) -> Damage:
    """Two tiles of one shape read, or write, in each other's place."""

    def change(tiles: Table) -> Table:
        shape = [*zip(tiles["words"].tolist(), tiles["word_bytes"].tolist(), strict=True)]
        one, other = next((i, j) for i in range(len(shape)) for j in range(i) if shape[i] == shape[j])
        tiles[field][[one, other]] = tiles[field][[other, one]]
        return tiles

    return change


TILES: dict[str, Damage] = {
    "table two bytes later": shifted,
    "all sources two bytes later": all_later("src"),
    "all destinations two bytes later": all_later("dst"),
    "a source two bytes later": later("src", 2),
    "a source two bytes earlier": later("src", -2),
    "a destination two bytes later": later("dst", 2),
    "a destination 16 bytes later": later("dst", 16),
    "a word more": later("words", 1),
    "a shorter row": later("row_words", -1),
    "of another copy": later("copy", 1),
    "of no copy": later("copy", 1 << 31),
    "dropped": dropped,
    "doubled": doubled,
    "overwritten": overwritten,
    "sources exchanged": exchanged("src"),
    "destinations exchanged": exchanged("dst"),
}


def pulls_of(case: Case, rank: int) -> tuple[BoundSchedule, PeerTable, NDArray[np.uint64]]:
    """(the rank's end, its pulls, where each base would begin)."""
    schedule = schedule_of(case.plan(), "gen", rank)
    bound = bind(schedule, allocate(schedule))
    assert schedule.view is not None
    table = peer_table(schedule)
    own = [tensor.data_ptr() for tensor in bound.tensors]
    theirs = [(1 << 40) + (number << 24) for number in range(len(table.theirs))]
    return bound, table, np.array(own + theirs, np.uint64)


def pull_problems(case: Case, rank: int, damage: Damage) -> list[str]:
    bound, table, addresses = pulls_of(case, rank)
    tiles = cut_tiles(table.copies, addresses, TILE_BYTES)
    tiles = tiles[interleaved(table.peer[tiles["copy"]].astype(np.int64), rank)]
    name_of = names_of(bound.schedule, table.copies["dst"])
    return tile_problems(damage(tiles), PlacedCopies.of(table.copies, addresses), name_of)


@pytest.mark.parametrize("case", [LLAMA, MOE], ids=str)
def test_tiles_that_are_whole_have_no_problems(case: Case) -> None:
    assert pull_problems(case, 1, lambda tiles: tiles) == []


@pytest.mark.parametrize("damage", TILES)
def test_each_damage_to_a_tile_is_named(damage: str) -> None:
    (problem,) = pull_problems(LLAMA, 1, TILES[damage])
    assert "weight" in problem or "tiles of no copy" in problem, problem


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("tile_bytes", [16, 64, 1 << 20])
def test_any_way_to_cut_copies_is_the_same(seed: int, tile_bytes: int) -> None:
    rng = np.random.default_rng(seed)
    copies, _ = random_copies(rng, 3, 20_000)
    addresses = np.array([64 + n * 20_017 for n in range(4)], np.uint64)
    tiles = cut_tiles(copies, addresses, tile_bytes)
    placed = PlacedCopies.of(copies, addresses)
    assert tile_problems(tiles, placed, str) == []
    row = int(rng.integers(len(tiles)))
    field = str(rng.choice(["src", "dst", "words", "row_words", "word_bytes", "copy"]))
    tiles[field][row] += np.array(rng.choice([1, 2, 16]), tiles[field].dtype)
    assert tile_problems(tiles, placed, str) != []


def touching_copies(rng: np.random.Generator, count: int) -> NDArray[np.void]:
    """Contiguous copies of 8 to 64 bytes from bases 0 to 2 to base 3; about half of them touch the one before."""
    copies = np.zeros(count, COPY)
    copies["extents"], copies["row_bytes"] = 1, 8 * rng.integers(1, 9, count)
    copies["src"], copies["dst"] = np.sort(rng.integers(0, 3, count)), 3
    for end in ("src_offset", "dst_offset"):
        gaps = 8 * rng.integers(0, 2, count)
        copies[end] = np.cumsum(copies["row_bytes"] + gaps) - copies["row_bytes"]
    return copies[rng.permutation(count)]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_what_a_copy_engine_does_not_take_is_left_to_the_kernel(
    seed: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_rows, "LEAST_BYTES", 1)
    monkeypatch.setattr(engine_rows, "_ROW_COST_BYTES", 0)
    monkeypatch.setattr(engine_rows, "_JOINED_BYTES", 128)
    monkeypatch.setattr(copy_engine, "_MOST_BYTES", 40)
    rng = np.random.default_rng(seed)
    strided, touching = random_copies(rng, 3, 20_000)[0], touching_copies(rng, 200)
    touching["src_offset"] += 20_000
    touching["dst_offset"] += 20_000
    copies = np.concatenate([strided, touching])
    addresses = np.array([64 + n * 40_016 for n in range(4)], np.uint64)
    turn = copies["src"].astype(np.int64) - 1  # none of base 0
    is_far = turn >= 0
    tiles, rows = engine_rows.divided(copies, addresses, 64, turn, share, streams=1)
    assert is_far[rows.copy].all() and (copies["extents"][rows.copy] == 1).all()
    fits = is_far & (copies["extents"] == 1).all(axis=1)
    assert rows.nbytes.sum() <= share * (copies["extents"].prod(axis=1) * copies["row_bytes"])[is_far].sum()
    assert len(rows.src) > 0 or not share
    if share == 1.0:
        assert len(rows.src) < len(rows.copy) == fits.sum(), "copies that touch become one row"

    placed = PlacedCopies.of(copies, addresses)
    engine = copy_engine.EngineCopies(rows, torch.device("cuda", 0), 3)
    assert tile_problems(np.concatenate([tiles, engine.read_back()]), placed, str) == []
    for told in engine._rows[:3]:
        for row in range(0, len(told), 7):
            told[row] += 2
            assert len(tile_problems(np.concatenate([tiles, engine.read_back()]), placed, str)) > 0
            told[row] -= 2


# --- casts -----------------------------------------------------------------------------------------------------------


def cast_problems(damage: Damage, seed: int = 0, *, whole: bool = False) -> list[str]:
    """Of a peer's casts, after damage to their tiles; `whole`: those of whole blocks among them."""
    schedule = train_schedule(transfers_with_casts(np.random.default_rng(seed), (1, 2)), 0, (1, 2))
    bound = bind(schedule, trainer_tensors(schedule, seed))
    own = [tensor.data_ptr() for tensor in bound.tensors]
    buckets = [each for each in cut_buckets(schedule, 1 << 16) if each.peer == 0]
    begins = [(1 << 40) + (number << 20) for number in range(len(buckets))]
    placed = PlacedCopies.of_buckets(buckets, own, begins)
    placed = placed.only(np.flatnonzero(np.isin(placed.copies["src"], [*bound.casts])))
    starts = np.zeros(len(own) + 1, np.uint64)
    starts[:-1] = own
    copies = placed.copies.copy()
    copies["dst"], copies["dst_offset"] = -1, placed.dst  # one base at 0: the offsets are addresses
    blocks, is_left = cut_whole_blocks(copies, starts, bound.casts if whole else {}, TILE_BYTES)
    left = np.flatnonzero(is_left)
    tiles = cut_cast_tiles(copies[left], starts, bound.casts, TILE_BYTES)
    tiles["box"]["copy"] = left[tiles["box"]["copy"]]
    assert (len(blocks) > 0) == whole
    tiles = np.concatenate([damage(tiles), blocks]) if not whole else np.concatenate([tiles, damage(blocks)])
    return cast_tile_problems(tiles, placed, bound.casts, own, names_of(schedule, placed.copies["src"]))


def in_box(damage: Damage) -> Damage:
    def change(tiles: Table) -> Table:
        tiles["box"] = damage(np.ascontiguousarray(tiles["box"]))
        return tiles

    return change


def with_scales(field: str, step: int) -> Damage:
    """A field of one tile that has scales is off."""

    def change(tiles: Table) -> Table:
        row = np.flatnonzero(tiles["scales"] > 0)[-1]
        tiles[field][row] += np.array(step).astype(tiles[field].dtype)
        return tiles

    return change


CASTS: dict[str, Damage] = {
    "a scale's address off by one": with_scales("scales", 1),
    "the next scale": with_scales("scales", 4),
    "the scale before": with_scales("scales", -4),
    "another column of the block": with_scales("first_column", 1),
    "other blocks": with_scales("block_columns", 1),
    "another cast": with_scales("kind", 1),
    "table two bytes later": shifted,
    "dropped": dropped,
    "doubled": doubled,
    **{
        name: in_box(TILES[name])
        for name in ("a source two bytes later", "a destination two bytes later", "a word more")
    },
}


@pytest.mark.parametrize("whole", [False, True], ids=["tiles", "whole blocks"])
@pytest.mark.parametrize("seed", range(3))
def test_casts_that_are_whole_have_no_problems(seed: int, whole: bool) -> None:
    assert cast_problems(lambda tiles: tiles, seed, whole=whole) == []


@pytest.mark.parametrize("whole", [False, True], ids=["tiles", "whole blocks"])
@pytest.mark.parametrize("damage", CASTS)
def test_each_damage_to_a_cast_is_named(damage: str, whole: bool) -> None:
    (problem,) = cast_problems(CASTS[damage], whole=whole)
    assert "first " in problem or "tiles of no copy" in problem, problem


BLOCKS: dict[str, Damage] = {
    "a scale's address off by one": later("scale", 1),
    "the next scale": later("scale", 4),
    "a source two bytes later": later("src", 2),
    "another stride": later("stride", 2),
    "a row less": later("rows", -1),
    "a column less": later("columns", -1),
    "wider words": later("word_elements", 7),
    "table two bytes later": shifted,
    "dropped": dropped,
    "doubled": doubled,
    "overwritten": overwritten,
}


@pytest.mark.parametrize("damage", ["", *BLOCKS])
def test_each_damage_to_the_blocks_of_scales_is_named(damage: str) -> None:
    schedule = train_schedule(transfers_with_casts(np.random.default_rng(1), (1, 2)), 0, (1, 2))
    bound = bind(schedule, trainer_tensors(schedule, 1))
    blocks = scale_blocks_of(bound)
    if damage:
        blocks = BLOCKS[damage](blocks)
    problems = scale_problems(blocks, bound.casts, *places_of(bound), lambda index: schedule.tensors[index].name)
    assert len(problems) == bool(damage), problems
    assert all("weights' scales, first " in problem for problem in problems)


def test_rounds_compute_each_scale_of_what_they_cast_once() -> None:
    """Of all rounds together: neither in two of them, nor in none."""
    schedule = train_schedule(transfers_with_casts(np.random.default_rng(1), (1, 2)), 0, (1, 2))
    bound = bind(schedule, trainer_tensors(schedule, 1))
    addresses, elements = places_of(bound)
    scratch = len(addresses)
    copies = [bucket.copies_at(scratch, 0) for bucket in cut_buckets(schedule, 1 << 15)]
    rounds = [each for each in copies if np.isin(each["src"], [*bound.casts]).any()]
    bases = np.array([*addresses, 1 << 46], np.uint64)
    computed = [
        np.concatenate([tables.scales, blocks_of(tables.blocks)])
        for tables in cut_rounds(rounds, bases, bound.casts, TILE_BYTES, elements)
    ]
    assert computed_problems(bound, rounds, computed) == [] == computed_problems(bound, [], [])
    number = next(number for number, blocks in enumerate(computed[1:], 1) if len(blocks))
    for wrong in ([*computed, computed[number]], computed[:number] + computed[number + 1 :]):
        (problem,) = computed_problems(bound, rounds, wrong)
        assert "weights' scales, first " in problem


def across_bands(executed: Executed) -> Executed:
    """Two copies of neighboring rows of blocks become one: the same bytes, but all with the scales of the first."""
    for number, bucket in enumerate(executed.buckets):
        copies = bucket.copies
        for row in range(len(copies) - 1):
            one, other = copies[row], copies[row + 1]
            rows = int(one["extents"][-1])
            joins = all(
                one[f"{end}_offset"] + rows * one[f"{end}_strides"][-1] == other[f"{end}_offset"]
                for end in ("src", "dst")
            )
            if one["src"] == other["src"] in executed.bound.casts and joins and rows > 1:
                merged = np.delete(copies, row + 1)
                merged["extents"][row, -1] += other["extents"][-1]
                buckets = [*executed.buckets]
                buckets[number] = replace(bucket, copies=merged)
                return replace(executed, buckets=tuple(buckets))
    raise AssertionError("no two copies are neighbors")


def test_a_copy_that_takes_the_scales_of_another_row_of_blocks_is_refused() -> None:
    assert refusal(CAST, "train:0", damaged=across_bands) == "itself"


# --- cost ------------------------------------------------------------------------------------------------------------


def test_a_large_table_is_read_back_in_less_than_a_second() -> None:
    """As many tiles as 20 GB have, in as many copies as a rank of DeepSeek-V3 has tensors."""
    count, row = 5000, 4 << 20
    copies = np.zeros(count, COPY)
    copies["src"], copies["dst"] = 0, 1
    copies["src_offset"] = copies["dst_offset"] = np.arange(count) * row
    copies["extents"], copies["row_bytes"] = 1, row
    addresses = np.array([1 << 40, 1 << 44], np.uint64)
    tiles = cut_tiles(copies, addresses, 128 << 10)
    placed = PlacedCopies.of(copies, addresses)
    start = time.process_time()
    assert len(tiles) == 160_000 and tile_problems(tiles, placed, str) == []
    assert time.process_time() - start < 1.0
