"""A session that lives for months: joins, farewells, and trainers that start again leave no more keys than the last ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from threading import RLock

import pytest
import torch
from helpers.plans import Case
from helpers.ranks import StoreProcess

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.exchange import Failure
from mcore_reshard.kernels.rendezvous.store import SessionStore, connect_store
from mcore_reshard.session.attempts import CONNECT, REFIT, World
from mcore_reshard.session.follower import Follower
from mcore_reshard.session.leader import Leader
from mcore_reshard.session.newcomers import Rank, catch_up, serve_newcomers
from mcore_reshard.session.plan_exchange import fetch_plan, keep_newest, publish_plan
from mcore_reshard.session.state import complete
from mcore_reshard.session.trace_exchange import _collect, ask_no_traces

OPTIONS = Options(session="months", timeout_s=5.0, token="a secret of these tests")
WORLD = World(train_ranks=1, replica_ranks=1, replicas=2)


@pytest.fixture
def session(host: StoreProcess) -> Iterator[SessionStore]:
    """It lives on, whoever comes and goes."""
    with connect_store(host.address, OPTIONS) as store:
        yield store


def rank_of(host: StoreProcess, seat: str, process: str, fill: float) -> Rank:
    store = connect_store(host.address, OPTIONS)
    store.take_seat(seat, {"process": process})
    tensors = {"weight": torch.full((5,), fill)}
    return Rank(store, seat, WORLD, lambda: tensors, OPTIONS)


def test_joins_leave_no_more_keys_than_the_last_one(host: StoreProcess, session: SessionStore) -> None:
    donor = rank_of(host, "gen:0", "donor", 7.0)
    serve_newcomers(donor, RLock(), lambda: complete(7))
    counts = []
    for number in range(8):
        joiner = rank_of(host, "gen:1", f"joiner {number}", 0.0)
        assert catch_up(joiner, None, lambda version: None) == 7
        assert joiner.tensors()["weight"].tolist() == [7.0] * 5
        if number % 2:  # its donor says this after the joiner has given up
            joiner.store.set(f"copy/gen:1/joiner {number}/0/0/failed", "too late")
        joiner.store.leave_seat()
        joiner.store.close()
        counts.append(len(session.keys("join/")) + len(session.keys("copy/")))
    assert max(counts) <= 3 and counts[-1] <= counts[1], counts
    donor.store.leave_seat()
    donor.store.close()


def test_farewells_leave_no_more_keys_than_the_last_one_of_a_seat(host: StoreProcess, session: SessionStore) -> None:
    for number in range(8):
        with connect_store(host.address, OPTIONS) as store:
            store.take_seat("gen:1", {"process": f"{number}"})
            follower = Follower(store, "gen:1", WORLD, f"{number}", 5.0)
            follower.say_farewell(Failure("gen:1", "BindError", f"no weight {number}"))
            store.leave_seat()
        assert session.keys("farewell/") == [f"farewell/gen:1/{number}"]
        others = Follower(session, "gen:0", WORLD, "another", 5.0)
        lost = others.lost(["gen:1"])
        assert lost is not None and lost.message == f"no weight {number}"


def restart(host: StoreProcess, number: int, refits: int) -> None:
    """A trainer connects, refits, and dies."""
    with connect_store(host.address, OPTIONS) as store:
        store.take_seat("train:0", {"process": f"{number:0>8}"})
        leader = Leader(store, "train:0", WORLD, f"{number:0>8}", 5.0, plan="", package="")
        head = leader.begin(CONNECT)
        leader._epoch = head.number
        store.set(f"e/{head.attempt}/hello/gen:0", "")
        for _ in range(refits):
            head = leader.begin(REFIT)
            store.set(f"a/{head.attempt}/call", "")
            store.set(f"a/{head.attempt}/commit/outcome", "")
        store.leave_seat()


def test_trainers_that_start_again_leave_no_more_keys_than_the_last_one(
    host: StoreProcess, session: SessionStore
) -> None:
    counts = []
    for number in range(8):
        restart(host, number, refits=12)
        counts.append(len(session.keys()))
    assert max(counts) <= counts[1], (counts, session.keys())


def test_plans_of_earlier_trainers_go(host: StoreProcess, session: SessionStore) -> None:
    plans = [Case("tiny-llama", train, "tp=1").plan() for train in ("tp=1", "tp=2", "tp=4", "tp=2,pp=2")]
    for plan in plans * 2:
        publish_plan(plan, host.address, OPTIONS)
        with connect_store(host.address, OPTIONS) as store:
            store.take_seat("train:0", {"process": plan.digest})
            assert len(session.keys("plan/")) <= 3
            keep_newest(plan, store)
            assert store.check(["plan/newest"])  # asked after the deletion, on the same connection
            assert {*session.keys("plan/")} == {"plan/newest", f"plan/{plan.digest}"}
            assert fetch_plan(host.address, OPTIONS).digest == plan.digest
            store.leave_seat()


def test_a_plan_that_is_replaced_while_an_engine_reads_is_read_anew(
    host: StoreProcess, session: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (Case("tiny-llama", train, "tp=1").plan() for train in ("tp=1", "tp=2"))
    publish_plan(first, host.address, OPTIONS)
    read = SessionStore.peek

    def peek(self: SessionStore, key: str, **writer: str | None) -> bytes | None:
        if key == f"plan/{first.digest}":
            monkeypatch.setattr(SessionStore, "peek", read)
            publish_plan(second, host.address, OPTIONS)
            keep_newest(second, session)
        return read(self, key, **writer)

    monkeypatch.setattr(SessionStore, "peek", peek)
    assert fetch_plan(host.address, OPTIONS).digest == second.digest


def test_answers_to_earlier_requests_for_traces_go(host: StoreProcess, session: SessionStore) -> None:
    traces = session.under("traces")
    for _ in range(4):
        with pytest.raises(SessionError, match=r"gen:0, gen:1 did not say within 0\.1 s how they load this model"):
            _collect(traces, {}, 2, 0.1)
        number = json.loads(traces.get("request"))["number"]
        for rank in range(2):
            traces.set(f"{number}/{rank}", "a long answer that comes too late")
        assert len(traces.keys()) == 3
    ask_no_traces(host.address, OPTIONS)
    assert traces.keys() == ["request"]
