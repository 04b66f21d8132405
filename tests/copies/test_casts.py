"""Tables of copies that cast, walked by the interpreter; and what binding refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.casting import (
    E4M3,
    expected_bytes,
    rank_schedule,
    stepped,
    train_schedule,
    trainer_tensors,
    transfers_with_casts,
)
from helpers.deliver import deliver
from helpers.gloo import connect
from helpers.handmade import End, HandTransfer, allocate, raw_bytes, schedule_of
from helpers.ranks import run_ranks, values

from mcore_reshard.kernels.copies.bind import bind
from mcore_reshard.kernels.copies.casts import CastForm, band_copies
from mcore_reshard.kernels.errors import BindError
from mcore_reshard.kernels.transports.gloo import GlooExecutor
from mcore_reshard.planner.plan.schedule import Cast, LocalTensor, Schedule


def test_copies_stay_within_a_row_of_blocks() -> None:
    """The example of the module: rows 1 to 4 of a matrix [5, 4] in blocks of 2 x 2."""
    form = CastForm("bfloat16", E4M3, (5, 4), (2, 2))
    copies = band_copies(form, 4, (4, 4), (4, 1), (4, 1))
    assert [(c["src_offset"], c["dst_offset"], c["extents"][2], c["row_bytes"]) for c in copies] == [
        (0, 0, 1, 4),
        (8, 4, 2, 4),
        (24, 12, 1, 4),
    ]


def test_copies_of_stacked_and_scattered_rows() -> None:
    form = CastForm("bfloat16", E4M3, (3, 4), (2, 2))
    stacked = band_copies(form, 0, (2, 3, 2), (12, 4, 1), (6, 2, 1))  # two experts of three rows, half of their columns
    assert [(c["src_offset"] // 8, c["extents"][2]) for c in stacked] == [(0, 2), (2, 1), (3, 2), (5, 1)]
    apart = band_copies(form, 0, (2, 4), (8, 1), (4, 1))  # rows 0 and 2
    assert [(c["src_offset"] // 8, c["dst_offset"], c["extents"][2]) for c in apart] == [(0, 0, 1), (2, 4, 1)]


def test_scales_of_elements() -> None:
    form = CastForm("bfloat16", E4M3, (5, 6), (2, 4))  # 3 x 2 scales a matrix
    scales, columns = form.scale_of(np.array([0, 3, 4, 12, 29, 30, 35]))
    assert scales.tolist() == [0, 0, 1, 2, 5, 6, 7]
    assert columns.tolist() == [0, 3, 0, 0, 1, 0, 1]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("bucket_bytes", "segment_bytes"), [(64, None), (4096, None), (4096, 256), (1 << 20, None)])
@pytest.mark.parametrize("seed", range(4))
def test_what_arrives_is_what_torch_casts(seed: int, bucket_bytes: int, segment_bytes: int | None) -> None:
    worlds = (2, 2)
    transfers = transfers_with_casts(np.random.default_rng(seed), worlds)
    schedules = [train_schedule(transfers, rank, worlds) for rank in range(2)]
    sources = [trainer_tensors(schedule, seed) for schedule in schedules]
    train = [bind(schedule, tensors) for schedule, tensors in zip(schedules, sources, strict=True)]
    for rank in range(worlds[1]):
        gen = schedule_of(transfers, "gen", rank, worlds)
        tensors = allocate(gen)
        deliver(train, bind(gen, tensors), bucket_bytes, segment_bytes)
        assert {name: raw_bytes(tensor) for name, tensor in tensors.items()} == expected_bytes(transfers, gen, sources)


def refit_twice(number: int, address: str, worlds: tuple[int, int], seed: int) -> dict[str, bytes]:
    """The weights change between the refits, and with them the scales; checked as the endpoints check."""
    transfers = transfers_with_casts(np.random.default_rng(seed), worlds)
    train = number < worlds[0]
    schedule = rank_schedule(transfers, number, worlds)
    tensors = trainer_tensors(schedule, seed) if train else allocate(schedule)
    bound = bind(schedule, tensors)
    group = connect(address, number, sum(worlds))
    running = GlooExecutor(group, bound, bucket_bytes=4096)
    for _ in range(2):
        written = bound.check_fresh(tensors)
        reports = running.run()
        bound.check_unwritten(written)
        if train and _ == 0:
            for name, tensor in stepped(tensors).items():
                tensors[name].copy_(tensor)
    assert sum(report.nbytes for report in reports) == bound.nbytes
    group.close()
    return {name: raw_bytes(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize(("worlds", "seed"), [((1, 1), 10), ((2, 2), 11), ((1, 3), 12)])
def test_gloo_casts_what_it_sends(worlds: tuple[int, int], seed: int) -> None:
    arrived = values(run_ranks(sum(worlds), refit_twice, worlds, seed))
    transfers = transfers_with_casts(np.random.default_rng(seed), worlds)
    sources = [stepped(trainer_tensors(train_schedule(transfers, rank, worlds), seed)) for rank in range(worlds[0])]
    for rank in range(worlds[1]):
        assert arrived[worlds[0] + rank] == expected_bytes(
            transfers, schedule_of(transfers, "gen", rank, worlds), sources
        )


def one_weight(origin: tuple[int, int] = (0, 0)) -> Schedule:
    """Half of `square`, and its scales."""
    transfers = [
        HandTransfer(0, "model.square", E4M3, (256, 128), End(0, "square", (384, 256), origin, (0, 1)),
             End(0, "d", (256, 128), (0, 0), (0, 1))),
        HandTransfer(0, "model.square.scales", "float32", (2, 1), End(0, "square.scales", (3, 2), (0, 0), (0, 1)),
             End(0, "s", (2, 1), (0, 0), (0, 1))),
    ]  # fmt: skip
    return train_schedule(transfers, 0, (1, 1))


def problems(schedule: Schedule, tensors: dict[str, torch.Tensor] | None = None) -> tuple[str, ...]:
    with pytest.raises(BindError) as error:
        bind(schedule, trainer_tensors(one_weight(), 0) if tensors is None else tensors)
    return error.value.problems


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"to": "float16"}, "cast of square to float16: no cast from bfloat16 is known (there are float32 to bfloat16, "
                            "bfloat16 to float32, bfloat16 to float8_e4m3fn)"),
        ({"scales": None}, f"cast of square to {E4M3}: scales are for casts to float8_e4m3fn, and needed there"),
        ({"scales": 0}, f"cast of square to {E4M3}: its scales are not among the tensors that are computed"),
        ({"block": (64, 64)}, f"cast of square to {E4M3}: scales square.scales are float32 (3, 2), "
                              "blocks need float32 (6, 4)"),
        ({"block": (128, 0)}, f"cast of square to {E4M3}: shape (384, 256) in blocks of (128, 0): there are no such blocks"),
        ({"tensor": 7}, "a cast of tensor 7, there are 2"),
    ],
)  # fmt: skip
def test_casts_that_cannot_be_done_are_refused(changes: dict[str, Any], problem: str) -> None:
    schedule = one_weight()
    assert problem in problems(replace(schedule, casts=(replace(schedule.casts[0], **changes),)))


def test_two_casts_of_one_tensor_are_refused() -> None:
    schedule = one_weight()
    assert f"cast of square to {E4M3}: two casts" in problems(replace(schedule, casts=schedule.casts * 2))


def test_scales_of_no_cast_are_refused() -> None:
    assert "square.scales: scales of no cast" in problems(replace(one_weight(), casts=()))


def test_only_trainers_cast() -> None:
    schedule = replace(one_weight(), world="gen")
    assert f"cast of square to {E4M3}: only training ranks cast" in problems(schedule)


def test_a_live_tensor_of_another_dtype_is_refused() -> None:
    [unbound, problem] = problems(one_weight(), {"square": torch.zeros(384, 256)})
    assert unbound == "stage 0: 1 of 2 transfers unbound: square"
    assert problem == "square (holds model.square): dtype float32, the plan says bfloat16"


@pytest.mark.parametrize("strides", [(1, 256), (256, 2), (384, 1)])
def test_rows_that_are_not_rows_of_the_matrix_are_refused(strides: tuple[int, int]) -> None:
    schedule = one_weight()
    strided_box = replace(schedule.strided_boxes[0], strides=strides)
    [problem] = problems(replace(schedule, strided_boxes=(strided_box, *schedule.strided_boxes[1:])))
    assert problem.startswith(
        "stage 0: model.square leaves square (384, 256) cast in blocks of (128, 128), but StridedBox("
    )
    assert problem.endswith("is not made of its rows")


def test_rows_that_leave_the_matrix_are_refused() -> None:
    [problem] = problems(one_weight(origin=(0, 192)))
    assert problem.endswith("from column 192 is not made of its rows")


def test_transfers_count_the_bytes_of_the_wire() -> None:
    schedule = one_weight()
    [stage] = schedule.stages
    sends = replace(stage.sends, nbytes=stage.sends.nbytes * 2)
    [problem] = problems(replace(schedule, stages=(replace(stage, sends=sends),)))
    assert "2 of 2 transfers of other bytes than their extents, first model.square" in problem


def test_a_cast_of_what_is_not_sent_computes_nothing() -> None:
    schedule = one_weight()
    extra = (LocalTensor("other", (8,), "bfloat16"),)
    schedule = replace(schedule, tensors=schedule.tensors + extra, casts=(*schedule.casts, Cast(2, "float32")))
    bound = bind(schedule, trainer_tensors(schedule, 0))
    assert list(bound.casts) == [0]
    assert bound.tensors[1].shape == (3, 2)
