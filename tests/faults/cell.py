"""Runs one cell: the store, a process for each rank, the fault's other half, and what everyone saw."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from helpers.ranks import StoreProcess

from mcore_reshard.session.store_server import serve_store

from .matrix import PAUSES_S, STORE, Cell
from .rank import Step, main

LIMIT_S = 80.0
_RESTART_S = 0.3  # until a new process takes a dead one's place
_LEAVE_S = 3.0  # for processes of a cell to end
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Observed:
    """Everything that is known of a cell that ran."""

    cell: Cell
    steps: dict[str, list[Step]] = field(
        default_factory=dict
    )  # by seat; a process that was started anew: "train:1 anew"
    address: str = ""  # of the store
    fault_s: float | None = None  # time.monotonic() of the fault; of a kill: when the process's files closed
    hung: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # processes that ended otherwise than they should: how
    left: list[str] = field(default_factory=list)  # processes that nobody has ended
    seconds: float = 0.0


@dataclass
class _Process:
    seat: str
    name: str
    process: Any
    ended: bool = False


def live_replicas(cell: Cell) -> tuple[int, ...]:
    """Those that a session must have in the end."""
    dies = (cell.fault == "kill" or cell.phase == "closing") and not cell.restarts
    lost = int(cell.victim.partition(":")[2]) // cell.replica_ranks if dies and cell.victim.startswith("gen:") else None
    return tuple(replica for replica in range(cell.replicas) if replica != lost)


def takes_part(cell: Cell, seat: str) -> bool:
    """Whether a rank is to recover."""
    if cell.fault == "store killed":
        return False
    return seat.startswith("train:") or int(seat.partition(":")[2]) // cell.replica_ranks in live_replicas(cell)


class Runner:
    """One cell while it runs."""

    def __init__(self, cell: Cell, log: Path) -> None:
        self.cell, self.log = cell, log
        self.others = children()  # of other tests in this process
        self.store = StoreProcess(serve_store())
        self.observed = Observed(cell, address=self.store.address)
        self.processes: dict[Any, _Process] = {}  # by pipe
        self.due: list[tuple[float, Callable[[], None]]] = []  # at time.monotonic(): what is to be done

    def run(self) -> Observed:
        start = time.monotonic()
        try:
            for seat in self.cell.seats:
                self._start(seat)
            self._listen(start + LIMIT_S)
        finally:
            self._end()
        self.observed.seconds = time.monotonic() - start
        return self.observed

    def _start(self, seat: str, anew: bool = False) -> None:
        context: Any = multiprocessing.get_context("fork")
        pipe, end_of_child = context.Pipe()
        cell = self.cell
        arguments = (
            end_of_child, cell, seat, self.store.address, str(self.log), live_replicas(cell), takes_part(cell, seat), anew,
        )  # fmt: skip
        process = context.Process(target=main, args=arguments, daemon=True)
        process.start()
        end_of_child.close()
        name = f"{seat} anew" if anew else seat
        self.processes[pipe] = _Process(seat, name, process)
        self.observed.steps[name] = []

    def _listen(self, deadline: float) -> None:
        while any(not each.ended for each in self.processes.values()) or self.due:
            now = time.monotonic()
            if now > deadline:
                return
            for action in [action for at, action in self.due if at <= now]:
                action()
            self.due = [(at, action) for at, action in self.due if at > now]
            soonest = min([at for at, _ in self.due], default=now + 1.0)
            pipes = [pipe for pipe, each in self.processes.items() if not each.ended]
            for pipe in wait(pipes, max(0.0, min(soonest, deadline) - time.monotonic())):
                self._hear(pipe)

    def _hear(self, pipe: Any) -> None:
        process = self.processes[pipe]
        try:
            what, fact = pipe.recv()
        except (EOFError, OSError):
            what, fact = "end", None
        if what == "step":
            self.observed.steps[process.name].append(fact)
        elif what == "fault":
            self.observed.fault_s = fact
            if self.cell.fault.startswith("freeze"):
                thaw = partial(_signal, process.process.pid, signal.SIGCONT)
                self.due.append((fact + PAUSES_S[self.cell.fault], thaw))
        elif what == "store":
            self._break_store()
            pipe.send("done")
        elif what == "died":
            self.observed.broken.append(f"{process.name}: {fact}")
        elif what == "end":
            process.ended, ended_s = True, time.monotonic()
            process.process.join(_LEAVE_S)
            self._note_end(process, ended_s)

    def _note_end(self, process: _Process, ended_s: float) -> None:
        cell, code = self.cell, process.process.exitcode
        is_victim = process.name == cell.victim
        expected = -signal.SIGKILL if is_victim and cell.fault == "kill" else 0
        if expected:  # a driver takes a second or two to end a process that was killed while its GPU was at work
            self.observed.fault_s = ended_s
        if code is None:
            self.observed.left.append(f"{process.name} has not exited")
        elif code != expected:
            self.observed.broken.append(f"{process.name} ended with {code}, not {expected}")
        if is_victim and cell.restarts:
            self.due.append((time.monotonic() + _RESTART_S, partial(self._start, process.seat, True)))

    def _break_store(self) -> None:
        fault = self.cell.fault.removeprefix(f"{STORE} ")
        if fault == "killed":
            self.store.kill()
        elif fault == "restarted":
            self.store.restart()
        else:
            self.store.freeze()
            pause_s = PAUSES_S[fault.replace("frozen", "freeze")]
            self.due.append((time.monotonic() + pause_s, self.store.thaw))

    def _end(self) -> None:
        """End everything, and note what did not end by itself."""
        for process in self.processes.values():
            if not process.ended:
                self.observed.hung.append(process.name)
                _signal(process.process.pid, signal.SIGCONT)
                _signal(process.process.pid, signal.SIGUSR1)  # its stacks go to the log
        if self.observed.hung:
            time.sleep(1.0)
        for pipe, process in self.processes.items():
            process.process.kill()
            process.process.join()
            pipe.close()
        with suppress(OSError, ProcessLookupError):
            self.store.kill()
        deadline = time.monotonic() + _LEAVE_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid, command in left.items():
            self.observed.left.append(f"process {pid}: {command}")
            _signal(pid, signal.SIGKILL)

    def _left(self) -> dict[int, str]:
        return {pid: command for pid, command in children().items() if pid not in self.others}


def run_cell(cell: Cell, log: Path) -> Observed:
    """Run one cell in processes of its own; whatever they leave behind becomes this process's child, and is noted."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return Runner(cell, log).run()


def children() -> dict[int, str]:
    """This process's children that have not ended: pid -> command. Python's own, which tracks semaphores, is none of them."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid():
                if state == "Z":
                    os.waitpid(int(folder.name), os.WNOHANG)
                elif "multiprocessing.resource_tracker" not in (command := (folder / "cmdline").read_text()):
                    found[int(folder.name)] = command.replace("\0", " ")[:80]
    return found


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
