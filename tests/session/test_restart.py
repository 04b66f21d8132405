"""Trainers that start again meet engines that kept running: at another version, on another mesh, of another release."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.plans import Case
from helpers.ranks import store_process
from helpers.remote import Answer, Ranks, Remote, tell
from helpers.traces import CHECKPOINT

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.store import connect_store
from mcore_reshard.planner.plan.plan_file import dump_plan
from mcore_reshard.session import attempts, attendance, leader, member, newcomers
from mcore_reshard.session.plan_exchange import publish_plan
from mcore_reshard.session.trace_exchange import collect_traces

GEN = "tp=1,dp=2"
TP2 = Case("tiny-llama", "tp=2", GEN)
OPTIONS = Options(timeout_s=12.0)


def fine(answers: list[Answer]) -> None:
    assert [answer.error for answer in answers] == [None] * len(answers)


def assert_told(answers: list[Answer], said: str) -> None:
    """All ranks have failed, with this in their errors."""
    assert [answer.error for answer in answers if said not in str(answer.error)] == []


def start(ranks: Ranks, case: Case = TP2, version: int = 5) -> tuple[list[Remote], list[Remote]]:
    """A trainer and its engines, which hold `version`."""
    trainer = ranks.train(case)
    engines = [ranks.gen(case, rank) for rank in range(case.plan().gen.world)]
    fine(tell(trainer + engines, "prepare"))
    refit(trainer, engines, version, head_start_s=1.0 if ranks.options.max_lag else 0.0)
    return trainer, engines


def refit(
    trainer: list[Remote], engines: list[Remote], version: int, head_start_s: float = 0.0, **arguments: bool
) -> None:
    """A refit that all ranks commit, with every byte of it. With `max_lag` nobody waits for an engine that is late."""
    for engine in engines:
        engine.tell("refit")
    time.sleep(head_start_s)
    answers = tell(trainer, "refit", version=version, **arguments)
    of_engines = [engine.answer() for engine in engines]
    fine(answers + of_engines)
    assert {answer.version for answer in answers + of_engines} == {version}
    assert [(answer.held, answer.state) for answer in of_engines] == [(version, f"complete({version})")] * len(engines)


def refit_with(newcomer: Remote, trainer: list[Remote], engines: list[Remote], version: int) -> None:
    """A refit in which a new replica takes part: nobody waits for one that has not, so it calls first."""
    newcomer.tell("refit")
    assert not newcomer.has_answered(within_s=1.0)
    for engine in engines:
        engine.tell("refit")
    answers = tell(trainer, "refit", version=version) + [engine.answer() for engine in [*engines, newcomer]]
    fine(answers)
    assert {answer.held for answer in answers[len(trainer) :]} == {version}


def restart(
    ranks: Ranks, trainer: list[Remote], case: Case, *, killed: bool = True, patch: Callable[[], None] | None = None
) -> list[Remote]:
    """Another trainer in the place of this one, connecting."""
    if not killed:
        fine(tell(trainer, "close"))
    for rank in trainer:
        rank.kill()
    newer = ranks.train(case, patch=patch)
    for rank in newer:
        rank.tell("prepare")
    return newer


def restarted(ranks: Ranks, trainer: list[Remote], engines: list[Remote], case: Case) -> list[Remote]:
    """As `restart`, until all ranks have connected: engines do in their next refit, which then waits."""
    newer = restart(ranks, trainer, case)
    for engine in engines:
        engine.tell("refit_on")
    fine([rank.answer() for rank in newer])
    return newer


MESHES = {
    "stages in place of slices": "tp=1,pp=2",
    "one rank in place of two": "tp=1",
    "four ranks in place of two": "tp=2,pp=2",
    "the same mesh": "tp=2",
}


@pytest.mark.parametrize(
    "train", [*[*MESHES.values()][:2], *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in [*MESHES.values()][2:])]
)
def test_a_trainer_restarts_at_a_higher_version(ranks: Ranks, train: str) -> None:
    trainer, engines = start(ranks)
    newer = restarted(ranks, trainer, engines, Case("tiny-llama", train, GEN))
    taken = tell(newer, "refit", version=9) + [engine.answer() for engine in engines]
    fine(taken)
    assert [(answer.held, answer.state) for answer in taken[-2:]] == [(9, "complete(9)")] * 2
    refit(newer, engines, 10)


def slow_catch_up() -> None:
    def late(*args: object) -> object:
        time.sleep(4.0)
        return catch_up(*args)  # type: ignore[arg-type]

    catch_up, member.catch_up = newcomers.catch_up, late  # type: ignore[attr-defined, assignment]


def test_a_replica_that_got_its_weights_while_a_trainer_restarted_takes_its_plan_in_its_next_refit(
    ranks: Ranks,
) -> None:
    trainer, engines = start(ranks)
    newcomer = ranks.gen(TP2, 2, patch=slow_catch_up).tell("prepare")
    time.sleep(1.0)
    newer = restarted(ranks, trainer, engines, Case("tiny-llama", "tp=1,pp=2", GEN))
    refit(newer, engines, 6)
    fine([newcomer.answer()])
    refit_with(newcomer, newer, engines, 7)


def test_a_lower_version_needs_rollback(ranks: Ranks) -> None:
    """The trainer is one that closed, and came back from an older checkpoint on another mesh."""
    trainer, engines = start(ranks)
    newer = restart(ranks, trainer, Case("tiny-llama", "tp=1,pp=2", GEN), killed=False)
    for engine in engines:
        engine.tell("refit")
    fine([rank.answer() for rank in newer])
    for rank in newer:
        rank.tell("refit", version=3)
    refused = [rank.answer() for rank in newer + engines]
    said = "version 3 does not follow 5: pass a larger one, or rollback=True on the trainer"
    for answer in refused:
        assert answer.error is not None and answer.error.startswith("VersionError: ") and said in answer.error
    assert [(answer.held, answer.state) for answer in refused[2:]] == [(5, "complete(5)")] * 2, "weights have not moved"
    refit(newer, engines, 3, rollback=True)
    refit(newer, engines, 4)


def test_the_version_that_engines_have_comes_again_only_with_rollback(ranks: Ranks) -> None:
    trainer, engines = start(ranks)
    for rank in trainer + engines:
        rank.tell("refit", **({"version": 5} if rank in trainer else {}))
    for answer in [rank.answer() for rank in trainer + engines]:
        assert answer.error is not None and "version 5 does not follow 5" in answer.error
    refit(trainer, engines, 5, rollback=True)
    refit(trainer, engines, 6)


def test_an_engine_cannot_roll_back_the_trainer(ranks: Ranks) -> None:
    trainer, engines = start(ranks)
    engines[0].tell("refit", rollback=True)
    engines[1].tell("refit")
    answers = tell(trainer, "refit", version=4) + [engine.answer() for engine in engines]
    assert all("version 4 does not follow 5" in str(answer.error) for answer in answers), answers
    assert [answer.held for answer in answers[2:]] == [5, 5]


def test_a_trainer_for_other_engines_is_refused_on_both_sides(ranks: Ranks) -> None:
    trainer, engines = start(ranks)
    newer = restart(ranks, trainer, Case("tiny-llama", "tp=1", "tp=2"))
    for engine in engines:
        engine.tell("refit_on")
    answers = [rank.answer() for rank in newer + engines]
    said = "this engine has tp=1, and the new plan tp=2"
    assert_told(answers, said)
    assert [(answer.held, answer.state) for answer in answers[1:]] == [(5, "complete(5)")] * 2
    for rank in newer:
        rank.kill()
    again = restarted(ranks, [], engines, TP2)
    fine(tell(again, "refit", version=6) + [engine.answer() for engine in engines])


def test_another_job_of_the_same_name_cannot_publish_its_plan(ranks: Ranks) -> None:
    trainer, engines = start(ranks)
    with pytest.raises(
        SessionError, match=r"has a trainer: train:0 is process \d+ on .*; give every job a session name"
    ):
        publish_plan(Case("tiny-llama", "tp=1", "tp=2").plan(), ranks.address, OPTIONS)
    newcomer = ranks.gen(TP2, 2)
    assert newcomer.tell("prepare").answer().state == "complete(5)"
    refit_with(newcomer, trainer, engines, 6)


def test_a_newcomer_that_read_another_plan_takes_the_trainers_or_is_refused_alone(ranks: Ranks) -> None:
    """Somebody has written another plan to the store, past what `publish_plan` refuses."""
    trainer, engines = start(ranks)
    other = Case("tiny-llama", "tp=1", GEN).plan()
    with connect_store(ranks.address, OPTIONS) as store:
        store.set(f"plan/{other.digest}", dump_plan(other))
        store.set("plan/newest", other.digest)
    adopts, refuses = ranks.gen(TP2, 2), ranks.gen(TP2, 3, adopts=False)
    assert "give GenerationEndpoint adopt_plan=" in str(refuses.tell("prepare").answer().error)
    assert adopts.tell("prepare").answer().state == "complete(5)"
    refit_with(adopts, trainer, engines, 6)


def test_engines_that_take_no_other_plan_say_so_on_both_sides(ranks: Ranks) -> None:
    trainer = ranks.train(TP2)
    engines = [ranks.gen(TP2, rank, adopts=False) for rank in range(2)]
    fine(tell(trainer + engines, "prepare"))
    refit(trainer, engines, 5)
    newer = restart(ranks, trainer, Case("tiny-llama", "tp=1,pp=2", GEN))
    for engine in engines:
        engine.tell("refit_on")
    answers = [rank.answer() for rank in newer + engines]
    assert_told(answers, "give GenerationEndpoint adopt_plan=")
    assert [answer.held for answer in answers[2:]] == [5, 5]


def test_an_engine_that_restarts_before_the_first_refit_takes_part_in_it(ranks: Ranks) -> None:
    trainer = ranks.train(TP2)
    engines = [ranks.gen(TP2, rank) for rank in range(2)]
    fine(tell(trainer + engines, "prepare"))
    engines[1].kill()
    engines[1] = ranks.gen(TP2, 1)
    fine(tell(engines[1:], "prepare"))
    refit(trainer, engines, 1)


def test_a_restart_that_is_planned_from_traces_says_on_both_sides_to_connect_engines_again(lagging: Ranks) -> None:
    trainer, engines = start(lagging)
    for rank in trainer:
        rank.kill()
    time.sleep(2.0)  # until all know
    assert_told(tell(engines, "refit"), "has exited or was killed")
    for engine in engines:
        engine.tell("refit")
    with pytest.raises(SessionError, match=r"gen:0, gen:1 are connected since an earlier trainer: connect them again"):
        collect_traces(CHECKPOINT, 2, lagging.address, lagging.options, 3.0)
    answers = [engine.answer() for engine in engines]
    assert_told(answers, "asks how its engines load it: connect them again, in vLLM by connect_refit() on all workers")
    assert [(answer.held, answer.state) for answer in answers] == [(5, "complete(5)")] * 2


# --- releases ----------------------------------------------------------------------------------------------------


class Release:
    """Makes a process speak another version of the protocol, as another release of this package would."""

    def __init__(self, protocol: int) -> None:
        self.protocol = protocol

    def __call__(self) -> None:
        for module in (attempts, leader, member):
            module.PROTOCOL = self.protocol


@pytest.mark.parametrize(("newer", "upgrade"), [("trainer", "engine"), ("engine", "trainer")])
@pytest.mark.parametrize("when", ["at the start", "after a restart"])
def test_releases_that_speak_different_protocols_say_which_side_to_upgrade(
    ranks: Ranks, newer: str, upgrade: str, when: str
) -> None:
    ours = attempts.PROTOCOL
    theirs = Release(ours + 1 if newer == "trainer" else ours - 1)
    said = f"upgrade mcore-reshard of the {upgrade}"
    if when == "at the start":
        trainer = ranks.train(TP2, patch=theirs)
        engines = [ranks.gen(TP2, rank).tell("prepare") for rank in range(2)]
        assert not engines[0].has_answered(within_s=1.0), "they wait for the trainer"
        answers = tell(trainer, "prepare") + [engine.answer() for engine in engines]
        assert [answer.held for answer in answers[2:]] == [None, None], "they hold what they began with"
    else:
        trainer, engines = start(ranks)
        restart(ranks, trainer, TP2, patch=theirs)
        trainer = ranks.all[-2:]
        for engine in engines:
            engine.tell("refit_on")
        answers = [rank.answer() for rank in trainer + engines]
        assert [(answer.held, answer.state) for answer in answers[2:]] == [(5, "complete(5)")] * 2
    assert_told(answers, said)
    assert max(answer.seconds for answer in answers) < OPTIONS.timeout_s


def test_a_replica_of_another_release_is_left_out_and_told_why(ranks: Ranks) -> None:
    trainer, engines = start(ranks)
    other = ranks.gen(TP2, 2, patch=Release(attempts.PROTOCOL - 1))
    answer = other.tell("prepare").answer()
    assert "upgrade mcore-reshard of the engine" in str(answer.error), answer
    refit(trainer, engines, 6)


# --- replicas that lag -------------------------------------------------------------------------------------------


@pytest.fixture
def lagging() -> Iterator[Ranks]:
    with store_process() as store, Ranks(store.address, Options(timeout_s=9.0, max_lag=2)) as ranks:
        yield ranks


def test_a_late_replica_lags_for_max_lag_versions_and_is_never_mixed(lagging: Ranks) -> None:
    trainer, (prompt, late) = start(lagging, version=1)
    for version in (2, 3):  # without the replica that does not call refit
        prompt.tell("refit")
        answers = [*tell(trainer, "refit", version=version), prompt.answer()]
        fine(answers)
        assert {answer.replicas for answer in answers} == {(0,)}
        assert max(answer.seconds for answer in answers) < 3.0, "nobody waits for it"
        seen = late.tell("look").answer()
        assert (seen.held, seen.state) == (1, "complete(1)"), "all of the old version, and none of the new one"
    prompt.tell("refit")  # the third version is beyond max_lag: it waits for the late one
    for rank in trainer:
        rank.tell("refit", version=4)
    assert not prompt.has_answered(within_s=1.5)
    answers = [late.tell("refit").answer(), prompt.answer(), *(rank.answer() for rank in trainer)]
    fine(answers)
    assert {answer.replicas for answer in answers} == {(0, 1)}
    assert [(answer.held, answer.state) for answer in answers[:2]] == [(4, "complete(4)")] * 2
    prompt.tell("refit")
    assert {answer.replicas for answer in [*tell(trainer, "refit", version=5), prompt.answer()]} == {(0,)}, "anew"


def answer_late() -> None:
    """This rank takes 20 ms to say its word."""
    say = attendance.Attendance._say

    def late(self: attendance.Attendance, *args: Any) -> Any:
        time.sleep(0.02)
        return say(self, *args)

    attendance.Attendance._say = late  # type: ignore[method-assign]


def wait_longer() -> None:
    leader._PROMPT_S = 5.0  # a busy machine


def test_a_replica_that_waits_for_the_refit_does_not_lag_because_another_answers_sooner(lagging: Ranks) -> None:
    trainer = lagging.train(TP2, patch=wait_longer)
    engines = [lagging.gen(TP2, 0, patch=answer_late), lagging.gen(TP2, 1)]
    fine(tell(trainer + engines, "prepare"))
    for version in (1, 2, 3):
        for engine in engines:
            engine.tell("refit")
        assert not any(engine.has_answered(within_s=0.5) for engine in engines)
        answers = tell(trainer, "refit", version=version) + [engine.answer() for engine in engines]
        fine(answers)
        assert {answer.replicas for answer in answers} == {(0, 1)}


def test_beyond_max_lag_a_replica_that_stays_away_is_named_at_the_deadline(lagging: Ranks) -> None:
    trainer, (prompt, late) = start(lagging, version=1)
    for version in (2, 3, 4):
        prompt.tell("refit")
        answers = [*tell(trainer, "refit", version=version), prompt.answer()]
        if version < 4:
            fine(answers)
    assert all("gen:1 did not come to refit within 9 s" in str(answer.error) for answer in answers), answers
    assert (answers[-1].held, answers[-1].state) == (3, "complete(3)")
    prompt.tell("refit")
    fine([*tell(trainer, "refit", version=5), prompt.answer()])  # it goes on without the late one
    prompt.tell("refit")
    late.tell("refit")
    for rank in trainer:
        rank.tell("refit", version=6)
    answers = [rank.answer() for rank in (late, prompt, *trainer)]
    if answers[0].error is not None:  # it heard first how the refit ended that it missed, or missed this one too
        assert re.search("gen:1 did not come to refit|train:0 did not begin a refit", answers[0].error)
        late.tell("refit")
        prompt.tell("refit")
        answers = [*tell(trainer, "refit", version=7), late.answer(), prompt.answer()]
    fine(answers)


def test_without_max_lag_all_wait_for_a_late_replica(ranks: Ranks) -> None:
    trainer, (prompt, late) = start(ranks, version=1)
    prompt.tell("refit")
    for rank in trainer:
        rank.tell("refit", version=2)
    assert not prompt.has_answered(within_s=1.5)
    answers = [late.tell("refit").answer(), prompt.answer(), *(rank.answer() for rank in trainer)]
    fine(answers)
    assert [answer.held for answer in answers[:2]] == [2, 2]
