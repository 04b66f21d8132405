"""Two jobs that start under one name at the same moment: one leads, and its plan is the newest; the other is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
from helpers.plans import Case
from helpers.ranks import StoreProcess, store_process

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.store import SessionStore, connect_store
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.session import plan_exchange
from mcore_reshard.session.plan_exchange import fetch_plan, keep_newest, publish_plan

FIRST, SECOND, OLD = (Case("tiny-llama", "tp=1", gen).plan() for gen in ("tp=1", "tp=2", "tp=2,dp=2"))
TOKENS = [None, "a secret of these tests"]


@pytest.fixture(scope="module")
def host() -> Iterator[StoreProcess]:
    with store_process() as process:
        yield process


def options_of(name: str, token: str | None) -> Options:
    return Options(session=f"{name} {token}", timeout_s=10.0, token=token)


def lead(host: StoreProcess, plan: Plan, options: Options) -> SessionStore:
    """Sit down as training rank 0 of another process does."""
    store = connect_store(host.address, options)
    try:
        store.take_seat("train:0", {"pid": 77, "host": "node3"})
    except BaseException:
        store.close()
        raise
    keep_newest(plan, store)
    return store


def publish_while(
    host: StoreProcess, plan: Plan, options: Options, monkeypatch: pytest.MonkeyPatch, other: Callable[[], Any]
) -> None:
    """Publish a plan; `other` is done once it is checked that nobody leads."""
    announce = plan_exchange._announce

    def late(*args: Any) -> None:
        monkeypatch.setattr(plan_exchange, "_announce", announce)
        other()
        announce(*args)

    monkeypatch.setattr(plan_exchange, "_announce", late)
    publish_plan(plan, host.address, options)


@pytest.mark.parametrize("token", TOKENS, ids=["open", "sealed"])
@pytest.mark.parametrize("is_first", [True, False])
def test_who_publishes_second_at_the_same_time_is_refused(
    host: StoreProcess, token: str | None, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_of(f"published {is_first}", token)
    with connect_store(host.address, options):
        if not is_first:
            publish_plan(OLD, host.address, options)
        with pytest.raises(SessionError, match=r"another job has published a plan .* at the same time"):
            publish_while(host, SECOND, options, monkeypatch, lambda: publish_plan(FIRST, host.address, options))
        assert fetch_plan(host.address, options).digest == FIRST.digest


@pytest.mark.parametrize("token", TOKENS, ids=["open", "sealed"])
def test_the_plan_of_a_trainer_that_sat_down_meanwhile_stays(
    host: StoreProcess, token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_of("seated", token)
    publish_plan(FIRST, host.address, options)
    held: list[SessionStore] = []
    with pytest.raises(SessionError, match=r"has a trainer: train:0 is process 77 on node3\. Its plan stays"):
        publish_while(host, SECOND, options, monkeypatch, lambda: held.append(lead(host, FIRST, options)))
    assert fetch_plan(host.address, options).digest == FIRST.digest
    held[0].close()


def test_who_sits_down_first_has_the_newest_plan(host: StoreProcess) -> None:
    options = options_of("first", None)
    publish_plan(FIRST, host.address, options)
    publish_plan(SECOND, host.address, options)
    with lead(host, FIRST, options):
        assert fetch_plan(host.address, options).digest == FIRST.digest
        with pytest.raises(SessionError, match=r"another process \(77 on node3"):
            lead(host, SECOND, options)


def test_of_two_jobs_that_race_one_leads_with_its_own_plan(host: StoreProcess) -> None:
    barrier = Barrier(2)

    def job(number: int, plan: Plan) -> str:
        options = options_of(f"race {number}", None)
        with connect_store(host.address, options):
            barrier.wait()
            try:
                publish_plan(plan, host.address, options)
                store = lead(host, plan, options)
            except SessionError as error:
                barrier.wait()
                return str(error)
            barrier.wait()
            with store:
                return "leads" if fetch_plan(host.address, options).digest == plan.digest else "leads with another plan"

    with ThreadPoolExecutor(2) as pool:
        for number in range(20):
            first, second = pool.map(job, (number, number), (FIRST, SECOND))
            (told,) = {first, second} - {"leads"}
            assert "leads" in (first, second), told
            assert "another " in told or "has a trainer: train:0 is process 77" in told


def test_a_value_is_replaced_only_where_it_is_the_one_that_was_expected(host: StoreProcess) -> None:
    for token in TOKENS:
        with connect_store(host.address, options_of("replaced", token)) as store:
            assert store.compare_set("k", "old", "new") == b"" and not store.check(["k"])
            assert store.compare_set("k", "", "old") == b"old"
            assert store.compare_set("k", "other", "new") == b"old"
            assert store.compare_set("k", "old", "new") == store.get("k") == b"new"
            assert store.compare_set("k", "old", "newer") == store.get("k") == b"new"


def test_a_store_that_starts_anew_before_the_leader_sits_down_has_its_plan_again(host: StoreProcess) -> None:
    options = options_of("started anew", None)
    with lead(host, FIRST, options):  # published at the store before
        assert fetch_plan(host.address, options, timeout_s=5.0).digest == FIRST.digest
