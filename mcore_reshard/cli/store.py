"""`mcore-reshard store`: serve the store of sessions in a process that outlives the ranks."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.rendezvous.server import StoreServer
from mcore_reshard.planning import InputError

_ENDINGS = (signal.SIGINT, signal.SIGTERM)


def run(args: argparse.Namespace) -> int:
    from mcore_reshard.session.store_server import LOOPBACK, listen

    try:
        listening = listen(args.port, args.host)
    except SessionError as error:
        raise InputError([str(error)], "Give another --port, or an address of this machine as --host.") from error
    host, port = args.host or LOOPBACK, listening.getsockname()[1]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def serve() -> None:
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        for ending in _ENDINGS:
            loop.add_signal_handler(ending, ended.set)
        if args.json:
            print(json.dumps({"address": address, "host": host, "port": port}), flush=True)
        else:
            print(f"store at {address}; end it with Ctrl-C or SIGTERM, after the last session", flush=True)
        serving = asyncio.ensure_future(StoreServer().serve(listening))
        await ended.wait()
        for ending in _ENDINGS:  # another one changes nothing, and must not meet a loop that is closing
            loop.remove_signal_handler(ending)
            signal.signal(ending, signal.SIG_IGN)
        serving.cancel()

    asyncio.run(serve())
    return 0
