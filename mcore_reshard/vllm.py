"""The vLLM face of the package: `LLM(..., worker_extension_cls="mcore_reshard.vllm.RefitWorker")`."""

from mcore_reshard.engines.vllm.model import gen_mesh_of
from mcore_reshard.engines.vllm.worker import RefitWorker

__all__ = ["RefitWorker", "gen_mesh_of"]
