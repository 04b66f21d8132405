"""The order of gloo's buckets: one for all ranks, in which nothing waits in a circle and pairs end together."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from helpers.plans import TINY, Case

from mcore_reshard.kernels.copies.buckets import Bucket, cut_buckets
from mcore_reshard.kernels.transports.rounds import in_moments, moment_of
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.schedule import Schedule, World

BUCKET_BYTES = 1 << 10
Message = tuple[int, int, int, int]  # training rank, generation rank, stage, number
CASES = [case for case in TINY if case.plan().train.world > 1][:8]


def message_of(schedule: Schedule, bucket: Bucket) -> Message:
    ends = (schedule.rank, bucket.peer) if bucket.sends else (bucket.peer, schedule.rank)
    return *ends, bucket.stage, bucket.number


def orders(case: Case) -> dict[tuple[World, int], list[Message]]:
    """The messages of every rank in its order."""
    plan = case.plan()
    worlds: tuple[tuple[World, int], ...] = (("train", plan.train.world), ("gen", plan.gen.world))
    schedules = [schedule_of(plan, world, rank) for world, ranks in worlds for rank in range(ranks)]
    return {
        (each.world, each.rank): [
            message_of(each, bucket) for bucket in in_moments(each, cut_buckets(each, BUCKET_BYTES))
        ]
        for each in schedules
    }


def left_over(order: dict[tuple[World, int], list[Message]]) -> int:
    """How many messages never move, if each rank does one at a time and insists on its order."""
    waiting = {rank: messages[::-1] for rank, messages in order.items()}
    moved = True
    while moved:
        moved = False
        for rank, messages in waiting.items():
            while rank[0] == "train" and messages and waiting["gen", messages[-1][1]][-1:] == messages[-1:]:
                waiting["gen", messages.pop()[1]].pop()
                moved = True
    return sum(map(len, waiting.values()))


def test_the_example() -> None:
    assert np.round(moment_of(np.arange(4), 4, 1), 2).tolist() == [0.1, 0.35, 0.6, 0.85]
    assert np.round(moment_of(np.arange(2), 2, 2), 2).tolist() == [0.41, 0.91]


def test_arrays_have_the_same_moments_as_numbers() -> None:
    """The executor computes them one by one, the simulator all at once: they must agree in the last bit."""
    number, count, turn = np.random.default_rng(0).integers(0, 2000, (3, 10_000))
    count += 1
    one_by_one = [moment_of(*each) for each in zip(number.tolist(), count.tolist(), turn.tolist(), strict=True)]
    assert moment_of(number, count, turn).tolist() == one_by_one


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_that_do_one_message_at_a_time_finish(case: Case) -> None:
    order = orders(case)
    assert left_over(order) == 0
    assert sum(map(len, order.values())) > 20
    assert all(len(set(messages)) == len(messages) for messages in order.values())


def test_ranks_with_orders_of_their_own_would_not() -> None:
    order = orders(CASES[0])
    reader = max((rank for rank in order if rank[0] == "gen"), key=lambda rank: len(order[rank]))
    order[reader] = order[reader][::-1]
    assert left_over(order) > 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_halfway_every_pair_has_moved_half(case: Case) -> None:
    for messages in orders(case).values():
        counts = Counter(message[:3] for message in messages)
        before = Counter(message[:3] for message in messages[: len(messages) // 2])
        for pair, count in counts.items():
            assert abs(before[pair] - count / 2) <= 1 + 0.1 * count, (pair, before[pair], count)
