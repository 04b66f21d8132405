"""The order in which copy engines read several GPUs: readers keep out of each other's way, or kernels copy alone."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from helpers.plans import Case

from mcore_reshard.kernels.transports.direct.turns import _bytes_until_done, engine_orders
from mcore_reshard.planner.plan.loads import pulled_bytes
from mcore_reshard.planner.plan.make_schedule import schedule_of

Pulls = dict[int, dict[int, int]]


def least_bytes(pulls: Pulls) -> int:
    """Of the busiest GPU or reader."""
    of_gpu = sum((Counter(of_reader) for of_reader in pulls.values()), Counter[int]())
    return max(*of_gpu.values(), *(sum(of_reader.values()) for of_reader in pulls.values()))


def done_step_by_step(pulls: Pulls, orders: dict[int, list[int]], step: float) -> float:
    """When all is read, if readers of a GPU share it; in small steps of time."""
    left = {reader: [[gpu, float(pulls[reader][gpu])] for gpu in order] for reader, order in orders.items()}
    now = 0.0
    while any(left.values()):
        at = Counter(todo[0][0] for todo in left.values() if todo)
        for todo in left.values():
            if todo:
                todo[0][1] -= step / at[todo[0][0]]
                if todo[0][1] <= 0:
                    todo.pop(0)
        now += step
    return now


def random_pulls(rng: random.Random) -> tuple[Pulls, list[int]]:
    readers, gpus = rng.randrange(1, 7), list(range(rng.randrange(1, 7)))
    most = rng.choice([1.01, 1.2, 3.0])
    pulls = {
        reader: {gpu: int(1000 * rng.uniform(1.0, most)) for gpu in gpus if rng.random() < 0.7} or {0: 1000}
        for reader in rng.sample(range(20), readers)
    }
    return pulls, gpus


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 32])
def test_readers_of_all_gpus_never_meet(count: int) -> None:
    pulls = {reader: dict.fromkeys(range(count), 1000) for reader in range(count)}
    orders = engine_orders(pulls, range(count))
    assert all(sorted(order) == [*range(count)] for order in orders.values())
    for turn in range(count):
        assert len({order[turn] for order in orders.values()}) == count


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_readers_of_all_gpus_but_their_own_never_meet(count: int) -> None:
    pulls = {reader: {gpu: 1000 for gpu in range(count) if gpu != reader} for reader in range(count)}
    orders = engine_orders(pulls, range(count))
    for turn in range(count - 1):
        assert len({order[turn] for order in orders.values()}) == count


def test_readers_of_the_same_half_begin_apart() -> None:
    """Numbered by rank alone, readers 0 and 2 would begin at the same GPU, and so would 1 and 3."""
    pulls = {reader: dict.fromkeys((0, 1) if reader % 2 == 0 else (2, 3), 1000) for reader in range(4)}
    orders = engine_orders(pulls, range(4))
    assert {orders[0][0], orders[2][0]} == {0, 1} and {orders[1][0], orders[3][0]} == {2, 3}


def test_several_readers_of_one_gpu_share_it_as_they_must() -> None:
    assert engine_orders({0: {0: 1000}, 1: {0: 1000}, 2: {0: 500}}, [0]) == {0: [0], 1: [0], 2: [0]}


def test_where_engines_would_meet_kernels_copy_alone() -> None:
    two_of_three = {0: {0: 1000, 1: 1000}, 1: {1: 1000, 2: 1000}, 2: {2: 1000, 0: 1000}, 3: {0: 700, 1: 700, 2: 700}}
    assert engine_orders(two_of_three, range(3)) == {}
    assert engine_orders({reader: dict.fromkeys(range(65), 1000) for reader in range(65)}, range(65)) == {}, "too many"
    assert engine_orders({}, []) == {} and engine_orders({0: {}}, [0]) in ({}, {0: []})


@pytest.mark.parametrize("seed", range(60))
def test_an_order_has_all_that_is_read_and_takes_little_more_than_the_least_time(seed: int) -> None:
    pulls, gpus = random_pulls(random.Random(seed))
    orders = engine_orders(pulls, gpus)
    assert orders in ({}, {reader: orders.get(reader) for reader in pulls})
    if orders:
        assert all(sorted(orders[reader]) == sorted(of_reader) for reader, of_reader in pulls.items())
        step = 0.5
        assert done_step_by_step(pulls, orders, step) <= 1.04 * least_bytes(pulls) + 40 * step
    shuffled = {reader: dict(reversed([*pulls[reader].items()])) for reader in reversed([*pulls])}
    assert engine_orders(shuffled, gpus) == orders, "every rank finds the same"


@pytest.mark.parametrize("seed", range(20))
def test_readers_that_meet_share(seed: int) -> None:
    rng = random.Random(seed)
    pulls, _ = random_pulls(rng)
    orders = {reader: rng.sample([*of_reader], len(of_reader)) for reader, of_reader in pulls.items()}
    exactly = _bytes_until_done(pulls, orders)
    assert done_step_by_step(pulls, orders, 0.5) == pytest.approx(exactly, abs=30)
    assert exactly >= least_bytes(pulls) - 1


def test_two_that_go_the_same_way_take_twice_as_long() -> None:
    pulls = {reader: {0: 1000, 1: 1000} for reader in range(2)}
    assert _bytes_until_done(pulls, {0: [0, 1], 1: [0, 1]}) == 4000
    assert _bytes_until_done(pulls, {0: [0, 1], 1: [1, 0]}) == 2000


MESHES = [
    ("qwen3-30b-a3b", "ep=2,dp=2", "tp=2", True),
    ("qwen3-30b-a3b", "ep=4,dp=4", "tp=4", True),
    ("qwen3-30b-a3b", "ep=4,dp=4", "tp=4,ep=4", True),
    ("qwen3-30b-a3b", "tp=2,ep=2,dp=2", "tp=4", True),
    ("qwen3-4b", "tp=4", "tp=2,dp=2", True),
    ("qwen3-4b", "tp=2", "tp=4", True),
    ("qwen3-4b", "tp=2,pp=2", "tp=4", True),
    ("qwen3-4b", "dp=3", "tp=4", False),
]


@pytest.mark.parametrize(("model", "train", "gen", "helps"), MESHES)
def test_meshes_that_engines_help(model: str, train: str, gen: str, helps: bool) -> None:
    pulled = pulled_bytes(Case(model, train, gen).plan())
    pulls = {
        reader: {gpu: given for gpu, given in enumerate(pulled[:, reader].tolist()) if given}
        for reader in range(pulled.shape[1])
    }
    assert bool(engine_orders(pulls, range(len(pulled)))) == helps


@pytest.mark.parametrize(
    "case",
    [
        Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=2"),
        Case("tiny-llama", "tp=2,pp=2,dp=2", "tp=4"),
        Case("tiny-qwen3", "tp=1", "tp=2,dp=2"),
    ],
    ids=str,
)
def test_bytes_of_pairs_are_those_of_schedules(case: Case) -> None:
    plan = case.plan()
    expected = np.zeros((plan.train.world, plan.gen.world), np.int64)
    for rank in range(plan.gen.world):
        for table in schedule_of(plan, "gen", rank).tables:
            np.add.at(expected[:, rank], table.peer, table.nbytes)
    assert (pulled_bytes(plan) == expected).all()
