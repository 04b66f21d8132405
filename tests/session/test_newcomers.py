"""Replicas that come to a session under way: whole ones at once, and a state that says what they hold where it fails."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from threading import RLock

import pytest
from helpers.plans import Case
from helpers.ranks import StoreProcess
from helpers.remote import Answer, Ranks, Remote, tell

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.store import connect_store
from mcore_reshard.session import member, newcomers, replica_copy
from mcore_reshard.session.attempts import World
from mcore_reshard.session.follower import Follower
from mcore_reshard.session.refitter import Refitter
from mcore_reshard.session.state import complete

PAIRS = Case("tiny-llama", "tp=1", "tp=2,dp=2")
OPTIONS = Options(timeout_s=12.0)


def start(ranks: Ranks, patch: Callable[[], None] | None = None) -> tuple[list[Remote], list[Remote]]:
    """A trainer and two replicas of two ranks, which hold version 5."""
    trainer = ranks.train(PAIRS)
    engines = [ranks.gen(PAIRS, rank, patch=patch if rank < 2 else None) for rank in range(4)]
    assert [answer.error for answer in tell(trainer + engines, "prepare")] == [None] * 5
    assert [answer.error for answer in refit(trainer, engines, 5)] == [None] * 5
    return trainer, engines


def refit(trainer: list[Remote], engines: list[Remote], version: int) -> list[Answer]:
    for engine in engines:
        engine.tell("refit")
    return tell(trainer, "refit", version=version) + [engine.answer() for engine in engines]


def at_once() -> None:
    """A trainer that refits all the time: nobody waits to see whether it is still there."""
    Follower.is_stale = lambda *_: False  # type: ignore[method-assign, assignment]


def test_a_replica_that_starts_again_at_once_catches_up_though_its_seats_still_say_here(ranks: Ranks) -> None:
    _, engines = start(ranks)
    for engine in engines[2:]:
        engine.kill()
    newer = [
        ranks.gen(PAIRS, rank, patch=at_once).tell("prepare") for rank in (3, 2)
    ]  # the first one of the replica comes last
    answers = [rank.answer() for rank in newer]
    assert [(answer.error, answer.state, answer.held) for answer in answers] == [(None, "complete(5)", 5)] * 2
    assert max(answer.seconds for answer in answers) < OPTIONS.timeout_s, "it waited for a process that has died"


def refuse() -> None:
    def offer(keys: object, own_name: str, *_: object, **__: object) -> None:
        keys.set("failed", f"{own_name} offers nothing")  # type: ignore[attr-defined]
        raise SessionError("nothing")

    newcomers.offer = offer  # type: ignore[assignment]


def break_after_writes() -> None:
    def fail(*_: object) -> None:
        raise SessionError("this donor breaks")

    replica_copy._Copy._conclude = fail  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("harm", "state"), [(refuse, "intact(None)"), (break_after_writes, "mixed(None, 5, 1.00)")], ids=["before", "after"]
)
def test_a_copy_that_fails_leaves_a_mixture_only_where_it_wrote(
    ranks: Ranks, harm: Callable[[], None], state: str
) -> None:
    trainer, engines = start(ranks, patch=harm)
    for engine in engines[2:]:
        engine.kill()
    newer = [ranks.gen(PAIRS, rank).tell("prepare") for rank in (2, 3)]
    assert [(answer.error, answer.state) for answer in [rank.answer() for rank in newer]] == [(None, state)] * 2
    answers = refit(trainer, [*engines[:2], *newer], 6)
    assert [(answer.error, answer.version) for answer in answers] == [(None, 6)] * 5
    assert {answer.held for answer in answers[1:]} == {6}


def test_a_wish_that_nobody_waits_for_holds_up_no_refit(ranks: Ranks) -> None:
    """As one that stands where a donor has died, and starts again."""
    trainer, engines = start(ranks)
    with connect_store(ranks.address, OPTIONS) as outsider:
        outsider.take_seat("gen:7", {"process": "another", "pid": 1})
        processes = {"gen:7": "one that has died", "gen:0": outsider.seats["gen:0"].facts["process"]}
        for version, (peer, process) in enumerate(processes.items(), 6):
            outsider.set("want/gen:0", json.dumps({"peer": peer, "process": process, "copy": "1"}))
            time.sleep(0.2)
            answers = refit(trainer, engines, version)
            assert [answer.error for answer in answers] == [None] * 5
            assert max(answer.seconds for answer in answers) < 5.0
        assert not outsider.check(["want/gen:0"])
    newer = [ranks.gen(PAIRS, rank, patch=at_once).tell("prepare") for rank in (4, 5)]
    assert [rank.answer().state for rank in newer] == ["complete(7)"] * 2


def freeze_in_copy() -> None:
    def freeze(*_: object) -> None:
        time.sleep(60.0)

    replica_copy._Copy._conclude = freeze  # type: ignore[method-assign]


def test_a_new_replica_that_freezes_in_its_copy_costs_no_refit(ranks: Ranks) -> None:
    trainer, engines = start(ranks)
    for rank in (4, 5):
        ranks.gen(PAIRS, rank, patch=freeze_in_copy).tell("prepare")
    time.sleep(3.5)  # donors wait for it from now on
    answers = refit(trainer, engines, 6)
    assert [(answer.error, answer.replicas) for answer in answers] == [(None, (0, 1))] * 5


def fail_first_refit() -> None:
    move = Refitter._move_bulk

    def fail(*_: object) -> None:
        Refitter._move_bulk = move  # type: ignore[method-assign]
        raise OSError("on fire")

    Refitter._move_bulk = fail  # type: ignore[method-assign, assignment]


def test_a_replica_whose_first_refit_failed_is_waited_for_in_the_next_one(ranks: Ranks) -> None:
    trainer, engines = start(ranks)
    newer = [ranks.gen(PAIRS, rank, patch=fail_first_refit if rank == 4 else None).tell("prepare") for rank in (4, 5)]
    assert [rank.answer().error for rank in newer] == [None] * 2
    for rank in newer:
        rank.tell("refit")
    time.sleep(0.5)  # they wait for the trainer
    answers = refit(trainer, engines, 6) + [rank.answer() for rank in newer]
    assert all("on fire" in str(answer.error) for answer in answers), answers
    for engine in engines:
        engine.tell("refit")
    trainer[0].tell("refit", version=7)
    time.sleep(1.0)
    for rank in newer:
        rank.tell("refit")
    answers = [rank.answer() for rank in trainer + engines + newer]
    assert [(answer.error, answer.replicas) for answer in answers] == [(None, (0, 1, 2))] * 7


def slow_copy() -> None:
    def late(*args: object) -> object:
        time.sleep(6.0)
        return catch_up(*args)  # type: ignore[arg-type]

    catch_up, member.catch_up = newcomers.catch_up, late  # type: ignore[attr-defined, assignment]


def test_nobody_waits_for_a_replica_that_starts_again_and_is_still_catching_up(ranks: Ranks) -> None:
    trainer, engines = start(ranks)
    for engine in engines[2:]:
        engine.kill()
    newer = [ranks.gen(PAIRS, rank, patch=slow_copy).tell("prepare") for rank in (2, 3)]
    time.sleep(4.0)  # they have taken their seats; nobody has refitted since their predecessors died
    answers = refit(trainer, engines[:2], 6)
    assert [(answer.error, answer.replicas) for answer in answers] == [(None, (0,))] * 3
    assert max(answer.seconds for answer in answers) < 3.0
    assert [(answer.error, answer.held) for answer in [rank.answer() for rank in newer]] == [(None, 6)] * 2
    answers = refit(trainer, [*engines[:2], *newer], 7)
    assert [(answer.error, answer.replicas) for answer in answers] == [(None, (0, 1))] * 5


def test_a_store_that_starts_anew_twice_while_the_engine_waits_costs_no_refit(ranks: Ranks, host: StoreProcess) -> None:
    trainer, engines = start(ranks)
    for version, idle in ((6, []), (7, engines[2:])):
        for engine in engines:
            if engine not in idle:
                engine.tell("refit")
        time.sleep(0.5)  # they wait for the trainer
        for pause_s in (0.4, 0.0):
            host.restart()
            time.sleep(pause_s)
        trainer[0].tell("refit", version=version)
        time.sleep(1.0)
        for engine in idle:  # they come to no call of the store before this one
            engine.tell("refit")
        answers = [rank.answer() for rank in trainer + engines]
        assert [(answer.error, answer.replicas) for answer in answers] == [(None, (0, 1))] * 5
        assert {answer.held for answer in answers[1:]} == {version}


def test_a_replica_that_offers_its_weights_is_quiet_while_the_store_starts_anew(
    host: StoreProcess, caplog: pytest.LogCaptureFixture
) -> None:
    joined = connect_store(host.address, OPTIONS)
    joined.take_seat("gen:0", {"process": "a"})
    rank = newcomers.Rank(joined, "gen:0", World(1, 1, 1), dict, OPTIONS)
    with caplog.at_level(logging.WARNING, "mcore_reshard"):
        newcomers.serve_newcomers(rank, RLock(), lambda: complete(5))
        host.restart()
        while not joined.needs_reopening:
            time.sleep(0.01)
        time.sleep(1.0)
    joined.close()
    assert not [each for each in caplog.messages if "offer_failed" in each]


def test_replicas_give_their_weights_also_after_the_store_started_anew_and_was_written_to_by_others(
    ranks: Ranks, host: StoreProcess
) -> None:
    trainer, engines = start(ranks)
    host.restart()
    refit(trainer, engines, 6)
    assert [answer.error for answer in refit(trainer, engines, 7)] == [None] * 5
    with connect_store(host.address, OPTIONS) as outsider:
        outsider.set("want/gen:0", "no wish")
    newcomers = [ranks.gen(PAIRS, rank).tell("prepare") for rank in (4, 5)]
    answers = [rank.answer() for rank in newcomers]
    assert [(answer.error, answer.state, answer.held) for answer in answers] == [(None, "complete(7)", 7)] * 2
