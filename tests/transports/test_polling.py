"""Polls are few until a wait is due, then fine; no wait outlives its deadline. With a clock that only naps move."""

from __future__ import annotations

import sys

import pytest

from mcore_reshard.kernels.rendezvous import polling
from mcore_reshard.kernels.rendezvous.polling import COARSE_SHARE, TURN_S, EventPoller, short_turns


class Clock:
    """Each nap takes 50 us more than asked for, as on Linux."""

    def __init__(self) -> None:
        self.now, self.naps = 100.0, 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 1e-6
        self.now += seconds + 50e-6
        self.naps += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(polling, "time", fake)
    return fake


def waits(poller: EventPoller, clock: Clock, seconds: float) -> tuple[int, float]:
    """(naps, delay) of a wait for what happens after `seconds`."""
    due, naps = clock.now + seconds, clock.naps
    assert poller.until(lambda: clock.now >= due)
    return clock.naps - naps, clock.now - due


def test_a_known_wait_is_slept_through_and_then_polled_finely(clock: Clock) -> None:
    poller = EventPoller(60.0)
    waits(poller, clock, 0.040)
    for seconds in (0.040, 0.0405, 0.041):
        naps, delay = waits(poller, clock, seconds)
        assert naps < 50 and delay < 100e-6


def test_an_unknown_wait_is_polled_by_the_time_waited_so_far(clock: Clock) -> None:
    naps, delay = waits(EventPoller(60.0), clock, 2.0)
    assert naps < 12_000 and delay < 0.003
    naps, delay = waits(EventPoller(60.0, share=COARSE_SHARE), clock, 2.0)
    assert naps < 200 and delay < 0.11


def test_a_watched_wait_has_some_looks_before_it_is_due(clock: Clock) -> None:
    poller = EventPoller(60.0, watches=True)
    waits(poller, clock, 0.2)
    naps, _ = waits(poller, clock, 0.2)
    assert 18 < naps < 80


def test_the_deadline_counts_from_the_last_progress(clock: Clock) -> None:
    start = clock.now
    assert not EventPoller(2.0).until(lambda: False, progress=lambda: clock.now > start + 1.0)
    assert 3.0 < clock.now - start < 3.1
    assert not EventPoller(0.5, share=COARSE_SHARE).until(lambda: False)
    assert 3.5 < clock.now - start < 3.7


def test_a_look_may_end_a_wait(clock: Clock) -> None:
    def look(waited_s: float) -> None:
        if waited_s > 1.0:
            raise RuntimeError(f"{waited_s:.1f}")

    with pytest.raises(RuntimeError, match=r"1\.[0-3]"):
        EventPoller(60.0).until(lambda: False, look=look)


def test_a_wait_for_work_that_took_long_to_queue_counts_from_its_beginning(clock: Clock) -> None:
    """154 ms of copies, which took 13 to 26 ms to queue: the rest of the wait is not equally long."""
    poller = EventPoller(60.0)
    for queued_s in (0.013, 0.026, 0.020):
        begin = clock.now
        clock.now += queued_s
        due = begin + 0.154
        assert poller.until(lambda: clock.now >= due, since=begin)  # noqa: B023
        assert clock.now - due < 250e-6


def test_a_slow_first_wait_delays_only_the_next_one(clock: Clock) -> None:
    poller = EventPoller(60.0)
    waits(poller, clock, 0.190)
    assert waits(poller, clock, 0.155)[1] > 0.001
    for seconds in (0.155, 0.190, 0.155, 0.155) * 8:
        assert waits(poller, clock, seconds)[1] < 250e-6


def test_a_look_costs_few_naps_again_once_the_last_eight_waits_are_known(clock: Clock) -> None:
    poller = EventPoller(60.0)
    waits(poller, clock, 0.190)
    naps = [waits(poller, clock, 0.155)[0] for _ in range(10)]
    assert naps[1] > 300 and naps[-1] < 80


def test_a_wait_of_seconds_is_never_slept_through(clock: Clock) -> None:
    poller = EventPoller(60.0)
    waits(poller, clock, 5.0)
    assert waits(poller, clock, 1.0)[1] < 0.26


def test_a_watched_wait_is_late_by_a_twentieth_at_most(clock: Clock) -> None:
    poller = EventPoller(60.0, watches=True)
    waits(poller, clock, 0.190)
    assert waits(poller, clock, 0.155)[1] < 0.05 * 0.190


def test_turns_are_short_while_anybody_wants_them_and_then_as_before() -> None:
    usual = sys.getswitchinterval()
    with pytest.raises(OSError, match="on fire"), short_turns():
        with short_turns():
            assert sys.getswitchinterval() == pytest.approx(TURN_S, rel=0.05)
        assert sys.getswitchinterval() == pytest.approx(TURN_S, rel=0.05)
        raise OSError("on fire")
    assert sys.getswitchinterval() == usual
    sys.setswitchinterval(TURN_S / 2)  # of a program that wants less
    try:
        with short_turns():
            assert sys.getswitchinterval() == pytest.approx(TURN_S / 2, rel=0.05)
    finally:
        sys.setswitchinterval(usual)
