"""A wait on a FailFastStore is for its keys or for the session's failure, whichever comes first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from helpers.ranks import store_of, store_process
from torch.distributed import DistStoreError

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.rendezvous.store import SessionStore
from mcore_reshard.kernels.rendezvous.store_keys import FailFastStore

LONG = timedelta(seconds=20)


@pytest.fixture
def address() -> Iterator[str]:
    with store_process() as process:
        yield process.address


@pytest.fixture
def store(address: str) -> SessionStore:
    return store_of(address)


@pytest.fixture
def failing(address: str) -> FailFastStore:
    """A store on a store, over a connection of its own."""
    return FailFastStore("inner", FailFastStore("outer", store_of(address).under("session"), "failed"))


def test_keys_that_come_end_a_wait(store: SessionStore, failing: FailFastStore) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(failing.wait, ["a", "b"], LONG)
        for key in ("a", "b"):
            time.sleep(0.1)
            assert not waiting.done()
            store.set(f"session/outer/inner/{key}", "")
        waiting.result(timeout=2)


def test_a_failure_ends_a_wait_with_its_reason(store: SessionStore, failing: FailFastStore) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(failing.wait, ["a"], LONG)
        time.sleep(0.2)
        store.set("session/failed", "gen:1: it is on fire")
        with pytest.raises(SessionError, match=r"^gen:1: it is on fire$"):
            waiting.result(timeout=2)


def test_nobody_goes_on_in_a_session_that_has_failed(store: SessionStore, failing: FailFastStore) -> None:
    failing.set("a", "")
    store.set("session/failed", "no")
    with pytest.raises(SessionError, match=r"^no$"):
        failing.wait(["a"], LONG)


@pytest.mark.parametrize("fails", [True, False], ids=["with a failure key", "plain"])
def test_a_wait_in_vain_ends_at_its_deadline(store: SessionStore, failing: FailFastStore, fails: bool) -> None:
    start = time.monotonic()
    with pytest.raises(DistStoreError):
        (failing if fails else FailFastStore("plain", store)).wait(["a"], timedelta(seconds=0.5))
    assert 0.5 <= time.monotonic() - start < 2
