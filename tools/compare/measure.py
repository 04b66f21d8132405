"""What measures several paths alike: seconds, bytes through the network, and memory of every process.

    set up, warm up     one path after the other: the memory that each keeps from then on
    repetitions         the paths in turns: each with other weights than the one before

Training ranks and engine ranks are forked processes that meet at barriers. The first one measures all of them: the clock
between two barriers, the counters of the loopback interface, and the kernel's high-water mark of each process's memory.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WAIT_S = 300.0


@dataclass(frozen=True)
class Part:
    """What one process does. Every function is called in every process, in step. Paths are run in the order of `run`.

    `set_weights(version)` gives a training rank the weights of version 1 or 2, and destroys those of an engine rank.
    `differences(version)` names the engine's tensors whose bytes are not those of that version. A path in `run` returns the
    bytes of files that it wrote and that it was handed, where it used any.
    """

    set_up: Mapping[str, Callable[[], Any]]
    run: Mapping[str, Callable[[], tuple[int, int] | None]]
    set_weights: Callable[[int], Any]
    differences: Callable[[int], list[str]]
    pids: Callable[[], Sequence[int]] = field(
        default=lambda: [os.getpid()]
    )  # of the ranks that this process stands for
    trim: Callable[[], Any] = field(default=lambda: trim())
    close: Callable[[], Any] = field(default=lambda: None)


class Referee:
    """The barriers of all processes, and what the first one measures. Made before they are forked."""

    def __init__(self, train: int, processes: int, folder: Path) -> None:
        self.train, self.processes, self.folder = train, processes, folder
        context = multiprocessing.get_context("fork")
        self._barrier = context.Barrier(processes)
        self._files = context.Array("q", 2 * processes)  # of each process: bytes written, bytes handed over

    def rounds(self, index: int, part: Part, repeats: int) -> dict[str, Any]:
        """Run all paths; the first process's result has all samples, the others' is empty. Raises ValueError: wrong bytes."""
        (self.folder / f"pids{index}").write_text(json.dumps([*part.pids()]))
        meter = _Meter(self) if index == 0 else None
        kept, samples, version = {}, [], 0
        for path in part.run:
            part.trim()
            self.wait()
            before = meter.resident() if meter else []
            self.wait()
            part.set_up[path]()
            self._take(index, part, path, version := 3 - (version or 2), meter)
            if meter:
                grown = [now - then for now, then in zip(meter.resident(), before, strict=True)]
                kept[path] = meter.by_side(grown)
            self.wait()
        for _ in range(repeats):
            for path in part.run:
                samples.append(self._take(index, part, path, version := 3 - version, meter))
        part.close()
        return {"kept_bytes": kept, "samples": samples} if meter else {}

    def _take(self, index: int, part: Part, path: str, version: int, meter: _Meter | None) -> dict[str, Any]:
        part.set_weights(version)
        part.trim()
        self.wait()
        if meter:
            meter.start()
        self.wait()
        self._files[2 * index : 2 * index + 2] = part.run[path]() or (0, 0)
        self.wait()
        sample = {"path": path, **meter.stop()} if meter else {}
        if meter and any(self._files[:]):
            sample |= {"file_bytes": {"written": sum(self._files[::2]), "read": sum(self._files[1::2])}}
        self.wait()
        if wrong := part.differences(version):
            raise ValueError(
                f"{path}: {len(wrong)} tensors of process {index} have wrong bytes: {', '.join(wrong[:5])}"
            )
        part.trim()
        self.wait()
        return sample

    def wait(self) -> None:
        self._barrier.wait(WAIT_S)


class _Meter:
    """Reads the processes of all ranks from outside. Memory is in bytes, a number for each rank."""

    def __init__(self, referee: Referee) -> None:
        self._referee = referee
        self._pids: list[int] = []

    def start(self) -> None:
        self._load = os.getloadavg()[0]
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the high-water mark is what it holds now
        self._before, self._network = self.resident(), _loopback_bytes()
        self._began = time.monotonic()

    def stop(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._began
        extra = [_status(pid, "VmHWM") - before for pid, before in zip(self._pids, self._before, strict=True)]
        return {
            "seconds": round(seconds, 4),
            "network_bytes": _loopback_bytes() - self._network,
            "peak_extra_bytes": self.by_side(extra),
            "load_before": round(self._load, 2),
        }

    def resident(self) -> list[int]:
        """Of each rank. All processes have told their ids."""
        files = [self._referee.folder / f"pids{index}" for index in range(self._referee.processes)]
        self._pids = self._pids or [pid for file in files for pid in json.loads(file.read_text())]
        return [_status(pid, "VmRSS") for pid in self._pids]

    def by_side(self, numbers: Sequence[int]) -> dict[str, list[int]]:
        return {"train": [*numbers[: self._referee.train]], "gen": [*numbers[self._referee.train :]]}


def trim() -> None:
    """Give freed memory back to the kernel, so that it does not hide what is allocated next."""
    ctypes.CDLL(None).malloc_trim(0)


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def _loopback_bytes() -> int:
    """What was sent through the loopback interface of this network namespace, with headers."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])
