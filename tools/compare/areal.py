"""AReaL's own `xccl` update beside ours: its MegatronEngine, its client, and its worker extension in a whole vLLM LLM.

    xccl     MegatronEngine.update_weights: training ranks gather each parameter, rank 0 broadcasts it to every worker

MCORE_RESHARD_AREAL: folders, joined by ":", from which `areal` 1.0.4 and what it imports can be imported. Stand-ins:
`MegatronEngine.initialize`, which needs CUDA, so its fields are set; and AReaL's HTTP server, whose routes are answered here.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.validation.engine.slices import GenSizes

from . import vllm
from .measure import Part
from .trainer import Trainer
from .vllm import Engine, VllmDriver, engine_processes, part_of

PACKAGES = ("areal", "vllm", "torch", "megatron-core", "megatron-bridge")
PATHS = {"xccl": "`MegatronEngine.update_weights`, `xccl` over gloo", "ours": "ours, `RefitWorker`"}
__all__ = ["PACKAGES", "PATHS", "engine_part", "engine_processes", "prepare", "train_part"]
_FOLDERS = [folder for folder in os.environ.get("MCORE_RESHARD_AREAL", "").split(os.pathsep) if folder]
_GROUP = ("master_address", "master_port", "rank_offset", "world_size", "backend", "group_name")
_ROUTES = {  # of areal/engine/vllm_ext/areal_vllm_server.py, which vLLM 0.32 cannot import: route -> (method, arguments)
    "areal_init_weights_update_group": ("areal_init_update_weight_group", _GROUP),
    "areal_set_update_weight_meta": ("areal_set_weight_meta", ("names", "dtypes", "shapes", "group_name")),
    "areal_update_weights_xccl": ("areal_update_weight_xccl", ()),
}
_GENERATION = ("areal_pause_generation", "areal_continue_generation")


def prepare() -> None:
    """Let AReaL be found, here and in vLLM's processes. Raises ImportError naming the environment variable."""
    sys.path += _FOLDERS
    vllm.prepare()
    try:
        import areal.engine.megatron_engine  # noqa: F401
    except ImportError as error:
        raise ImportError("set MCORE_RESHARD_AREAL to folders with AReaL 1.0.4 and what it imports") from error


class ArealEngine(Engine):
    """A whole LLM behind AReaL's routes."""

    def answer(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        if route in _GENERATION:
            return {"success": True, "message": ""}
        if route not in _ROUTES:
            return super().answer(route, body)
        method, names = _ROUTES[route]
        answers = self.on_workers(method, *(body[name] for name in names))
        failed = [message for succeeded, message in answers if not succeeded]
        return {"success": not failed, "message": "; ".join(failed)}


def engine_part(rank: int, folder: Path, mesh: TrainMesh, sizes: GenSizes) -> Part:
    return part_of(ArealEngine(folder, sizes, "compare.areal_worker.ComparedAreal"), [*PATHS])


def train_part(rank: int, folder: Path, mesh: TrainMesh, sizes: GenSizes) -> Part:
    driver = ArealDriver(Trainer(rank, mesh, folder), sizes)
    return Part(
        set_up={"xccl": driver.join_group, "ours": driver.connect},
        run={"xccl": driver.update, "ours": driver.refit},
        set_weights=driver.trainer.set_weights,
        differences=lambda version: [],
    )


class ArealDriver(VllmDriver):
    """One rank of AReaL's MegatronEngine."""

    def join_group(self) -> None:
        import torch.distributed as dist
        from areal.api.alloc_mode import ModelAllocation, ParallelStrategy, SchedulingStrategy
        from areal.api.cli_args import InferenceEngineConfig
        from areal.api.io_struct import WeightUpdateMeta
        from areal.engine.megatron_engine import MegatronEngine
        from areal.engine.vllm_remote import VLLMBackend
        from areal.infra.remote_inf_engine import RemoteInfEngine
        from areal.utils import logging

        model, rank = self.trainer.model, self.trainer.rank
        engine = self.engine = MegatronEngine.__new__(MegatronEngine)  # initialize() needs CUDA: these are what it sets
        engine.model, engine.bridge, engine.bridge_cls = model.model_chunks, model.bridge, "megatron-bridge"
        engine.hf_config, engine.tf_config = model.bridge.hf_pretrained.config, model.model_chunks[0].config
        engine.config = SimpleNamespace(use_lora=False)
        engine.mcore_config = SimpleNamespace(use_bridge_for_update_weights=False)  # its default
        engine.rollout_engine = engine.quantization_config = None
        engine.weight_update_group_initialized = engine.is_offload = engine.fp8_direct_convert = False
        engine._cpu_group, engine.process_group_initialized, engine.is_pp_head = dist.group.WORLD, True, rank == 0
        engine._glu_fc1_names = engine._build_glu_fc1_names()
        engine.weight_update_group_name = "update_weight_group"
        engine.engine_lock = SimpleNamespace(acquire=lambda: None, release=lambda: None)  # one head: nobody else asks
        engine.logger = logging.getLogger("areal")
        client = RemoteInfEngine(InferenceEngineConfig(request_timeout=300.0, request_retries=1), VLLMBackend())
        client.logger, client.addresses = engine.logger, [self.url.removeprefix("http://")]
        strategy = ParallelStrategy(tensor_parallel_size=self.sizes.tp)
        allocation = ModelAllocation("vllm", "rollout", strategy, SchedulingStrategy("separation"))
        self.meta = WeightUpdateMeta("xccl", gen_allocation=allocation)
        engine.connect_engine(client, self.meta)
        self.tell("done")

    def update(self) -> None:
        self.engine.update_weights(self.meta)
        self.tell("done")
