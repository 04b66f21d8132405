"""verl's worker extension beside ours, and a platform of verl's that is a CPU: verl has none.

verl asks its platform for the device's name, for waits and freed memory, and whether handles of device memory can be sent.
They cannot, so verl takes the shared memory that it has for such devices.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA


class CpuPlatform(PlatformCUDA):
    """What verl's bucketed transfer asks for."""

    device_name = "cpu"
    device_module: Any = SimpleNamespace(synchronize=lambda *_: None, empty_cache=lambda: None)

    def is_ipc_supported(self) -> bool:
        return False


set_platform(CpuPlatform())

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension  # noqa: E402

from .vllm_process import Compared  # noqa: E402


class ComparedVerl(Compared, vLLMColocateWorkerExtension):
    """vLLM takes one extension class."""

    def receive_from_verl(self) -> None:
        """As verl's server calls it: shared memory, no adapter."""
        self.update_weights_from_ipc(use_shm=True)
