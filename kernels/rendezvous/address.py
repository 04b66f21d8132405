"""Addresses of stores, 'host:port'."""

from __future__ import annotations

import socket
from typing import Any

from mcore_reshard.kernels.errors import SessionError

from .polling import CAUSE_S


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


def probe(host: str, port: int) -> str:
    """What answers at an address in place of a store, in words."""
    causes = {socket.gaierror: "no host has that name", ConnectionRefusedError: "nothing listens there"}
    silent = "the host does not answer"
    try:
        socket.create_connection((host, port), timeout=CAUSE_S).close()
    except TimeoutError:
        return silent
    except OSError as error:
        return causes.get(type(error), str(error))
    return "what listens there is no store of mcore-reshard, or a frozen one"
