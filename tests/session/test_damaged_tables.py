"""A rank whose rows or tables are damaged: all ranks refuse to connect, and no byte of the engine has changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from helpers.handmade import allocate, raw_bytes
from helpers.plans import Case
from helpers.ranks import run_ranks

from mcore_reshard.kernels.copies.buckets import Bucket
from mcore_reshard.kernels.errors import RefitError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.transports import gloo
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.schedule import Schedule
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint

CASE = Case("tiny-qwen3", "tp=2", "tp=2")
WORLD = 4


def rows_exchanged(schedule: Schedule) -> None:
    """Two transfers of equal shape, to or from one peer, lie in each other's place; in place, after the proof."""
    (table,) = schedule.tables
    for one in range(len(table)):
        for other in range(one + 1, len(table)):
            if (table.peer[one], table.strided_box[one]) == (table.peer[other], table.strided_box[other]):
                for column in (table.tensor, table.offset):
                    column[[one, other]] = column[[other, one]]
                return
    raise AssertionError("no two rows are alike")


def one_element_later(schedule: Schedule) -> None:
    (table,) = schedule.tables
    sizes = np.array([prod(schedule.tensors[tensor].shape) for tensor in table.tensor.tolist()])
    boxes = [schedule.strided_boxes[box] for box in table.strided_box.tolist()]
    reach = np.array([sum((n - 1) * s for n, s in zip(box.extents, box.strides, strict=True)) for box in boxes])
    table.offset[np.flatnonzero(table.offset + reach + 1 < sizes)[0]] += 1


def table_two_bytes_later(buckets: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
    first = buckets[0]
    copies = first.copies.copy()
    copies[("src" if first.sends else "dst") + "_offset"][0] += 2
    return (replace(first, copies=copies), *buckets[1:])


def connect(number: int, address: str, damaged: int, change: Callable[[Any], Any]) -> tuple[str, bool]:
    """(what prepare raised, whether this rank's tensors are as they were). Training ranks come first."""
    world, rank = ("train", number) if number < 2 else ("gen", number - 2)
    schedule = schedule_of(CASE.plan(), world, rank)  # type: ignore[arg-type]
    tensors = allocate(schedule, seed=number)
    before = {name: raw_bytes(tensor) for name, tensor in tensors.items()}
    if number == damaged:
        if change is table_two_bytes_later:
            cut = gloo.cut_buckets
            gloo.cut_buckets = lambda *args: change(cut(*args))
        else:
            change(schedule)
    endpoint = (TrainEndpoint if world == "train" else GenerationEndpoint)(
        schedule, tensors, store=address, options=Options(timeout_s=20.0)
    )
    try:
        endpoint.prepare()
        endpoint.refit(1)
    except RefitError as error:
        return str(error), {name: raw_bytes(tensor) for name, tensor in tensors.items()} == before
    return "", True


@pytest.mark.parametrize("change", [rows_exchanged, one_element_later, table_two_bytes_later])
@pytest.mark.parametrize("damaged", [1, 2], ids=["train:1", "gen:0"])
def test_all_ranks_refuse_and_nothing_has_moved(damaged: int, change: Callable[[Any], Any]) -> None:
    outcomes = run_ranks(WORLD, connect, damaged, change, timeout_s=60.0)
    assert [outcome.kind for outcome in outcomes] == [None] * WORLD, outcomes
    reasons = [outcome.value[0] for outcome in outcomes]
    name = ["train:0", "train:1", "gen:0", "gen:1"][damaged]
    assert all(name in reason and "weight" in reason for reason in reasons), reasons
    assert all(outcome.value[1] for outcome in outcomes), "bytes have moved"


def test_without_damage_the_same_ranks_refit() -> None:
    outcomes = run_ranks(WORLD, connect, -1, rows_exchanged, timeout_s=60.0)
    assert [outcome.value and outcome.value[0] for outcome in outcomes] == [""] * WORLD, outcomes
