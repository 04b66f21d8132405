"""A store's server holds against what clients and outsiders do to it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.ranks import StoreProcess

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.frames import (
    LENGTHS,
    MAX_FRAME_BYTES,
    MAX_VALUE_BYTES,
    FrameError,
    receive,
    unpack,
)
from mcore_reshard.kernels.rendezvous.store import SessionStore, connect_store

OPTIONS = Options(session="s", timeout_s=10.0)


def break_connection(store: SessionStore) -> None:
    assert store._connection is not None
    store._connection.shutdown(socket.SHUT_RDWR)


def test_the_server_loads_neither_torch_nor_numpy() -> None:
    code = "import sys; from mcore_reshard.kernels.rendezvous import server; print({'torch', 'numpy'} & {*sys.modules})"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (told.stdout.strip(), told.returncode) == ("set()", 0)


def test_idle_connections_delay_nobody(host: StoreProcess) -> None:
    address = (host.served.host, host.served.port)
    idle = [socket.create_connection(address) for _ in range(300)]
    start = time.monotonic()
    with connect_store(host.address, OPTIONS) as store:
        store.set("key", "value")
        assert store.get("key") == b"value"
    assert time.monotonic() - start < 2.0
    for each in idle:
        each.close()


def frame(header: bytes) -> bytes:
    return LENGTHS.pack(4 + len(header), len(header)) + header


def test_a_header_of_many_lists_is_refused_before_it_is_parsed() -> None:
    header = b'{"op": "get", "keys": [' + b"[]," * 600_000 + b'[]], "blobs": []}'
    tracemalloc.start()
    with pytest.raises(FrameError, match="its header has 600,004 lists and objects, more than 524,288"):
        unpack(len(header), header)
    assert tracemalloc.get_traced_memory()[1] < 4 * len(header)
    tracemalloc.stop()


def test_a_frame_that_is_too_long_is_refused_before_memory_is_taken_for_it() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(LENGTHS.pack(250 << 20, 10))
        tracemalloc.start()
        with pytest.raises(FrameError, match="at most 25165824 bytes are read here"):
            receive(ours, MAX_FRAME_BYTES)
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
        tracemalloc.stop()


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff" * 64,
        LENGTHS.pack(1 << 30, 10),
        LENGTHS.pack(6, 2) + b"[]",
        frame(b'{"op": "open", "seats": ' + b"[" * 40 + b"]" * 40 + b', "blobs": []}'),
        frame(b'{"op": "open", "linger_s": ' + b"9" * 50 + b', "blobs": []}'),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_a_bad_frame_ends_its_own_connection_alone(host: StoreProcess, sent: bytes) -> None:
    with connect_store(host.address, OPTIONS) as store:
        with socket.create_connection((host.served.host, host.served.port), timeout=10) as outsider:
            outsider.sendall(sent)
            told = b""
            while more := outsider.recv(1 << 16):
                told += more
        assert b'"error"' in told
        store.set("key", "value")
        assert store.get("key") == b"value" and store.reconnects == 0


def test_a_request_that_is_too_large_is_refused_and_the_connection_goes_on(host: StoreProcess) -> None:
    with connect_store(host.address, OPTIONS) as store:
        with pytest.raises(SessionError, match="at most 1000 characters"):
            store.set("k" * 2000, "value")
        size, most = f"{MAX_VALUE_BYTES + 1:,} bytes", f"a store keeps {MAX_VALUE_BYTES:,} at most"
        with pytest.raises(SessionError, match=f"a rank has {size} for 'key'; {most}"):
            store.set("key", bytes(MAX_VALUE_BYTES + 1))
        with pytest.raises(SessionError, match=f"the value of 'key' has {size}; {most}"):
            store.ask({"op": "set", "keys": ["key"]}, [bytes(MAX_VALUE_BYTES + 1)])
        with pytest.raises(SessionError, match="more than a store takes at once"):
            store.ask({"op": "set", "keys": ["a", "b", "c"]}, [bytes(12 << 20)] * 3)
        for key in "abc":
            store.set(key, bytes(12 << 20))
        with pytest.raises(SessionError, match="more than a store takes at once"):
            store.multi_get(["a", "b", "c"])
        for facts in ({"pid": "1" * 2000}, {"process": ["a"]}, {"protocol": None}):
            with pytest.raises(SessionError, match="are texts and integers, of 768 bytes in all"):
                store.take_seat("gen:0", facts)
        for name in ("gen:x", "gen:", "gen:²", "gen:-1", "gen:01", "gen:1e3", "gen", "\x1b[2J:5", "gen:" + "9" * 50):
            with pytest.raises(SessionError, match="a seat is a world and the number of a rank, as in gen:3, not"):
                store.take_seat(name, {})
        store.set("key", "value")
        assert store.get("key") == b"value" and store.reconnects == 0


def grown_mb(host: StoreProcess, before: int = 0) -> int:
    """Memory of the store's process."""
    said = Path(f"/proc/{host.pid}/status").read_text()
    return int(said.partition("VmRSS:")[2].split()[0]) // 1024 - before


def test_an_outsider_with_many_slow_requests_under_way_delays_nobody_else(host: StoreProcess) -> None:
    outside = Options(session="an outsider's own", timeout_s=30.0)
    with connect_store(host.address, OPTIONS) as store, connect_store(host.address, outside) as outsider:
        for part in range(20):
            outsider.set_soon({f"{part}/{number}": "" for number in range(5000)})
        outsider.check([])
        for _ in range(400):
            outsider.send({"op": "delete_prefix", "prefix": "none"}, asks=False)
        start = time.monotonic()
        store.set("key", "value")
        assert store.get("key") == b"value" and time.monotonic() - start < 1.0


def test_what_an_outsider_asks_for_costs_no_more_memory_than_it_sends(host: StoreProcess) -> None:
    with connect_store(host.address, Options(session="an outsider's own", timeout_s=30.0)) as outsider:
        before = grown_mb(host)
        with pytest.raises(SessionError, match="a request names 131072 keys at most, not 200000"):
            outsider.check([f"{number}" for number in range(200_000)])
        for turn in range(20):
            outsider.send({"op": "wait", "all": True, "keys": [f"{turn}/{n}" for n in range(50_000)]}, asks=False)
        with pytest.raises(SessionError, match="a connection waits for 131072 keys at most"):
            outsider.wait_any([f"{number}" for number in range(50_000)], 5.0)
        outsider.set("key", bytes(4 << 20))
        for _ in range(40):
            assert len(outsider.compare_set("key", "", "mine")) == 4 << 20
        assert grown_mb(host, before) < 100


def test_nothing_is_done_twice_when_a_connection_breaks(host: StoreProcess) -> None:
    """Also for a client without a seat."""
    with connect_store(host.address, OPTIONS) as store:
        totals = []
        for turn in range(50):
            if turn % 5 == 0:
                break_connection(store)
            totals.append(store.add("count", 1))
        assert totals == [*range(1, 51)] and store.reconnects >= 5


def test_large_and_small_values_of_many_threads_do_not_mix(host: StoreProcess) -> None:
    with connect_store(host.address, OPTIONS) as store, ThreadPoolExecutor(8) as pool:

        def put(number: int) -> bool:
            value = bytes([number]) * (4 << 20 if number % 4 == 0 else 10)
            store.set(f"key/{number}", value)
            return store.get(f"key/{number}") == value

        assert all(pool.map(put, range(40))) and store.reconnects == 0


def test_a_wait_survives_a_broken_connection_and_deleted_keys(host: StoreProcess) -> None:
    with (
        connect_store(host.address, OPTIONS) as store,
        connect_store(host.address, OPTIONS) as other,
        ThreadPoolExecutor() as pool,
    ):
        waiting = pool.submit(store.wait_all, ["a", "b"], 10.0)
        time.sleep(0.1)
        break_connection(store)
        other.set("a", "")
        other.delete_key("a")
        other.set("b", "")
        time.sleep(0.5)
        assert not waiting.done()
        other.set("a", "")
        assert waiting.result(timeout=2.0)


def test_a_store_that_serves_many_sessions_does_not_grow(host: StoreProcess) -> None:
    with connect_store(host.address, OPTIONS) as watching:
        before = watching.stats()
        for number in range(200):
            with connect_store(host.address, Options(session=f"hour {number}", timeout_s=10.0)) as rank:
                rank.take_seat("train:0", {})
                rank.set("plan", bytes(10_000))
                rank.leave_seat()
        deadline = time.monotonic() + 5.0
        while (after := watching.stats())["sessions"] > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert {**after, "connections": 0} == {**before, "connections": 0}


def test_the_seat_of_a_process_that_has_just_ended_can_be_taken(host: StoreProcess) -> None:
    first, second = connect_store(host.address, OPTIONS), connect_store(host.address, OPTIONS)
    first.take_seat("gen:3", {"pid": 7, "host": "node1"})
    with pytest.raises(SessionError, match=r"another process \(7 on node1, since .* UTC\) has been gen:3"):
        second.take_seat("gen:3", {"pid": 8})
    first.close()
    second.take_seat("gen:3", {"pid": 8})
    assert second.seats["gen:3"].status == "here" and second.seats["gen:3"].facts["pid"] == 8
    second.close()


def test_a_process_that_is_gone_is_known_within_three_seconds(host: StoreProcess) -> None:
    with connect_store(host.address, OPTIONS) as store:
        first = connect_store(host.address, OPTIONS)
        first.take_seat("gen:3", {"pid": 7})
        deadline = time.monotonic() + 10.0
        while "gen:3" not in store.seats and time.monotonic() < deadline:
            time.sleep(0.01)
        first.close()
        start = time.monotonic()
        while store.seats["gen:3"].status == "here" and time.monotonic() - start < 6:
            time.sleep(0.02)
        assert store.seats["gen:3"].status == "gone" and time.monotonic() - start < 3
