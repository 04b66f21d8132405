"""When replicas leave, die or join, the others keep what has not changed, and every byte of every refit is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from helpers.fake_memory import share_over_gloo
from helpers.plans import Case
from helpers.ranks import StoreProcess, store_process
from helpers.remote import Answer, Ranks, Remote, tell

from mcore_reshard.kernels.options import Options

CASE = Case("tiny-llama", "tp=2", "tp=1,dp=4")  # three replicas or more pass on what they have received
OPTIONS = Options(transport="gloo", timeout_s=20.0)


@pytest.fixture
def store() -> Iterator[StoreProcess]:
    with store_process() as store:
        yield store


@pytest.fixture
def ranks(store: StoreProcess) -> Iterator[Ranks]:
    with Ranks(store.address, OPTIONS) as ranks:
        yield ranks


def refit(trainer: Sequence[Remote], engines: Sequence[Remote], version: int) -> tuple[list[Answer], list[Answer]]:
    """A refit that all commit, with every byte in place."""
    for engine in engines:
        engine.tell("refit")
    told, answers = tell(trainer, "refit", version=version), [engine.answer() for engine in engines]
    assert [answer.error for answer in told + answers] == [None] * len(told + answers)
    assert [(answer.state, answer.held) for answer in answers] == [(f"complete({version})", version)] * len(answers)
    return told, answers


def counts(answers: Sequence[Answer], name: str) -> list[int]:
    return [(answer.kept or {}).get(name, 0) for answer in answers]


def start(ranks: Ranks) -> tuple[list[Remote], list[Remote]]:
    trainer = ranks.train(CASE, patch=share_over_gloo)
    engines = [ranks.gen(CASE, rank, patch=share_over_gloo) for rank in range(4)]
    assert [answer.error for answer in tell(trainer + engines, "prepare")] == [None] * 6
    return trainer, engines


def require_kept(before: Sequence[Answer], after: Sequence[Answer], new_peers: int) -> None:
    """Ranks that stay bind no tensor, export nothing, and read and map the memory of new peers alone, once."""
    for name in ("tensors bound", "exports made"):
        assert counts(after, name) == counts(before, name), name
    for name in ("tensors kept", "exports kept"):
        assert all(map(int.__lt__, counts(before, name), counts(after, name))), name
    for was, now in zip(before, after, strict=True):
        newly = now.opened[len(was.opened) :]
        assert len({owner for owner, _ in newly}) <= new_peers, newly
        assert len({*now.opened}) == len(now.opened), "an allocation was mapped twice"
    read = [now - was for was, now in zip(counts(before, "exports read"), counts(after, "exports read"), strict=True)]
    assert all(each <= new_peers for each in read), read


def test_a_replica_leaves_and_another_one_joins_and_what_has_not_changed_is_kept(ranks: Ranks) -> None:
    trainer, engines = start(ranks)
    told, answers = refit(trainer, engines, 1)
    assert counts(told, "exports made") == [1, 1]
    first = [*told, *answers[:3]]
    assert engines[3].tell("close").answer().error is None

    told, answers = refit(trainer, engines[:3], 2)
    second = [*told, *answers]
    require_kept(first, second, new_peers=0)
    assert all(now.mapped < was.mapped for was, now in zip(first[2:], second[2:], strict=True)), "the leaver's memory"

    newer = ranks.gen(CASE, 4, patch=share_over_gloo)
    assert newer.tell("prepare").answer().error is None
    told, answers = refit(trainer, [*engines[:3], newer], 3)
    require_kept(second, [*told, *answers[:3]], new_peers=1)
    refit(trainer, [*engines[:3], newer], 4)
    ends = tell([*trainer, *engines[:3], newer], "close")
    assert [answer.mapped for answer in ends] == [0] * 6, "closing releases all"


def test_a_replica_that_starts_again_on_its_seat_is_served_from_no_cache(ranks: Ranks) -> None:
    trainer, engines = start(ranks)
    told, answers = refit(trainer, engines, 1)
    first = [*told, *answers[:3]]
    engines[3].kill()
    newer = ranks.gen(CASE, 3, patch=share_over_gloo)
    assert newer.tell("prepare").answer().error is None
    for engine in (*engines[:3], newer):
        engine.tell("refit")
    after = [*tell(trainer, "refit", version=2), *(engine.answer() for engine in (*engines[:3], newer))]
    version = 2
    if any(answer.error for answer in after):  # the death costs one refit at most
        version = 3
        told, answers = refit(trainer, [*engines[:3], newer], 3)
        after = [*told, *answers]
    assert [answer.held for answer in after[2:]] == [version] * 4
    for was, now in zip(first[2:], after[2:5], strict=True):
        before = {handle for owner, handle in was.opened if owner == "relay:3"}
        newly = {handle for owner, handle in now.opened[len(was.opened) :] if owner == "relay:3"}
        assert newly and not newly & before, "memory of the process that died"
        assert was.mapped == now.mapped


def test_after_a_failure_what_is_whole_is_kept_and_the_dead_ranks_memory_is_unmapped(ranks: Ranks) -> None:
    trainer, engines = start(ranks)
    told, answers = refit(trainer, engines, 1)
    first = [*told, *answers[:3]]
    engines[3].freeze()  # it takes no part: the refit fails at the deadline, or goes on without it
    engines[3].kill()
    for engine in engines[:3]:
        engine.tell("refit")
    tell(trainer, "refit", version=2)
    for engine in engines[:3]:
        engine.answer()
    told, answers = refit(trainer, engines[:3], 3)
    second = [*told, *answers]
    require_kept(first, second, new_peers=0)
    assert all(now.mapped < was.mapped for was, now in zip(first[2:], second[2:], strict=True))
