"""Connections to a TCPStore on which nothing waits forever.

torch limits how long the store waits for a key, not how long a client waits for the store. A connection to a silent
service never returns, nor does any call to a frozen process. So a thread makes them, and is left behind at the deadline.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as Overdue
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import RLock
from typing import TypeVar

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore

from mcore_reshard.kernels.errors import SessionError

from .polling import ATTEMPTS, CAUSE_S, COARSE_SHARE, DeadlineThread, EventPoller

T = TypeVar("T")

_SILENT_HOST = "the host does not answer"


def store_address(store: TCPStore | str) -> str:
    """'host:port' of a store."""
    return store if isinstance(store, str) else f"{store.host}:{store.port}"


def split_address(address: str) -> tuple[str, int]:
    """'host:port' -> (host, port). Raises SessionError."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise SessionError(f"{address!r} is not the address of a store: write 'host:port', with a port of 1 to 65535")
    return host, int(port)


def connect_store(address: str, timeout_s: float) -> AnsweringStore:
    """A connection to the store at `address`. Raises `SessionError` after `timeout_s`, and up to CAUSE_S to see why."""
    host, port = split_address(address)
    attempt = timedelta(seconds=timeout_s / ATTEMPTS)
    connect = partial(TCPStore, host, port, is_master=False, wait_for_workers=False, timeout=attempt)
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        thread = DeadlineThread("store")
        with suppress(RuntimeError, Overdue):
            store = thread.call(connect, limit_s=min(left_s, 2 * attempt.total_seconds()))
            return AnsweringStore(store, address, timeout_s, thread)
    try:
        instead = DeadlineThread("store").call(partial(_probe, host, port), limit_s=CAUSE_S)
    except Overdue:
        instead = _SILENT_HOST
    raise SessionError(
        f"no store answers at {address} within {timeout_s:g} s: {instead}; "
        "start the TCPStore that the session is to meet at, or correct the address"
    )


class AnsweringStore(Store):
    """A connection to the store at `address`. It is lost once the store has not answered a call for `timeout_s`.

    A call that may wait for a key gets the time for the key on top. On a lost connection every call raises
    `DistNetworkError` at once. torch calls this object from C++ but does not keep it alive. Whoever puts a PrefixStore
    on it must keep a reference to it, or to a FailFastStore on it.
    """

    def __init__(self, store: TCPStore, address: str, timeout_s: float, thread: DeadlineThread) -> None:
        super().__init__()
        self._for_keys = timedelta(seconds=timeout_s)
        self.set_timeout(self._for_keys)
        store.set_timeout(self._for_keys)
        self._store = store
        self._address = address
        self._thread = thread
        self._turn = RLock()  # one call at a time: the time of a call in the queue does not run yet
        self._lost = ""  # why it is lost

    def set(self, key: str, value: str) -> None:
        self._answer(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        return self._answer(lambda store: store.get(key), waits=self._for_keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._answer(lambda store: store.multi_get(keys), waits=self._for_keys)

    def add(self, key: str, value: int) -> int:
        return self._answer(lambda store: store.add(key, value), counts=key)

    def check(self, keys: list[str]) -> bool:
        return self._answer(lambda store: store.check(keys))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self._answer(lambda store: store.compare_set(key, expected_value, desired_value))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        waits = self._for_keys if timeout is None else timeout
        self._answer(lambda store: store.wait(keys, waits), waits=waits)

    def delete_key(self, key: str) -> bool:
        return self._answer(lambda store: store.delete_key(key))

    deleteKey = delete_key  # as torch calls it from C++

    def _answer(self, call: Callable[[TCPStore], T], waits: timedelta = timedelta(), counts: str = "") -> T:
        limit: timedelta = self.timeout  # type: ignore[attr-defined]  # torch's stubs have set_timeout only
        with self._turn:
            if self._thread.is_busy and not self._lost:
                self._connect_anew(limit)
            if not self._lost:
                try:
                    return self._thread.call(partial(call, self._store), limit_s=(limit + waits).total_seconds())
                except Overdue:
                    why = "its process is frozen, or its host is gone"
                    self._lost = f"it has not answered for {limit.total_seconds():g} s: {why}"
                except DistNetworkError as error:
                    self._lost = str(error) + (f"; it hangs up where {counts!r} holds no number" if counts else "")
            raise DistNetworkError(f"the store at {self._address}: {self._lost}")

    def _connect_anew(self, limit: timedelta) -> None:
        """After a signal has interrupted a call: that call may still wait for a key, for minutes."""
        try:
            other = connect_store(self._address, limit.total_seconds())
        except SessionError as error:
            self._lost = str(error)
        else:
            self._store, self._thread = other._store, other._thread


class FailFastStore(PrefixStore):
    """The keys under `name` of a store, on which a wait ends at once when the session has failed.

    A rank that fails writes why under the key `failure` of `store`. From then on every `wait` raises, here and on each
    FailFastStore made on this one; C++ code does not see this `wait`. On a plain store without `failure` it is a PrefixStore.
    """

    def __init__(self, name: str, store: Store, failure: str | None = None) -> None:
        super().__init__(name, store)
        self._store = store  # torch calls one that is written in Python, but does not keep it alive
        self._failure: tuple[Store, str] | None = getattr(store, "_failure", None)
        if failure is not None:
            self._failure = store, failure

    def wait(self, keys: list[str], timeout: timedelta) -> None:  # type: ignore[override]  # torch has more ways to call it
        """Raises `SessionError` with the reason of a failure, `DistStoreError` when the time is up."""
        if self._failure is None:
            super().wait(keys, timeout)
            return
        store, failure = self._failure

        def has_come() -> bool:  # a native wait cannot be for one key or another, and logs when it ends in vain
            came: bool = self.check(keys)
            if store.check([failure]):
                raise SessionError(store.get(failure).decode(errors="replace"))
            return came

        if not EventPoller(timeout.total_seconds(), share=COARSE_SHARE).until(has_come):
            raise DistStoreError(f"waited {timeout.total_seconds():g} s for {', '.join(keys)}")


def _probe(host: str, port: int) -> str:
    """Say what answers at an address in place of a store."""
    causes = {socket.gaierror: "no host has that name", ConnectionRefusedError: "nothing listens there"}
    try:
        socket.create_connection((host, port), timeout=CAUSE_S).close()
    except TimeoutError:
        return _SILENT_HOST
    except OSError as error:
        return causes.get(type(error), str(error))
    return "what listens there does not talk as one; it is another service, or a frozen process"
