"""Run one function in many real processes, and collect the outcome of each: a value, an error or a death."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from helpers.plans import Case

from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.store import SessionStore, connect_store
from mcore_reshard.session.store_server import ServedStore, serve_store


@dataclass(frozen=True)
class Outcome:
    """The end of a process: its return value, or the error it raised; neither if it was killed."""

    value: Any = None
    error: str | None = None
    kind: str | None = None
    seconds: float = 0.0

    @property
    def died(self) -> bool:
        return self.kind == "died"


@dataclass
class StoreProcess:
    """A store at `address`, in a process of its own."""

    served: ServedStore

    @property
    def address(self) -> str:
        return self.served.address

    @property
    def pid(self) -> int:
        return self.served.pid

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        while any(" T " not in stat.read_text() for stat in Path(f"/proc/{self.pid}/task").glob("*/stat")):
            time.sleep(0.01)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.served.close()
        self.served._process.kill()  # it may have ended before
        self.served._process.wait()

    def restart(self) -> None:
        """Another store at the same address."""
        self.kill()
        self.served = serve_store(self.served.port)


def store_of(address: str, session: str = "test") -> SessionStore:
    """A connection to a session of the test's own."""
    return connect_store(address, Options(session=session))


@contextmanager
def store_process() -> Iterator[StoreProcess]:
    """A store, killed in the end, frozen or not."""
    process = StoreProcess(serve_store())
    try:
        yield process
    finally:
        process.kill()


def run_ranks(
    count: int, target: Callable[..., Any], *args: Any, timeout_s: float = 30.0, method: str = "fork"
) -> list[Outcome]:
    """`target(rank, store_address, *args)` in `count` processes that meet at a store in this process.

    They are forked, or with `method="spawn"` started afresh, as CUDA needs. Fails the test if a process outlives
    `timeout_s`; processes that hang are killed.
    """
    for case in (each for each in args if isinstance(each, Case)):
        case.plan()  # once for all ranks that are forked
    context: Any = multiprocessing.get_context(method)
    processes: dict[Any, tuple[int, Any]] = {}  # by the pipe to each one
    for rank in range(count):
        pipe, end_of_child = context.Pipe()
        process = context.Process(target=_run, args=(end_of_child, rank, target, args, timeout_s), daemon=True)
        process.start()
        end_of_child.close()
        processes[pipe] = (rank, process)
    store = serve_store()
    for pipe in processes:
        pipe.send(store.address)
    outcomes = [Outcome(kind="died")] * count
    deadline = time.monotonic() + timeout_s
    ready: list[Any]  # pipes
    while processes and (ready := wait([*processes], max(0.0, deadline - time.monotonic()))):
        ended: Any
        for ended in ready:
            rank, process = processes.pop(ended)
            with suppress(EOFError, ConnectionError):  # closed without a word: killed
                outcomes[rank] = ended.recv()
            process.join()
    for _, straggler in processes.values():
        straggler.kill()
        straggler.join()
    store.close()
    hung = sorted(rank for rank, _ in processes.values())
    errors = {
        rank: outcome.error for rank, outcome in enumerate(outcomes) if outcome.error
    }  # others may wait for these
    assert not hung, f"ranks {hung} were still running after {timeout_s} s; errors of others: {errors}"
    return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    """The return values of all ranks. Fails with the errors of those that raised or died."""
    bad = {rank: outcome.error or outcome.kind for rank, outcome in enumerate(outcomes) if outcome.kind}
    assert not bad, bad
    return [outcome.value for outcome in outcomes]


def _run(pipe: Any, rank: int, target: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(0.9 * timeout_s, exit=False)
    address = pipe.recv()
    start = time.monotonic()
    try:
        outcome = Outcome(value=target(rank, address, *args))
    except Exception as error:
        outcome = Outcome(error=str(error), kind=type(error).__name__, seconds=time.monotonic() - start)
    pipe.send(outcome)
    os._exit(0)  # the interpreter's own teardown of a forked pytest is none of the test's business
