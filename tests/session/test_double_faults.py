"""Two things break at once: nothing hangs, no engine holds a mixture that it does not report, and the others go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.plans import TWO_LAYERS, Case
from helpers.ranks import StoreProcess
from helpers.remote import Answer, Ranks, Remote, tell
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.buckets import Bucket
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.polling import NOTICE_S
from mcore_reshard.kernels.transports.gloo import GlooExecutor
from mcore_reshard.session.refitter import Refitter

FOUR = Case("tiny-llama", "tp=2", "tp=1,dp=4", changes=TWO_LAYERS)
PAIR = Case("tiny-llama", "tp=1", "tp=1")
OPTIONS = Options(timeout_s=4.0)
RECOVERY_S = 30.0


def start(ranks: Ranks, patch: Callable[[], None] | None = None) -> tuple[list[Remote], list[Remote]]:
    trainer = ranks.train(FOUR, patch=patch)
    engines = [ranks.gen(FOUR, rank) for rank in range(4)]
    assert [answer.error for answer in tell(trainer + engines, "prepare")] == [None] * 6
    assert [answer.error for answer in refit(trainer, engines, 1)] == [None] * 6
    return trainer, engines


def refit(trainer: list[Remote], engines: list[Remote], version: int) -> list[Answer]:
    for engine in engines:
        engine.tell("refit")
    return tell(trainer, "refit", version=version) + [engine.answer() for engine in engines]


def recover(trainer: list[Remote], engines: list[Remote], version: int, replicas: set[int]) -> None:
    """Refit until these replicas have all taken part; every byte of them is checked."""
    deadline = time.monotonic() + RECOVERY_S
    while True:
        answers = refit(trainer, engines, version)
        assert_states_are_true(answers[len(trainer) :])
        if all(answer.error is None and {*answer.replicas} == replicas for answer in answers):
            assert {answer.held for answer in answers[len(trainer) :]} == {version}
            return
        assert time.monotonic() < deadline, answers
        version += 1


def assert_states_are_true(answers: list[Answer]) -> None:
    """What engines say that they hold is what they hold, byte for byte, or a mixture."""
    for answer in answers:
        assert answer.state.startswith("mixed") or answer.state.endswith(f"({answer.held})"), answer


def kill_in_refit(trainer: list[Remote], engines: list[Remote], victims: list[Remote], version: int) -> list[Answer]:
    """A refit that begins, and in which these die. The answers of the others."""
    for rank in [*trainer, *engines]:
        if rank is not victims[0]:  # all wait for its call
            rank.tell("refit", **({"version": version} if rank in trainer else {}))
    time.sleep(0.5)
    for victim in victims:
        victim.kill()
    return [rank.answer() for rank in trainer + engines if rank not in victims]


def fail_second_refit() -> None:
    """Before the first byte leaves this rank."""
    move = Refitter._move_bulk

    def fail(*_: object) -> None:
        time.sleep(0.5)
        raise OSError("on fire")

    def move_once(*args: Any) -> Any:
        moved = move(*args)
        GlooExecutor.run = fail  # type: ignore[method-assign, assignment]
        return moved

    Refitter._move_bulk = move_once  # type: ignore[method-assign]


def test_a_refit_that_fails_before_its_first_byte_leaves_no_mixture_where_replicas_pass_on(ranks: Ranks) -> None:
    trainer, engines = start(ranks, fail_second_refit)
    told = refit(trainer, engines, 2)
    assert all("on fire" in str(answer.error) for answer in told), told
    assert [(answer.state, answer.held) for answer in told[2:]] == [("intact(1)", 1)] * 4


def fail_after_sending() -> None:
    """In the second refit, once this rank's bytes are on their way."""
    run, runs = GlooExecutor.run, [0]

    def send_and_fail(self: GlooExecutor) -> Any:
        runs[0] += 1
        moved = run(self)
        if runs[0] > 1:
            raise OSError("on fire")
        return moved

    GlooExecutor.run = send_and_fail  # type: ignore[method-assign]


def write_late() -> None:
    """In the second refit, the first bucket waits until this rank has given up, and is written then."""
    unpack, runs = GlooExecutor._unpack, set[int]()

    def late(self: GlooExecutor, bucket: Bucket, message: NDArray[np.uint8]) -> None:
        if self._runs == 2 and not runs:
            runs.add(2)
            time.sleep(3 * NOTICE_S)
        unpack(self, bucket, message)

    GlooExecutor._unpack = late  # type: ignore[method-assign]


def test_bytes_that_land_after_a_rank_has_given_up_are_a_mixture(ranks: Ranks) -> None:
    """The state is told once nothing is under way; where something still is, nobody knows, and it is a mixture."""
    (trainer,), engine = ranks.train(PAIR, patch=fail_after_sending), ranks.gen(PAIR, 0, patch=write_late)
    assert [answer.error for answer in tell([trainer, engine], "prepare")] == [None] * 2
    assert [answer.error for answer in refit([trainer], [engine], 1)] == [None] * 2
    told = refit([trainer], [engine], 2)
    assert all("on fire" in str(answer.error) for answer in told), told
    assert told[1].state == "mixed(1, 2, 1.00)"


def test_two_replicas_are_killed_at_once(ranks: Ranks) -> None:
    trainer, engines = start(ranks)
    told = kill_in_refit(trainer, engines, engines[2:], 2)
    for answer in told:  # the others went on without them, or were told of one of them
        assert answer.error is None or "gen:2" in answer.error or "gen:3" in answer.error, answer
    assert max(answer.seconds for answer in told) < 2 * OPTIONS.timeout_s
    assert_states_are_true(told[2:])
    recover(trainer, engines[:2], 3, {0, 1})


def test_a_replica_is_killed_while_the_store_is_frozen(ranks: Ranks, host: StoreProcess) -> None:
    trainer, engines = start(ranks)
    host.freeze()
    engines[3].kill()
    time.sleep(1.0)
    host.thaw()
    told = refit(trainer, engines[:3], 2)
    assert all(answer.error is None or "gen:3" in answer.error for answer in told), told
    recover(trainer, engines[:3], 3, {0, 1, 2})


@pytest.mark.slow
def test_a_replica_is_killed_while_the_store_starts_anew(ranks: Ranks, host: StoreProcess) -> None:
    trainer, engines = start(ranks)
    engines[3].kill()
    host.restart()
    assert_states_are_true(refit(trainer, engines[:3], 2)[2:])
    recover(trainer, engines[:3], 3, {0, 1, 2})


def test_the_trainer_is_killed_while_a_replica_comes(ranks: Ranks) -> None:
    """The new one gets the version of the others, and the next trainer finds them all."""
    trainer, engines = start(ranks)
    newcomer = ranks.gen(FOUR, 4).tell("prepare")
    for rank in trainer:
        rank.kill()
    joined = newcomer.answer()
    assert joined.error is None and (joined.held, joined.state) == (1, "complete(1)"), joined
    newer = ranks.train(FOUR)
    for rank in newer:
        rank.tell("prepare")
    for engine in [*engines, newcomer]:
        engine.tell("refit_on")
    assert [rank.answer().error for rank in newer] == [None, None]
    answers = tell(newer, "refit", version=2) + [engine.answer() for engine in [*engines, newcomer]]
    assert [answer.error for answer in answers] == [None] * 7
    recover(newer, [*engines, newcomer], 3, {0, 1, 2, 3, 4})
