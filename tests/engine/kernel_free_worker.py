"""vLLM's own CPU worker, started where vLLM's C++ kernels are not built: its constructor calls one of them."""

from __future__ import annotations

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from mcore_reshard.validation.standins import hide_amx

hide_amx()

LIBRARY = torch.library.Library("_C", "FRAGMENT")  # the op is undefined again when this is collected
if not hasattr(torch.ops._C, "init_cpu_memory_env"):
    LIBRARY.define("init_cpu_memory_env(int[] nodes) -> ()")
    LIBRARY.impl("init_cpu_memory_env", lambda *_: None, "CompositeExplicitAutograd")

__all__ = ["CPUWorker"]
