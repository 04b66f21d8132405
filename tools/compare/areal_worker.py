"""The worker extension of a comparison with AReaL: AReaL's own, beside ours."""

from areal.engine.vllm_ext.vllm_worker_extension import VLLMWorkerExtension

from .vllm_process import Compared


class ComparedAreal(Compared, VLLMWorkerExtension):
    """vLLM takes one extension class."""
