"""The processes of test_verl.py: verl's classes over a tiny Megatron-Core or FSDP2 model, and over a whole vLLM.

Stand-ins: the constructors of verl's model engines and what its FSDP engine asks of CUDA, and its HTTP server, of which a Ray
actor has the methods that verl's replica and adapter call. A module of its own: Ray cannot pickle what verl decorates from a
test module.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mcore_reshard.validation.trainer import te_standin

te_standin.install()  # before verl imports Megatron

import ray  # noqa: E402
import torch  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from verl.checkpoint_engine import CheckpointEngineRegistry  # noqa: E402
from verl.single_controller.base import Worker  # noqa: E402
from verl.utils.import_utils import import_external_libs  # noqa: E402
from verl.workers.engine_workers import ActorRolloutRefWorker  # noqa: E402
from verl.workers.rollout import RolloutReplica  # noqa: E402

from mcore_reshard.planner.layout.mesh import TrainMesh  # noqa: E402
from mcore_reshard.validation import tiny  # noqa: E402

MODULE = "mcore_reshard.integrations.verl"
CONFIG = {
    "backend": "mcore_reshard",
    "custom_backend_module": MODULE,
    "engine_kwargs": {"mcore_reshard": {"gen": "tp=1", "connect_timeout_s": 240.0, "timeout_s": 60.0}},
}
CPU = {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VERL_USE_EXTERNAL_PLUGINS": "none",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
}  # fmt: skip


class Trainer(Worker):
    """verl's own `update_weights` and `execute_checkpoint_engine`, on a worker that skipped `init_model`."""

    update_weights = ActorRolloutRefWorker.update_weights
    execute_checkpoint_engine = ActorRolloutRefWorker.execute_checkpoint_engine

    def __init__(self, folder: str) -> None:
        super().__init__()
        torch.distributed.init_process_group("gloo", rank=self.rank, world_size=self.world_size)
        self.folder, self.steps = Path(folder), 0
        self.config = OmegaConf.create({"rollout": {"checkpoint_engine": CONFIG}})
        self.kind = ""

    def hold(self, kind: str) -> None:
        """Make the model engine: "megatron" on tp=2, or "fsdp" over both ranks."""
        from transformers import AutoConfig

        if kind == self.kind:
            return
        if self.kind:
            self.checkpoint_engine._leave()  # from now on this process stands for another one
        self.kind = kind
        # The rest of this part as in ActorRolloutRefWorker.init_model, part 4.
        import_external_libs(CONFIG["custom_backend_module"])
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            CONFIG["backend"],
            is_master=torch.distributed.get_rank() == 0,
            bucket_size=1 << 20,
            **CONFIG["engine_kwargs"]["mcore_reshard"],
        )

        of = {"model_config": SimpleNamespace(hf_config=AutoConfig.from_pretrained(self.folder / "1"), lora={})}
        of |= {"_is_offload_param": False, "_qat_enabled": False, "_uses_fsdp2_cpu_offload_policy": False}
        if kind == "megatron":
            from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

            from mcore_reshard.validation.trainer.build import build_trainer, prepare

            prepare()
            self.model = build_trainer(self.folder / "1", TrainMesh(tp=2))
            of |= {"module": self.model.model_chunks, "bridge": self.model.bridge, "vanilla_bridge": False}
            engine = MegatronEngineWithLMHead
        else:
            from helpers.dtensor_trainer import load, shard
            from verl.workers.engine.fsdp import transformer_impl

            from mcore_reshard.integrations.verl_engines import RefitFSDPEngine

            transformer_impl.get_device_id = lambda: "cpu"  # this and the next know CUDA alone
            transformer_impl.log_gpu_memory_usage = lambda *_, **__: None
            of |= {"module": shard(load(self.folder / "1"), "fsdp")}
            engine = RefitFSDPEngine
        made = object.__new__(engine)
        vars(made).update(of)
        self.actor = SimpleNamespace(engine=made)

    def train(self, checkpoint: str) -> None:
        """Take the weights of this checkpoint, in place."""
        if isinstance(self.actor.engine.module, list):
            self.model.load(self.folder / checkpoint)
            return
        from helpers.dtensor_trainer import load, refill

        refill(self.actor.engine.module, load(self.folder / checkpoint).state_dict())

    def export(self) -> None:
        """Write golden, what Megatron-Bridge exports, to `golden`."""
        from safetensors.torch import save_file

        golden = {name: tensor.detach().clone().contiguous() for name, tensor in self.model.export()}
        if self.rank == 0:
            save_file(golden, self.folder / "golden")

    def offload(self, offloads: bool) -> None:
        self.actor.engine._is_offload_param = offloads


class Replica(RolloutReplica):
    """verl's own replica over a server that is there already."""

    async def launch_servers(self) -> None:
        raise NotImplementedError


def differences(worker: Any, golden: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """The parameters of a vLLM worker that differ from what vLLM's loader makes of golden; it then holds golden."""
    from mcore_reshard.engines.vllm.model import load_weights, local_tensors
    from mcore_reshard.validation.engine.slices import poison

    model = worker.get_model()
    arrived = {name: tensor.clone() for name, tensor in local_tensors(model).items()}
    for tensor in local_tensors(model).values():
        poison(tensor)
    load_weights(model, golden)
    return [name for name, tensor in local_tensors(model).items() if not tensor.equal(arrived[name])]


class Server:
    """Stands for vLLMHttpServer: a whole vLLM, its worker extended as the configuration says."""

    def __init__(self, folder: str) -> None:
        from vllm import LLM

        self.folder, self.calls, self.steps = Path(folder), list[str](), list[int]()
        self.llm = LLM(
            str(self.folder / "1"),
            worker_cls="kernel_free_worker.CPUWorker",
            worker_extension_cls="mcore_reshard.integrations.verl_vllm.RefitExtension",
            load_format="dummy",
            enforce_eager=True,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=32,
            kv_cache_memory_bytes=64 << 20,
            gpu_memory_utilization=0.1,
        )

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple = (), kwargs: Any = None) -> None:
        self.calls.append(method)
        self.llm.collective_rpc(method, timeout=timeout, args=args, kwargs=kwargs)  # verl's drops the answer, too

    def set_global_steps(self, global_steps: int) -> None:
        self.steps.append(global_steps)

    def _called(self, name: str) -> None:
        self.calls.append(name)

    def abort_all_requests(self, reject_request: bool = False) -> None:
        self._called("abort_all_requests")

    def release_kv_cache(self) -> None:
        self._called("release_kv_cache")

    def resume_kv_cache(self) -> None:
        self._called("resume_kv_cache")

    def resume_generation(self) -> None:
        self._called("resume_generation")

    def clear_kv_cache(self) -> None:
        self._called("clear_kv_cache")

    def seen(self) -> tuple[list[str], list[int]]:
        calls, self.calls = self.calls, []
        return calls, self.steps

    def differences(self, golden: str) -> list[str]:
        """From golden of the trainer, or from a tagged checkpoint."""
        from safetensors.torch import load_file

        tensors = (
            dict(tiny.payload(tiny.checkpoint_shapes(tiny.TINY["qwen3"]), int(golden))) if golden.isdigit() else None
        )
        tensors = tensors or load_file(self.folder / golden)
        (found,) = self.llm.collective_rpc(differences, args=([*tensors.items()],))
        return found


def server(number: int, folder: Path) -> Any:
    """The actor under the name by which verl's adapter looks for it."""
    return ray.remote(Server).options(name=f"vllm_server_{number}_0", num_cpus=0).remote(str(folder))


def runtime_env() -> dict[str, Any]:
    tests = Path(__file__).parents[1]
    paths = [
        str(tests.parent),
        str(tests),
        str(tests / "integrations"),
        str(tests / "engine"),
        os.environ.get("PYTHONPATH", ""),
    ]
    return {"env_vars": {**CPU, "PYTHONPATH": os.pathsep.join(filter(None, paths))}}
