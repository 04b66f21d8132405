"""Every rank knows within 3 s that a process which it needs has died, also while the trainer holds the interpreter's lock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from faults.verdicts import KNOWN_S
from helpers.plans import Case
from helpers.remote import Answer, Ranks, Remote, tell

from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.store import connect_store
from mcore_reshard.session.attempts import REFIT, Call
from mcore_reshard.session.attendance import Attendance
from mcore_reshard.session.watch import observe

ONE_EACH = Case("tiny-llama", "tp=2", "tp=1,dp=2")
TWO_EACH = Case("tiny-llama", "tp=2", "tp=2,dp=2")
OPTIONS = Options(timeout_s=60.0)
HELD_S = 10  # the trainer's step
SLACK_S = 1.0  # of a busy machine


def start(ranks: Ranks, case: Case) -> tuple[list[Remote], list[Remote]]:
    trainer = ranks.train(case)
    engines = [ranks.gen(case, rank) for rank in range(case.plan().gen.world)]
    fine(tell(trainer + engines, "prepare"))
    fine(refit(trainer, engines, 1))
    return trainer, engines


def refit(trainer: list[Remote], engines: list[Remote], version: int) -> list[Answer]:
    for engine in engines:
        engine.tell("refit")
    return tell(trainer, "refit", version=version) + [engine.answer() for engine in engines]


def fine(answers: list[Answer]) -> None:
    assert [answer.error for answer in answers] == [None] * len(answers)


def kill_and_time(victim: Remote, waiting: list[Remote]) -> tuple[list[Answer], list[float]]:
    """What the ranks that wait are told of a death, and after how many seconds."""
    time.sleep(1.0)  # until they wait
    assert not any(rank.has_answered() for rank in waiting)
    victim.kill()
    killed, answers, seconds = time.monotonic(), [], []
    for rank in waiting:
        answers.append(rank.answer(limit_s=KNOWN_S + SLACK_S))
        seconds.append(time.monotonic() - killed)
    return answers, seconds


def assert_told(answers: list[Answer], seat: str) -> None:
    for answer in answers:
        assert answer.error is not None and answer.error.startswith("SessionFailed: "), answer
        assert f"PeerGone: {seat} (process " in answer.error and "has exited or was killed" in answer.error, answer


def test_all_know_of_a_training_rank_that_dies_while_the_leader_holds_the_interpreter(ranks: Ranks) -> None:
    trainer, engines = start(ranks, Case("tiny-llama", "tp=2,pp=2", "tp=1,dp=2"))
    trainer[0].tell("hold_interpreter", seconds=HELD_S)
    for rank in trainer[2:]:
        rank.tell("refit", version=2)
    for engine in engines:
        engine.tell("refit")
    answers, _ = kill_and_time(trainer[1], [*trainer[2:], *engines])
    assert_told(answers, "train:1")
    assert [(answer.held, answer.state) for answer in answers[2:]] == [(1, "complete(1)")] * 2
    assert not trainer[0].has_answered(), "it still holds the lock"


def test_all_know_of_the_leader_that_dies_while_it_holds_the_interpreter(ranks: Ranks) -> None:
    trainer, engines = start(ranks, ONE_EACH)
    trainer[0].tell("hold_interpreter", seconds=HELD_S)
    trainer[1].tell("refit", version=2)
    for engine in engines:
        engine.tell("refit")
    answers, _ = kill_and_time(trainer[0], [trainer[1], *engines])
    assert_told(answers, "train:0")


def test_a_rank_knows_of_its_replicas_other_one_and_the_rest_of_the_engine_goes_on(ranks: Ranks) -> None:
    trainer, engines = start(ranks, TWO_EACH)
    trainer[0].tell("hold_interpreter", seconds=HELD_S)
    for engine in (engines[0], *engines[2:]):
        engine.tell("refit")
    answers, _ = kill_and_time(engines[1], [engines[0]])
    assert_told(answers, "gen:1")
    assert not any(engine.has_answered() for engine in engines[2:]), "another replica is none of their business"
    fine([trainer[0].answer()])
    answers = [*tell(trainer, "refit", version=2), *(engine.answer() for engine in engines[2:])]
    fine(answers)
    assert {answer.replicas for answer in answers} == {(1,)}


def test_a_death_between_refits_is_told_at_once_by_the_next_call_alone(ranks: Ranks) -> None:
    trainer, engines = start(ranks, ONE_EACH)
    trainer[0].tell("hold_interpreter", seconds=HELD_S)
    trainer[1].kill()
    time.sleep(KNOWN_S)
    with connect_store(ranks.address, OPTIONS, watches=True) as watcher:
        statuses = {row["rank"]: row["status"] for row in observe(watcher)["ranks"]}
    assert statuses == {"train:0": "here", "train:1": "gone", "gen:0": "here", "gen:1": "here"}
    answers = tell(engines, "refit")
    assert_told(answers, "train:1")
    assert max(answer.seconds for answer in answers) < SLACK_S
    for engine in engines:
        engine.tell("refit")
    assert not engines[0].has_answered(within_s=1.0), "it has been told, and waits for the next process"


def test_the_session_recovers_from_a_trainer_that_died_while_it_held_the_interpreter(ranks: Ranks) -> None:
    trainer, engines = start(ranks, ONE_EACH)
    trainer[0].tell("hold_interpreter", seconds=HELD_S)
    for engine in engines:
        engine.tell("refit")
    answers, _ = kill_and_time(trainer[1], engines)
    assert_told(answers, "train:1")
    trainer[0].kill()
    newer = ranks.train(ONE_EACH)
    for rank in newer:
        rank.tell("prepare")
    for engine in engines:
        engine.tell("refit_on")
    fine([rank.answer() for rank in newer])
    answers = [*tell(newer, "refit", version=2), *(engine.answer() for engine in engines)]
    fine(answers)
    assert [answer.held for answer in answers[2:]] == [2, 2]


def interrupted_once_called(seat: str) -> Callable[[], None]:
    """A patch: this rank is interrupted in its second refit, as soon as it has read that it is called."""
    read, reads = Attendance._require_own_word, [0]

    def interrupted(self: Attendance, call: Call, said: Mapping[str, Any]) -> Call:
        reads[0] += self.seat == seat and call.kind == REFIT
        if reads[0] == 2:
            reads[0] += 1
            time.sleep(0.5)  # until the others are at work
            raise KeyboardInterrupt
        return read(self, call, said)

    def patch() -> None:
        Attendance._require_own_word = interrupted  # type: ignore[method-assign]

    return patch


@pytest.mark.parametrize("seat", ["train:0", "gen:1"])
def test_all_know_of_an_interrupt_that_comes_just_after_the_call(ranks: Ranks, seat: str) -> None:
    patch = interrupted_once_called(seat)
    trainer, engines = ranks.train(ONE_EACH, patch=patch), [ranks.gen(ONE_EACH, rank, patch=patch) for rank in range(2)]
    fine(tell(trainer + engines, "prepare"))
    fine(refit(trainer, engines, 1))
    victim = trainer[0] if seat == "train:0" else engines[1]
    answers = refit(trainer, engines, 2)
    for rank, answer in zip(trainer + engines, answers, strict=True):
        told = "KeyboardInterrupt: " if rank is victim else f"SessionFailed: {seat}: KeyboardInterrupt: "
        assert answer.error is not None and answer.error.startswith(told), answer
        assert answer.seconds < KNOWN_S, answer
    fine(refit(trainer, engines, 3))


def test_a_goodbye_is_no_death(ranks: Ranks) -> None:
    trainer, engines = start(ranks, TWO_EACH)
    for engine in engines[1:]:
        engine.tell("refit")
    fine(tell([trainer[1], engines[0]], "close"))
    assert not any(engine.has_answered(within_s=KNOWN_S / 3) for engine in engines[1:])
