"""`mcore-reshard store`: serve the store of sessions in a process that outlives the ranks."""

from __future__ import annotations

import argparse
import json
import signal
import socket

from mcore_reshard.planning import InputError


def run(args: argparse.Namespace) -> int:
    # Read what signals write: numpy's and torch's threads may take a signal, and the main thread would sleep on.
    signals, written = socket.socketpair()
    written.setblocking(False)
    signal.set_wakeup_fd(written.fileno())
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, lambda *_: None)
    try:
        listening = _listen(args.host, args.port)
    except (OSError, OverflowError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).partition(" (")[0].lower()
        problem = f"cannot serve a store at {args.host or 'any address'}, port {args.port}: {reason}"
        raise InputError([problem], "Give another --port, or an address of this machine as --host.") from error
    from torch.distributed import TCPStore

    port = listening.getsockname()[1]
    store = TCPStore(
        args.host or "localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    host = args.host or socket.gethostname()
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if args.json:
        print(json.dumps({"address": address, "host": host, "port": port}), flush=True)
    else:
        print(f"store at {address}; end it with Ctrl-C or SIGTERM, after the last session", flush=True)
    signals.recv(1)
    del store  # held until here: it serves as long as it lives
    return 0


def _listen(host: str | None, port: int) -> socket.socket:
    """A socket that listens at one address of this machine, or at all of them."""
    if host is not None:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
