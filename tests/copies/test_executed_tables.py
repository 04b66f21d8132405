"""Damage to the tables that executors walk, after schedules were sound: either end alone is refused before a byte moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from copies.test_executed import CAST, LLAMA, MOE, RELAYED, direct_tables, gloo_tables, refusal
from helpers.handmade import allocate
from helpers.plans import Case
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import bind
from mcore_reshard.kernels.copies.box_sums import PRIME, Base, box_sum, mixed, sums_of, times
from mcore_reshard.kernels.copies.buckets import Bucket, cut_buckets
from mcore_reshard.kernels.copies.copy_table import COPY
from mcore_reshard.kernels.copies.executed import Executed, ExecutedTables
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.model.families import parameters_from_config
from mcore_reshard.planner.plan.make_plan import make_plan
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.schedule import Schedule

Copies = NDArray[np.void]
FIELDS = [name for name in COPY.names or () if name not in {"src", "dst"}]
Damage = Callable[[Copies, str], None]  # in place; "src" or "dst" is the end that lies in tensors of this rank


def largest(copies: Copies) -> int:
    return int(np.argmax(copies["row_bytes"] * copies["extents"].prod(axis=1)))


def shifted(nbytes: int, other_side: bool = False) -> Damage:
    def change(copies: Copies, here: str) -> None:
        there = {"src": "dst", "dst": "src"}[here]
        copies[(there if other_side else here) + "_offset"][largest(copies)] += nbytes

    return change


def all_shifted(copies: Copies, here: str) -> None:
    copies[here + "_offset"] += 2


def exchanged(copies: Copies, here: str) -> None:
    places = [*zip(copies[here].tolist(), copies[here + "_offset"].tolist(), strict=True)]
    rows = copies["row_bytes"].tolist()
    pairs = ((i, j) for i in range(len(rows)) for j in range(i) if rows[i] == rows[j] and places[i] != places[j])
    one, other = next(pairs)
    for column in (here, here + "_offset"):
        copies[column][[one, other]] = copies[column][[other, one]]


def shorter(copies: Copies, here: str) -> None:
    row = largest(copies)
    copies["row_bytes"][row] -= copies["row_bytes"][row] // 2


def rows_repeated(copies: Copies, here: str) -> None:
    rows = np.flatnonzero(copies["extents"].max(axis=1) > 1)
    if not len(rows):
        pytest.skip("every copy is one row")
    copies[here + "_strides"][rows[0]] = 0


def one_row_less(copies: Copies, here: str) -> None:
    row = int(np.argmax(copies["extents"].max(axis=1)))
    if copies["extents"][row].max() == 1:
        pytest.skip("every copy is one row")
    copies["extents"][row, int(np.argmax(copies["extents"][row]))] -= 1


def another_tensor(copies: Copies, here: str) -> None:
    copies[here][0] += 1 if copies[here][0] == 0 else -1


def no_tensor(copies: Copies, here: str) -> None:
    copies[here][0] = 1 << 20


TABLES: dict[str, Damage] = {
    "two bytes later": shifted(2),
    "two bytes earlier": shifted(-2),
    "one byte later": shifted(1),
    "all two bytes later": all_shifted,
    "two bytes later on the other side": shifted(2, other_side=True),
    "two copies exchanged": exchanged,
    "a shorter row": shorter,
    "a row repeated": rows_repeated,
    "one row less": one_row_less,
    "another tensor": another_tensor,
    "no tensor": no_tensor,
}


def in_bucket(damage: Damage) -> Callable[[Executed], Executed]:
    """The damage to the bucket with most copies."""

    def change(executed: Executed) -> Executed:
        buckets = [*executed.buckets]
        if not buckets:
            return executed
        number = max(range(len(buckets)), key=lambda i: len(buckets[i].copies))
        copies = buckets[number].copies.copy()
        damage(copies, "src" if buckets[number].sends else "dst")
        buckets[number] = replace(buckets[number], copies=copies)
        return replace(executed, buckets=tuple(buckets))

    return change


def in_table(damage: Damage, here: str) -> Callable[[Executed], Executed]:
    """The damage to what a rank pulls ("dst" is its own end), or to what it pushes ("src")."""

    def change(executed: Executed) -> Executed:
        if executed.reaches is None or executed.reaches.here != here:
            return executed
        copies = executed.reaches.copies.copy()
        damage(copies, here)
        return replace(executed, reaches=replace(executed.reaches, copies=copies))

    return change


@pytest.mark.parametrize("case", [LLAMA, MOE, CAST, RELAYED], ids=str)
@pytest.mark.parametrize("name", ["train:0", "gen:1"])
@pytest.mark.parametrize("damage", TABLES)
def test_damaged_buckets_are_refused(damage: str, name: str, case: Case) -> None:
    assert refusal(case, name, damaged=in_bucket(TABLES[damage]))


@pytest.mark.parametrize("case", [LLAMA, MOE, CAST], ids=str)
@pytest.mark.parametrize("damage", TABLES)
def test_damaged_pull_tables_are_refused(damage: str, case: Case) -> None:
    assert refusal(case, "gen:1", damaged=in_table(TABLES[damage], "dst"), tables_of=direct_tables)


@pytest.mark.parametrize("damage", TABLES)
def test_damaged_push_tables_are_refused(damage: str) -> None:
    assert refusal(RELAYED, "gen:1", damaged=in_table(TABLES[damage], "src"), tables_of=direct_tables)


def test_a_replica_that_admits_other_pushes_than_the_plan_has_is_refused() -> None:
    def without_the_first(executed: Executed) -> Executed:
        if executed.exposed is None:
            return executed
        numbers = [np.arange(len(table) > 0, len(table)) for table in executed.exposed.tables]
        return replace(executed, exposed=executed.exposed.with_rows(numbers))

    assert refusal(RELAYED, "gen:1", damaged=without_the_first, tables_of=direct_tables)


def buckets_exchanged(executed: Executed) -> Executed:
    """Two messages of one pair carry each other's bytes."""
    one, other, *rest = executed.buckets
    assert (one.peer, one.stage) == (other.peer, other.stage)
    return replace(executed, buckets=(replace(one, copies=other.copies), replace(other, copies=one.copies), *rest))


def bucket_dropped(executed: Executed) -> Executed:
    return replace(executed, buckets=executed.buckets[1:])


def bucket_to_another(executed: Executed) -> Executed:
    first = executed.buckets[0]
    return replace(executed, buckets=(replace(first, peer=1 - first.peer), *executed.buckets[1:]))


@pytest.mark.parametrize("name", ["train:0", "gen:1"])
@pytest.mark.parametrize("change", [buckets_exchanged, bucket_dropped, bucket_to_another])
def test_damaged_messages_are_refused(change: Callable[[Executed], Executed], name: str) -> None:
    assert refusal(LLAMA, name, damaged=change)


def pulled_of_another_source(executed: Executed) -> Executed:
    assert executed.reaches is not None
    down = [each for each in executed.reaches.theirs if each.tensor.endswith("mlp.linear_fc2.weight")]
    first, twin = down[:2]
    assert first.rank == twin.rank
    sources = [twin if each == first else first if each == twin else each for each in executed.reaches.theirs]
    return replace(executed, reaches=replace(executed.reaches, theirs=tuple(sources)))


def test_sources_that_are_exchanged_are_refused() -> None:
    assert refusal(LLAMA, "gen:0", damaged=pulled_of_another_source, tables_of=direct_tables)


# --- casts ---------------------------------------------------------------------------------------------------------


def cast_otherwise(**changes: Any) -> Callable[[Schedule], Schedule]:
    def change(schedule: Schedule) -> Schedule:
        first, *rest = schedule.casts
        return replace(schedule, casts=(replace(first, **changes), *rest))

    return change


def scales_of_another(schedule: Schedule) -> Schedule:
    shapes = [schedule.tensors[cast.scales or 0].shape for cast in schedule.casts]
    one = 0
    other = next(
        i for i, shape in enumerate(shapes) if i and shape == shapes[0] and schedule.casts[i].scales is not None
    )
    casts = [*schedule.casts]
    casts[one], casts[other] = (
        replace(casts[one], scales=casts[other].scales),
        replace(casts[other], scales=casts[one].scales),
    )
    return replace(schedule, casts=tuple(casts))


@pytest.mark.parametrize(
    "change",
    [cast_otherwise(block=(4, 8)), cast_otherwise(to="float32", scales=None), scales_of_another],
    ids=["blocks", "dtype", "scales of another tensor"],
)
def test_other_casts_are_refused(change: Callable[[Schedule], Schedule]) -> None:
    assert refusal(CAST, "train:0", change)


# --- tensors -------------------------------------------------------------------------------------------------------


def test_tensors_that_are_bound_in_each_others_place_are_refused() -> None:
    schedule = schedule_of(LLAMA.plan(), "gen", 0)
    bound = bind(schedule, allocate(schedule))
    names = [local.name for local in schedule.tensors]
    one, other = (names.index(f"model.layers.{layer}.mlp.down_proj.weight") for layer in (0, 1))
    tensors = [*bound.tensors]
    tensors[one], tensors[other] = tensors[other], tensors[one]
    wrong = replace(bound, tensors=tuple(tensors))
    problems = ExecutedTables([(wrong, gloo_tables(wrong, LLAMA.plan()))]).problems
    assert problems == [f"{names[number]} is bound to another tensor" for number in sorted((one, other))]


# --- random damage, and the sums themselves ------------------------------------------------------------------------


@pytest.mark.parametrize("case", [LLAMA, MOE], ids=str)
@pytest.mark.parametrize("seed", range(30))
def test_any_field_of_any_copy_matters(seed: int, case: Case) -> None:
    rng = np.random.default_rng(seed)

    def change(copies: Copies, here: str) -> None:
        row, field = int(rng.integers(len(copies))), str(rng.choice(FIELDS))
        step = int(rng.choice([-8, -2, -1, 1, 2, 8]))
        if field in {"extents", "src_strides", "dst_strides"}:
            loops = np.flatnonzero(copies["extents"][row] > 1)
            if not len(loops):
                field = "row_bytes"
            else:
                copies[field][row, loops[-1]] += step
                return
        copies[field][row] += step

    assert refusal(case, str(rng.choice(["train:0", "gen:0"])), damaged=in_bucket(change))


def test_sums_do_not_depend_on_how_bytes_are_cut() -> None:
    base = Base("a test")
    whole = box_sum([(6, [(base, 20)]), (4, [(base, 1)])])
    rows = sum(pow(base.value, 20 * row, PRIME) * box_sum([(4, [(base, 1)])]) for row in range(6)) % PRIME
    single = sum(pow(base.value, 20 * row + column, PRIME) for row in range(6) for column in range(4)) % PRIME
    assert whole == rows == single


def test_products_and_powers_are_those_of_whole_numbers() -> None:
    rng = np.random.default_rng(0)
    one, other = rng.integers(0, PRIME, (2, 1000), np.uint64)
    one[:3], other[:3] = (PRIME - 1, PRIME - 1, 0), (PRIME - 1, 1, PRIME - 1)
    assert times(one, other).tolist() == [a * b % PRIME for a, b in zip(one.tolist(), other.tolist(), strict=True)]
    exponents = [0, 1, 65535, 65536, 3 << 40, (1 << 62) + 5]
    base = Base("a test")
    assert base.powers(np.array(exponents)).tolist() == [pow(base.value, exponent, PRIME) for exponent in exponents]
    assert sums_of(np.array([1, 1, 0]), np.array([PRIME - 1, 2, 7], np.uint64), 3) == [7, 1, 0]
    assert len({*mixed(np.arange(1000), np.zeros(1000, np.int64)).tolist()}) == 1000


def test_a_bucket_is_what_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages that nccl sends without a copy are entered as the run of bytes that leaves the tensor."""
    from mcore_reshard.kernels.transports.nccl.staging import PlacedMessage

    schedule = schedule_of(LLAMA.plan(), "train", 0)
    bound = bind(schedule, allocate(schedule))
    (executed,) = gloo_tables(bound, LLAMA.plan())

    def placed(bucket: Bucket, shift: int) -> Bucket:
        if bucket.place is None:
            return bucket
        tensor, offset = bucket.place
        return PlacedMessage(bucket, 0, 0, bucket.nbytes, tensor, offset + shift).executed

    in_place, later = (tuple(placed(bucket, shift) for bucket in executed.buckets) for shift in (0, 2))
    assert any(len(one.copies) == 1 for one in in_place)
    tables = [
        ExecutedTables([(bound, [replace(executed, buckets=each)])]) for each in (executed.buckets, in_place, later)
    ]
    assert tables[0].digests == tables[1].digests != tables[2].digests
    assert tables[1].problems == []


def test_a_run_of_bytes_may_go_through_the_weights_of_several_experts() -> None:
    """One engine rank has all experts of a layer in one tensor: nccl receives many of them in one message, without a copy."""
    from mcore_reshard.kernels.transports.nccl.staging import PlacedMessage

    plan = make_plan(parameters_from_config(load_config("tiny-qwen3-moe")), TrainMesh(), GenMesh())
    schedule = schedule_of(plan, "gen", 0)
    bound = bind(schedule, allocate(schedule))
    buckets = cut_buckets(schedule, 16 << 10)
    runs = tuple(
        bucket if bucket.place is None else PlacedMessage(bucket, 0, 0, bucket.nbytes, *bucket.place).executed
        for bucket in buckets
    )
    through = [bucket for bucket in buckets if bucket.place and len(bucket.copies) > 1]
    assert len(through) > 1
    staged, moved = (ExecutedTables([(bound, [Executed(bound, buckets=each)])]) for each in (buckets, runs))
    assert moved.problems == []
    assert moved.digests == staged.digests
