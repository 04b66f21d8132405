"""verl's checkpoint engine in forked ranks: what verl's manager calls, in its order, without Ray; every byte compared.

Stand-ins: the manager's loop, Ray, and verl's model engine around a real Megatron-Core model. vLLM's model and loader are real.
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_reshard.validation.engine import vllm_engine

if find_spec("verl") is not None:
    vllm_engine.prepare()  # before verl imports vLLM, which looks at its surroundings once
pytest.importorskip("verl", reason="needs verl: make test-frameworks")

import torch.distributed as dist
from safetensors.torch import load_file, save_file
from verl.checkpoint_engine import CheckpointEngineRegistry

import mcore_reshard as mr
from mcore_reshard.engines.vllm.model import load_weights, local_tensors
from mcore_reshard.engines.vllm.worker import RefitWorker
from mcore_reshard.integrations import verl
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.validation import tiny
from mcore_reshard.validation.engine.slices import GenSizes, poison
from mcore_reshard.validation.processes import run_processes

MESH, REPLICAS, LIMIT_S = TrainMesh(tp=2), 2, 330


class Rank:
    """A rank of either world, with verl's engine; `meet` is CheckpointEngineManager.build_process_group."""

    def __init__(self, index: int, folder: Path) -> None:
        self.index, self.is_trainer, self.updates = index, index < MESH.world, 0
        self.store = dist.FileStore(str(folder / "metadata"), MESH.world + REPLICAS)
        given = {"is_master": index == 0} if self.is_trainer else {}
        options = {"gen": "tp=1", "connect_timeout_s": 200.0, "timeout_s": 60.0, "transport": "gloo"}
        self.engine = CheckpointEngineRegistry.new("mcore_reshard", bucket_size=1 << 20, **given, **options)

    def meet(self) -> None:
        self.updates += 1
        self.store.set(f"{self.updates}/{self.index}", json.dumps(self.engine.prepare()))
        names = [f"{self.updates}/{index}" for index in range(MESH.world + REPLICAS)]
        metadata = [json.loads(self.store.get(name)) for name in names]
        trainers, rollouts = type(self.engine).build_topology(MESH.world, REPLICAS, metadata)
        rank = self.index if self.is_trainer else self.index - MESH.world
        mine = trainers if self.is_trainer else rollouts
        self.engine.init_process_group(**{name: values[rank] for name, values in mine.items()})


def train(rank: Rank, folder: Path) -> list[float]:
    from mcore_reshard.validation.trainer.build import build_trainer

    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "world")), rank=rank.index, world_size=MESH.world)
    model = build_trainer(folder / "1", MESH)
    model_config = SimpleNamespace(hf_config=json.loads((folder / "1" / "config.json").read_text()), lora={})
    engine = SimpleNamespace(module=model.model_chunks, bridge=model.bridge, model_config=model_config)
    moved = []
    for step in (1, 2, 3):
        rank.meet()
        model.step()
        golden = {name: tensor.detach().clone().contiguous() for name, tensor in model.export()}
        if rank.index == 0:
            save_file(golden, folder / f"golden{step}")
        if step == 3:  # a failure of the trainer, before it asks the engines: all members connect anew
            engine._is_offload_param = True
            with pytest.raises(mr.RefitError, match="param_offload"):
                asyncio.run(rank.engine.send_weights(engine, step))
            engine._is_offload_param = False
            rank.meet()
        moved.append(asyncio.run(rank.engine.send_weights(engine, step))["refit/bytes"])
    rank.engine._leave()
    return moved


def generate(rank: Rank, folder: Path) -> list[Any]:
    """The calls of each step, and the parameters that differ from golden after it."""
    model = vllm_engine.build_engine(folder / "1", GenSizes(tp=1), 0)
    worker: Any = RefitWorker()
    worker.vllm_config = vllm_engine.engine_config(folder / "1", GenSizes(tp=1), 0)
    worker.get_model, worker.model_runner = lambda: model, SimpleNamespace()
    seen: list[Any] = []

    async def update(step: int) -> None:
        calls = []
        async for method, arguments in rank.engine.receive_weights(step):
            calls.append(method)
            getattr(worker, method)(**arguments)
        seen.append(calls)

    for step in (1, 2, 3):
        rank.meet()
        if step == 3:
            rank.meet()
        asyncio.run(update(step))
        arrived = {name: tensor.clone() for name, tensor in local_tensors(model).items()}
        for tensor in local_tensors(model).values():
            poison(tensor)
        load_weights(model, load_file(folder / f"golden{step}").items())
        seen.append([name for name, tensor in local_tensors(model).items() if not tensor.equal(arrived[name])])
    load_weights(model, load_file(folder / "golden1").items())
    seen.append(any(not tensor.equal(arrived[name]) for name, tensor in local_tensors(model).items()))
    worker.close_refit()
    return seen


def run(index: int, folder: Path) -> list[Any]:
    rank = Rank(index, folder)
    return train(rank, folder) if rank.is_trainer else generate(rank, folder)


def test_two_replicas_are_refitted_and_connect_anew_after_an_error(tmp_path: Path) -> None:
    from mcore_reshard.validation.trainer.build import prepare

    tiny.write_checkpoint(load_config("tiny-llama"), tmp_path / "1", 1)
    prepare()
    assert verl.BACKEND in CheckpointEngineRegistry._registry and "vllm" in sys.modules
    found = run_processes(MESH.world + REPLICAS, run, (tmp_path,), timeout_s=LIMIT_S)
    assert all(moved > 0 for of_rank in found[: MESH.world] for moved in of_rank)
    connects, stays = ["connect_refit", "refit"], ["refit"]
    assert found[MESH.world :] == [[connects, [], stays, [], connects, [], True]] * REPLICAS
