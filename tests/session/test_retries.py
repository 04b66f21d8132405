"""With `retries=1` a refit repairs by itself what a machine or the network broke, on all ranks or on none."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
from helpers.plans import Case
from helpers.remote import Answer, Ranks, Remote, tell
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.buckets import Bucket
from mcore_reshard.kernels.errors import ConnectError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.transports.gloo import GlooExecutor
from mcore_reshard.session import member

CASE = Case("tiny-llama", "tp=2", "tp=1,dp=2")
PAIRS = Case("tiny-llama", "tp=2", "tp=2,dp=2")
OPTIONS = Options(timeout_s=12.0, retries=1)
Patch = Callable[[], None]


def start(ranks: Ranks, victim: int, patch: Patch, case: Case = CASE) -> tuple[list[Remote], list[Remote]]:
    """A session that has refitted once; one rank of the engine breaks in the second refit."""
    trainer = ranks.train(case)
    engines = [ranks.gen(case, rank, patch=patch if rank == victim else None) for rank in range(case.plan().gen.world)]
    assert [answer.error for answer in tell(trainer + engines, "prepare")] == [None] * len(trainer + engines)
    assert [answer.error for answer in refit(trainer, engines, 1)] == [None] * len(trainer + engines)
    return trainer, engines


def refit(trainer: list[Remote], engines: list[Remote], version: int) -> list[Answer]:
    for engine in engines:
        engine.tell("refit")
    return tell(trainer, "refit", version=version) + [engine.answer() for engine in engines]


def in_the_second_run(act: Callable[[NDArray[np.uint8]], Any]) -> None:
    """Once, when a bucket has arrived."""
    unpack, acted = GlooExecutor._unpack, list[int]()

    def unpack_after(self: GlooExecutor, bucket: Bucket, message: NDArray[np.uint8]) -> None:
        if self._runs == 2 and not acted:
            acted.append(bucket.number)
            act(message)
        unpack(self, bucket, message)

    GlooExecutor._unpack = unpack_after  # type: ignore[method-assign]


def damage(message: NDArray[np.uint8]) -> None:
    message[-1] ^= 0x10


def test_a_damaged_bucket_is_sent_again_and_committed(ranks: Ranks) -> None:
    trainer, engines = start(ranks, 0, lambda: in_the_second_run(damage))
    answers = refit(trainer, engines, 2)
    assert [(answer.error, answer.version, answer.attempts) for answer in answers] == [(None, 2, 3)] * 4
    assert [(answer.held, answer.state) for answer in answers[2:]] == [(2, "complete(2)")] * 2


def test_without_retries_the_same_damage_fails_the_refit(ranks: Ranks) -> None:
    ranks.options = Options(timeout_s=12.0)
    trainer, engines = start(ranks, 0, lambda: in_the_second_run(damage))
    answers = refit(trainer, engines, 2)
    assert all("arrived damaged" in str(answer.error) and answer.attempts == 2 for answer in answers), answers


def die(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_others_commit_without_a_replica_that_is_killed_in_the_refit(ranks: Ranks) -> None:
    trainer, engines = start(ranks, 1, lambda: in_the_second_run(die))
    for rank in [*engines, *trainer]:
        rank.tell("refit", **({"version": 2} if rank in trainer else {}))
    answers = [rank.answer() for rank in (*trainer, engines[0])]
    assert [(answer.error, answer.replicas, answer.attempts) for answer in answers] == [(None, (0,), 3)] * 3
    assert (answers[2].held, answers[2].state) == (2, "complete(2)")


def test_a_rank_does_not_wait_once_more_for_one_of_its_replica_that_was_killed(ranks: Ranks) -> None:
    """It can take part in no refit before somebody starts the other one again."""
    trainer, engines = start(ranks, 1, lambda: in_the_second_run(die), PAIRS)
    for rank in [*engines, *trainer]:
        rank.tell("refit", **({"version": 2} if rank in trainer else {}))
    told = engines[0].answer()
    assert "gen:1" in str(told.error) and told.seconds < 8.0, told
    answers = [rank.answer() for rank in (*trainer, *engines[2:])]
    assert [(answer.error, answer.replicas, answer.attempts) for answer in answers] == [(None, (1,), 3)] * 4


def test_nobody_tries_again_without_a_training_rank(ranks: Ranks) -> None:
    trainer, engines = start(ranks, 0, lambda: None)
    trainer[1].kill()
    for rank in (trainer[0], *engines):
        rank.tell("refit", **({"version": 2} if rank in trainer else {}))
    answers = [rank.answer() for rank in (trainer[0], *engines)]
    assert all("train:1 (process" in str(answer.error) and answer.attempts == 2 for answer in answers), answers


def replace_tensors() -> None:
    """After the first refit the engine's tensors lie elsewhere."""
    live = member.Member._live_tensors

    def moved(self: member.Member) -> Any:
        return {name: each.clone() if self.committed_version else each for name, each in live(self).items()}

    member.Member._live_tensors = moved  # type: ignore[method-assign]


def test_nobody_tries_again_where_somebody_must_mend_something(ranks: Ranks) -> None:
    trainer, engines = start(ranks, 0, replace_tensors)
    answers = refit(trainer, engines, 2)
    assert all("StaleTensorError" in str(answer.error) and answer.attempts == 2 for answer in answers), answers


def fail_to_connect_once() -> None:
    """After the first connection."""
    connect, calls = member.connect_members, list[int]()

    def connect_members(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise ConnectError("gloo could not connect 3 ranks: reset by peer")
        return connect(*args)

    member.connect_members = connect_members


def test_ranks_that_could_not_connect_try_again(ranks: Ranks) -> None:
    trainer, engines = start(ranks, 0, fail_to_connect_once)
    engines[1].kill()
    answers = refit(trainer, engines[:1], 2)
    assert [(answer.error, answer.version, answer.attempts) for answer in answers] == [(None, 2, 3)] * 3
