"""Run the processes of live cases: trainers, refitted engines, and engines that load the same checkpoints."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from threading import Lock
from typing import Any

from mcore_reshard.integrations.vllm_plugin import BACKEND, register
from mcore_reshard.session.store_server import serve_store

from .cases import PLACES, Case
from .verdict import judge

TOOLS = Path(__file__).parents[1]
_GRACE_S = 10.0  # for the others of a case, once one of its processes has failed


class CaseError(Exception):
    """A process of a case failed; says which, and the errors in its log."""


@dataclass
class Process:
    """One process in a session of its own, so that what vLLM starts below it ends with it."""

    kind: str
    job: Path
    running: subprocess.Popen[bytes]

    @property
    def log(self) -> Path:
        return self.job.with_suffix(".log")

    def result(self) -> Any:
        if self.running.returncode != 0:
            raise CaseError(f"{self.job.stem} ended with {self.running.returncode}: {_errors_in(self.log.read_text())}")
        return json.loads(self.job.with_suffix(".result.json").read_text())

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.running.pid, signal.SIGKILL)
        self.running.wait()


@dataclass
class Launcher:
    """Runs cases in `root`, at most `jobs` at a time. Engines that load a checkpoint are shared by cases that compute alike."""

    root: Path
    jobs: int
    limit_s: float
    _lock: Lock = field(default_factory=Lock)
    _shared: dict[str, Future[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        if not any(point.name == BACKEND for point in entry_points(group="vllm.general_plugins")):
            write_entry_point(self.root / "site")
        self._cases = ThreadPoolExecutor(self.jobs)
        self._others = ThreadPoolExecutor(4 * self.jobs)

    def start(self, case: Case) -> Future[dict[str, Any]]:
        return self._cases.submit(self._run, case)

    def _run(self, case: Case) -> dict[str, Any]:
        """The verdict of one case. A case that cannot be judged has an `error`."""
        begin = time.perf_counter()
        try:
            self._once(
                f"checkpoints-{case.checkpoint_name}", lambda: self._alone("checkpoints", case, gpus="0")
            ).result()
            gpus = PLACES[case.place].engine_gpus
            loading = {
                checkpoint: self._once(
                    f"load-{case.engine_name}-{checkpoint}",
                    lambda checkpoint=checkpoint: self._alone("load", case, gpus=gpus, checkpoint=checkpoint),
                )
                for checkpoint in (1, 2)
            }
            trained, refitted = self._session(case)
            verdict = judge(
                case.mode, refitted, {checkpoint: future.result() for checkpoint, future in loading.items()}
            )
            verdict["transformer_engine"] = trained["transformer_engine"]
        except CaseError as error:
            verdict = {"error": str(error)}
        return {**asdict(case), **verdict, "whole_case_s": round(time.perf_counter() - begin, 1)}

    def _once(self, name: str, work: Any) -> Future[Any]:
        with self._lock:
            if name not in self._shared:
                self._shared[name] = self._others.submit(work)
            return self._shared[name]

    def _alone(self, kind: str, case: Case, *, gpus: str, **more: Any) -> Any:
        process = self._process(kind, case, gpus, **more)
        self._wait([process])
        return process.result()

    def _session(self, case: Case) -> tuple[Any, Any]:
        """The trainer's ranks and the refitted engine: what rank 0 and the engine found."""
        place = PLACES[case.place]
        (self.root / f"{case.name}-world").unlink(missing_ok=True)
        with serve_store() as store:
            processes = [
                self._process("train", case, place.trainer_gpus, rank=rank, store=store.address)
                for rank in range(place.ranks)
            ]
            processes.append(self._process("refit", case, place.engine_gpus, store=store.address))
            self._wait(processes)
        results = [process.result() for process in processes]
        return results[0], results[-1]

    def _process(self, kind: str, case: Case, gpus: str, **more: Any) -> Process:
        suffix = "".join(f"-{more[name]}" for name in ("checkpoint", "rank") if name in more)
        job = self.root / f"{kind}-{case.name}{suffix}.json"
        job.with_suffix(".result.json").unlink(missing_ok=True)
        job.write_text(json.dumps({"case": asdict(case), "root": str(self.root), **more}))
        paths = [str(TOOLS), str(TOOLS.parent), str(self.root / "site"), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            **case.environment,
            "CUDA_VISIBLE_DEVICES": gpus,
            "VLLM_CACHE_ROOT": str(self.root / "cache" / job.stem),
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
        }
        with job.with_suffix(".log").open("wb") as log:
            running = subprocess.Popen(
                [sys.executable, "-m", "live.process", kind, str(job)],
                env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return Process(kind, job, running)

    def _wait(self, processes: list[Process]) -> None:
        """Until all have ended, one has failed and the others had their time, or the limit is over."""
        deadline = time.monotonic() + self.limit_s
        failed = False
        while any(process.running.poll() is None for process in processes) and time.monotonic() < deadline:
            if not failed and any(process.running.returncode for process in processes):
                failed, deadline = True, min(deadline, time.monotonic() + _GRACE_S)
            time.sleep(0.2)
        for process in processes:
            process.end()
        bad = [process for process in processes if process.running.returncode != 0]
        if bad:  # who failed by itself first; those that were ended for it say less
            min(bad, key=lambda process: process.running.returncode < 0).result()


def write_entry_point(site: Path) -> None:
    """Make vLLM's processes find the plug-in of a checkout that is not installed; `site` is for their PYTHONPATH."""
    folder = site / "mcore_reshard_of_a_checkout-0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mcore-reshard-of-a-checkout\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{BACKEND} = {register.__module__}:register\n")


def _errors_in(log: str) -> str:
    """The lines that say what went wrong."""
    lines = [line.strip() for line in log.splitlines() if re.search(r"Error\b|error:|Exception|killed", line)]
    return " | ".join(dict.fromkeys(line[:300] for line in lines[:3] + lines[-3:])) or log[-300:]
