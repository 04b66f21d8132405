"""`store` as a process: ranks reach it, and a signal ends it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.store import connect_store

LOCAL = ["--host", "127.0.0.1", "--port", "0"]


@contextmanager
def served(*options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "mcore_reshard", "store", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_store_outlives_its_clients_until_a_signal_ends_it(ending: signal.Signals) -> None:
    with served(*LOCAL, "--json") as process:
        assert process.stdout is not None and process.stderr is not None
        answer = json.loads(process.stdout.readline())
        assert answer == {"address": f"127.0.0.1:{answer['port']}", "host": "127.0.0.1", "port": answer["port"]}
        for name in ("trainer", "engine"):  # one after the other: what the first has set stays
            client = connect_store(answer["address"], Options(timeout_s=20))
            client.set(name, "here")
            assert client.get("trainer") == b"here"
            client.close()
        for _ in range(3):  # who ends a store may say so more than once
            process.send_signal(ending)
        assert process.wait(timeout=30) == 0
        assert process.stderr.read() == ""


def test_a_store_says_in_words_where_it_is() -> None:
    with served("--port", "0") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("store at 127.0.0.1:") and "end it with Ctrl-C or SIGTERM" in line
        process.terminate()
        assert process.wait(timeout=30) == 0


def test_a_store_that_cannot_listen_says_why_and_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host, number, reason in (
            ("127.0.0.1", port, "address already in use"),
            ("192.0.2.1", 0, "cannot assign requested address"),
            ("127.0.0.1", 70000, "port must be 0-65535"),
        ):
            with served("--host", host, "--port", str(number)) as process:
                assert process.stdout is not None and process.stderr is not None
                assert process.wait(timeout=30) == 2 and process.stdout.read() == ""
                error = process.stderr.read()
            assert (
                error.startswith(f"mcore-reshard: cannot serve a store at {host}, port {number}: ") and reason in error
            )
            assert "Give another --port, or an address of this machine as --host." in error
