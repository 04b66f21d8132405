"""Binding refuses what does not fit, and the table of copies means what the schedule says."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.deliver import deliver
from helpers.handmade import End, HandTransfer, allocate, expected, random_transfers, raw_bytes, schedule_of, table
from helpers.plans import TINY, Case
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_reshard.kernels.copies.bind import bind
from mcore_reshard.kernels.copies.buckets import cut_buckets
from mcore_reshard.kernels.copies.copy_table import strided_copies
from mcore_reshard.kernels.copies.cpu import run_copies
from mcore_reshard.kernels.errors import BindError, StaleTensorError
from mcore_reshard.planner.layout.geometry import row_major_strides
from mcore_reshard.planner.plan.make_schedule import schedule_of as schedule_of_plan
from mcore_reshard.planner.plan.schedule import (
    LocalTensor,
    MemberNames,
    Schedule,
    StageSchedule,
    StridedBox,
    TransferTable,
)


def two_moves() -> list[HandTransfer]:
    a = End(0, "w", (4, 6), (1, 2), (0, 1))
    b = End(0, "v", (4, 6), (0, 0), (1, 0))
    return [
        HandTransfer(0, "model.a", "float32", (2, 3), a, replace(a, tensor="x")),
        HandTransfer(3, "model.b", "bfloat16", (6, 4), b, replace(b, tensor="y", dims=(0, 1), shape=(6, 4))),
    ]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    bucket_bytes=st.sampled_from([16, 48, 256, 4096]),
    segment_bytes=st.sampled_from([None, 16]),
)
def test_program_moves_every_element_where_the_schedule_says(
    seed: int, bucket_bytes: int, segment_bytes: int | None
) -> None:
    worlds = (2, 2)
    transfers = random_transfers(np.random.default_rng(seed), worlds, parameters=5, largest=4)
    train = [schedule_of(transfers, "train", rank, worlds) for rank in range(worlds[0])]
    sources = [allocate(schedule, seed=1) for schedule in train]
    trainers = [bind(s, t) for s, t in zip(train, sources, strict=True)]
    for rank in range(worlds[1]):
        gen = schedule_of(transfers, "gen", rank, worlds)
        tensors = allocate(gen)
        deliver(trainers, bind(gen, tensors), bucket_bytes, segment_bytes)
        want = expected(transfers, gen, sources)
        assert {name: raw_bytes(t) for name, t in tensors.items()} == {name: raw_bytes(t) for name, t in want.items()}


@settings(max_examples=200, deadline=None)
@given(
    extents=st.lists(st.integers(0, 4), max_size=5),
    itemsize=st.sampled_from([1, 2, 4]),
    src=st.randoms(use_true_random=False),
    dst=st.randoms(use_true_random=False),
)
def test_strided_copies_equal_an_elementwise_copy(
    extents: list[int], itemsize: int, src: random.Random, dst: random.Random
) -> None:
    def storage(rng: random.Random) -> tuple[list[int], int]:
        order = list(range(len(extents)))
        rng.shuffle(order)
        shape = [extents[d] + rng.randint(0, 2) for d in order]
        strides = row_major_strides(tuple(shape))
        return [strides[order.index(d)] for d in range(len(extents))], int(np.prod(shape, initial=1))

    src_strides, src_size = storage(src)
    dst_strides, dst_size = storage(dst)
    source = np.random.default_rng(0).integers(0, 256, src_size * itemsize).astype(np.uint8)
    target = np.full(dst_size * itemsize, 0xEE, np.uint8)
    want = target.reshape(-1, itemsize).copy()
    for at in np.ndindex(*extents):
        a = sum(i * stride for i, stride in zip(at, src_strides, strict=True))
        b = sum(i * stride for i, stride in zip(at, dst_strides, strict=True))
        want[b] = source.reshape(-1, itemsize)[a]

    copies = strided_copies(extents, src_strides, dst_strides, itemsize)
    copies["dst"] = 1
    run_copies(copies, [source, target])
    assert target.tobytes() == want.tobytes()


def fields(copy: np.void, *names: str) -> tuple[Any, ...]:
    return tuple(copy[name].tolist() for name in names)


def test_contiguous_dims_become_one_row() -> None:
    (copy,) = strided_copies((4, 8, 16), (128, 16, 1), (128, 16, 1), 2)
    assert fields(copy, "extents", "row_bytes") == ([1, 1, 1], 4 * 8 * 16 * 2)


def test_rows_stop_where_either_side_stops_being_contiguous() -> None:
    (copy,) = strided_copies((4, 8, 16), (256, 16, 1), (128, 16, 1), 2)
    assert fields(copy, "extents", "src_strides", "dst_strides", "row_bytes") == (
        [1, 1, 4],
        [0, 0, 512],
        [0, 0, 256],
        256,
    )


def test_transposed_storage_moves_single_elements() -> None:
    (copy,) = strided_copies((3, 5), (1, 3), (5, 1), 2)
    assert fields(copy, "extents", "src_strides", "dst_strides", "row_bytes") == ([1, 3, 5], [0, 2, 6], [0, 10, 2], 2)


def test_storage_transposed_alike_on_both_sides_keeps_its_rows() -> None:
    (copy,) = strided_copies((3, 5), (1, 3), (1, 3), 2)
    assert fields(copy, "extents", "row_bytes") == ([1, 1, 1], 30)


def test_a_fourth_outer_dim_is_unrolled() -> None:
    copies = strided_copies((2, 2, 2, 2, 2), (81, 27, 9, 3, 1), (16, 8, 4, 2, 1), 1)
    assert [fields(copy, "src_offset", "dst_offset", "extents", "row_bytes") for copy in copies] == [
        (0, 0, [2, 2, 2], 2),
        (81, 16, [2, 2, 2], 2),
    ]


def test_bind_lists_everything_that_does_not_fit() -> None:
    transfers = [
        *two_moves(),
        HandTransfer(3, "model.c", "float32", (4,), End(0, "u", (4,), (0,), (0,)), End(0, "z", (4,), (0,), (0,))),
    ]
    schedule = schedule_of(transfers, "train", 0, (1, 1), extra=[LocalTensor("idle", (2,), "float32")])
    tensors = allocate(schedule)
    tensors["w"] = tensors["w"].to(torch.float64)
    tensors["v"] = torch.empty(6, 4, dtype=torch.bfloat16).t()
    del tensors["u"], tensors["idle"]
    with pytest.raises(BindError) as caught:
        bind(schedule, tensors)
    assert str(caught.value).splitlines()[0] == "train:0 cannot bind its schedule, 6 problems:"
    assert caught.value.problems == (
        "stage 0: 1 of 1 transfers unbound: w",
        "stage 3: 2 of 2 transfers unbound: v, u",
        "idle: there is no such tensor",
        "w (holds model.a): dtype float64, the plan says float32",
        "v (holds model.b): strides (1, 4), the plan needs the row-major (6, 1)",
        "u (holds model.c): there is no such tensor",
    )


def test_bind_names_a_dtype_that_nothing_moves() -> None:
    end = End(0, "n", (4,), (0,), (0,))
    schedule = schedule_of([HandTransfer(0, "model.n", "float32", (4,), end, end)], "train", 0, (1, 1))
    schedule = replace(schedule, tensors=(LocalTensor("n", (4,), "int64"),))
    with pytest.raises(BindError, match="nothing moves tensors of int64; known dtypes: bfloat16, float16, "):
        bind(schedule, {"n": torch.zeros(4, dtype=torch.int64)})


def test_bind_refuses_tensors_on_two_devices_and_without_storage() -> None:
    schedule = schedule_of(two_moves(), "train", 0, (1, 1))
    tensors = allocate(schedule)
    tensors["v"] = tensors["v"].to("meta")
    with pytest.raises(BindError) as caught:
        bind(schedule, tensors)
    assert "v (holds model.b): it is on the meta device and has no bytes" in caught.value.problems
    assert "tensors on 2 devices: w on cpu, v on meta" in caught.value.problems


def test_bind_refuses_a_schedule_that_leaves_its_tensors() -> None:
    schedule = schedule_of(two_moves(), "train", 0, (1, 1))
    good = schedule.stages[0].sends
    for damage, complaint in (
        ({"offset": good.offset + 8}, "outside their tensor, first model.a in w"),
        ({"nbytes": good.nbytes - 1}, "of other bytes than their extents, first model.a in w"),
        ({"peer": good.peer + 1}, "with a peer that does not exist, first model.a in w"),
    ):
        stages = (StageSchedule(0, replace(good, **damage), table(())), *schedule.stages[1:])
        with pytest.raises(BindError) as caught:
            bind(replace(schedule, stages=stages), allocate(schedule))
        assert caught.value.problems == (f"stage 0: 1 of 1 transfers {complaint}",)


def test_padding_is_zeroed_and_nothing_else() -> None:
    tail = (0, 8, StridedBox((2, 3), (4, 1)))
    schedule = schedule_of([], "gen", 0, (1, 1), extra=[LocalTensor("e", (4, 4), "bfloat16")], padding=(tail,))
    tensors = {"e": torch.ones(5, 4, dtype=torch.bfloat16)[1:]}
    bind(schedule, tensors).zero_padding()
    assert tensors["e"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 1]]


def test_padding_outside_its_tensor_is_refused() -> None:
    tail = (0, 9, StridedBox((2, 4), (4, 1)))
    schedule = schedule_of([], "gen", 0, (1, 1), extra=[LocalTensor("e", (4, 4), "bfloat16")], padding=(tail,))
    with pytest.raises(BindError, match="padding outside its tensor: offset 9"):
        bind(schedule, allocate(schedule))


def test_a_tensor_that_moved_is_stale() -> None:
    schedule = schedule_of(two_moves(), "gen", 0, (1, 1))
    tensors = allocate(schedule)
    bound = bind(schedule, tensors)
    bound.check_fresh(tensors)
    tensors["y"] = tensors["y"].clone()
    with pytest.raises(StaleTensorError, match=r"gen:0: 1 bound tensors changed since prepare\(\):\n  y: address"):
        bound.check_fresh(tensors)


def test_parameters_and_their_subclasses_can_be_bound() -> None:
    schedule = schedule_of(two_moves(), "gen", 0, (1, 1))
    tensors = {name: torch.nn.Parameter(t) for name, t in allocate(schedule).items()}
    source = schedule_of(two_moves(), "train", 0, (1, 1))
    sources = allocate(source, seed=3)
    deliver([bind(source, sources)], bind(schedule, tensors))
    want = expected(two_moves(), schedule, [sources])
    assert {name: raw_bytes(t) for name, t in tensors.items()} == {name: raw_bytes(t) for name, t in want.items()}


def test_fifty_thousand_transfers_bind_within_a_second() -> None:
    strided_boxes = tuple(StridedBox((1 + n % 7, 64), (64 + n, 1)) for n in range(300))
    count = 50_000
    rng = np.random.default_rng(0)
    strided_box = rng.integers(0, len(strided_boxes), count)
    nbytes = np.array([strided_boxes[g].extents[0] * 64 * 2 for g in strided_box])
    rows = list(
        zip(
            rng.integers(0, 64, count).tolist(),
            rng.integers(0, 5000, count).tolist(),
            strided_box.tolist(),
            rng.integers(0, 100, count).tolist(),
            nbytes.tolist(),
            [0] * count,
            [0] * count,
            [0] * count,
            strict=True,
        )
    )
    schedule = Schedule(
        world="gen",
        rank=0,
        digest="",
        train_ranks=64,
        gen_ranks=1,
        tensors=tuple(LocalTensor(f"t{n}", (4096,), "bfloat16") for n in range(5000)),
        strided_boxes=strided_boxes,
        stages=(StageSchedule(0, table(()), table(rows)),),
        padding=(),
        misc=(),
        names={0: MemberNames("p")},
    )
    tensors = allocate(schedule)
    start = time.perf_counter()
    bind(schedule, tensors)
    buckets = cut_buckets(schedule, 1 << 20)
    seconds = time.perf_counter() - start
    assert sum(len(bucket.copies) for bucket in buckets) == count
    assert seconds < 1.0


@pytest.mark.parametrize("case", TINY[::3], ids=str)
def test_schedules_of_real_plans_deliver_what_their_rows_say(case: Case) -> None:
    plan = case.plan()
    train = [schedule_of_plan(plan, "train", rank) for rank in range(plan.train.world)]
    sources = [allocate(schedule, seed=1) for schedule in train]
    trainers = [bind(s, t) for s, t in zip(train, sources, strict=True)]
    for rank in range(plan.gen.world):
        gen = schedule_of_plan(plan, "gen", rank)
        tensors, want = allocate(gen), allocate(gen)
        deliver(trainers, bind(gen, tensors), 4096)
        for peer, schedule in enumerate(train):
            for ours, theirs in zip(gen.stages, schedule.stages, strict=True):
                rows = zip(
                    rows_of(gen, ours.recvs, peer, want),
                    rows_of(schedule, theirs.sends, rank, sources[peer]),
                    strict=True,
                )
                for into, out in rows:
                    into.copy_(out)
        assert {name: raw_bytes(t) for name, t in tensors.items()} == {name: raw_bytes(t) for name, t in want.items()}


def rows_of(
    schedule: Schedule, rows: TransferTable, peer: int, tensors: dict[str, torch.Tensor]
) -> Iterator[torch.Tensor]:
    """The elements of each transfer with `peer`, as views of the rank's tensors in wire order."""
    for row in np.flatnonzero(rows.peer == peer).tolist():
        strided_box = schedule.strided_boxes[int(rows.strided_box[row])]
        tensor = tensors[schedule.tensors[int(rows.tensor[row])].name]
        yield tensor.as_strided(strided_box.extents, strided_box.strides, int(rows.offset[row]))
