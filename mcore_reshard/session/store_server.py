"""The store where the ranks of both worlds meet: serve one, or use the one that answers already.

A store must stay up until all ranks have left the session: `close` of an endpoint says how long that takes.
"""

from __future__ import annotations

import socket
from uuid import uuid4

from torch.distributed import TCPStore

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.rendezvous.store import connect_store, split_address

_PROBE_S = 2.0  # limit for a TCP connection to open; the session's own deadline limits calls to a store
_IDENTITY = "mcore-reshard/store"


def serve_store(port: int, host: str | None = None) -> TCPStore:
    """Serve a store at one address of this machine, or at all if `host` is None, while the caller keeps the result.

    `port` 0 takes a free port. Raises SessionError where the port is taken or the address is not this machine's.
    """
    try:
        listening = _listen(host, port)
    except (OSError, OverflowError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).partition(" (")[0].lower()
        raise SessionError(f"cannot serve a store at {host or 'any address'}, port {port}: {reason}") from error
    port = listening.getsockname()[1]
    store = TCPStore(
        host or "localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    store.set(_IDENTITY, uuid4().hex)
    return store


def start_store_if_absent(address: str, timeout_s: float) -> TCPStore | None:
    """Serve a store at `address` ("host:port") where nothing listens; None where a store answers already.

    Raises SessionError where something else listens, and where `address` does not lead to this host.
    """
    host, port = split_address(address)
    if _listens(host, port):
        connect_store(address, timeout_s)
        return None
    store = serve_store(port)
    try:
        if _listens(host, port):
            client = connect_store(address, timeout_s)
            if client.check([_IDENTITY]) and client.get(_IDENTITY) == store.get(_IDENTITY):
                return store
        raise SessionError(
            f"nothing answers at {address}, and a store that was started on {socket.gethostname()} is not reached there:"
            f" give an address of this host, or run `mcore-reshard store --port {port}` on {host}"
        )
    except BaseException:
        del store  # the traceback would keep it up
        raise


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_PROBE_S).close()
    except OSError:
        return False
    return True


def _listen(host: str | None, port: int) -> socket.socket:
    if host is None and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    family = socket.AF_INET if host is None else socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host or "", port), family=family)
