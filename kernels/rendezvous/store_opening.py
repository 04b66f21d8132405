"""How a connection opens a session on its store: the greeting, the proof of the token, and the seats that are taken."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_reshard.kernels.errors import SessionError

from .address import split_address
from .frames import MAGIC, MAX_FRAME_BYTES, FrameError, pack, receive, watch_host
from .seal import Sealer

_LINGER_S = 30.0  # a session without connections is kept for at least so long, or twice the deadline


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place in a session."""

    name: str  # as in "gen:3"
    status: str  # here, gone (its process has ended, or its host is unreachable) or left (it said goodbye)
    facts: Mapping[str, Any]  # what the rank said of itself: pid, host, ...
    since: float  # time.time() of the last change

    @classmethod
    def from_json(cls, name: str, said: Mapping[str, Any]) -> Seat:
        return cls(name, str(said["status"]), dict(said["facts"]), float(said["since"]))


@dataclass(frozen=True, slots=True)
class Opening:
    """What a client says first."""

    session: str
    client: str
    timeout_s: float
    watches: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "session": self.session,
            "client": self.client,
            "linger_s": max(_LINGER_S, 2 * self.timeout_s),
            "silence_s": self.timeout_s,
            "watches": self.watches,
        }


def open_session(
    address: str, opening: Opening, sealer: Sealer, deadline: float
) -> tuple[socket.socket, dict[str, Any]]:
    """A new connection, and what the store answered. Raises OSError and FrameError; SessionError where it refuses."""
    host, port = split_address(address)
    connection = socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic()))
    try:
        limit_us = int(1e6 * opening.timeout_s)  # of one send: a frozen server reads nothing
        limit = struct.pack("@ll", limit_us // 1_000_000, limit_us % 1_000_000)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        greeting, _ = receive(connection, 1 << 14)
        if greeting.get("magic") != MAGIC:
            raise FrameError("what listens there does not talk as a store of mcore-reshard")
        proof = sealer.proof(str(greeting["nonce"]))
        connection.sendall(pack({"op": "open", **opening.to_json(), **proof}))
        opened, _ = receive(connection, MAX_FRAME_BYTES)
        if "error" in opened:
            raise SessionError(str(opened["error"]))
        connection.settimeout(None)
        watch_host(connection, opening.timeout_s)
    except BaseException:
        connection.close()
        raise
    return connection, opened
