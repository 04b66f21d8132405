"""When torch's counts of writes are taken: around a read, or within one that checksums are taken around."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from helpers.handmade import schedule_of

from mcore_reshard.kernels.copies.bind import BoundSchedule, bind
from mcore_reshard.kernels.errors import TornWeightsError
from mcore_reshard.planner.plan.schedule import LocalTensor
from mcore_reshard.session import write_watch
from mcore_reshard.session.write_watch import WriteWatch

COUNT_S = 0.004  # of the clock below: between two looks at it


class Clock:
    """Every look at it takes COUNT_S, so that counting between two looks does."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += COUNT_S
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with mock.patch.object(write_watch, "time", clock):
        yield clock


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.zeros(4)


@pytest.fixture
def bound(weight: torch.Tensor) -> BoundSchedule:
    every = [LocalTensor("weight", (4,), "float32")]
    return bind(schedule_of([], "train", 0, (1, 1), extra=every), {"weight": weight})


def test_without_checksums_writes_count_from_before_the_read(bound: BoundSchedule, weight: torch.Tensor) -> None:
    watch = WriteWatch(bound, [weight], is_summed=False, fastest_s=0.16)
    weight.add_(1)
    watch.begin()
    assert watch.due_in_s() == float("inf")
    with pytest.raises(TornWeightsError, match="weight"):
        watch.end()


def test_with_checksums_writes_count_once_the_read_has_begun(bound: BoundSchedule, weight: torch.Tensor) -> None:
    watch = WriteWatch(bound, [weight], is_summed=True, fastest_s=0.16)
    weight.add_(1)  # the checksums find this one
    watch.begin()
    watch.end()
    weight.add_(1)
    with pytest.raises(TornWeightsError, match="weight"):
        watch.end()


@pytest.mark.parametrize("fastest_s", [0.0, 100 * COUNT_S], ids=["the first read", "counting is quick"])
def test_the_second_count_follows_the_read(
    bound: BoundSchedule, weight: torch.Tensor, clock: Clock, fastest_s: float
) -> None:
    watch = WriteWatch(bound, [weight], is_summed=True, fastest_s=fastest_s)
    watch.begin()
    assert watch.due_in_s() == float("inf")
    watch.look()
    weight.add_(1)
    with pytest.raises(TornWeightsError, match="weight"):
        watch.end()


def test_where_counting_costs_over_a_hundredth_the_second_count_ends_before_the_read(
    bound: BoundSchedule, weight: torch.Tensor, clock: Clock
) -> None:
    watch = WriteWatch(bound, [weight], is_summed=True, fastest_s=0.16)
    watch.begin()
    due_s = watch.due_in_s()
    assert 0.12 < due_s < 0.155
    watch.look()  # not yet
    clock.now += due_s
    watch.look()
    weight.add_(1)  # the checksums find this one
    assert watch.due_in_s() == float("inf")
    watch.end()


def test_what_the_early_count_finds_is_raised_at_the_end(
    bound: BoundSchedule, weight: torch.Tensor, clock: Clock
) -> None:
    watch = WriteWatch(bound, [weight], is_summed=True, fastest_s=0.16)
    watch.begin()
    weight.add_(1)
    clock.now += watch.due_in_s()
    watch.look()
    with pytest.raises(TornWeightsError, match="weight"):
        watch.end()


def test_a_read_that_drags_on_is_counted_again(bound: BoundSchedule, weight: torch.Tensor, clock: Clock) -> None:
    watch = WriteWatch(bound, [weight], is_summed=True, fastest_s=0.16)
    watch.begin()
    clock.now += watch.due_in_s()
    watch.look()
    weight.add_(1)
    clock.now += 0.1
    with pytest.raises(TornWeightsError, match="weight"):
        watch.end()
