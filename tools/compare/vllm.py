"""vLLM's own reload beside ours, in a whole LLM: real EngineCore and worker processes, which share no memory with the trainer.

disk     training rank 0 writes a checkpoint, and every worker reads it: `collective_rpc("reload_weights")`
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from helpers.sglang_server import in_background
from test_vllm import CPU

import mcore_reshard as mr
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.validation.engine.slices import GenSizes

from .driver import Answers, Driver
from .measure import Part, trim
from .trainer import OPTIONS, SENT, Trainer

PACKAGES = ("vllm", "torch", "megatron-core", "megatron-bridge")
PATHS = {"disk": '`collective_rpc("reload_weights")`', "ours": "ours, `RefitWorker`"}
ROOT = Path(__file__).resolve().parents[2]
_PATHS = [ROOT, *(ROOT / folder for folder in ("tools", "tests", "tests/engine", "tests/integrations"))]


def prepare() -> None:
    """Nothing: vLLM is imported in its own processes alone."""


def engine_processes(sizes: GenSizes) -> int:
    return 1  # which has the whole LLM below it


class Engine(Answers):
    """A whole LLM in a process of its own, which ends with this one."""

    def __init__(self, folder: Path, sizes: GenSizes, extension: str) -> None:
        super().__init__(folder)
        environment = {
            **os.environ,
            **CPU,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([*map(str, _PATHS), *sys.path[1:]]),
        }
        command = [sys.executable, "-W", "ignore", "-m", "compare.vllm_process", str(folder), str(sizes.tp), extension]
        listener = Listener(str(folder / "line"))
        self.process = subprocess.Popen(command, env=environment)
        self.line = listener.accept()
        self.line.recv()
        self.pids = self.on_workers("hold_expected", str(folder))

    def on_workers(self, method: str, *args: Any) -> list[Any]:
        """What every worker answers. Raises RuntimeError with vLLM's message."""
        self.line.send((method, args))
        succeeded, answer = self.line.recv()
        if not succeeded:
            raise RuntimeError(f"{method}: {answer}")
        return list(answer)

    def answer(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"success": True, "message": str(self.on_workers(route, *body.get("args", ())))}
        except RuntimeError as error:
            return {"success": False, "message": str(error)}

    def turn(self) -> tuple[int, int]:
        super().turn()
        return 0, sum(self.on_workers("handed_bytes"))

    def close(self) -> None:
        self.line.close()
        self.process.wait(60)


def engine_part(rank: int, folder: Path, mesh: TrainMesh, sizes: GenSizes) -> Part:
    engine = Engine(folder, sizes, "compare.vllm_process.Compared")
    return part_of(engine, [*PATHS])


def part_of(engine: Engine, paths: list[str]) -> Part:
    def trim_all() -> None:
        trim()
        engine.on_workers("trim")

    turns: dict[str, Callable[[], tuple[int, int]]] = dict.fromkeys(paths, engine.turn)
    return Part(
        set_up=turns,
        run=turns,
        set_weights=lambda version: engine.on_workers("destroy"),
        differences=lambda version: [name for names in engine.on_workers("differences", version) for name in names],
        pids=lambda: engine.pids,
        trim=trim_all,
        close=engine.close,
    )


def train_part(rank: int, folder: Path, mesh: TrainMesh, sizes: GenSizes) -> Part:
    driver = VllmDriver(Trainer(rank, mesh, folder), sizes)
    return Part(
        set_up={"disk": partial(driver.tell, "done"), "ours": driver.connect},
        run={"disk": driver.through_disk, "ours": driver.refit},
        set_weights=driver.trainer.set_weights,
        differences=lambda version: [],
    )


class VllmDriver(Driver):
    """One training rank; the first one also tells vLLM's workers what to do."""

    def __init__(self, trainer: Trainer, sizes: GenSizes) -> None:
        super().__init__(trainer)
        self.sizes = sizes

    def through_disk(self) -> tuple[int, int]:
        saved = self.trainer.folder / "saved"
        written = self.trainer.save(saved)
        self.tell("reload_weights", args=[None, str(saved)])  # weights_iterator, weights_path
        self.tell("done")
        return written, 0

    def connect(self) -> None:
        address, model = self.trainer.store_address(), self.trainer.model
        told = in_background(partial(self.tell, "connect_compared", args=[address, SENT]))
        self.ours = mr.megatron.connect(
            model.model_chunks, model.bridge, self.trainer.folder / "1", gen=f"tp={self.sizes.tp}", store=address,
            options=OPTIONS,
        )  # fmt: skip
        told()
        self.tell("done")

    def refit(self) -> None:
        self.version += 1
        told = in_background(partial(self.tell, "refit", args=[self.version]))
        self.ours.refit(self.version)
        told()
        self.tell("done")
