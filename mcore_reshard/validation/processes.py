"""Run a function in several forked processes, as a launcher of ranks would, in one call.

The parent imports what the ranks need (`prepare` functions, seconds for Megatron) and forks, so that ranks start in
tens of milliseconds and share those pages. The first failure or the deadline ends all of them with one error.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from .errors import ProcessError

Result = TypeVar("Result")


def run_processes(
    count: int, function: Callable[..., Result], args: Sequence[Any] = (), timeout_s: float = 60.0
) -> list[Result]:
    """Run `function(index, *args)` in `count` forked processes; return what each returned, in index order.

    Results must pickle; arguments need not, since the processes inherit them. Each process runs torch on one thread.
    On the first failure, and after `timeout_s` seconds, all processes are killed and `ProcessError` is raised.
    Raises RuntimeError when CUDA is already in use in this process, since a fork cannot share it.
    """
    if torch.cuda.is_initialized():
        raise RuntimeError("run_processes forks, which CUDA does not survive: call it before using CUDA")
    with tempfile.TemporaryDirectory(prefix="mcore-reshard-") as folder:
        return _Launch(count, function, args, timeout_s, Path(folder)).results()


class _Launch:
    """The processes of one call, and the results that have come back from them."""

    def __init__(
        self, count: int, function: Callable[..., Any], args: Sequence[Any], timeout_s: float, folder: Path
    ) -> None:
        self.timeout_s, self.folder = timeout_s, folder
        self.deadline = time.monotonic() + timeout_s
        self.returned: dict[int, Any] = {}
        self.processes: list[ForkProcess] = []
        self.pending: dict[Connection, int] = {}
        context = multiprocessing.get_context("fork")
        for index in range(count):
            receive, send = context.Pipe(duplex=False)
            process = context.Process(
                target=_child, args=(index, function, args, send, self._stack_file(index)), name=f"process {index}"
            )
            process.start()
            send.close()  # so that a death of the child ends the pipe
            self.processes.append(process)
            self.pending[receive] = index

    def results(self) -> list[Any]:
        try:
            while self.pending:
                ready = wait(list(self.pending), max(0.0, self.deadline - time.monotonic()))
                if not ready:
                    late = sorted(self.pending.values())
                    raise ProcessError(f"still running after {self.timeout_s:g} s: processes {late}\n{self._stacks()}")
                for connection in ready:
                    assert isinstance(connection, Connection)
                    self._collect(connection)
            for process in self.processes:
                process.join(max(1.0, self.deadline - time.monotonic()))
        finally:
            for process in self.processes:
                process.kill()
            for process in self.processes:
                process.join()
            for connection in self.pending:
                connection.close()
        return [self.returned[index] for index in range(len(self.processes))]

    def _collect(self, connection: Connection) -> None:
        index = self.pending.pop(connection)
        try:
            succeeded, outcome = pickle.loads(connection.recv_bytes())  # from our own child
        except EOFError:
            self.processes[index].join(1.0)
            raise ProcessError(f"process {index} {_death(self.processes[index].exitcode)}") from None
        if not succeeded:
            raise ProcessError(f"process {index} failed:\n{outcome}\n{self._stacks()}")
        self.returned[index] = outcome

    def _stacks(self) -> str:
        """Where the processes that have not returned are."""
        running = sorted(self.pending.values())
        for index in running:
            if (pid := self.processes[index].pid) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        time.sleep(0.2)  # for the stacks to be written
        return "\n".join(f"process {index} was at:\n{self._stack(index)}" for index in running)

    def _stack(self, index: int) -> str:
        try:
            return self._stack_file(index).read_text()
        except FileNotFoundError:
            return "its start, before its first line ran"

    def _stack_file(self, index: int) -> Path:
        return self.folder / f"stack{index}"


def _child(index: int, function: Callable[..., Any], args: Sequence[Any], send: Connection, stack_file: Path) -> None:
    torch.set_num_threads(1)
    with stack_file.open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        try:
            message = pickle.dumps((True, function(index, *args)))
        except BaseException:
            message = pickle.dumps((False, traceback.format_exc()))
        send.send_bytes(message)
        send.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without the parent's exit handlers; open process groups would make some of them wait


def _death(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code} before it returned"
