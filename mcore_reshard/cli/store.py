"""`mcore-reshard store`: serve the store of sessions in a process that outlives the ranks."""

from __future__ import annotations

import argparse
import json
import signal
import socket

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.planning import InputError


def run(args: argparse.Namespace) -> int:
    # Read what signals write: numpy's and torch's threads may take a signal, and the main thread would sleep on.
    signals, written = socket.socketpair()
    written.setblocking(False)
    signal.set_wakeup_fd(written.fileno())
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, lambda *_: None)
    from mcore_reshard.session.store_server import serve_store  # imports torch

    try:
        store = serve_store(args.port, args.host)  # it serves until this function returns
    except SessionError as error:
        raise InputError([str(error)], "Give another --port, or an address of this machine as --host.") from error
    host, port = args.host or socket.gethostname(), store.port
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if args.json:
        print(json.dumps({"address": address, "host": host, "port": port}), flush=True)
    else:
        print(f"store at {address}; end it with Ctrl-C or SIGTERM, after the last session", flush=True)
    signals.recv(1)
    return 0
