"""What the example of Ray is given where there is no GPU: a trainer with stand-in kernels, and a vLLM that never generates."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mcore_reshard.kernels.errors import DeadlineError, Waiting

LLM = {
    "worker_cls": "kernel_free_worker.CPUWorker", "load_format": "dummy", "enforce_eager": True,
    "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 32, "kv_cache_memory_bytes": 64 << 20,
    "gpu_memory_utilization": 0.1,
}  # fmt: skip
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "RES_OPTIONS": "timeout:1 attempts:1",
}  # fmt: skip


def build(model: str, world: int) -> tuple[list[Any], Any]:
    from mcore_reshard.planner.layout.mesh import TrainMesh
    from mcore_reshard.validation.trainer.build import build_trainer

    os.environ["MEGATRON_CONFIG_LOCK_DIR"] = f"{model}/locks{os.getpid()}"
    trainer = build_trainer(model, TrainMesh(tp=world))
    return trainer.model_chunks, trainer.bridge


def load(train_rank: Any, checkpoint: str) -> None:
    from mcore_reshard.validation.trainer.build import Trainer

    Trainer(train_rank._bridge, train_rank._chunks).load(checkpoint)


def differing(engine: Any, checkpoint: str) -> tuple[list[str], int]:
    """Names of the engine's tensors that differ from what vLLM's own loader makes of a checkpoint; how many there are."""
    return engine.llm.collective_rpc(_differing, args=(checkpoint,))[0]


def _differing(worker: Any, checkpoint: str) -> tuple[list[str], int]:
    from safetensors.torch import load_file

    from mcore_reshard.engines.vllm.model import load_weights, local_tensors
    from mcore_reshard.validation.engine.slices import poison

    model = worker.get_model()
    found = {name: tensor.clone() for name, tensor in local_tensors(model).items()}
    for tensor in local_tensors(model).values():
        poison(tensor)
    load_weights(model, load_file(Path(checkpoint) / "model.safetensors").items())
    loaded = local_tensors(model)
    wrong = [name for name, tensor in loaded.items() if not tensor.equal(found[name])]
    for name, tensor in loaded.items():
        tensor.copy_(found[name])
    return wrong, len(loaded)


def fail() -> None:
    error = DeadlineError(Waiting("gen:1", "train:0", 2, "lm_head.weight", False), "silent for 3 s")
    error.others = (DeadlineError(Waiting("gen:1", "train:1", 2, "norm", False), "silent"),)
    raise error
