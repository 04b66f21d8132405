"""Runs the README's lines for the engine on a whole vLLM: `python readme_engine.py FOLDER ADDRESS STEPS`.

After each refit every worker writes its parameters to FOLDER/engine{step}-{rank}.safetensors.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from helpers.front_door import lines_with


def save_parameters(worker: Any, folder: str, step: int) -> None:
    from safetensors.torch import save_file

    from mcore_reshard.engines.vllm.model import local_tensors

    tensors = {name: tensor.clone().contiguous() for name, tensor in local_tensors(worker.get_model()).items()}
    save_file(tensors, Path(folder) / f"engine{step}-{worker.rank}.safetensors")


def started(folder: str, *args: Any, **kwargs: Any) -> Any:
    """vLLM's LLM as it starts without kernels: eager and with a small cache of a fixed size it runs no forward."""
    from vllm import LLM

    llm = LLM(
        *args, **kwargs, worker_cls="kernel_free_worker.CPUWorker", load_format="dummy", enforce_eager=True,
        skip_tokenizer_init=True, dtype="bfloat16", max_model_len=32, kv_cache_memory_bytes=64 << 20,
        gpu_memory_utilization=0.1,
    )  # fmt: skip
    call = llm.collective_rpc

    def call_and_save(method: str, *given: Any, **named: Any) -> Any:
        result = call(method, *given, **named)
        if method == "refit":
            call(save_parameters, args=(folder, named["args"][0]))
        return result

    llm.collective_rpc = call_and_save
    return llm


def main() -> None:
    folder, address, steps = sys.argv[1:]
    names = {"LLM": partial(started, folder), "model_path": f"{folder}/checkpoint", "steps": int(steps)}
    exec(lines_with("LLM(", address), names)


if __name__ == "__main__":
    main()
