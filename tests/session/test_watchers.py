"""Connections that watch: they see all that ranks say, change nothing, and keep nothing alive."""

from __future__ import annotations

import time

import pytest
from helpers.ranks import store_process

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.store import connect_store, list_sessions

OPTIONS = Options(session="s", timeout_s=5.0)
TOKEN = "0123456789abcdef"


def test_a_watcher_reads_keys_and_seats_and_changes_nothing() -> None:
    with store_process() as server, connect_store(server.address, OPTIONS) as rank:
        rank.take_seat("gen:0", {"pid": 7})
        rank.set("head", "1")
        with connect_store(server.address, OPTIONS, watches=True) as watcher:
            assert (watcher.get("head"), watcher.keys(), watcher.seats["gen:0"].status) == (b"1", ["head"], "here")
            for change in (
                lambda: watcher.set("head", "2"),
                lambda: watcher.compare_set("new", "", "2"),
                lambda: watcher.add("count", 1),
                lambda: watcher.delete_key("head"),
                lambda: watcher.delete_prefix(""),
                lambda: watcher.take_seat("gen:1", {}),
                watcher.leave_seat,
            ):
                with pytest.raises(SessionError, match="opened to watch: it can read alone"):
                    change()
            assert (rank.keys(), rank.get("head"), [*rank.seats]) == (["head"], b"1", ["gen:0"])


def test_a_watcher_begins_no_session_and_keeps_none_alive() -> None:
    with store_process() as server:
        with pytest.raises(SessionError, match="this store has no session 's'"):
            connect_store(server.address, OPTIONS, watches=True)
        assert list_sessions(server.address, 5.0) == ([], 0)
        rank = connect_store(server.address, OPTIONS)
        rank.take_seat("gen:0", {})
        with connect_store(server.address, OPTIONS, watches=True) as watcher:
            assert list_sessions(server.address, 5.0) == (["s"], 1)
            rank.leave_seat()
            rank.close()
            deadline = time.monotonic() + 5
            while list_sessions(server.address, 5.0)[1] and time.monotonic() < deadline:
                time.sleep(0.02)
            assert list_sessions(server.address, 5.0) == ([], 0)
            with pytest.raises(Exception, match=r"this store has no session 's'|closed"):
                for _ in range(100):
                    watcher.check(["head"])
                    time.sleep(0.02)


def test_a_watcher_needs_the_token_and_a_stores_list_leaves_such_sessions_out() -> None:
    with store_process() as server, connect_store(server.address, Options(session="s", token=TOKEN)) as rank:
        rank.set("head", "1")
        assert list_sessions(server.address, 5.0) == ([], 1)
        with pytest.raises(SessionError, match="begun with a token: give this process the token too"):
            connect_store(server.address, OPTIONS, watches=True)
        with connect_store(server.address, Options(session="s", token=TOKEN), watches=True) as watcher:
            assert watcher.get("head") == b"1"


def test_news_arrive_without_a_wait() -> None:
    with store_process() as server, connect_store(server.address, OPTIONS) as rank:
        start = time.perf_counter()
        for number in range(100):
            rank.set_soon({"seen/gen:0": str(number)})
        took_s = time.perf_counter() - start
        assert rank.get("seen/gen:0") == b"99" and not rank._requests
        assert took_s < 0.1
