"""Pairs of ranks dealt to two transports in one refit: every byte arrives, reports add up, failures come through."""

from __future__ import annotations

import time
from threading import Event
from typing import Any

import numpy as np
import pytest
from helpers.handmade import allocate, expected, random_transfers, raw_bytes, schedule_of
from helpers.ranks import run_ranks, store_of, values

from mcore_reshard.kernels.copies.bind import bind
from mcore_reshard.kernels.errors import DeadlineError, PeerLostError
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup
from mcore_reshard.kernels.transports.base import StageReport, merge_reports
from mcore_reshard.kernels.transports.gloo import GlooExecutor
from mcore_reshard.kernels.transports.mixed import MixedExecutor

WORLDS = (3, 2)
MOVES = random_transfers(np.random.default_rng(9), WORLDS, parameters=30, stages=3)


def seat(rank: int) -> tuple[Any, int]:
    return ("train", rank) if rank < WORLDS[0] else ("gen", rank - WORLDS[0])


def both_halves(rank: int, address: str, timeout_s: float) -> tuple[MixedExecutor, Any, int]:
    """A rank's two halves: pairs of even sum go by one group, those of odd sum by another."""
    world, number = seat(rank)
    schedule = schedule_of(MOVES, world, number, WORLDS)
    tensors = allocate(schedule, seed=1 if world == "train" else None)
    parts = []
    for turn in range(2):
        store = store_of(address).under(f"part-{turn}")
        group = GlooGroup(store, rank, list(map(str, range(sum(WORLDS)))), timeout_s=timeout_s)
        part = schedule.with_peers({peer for peer in schedule.peers if (peer + number) % 2 == turn})
        parts.append(GlooExecutor(group, bind(part, tensors), bucket_bytes=128))
    return MixedExecutor(parts, None), tensors, bind(schedule, tensors).nbytes


def refit_twice(rank: int, address: str) -> dict[str, bytes]:
    executor, tensors, nbytes = both_halves(rank, address, 20.0)
    for _ in range(2):
        reports = executor.run()
    assert [report.pp_stage for report in reports] == [0, 1, 2]
    assert sum(report.nbytes for report in reports) == nbytes
    assert executor.scratch_bytes > 0
    executor.close()
    executor.close()
    return {name: raw_bytes(tensor) for name, tensor in tensors.items()}


def test_two_transports_together_deliver_every_byte() -> None:
    held = values(run_ranks(sum(WORLDS), refit_twice))
    sources = [allocate(schedule_of(MOVES, "train", rank, WORLDS), seed=1) for rank in range(WORLDS[0])]
    for rank in range(WORLDS[1]):
        want = expected(MOVES, schedule_of(MOVES, "gen", rank, WORLDS), sources)
        assert held[WORLDS[0] + rank] == {name: raw_bytes(tensor) for name, tensor in want.items()}


def without_one(rank: int, address: str) -> None:
    executor, _, _ = both_halves(rank, address, 5.0)
    if rank:
        executor.run()


def test_a_failure_of_any_part_is_the_refits() -> None:
    absent, *others = run_ranks(sum(WORLDS), without_one)
    assert absent.kind is None
    failed = {outcome.kind for outcome in others if outcome.kind}
    assert failed and failed <= {DeadlineError.__name__, PeerLostError.__name__}


class Told:
    """An executor that fails, or waits for another to fail first and then fails of that."""

    name, scratch_bytes = "told", 0

    def __init__(self, failed: Event, error: Exception, *, later: bool) -> None:
        self._failed, self._error, self._later = failed, error, later

    def run(self) -> Any:
        if self._later:
            assert self._failed.wait(5.0)
            time.sleep(0.05)
        self._failed.set()
        raise self._error

    def close(self) -> None:
        pass


@pytest.mark.parametrize("later", [0, 1])
def test_the_first_failure_is_the_refits_also_where_it_makes_the_other_part_fail(later: int) -> None:
    failed, errors = Event(), [OSError("cause"), ValueError("consequence")]
    parts = [Told(failed, error, later=bool(n)) for n, error in enumerate(errors)]
    with pytest.raises(OSError, match="cause"):
        MixedExecutor(parts[::-1] if later else parts, None).run()


def test_reports_of_parts_add_up() -> None:
    one = (StageReport(0, 3, 1, 100, 0.5), StageReport(1, 0, 0, 0, 0.0))
    two = (StageReport(0, 4, 2, 50, 0.25), StageReport(1, 1, 1, 8, 0.125))
    assert merge_reports([one, two]) == (StageReport(0, 7, 3, 150, 0.5), StageReport(1, 1, 1, 8, 0.125))
    with pytest.raises(ValueError, match="zip"):
        merge_reports([one, two[:1]])
