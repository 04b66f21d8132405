"""The adapter's vLLM worker where vLLM's kernels are not built: import it as `worker_cls`, beside NeMo-RL's extension."""

from kernel_free_worker import CPUWorker  # noqa: F401  (defines the one missing op)
from nemo_rl_parts import on_cpu

on_cpu()

from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension  # noqa: E402

# NeMo-RL runs vLLM 0.25; the worker of vLLM 0.32 has a method of this name, and vLLM refuses extensions that have it too.
del VllmInternalWorkerExtension.synchronize_device

from mcore_reshard.integrations.nemo_rl import VllmWorker  # noqa: E402

__all__ = ["VllmWorker"]
