"""A meeting has one outcome, and a failure names the rank that is to blame rather than the first to complain."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import DistNetworkError, Store, TCPStore

from mcore_reshard.kernels.errors import ChecksumError, DeadlineError, PeerLostError, SessionError, Waiting, first_of
from mcore_reshard.kernels.rendezvous.exchange import Failure
from mcore_reshard.kernels.rendezvous.rendezvous import Rendezvous, SessionFailed
from mcore_reshard.kernels.rendezvous.store import store_address

MEMBERS = ("train:0", "train:1", "gen:0")


@pytest.fixture
def address() -> Iterator[str]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store_address(store)


def rendezvous(address: str, rank: str) -> Rendezvous:
    return Rendezvous(address, "s", rank, MEMBERS, timeout_s=5.0)


def waiting(rank: str, peer: str) -> Waiting:
    return Waiting(rank, peer, 2, "model.w", sends=rank.startswith("train"))


def test_everyone_hears_everyone(address: str) -> None:
    with ThreadPoolExecutor() as pool:
        heard = list(pool.map(lambda rank: rendezvous(address, rank).gather("p", {"is": rank}), MEMBERS))
    assert [{rank: word["is"] for rank, word in words.items()} for words in heard] == [
        dict(zip(MEMBERS, MEMBERS, strict=True))
    ] * 3


def test_one_failure_is_everyones_and_the_first_one_stands(address: str) -> None:
    assert rendezvous(address, "gen:0").fail("p", ValueError("no")).message == "no"
    assert rendezvous(address, "train:1").fail("p", ValueError("later")) == Failure("gen:0", "ValueError", "no")
    with pytest.raises(SessionFailed, match="gen:0: ValueError: no"):
        rendezvous(address, "train:0").gather("p", {})


def test_a_success_cannot_be_undone(address: str) -> None:
    with ThreadPoolExecutor() as pool:
        ranks = [rendezvous(address, rank) for rank in MEMBERS]
        list(pool.map(lambda rank: rank.gather("p", {}), ranks))
    ranks[0]._declare("p", Failure("train:0", "ValueError", "too late"))
    assert ranks[1]._outcome("p") is None


def test_a_chain_of_waits_is_followed_to_the_rank_that_waits_for_nobody(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mcore_reshard.kernels.rendezvous.exchange.NOTICE_S", 3.0
    )  # a busy machine is slow to say for whom it waits
    first, second = rendezvous(address, "train:0"), rendezvous(address, "gen:0")
    with ThreadPoolExecutor() as pool:
        early = pool.submit(first.fail, "p", DeadlineError(waiting("train:0", "gen:0"), "nothing within 5 s"))
        time.sleep(0.3)
        late = pool.submit(second.fail, "p", DeadlineError(waiting("gen:0", "train:1"), "nothing within 5 s"))
        want = Failure.of("gen:0", DeadlineError(waiting("gen:0", "train:1"), "nothing within 5 s"))
        assert early.result() == late.result() == want
    assert (want.stage, want.parameter, want.peer) == (2, "model.w", "train:1")


def test_a_chain_of_waits_leads_through_replicas_that_pass_on(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_reshard.kernels.rendezvous.exchange.NOTICE_S", 3.0)
    replica, relay = rendezvous(address, "gen:1"), rendezvous(address, "gen:0")
    with ThreadPoolExecutor() as pool:
        early = pool.submit(replica.fail, "p", DeadlineError(waiting("gen:1", "relay:0"), "nothing within 5 s"))
        time.sleep(0.3)
        late = pool.submit(relay.fail, "p", DeadlineError(waiting("gen:0", "train:1"), "nothing within 5 s"))
        assert {early.result().peer, late.result().peer} == {"train:1"}


def test_ranks_that_wait_for_each_other_name_the_one_for_whom_both_wait_too(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcore_reshard.kernels.rendezvous.exchange.NOTICE_S", 3.0)
    with ThreadPoolExecutor() as pool:

        def stuck(rank: str, relay: str, peer: str) -> Failure:
            errors = [
                DeadlineError(waiting(*ends), "nothing within 5 s") for ends in ((relay, peer), (rank, "relay:2"))
            ]
            return rendezvous(address, rank).fail("p", first_of(errors))

        told = list(pool.map(stuck, ("gen:0", "gen:1"), ("relay:0", "relay:1"), ("gen:1", "gen:0")))
    assert {failure.peer for failure in told} == {"gen:2"}


def test_of_several_ranks_that_are_late_those_that_wait_say_for_whom(address: str) -> None:
    done = Rendezvous(address, "s", "train:0", ("train:0", "gen:0", "gen:1"), timeout_s=3.0)
    with ThreadPoolExecutor() as pool:
        heard = pool.submit(done.gather, "p", {}, timeout_s=0.3)
        time.sleep(0.6)  # gen:0 began to wait later
        rendezvous(address, "gen:0").fail("p", DeadlineError(waiting("gen:0", "relay:1"), "nothing within 5 s"))
        with pytest.raises(SessionFailed, match="gen:0: DeadlineError: stage 2: gen:0 waiting for relay:1") as failed:
            heard.result()
    assert failed.value.failure.peer == "gen:1"


def test_a_rank_that_lost_a_peer_takes_that_peers_own_cause(address: str) -> None:
    loser, failed = rendezvous(address, "train:0"), rendezvous(address, "gen:0")
    with ThreadPoolExecutor() as pool:
        lost = pool.submit(loser.fail, "p", PeerLostError(waiting("train:0", "gen:0"), "the connection was closed"))
        time.sleep(0.3)
        failed.fail("p", ChecksumError(waiting("gen:0", "train:1"), "arrived damaged"))
        assert lost.result().error == "ChecksumError"


def test_a_chain_of_lost_peers_is_followed_to_the_rank_that_lost_nobody(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcore_reshard.kernels.rendezvous.rendezvous.CAUSE_S", 1.5)
    third, second = rendezvous(address, "gen:0"), rendezvous(address, "train:0")
    with ThreadPoolExecutor() as pool:  # train:1 died, and train:0 is the slower one to say so
        early = pool.submit(third.fail, "p", PeerLostError(waiting("gen:0", "train:0"), "the connection was closed"))
        time.sleep(0.3)
        late = pool.submit(second.fail, "p", PeerLostError(waiting("train:0", "train:1"), "the connection was closed"))
        assert {early.result().peer, late.result().peer} == {"train:1"}


def test_a_rank_whose_time_is_up_as_the_last_one_comes_agrees_too(address: str) -> None:
    """All are there, but nobody has declared the outcome when the first one's time is up."""
    ranks = [rendezvous(address, rank) for rank in MEMBERS]
    ranks[0].store.add("p/arrived", -1)
    with ThreadPoolExecutor() as pool:
        heard = list(pool.map(lambda rank: rank.gather("p", {}, timeout_s=0.5), ranks))
    assert [tuple(words) for words in heard] == [MEMBERS] * 3


def test_worlds_that_count_differently_do_not_hang(address: str) -> None:
    def attend(members: tuple[str, ...]) -> None:
        Rendezvous(address, "s", members[0], members, timeout_s=2.0).gather("p", {})

    with ThreadPoolExecutor() as pool:
        small = pool.submit(attend, ("gen:0",))
        small.result()
        with pytest.raises(SessionError, match="ranks disagree on how many they are: train:0 counts 3"):
            attend(MEMBERS)


class EndingStore:
    """A store that ends once a rank has said that it heard everyone."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ended = False

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if self._ended:
                raise DistNetworkError("the store is gone")
            self._ended = method == "add" and args[0].endswith("/read")
            return getattr(self._store, method)(*args)

        return call


def test_a_rank_that_has_said_that_it_heard_needs_the_store_no_more(address: str) -> None:
    """Once all ranks have, the process that hosts the store may end."""
    alone = Rendezvous(address, "s", "gen:0", ("gen:0",), timeout_s=5.0)
    for phase in ("first", "second"):
        alone.gather(phase, {})
    alone.store = EndingStore(alone.store)  # type: ignore[assignment]
    alone.gather("third", {})
    alone.leave()


@pytest.mark.parametrize("bad", ["somewhere", "host:", ":80", "host:port"])
def test_an_address_is_host_and_port(bad: str) -> None:
    with pytest.raises(SessionError, match="not the address of a store"):
        rendezvous(bad, "gen:0")
