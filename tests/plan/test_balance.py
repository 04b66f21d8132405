"""The round robin shares every load: the worked example of balance.py, computed."""

from __future__ import annotations

from math import gcd, lcm

import numpy as np
import pytest
from helpers.plans import Case

from mcore_reshard.planner.plan.balance import (
    Row,
    Share,
    Turns,
    Work,
    first_replicas,
    stride_of,
    wave_of,
    waves_for,
)
from mcore_reshard.planner.plan.make_schedule import schedule_of

MEMBERS = np.arange(4)


def turns_of(parts: list[int], replicas: int, pulls: int) -> Turns:
    """The turns of overlaps of these source parts, each pulled so often; turn `o * pulls + p` is pull p of overlap o."""
    distinct = list(dict.fromkeys(parts))
    rows = [Row(part, tuple(range(replicas))) for part in distinct]
    return Turns.of(rows, np.repeat([distinct.index(part) for part in parts], pulls))


def test_the_worked_example() -> None:
    turns = turns_of([0], replicas=4, pulls=2)
    assert set(turns.strides.tolist()) == {3}
    assert turns.replica(0, MEMBERS, 0).tolist() == [0, 3, 2, 1]
    assert turns.replica(0, MEMBERS, 1).tolist() == [1, 0, 3, 2]
    assert ((MEMBERS * 2) % 4).tolist() == [0, 2, 0, 2]  # with a stride of 2


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("pulls", [1, 2, 3, 4, 5, 8])
def test_every_pull_visits_every_replica_and_no_replica_serves_two_more_than_another(replicas: int, pulls: int) -> None:
    turns = turns_of([0], replicas, pulls)
    assert gcd(int(turns.strides[0]), replicas) == 1
    for pull in range(pulls):
        assert sorted(turns.replica(0, np.arange(replicas), pull).tolist()) == list(range(replicas))
    served = turns.replica(0, 0, np.arange(pulls))
    assert np.ptp(np.bincount(served, minlength=replicas)) <= 1


def test_overlaps_of_one_part_follow_each_other_and_parts_do_not_mix() -> None:
    turns = turns_of([3, 7, 3], replicas=8, pulls=2)
    assert turns.number[::2].tolist() == [0, 0, 2]
    assert turns.strides[::2].tolist() == [5, 3, 5]


@pytest.mark.parametrize(("sources", "ends"), [(4, 4), (8, 2), (2, 8), (6, 4), (3, 5)])
def test_every_source_meets_every_end(sources: int, ends: int) -> None:
    """Each overlap has a leg to one replica of either host. In step, four sources and four ends make four pairs of 16."""
    legs = 2 * sources * ends
    row = np.arange(legs) % 2
    landings = Turns.of([Row(0, tuple(range(ends))), Row(0, tuple(range(ends, 2 * ends)))], row)
    everyone = [Row(0, tuple(range(sources)))]
    for turns, pairs in (
        (Turns.of(everyone, np.zeros(legs, np.int64), facing=landings), legs),
        (Turns.of(everyone, np.zeros(legs, np.int64)), lcm(sources, 2 * ends)),
    ):
        met = {*zip(turns.replica(0, 0).tolist(), landings.replica(0, 0).tolist(), strict=True)}
        assert len(met) == pairs
        assert np.ptp(np.bincount(turns.replica(0, 0))) == 0


@pytest.mark.parametrize("waves", [1, 4])
@pytest.mark.parametrize("members", [1, 3, 4, 9])
def test_bytes_are_those_of_every_single_pull(members: int, waves: int) -> None:
    rows = [Row(0, (0, 1, 2, 3)), Row(1, (1, 3))]  # the second part has fewer replicas to take turns
    row, overlap, nbytes = np.array([0, 0, 1, 1, 1]), np.array([0, 1, 1, 2, 3]), np.array([10, 20, 40, 80])
    turns, wave = Turns.of(rows, row), wave_of(members, np.array([0, 0, 1, 2]), waves)
    for first in (0, 3):
        expected = np.zeros((waves, 2, 4), np.int64)
        for member in range(members):
            for turn, of in enumerate(overlap.tolist()):
                expected[wave[member, of], row[turn], turns.replica(first, member, turn)] += nbytes[of]
        moved = turns.nbytes(wave, waves, overlap, nbytes)[:, turns.moved_from(first)]
        found = np.zeros((waves, 2, 4), np.int64)
        found[:, turns.row_of, turns.replicas] = moved
        assert found.tolist() == expected.tolist()


ONE = np.zeros(1, np.int64)  # one overlap


def test_the_example_of_waves() -> None:
    assert wave_of(10, ONE, 4).reshape(-1).tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]


def test_a_single_overlap_is_in_the_middle_and_those_of_one_tensor_are_spread() -> None:
    assert wave_of(1, ONE, 8).tolist() == [[4]]
    assert wave_of(1, np.zeros(10, np.int64), 4).tolist() == [[0, 0, 1, 1, 1, 2, 2, 3, 3, 3]]


def test_the_example_of_lags() -> None:
    found = {lag: wave_of(3, ONE, 8, lag).reshape(-1).tolist() for lag in (0, 4, 7)}
    assert found == {0: [0, 2, 5], 4: [1, 4, 6], 7: [2, 5, 7]}


def test_groups_with_fewer_overlaps_than_waves_fill_all_waves_together() -> None:
    """Experts of 12 layers a stage: without lags all stages would be in the same 12 of 32 waves."""
    plan = Case("qwen3-30b-a3b", "tp=2,pp=4,dp=8,ep=16", "tp=4,dp=24,ep=96", machine="h200-8").plan()
    assert plan.waves == 32
    for world in ("gen", "train"):
        peaks = []
        for rank in range(0, 64, 9):
            moved = np.zeros(plan.waves)
            for table in schedule_of(plan, world, rank).tables:
                np.add.at(moved, table.wave, table.nbytes)
            peaks.append(moved.max() / moved.mean())
        assert np.mean(peaks) < 1.3 and max(peaks) < 1.5  # on engine ranks without lags: 2.2, 2.7


def test_every_two_parts_have_work_in_all_waves() -> None:
    """Ranks hold different parts: a wave of one part's overlaps would leave the others idle."""
    pairs = np.repeat(np.arange(4), 10)
    waves = wave_of(1, pairs, 4)[0]
    assert all((waves[pairs == pair] == waves[pairs == 0]).all() for pair in range(4))


def test_all_waves_are_equally_large() -> None:
    assert np.ptp(np.bincount(wave_of(16_000, ONE, 16)[:, 0])) == 0


def test_more_is_passed_on_in_more_waves() -> None:
    shares = {0: 1, 1: 1, 8: 2, 32: 4, 126: 8, 200: 8, 501: 24, 875: 24}
    assert {share: waves_for(share, 1000, 384, 64, far=False) for share in shares} == shares
    assert {share: waves_for(share, 1000, 384, 64, far=True) for share in shares} == shares | {501: 32, 875: 32}


def test_waves_have_several_landings_for_each_replica() -> None:
    """12 of a rank, or one for each of few replicas; two waves are always better than one."""
    many = {landings: waves_for(800, 1000, landings, 64, far=True) for landings in (0, 24, 47, 48, 96, 191, 192)}
    assert many == {0: 2, 24: 2, 47: 2, 48: 4, 96: 8, 191: 8, 192: 16}
    assert [waves_for(800, 1000, 46, replicas, far=True) for replicas in (1, 2, 3, 6)] == [32, 16, 8, 4]
    assert waves_for(8, 1000, 0, 64, far=True) == 2 and waves_for(1, 1000, 0, 64, far=False) == 1


def test_strides_share_no_factor_with_the_replicas() -> None:
    assert stride_of(np.array([2, 3]), 4).tolist() == [3, 3]
    assert stride_of(np.array([2, 4, 6]), 6).tolist() == [5, 5, 7]


def share_of(rows: list[list[int]], cost: list[int], members: int = 1) -> Share:
    """Of rows of these ranks, with these costs in a single wave."""
    turns = Turns.of([Row(part, tuple(range(len(ranks)))) for part, ranks in enumerate(rows)], np.arange(len(rows)))
    ranks = np.array([rank for row in rows for rank in row], np.int32)
    return Share(Work(turns, np.array([cost])), ranks, 1 + max(ranks.tolist()), members, 0)


def test_a_remainder_goes_to_the_least_loaded_replica() -> None:
    assert sorted(first_replicas([share_of([[0, 1, 2]], [5, 0, 0])] * 3)) == [0, 1, 2]


def test_even_loads_go_on_where_the_one_before_stopped() -> None:
    assert first_replicas([share_of([[0, 1], [2, 3]], [8, 8, 8, 8])] * 2) == [0, 1]


def test_groups_of_one_wave_begin_at_different_replicas() -> None:
    """Two members a wave and four replicas: with one beginning, half of the replicas would idle in every wave."""
    turns = Turns.of([Row(0, (0, 1, 2, 3))], np.array([0]))
    cost = turns.nbytes(np.arange(8)[:, None] // 2, 4, np.array([0]), np.array([10]))
    firsts = first_replicas([Share(Work(turns, cost), np.arange(4, dtype=np.int32), 4, 8, 0)] * 2)
    load = sum(cost[:, turns.moved_from(first)] for first in firsts)
    assert sorted(firsts) == [0, 2] and (load == 10).all()


def test_waves_in_which_a_group_moves_nothing_do_not_count() -> None:
    """Its only wave is the second one, in which rank 0 is busy; in the first one, ranks 1 and 2 are."""
    turns, ranks = Turns.of([Row(0, (0, 1, 2))], np.array([0])), np.arange(3, dtype=np.int32)
    busy = Share(Work(turns, np.array([[0, 90, 90], [90, 0, 0]])), ranks, 3, 1, 0)
    late = Share(Work(turns, np.array([[0, 0, 0], [5, 0, 0]])), ranks, 3, 1, 0)
    assert first_replicas([busy, late]) == [0, 1]


def test_a_row_of_fewer_replicas_takes_turns_among_its_own() -> None:
    turns, cost = share_of([[0, 1, 2], [3, 4]], [5, 0, 0, 7, 0]).work.turns, np.array([5, 0, 0, 7, 0])
    assert cost[turns.moved_from(2)].tolist() == [0, 0, 5, 7, 0]
    assert cost[turns.moved_from(1)].tolist() == [0, 5, 0, 0, 7]
