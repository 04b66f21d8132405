"""Nothing waits forever for a store: not where none answers, and not for one that froze."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from threading import Thread, Timer
from typing import Any

import pytest
from helpers.ranks import Outcome, StoreProcess, run_ranks, store_process, values
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore

from mcore_reshard.kernels.errors import DeadlineError, Waiting
from mcore_reshard.kernels.rendezvous.exchange import StoreExchange
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup
from mcore_reshard.kernels.rendezvous.rendezvous import Rendezvous, SessionFailed
from mcore_reshard.kernels.rendezvous.store import FailFastStore, connect_store

LIMIT_S = 1.0
SLOW_S = 3.0  # what a busy machine adds


@pytest.fixture
def host() -> Iterator[StoreProcess]:
    with store_process() as process:
        yield process


def alone(call: Callable[[], Any]) -> Outcome:
    """How `call` ends in a process of its own; fails if it does not."""
    (outcome,) = run_ranks(1, lambda rank, address: call(), timeout_s=15.0)
    return outcome


def keeps_silent(connection: socket.socket) -> None:
    pass


def answers_as_http(connection: socket.socket) -> None:
    connection.recv(100)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def greets_as_ssh(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")


def hangs_up(connection: socket.socket) -> None:
    connection.close()


@pytest.mark.parametrize("serve", [keeps_silent, answers_as_http, greets_as_ssh, hangs_up])
def test_what_is_no_store_is_left_at_the_deadline(serve: Callable[[socket.socket], None]) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    connections = []

    def accept() -> None:
        while True:
            connections.append(listener.accept()[0])
            with suppress(OSError):  # it left first
                serve(connections[-1])

    def connect() -> None:
        Thread(target=accept, daemon=True).start()
        connect_store(address, LIMIT_S)

    refused = alone(connect)
    assert (refused.kind, refused.error) == (
        "SessionError",
        f"no store answers at {address} within 1 s: what listens there does not talk as one; it is another service, or "
        "a frozen process; start the TCPStore that the session is to meet at, or correct the address",
    )
    assert refused.seconds < LIMIT_S + SLOW_S


def test_a_port_where_nobody_listens_is_told_with_one_figure_and_it_is_right() -> None:
    with socket.socket() as taken:  # and nobody listens
        taken.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{taken.getsockname()[1]}"
        refused = alone(lambda: connect_store(nowhere, 3.0))
    assert refused.kind == "SessionError" and refused.error is not None
    assert refused.error.startswith(f"no store answers at {nowhere} within 3 s: nothing listens there; ")
    assert 2.9 < refused.seconds < 4.8


def test_a_host_that_drops_packets_is_left_at_the_deadline() -> None:
    """As this one does once the queue of connections that nobody accepts is full."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    address = listener.getsockname()
    queued = [socket.socket() for _ in range(4)]
    for each in queued:
        each.setblocking(False)
        each.connect_ex(address)
    refused = alone(lambda: connect_store(f"127.0.0.1:{address[1]}", LIMIT_S))
    assert refused.kind == "SessionError" and "within 1 s: the host does not answer; " in str(refused.error)
    assert refused.seconds < LIMIT_S + 2.0 + SLOW_S


def test_a_store_that_is_frozen_from_the_start_is_left_at_the_deadline(host: StoreProcess) -> None:
    host.freeze()
    refused = alone(lambda: connect_store(host.address, LIMIT_S))
    assert refused.kind == "SessionError" and f"no store answers at {host.address} within 1 s" in str(refused.error)
    assert refused.seconds < LIMIT_S + SLOW_S


def test_a_process_that_gave_up_on_a_store_can_exit(host: StoreProcess) -> None:
    """The thread that is left with the unanswered call does not keep it."""
    bound = f"""
from mcore_reshard.kernels.rendezvous.store import connect_store
store = connect_store({host.address!r}, 2.0)
print("connected", flush=True)
input()
for frozen in (lambda: store.check(["key"]), lambda: connect_store({host.address!r}, 1.0)):
    try:
        frozen()
    except RuntimeError as error:
        print(error)
print("left", flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", bound], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "connected\n"
        host.freeze()
        told, _ = process.communicate("\n", timeout=30)
    assert process.returncode == 0
    assert told.splitlines()[-1] == "left" and len(told.splitlines()) == 3


def test_what_runs_as_a_process_exits_may_call(host: StoreProcess) -> None:
    bound = f"""
import atexit
stores = []
atexit.register(lambda: print(stores[0].add("count", 1), flush=True))  # the first one, so it runs last
from mcore_reshard.kernels.rendezvous.store import connect_store
stores.append(connect_store({host.address!r}, {LIMIT_S}))
"""
    told = subprocess.run([sys.executable, "-c", bound], capture_output=True, text=True, timeout=30)
    assert (told.stdout, told.stderr, told.returncode) == ("1\n", "", 0)


def test_a_signal_handler_may_call_while_its_thread_waits(host: StoreProcess) -> None:
    def use() -> None:
        store = connect_store(host.address, LIMIT_S)
        signal.signal(signal.SIGALRM, lambda *_: store.set("key", "value"))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        store.wait(["key"], timedelta(seconds=20.0))
        assert store.get("key") == b"value"

    values([alone(use)])


def test_a_rank_that_is_interrupted_while_it_waits_says_so(host: StoreProcess) -> None:
    def meet() -> tuple[str, str]:
        rendezvous = Rendezvous(host.address, "s", "gen:0", ("gen:0", "train:0"), timeout_s=LIMIT_S)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt) as interrupted:
            rendezvous.gather("prepare", {}, timeout_s=20.0)
        said = str(rendezvous.fail("prepare", interrupted.value))
        with pytest.raises(SessionFailed) as heard:
            Rendezvous(host.address, "s", "train:0", ("gen:0", "train:0"), timeout_s=LIMIT_S).gather("prepare", {})
        return said, str(heard.value)

    said, heard = values([alone(meet)])[0]
    assert said == heard and said.startswith("gen:0: KeyboardInterrupt")


CALLS: dict[str, Callable[[Any], Any]] = {
    "get": lambda store: store.get("key"),
    "multi_get": lambda store: store.multi_get(["key"]),
    "add": lambda store: store.add("count", 1),
    "check": lambda store: store.check(["key"]),
    "compare_set": lambda store: store.compare_set("key", "", "value"),
    "delete_key": lambda store: store.delete_key("key"),
    "wait": lambda store: store.wait(["key"], timedelta(seconds=LIMIT_S)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", [PrefixStore, FailFastStore, lambda name, store: FailFastStore(name, store, "failed")])
def test_no_call_waits_longer_for_a_frozen_store(host: StoreProcess, call: str, kind: Callable[..., Any]) -> None:
    def waits() -> tuple[list[float], str]:
        store = connect_store(host.address, LIMIT_S)
        on_it = kind("name", store)
        on_it.set("key", "value")
        assert on_it.get("key") == b"value"
        host.freeze()
        seconds = []
        for _ in range(2):
            start = time.monotonic()
            with pytest.raises(DistNetworkError) as lost:
                CALLS[call](on_it)
            seconds.append(time.monotonic() - start)
        return seconds, str(lost.value)

    ((first, second), told) = values([alone(waits)])[0]
    assert (
        told == f"the store at {host.address}: it has not answered for 1 s: its process is frozen, or its host is gone"
    )
    assert first < 2 * LIMIT_S + SLOW_S
    assert second < 0.5  # once lost, always lost


def test_it_is_a_store_like_any_other(host: StoreProcess) -> None:
    def use() -> None:
        store = FailFastStore("outer", FailFastStore("inner", connect_store(host.address, LIMIT_S)))
        store.set("key", b"\0\xff")  # type: ignore[arg-type]  # torch takes bytes
        assert store.get("key") == b"\0\xff" and store.multi_get(["key", "key"]) == [b"\0\xff"] * 2
        assert store.add("count", 2) == 2 and store.add("count", 3) == 5
        assert store.compare_set("new", "", "a") == b"a" and store.compare_set("new", "b", "c") == b"a"
        assert store.check(["new", "count"]) and not store.check(["new", "other"])
        assert store.delete_key("new") and not store.check(["new"])
        store.wait(["key"], timedelta(seconds=LIMIT_S))
        with pytest.raises(DistStoreError):
            store.wait(["other"], timedelta(seconds=LIMIT_S))
        assert store.check(["key"])  # a wait in vain loses nothing

    values([alone(use)])


def test_a_store_that_ends_is_lost(host: StoreProcess) -> None:
    def use() -> None:
        store = connect_store(host.address, LIMIT_S)
        os.kill(host.pid, signal.SIGKILL)
        for _ in range(100):
            store.check(["key"])
            time.sleep(0.05)

    lost = alone(use)
    assert lost.kind == "DistNetworkError" and str(lost.error).startswith(f"the store at {host.address}: ")


ENDS: dict[str, Callable[[Rendezvous], Any]] = {
    "gather": lambda rendezvous: rendezvous.gather("second", {}),
    "fail": lambda rendezvous: rendezvous.fail("second", ValueError("no")),
    "fail for a late peer": lambda rendezvous: rendezvous.fail(
        "second", DeadlineError(Waiting("gen:0", "train:0", 0, "w", sends=False), "nothing within 1 s")
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_meeting_at_a_frozen_store_ends_with_its_name(host: StoreProcess, end: str) -> None:
    def meet() -> None:
        rendezvous = Rendezvous(host.address, "s", "gen:0", ("gen:0",), timeout_s=LIMIT_S)
        rendezvous.gather("first", {})
        host.freeze()
        ENDS[end](rendezvous)

    lost = alone(meet)
    assert lost.kind == "SessionError" and str(lost.error).startswith(f"gen:0 lost the store at {host.address}: ")
    assert lost.seconds < 2 * LIMIT_S + SLOW_S


def test_a_store_that_freezes_while_ranks_wait_in_a_meeting_ends_it(host: StoreProcess) -> None:
    def meet() -> None:
        rendezvous = Rendezvous(host.address, "s", "gen:0", ("gen:0", "train:0"), timeout_s=LIMIT_S)
        Timer(0.3, host.freeze).start()
        rendezvous.gather("first", {})

    lost = alone(meet)
    assert lost.kind == "SessionError" and str(lost.error).startswith(f"gen:0 lost the store at {host.address}: ")
    assert lost.seconds < 2 * LIMIT_S + SLOW_S


def test_leaving_takes_no_longer_at_a_frozen_store(host: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_reshard.kernels.rendezvous.rendezvous.CLOSE_S", 0.5)

    def leave() -> float:
        rendezvous = Rendezvous(host.address, "s", "gen:0", ("gen:0",), timeout_s=60.0)
        rendezvous.gather("first", {})
        host.freeze()
        start = time.monotonic()
        rendezvous.leave()
        return time.monotonic() - start

    assert values([alone(leave)])[0] < 0.5 + SLOW_S


def connects_in_vain(rank: int, address: str, host: StoreProcess) -> None:
    gather = StoreExchange.gather

    def freezing(exchange: StoreExchange, *args: Any) -> Any:
        words = gather(exchange, *args)
        gather(exchange, "again", None, lambda word: word)
        time.sleep(0.3)
        if rank == 0:
            host.freeze()
        time.sleep(0.3)
        return words

    StoreExchange.gather = freezing  # type: ignore[method-assign]
    GlooGroup(
        FailFastStore("gloo", connect_store(host.address, LIMIT_S)), rank, ("train:0", "gen:0"), timeout_s=LIMIT_S
    )


def test_gloo_connects_in_vain_through_a_store_that_freezes(host: StoreProcess) -> None:
    for lost in run_ranks(2, connects_in_vain, host, timeout_s=15.0):
        assert lost.kind in ("SessionError", "DistNetworkError")
        assert f"the store at {host.address}: it has not answered" in str(lost.error)
        assert lost.seconds < 2 * LIMIT_S + SLOW_S
