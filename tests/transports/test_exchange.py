"""Ranks of the nccl transport talk to each other before and beside the bytes: real processes, no device."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from helpers.handmade import allocate, random_transfers, schedule_of
from helpers.ranks import run_ranks, store_of, values
from numpy.random import default_rng

from mcore_reshard.kernels.copies.bind import bind
from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.rendezvous.exchange import Failure, StoreExchange, parse_stored
from mcore_reshard.kernels.rendezvous.store_keys import StoreView
from mcore_reshard.kernels.transports.nccl.connection import _parse_unique_id
from mcore_reshard.kernels.transports.nccl.executor import connect_nccl
from mcore_reshard.kernels.transports.nccl.staging import ScratchBudget
from mcore_reshard.session.store_server import serve_store

NAMES = ("train:0", "train:1", "gen:0")


def connected(address: str) -> StoreView:
    return store_of(address).under("nccl")


def as_is(value: Any) -> Any:
    return value


def conversation(rank: int, address: str) -> Any:
    exchange = StoreExchange(connected(address), NAMES[rank], NAMES, timeout_s=10.0)
    words = exchange.gather("word", {"rank": rank}, dict)
    before = exchange.who_gave_up()
    exchange.gather("asked", None, as_is)
    if rank == 2:
        exchange.give_up()
    exchange.gather("given up", None, as_is)
    if rank == 1:
        exchange.give_up()  # too late to be the first
    exchange.gather("again", None, as_is)
    return words, before, exchange.who_gave_up()


def test_words_and_failures_reach_everyone() -> None:
    told = ([{"rank": 0}, {"rank": 1}, {"rank": 2}], None, "gen:0")
    assert values(run_ranks(3, conversation)) == [told] * 3


def stuck(rank: int, address: str) -> str | None:
    exchange = StoreExchange(connected(address), NAMES[rank], NAMES, timeout_s=10.0)
    exchange.gather("word", None, as_is)
    if rank == 0:
        time.sleep(2)
        return None
    waits = [Failure(NAMES[rank], "DeadlineError", "", peer=peer) for peer in NAMES[::-1] if peer != NAMES[rank]]
    return exchange.blame("run-1", waits).peer


def test_those_who_wait_themselves_are_not_to_blame() -> None:
    assert values(run_ranks(3, stuck)) == [None, "train:0", "train:0"]


MALFORMED = [
    b"",
    b"{",
    b"\xff\xfe",
    b"[]",
    b"null",
    b'{"rank": "x"}',
    b"[" * 100_000,
    b"9" * 10_000,
    b'{"rank": 1e999}',
]


@pytest.mark.parametrize("content", MALFORMED, ids=[repr(content[:20]) for content in MALFORMED])
def test_a_malformed_value_is_named_with_its_key_and_its_rank(content: bytes) -> None:
    with pytest.raises(SessionError, match="the value of 'word/gen:0' on the store, which gen:0 wrote, is malformed"):
        parse_stored("word/gen:0", content, lambda word: int(word["rank"]), written_by="gen:0")


@pytest.mark.parametrize(
    ("field", "fact"), [("message", 1), ("stage", "first"), ("peer", 0), ("rank_name", None), ("parameter", [])]
)
def test_a_malformed_failure_names_its_field(field: str, fact: object) -> None:
    told = {"rank_name": "gen:0", "error": "DeadlineError", "message": "late", field: fact}
    with pytest.raises(ValueError, match=f"^{field} is {re.escape(repr(fact))}$"):
        Failure.from_json(told)


def test_a_unique_id_with_blanks_is_too_short() -> None:
    assert _parse_unique_id("ab" * 128) == b"\xab" * 128
    with pytest.raises(ValueError, match="127 bytes"):
        _parse_unique_id("ab" * 127 + "  ")


def silent_world(rank: int, address: str) -> None:
    if rank != 1:
        StoreExchange(connected(address), NAMES[rank], NAMES, timeout_s=1.0).gather("word", None, as_is)


def test_who_does_not_come_is_named() -> None:
    outcomes = run_ranks(3, silent_world)
    assert [outcomes[rank].kind for rank in (0, 2)] == ["SessionError"] * 2
    assert outcomes[0].error == "train:0: train:1 did not come within 1 s"
    assert outcomes[2].error == "gen:0: train:1 did not come within 1 s"


def test_an_exchange_whose_store_is_gone_can_still_give_up() -> None:
    store = serve_store()
    client = store_of(store.address)
    exchange = StoreExchange(client, NAMES[0], NAMES[:1], timeout_s=1.0)
    exchange.gather("word", None, as_is)
    del store
    exchange.give_up()


def with_budget(rank: int, address: str, budgets: tuple[ScratchBudget, ScratchBudget]) -> None:
    world, transfers = ("train", "gen")[rank], random_transfers(default_rng(0), (1, 1))
    schedule = schedule_of(transfers, world, 0, (1, 1))  # type: ignore[arg-type]
    connect_nccl([[bind(schedule, allocate(schedule))]], connected(address), timeout_s=10.0, budget=budgets[rank])


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        ((ScratchBudget(1 << 20), ScratchBudget(1 << 21)), "the ranks have different budgets: "),
        ((ScratchBudget(16), ScratchBudget(16)), "16 bytes of scratch are too few"),
    ],
)
def test_budgets_that_cannot_work_are_refused_by_all(
    budgets: tuple[ScratchBudget, ScratchBudget], message: str
) -> None:
    for outcome in run_ranks(2, with_budget, budgets):
        assert outcome.kind == SessionError.__name__
        assert str(outcome.error).startswith(message)


def without_transfers(rank: int, address: str) -> tuple[int, int]:
    schedule = schedule_of([], ("train", "gen")[rank], 0, (1, 1))  # type: ignore[arg-type]
    (executor,) = connect_nccl([[bind(schedule, {})]], connected(address), timeout_s=10.0)
    reports = executor.run()
    executor.close()
    with pytest.raises(SessionError, match="has been closed"):
        executor.run()
    return len(reports), executor.scratch_bytes


def test_ranks_without_transfers_take_part_and_need_nothing() -> None:
    assert values(run_ranks(2, without_transfers)) == [(0, 0)] * 2
