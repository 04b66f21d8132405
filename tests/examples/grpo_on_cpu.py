"""examples/grpo_megatron_vllm/grpo.py on a CPU: Megatron's dropout asks CUDA for random numbers, also where it drops nothing."""

from __future__ import annotations

import contextlib
import sys
from unittest import mock

import grpo
import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

if __name__ == "__main__":
    torch.set_num_threads(1)
    with (
        mock.patch.object(CudaRNGStatesTracker, "fork", lambda self, *_: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
    ):
        sys.exit(grpo.main())
