"""Scripts of a few messages, worked by hand: when each begins and ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from mcore_reshard.simulate.events import NOTHING, DeadlockError, Outcome, run_script
from mcore_reshard.simulate.script import Buckets, Script


@dataclass(frozen=True)
class Message:
    """From a round of its sender to a round of its receiver; rank r has link r out and link 10 + r in, of 1 byte/s."""

    src: int
    src_round: int
    dst: int
    dst_round: int
    nbytes: int


def run(messages: list[Message], windows: dict[int, int] | None = None, after: dict[int, tuple[int, ...]] | None = None,
        step_s: float = 0.0, behind: dict[int, int] | None = None) -> Outcome:  # fmt: skip
    """Each rank has one run; its rounds are numbered from 0. `after`: the ranks that must be through before one begins.

    `behind`: the message that is before one on its connection.
    """
    ranks = sorted({rank for each in messages for rank in (each.src, each.dst)})
    of_rank = {
        rank: 1
        + max(number for m in messages for end, number in ((m.src, m.src_round), (m.dst, m.dst_round)) if end == rank)
        for rank in ranks
    }
    first = dict(zip(ranks, np.cumsum([0, *of_rank.values()]).tolist(), strict=False))
    column = {name: np.array([getattr(m, name) for m in messages], np.int64) for name in Message.__dataclass_fields__}
    none = np.zeros(len(messages), np.int64)
    script = Script(
        Buckets(column["src"], column["dst"], none, none, none, column["nbytes"]),
        np.array([first[m.src] + m.src_round for m in messages]),
        np.array([first[m.dst] + m.dst_round for m in messages]),
        np.repeat(ranks, list(of_rank.values())),
        np.array([*first.values(), sum(of_rank.values())]),
        np.array([(windows or {}).get(rank, 1) for rank in ranks]),
        tuple(tuple(ranks.index(other) for other in (after or {}).get(rank, ())) for rank in ranks),
        np.array([(behind or {}).get(number, NOTHING) for number in range(len(messages))]),
        1,
    )
    return run_script(script, column["src"], 10 + column["dst"], np.ones(20), step_s=step_s)


def times(outcome: Outcome) -> list[tuple[float, float]]:
    spans = zip(outcome.start_s.tolist(), outcome.end_s.tolist(), strict=True)
    return [(round(start, 6), round(end, 6)) for start, end in spans]


def test_one_message_takes_its_bytes_by_the_bandwidth() -> None:
    assert times(run([Message(0, 0, 1, 0, 6)])) == [(0, 6)]


def test_messages_of_one_connection_pass_one_after_another() -> None:
    messages = [Message(0, 0, 1, 0, 4), Message(0, 1, 1, 1, 4), Message(0, 2, 2, 0, 4)]
    assert times(run(messages, {0: 3, 1: 3})) == [(0, 12), (0, 12), (0, 12)]
    assert times(run(messages, {0: 3, 1: 3}, behind={1: 0})) == [(0, 8), (8, 12), (0, 8)]


def test_two_messages_of_a_round_share_the_link_of_their_sender() -> None:
    """Both at 1/2 until the small one ends at 4; then the large one has 2 bytes left, at 1."""
    assert times(run([Message(0, 0, 1, 0, 2), Message(0, 0, 2, 0, 4)])) == [(0, 4), (0, 6)]


def test_a_round_begins_when_the_one_before_it_is_over_at_both_ends() -> None:
    """Rank 1 receives from 0, then from 2; rank 2 sends to 3 first. Its second round waits for the later: rank 2 at 5."""
    chain = [Message(0, 0, 1, 0, 3), Message(2, 0, 3, 0, 5), Message(2, 1, 1, 1, 4)]
    outcome = run(chain)
    assert times(outcome) == [(0, 3), (0, 5), (5, 9)]
    assert outcome.cause.tolist()[:3] == [
        NOTHING,
        NOTHING,
        0,
    ]  # rank 0, then rank 1: its second round waited for message 0


def test_what_has_moved_is_known_at_every_moment() -> None:
    """Two messages share rank 2's link: 4 and 2 bytes, half a byte a second each until the small one is over, then one."""
    outcome = run([Message(0, 0, 2, 0, 4), Message(1, 0, 2, 0, 2)])
    assert outcome.moments_s.tolist() == pytest.approx([0, 4, 6])
    assert outcome.moved[:, 0].tolist() == pytest.approx([0, 4, 6])


def test_messages_that_follow_within_a_step_move_no_more_than_the_link_carries() -> None:
    """Ten messages of one second, one after another on one link, in steps of 0.3 s."""
    outcome = run([Message(0, number, 1, number, 1) for number in range(10)], step_s=0.3)
    assert outcome.moved[-1, 0] == pytest.approx(10) and outcome.moments_s[-1] == pytest.approx(10)
    assert outcome.moved[:, 0] == pytest.approx(outcome.moments_s, abs=1e-9)


def test_a_window_of_two_has_two_messages_under_way() -> None:
    """A receiver with three messages in a window of 2: the third begins when the first is over, beside the second."""
    messages = [Message(0, 0, 3, 0, 2), Message(1, 0, 3, 1, 6), Message(2, 0, 3, 2, 2)]
    assert times(run(messages, windows={3: 2})) == [(0, 4), (0, 10), (4, 8)]


def test_a_run_begins_when_those_before_it_are_over() -> None:
    """Rank 2 passes on to 3 what must have landed first: all that rank 1 receives."""
    messages = [Message(0, 0, 1, 0, 3), Message(2, 0, 3, 0, 2)]
    assert times(run(messages, after={2: (1,)})) == [(0, 3), (3, 5)]


def test_rounds_that_wait_for_each_other_are_an_error_and_no_hang() -> None:
    """Ranks 0 and 1 send to 2 and 3, which take the two messages in opposite order."""
    crossed = [Message(0, 0, 2, 1, 1), Message(0, 1, 3, 0, 1), Message(1, 0, 3, 1, 1), Message(1, 1, 2, 0, 1)]
    with pytest.raises(DeadlockError, match="8 rounds wait for each other: rank 0, round 0"):
        run(crossed)


@pytest.mark.parametrize(("steps", "error"), [(2_000, 0.05), (20_000, 0.01)])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_steps_change_the_time_of_a_large_script_little(seed: int, steps: int, error: float) -> None:
    """Random messages, each a round of its own: 600 rounds a rank, each as long as 3 or 30 steps."""
    rng = np.random.default_rng(seed)
    count = np.zeros(8, int)
    messages = []
    for _ in range(2400):
        src, dst = int(rng.integers(4)), int(rng.integers(4, 8))
        messages.append(Message(src, int(count[src]), dst, int(count[dst]), int(rng.integers(1, 100))))
        count[[src, dst]] += 1
    windows = dict.fromkeys(range(8), 3)
    exact = run(messages, windows)
    bound = exact.end_s.max()
    assert run(messages, windows, step_s=bound / steps).end_s.max() == pytest.approx(bound, rel=error)
