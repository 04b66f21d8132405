"""A connection to a store waits for nothing longer than its deadline, and survives what it can."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any

import pytest
from helpers.plans import Case
from helpers.ranks import StoreProcess
from torch.distributed import DistNetworkError, DistStoreError

from mcore_reshard.kernels.errors import SessionError, StoreRestarted
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.sessions import MAX_READ_BYTES
from mcore_reshard.kernels.rendezvous.store import SessionStore, connect_store
from mcore_reshard.kernels.rendezvous.store_connection import StoreConnection
from mcore_reshard.session.plan_exchange import fetch_plan, publish_plan
from mcore_reshard.session.store_server import serve_store, start_store_if_absent
from mcore_reshard.session.trace_exchange import answer_request

SHORT = Options(session="s", timeout_s=1.0)
PATIENT = Options(session="s", timeout_s=20.0)  # on a busy machine


def keeps_silent(connection: socket.socket) -> None:
    time.sleep(0.1)


def answers_as_http(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def hangs_up(connection: socket.socket) -> None:
    connection.close()


@pytest.mark.parametrize("serve", [keeps_silent, answers_as_http, hangs_up])
def test_what_is_no_store_is_left_at_the_deadline(serve: Callable[[socket.socket], None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                kept.append(connection)
                serve(connection)

        threading.Thread(target=accept, daemon=True).start()
        address, start = f"127.0.0.1:{server.getsockname()[1]}", time.monotonic()
        with pytest.raises(SessionError, match="what listens there is no store of mcore-reshard"):
            connect_store(address, SHORT)
        assert time.monotonic() - start < 6.0
        with pytest.raises(SessionError, match="no store of mcore-reshard"):
            start_store_if_absent(address, 1.0)


def test_a_port_where_nobody_listens_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(SessionError, match=f"no store answers at 127.0.0.1:{port} within 1 s: nothing listens there"):
        connect_store(f"127.0.0.1:{port}", SHORT)


def test_an_engine_that_comes_first_waits_for_the_store_as_long_as_for_the_plan() -> None:
    plan = Case("tiny-llama", "tp=1", "tp=1").plan()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

    def no_trace(_: object) -> Any:
        raise AssertionError("the plan is made by rules")

    def engine() -> str:
        answer_request(0, no_trace, address, SHORT, 30.0)
        return fetch_plan(address, SHORT, timeout_s=30.0).digest

    with ThreadPoolExecutor(1) as pool:
        fetched = pool.submit(engine)
        time.sleep(2 * SHORT.timeout_s)
        assert not fetched.done()
        started = start_store_if_absent(address, 5.0)
        assert started is not None
        with closing(started):
            publish_plan(plan, address, SHORT)
            assert fetched.result(20.0) == plan.digest


def test_a_store_is_started_where_none_is_and_used_where_one_is(host: StoreProcess) -> None:
    assert start_store_if_absent(host.address, 20.0) is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    started = start_store_if_absent(address, 5.0)
    assert started is not None
    with started, connect_store(address, SHORT) as store:
        store.set("key", "value")
        assert store.get("key") == b"value"
    with pytest.raises(SessionError, match="give an address of this host"):
        start_store_if_absent("192.0.2.1:29611", 5.0)


def test_it_is_a_store_like_any_other(host: StoreProcess) -> None:
    with connect_store(host.address, SHORT) as store:
        part = store.under("part")
        part.set("a", "1")
        assert (part.get("a"), store.get("part/a"), part.check(["a"]), part.check(["a", "b"])) == (
            b"1",
            b"1",
            True,
            False,
        )
        assert (part.add("n", 2), part.add("n", -5)) == (2, -3)
        assert (part.compare_set("c", "", "first"), part.compare_set("c", "", "second")) == (b"first", b"first")
        assert (part.multi_get(["a", "c"]), part.missing(["a", "x"])) == ([b"1", b"first"], ["x"])
        assert sorted(part.keys()) == ["a", "c", "n"] and part.delete_key("a") and not part.delete_key("a")
        assert part.delete_prefix("") == 2 and store.keys() == []
        with pytest.raises(DistStoreError, match=r"waited 0\.2 s for nothing"):
            part.wait(["nothing"], timedelta(seconds=0.2))
        part.set_soon({"x": "1", "y": "2"})
        assert (part.get("x"), part.peek("y"), part.peek("z")) == (b"1", b"2", None)


def test_a_wait_brings_what_is_there_when_it_ends(host: StoreProcess) -> None:
    with connect_store(host.address, PATIENT) as store, connect_store(host.address, PATIENT) as other:
        part = store.under("wait")
        assert part.peek_when(["a"], 0.1, ["a"], writers=[None]) is None
        part.set("b", "2")
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(part.peek_when, ["a", "b"], 5.0, ["b", "none", "a"], writers=[None] * 3)
            time.sleep(0.1)
            other.under("wait").set("a", "1")
            assert found.result() == [b"2", None, b"1"]
        assert part.peek_when(["a"], 5.0, ["a", "b"], writers=[None, None]) == [b"1", b"2"]
        long = "x" * (MAX_READ_BYTES + 1)
        part.set("long", long)  # the answer does not bring it: it is asked for
        assert part.peek_when(["a"], 5.0, ["long"], writers=[None]) == [long.encode()]


def test_who_fills_a_counter_reads_everyone(host: StoreProcess) -> None:
    with connect_store(host.address, PATIENT) as store:
        part = store.under("count")
        part.set_soon({"a": "1"})
        assert part.add_and_peek("n", 2, ["a", "b"], writers=[None, None]) is None
        assert part.add_and_peek("n", 2, ["a", "b"], writers=[None, None]) is None, (
            "the counter is full, and b is missing"
        )
        part.set_soon({"b": "2"})
        assert part.add_and_peek("n", 2, ["a", "b"], writers=[None, None]) == [b"1", b"2"]
        assert part.compare_set_and_add("c", "first", "read") == (b"first", 1)
        assert part.compare_set_and_add("c", "second", "read") == (b"first", 2)
        part.set("read", "no number")
        assert part.compare_set_and_add("d", "third", "read") == (b"third", None)


def test_a_store_of_an_earlier_release_is_asked_once_more(host: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know that a wait may read, nor that a reader may want all or nothing."""
    send = StoreConnection.send

    def send_as_before(self: StoreConnection, header: dict[str, Any], *args: Any, **named: Any) -> int:
        said = {name: fact for name, fact in header.items() if name != "read"}
        if header["op"] == "get":
            said.pop("all", None)
        return send(self, said, *args, **named)

    with connect_store(host.address, PATIENT) as store:
        part = store.under("before")
        part.set("a", "1")
        monkeypatch.setattr(StoreConnection, "send", send_as_before)
        assert part.peek_when(["a"], 5.0, ["a", "b"], writers=[None, None]) == [b"1", None]
        assert part.add_and_peek("n", 1, ["a", "b"], writers=[None, None]) is None
        assert part.add_and_peek("n", 1, ["a"], writers=[None]) == [b"1"]


CALLS: dict[str, Callable[[SessionStore], Any]] = {
    "set": lambda store: store.set("k", "v"),
    "get": lambda store: store.get("k"),
    "add": lambda store: store.add("n", 1),
    "check": lambda store: store.check(["k"]),
    "compare_set": lambda store: store.compare_set("k", "", "v"),
    "add_and_peek": lambda store: store.add_and_peek("n", 1, ["k"], writers=[None]),
    "compare_set_and_add": lambda store: store.compare_set_and_add("k", "v", "n"),
    "peek_when": lambda store: store.peek_when(["nothing"], 0.5, ["k"], writers=[None]),
    "wait_any": lambda store: store.wait_any(["nothing"], 0.5),
}


@pytest.mark.parametrize("call", [*CALLS])
def test_no_call_waits_longer_for_a_frozen_store(host: StoreProcess, call: str) -> None:
    store = connect_store(host.address, SHORT)
    host.freeze()
    start = time.monotonic()
    with pytest.raises(DistNetworkError, match="it has not answered for 1 s: its process is frozen"):
        CALLS[call](store)
    assert time.monotonic() - start < 4.0
    with pytest.raises(DistNetworkError):
        store.check(["k"])
    host.thaw()
    store.reopen()
    assert store.check(["k"]) in (True, False)


def test_a_store_that_is_frozen_for_less_than_the_deadline_is_not_lost(host: StoreProcess) -> None:
    store = connect_store(host.address, Options(session="s", timeout_s=10.0))
    host.freeze()
    threading.Timer(1.0, host.thaw).start()
    store.set("k", "v")
    assert store.get("k") == b"v"


def test_a_store_that_starts_anew_says_so_once(host: StoreProcess) -> None:
    store = connect_store(host.address, Options(session="s", timeout_s=10.0))
    store.take_seat("gen:0", {"pid": os.getpid()})
    store.set("k", "v")
    host.restart()
    with pytest.raises(StoreRestarted, match="started anew"):
        while True:
            store.check(["k"])
    store.reopen()
    assert not store.check(["k"]) and store.seats["gen:0"].status == "here"


def test_a_call_of_a_store_that_starts_anew_ends_although_another_thread_has_reopened_it(
    host: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget = SessionStore._forget_requests

    def forget_and_reopen(store: SessionStore) -> None:
        forget(store)
        store._restarted = False  # as `reopen` on another thread does, before this one looks

    monkeypatch.setattr(SessionStore, "_forget_requests", forget_and_reopen)
    store = connect_store(host.address, Options(session="s", timeout_s=10.0))
    ended: list[Exception] = []

    def wait() -> None:
        try:
            store.wait_any(["k"], 60.0)
        except StoreRestarted as error:
            ended.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    while not store._requests:
        time.sleep(0.01)
    host.restart()
    waiting.join(5.0)
    assert len(ended) == 1


def test_who_has_a_seat_takes_it_at_a_store_that_starts_anew_before_its_next_call(host: StoreProcess) -> None:
    idle, looks = (connect_store(host.address, Options(session="s", timeout_s=10.0)) for _ in range(2))
    idle.take_seat("gen:0", {"pid": 7})
    host.restart()
    deadline = time.monotonic() + 5.0
    for is_so in (lambda: looks.needs_reopening, lambda: "gen:0" in looks.seats):
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert (looks.seats["gen:0"].status, looks.seats["gen:0"].facts) == ("here", {"pid": 7})
    idle.reopen()
    assert idle.seats["gen:0"].status == "here"


def test_who_has_closed_does_not_come_back(host: StoreProcess) -> None:
    """As a refit on another thread would have it, which finds the store lost."""
    with connect_store(host.address, SHORT) as looks, connect_store(host.address, SHORT) as store:
        store.take_seat("gen:0", {})
        store.leave_seat()
        store.close()
        with pytest.raises(DistNetworkError, match="this rank has closed its connection"):
            store.reopen()
        deadline = time.monotonic() + 5.0  # the store hears of a connection's end a moment later
        while looks.stats()["connections"] > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert looks.stats()["connections"] == 1


@pytest.mark.parametrize("gone", [False, True])
def test_nobody_waits_for_a_silent_store_to_hear_a_goodbye(host: StoreProcess, gone: bool) -> None:
    store = connect_store(host.address, Options(session="s", timeout_s=60.0))
    store.take_seat("gen:0", {})
    host.kill() if gone else host.freeze()
    start = time.monotonic()
    with suppress(DistNetworkError):
        store.leave_seat()
    store.close()
    assert time.monotonic() - start < 2.0


def test_what_was_said_to_a_store_that_is_gone_never_reaches_the_next_one(host: StoreProcess) -> None:
    store = connect_store(host.address, Options(session="s", timeout_s=10.0))
    host.kill()
    store.set_soon({"head": "3"})

    def count() -> None:
        with suppress(StoreRestarted):
            store.add("count", 1)

    waiting = threading.Thread(target=count)
    waiting.start()
    host.served = serve_store(host.served.port)
    with pytest.raises(StoreRestarted):
        while True:
            store.check(["head"])
    store.reopen()
    for _ in range(2):  # a connection that is made again repeats what was not answered
        before = store.reconnects
        while store.reconnects == before:
            with suppress(OSError, AttributeError):
                store._connection.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
            time.sleep(0.01)
        assert store.missing(["head", "count"]) == ["head", "count"]
    waiting.join()


def test_a_store_that_ends_is_lost_at_the_deadline(host: StoreProcess) -> None:
    store = connect_store(host.address, SHORT)
    host.kill()
    start = time.monotonic()
    with pytest.raises(DistNetworkError, match=f"the store at {host.address}"):
        while True:
            store.check(["k"])
    assert time.monotonic() - start < 4.0


def test_a_signal_handler_may_call_while_its_thread_waits(host: StoreProcess) -> None:
    store = connect_store(host.address, Options(session="s", timeout_s=10.0))
    before = signal.signal(signal.SIGALRM, lambda *_: store.set("k", "from the handler"))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        assert store.wait_any(["k"], 5.0) == ["k"]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_leaves_the_connection_usable(host: StoreProcess) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    store = connect_store(host.address, Options(session="s", timeout_s=10.0))
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            store.wait_any(["k"], 5.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    store.set("k", "v")
    assert store.get("k") == b"v"


def test_a_store_ends_with_the_process_that_started_it() -> None:
    served = serve_store()
    with connect_store(served.address, SHORT) as store:
        served.close()
        time.sleep(0.5)
        store.set("k", "v")  # somebody is still connected
        assert served._process.poll() is None
    assert served._process.wait(5.0) == 0
