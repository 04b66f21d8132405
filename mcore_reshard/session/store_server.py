"""The store where the ranks of both worlds meet: serve one, or use the one that answers already.

A store is a process of its own: a trainer that computes for long, or dies, does not silence it. It ends with whoever
started it, once nobody is connected any more.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.rendezvous import server
from mcore_reshard.kernels.rendezvous.address import split_address
from mcore_reshard.kernels.rendezvous.frames import MAGIC, unpack

LOOPBACK = "127.0.0.1"
_PROBE_S = 2.0  # limit for a TCP connection to open; the session's own deadline limits calls to a store
_PACKAGE = Path(server.__file__).resolve().parents[2]  # the folder that holds `kernels`


class ServedStore:
    """A store that this process has started. Give it to endpoints as `store=`, or its `address`."""

    def __init__(self, host: str, port: int, process: subprocess.Popen[bytes]) -> None:
        self.host, self.port = host, port
        self._process = process

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Let the store end once nobody is connected any more; it does not wait for that. May be called twice."""
        if self._process.stdin is not None:
            with suppress(OSError, ValueError):
                self._process.stdin.write(b"\n")
                self._process.stdin.close()

    def __enter__(self) -> ServedStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def serve_store(port: int = 0, host: str | None = None) -> ServedStore:
    """Start a store at one address of this machine, loopback if none is given. `port` 0 takes a free port.

    Raises SessionError where the port is taken or the address is not this machine's.
    """
    listening = listen(port, host)
    with listening:
        descriptor, port = listening.fileno(), listening.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(_PACKAGE), str(descriptor)],
            stdin=subprocess.PIPE,
            bufsize=0,
            pass_fds=(descriptor,),
            start_new_session=True,  # Ctrl-C goes to all processes of a terminal; ranks need the store then
        )
    return ServedStore(host or LOOPBACK, port, process)


# Without `-m`: the package's own __init__ need not load, nor what a user's site imports.
_START = """
import signal, sys, types
signal.signal(signal.SIGINT, signal.SIG_IGN)
root, descriptor = sys.argv[1:]
for name, folder in (("mcore_reshard", ""), ("mcore_reshard.kernels", "/kernels")):
    package = types.ModuleType(name)
    package.__path__ = [root + folder]
    sys.modules[name] = package
sys.argv = ["mcore-reshard store", descriptor]
from mcore_reshard.kernels.rendezvous.server import main
main()
"""


def listen(port: int, host: str | None) -> socket.socket:
    """A socket that listens at an address of this machine. Raises SessionError where it cannot."""
    host = host or LOOPBACK
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=4096)
    except (OSError, OverflowError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).partition(" (")[0].lower()
        raise SessionError(f"cannot serve a store at {host}, port {port}: {reason}") from error


def start_store_if_absent(address: str, timeout_s: float) -> ServedStore | None:
    """Serve a store at `address` ("host:port") where nothing listens; None where a store answers already.

    Raises SessionError where something else listens, and where `address` does not lead to this host.
    """
    host, port = split_address(address)
    if (what := _what_listens(host, port, timeout_s)) == "store":
        return None
    if what:
        raise SessionError(f"no store answers at {address}: {what}; give another port")
    try:
        return serve_store(port, host)
    except SessionError as error:
        raise SessionError(
            f"nothing answers at {address}, and a store cannot be started there from {socket.gethostname()} ({error}): give"
            f" an address of this host, or run `mcore-reshard store --host {host} --port {port}` on {host}"
        ) from error


def _what_listens(host: str, port: int, timeout_s: float) -> str:
    """ "store", "" for nothing, or what else is there."""
    try:
        connection = socket.create_connection((host, port), timeout=_PROBE_S)
    except OSError:
        return ""
    with connection:
        connection.settimeout(min(timeout_s, 5.0))
        try:
            lengths = connection.recv(8, socket.MSG_WAITALL)
            header_bytes = int.from_bytes(lengths[4:8], "big")
            body = connection.recv(min(int.from_bytes(lengths[:4], "big") - 4, 1 << 14), socket.MSG_WAITALL)
            if unpack(header_bytes, body)[0].get("magic") == MAGIC:
                return "store"
        except (OSError, ValueError):
            pass
    return "what listens there is no store of mcore-reshard, or a frozen one"
