"""Both ends of a pair see every damage to rows and tables before a byte moves, and none where there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from helpers.handmade import allocate, random_transfers
from helpers.handmade import schedule_of as handmade_schedule
from helpers.plans import QUANTIZED, TINY, Case
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import BoundSchedule, bind
from mcore_reshard.kernels.copies.buckets import cut_buckets
from mcore_reshard.kernels.copies.executed import (
    Executed,
    ExecutedTables,
    executed_digests,
    first_difference,
    named_difference,
)
from mcore_reshard.kernels.copies.peer_table import peer_table
from mcore_reshard.kernels.copies.read_back import Entries
from mcore_reshard.kernels.copies.tiling import tiling_problems
from mcore_reshard.kernels.errors import BindError
from mcore_reshard.kernels.transports.direct.staging import parted
from mcore_reshard.planner.layout.geometry import row_major_strides
from mcore_reshard.planner.plan.make_schedule import relays_of, schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import Schedule, StridedBox, TransferTable, World

BUCKET_BYTES = 4096

LLAMA = Case("tiny-llama", "tp=2,pp=2", "tp=4")
MOE = Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=2")
RELAYED = Case("tiny-qwen3", "tp=1", "tp=2,dp=2")
CAST = Case("tiny-llama", "tp=2", "tp=2", dtypes=("bf16", "fp8"), block=(8, 8))

Change = Callable[[Schedule], Schedule]


# --- the ranks of a plan, one of them damaged ---------------------------------------------------------------------


def ranks_of(plan: Plan) -> list[tuple[World, int]]:
    return [("train", rank) for rank in range(plan.train.world)] + [("gen", rank) for rank in range(plan.gen.world)]


def gloo_tables(bound: BoundSchedule, plan: Plan) -> list[Executed]:
    """What gloo and nccl execute, also the second hop of a relay."""
    schedules = [bound.schedule]
    if plan.relay and bound.schedule.world == "gen":
        relay = relays_of(plan, bound.schedule.rank)[0]
        schedules += [relay.sends, relay.receives]
    parts = [bound, *(bound.part(schedule) for schedule in schedules[1:])]
    return [Executed(part, buckets=cut_buckets(part.schedule, BUCKET_BYTES)) for part in parts]


def direct_tables(bound: BoundSchedule, plan: Plan) -> list[Executed]:
    """What the direct transport executes; replicas push what they pass on."""
    plain, cast = parted(bound.schedule)
    buckets = cut_buckets(cast, BUCKET_BYTES)
    if bound.schedule.world == "train":
        return [Executed(bound, buckets=buckets, exposed=plain)]
    assert plain.view is not None
    pulls = peer_table(plain)
    tables = [Executed(bound, buckets=buckets, reaches=pulls)]
    for relay in relays_of(plan, bound.schedule.rank):
        sends, receives = bound.part(relay.sends), bound.part(relay.receives)
        tables += [Executed(sends, reaches=peer_table(sends.schedule)), Executed(receives, exposed=receives.schedule)]
    return tables


Tables = Callable[[BoundSchedule, Plan], Sequence[Executed]]


@cache
def good_digests(case: Case, tables_of: Tables) -> Mapping[str, Mapping[str, str]]:
    digests = {}
    for world, rank in ranks_of(case.plan()):
        schedule = schedule_of(case.plan(), world, rank)
        bound = bind(schedule, allocate(schedule))
        digests[schedule.name] = executed_digests([(bound, tables_of(bound, case.plan()))])
    return digests


def refusal(
    case: Case,
    name: str,
    change: Change = lambda schedule: schedule,
    damaged: Callable[[Executed], Executed] = lambda executed: executed,
    tables_of: Tables = gloo_tables,
) -> str:
    """Why a session refuses one damaged rank: "bind", "itself", or the message about the pair; "" if it does not."""
    world, rank = name.split(":")
    good = schedule_of(case.plan(), world, int(rank))  # type: ignore[arg-type]
    try:
        bound = bind(change(good), allocate(good))
        tables = ExecutedTables([(bound, [damaged(each) for each in tables_of(bound, case.plan())])])
    except BindError:
        return "bind"
    if tables.problems:
        return "itself"
    pair = first_difference({**good_digests(case, tables_of), name: tables.digests})
    if pair is None:
        return ""
    others = []
    for other in pair.split(">"):
        other_world, other_rank = other.replace("relay", "gen").split(":")
        if other.replace("relay", "gen") != name:
            schedule = schedule_of(case.plan(), other_world, int(other_rank))  # type: ignore[arg-type]
            bound = bind(schedule, allocate(schedule))
            whole = ExecutedTables([(bound, tables_of(bound, case.plan()))])
            others += [whole.details(pair)] if pair in whole.digests else []
    return named_difference(pair, [*([tables.details(pair)] if pair in tables.digests else []), *others])


# --- without damage ------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", TINY + QUANTIZED, ids=str)
def test_the_ends_of_every_pair_agree_on_an_undamaged_plan(case: Case) -> None:
    for tables_of in (gloo_tables, direct_tables):
        digests = good_digests(case, tables_of)
        assert first_difference(digests) is None
        assert all(len(digest) == 16 for of_rank in digests.values() for digest in of_rank.values())
    for world, rank in ranks_of(case.plan()):
        schedule = schedule_of(case.plan(), world, rank)
        bound = bind(schedule, allocate(schedule))
        assert ExecutedTables([(bound, gloo_tables(bound, case.plan()))]).problems == []
        assert tiling_problems(schedule) == []


def test_the_size_of_buckets_changes_messages_and_nothing_that_lands() -> None:
    schedule = schedule_of(LLAMA.plan(), "gen", 0)
    bound = bind(schedule, allocate(schedule))
    small, large = (Executed(bound, buckets=cut_buckets(schedule, size)) for size in (64, 1 << 20))
    assert executed_digests([(bound, [small])]) != executed_digests([(bound, [large])])
    assert ExecutedTables([(bound, [small])]).problems == ExecutedTables([(bound, [large])]).problems == []


@pytest.mark.parametrize("seed", range(5))
def test_handmade_schedules_agree_too(seed: int) -> None:
    worlds = (2, 3)
    transfers = random_transfers(np.random.default_rng(seed), worlds)
    digests = {}
    for number in range(sum(worlds)):
        world: World = "train" if number < worlds[0] else "gen"
        schedule = handmade_schedule(transfers, world, number - worlds[0] * (world == "gen"), worlds)
        bound = bind(schedule, allocate(schedule))
        tables = ExecutedTables([(bound, [Executed(bound, buckets=cut_buckets(schedule, 128))])])
        assert tables.problems == []
        digests[schedule.name] = tables.digests
    assert first_difference(digests) is None


# --- damage to rows ------------------------------------------------------------------------------------------------

LOCAL = ("tensor", "strided_box", "offset")  # the columns that say where a transfer lies


def with_table(schedule: Schedule, stage: int, **columns: Any) -> Schedule:
    """The schedule with other columns in the table of one stage."""
    side = "sends" if schedule.world == "train" else "recvs"
    stages = [*schedule.stages]
    stages[stage] = replace(stages[stage], **{side: replace(schedule.tables[stage], **columns)})
    return replace(schedule, stages=tuple(stages))


def columns_of(schedule: Schedule, stage: int = 0) -> dict[str, NDArray[Any]]:
    return {each.name: getattr(schedule.tables[stage], each.name).copy() for each in fields(TransferTable)}


def alike(schedule: Schedule, same_peer: bool = True) -> tuple[int, int]:
    """Two transfers of stage 0 that only differ in where they lie."""
    table = schedule.tables[0]
    extents = [schedule.strided_boxes[box].extents for box in table.strided_box.tolist()]
    for one in range(len(table)):
        for other in range(one + 1, len(table)):
            if extents[one] == extents[other] and table.nbytes[one] == table.nbytes[other]:
                elsewhere = any(getattr(table, column)[one] != getattr(table, column)[other] for column in LOCAL)
                if elsewhere and (table.peer[one] == table.peer[other]) == same_peer:
                    return one, other
    raise AssertionError("no two transfers are alike")


def exchanged(*columns: str, same_peer: bool = True) -> Change:
    def change(schedule: Schedule) -> Schedule:
        rows = columns_of(schedule)
        one, other = alike(schedule, same_peer)
        for column in columns:
            rows[column][[one, other]] = rows[column][[other, one]]
        return with_table(schedule, 0, **rows)

    return change


def matrix_of(schedule: Schedule) -> int:
    """A transfer of stage 0 of two dims of different extents."""
    for row, box in enumerate(schedule.tables[0].strided_box.tolist()):
        extents = schedule.strided_boxes[box].extents
        if len(extents) == 2 and extents[0] != extents[1]:
            return row
    raise AssertionError("no transfer is a matrix")


def with_box(change_box: Callable[[StridedBox], StridedBox], factor: int = 1) -> Change:
    """One matrix of stage 0 with another strided box."""

    def change(schedule: Schedule) -> Schedule:
        row, rows = matrix_of(schedule), columns_of(schedule)
        box = change_box(schedule.strided_boxes[int(rows["strided_box"][row])])
        rows["strided_box"][row] = len(schedule.strided_boxes)
        rows["nbytes"][row] *= factor
        rows["offset"][row] = 0 if factor > 1 else rows["offset"][row]
        return with_table(replace(schedule, strided_boxes=(*schedule.strided_boxes, box)), 0, **rows)

    return change


def read_later(schedule: Schedule) -> Schedule:
    rows = columns_of(schedule)
    rows["offset"][alike(schedule)[0]] += 1
    return with_table(schedule, 0, **rows)


def dropped(schedule: Schedule) -> Schedule:
    keep = np.arange(len(schedule.tables[0])) != 1
    return with_table(schedule, 0, **{name: column[keep] for name, column in columns_of(schedule).items()})


def doubled_row(schedule: Schedule) -> Schedule:
    order = np.r_[0:2, 1 : len(schedule.tables[0])]
    return with_table(schedule, 0, **{name: column[order] for name, column in columns_of(schedule).items()})


def doubled_and_dropped(schedule: Schedule) -> Schedule:
    one, other = alike(schedule)
    rows = columns_of(schedule)
    for column in rows.values():
        column[other] = column[one]
    return with_table(schedule, 0, **rows)


def to_another_peer(schedule: Schedule) -> Schedule:
    rows = columns_of(schedule)
    count = schedule.gen_ranks if schedule.world == "train" else schedule.train_ranks
    rows["peer"][0] = (rows["peer"][0] + 1) % count
    return with_table(schedule, 0, **rows)


def in_another_tensor(schedule: Schedule) -> Schedule:
    rows = columns_of(schedule)
    shapes = [(local.shape, local.dtype) for local in schedule.tensors]
    for row, tensor in enumerate(rows["tensor"].tolist()):
        twins = [index for index, shape in enumerate(shapes) if shape == shapes[tensor] and index != tensor]
        if twins:
            rows["tensor"][row] = twins[0]
            return with_table(schedule, 0, **rows)
    raise AssertionError("all tensors have different shapes")


def tensors_renamed(schedule: Schedule) -> Schedule:
    shapes: dict[Any, int] = {}
    for index, local in enumerate(schedule.tensors):
        if (twin := shapes.setdefault((local.shape, local.dtype), index)) != index:
            tensors = [*schedule.tensors]
            tensors[twin], tensors[index] = tensors[index], tensors[twin]
            return replace(schedule, tensors=tuple(tensors))
    raise AssertionError("all tensors have different shapes")


def renumbered(column: str) -> Change:
    def change(schedule: Schedule) -> Schedule:
        rows = columns_of(schedule)
        values = rows[column]
        other = int(np.argmax(values != values[0]))
        values[0] = values[other]
        return with_table(schedule, 0, **rows)

    return change


def stage_relabeled(schedule: Schedule) -> Schedule:
    return replace(schedule, stages=(replace(schedule.stages[0], pp_stage=7), *schedule.stages[1:]))


def stages_exchanged(schedule: Schedule) -> Schedule:
    return replace(schedule, stages=schedule.stages[::-1])


def padded_as_well(schedule: Schedule) -> Schedule:
    tensor = int(schedule.tables[0].tensor[0])
    box = StridedBox(schedule.tensors[tensor].shape, row_major_strides(schedule.tensors[tensor].shape))
    return replace(schedule, padding=(*schedule.padding, (tensor, 0, box)))


def padding_left_out(schedule: Schedule) -> Schedule:
    assert schedule.padding
    return replace(schedule, padding=schedule.padding[1:])


ROWS: dict[str, Change] = {
    "two rows exchanged": exchanged(*LOCAL),
    "two rows to different peers exchanged": exchanged(*LOCAL, same_peer=False),
    "two rows in another order": exchanged(*(each.name for each in fields(TransferTable))),
    "peers of two rows exchanged": exchanged("peer", same_peer=False),
    "one element later": read_later,
    "stride 0": with_box(lambda box: replace(box, strides=(0, box.strides[1]))),
    "strides exchanged": with_box(lambda box: replace(box, strides=box.strides[::-1])),
    "extents exchanged": with_box(lambda box: replace(box, extents=box.extents[::-1])),
    "box transposed": with_box(lambda box: StridedBox(box.extents[::-1], box.strides[::-1])),
    "bytes doubled": with_box(lambda box: replace(box, extents=(2 * box.extents[0], box.extents[1])), factor=2),
    "a row dropped": dropped,
    "a row doubled": doubled_row,
    "a row in place of another": doubled_and_dropped,
    "to another peer": to_another_peer,
    "another tensor of the same shape": in_another_tensor,
    "tensors renamed": tensors_renamed,
    "another member": renumbered("member"),
    "another transfer group": renumbered("transfer_group"),
    "another stage": stage_relabeled,
}


@pytest.mark.parametrize("tables_of", [gloo_tables, direct_tables])
@pytest.mark.parametrize("case", [LLAMA, MOE, CAST], ids=str)
@pytest.mark.parametrize("name", ["train:0", "gen:1"])
@pytest.mark.parametrize("damage", ROWS)
def test_damaged_rows_are_refused(damage: str, name: str, case: Case, tables_of: Tables) -> None:
    try:
        schedule_of(case.plan(), *name.split(":")[:1], int(name[-1]))  # type: ignore[arg-type]
        refused = refusal(case, name, ROWS[damage], tables_of=tables_of)
    except AssertionError as error:
        pytest.skip(f"not in this plan: {error}")
    assert refused


def test_exchanged_stages_are_refused() -> None:
    assert refusal(LLAMA, "gen:0", stages_exchanged)


@pytest.mark.parametrize("change", [padded_as_well, dropped, doubled_row, read_later, doubled_and_dropped])
def test_an_engine_fills_every_element_once(change: Change) -> None:
    (problem,) = tiling_problems(change(schedule_of(LLAMA.plan(), "gen", 1)))
    assert problem.startswith("not every element is filled exactly once: model.")
    assert refusal(LLAMA, "gen:1", change) in {"itself", "bind"}


def test_padding_that_is_left_out_is_refused() -> None:
    case = Case("tiny-llama", "tp=2", "tp=4", changes=(("vocab_size", 250),))
    rank = next(rank for rank in range(4) if schedule_of(case.plan(), "gen", rank).padding)
    assert refusal(case, f"gen:{rank}", padding_left_out) == "itself"


def test_the_message_names_both_ranks_the_stage_and_the_parameter() -> None:
    assert refusal(LLAMA, "train:0", exchanged(*LOCAL)) == (
        "train:0 and gen:0 would not move the same bytes: their transfers differ, first at stage 0,"
        " model.layers.0.input_layernorm.weight"
    )


def test_names_of_parameters_are_no_format_strings() -> None:
    names = {0: "a.{layer}.{expert}", 1: "a.{layer:>1000000000}.{expert.__class__}"}
    none = np.zeros(0, np.int64)
    entries = Entries(schedule_of(LLAMA.plan(), "gen", 0), names, none, none, none, np.zeros(0, np.uint64))
    assert entries.name((0, 3, 7)) == "a.3.7"
    assert entries.name((1, 3, 7)) == "a.{layer:>1000000000}.{expert.__class__}"
