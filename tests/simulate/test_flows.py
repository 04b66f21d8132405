"""Max-min fair rates, worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_reshard.simulate.flows import fair_rates


def rates(flows: list[tuple[int, int]], bandwidth: list[float]) -> list[float]:
    first, second = np.array(flows, np.int64).reshape(-1, 2).T
    return [round(float(rate), 9) for rate in fair_rates(first, second, np.array(bandwidth))]


def test_one_flow_has_its_slower_link_to_itself() -> None:
    assert rates([(0, 1)], [8.0, 5.0]) == [5.0]


def test_two_flows_share_a_link_evenly() -> None:
    assert rates([(0, 1), (0, 2)], [8.0, 8.0, 8.0]) == [4.0, 4.0]


def test_a_flow_takes_what_another_one_cannot_use() -> None:
    """Flow 0 is held to 1 by link 1; link 0 has 7 left for flow 1, of which link 2 takes 6."""
    assert rates([(0, 1), (0, 2)], [8.0, 1.0, 6.0]) == [1.0, 6.0]


def test_links_freeze_from_the_tightest_on() -> None:
    """Link 1 serves three flows with 2 each; what flow 0 leaves of link 0 goes to flow 3; flow 4 has what is left of 4."""
    flows = [(0, 1), (2, 1), (3, 1), (0, 4), (2, 4)]
    assert rates(flows, [10.0, 6.0, 10.0, 10.0, 9.0]) == [2.0, 2.0, 2.0, 4.5, 4.5]


def test_a_link_without_a_limit_limits_nothing() -> None:
    assert rates([(0, 1), (0, 1)], [3.0, np.inf]) == [1.5, 1.5]


@pytest.mark.parametrize("tolerance", [1e-9, 1e-3])
@pytest.mark.parametrize("seed", range(5))
def test_no_link_is_overloaded_and_every_flow_has_a_full_link(seed: int, tolerance: float) -> None:
    """The two together are what max-min fair means, if the flow also has the largest rate on that link."""
    rng = np.random.default_rng(seed)
    first, second = rng.integers(0, 20, 300), rng.integers(20, 40, 300)
    bandwidth = rng.uniform(1, 10, 40)
    found = fair_rates(first, second, bandwidth, tolerance)
    load = np.bincount(first, found, 40) + np.bincount(second, found, 40)
    assert (load <= bandwidth * (1 + 1e-9)).all()
    if tolerance < 1e-6:
        full = load >= bandwidth * (1 - 1e-6)
        fastest = np.zeros(40)
        for ends in (first, second):
            np.maximum.at(fastest, ends, found)
        limited = [full[ends] & (found >= fastest[ends] * (1 - 1e-6)) for ends in (first, second)]
        assert (limited[0] | limited[1]).all()
