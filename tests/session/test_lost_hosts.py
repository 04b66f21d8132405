"""A host vanishes without a word: the others know at the deadline, name its rank, and go on; it comes back with its link.

Each rank is in a network namespace. What is cut is its port at the switch: nothing tells either side.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import namespaces
import pytest
from helpers.plans import Case
from helpers.ranks import StoreProcess
from helpers.remote import Answer, Ranks, Remote, tell

from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.server import GONE_S
from mcore_reshard.kernels.rendezvous.store import connect_store
from mcore_reshard.session.store_server import ServedStore, serve_store

pytestmark = pytest.mark.long
CASE = Case("tiny-llama", "tp=1", "tp=1,dp=2")
OPTIONS = Options(timeout_s=5.0)
KNOWN_S = OPTIONS.timeout_s + 4.0  # as the fault matrix has it for what only the deadline can show
RECOVERY_S = 45.0


class Hosts:
    """A trainer and two replicas of an engine, each on a host of its own, and the store on a fourth."""

    def __init__(self, ranks: Ranks, names: list[str], at_the_switch: ThreadPoolExecutor) -> None:
        self.address, self.at_the_switch = ranks.address, at_the_switch
        enter = [partial(namespaces.enter, name) for name in names]
        (self.trainer,) = ranks.train(CASE, patch=enter[0])
        self.engines = [ranks.gen(CASE, rank, patch=enter[1 + rank]) for rank in range(2)]
        self.all = [self.trainer, *self.engines]

    def refit(self, version: int, ranks: list[Remote] | None = None) -> list[Answer]:
        for rank in ranks or self.all:
            rank.tell("refit", **({"version": version} if rank is self.trainer else {}))
        return [rank.answer() for rank in ranks or self.all]

    def recover(self, version: int, ranks: list[Remote], replicas: tuple[int, ...]) -> None:
        deadline = time.monotonic() + RECOVERY_S
        while True:
            answers = self.refit(version, ranks)
            if all(answer.error is None and answer.replicas == replicas for answer in answers):
                assert [answer.held for answer in answers[1:]] == [version] * len(replicas)
                return
            assert time.monotonic() < deadline, answers
            version += 1

    def await_status(self, seat: str, status: str) -> None:
        """As the store says it. Nobody need ask for a host that is lost: the server's kernel does."""
        connect = partial(connect_store, self.address, OPTIONS, watches=True)
        deadline = time.monotonic() + OPTIONS.timeout_s + GONE_S + 3.0
        with self.at_the_switch.submit(connect).result() as watcher:
            while watcher.seats[seat].status != status:
                assert time.monotonic() < deadline, watcher.seats
                time.sleep(0.1)


def serve_at_the_switch() -> ServedStore:
    namespaces.enter(namespaces.SWITCH)  # this thread alone
    return serve_store(host=namespaces.STORE_ADDRESS)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason := namespaces.unavailable_reason():
        pytest.skip(reason)
    with namespaces.gpu_namespaces([0, 1, 2], mbit=1000) as names, ThreadPoolExecutor(1) as thread:
        store = StoreProcess(thread.submit(serve_at_the_switch).result())
        try:
            with Ranks(store.address, OPTIONS) as ranks:
                hosts = Hosts(ranks, names, thread)
                assert [answer.error for answer in tell(hosts.all, "prepare")] == [None] * 3
                assert [answer.error for answer in hosts.refit(1)] == [None] * 3
                yield hosts
        finally:
            store.kill()


def set_link(gpu: int, state: str) -> None:
    subprocess.run(["ip", "-n", namespaces.SWITCH, "link", "set", f"nic{gpu}", state], check=True)


def assert_told(answers: list[Answer], culprit: str) -> None:
    for answer in answers:
        assert culprit in str(answer.error) and answer.seconds < KNOWN_S, answers


def test_an_engines_host_that_vanishes_between_refits_is_named_and_comes_back(hosts: Hosts) -> None:
    set_link(2, "down")
    told = hosts.refit(2)
    assert_told(told[:2], "gen:1")
    assert "the store at" in str(told[2].error), "the lost rank itself can tell no more"
    assert [(answer.held, answer.state) for answer in told[1:]] == [(1, "complete(1)")] * 2
    hosts.recover(3, hosts.all[:2], (0,))
    set_link(2, "up")
    hosts.recover(20, hosts.all, (0, 1))


def test_the_store_counts_a_host_as_gone_after_a_deadline_of_silence(hosts: Hosts) -> None:
    set_link(2, "down")
    hosts.await_status("gen:1", "gone")
    assert [answer.error for answer in hosts.refit(2, hosts.all[:2])] == [None] * 2, "they go on without it"
    set_link(2, "up")
    hosts.recover(3, hosts.all, (0, 1))


def test_an_engines_host_that_vanishes_in_a_refit_is_named_and_comes_back(hosts: Hosts) -> None:
    hosts.trainer.tell("refit", version=2)
    hosts.engines[1].tell("refit")
    time.sleep(1.0)  # until they wait for gen:0
    set_link(2, "down")
    told = [hosts.engines[0].tell("refit").answer(), hosts.trainer.answer()]
    assert_told(told, "gen:1")
    hosts.engines[1].answer()
    hosts.recover(3, hosts.all[:2], (0,))
    set_link(2, "up")
    hosts.recover(20, hosts.all, (0, 1))


def test_the_trainers_host_that_vanishes_while_engines_wait_is_named_and_comes_back(hosts: Hosts) -> None:
    for engine in hosts.engines:
        engine.tell("refit")
    time.sleep(1.0)
    set_link(0, "down")
    assert_told([engine.answer() for engine in hosts.engines], "train:0")
    set_link(0, "up")
    hosts.recover(2, hosts.all, (0, 1))
