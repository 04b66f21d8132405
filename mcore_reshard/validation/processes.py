"""Run a function in several forked processes, as a launcher of ranks would, in one call.

The parent imports the packages that the ranks need, which takes seconds for Megatron, and forks. So ranks start in tens
of milliseconds and share those pages. `prepare` functions do these imports.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from .errors import ProcessError

Result = TypeVar("Result")
_REASON_LINES = 32  # Megatron-Bridge shows how to write a bridge behind its list of architectures


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
    context = multiprocessing.get_context("fork")
    children: list[_Child] = []
    with tempfile.TemporaryDirectory(prefix="mcore-reshard-") as folder:
        try:
            for index in range(count):
                receive, send = context.Pipe(duplex=False)
                stack_file = Path(folder) / f"stack{index}"
                process = context.Process(target=_run_child, args=(index, function, args, send, stack_file))
                process.start()
                send.close()  # so that a death of the child ends the pipe
                children.append(_Child(index, process, receive, stack_file))
            return _collect(children, timeout_s)
        finally:
            for child in children:
                child.process.kill()
            for child in children:
                child.process.join()
                child.connection.close()


@dataclass(frozen=True, slots=True)
class _Child:
    index: int
    process: ForkProcess
    connection: Connection
    stack_file: Path


def _collect(children: list[_Child], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    running, results = {child.connection: child for child in children}, dict[int, Any]()
    while running:
        ready = wait(list(running), max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [child.index for child in running.values()]
            raise ProcessError(f"still running after {timeout_s:g} s: processes {late}\n{_stacks(running.values())}")
        for connection in ready:
            child = running.pop(connection)  # type: ignore[call-overload]
            try:
                succeeded, outcome = pickle.loads(child.connection.recv_bytes())  # from our own child
            except EOFError:
                child.process.join(1.0)
                raise ProcessError(f"process {child.index} {_death(child.process.exitcode)}") from None
            if not succeeded:
                stack, reason = outcome
                message = f"process {child.index} failed:\n{stack}\n{_stacks(running.values())}"
                raise ProcessError(message, child.index, reason)
            results[child.index] = outcome
    for child in children:
        child.process.join(max(1.0, deadline - time.monotonic()))
    return [results[child.index] for child in children]


def _stacks(running: Collection[_Child]) -> str:
    """Where the processes that have not returned are."""
    for child in running:
        if child.process.is_alive() and child.process.pid is not None:
            os.kill(child.process.pid, signal.SIGUSR1)
    time.sleep(0.2)  # for the stacks to be written
    stacks = []
    for child in running:
        started = child.stack_file.exists()
        stack = child.stack_file.read_text() if started else "its start, before its first line ran"
        stacks.append(f"process {child.index} was at:\n{stack}")
    return "\n".join(stacks)


def _run_child(
    index: int, function: Callable[..., Any], args: Sequence[Any], send: Connection, stack_file: Path
) -> None:
    torch.set_num_threads(1)
    with stack_file.open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        try:
            message = pickle.dumps((True, function(index, *args)))
        except BaseException as error:
            message = pickle.dumps((False, (traceback.format_exc(), _reason_of(error))))
        send.send_bytes(message)
        send.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without the parent's exit handlers; open process groups would make some of them wait


def _reason_of(error: BaseException) -> str:
    """An exception in its own words; of a failed assertion also the line, which often is all that it says."""
    lines = "".join(traceback.format_exception_only(error)).strip().split("\n")
    reason = "\n".join([*lines[:_REASON_LINES], "..."] if len(lines) > _REASON_LINES else lines)
    if isinstance(error, AssertionError) and (frames := traceback.extract_tb(error.__traceback__)):
        reason += f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line})"
    return reason


def _death(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code} before it returned"
