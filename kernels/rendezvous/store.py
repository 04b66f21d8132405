"""A rank's connection to the store of its session: keys, and who else is there.

    store = connect_store("10.0.0.1:29600", "refit", timeout_s=60.0)
    store.take_seat("gen:3", {"pid": 77})
    store.wait_any(["a/7/outcome"], 60.0)      # ends natively, without polling

The server tells every client at once when a seat changes: `seats` needs no round trip. A connection that breaks is made
again, and what was asked is asked again; the server does nothing twice. A store that does not answer for `timeout_s` is lost.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Condition, Lock, Thread, current_thread
from typing import Any
from uuid import uuid4
from weakref import WeakSet

from torch.distributed import DistNetworkError, DistStoreError, Store

from mcore_reshard.kernels.errors import SessionError, StoreRestarted
from mcore_reshard.kernels.events import log_event
from mcore_reshard.kernels.options import Options

from .frames import (
    LENGTHS,
    MAGIC,
    MAX_FRAME_BYTES,
    MAX_REQUEST_BYTES,
    FrameError,
    body_bytes,
    pack,
    unpack,
    watch_host,
)
from .polling import CAUSE_S, LOOK_S, NOTICE_S
from .seal import Sealer, find_token

_LOG = logging.getLogger("mcore_reshard")
_AGAIN_S = 0.2  # between attempts to connect
_LINGER_S = 30.0  # a session without connections is kept for at least so long, or twice the deadline
_open_stores: WeakSet[SessionStore] = WeakSet()


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place in a session."""

    name: str  # as in "gen:3"
    status: str  # here, gone (its process has ended, or its host is unreachable) or left (it said goodbye)
    facts: Mapping[str, Any]  # what the rank said of itself: pid, host, ...
    since: float  # time.time() of the last change


def store_address(store: Any) -> str:
    """'host:port' of a store: of what `serve_store` returned, or of such a text."""
    return store if isinstance(store, str) else str(store.address)


def split_address(address: str) -> tuple[str, int]:
    """'host:port' -> (host, port). Raises SessionError."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise SessionError(f"{address!r} is not the address of a store: write 'host:port', with a port of 1 to 65535")
    return host, int(port)


def connect_store(
    address: str, options: Options, *, timeout_s: float | None = None, watches: bool = False
) -> SessionStore:
    """Open the session of `options` on the store at `address`, with the token that was given.

    A connection that `watches` can read alone: it begins no session, and keeps none alive.

    Raises `SessionError` after `timeout_s` (by default that of the options), and up to CAUSE_S to see why.
    """
    split_address(address)
    session, timeout_s = options.session, options.timeout_s if timeout_s is None else timeout_s
    token = find_token(options.token, options.token_file)
    store = SessionStore(address, session, timeout_s, Sealer.of(token, session), watches)
    try:
        store._start()
    except BaseException:
        store.close()
        raise
    return store


def list_sessions(address: str, timeout_s: float) -> tuple[list[str], int]:
    """(names of a store's sessions without a token, how many sessions it has in all). Raises SessionError."""
    try:
        with socket.create_connection(split_address(address), timeout=timeout_s) as connection:
            _receive(connection, 1 << 14)
            connection.sendall(pack({"op": "stats"}))
            stats = _receive(connection, MAX_FRAME_BYTES)[0]["value"]
            return [str(name) for name in stats["names"]], int(stats["sessions"])
    except (OSError, FrameError, KeyError, TypeError, ValueError) as error:
        raise SessionError(f"no store answers at {address}: {_probe(*split_address(address))}") from error


class StoreKeys(Store):
    """Keys as torch's stores have them, and waits that end at once; what SessionStore and its views share.

    torch calls such an object from C++ but does not keep it alive: whoever gives one to torch keeps a reference.
    """

    _root: SessionStore
    _prefix: str

    @property
    def local_host(self) -> str | None:
        """The address of this host on the network that leads to the store; None while there is no connection."""
        connection = self._root._connection
        with suppress(OSError):
            return None if connection is None else str(connection.getsockname()[0]).partition("%")[0]
        return None

    def under(self, prefix: str) -> StoreView:
        """The keys that begin with `prefix/`."""
        return StoreView(self._root, f"{self._prefix}{prefix}/")

    def set(self, key: str, value: str | bytes) -> None:
        root, key = self._root, self._prefix + key
        root._ask({"op": "set", "keys": [key]}, [root._sealer.seal(key, root._sender, _as_bytes(value))])

    def set_soon(self, values: Mapping[str, str]) -> None:
        """Set keys without waiting for the store: what this connection asks for later comes after it."""
        root, full = self._root, [self._prefix + key for key in values]
        sealed = [
            root._sealer.seal(key, root._sender, value.encode())
            for key, value in zip(full, values.values(), strict=True)
        ]
        root._send({"op": "set", "keys": full}, sealed, is_awaited=False)

    def delete_soon(self, prefixes: Sequence[str], keys: Sequence[str] = ()) -> None:
        """Delete keys, and those that begin with prefixes, without waiting for the store."""
        for prefix in prefixes:
            self._root._send({"op": "delete_prefix", "prefix": self._prefix + prefix}, is_awaited=False)
        if keys:
            self._root._send({"op": "delete", "keys": [self._prefix + key for key in keys]}, is_awaited=False)

    def peek(self, key: str, *, writer: str | None = None) -> bytes | None:
        """The value of a key; None if it does not exist."""
        root, full = self._root, self._prefix + key
        _, blobs = root._ask({"op": "get", "keys": [full]})
        return root._sealer.open(full, blobs[0], writer) if blobs else None

    def get(self, key: str, *, writer: str | None = None) -> bytes:
        """The value of a key, once it exists. `writer`: the seat that must have written it. Raises DistStoreError."""
        (value,) = self.multi_get([key], writers=[writer])
        return value

    def multi_get(self, keys: Sequence[str], *, writers: Sequence[str | None] = ()) -> list[bytes]:
        """The values of keys, once all exist; raises DistStoreError if one does not in time."""
        root, full = self._root, [self._prefix + key for key in keys]
        header, blobs = root._ask({"op": "get", "keys": full})
        if len(blobs) != len(full):
            self.wait(keys)
            header, blobs = root._ask({"op": "get", "keys": full})
        if header["missing"]:
            raise DistStoreError(f"{header['missing'][0]} was deleted")
        expected = [*writers, *[None] * (len(full) - len(writers))]
        return [root._sealer.open(*each) for each in zip(full, blobs, expected, strict=True)]

    def add(self, key: str, value: int) -> int:
        header, _ = self._root._ask({"op": "add", "keys": [self._prefix + key], "amount": value})
        return int(header["value"])

    def check(self, keys: Sequence[str]) -> bool:
        full = [self._prefix + key for key in keys]
        return not self._root._ask({"op": "check", "keys": full})[0]["missing"]

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Those of `keys` that do not exist."""
        missing = self._root._ask({"op": "check", "keys": [self._prefix + key for key in keys]})[0]["missing"]
        return [key.removeprefix(self._prefix) for key in missing]

    def compare_set(self, key: str, expected_value: str, desired_value: str | bytes) -> bytes:
        """Set a key that does not exist; the value that stands. Only an empty `expected_value` is supported."""
        if expected_value:
            raise NotImplementedError("a key is set once, by whoever is first")
        root, key = self._root, self._prefix + key
        sealed = root._sealer.seal(key, root._sender, _as_bytes(desired_value))
        header, others = root._ask({"op": "compare_set", "keys": [key]}, [sealed])
        return _as_bytes(desired_value) if header["stands"] else root._sealer.open(key, others[0], None)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        """Return once all keys exist; raises DistStoreError when the time is up."""
        limit_s = (self.timeout if timeout is None else timeout).total_seconds()  # type: ignore[attr-defined]
        if not self.wait_all(keys, limit_s):
            raise DistStoreError(f"waited {limit_s:g} s for {', '.join(keys)}")

    def wait_all(self, keys: Sequence[str], timeout_s: float, look: Callable[[], Any] | None = None) -> bool:
        """Whether all keys exist within `timeout_s`. `look` is as for `wait_any`."""
        full = [self._prefix + key for key in keys]
        return not full or self._root._await_keys(full, True, timeout_s, look) is not None

    def wait_any(self, keys: Sequence[str], timeout_s: float, look: Callable[[], Any] | None = None) -> list[str]:
        """The keys that exist, once one does; none after `timeout_s`.

        `look()` is called whenever a seat has changed, and every LOOK_S; it raises to end the wait.
        """
        found = self._root._await_keys([self._prefix + key for key in keys], False, timeout_s, look) or []
        return [key.removeprefix(self._prefix) for key in found]

    def delete_key(self, key: str) -> bool:
        return bool(self._root._ask({"op": "delete", "keys": [self._prefix + key]})[0]["value"])

    deleteKey = delete_key  # as torch calls it from C++

    def delete_prefix(self, prefix: str) -> int:
        """Delete all keys that begin with `prefix`; how many there were."""
        return int(self._root._ask({"op": "delete_prefix", "prefix": self._prefix + prefix})[0]["value"])

    def reopen(self) -> None:
        """Connect anew with a store that was lost or started anew. Raises SessionError where none answers."""
        self._root.reopen()

    @property
    def described(self) -> str:
        return f"the store at {self._root.address}"

    def silence(self, since: float) -> str:
        return self._root.silence(since)

    def keys(self, prefix: str = "") -> list[str]:
        """All keys that begin with `prefix`."""
        found = self._root._ask({"op": "list", "prefix": self._prefix + prefix})[0]["keys"]
        return [key.removeprefix(self._prefix) for key in found]


class StoreView(StoreKeys):
    """The keys of a session that begin with a prefix."""

    def __init__(self, root: SessionStore, prefix: str) -> None:
        super().__init__()
        self._root, self._prefix = root, prefix
        self.set_timeout(timedelta(seconds=root.timeout_s))

    @property
    def seats(self) -> dict[str, Seat]:
        """All seats of the session, as the server last said."""
        return self._root.seats


class FailFastStore(StoreView):
    """The keys under `name` of a view, on which a wait ends at once when the session has failed.

    A rank that fails writes why under the key `failure` of `store`. From then on every wait raises, here and on each
    FailFastStore made on this one. On a plain view without `failure` it is a StoreView. `look` is as for `wait_any`.
    """

    def __init__(
        self, name: str, store: StoreKeys, failure: str | None = None, look: Callable[[], Any] | None = None
    ) -> None:
        super().__init__(store._root, f"{store._prefix}{name}/")
        self._look: Callable[[], Any] | None = getattr(store, "_look", None) if look is None else look
        self._failure: str | None = getattr(store, "_failure", None) if failure is None else store._prefix + failure

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        """Raises `SessionError` with the reason of a failure, `DistStoreError` when the time is up."""
        if self._failure is None:
            super().wait(keys, timeout)
            return
        root, left = self._root, [self._prefix + key for key in keys]
        limit_s = (self.timeout if timeout is None else timeout).total_seconds()  # type: ignore[attr-defined]
        deadline = time.monotonic() + limit_s
        while left:  # one key after another, or the failure
            found = root._await_keys([left[0], self._failure], False, deadline - time.monotonic(), self._look)
            if found is None:
                raise DistStoreError(f"waited {limit_s:g} s for {', '.join(keys)}")
            if self._failure in found:
                raise SessionError(root.get(self._failure).decode(errors="replace"))
            left = left[1:]

    def raise_if_failed(self) -> None:
        """Raise SessionError with the reason if a rank has failed, and what `look` raises."""
        if self._look is not None:
            self._look()
        root = self._root
        if self._failure is not None and root.check([self._failure]):
            raise SessionError(root.get(self._failure).decode(errors="replace"))

    def wait_all(self, keys: Sequence[str], timeout_s: float, look: Callable[[], Any] | None = None) -> bool:
        if self._failure is None:
            return super().wait_all(keys, timeout_s, look)
        try:
            self.wait(keys, timedelta(seconds=timeout_s))
        except DistStoreError:
            return False
        return True


@dataclass
class _Request:
    """What was asked, and not answered yet."""

    frame: bytes
    is_awaited: bool = True
    answer: tuple[dict[str, Any], list[bytes]] | None = None


class SessionStore(StoreKeys):
    """The keys and seats of one session. `connect_store` makes it; any thread may use it."""

    def __init__(self, address: str, session: str, timeout_s: float, sealer: Sealer, watches: bool = False) -> None:
        super().__init__()
        self._root, self._prefix = self, ""
        self._watches = watches
        self.address, self.session, self.timeout_s = address, session, timeout_s
        self.set_timeout(timedelta(seconds=timeout_s))
        self._sealer = sealer
        self._client = uuid4().hex
        self._sender = ""  # the seat that this client has
        self._facts: Mapping[str, Any] = {}
        self._seats: dict[str, Seat] = {}
        self._changes = 0  # of seats, counted
        self._listeners: list[Callable[[], Any]] = []
        self._changed = Condition()
        self._sending = Lock()  # a frame at a time
        self._requests: dict[int, _Request] = {}
        self._number = 0
        self._connection: socket.socket | None = None
        self._listener: Thread | None = None
        self._instance = ""  # of the server
        self._heard = self._pinged = (
            0.0  # time.monotonic() of the server's last word, and of the last time it was asked for one
        )
        self._lost = ""  # why no call can succeed any more
        self._restarted = False
        self._closed = False
        self._pid = os.getpid()
        self._silences: list[tuple[float, float]] = []  # when answers came late, and after how many seconds
        self.reconnects = 0

    # --- seats -----------------------------------------------------------------------------------------------------

    @property
    def seats(self) -> dict[str, Seat]:
        """All seats that were ever taken in this session, as the server last said."""
        return self._seats

    @property
    def instance(self) -> str:
        """Of the server: one that starts anew is another one."""
        return self._instance

    def take_seat(self, name: str, facts: Mapping[str, Any]) -> None:
        """Be `name` in this session. Raises SessionError while another live process is."""
        while True:
            header, _ = self._ask({"op": "sit", "seat": name, "facts": {**facts}})
            if not header.get("held"):
                break
            time.sleep(_AGAIN_S)  # its holder's connection has just ended: soon it counts as gone, or comes back
        self._sender, self._facts = name, facts
        self._note_seats(header["seats"])

    def leave_seat(self) -> None:
        """Say goodbye: others see that this rank has left, and did not fail."""
        self._ask({"op": "rise"})

    def silence(self, since: float) -> str:
        """What an error says of a server that was slow to answer since then (time.monotonic()); "" if it was not."""
        longest_s = max((seconds for at, seconds in self._silences if at >= since), default=0.0)
        return f"; {self.described} was silent for {longest_s:.1f} s meanwhile" if longest_s else ""

    def leave_seat_soon(self) -> None:
        """As `leave_seat`, but wait for no answer: for a process that ends."""
        self._send({"op": "rise"}, asks=False)

    def on_seats(self, listener: Callable[[], Any]) -> None:
        """Call `listener()` on another thread whenever a seat has changed."""
        self._listeners.append(listener)

    def stats(self) -> dict[str, Any]:
        """What the server holds: sessions, connections, keys, bytes; session_keys and session_bytes of this one."""
        value: dict[str, Any] = self._ask({"op": "stats"})[0]["value"]
        return value

    def post(self, key: str, value: str | bytes) -> None:
        """As `set`, without waiting for the answer: for news that may be lost with the connection."""
        sealed = self._sealer.seal(key, self._sender, _as_bytes(value))
        self._requests.pop(self._send({"op": "set", "keys": [key]}, [sealed]), None)

    # --- life ------------------------------------------------------------------------------------------------------

    @property
    def needs_reopening(self) -> bool:
        """Whether no call can succeed before `reopen`."""
        return bool(self._lost or self._restarted) and not self._closed

    def reopen(self) -> None:
        """Go on after the store was lost or started anew, perhaps empty; this client takes its seat again.

        Raises SessionError after `timeout_s` where no store answers.
        """
        with self._changed:
            lost, self._lost, self._restarted = self._lost, "", False
            self._pinged = 0.0
        connection = self._connection
        if self._listener is not None and self._listener.is_alive():
            if connection is not None:
                with suppress(OSError):  # what was frozen has perhaps been replaced: the listener connects anew
                    connection.shutdown(socket.SHUT_RDWR)
        else:
            try:
                self._start()
            except SessionError:
                self._lost = lost
                raise
            with self._changed:
                self._restarted = False
        if self._sender:
            self.take_seat(self._sender, self._facts)

    def close(self) -> None:
        """End the connection. May be called twice."""
        with self._changed:
            self._closed = True
            self._lost = self._lost or "this rank has closed its connection"
            self._changed.notify_all()
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        _open_stores.discard(self)

    def __enter__(self) -> SessionStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        """Make the first connection, then listen on a thread of its own."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                self._connect(deadline)
                break
            except (OSError, FrameError):
                if time.monotonic() + _AGAIN_S >= deadline:
                    why = _probe(*split_address(self.address))
                    raise SessionError(
                        f"no store answers at {self.address} within {self.timeout_s:g} s: {why}; "
                        "start one with `mcore-reshard store`, or correct the address"
                    ) from None
                time.sleep(_AGAIN_S)
        _open_stores.add(self)
        self._listener = Thread(target=_listen, args=(self,), name="store", daemon=True)
        self._listener.start()

    def _connect(self, deadline: float) -> None:
        """Open the session on a new connection. Raises OSError and FrameError; SessionError where the server refuses."""
        host, port = split_address(self.address)
        connection = socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic()))
        try:
            limit_us = int(1e6 * self.timeout_s)  # of one send: a frozen server reads nothing
            limit = struct.pack("@ll", limit_us // 1_000_000, limit_us % 1_000_000)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            greeting, _ = _receive(connection, 1 << 14)
            if greeting.get("magic") != MAGIC:
                raise FrameError("what listens there does not talk as a store of mcore-reshard")
            linger_s = max(_LINGER_S, 2 * self.timeout_s)
            opening = {
                "session": self.session,
                "client": self._client,
                "linger_s": linger_s,
                "silence_s": self.timeout_s,
                "watches": self._watches,
            }
            connection.sendall(pack({"op": "open", **opening, **self._sealer.proof(str(greeting["nonce"]))}))
            opened, _ = _receive(connection, MAX_FRAME_BYTES)
            if "error" in opened:
                raise SessionError(str(opened["error"]))
            connection.settimeout(None)
            watch_host(connection, self.timeout_s)
        except BaseException:
            connection.close()
            raise
        with self._sending:
            with self._changed:
                restarted = bool(self._instance) and self._instance != opened["opened"]
                self._instance = str(opened["opened"])
                self._heard = time.monotonic()
                self._restarted = self._restarted or restarted
                self._connection = connection
                if restarted:
                    self._seats = {}
                again = [] if restarted else [each.frame for each in self._requests.values() if each.answer is None]
                self._changed.notify_all()
            for frame in again:
                connection.sendall(frame)
        self._note_seats(opened["seats"])

    def _note_seats(self, said: Mapping[str, Mapping[str, Any]]) -> None:
        with self._changed:
            seats = {
                name: Seat(name, str(seat["status"]), dict(seat["facts"]), float(seat["since"]))
                for name, seat in said.items()
            }
            self._seats = {**self._seats, **seats}
            self._changes += 1
            self._changed.notify_all()
        for listener in self._listeners:
            try:
                listener()
            except Exception:
                _LOG.exception("a listener to seats failed")

    def _hear(self, header: dict[str, Any], blobs: list[bytes]) -> None:
        self._heard = time.monotonic()
        if header.get("id"):
            with self._changed:
                if (request := self._requests.get(header["id"])) is not None and not request.is_awaited:
                    del self._requests[header["id"]]
                elif request is not None:
                    request.answer = header, blobs
                    self._changed.notify_all()
        elif "seats" in header:
            self._note_seats(header["seats"])
        elif "error" in header:
            raise FrameError(header["error"])

    def _reconnect(self, error: Exception) -> bool:
        """Connect anew; False once this store is closed or lost."""
        start = time.monotonic()
        deadline, why = start + self.timeout_s, str(error)
        self.reconnects += 1
        about: dict[str, Any] = {"rank": self._sender or None, "session": self.session, "store": self.address}
        log_event("store_connection_lost", logging.WARNING, **about, cause=why)
        while not self._closed:
            try:
                self._connect(deadline)
                log_event("store_reconnected", **about, seconds=time.monotonic() - start)
                return True
            except SessionError as refused:
                why = str(refused)
                break
            except (OSError, FrameError) as failed:
                why = str(failed)
                if time.monotonic() > deadline:
                    break
            time.sleep(_AGAIN_S)
        with self._changed:
            self._lost = (
                self._lost or f"the connection broke, and was not made again within {self.timeout_s:g} s: {why}"
            )
            self._changed.notify_all()
        if not self._closed:
            log_event("store_lost", logging.ERROR, **about, cause=why)
        return False

    # --- requests --------------------------------------------------------------------------------------------------

    def _ask(self, header: dict[str, Any], blobs: Sequence[bytes] = ()) -> tuple[dict[str, Any], list[bytes]]:
        """Raises DistNetworkError if no answer comes within `timeout_s`, SessionError where the server refuses."""
        start = time.monotonic()
        number = self._send(header, blobs)
        try:
            if not self._await_answer(number, time.monotonic() + self.timeout_s, None):
                self._lose()
            return self._taken(number)
        finally:
            self._requests.pop(number, None)
            if (now := time.monotonic()) - start > NOTICE_S:
                self._silences = [*self._silences[-3:], (now, now - start)]

    def _await_keys(
        self, keys: Sequence[str], needs_all: bool, timeout_s: float, look: Callable[[], Any] | None
    ) -> list[str] | None:
        number = self._send({"op": "wait", "keys": [*keys], "all": needs_all})
        answered = False
        try:
            answered = self._await_answer(number, time.monotonic() + max(0.0, timeout_s), look)
            if answered:
                return [str(key) for key in self._taken(number)[0]["keys"]]
        finally:
            self._requests.pop(number, None)
            if not answered:
                with suppress(DistNetworkError, StoreRestarted):
                    self._ask({"op": "cancel", "wait": number})
        # The cancellation has been answered: the store is alive.
        if self._lost or self._restarted:
            raise self._error()
        return None

    def _send(
        self, header: dict[str, Any], blobs: Sequence[bytes] = (), asks: bool = True, is_awaited: bool = True
    ) -> int:
        with self._changed:
            if self._lost or self._restarted or self._pid != os.getpid():
                raise self._error()
            self._number += 1
            number = self._number
            oldest = min(self._requests, default=number)  # the server may forget its answers to those before
            try:
                frame = pack({"id": number, "oldest": oldest, **header}, blobs, MAX_REQUEST_BYTES)
            except FrameError as error:
                raise SessionError(f"{self.described} was not asked: {error}") from error
            request = _Request(frame, is_awaited)
            if asks:
                self._requests[number] = request
            connection = self._connection
        if connection is not None:
            with suppress(OSError), self._sending:  # the listener connects anew, and sends it again
                try:
                    connection.sendall(request.frame)
                except BaseException:  # half a frame may be on its way
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
                    raise
        return number

    def _await_answer(self, number: int, deadline: float, look: Callable[[], Any] | None) -> bool:
        """Whether an answer came in time."""
        looked, changes = time.monotonic(), self._changes
        turned = looked
        while True:
            now = time.monotonic()
            self._watch(slept_s=now - turned)
            turned = now
            with self._changed:
                request = self._requests[number]
                if request.answer is not None:
                    return True
                if self._lost or self._restarted:
                    raise self._error()
                now = time.monotonic()
                if now >= deadline:
                    return False
                if look is None or (changes == self._changes and now - looked < LOOK_S):
                    self._changed.wait(min(deadline - now, LOOK_S))
                    if request.answer is not None:
                        return True
            if look is not None and (changes != self._changes or time.monotonic() - looked >= LOOK_S):
                looked, changes = time.monotonic(), self._changes
                look()

    def _watch(self, slept_s: float) -> None:
        """Ask a server that has been quiet for a word; it is lost if none comes within `timeout_s`."""
        now = time.monotonic()
        if slept_s > 4 * LOOK_S:  # this process was frozen: what the server said meanwhile is still to be read
            self._pinged = now
        if now - self._heard < self.timeout_s / 2 or self._connection is None or self._lost:
            return
        if self._pinged < self._heard:
            self._pinged = now
            self._send({"op": "check", "keys": []}, asks=False)
        elif now - self._pinged > self.timeout_s:
            with self._changed:
                self._lost = self._lost or self._frozen
                self._changed.notify_all()

    @property
    def _frozen(self) -> str:
        return f"it has not answered for {self.timeout_s:g} s: its process is frozen, or its host is gone"

    def _taken(self, number: int) -> tuple[dict[str, Any], list[bytes]]:
        answer = self._requests[number].answer
        assert answer is not None
        if "error" in answer[0]:
            raise SessionError(str(answer[0]["error"]))
        return answer

    def _lose(self) -> None:
        with self._changed:
            self._lost = self._lost or self._frozen
            self._changed.notify_all()
        raise self._error()

    def _error(self) -> Exception:
        where = self.described
        if self._restarted and not self._lost:
            return StoreRestarted(f"{where} was started anew, and what the ranks had said there is gone")
        return DistNetworkError(f"{where}: {self._lost or 'a forked process has no connection to it'}")


def _listen(store: SessionStore) -> None:
    """Read what the server says, until the store is closed or lost."""
    assert current_thread().daemon
    while not store._closed:
        connection = store._connection
        if connection is None:
            return
        try:
            while True:
                store._hear(*_receive(connection, MAX_FRAME_BYTES))
        except (OSError, EOFError, FrameError) as error:
            connection.close()
            if store._closed or not store._reconnect(error):
                return


def _receive(connection: socket.socket, limit: int) -> tuple[dict[str, Any], list[bytes]]:
    header_bytes, body = body_bytes(_read(connection, LENGTHS.size), limit)
    return unpack(header_bytes, _read(connection, body))


def _read(connection: socket.socket, count: int) -> bytes:
    if count <= 1 << 16:
        content = connection.recv(count)
        if len(content) == count:
            return content
    else:
        content = b""
    buffer = bytearray(content)
    while len(buffer) < count:
        more = connection.recv(min(count - len(buffer), 1 << 20))
        if not more:
            raise ConnectionResetError("the store has closed the connection")
        buffer += more
    return bytes(buffer)


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _probe(host: str, port: int) -> str:
    """Say what answers at an address in place of a store."""
    causes = {socket.gaierror: "no host has that name", ConnectionRefusedError: "nothing listens there"}
    silent = "the host does not answer"
    try:
        socket.create_connection((host, port), timeout=CAUSE_S).close()
    except TimeoutError:
        return silent
    except OSError as error:
        return causes.get(type(error), str(error))
    return "what listens there is no store of mcore-reshard, or a frozen one"


def _close_in_child() -> None:
    """A forked process must not hold a connection open that says that its parent lives."""
    for store in list(_open_stores):
        connection = store._connection
        if connection is not None:
            with suppress(OSError):
                os.close(connection.detach())


os.register_at_fork(after_in_child=_close_in_child)
