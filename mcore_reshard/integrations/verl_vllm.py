"""verl's two ends at vLLM: the adapter beside a server, and the extension of its workers."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from mcore_reshard.vllm import RefitWorker

from .verl import BACKEND


class RefitServerAdapter(ServerAdapter):  # type: ignore[misc]
    """verl's adapter of a vLLM server. From our engine it takes calls; from others, tensors, as verl's own does."""

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """Call the vLLM workers of this replica; the first rank of a replica speaks for it. Raises what they raise."""
        if wire_format != BACKEND:
            await super().update_weights(weights, global_steps=global_steps, wire_format=wire_format, **kwargs)
            return
        async for method, arguments in weights:
            await self._execute_method(method, kwargs=arguments)
        if self._ensure_server_handle():
            await self.server_handle.clear_kv_cache.remote()
            if global_steps is not None:
                await self.server_handle.set_global_steps.remote(global_steps)


class RefitExtension(vLLMColocateWorkerExtension, RefitWorker):  # type: ignore[misc]
    """The extension that verl gives its vLLM workers, with refits."""
