"""The store where the ranks of both worlds meet: start one, or use the one that answers already.

    with StoreServer(29600) as server:   # a store that outlives the ranks
        wait_for_a_signal()

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


class StoreServer:
    """A TCPStore that this process serves until `close`, at one address of this machine or, if `host` is None, at all.

    `port` 0 takes a free port. Raises SessionError where the port is taken or the address is not this machine's.
    """

    def __init__(self, port: int, host: str | None = None) -> None:
        try:
            listening = _listen(host, port)
        except (OSError, OverflowError) as error:
            reason = (getattr(error, "strerror", None) or str(error)).partition(" (")[0].lower()
            raise SessionError(f"cannot serve a store at {host or 'any address'}, port {port}: {reason}") from error
        self.port = listening.getsockname()[1]
        self._store: TCPStore | None = TCPStore(
            host or "localhost", self.port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self.identity = uuid4().hex
        self._store.set(_IDENTITY, self.identity)

    def close(self) -> None:
        """Stop serving: ranks that are still connected lose the store. May be called twice."""
        self._store = None

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_store_if_absent(address: str, timeout_s: float) -> StoreServer | None:
    """Start a store at `address` ("host:port") where nothing listens; None where a store answers already.

    Raises SessionError where something else listens, and where `address` does not lead to this host.
    """
    host, port = split_address(address)
    if _listens(host, port):
        connect_store(address, timeout_s)
        return None
    server = StoreServer(port)
    try:
        if _listens(host, port):
            client = connect_store(address, timeout_s)
            if client.check([_IDENTITY]) and client.get(_IDENTITY).decode() == server.identity:
                return server
        raise SessionError(
            f"nothing answers at {address}, and a store that was started on {socket.gethostname()} is not reached there:"
            f" give an address of this host, or run `mcore-reshard store --port {port}` on {host}"
        )
    except BaseException:
        server.close()
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
