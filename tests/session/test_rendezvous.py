"""A meeting has one outcome, and a failure names the rank that is to blame rather than the first to complain."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers.ranks import store_of, store_process

from mcore_reshard.kernels.errors import ChecksumError, DeadlineError, PeerLostError, SessionError, Waiting, first_of
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.exchange import Failure
from mcore_reshard.kernels.rendezvous.rendezvous import Rendezvous, SessionFailed
from mcore_reshard.kernels.rendezvous.seal import Sealer
from mcore_reshard.kernels.rendezvous.store import connect_store
from mcore_reshard.kernels.rendezvous.store_keys import StoreView

MEMBERS = ("train:0", "train:1", "gen:0")


@pytest.fixture
def address() -> Iterator[str]:
    with store_process() as process:
        yield process.address


def rendezvous(address: str, rank: str) -> Rendezvous:
    return Rendezvous(store_of(address).under("e"), rank, MEMBERS, timeout_s=5.0)


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
    ranks[0].declare("p", Failure("train:0", "ValueError", "too late"))
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


def test_a_rank_that_has_arrived_keeps_nobody_waiting(address: str) -> None:
    """Its bytes came in one message with those of a rank that sent none."""
    with ThreadPoolExecutor() as pool:
        arrived = pool.submit(rendezvous(address, "train:0").gather, "p", {})
        time.sleep(0.3)
        errors = [DeadlineError(waiting("gen:0", peer), "nothing within 5 s") for peer in ("train:0", "train:1")]
        assert rendezvous(address, "gen:0").fail("p", first_of(errors)).peer == "train:1"
        with pytest.raises(SessionFailed, match="gen:0 waiting for train:1"):
            arrived.result()


def test_of_several_ranks_that_are_late_those_that_wait_say_for_whom(address: str) -> None:
    done = Rendezvous(store_of(address).under("e"), "train:0", ("train:0", "gen:0", "gen:1"), timeout_s=3.0)
    late = rendezvous(address, "gen:0")  # connected before the clock runs
    with ThreadPoolExecutor() as pool:
        heard = pool.submit(done.gather, "p", {}, timeout_s=0.3)
        time.sleep(0.6)  # gen:0 began to wait later
        late.fail("p", DeadlineError(waiting("gen:0", "relay:1"), "nothing within 5 s"))
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


def settled(known: bool | None) -> bool | None:
    return known


def test_a_decision_is_known_to_all_or_to_none(address: str) -> None:
    noted: list[str] = []
    ranks = [rendezvous(address, rank) for rank in MEMBERS]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda rank: rank.decide("p", settled, lambda: noted.append(rank.rank_name)), ranks))
    assert sorted(noted) == sorted(MEMBERS)


def test_a_vote_that_is_missing_commits_nowhere(address: str) -> None:
    noted: list[str] = []
    names = ("train:0", "gen:0")
    voters = [Rendezvous(store_of(address).under("e"), rank, MEMBERS, timeout_s=1.0) for rank in names]

    def vote(voter: Rendezvous) -> None:
        with pytest.raises(SessionFailed, match="train:1 did not arrive at 'p' within 1 s"):
            voter.decide("p", settled, lambda: noted.append(voter.rank_name))

    with ThreadPoolExecutor() as pool:
        list(pool.map(vote, voters))
    assert noted == []


def test_a_member_that_is_lost_ends_a_wait_at_once(address: str) -> None:
    lost = Failure("train:0", "PeerGone", "gen:0 has exited or was killed", peer="gen:0")
    alone = Rendezvous(store_of(address).under("e"), "train:0", MEMBERS, timeout_s=20.0, lost=lambda: lost)
    start = time.monotonic()
    with pytest.raises(SessionFailed, match="gen:0 has exited or was killed"):
        alone.gather("p", {})
    assert time.monotonic() - start < 2.0


def test_a_word_that_does_not_stand_as_it_was_said_is_noticed(address: str) -> None:
    store = store_of(address).under("e")

    class Forged(StoreView):
        def add_and_peek(self, *args: Any, **named: Any) -> Any:
            store.set("p/gen:0", '{"is": "another"}')
            return super().add_and_peek(*args, **named)

    forged = Forged(store_of(address), "e/")
    with pytest.raises(SessionError, match="the word of gen:0 at 'p' does not stand on the store as it was said"):
        Rendezvous(forged, "gen:0", ("gen:0",), timeout_s=5.0).gather("p", {"is": "mine"})


def votes(address: str, before_it_reads: Callable[[Rendezvous], Any], options: Options) -> tuple[list[str], list[str]]:
    """Who commits and who refuses, where somebody writes to the store before gen:0 reads that all have agreed."""
    noted, told = [], []

    class Reads(Rendezvous):
        def _await(self, phase: str, timeout_s: float, *read: Any) -> Any:
            self.store.wait_all([f"{phase}/outcome"], timeout_s)
            before_it_reads(self)
            return super()._await(phase, timeout_s, *read)

    def vote(rank: str) -> None:
        with connect_store(address, options) as store:
            store.take_seat(rank, {})
            voter = (Reads if rank == "gen:0" else Rendezvous)(store.under("e"), rank, MEMBERS, timeout_s=5.0)
            if rank == "train:0":  # so gen:0 is not the last to arrive
                deadline = time.monotonic() + 5.0
                while voter.store.add("p/arrived", 0) < 2:  # each rank says its word, then counts itself
                    assert time.monotonic() < deadline
            try:
                voter.decide("p", settled, lambda: noted.append(rank))
            except SessionError as error:
                told.append(str(error))

    with ThreadPoolExecutor() as pool:
        list(pool.map(vote, MEMBERS))
    return sorted(noted), told


SEALED = Options(session="sealed", timeout_s=5.0, token="a secret of these tests")
OPEN = Options(session="open", timeout_s=5.0)


@pytest.mark.parametrize("options", [SEALED, OPEN], ids=["with a token", "without one"])
def test_a_vote_that_does_not_stand_as_it_was_said_is_noticed_by_its_rank(address: str, options: Options) -> None:
    def write_another(voter: Rendezvous) -> None:
        voter.store.set("p/gen:0", '{"votes": "otherwise"}')

    noted, told = votes(address, write_another, options)
    assert noted == ["train:0", "train:1"]
    assert told == ["the word of gen:0 at 'p' does not stand on the store as it was said"]


def test_a_vote_in_anothers_name_is_noticed_by_its_rank(address: str) -> None:
    def write_as_another(voter: Rendezvous) -> None:
        with connect_store(address, SEALED) as other:
            other.take_seat("gen:1", {})
            other.set("e/p/gen:0", "{}")

    noted, (told,) = votes(address, write_as_another, SEALED)
    assert noted == ["train:0", "train:1"]
    assert told == "the value of 'e/p/gen:0' on the store was written by gen:1, not by gen:0"


def test_an_outsider_undoes_no_vote_on_which_all_have_agreed(address: str) -> None:
    def write_without_the_token(voter: Rendezvous) -> None:
        with connect_store(address, SEALED) as outsider:
            outsider.sealer = Sealer()
            outsider.set("e/p/gen:0", "{}")

    assert votes(address, write_without_the_token, SEALED) == (sorted(MEMBERS), [])


def test_a_vote_that_says_more_is_none(address: str) -> None:
    class Talks(Rendezvous):
        def _arrive(self, phase: str, word: Any, parse: Any) -> bool:
            return super()._arrive(phase, {"votes": "otherwise"}, parse)

    with pytest.raises(SessionError, match="the value of 'p/gen:0' on the store, which gen:0 wrote, is malformed"):
        Talks(store_of(address).under("e"), "gen:0", ("gen:0",), timeout_s=5.0).decide("p", settled, lambda: None)


@pytest.mark.parametrize("count", ["77", "-9", "none"])
def test_counts_that_somebody_else_writes_conclude_nothing(address: str, count: str) -> None:
    """Nobody agrees without the words of all, and an outcome that all know stands."""
    store = store_of(address).under("e")
    store.set("p/read", count)
    noted: list[str] = []
    with ThreadPoolExecutor() as pool:
        ranks = [rendezvous(address, rank) for rank in MEMBERS]
        list(pool.map(lambda rank: rank.decide("p", settled, lambda: noted.append(rank.rank_name)), ranks))
        assert sorted(noted) == sorted(MEMBERS)
        if count == "none":
            return
        store.set("q/arrived", count)
        early = pool.submit(rendezvous(address, "gen:0").gather, "q", {})
        time.sleep(0.3)
        assert not early.done() and not store.check(["q/outcome"])
        heard = list(pool.map(lambda rank: rank.gather("q", {}), ranks[:2]))
        assert [*heard, early.result()] == [{rank: {} for rank in MEMBERS}] * 3


@pytest.mark.parametrize("bad", ["somewhere", "host:", ":80", "host:port"])
def test_an_address_is_host_and_port(bad: str) -> None:
    with pytest.raises(SessionError, match="not the address of a store"):
        store_of(bad)
