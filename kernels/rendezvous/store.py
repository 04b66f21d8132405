"""A rank's access to the store of its session: keys, and who else is there.

    store = connect_store("10.0.0.1:29600", Options(session="refit"))
    store.take_seat("gen:3", {"pid": 77})
    store.wait_any(["a/7/outcome"], 60.0)      # ends natively, without polling

`store_keys` has the keys, `store_connection` the requests, `store_opening` what is said first.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.options import Options

from .address import probe, split_address
from .frames import MAX_FRAME_BYTES, FrameError, pack, receive
from .polling import NOTICE_S
from .seal import Sealer, find_token
from .store_connection import StoreConnection
from .store_keys import StoreKeys


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
        store.start()
    except BaseException:
        store.close()
        raise
    return store


def list_sessions(address: str, timeout_s: float) -> tuple[list[str], int]:
    """(names of a store's sessions without a token, how many sessions it has in all). Raises SessionError."""
    try:
        with socket.create_connection(split_address(address), timeout=timeout_s) as connection:
            receive(connection, 1 << 14)
            connection.sendall(pack({"op": "stats"}))
            stats = receive(connection, MAX_FRAME_BYTES)[0]["value"]
            return [str(name) for name in stats["names"]], int(stats["sessions"])
    except (OSError, FrameError, KeyError, TypeError, ValueError) as error:
        raise SessionError(f"no store answers at {address}: {probe(*split_address(address))}") from error


class SessionStore(StoreConnection, StoreKeys):
    """The keys and seats of one session. `connect_store` makes it; any thread may use it."""

    def __init__(self, address: str, session: str, timeout_s: float, sealer: Sealer, watches: bool = False) -> None:
        StoreKeys.__init__(self)
        StoreConnection.__init__(self, address, session, timeout_s, sealer, watches)
        self._root, self._prefix = self, ""
        self.set_timeout(timedelta(seconds=timeout_s))

    def leave_seat(self) -> None:
        """Say goodbye: others see that this rank has left, and did not fail. A silent store is not waited for."""
        self.ask({"op": "rise"}, limit_s=min(NOTICE_S, self.timeout_s))

    def leave_seat_soon(self) -> None:
        """As `leave_seat`, but wait for nothing: for a process that ends."""
        self.send_at_once({"op": "rise"})

    def on_seats(self, listener: Callable[[], Any]) -> None:
        """Call `listener()` on another thread whenever a seat has changed."""
        self._listeners.append(listener)

    def stats(self) -> dict[str, Any]:
        """What the server holds: sessions, connections, keys, bytes; session_keys and session_bytes of this one."""
        value: dict[str, Any] = self.ask({"op": "stats"})[0]["value"]
        return value

    def __enter__(self) -> SessionStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
