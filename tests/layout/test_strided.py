"""Strided copies against element lists: composing, subtracting and taking apart lose no element and invent none."""

import random
from itertools import product

import pytest

from mcore_reshard.planner.layout.strided import (
    NotNestedError,
    StridedCopy,
    box_copy,
    common_chain,
    compose,
    digit_boxes,
    subtract,
)


def elements(*copies: StridedCopy) -> list[tuple[int, int]]:
    """(source, destination) of every element, sorted by destination."""
    pairs = []
    for copy in copies:
        for index in product(*map(range, copy.extents)):
            src = copy.src_offset + sum(i * s for i, s in zip(index, copy.src_strides, strict=True))
            dst = copy.dst_offset + sum(i * s for i, s in zip(index, copy.dst_strides, strict=True))
            pairs.append((dst, src))
    return [(src, dst) for dst, src in sorted(pairs)]


def random_copy(rng: random.Random, side: str) -> StridedCopy:
    """A slice of a random view of 720 elements on one side, contiguous on the other."""
    shape = rng.choice([(720,), (24, 30), (6, 120), (8, 9, 10), (2, 3, 4, 30), (12, 60), (30, 24), (10, 72)])
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    dims = list(range(len(shape)))
    rng.shuffle(dims)
    offset, extents, kept = 0, [], []
    for dim in dims:
        step = rng.choice([1, 1, 1, 2, 3])
        start = rng.randrange(shape[dim])
        count = rng.randint(1, (shape[dim] - start - 1) // step + 1)
        offset += start * strides[dim]
        extents.append(count)
        kept.append(strides[dim] * step)
    dense = [1]
    for size in reversed(extents[1:]):
        dense.insert(0, dense[0] * size)
    first = rng.randrange(50)
    there = (tuple(extents), first, tuple(dense), offset, tuple(kept))
    return StridedCopy(*there) if side == "dst" else StridedCopy(*there).inverse


@pytest.mark.parametrize("seed", range(300))
def test_composing_is_the_composition_of_element_maps(seed: int) -> None:
    rng = random.Random(seed)
    first, then = random_copy(rng, "dst"), random_copy(rng, "src")
    source_of = {dst: src for src, dst in elements(first)}
    expected = sorted((dst, source_of[middle]) for middle, dst in elements(then) if middle in source_of)
    composed = compose(first, then)
    assert sorted((dst, src) for src, dst in elements(*composed)) == expected


@pytest.mark.parametrize("seed", range(200))
def test_subtracting_leaves_the_elements_outside(seed: int) -> None:
    rng = random.Random(seed)
    copy, taken = random_copy(rng, "dst"), random_copy(rng, "dst")
    gone = {dst for _, dst in elements(taken)}
    assert elements(*subtract(copy, taken)) == [pair for pair in elements(copy) if pair[1] not in gone]


@pytest.mark.parametrize("seed", range(100))
def test_boxes_in_any_radix_are_the_copy(seed: int) -> None:
    rng = random.Random(seed)
    copy = random_copy(rng, "dst")
    for chain in ((720, 1), (120, 30, 1), (30, 1), (60, 20, 4, 2, 1), common_chain(copy)):
        assert elements(*(box_copy(box, chain) for box in digit_boxes(copy, chain))) == elements(copy)


def test_a_read_that_repeats_elements_repeats_the_copy() -> None:
    first = StridedCopy((4,), 10, (1,), 0, (1,))
    then = StridedCopy((3, 4), 0, (0, 1), 0, (4, 1))  # each of three rows reads all four elements
    assert elements(*compose(first, then)) == [(10 + i % 4, i) for i in range(12)]


def test_a_row_range_of_a_cut_matrix_is_one_box() -> None:
    rows = StridedCopy((8, 6), 0, (6, 1), 24, (6, 1))
    (box,) = digit_boxes(rows, (6, 1))
    assert (box.start, box.extents) == ((4, 0), (8, 6))


def test_too_many_boxes_are_refused() -> None:
    with pytest.raises(NotNestedError, match="stride 3"):
        digit_boxes(StridedCopy((1 << 20,), 0, (1,), 0, (3,)), (2, 1))


def any_copy(rng: random.Random) -> StridedCopy:
    """A small copy of any strides, nested or not, that writes no element twice."""
    while True:
        extents = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 3)))
        src, dst = (tuple(rng.choice([1, 2, 3, 4, 5, 6, 7, 11, 12, 24]) for _ in extents) for _ in range(2))
        copy = StridedCopy(extents, rng.randrange(20), src, rng.randrange(12), dst)
        if len({dst for _, dst in elements(copy)}) == copy.elements:
            return copy


def test_strides_that_do_not_nest_are_taken_apart_exactly() -> None:
    rng, done = random.Random(0), 0
    for _ in range(3000):
        copy, other = any_copy(rng), any_copy(rng)
        source_of = {dst: src for src, dst in elements(copy)}
        passed = [(source_of[middle], dst) for dst, middle in elements(other) if middle in source_of]
        gone = {dst for _, dst in elements(other)}
        try:
            composed, left = compose(copy, other.inverse), subtract(copy, other)
        except NotNestedError:
            continue
        done += 1
        assert sorted(elements(*composed)) == sorted(passed)
        assert elements(*left) == [pair for pair in elements(copy) if pair[1] not in gone]
    assert done > 2000
