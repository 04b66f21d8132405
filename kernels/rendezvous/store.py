"""Connections to a TCPStore on which nothing waits forever.

torch limits how long the store waits for a key, not how long a client waits for the store: connecting to whatever accepts
and says nothing, and any call to a frozen process, never return, and nothing can interrupt them. So a thread makes them.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from threading import RLock
from typing import TypeVar

from torch.distributed import DistNetworkError, Store, TCPStore

from mcore_reshard.kernels.errors import SessionError

from .deadline_thread import DeadlineThread, Overdue

# To connect, or half as many, as torch may double one. At each end torch asks the DNS for the name of the other's address:
# an answer that is lost holds the client up, or the store and all its clients, for the resolver's 5 s.
_TRIES = 6
_LOOK_S = 2.0  # to find out what is there instead of a store

T = TypeVar("T")


def store_address(store: TCPStore | str) -> str:
    """'host:port' of a store."""
    return store if isinstance(store, str) else f"{store.host}:{store.port}"


def connect_store(address: str, timeout_s: float) -> AnsweringStore:
    """A connection of one's own to the store at `address`, which must be up.

    Raises `SessionError` after `timeout_s`, and 2 s at most to see what is there instead.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit():
        raise SessionError(f"not the address of a store, 'host:port' is: {address!r}")
    one_try = timedelta(seconds=timeout_s / _TRIES)
    connect = partial(TCPStore, host, int(port), is_master=False, wait_for_workers=False, timeout=one_try)
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        caller = DeadlineThread("store")
        try:
            store = caller.call(connect, limit_s=min(left_s, 2 * one_try.total_seconds()))
        except (RuntimeError, Overdue):
            continue
        return AnsweringStore(store, address, timeout_s, caller)
    try:
        found = DeadlineThread("store").call(partial(_found, host, int(port)), limit_s=_LOOK_S)
    except Overdue:
        found = "the host does not answer"
    raise SessionError(
        f"no store answers at {address} within {timeout_s:g} s: {found}; "
        "start the TCPStore that the session is to meet at, or correct the address"
    )


class AnsweringStore(Store):
    """A connection to the store at `address`, lost once a call has waited for its answer for `timeout`.

    That is `timeout_s`, or what `set_timeout` says. A call that may wait for a key gets the time for that besides. On
    a lost connection every call raises `DistNetworkError` at once.

    torch calls it back from C++ but does not keep it alive: hold it, or a FailFastStore on it, where a PrefixStore is on it.
    """

    def __init__(self, store: TCPStore, address: str, timeout_s: float, caller: DeadlineThread) -> None:
        super().__init__()
        self._for_keys = timedelta(seconds=timeout_s)
        self.set_timeout(self._for_keys)
        store.set_timeout(self._for_keys)
        self._store = store
        self._address = address
        self._caller = caller
        self._turn = RLock()  # a thread at a time, as on the connection itself: who queues has not begun to wait
        self._lost = ""  # why, once it is

    def set(self, key: str, value: str) -> None:
        self._answer(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        return self._answer(lambda store: store.get(key), waits=self._for_keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._answer(lambda store: store.multi_get(keys), waits=self._for_keys)

    def add(self, key: str, value: int) -> int:
        return self._answer(lambda store: store.add(key, value))

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

    def _answer(self, call: Callable[[TCPStore], T], waits: timedelta = timedelta()) -> T:
        limit: timedelta = self.timeout  # type: ignore[attr-defined]  # torch's stubs have set_timeout only
        with self._turn:
            if self._caller.is_busy and not self._lost:
                self._connect_anew(limit)
            if not self._lost:
                try:
                    return self._caller.call(partial(call, self._store), limit_s=(limit + waits).total_seconds())
                except Overdue:
                    why = "its process is frozen, or its host is gone"
                    self._lost = f"it has not answered for {limit.total_seconds():g} s: {why}"
                except DistNetworkError as error:
                    self._lost = str(error)
            raise DistNetworkError(f"the store at {self._address}: {self._lost}")

    def _connect_anew(self, limit: timedelta) -> None:
        """Leave the connection to a call that a signal has interrupted: it may be waiting for a key, for minutes."""
        try:
            other = connect_store(self._address, limit.total_seconds())
        except SessionError as error:
            self._lost = str(error)
        else:
            self._store, self._caller = other._store, other._caller


def _found(host: str, port: int) -> str:
    """What is at an address where no store answers."""
    try:
        socket.create_connection((host, port), timeout=_LOOK_S).close()
    except socket.gaierror:
        return "no host has that name"
    except ConnectionRefusedError:
        return "nothing listens there"
    except TimeoutError:
        return "the host does not answer"
    except OSError as error:
        return str(error)
    return "what listens there does not talk as one; it is another service, or a frozen process"
