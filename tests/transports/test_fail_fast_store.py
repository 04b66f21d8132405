"""A wait on a FailFastStore is for its keys or for the session's failure, whichever comes first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import DistStoreError, PrefixStore, TCPStore

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.rendezvous.store import FailFastStore

LONG = timedelta(seconds=20)


@pytest.fixture
def port() -> Iterator[int]:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield server.port  # not the server: a test's frame may outlive it, and be freed in a fork without its threads


@pytest.fixture
def store(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


@pytest.fixture
def failing(port: int) -> FailFastStore:
    """A store on a store, over a connection of its own."""
    client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return FailFastStore("inner", FailFastStore("outer", PrefixStore("session", client), "failed"))


def test_keys_that_come_end_a_wait(store: TCPStore, failing: FailFastStore) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(failing.wait, ["a", "b"], LONG)
        for key in ("a", "b"):
            time.sleep(0.1)
            assert not waiting.done()
            store.set(f"session/outer/inner/{key}", "")
        waiting.result(timeout=2)


def test_a_failure_ends_a_wait_with_its_reason(store: TCPStore, failing: FailFastStore) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(failing.wait, ["a"], LONG)
        time.sleep(0.2)
        store.set("session/failed", "gen:1: it is on fire")
        with pytest.raises(SessionError, match=r"^gen:1: it is on fire$"):
            waiting.result(timeout=2)


def test_nobody_goes_on_in_a_session_that_has_failed(store: TCPStore, failing: FailFastStore) -> None:
    failing.set("a", "")
    store.set("session/failed", "no")
    with pytest.raises(SessionError, match=r"^no$"):
        failing.wait(["a"], LONG)


@pytest.mark.parametrize("fails", [True, False], ids=["with a failure key", "plain"])
def test_a_wait_in_vain_ends_at_its_deadline(store: TCPStore, failing: FailFastStore, fails: bool) -> None:
    start = time.monotonic()
    with pytest.raises(DistStoreError):
        (failing if fails else FailFastStore("plain", store)).wait(["a"], timedelta(seconds=0.5))
    assert 0.5 <= time.monotonic() - start < 2


def test_transports_make_fail_fast_stores_on_fail_fast_stores() -> None:
    """A PrefixStore on it would wait for its own keys alone."""
    kernels = Path(__file__).parents[2] / "kernels"
    users = {
        path.name
        for path in kernels.rglob("*.py")
        if "import PrefixStore" in path.read_text() or "PrefixStore," in path.read_text()
    }
    assert users == {"store.py"}
