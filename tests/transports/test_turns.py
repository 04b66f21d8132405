"""The order in which copy engines read several GPUs: readers keep out of each other's way, or kernels copy alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from helpers.plans import Case

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.rendezvous.exchange import parse_stored, stored_text
from mcore_reshard.kernels.transports.direct import turns as turns_module
from mcore_reshard.kernels.transports.direct.turns import _bytes_until_done, engine_orders, engine_turns
from mcore_reshard.planner.plan.loads import pair_bytes
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


MEETING = {0: {0: 1000, 1: 1000}, 1: {1: 1000, 2: 1000}, 2: {2: 1000, 0: 1000}, 3: {0: 700, 1: 700, 2: 700}}


def test_where_engines_would_meet_kernels_copy_alone() -> None:
    assert engine_orders(MEETING, range(3)) == {}
    assert engine_orders({reader: dict.fromkeys(range(65), 1000) for reader in range(65)}, range(65)) == {}, "too many"
    assert engine_orders({}, []) == engine_orders({0: {}}, [0]) == engine_orders({0: {0: 0}}, [0]) == {}


def test_readers_without_a_gpu_in_common_have_orders_of_their_own() -> None:
    apart = {7: {5: 9000}, 8: {3: 10, 4: 10}, 9: {4: 10, 3: 10}, 10: {}}
    assert engine_orders({**MEETING, **apart}, range(6)) == engine_orders(apart, range(6))
    assert engine_orders(apart, range(6)).keys() == {7, 8, 9}
    many = {reader: dict.fromkeys((2 * (reader // 2), 2 * (reader // 2) + 1), 1000) for reader in range(200)}
    assert engine_orders(many, range(200)).keys() == many.keys(), "each two are a small set"


def test_who_reads_one_gpu_needs_no_order() -> None:
    """Its engine shares that GPU with the others' kernels."""
    assert engine_orders({**MEETING, 4: {0: 10}}, range(3)) == {4: [0]}


@pytest.mark.parametrize("seed", range(60))
def test_an_order_has_all_that_is_read_and_takes_little_more_than_the_least_time(seed: int) -> None:
    pulls, gpus = random_pulls(random.Random(seed))
    orders = engine_orders(pulls, gpus)
    assert all(sorted(order) == sorted(pulls[reader]) for reader, order in orders.items())
    assert all(reader in orders for reader, of_reader in pulls.items() if len(of_reader) == 1)
    if orders.keys() == pulls.keys() and max(map(len, orders.values())) > 1:
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
    pulled = pair_bytes(Case(model, train, gen).plan())
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
        Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=2", dtypes=("bf16", "fp8"), block=(8, 16)),
        Case("tiny-qwen3", "pp=2", "tp=2", dtypes=("fp32", "bf16")),
    ],
    ids=str,
)
def test_bytes_of_pairs_are_those_of_schedules(case: Case) -> None:
    plan = case.plan()
    expected = np.zeros((plan.train.world, plan.gen.world), np.int64)
    for rank in range(plan.gen.world):
        for table in schedule_of(plan, "gen", rank).tables:
            np.add.at(expected[:, rank], table.peer, table.nbytes)
    assert (pair_bytes(plan) == expected).all()


class Words:
    """What ranks publish. A fetch from one that has published nothing is refused."""

    def __init__(self, words: dict[str, str], rank: int) -> None:
        self._words, self._rank = words, rank

    def publish(self, value: Any, *, prefix: str) -> None:
        self._words[f"{prefix}{self._rank}"] = stored_text(value)

    def fetch_from(self, world: str, rank: int, parse: Callable[[Any], Any], prefix: str, what: str) -> Any:
        if (key := f"{prefix}{rank}") not in self._words:
            raise NotYetError
        return parse_stored(key, self._words[key].encode(), parse)


class NotYetError(Exception):
    """The word comes later."""


def turns_of_all(
    case: Case, gpus: dict[int, set[str]], own: dict[int, str], helps: Collection[int]
) -> list[dict[int, int]]:
    """What each reader decides; ranks publish in any order, and ask again for what was not there yet."""
    plan = case.plan()
    schedules = [schedule_of(plan, "gen", rank) for rank in range(plan.gen.world)]
    words: dict[str, str] = {}
    for rank in range(plan.train.world):
        peers = schedule_of(plan, "train", rank).peers
        words[f"readers/{rank}"] = stored_text(sorted(peers))
    found: dict[int, dict[int, int]] = {}
    for _ in range(2):
        for rank, schedule in enumerate(schedules):
            of_reader = {peer: gpus[peer] for peer in schedule.peers}
            with suppress(NotYetError):
                signals: Any = Words(words, rank)
                found[rank] = engine_turns(schedule, of_reader, own[rank], signals, helps=rank in helps)
    return [found[rank] for rank in range(plan.gen.world)]


def test_readers_tell_each_other_and_take_turns() -> None:
    case = Case("tiny-qwen3", "tp=4", "tp=2,dp=2")
    gpus, own = {rank: {f"t{rank}"} for rank in range(4)}, {rank: f"g{rank}" for rank in range(4)}
    turns = turns_of_all(case, gpus, own, range(4))
    assert all(sorted(of_reader.values()) == [*range(len(of_reader))] for of_reader in turns)
    for turn in range(2):
        at = [rank for of_reader in turns for rank, when in of_reader.items() if when == turn]
        assert len({*at}) == len(at) == 4


def test_no_engine_reads_the_own_gpu_or_a_rank_on_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "_STILL_FASTER", 9.0)
    case = Case("tiny-qwen3", "dp=4", "tp=4")
    gpus: dict[int, set[str]] = {0: {"a"}, 1: {"b"}, 2: {"c", "d"}, 3: {"e"}}
    turns = turns_of_all(case, gpus, {0: "a", 1: "b", 2: "x", 3: "e"}, {0, 1, 2})
    assert [sorted(of_reader) for of_reader in turns] == [[1, 3], [0, 3], [0, 1, 3], []]


@pytest.mark.parametrize("word", [[True], [-1], [4], ["0"], [0.5], 3, {"a": 1}])
def test_what_is_no_list_of_readers_is_refused(word: Any) -> None:
    schedule = schedule_of(Case("tiny-qwen3", "tp=2", "tp=4").plan(), "gen", 0)
    signals: Any = Words({"readers/0": stored_text(word)}, 0)
    with pytest.raises(SessionError, match="malformed"):
        engine_turns(schedule, {0: {"a"}, 1: {"c"}}, "b", signals, helps=True)


@pytest.mark.parametrize("word", [[[0, "a", True]], [[0, "a", -1]], [[9, "a", 1]], [[0, "a"]], 3])
def test_what_is_no_list_of_pulls_is_refused(word: Any) -> None:
    schedule = schedule_of(Case("tiny-qwen3", "tp=2", "tp=4").plan(), "gen", 0)
    words = {"readers/0": "[0, 1]", "readers/1": "[0, 1]", "pulls/1": stored_text(word)}
    signals: Any = Words(words, 0)
    with pytest.raises(SessionError, match="malformed"):
        engine_turns(schedule, {0: {"a"}, 1: {"c"}}, "b", signals, helps=True)


def test_who_reads_one_gpu_asks_nobody() -> None:
    schedule = schedule_of(Case("tiny-qwen3", "tp=2", "tp=4").plan(), "gen", 0)
    words: dict[str, str] = {}
    signals: Any = Words(words, 0)
    assert engine_turns(schedule, {0: {"a"}, 1: {"a"}}, "b", signals, helps=True) == {0: 0, 1: 0}
    assert words.keys() == {"pulls/0"}, "others are told"
