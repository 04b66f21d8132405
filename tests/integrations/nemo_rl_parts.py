"""NeMo-RL's parts where there is no GPU, in Ray actors: what stands in is listed in docs/support.md.

NEMO_RL=/path/to/checkout python nemo_rl_parts.py FOLDER ENGINES TP      # what test_nemo_rl.py runs
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

TRANSPORT = "mcore_reshard.integrations.nemo_rl:RefitEngine"
OPTIONS = {"transport": "gloo", "timeout_s": 45.0, "connect_timeout_s": 240.0}


def on_cpu() -> None:
    """What NeMo-RL asks of CUDA; and its import, which a check of transformers' version refuses."""
    import transformers

    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=8 << 30)  # type: ignore[assignment]
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    actual = transformers.__version__
    sys.modules["transformers"].__version__ = "5.11.0"  # type: ignore[attr-defined]
    import nemo_rl.models.policy  # noqa: F401

    sys.modules["transformers"].__version__ = actual  # type: ignore[attr-defined]


class PolicyActor:
    """NeMo-RL's mixins of a policy worker around a real Megatron-Core model."""

    def __init__(self, rank: int, world: int, folder: str) -> None:
        import torch.distributed as dist

        from mcore_reshard.planner.layout.mesh import TrainMesh
        from mcore_reshard.validation.trainer.build import build_trainer, prepare

        prepare()
        on_cpu()
        from nemo_rl.models.policy.workers.checkpoint_engine import (
            MegatronCheckpointEngineSendMixin,
            PolicyCheckpointEngineMixin,
        )

        from mcore_reshard.integrations.nemo_rl import FoundWorker

        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store"), rank=rank, world_size=world)
        self.trainer = trainer = build_trainer(f"{folder}/checkpoint", TrainMesh(tp=world))

        class Impl(MegatronCheckpointEngineSendMixin, PolicyCheckpointEngineMixin):  # as MegatronPolicyWorkerImpl
            def __init__(self) -> None:
                (self.model,), self.megatron_bridge, self.rank = trainer.model_chunks, trainer.bridge, rank

            def _iter_params_with_optional_kv_scales(self, kv_scales: Any = None, conversion_tasks: Any = None) -> Any:
                raise AssertionError("the export of whole tensors has begun")
                yield

        class PolicyWorker(FoundWorker, Impl):
            pass

        self.worker, self.folder = PolicyWorker(), folder

    def step(self, step: int) -> None:
        from safetensors.torch import save_file

        self.trainer.step()
        golden = {name: tensor.detach().clone().contiguous() for name, tensor in self.trainer.export()}
        if self.worker.rank == 0:
            save_file(golden, f"{self.folder}/golden{step}.safetensors")

    async def checkpoint_engine_rpc(self, checkpoint_method: str, method_kwargs: Any = None) -> Any:
        return await self.worker.checkpoint_engine_rpc(checkpoint_method, method_kwargs)


def save_parameters(worker: Any, file: str) -> None:
    from safetensors.torch import save_file

    from mcore_reshard.engines.vllm.model import local_tensors

    tensors = {name: tensor.clone().contiguous() for name, tensor in local_tensors(worker.get_model()).items()}
    save_file(tensors, f"{file}-{worker.rank}.safetensors")


class GenerationActor:
    """A whole vLLM with NeMo-RL's own worker extension, behind NeMo-RL's mixin of calls."""

    def __init__(self, index: int, tp: int, folder: str) -> None:
        on_cpu()
        from nemo_rl.models.generation.vllm.checkpoint_engine import VllmCheckpointEngineRpcMixin
        from vllm import LLM

        class Engine(VllmCheckpointEngineRpcMixin):
            llm = LLM(
                f"{folder}/checkpoint", tensor_parallel_size=tp, worker_cls="nemo_rl_vllm_worker.VllmWorker",
                worker_extension_cls=(
                    "nemo_rl.models.generation.vllm.vllm_backend.VllmInternalWorkerExtensionWithCheckpointEngine"
                ),
                load_format="dummy", enforce_eager=True, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=32,
                kv_cache_memory_bytes=64 << 20, gpu_memory_utilization=0.1,
            )  # fmt: skip

        self.engine, self.file = Engine(), f"{folder}/engine{index}"

    def checkpoint_engine_rpc(self, checkpoint_method: str, method_args: tuple[Any, ...] = ()) -> Any:
        return self.engine.checkpoint_engine_rpc(checkpoint_method, method_args)

    def save(self, step: int) -> None:
        self.engine.llm.collective_rpc(save_parameters, args=(f"{self.file}-{step}",))


class Group:
    """Stands for RayWorkerGroup: the two calls that the synchronizer makes."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    def run_all_workers_single_data(
        self, method: str, *args: Any, run_rank_0_only_axes: Any = None, **kwargs: Any
    ) -> Any:
        return [getattr(worker, method).remote(*args, **kwargs) for worker in self.workers]

    def run_all_workers_multiple_data(
        self, method: str, *, common_kwargs: Any = None, run_rank_0_only_axes: Any = None, **lists: Any
    ) -> Any:
        rows = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
        pairs = zip(self.workers, rows, strict=True)
        return [getattr(worker, method).remote(**row, **(common_kwargs or {})) for worker, row in pairs]


def main(folder: str, engines: int, tp: int, steps: int, release: bool) -> None:
    import ray

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=True)
    on_cpu()
    from nemo_rl.weight_sync.factory import create_weight_synchronizer

    policies = [ray.remote(PolicyActor).remote(rank, 2, folder) for rank in range(2)]
    generations = [ray.remote(GenerationActor).remote(index, tp, folder) for index in range(engines)]
    config = {
        "backend": "vllm",
        "vllm_cfg": {"async_engine": False},
        "refit_transport": TRANSPORT,
        "refit_cfg": {TRANSPORT: {"release_after_refit": release, **OPTIONS}},
    }
    policy = SimpleNamespace(worker_group=Group(policies), prepare_refit_info=lambda: None)
    generation = SimpleNamespace(
        worker_group=Group(generations), cfg=config, dp_size=engines, prepare_refit_info=lambda info: None
    )
    synchronizer = create_weight_synchronizer(policy, generation, "vllm", colocated=False)
    synchronizer.init_communicator()
    stale = []
    for step in range(1, steps + 1):
        ray.get([each.step.remote(step) for each in policies])
        synchronizer.sync_weights(kv_scales=None)
        stale.append(synchronizer.is_stale)
        ray.get([each.save.remote(step) for each in generations])
    error = ""
    if not release:
        ray.get([each.checkpoint_engine_rpc.remote("finalize_checkpoint_engine") for each in policies])  # they leave
        try:
            synchronizer.sync_weights(kv_scales=None)
        except Exception as raised:
            error = str(raised)
        stale.append(synchronizer.is_stale)
    with suppress(Exception):
        synchronizer.shutdown()
    Path(folder, "seen.json").write_text(
        json.dumps({"synchronizer": type(synchronizer).__name__, "stale": stale, "error": error})
    )
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), release=os.environ.get("RELEASE") == "1")
