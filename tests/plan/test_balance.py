"""The round robin shares every load: the worked example of balance.py, computed."""

from __future__ import annotations

from math import gcd

import numpy as np
import pytest

from mcore_reshard.planner.plan.balance import RoundRobin, first_replicas, stride_of

MEMBERS = np.arange(4)
PARTS = np.zeros(1, np.int64)  # one overlap, of part 0


def test_the_worked_example() -> None:
    turns = RoundRobin.of(PARTS, replicas=4, pulls=2)
    assert turns.strides.tolist() == [3]
    assert turns.replica(0, MEMBERS, 0, 0).tolist() == [0, 3, 2, 1]
    assert turns.replica(0, MEMBERS, 0, 1).tolist() == [1, 0, 3, 2]
    assert ((MEMBERS * 2) % 4).tolist() == [0, 2, 0, 2]  # with a stride of 2


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("pulls", [1, 2, 3, 4, 5, 8])
def test_every_pull_visits_every_replica_and_no_replica_serves_two_more_than_another(replicas: int, pulls: int) -> None:
    turns = RoundRobin.of(PARTS, replicas, pulls)
    assert gcd(int(turns.strides[0]), replicas) == 1
    for pull in range(pulls):
        assert sorted(turns.replica(0, np.arange(replicas), 0, pull).tolist()) == list(range(replicas))
    served = turns.replica(0, 0, 0, np.arange(pulls))
    assert np.ptp(np.bincount(served, minlength=replicas)) <= 1


def test_overlaps_of_one_part_follow_each_other_and_parts_do_not_mix() -> None:
    turns = RoundRobin.of(np.array([3, 7, 3]), replicas=8, pulls=2)
    assert turns.first_pull.tolist() == [0, 0, 2]
    assert turns.strides.tolist() == [5, 3, 5]


@pytest.mark.parametrize("members", [1, 3, 4, 9])
def test_bytes_are_those_of_every_single_pull(members: int) -> None:
    parts, nbytes = np.array([0, 0, 1]), np.array([10, 20, 40])
    turns = RoundRobin.of(parts, replicas=4, pulls=3)
    expected = np.zeros((2, 4), np.int64)
    for member in range(members):
        for overlap in range(3):
            for pull in range(3):
                expected[parts[overlap], turns.replica(0, member, overlap, pull)] += nbytes[overlap]
    assert turns.nbytes(members, nbytes, 2).tolist() == expected.tolist()


def test_strides_share_no_factor_with_the_replicas() -> None:
    assert stride_of(np.array([2, 3]), 4).tolist() == [3, 3]
    assert stride_of(np.array([2, 4, 6]), 6).tolist() == [5, 5, 7]


def test_a_remainder_goes_to_the_least_loaded_replica() -> None:
    ranks = np.array([[0, 1, 2]], np.int32)
    uneven = np.array([[5, 0, 0]])
    assert sorted(first_replicas([(ranks, uneven, 1)] * 3, 3)) == [0, 1, 2]


def test_even_loads_go_on_where_the_one_before_stopped() -> None:
    ranks = np.array([[0, 1], [2, 3]], np.int32)
    even = np.array([[8, 8], [8, 8]])
    assert first_replicas([(ranks, even, 1), (ranks, even, 1)], 4) == [0, 1]
