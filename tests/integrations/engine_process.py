"""What runs in vLLM's own processes: an extension that saves parameters, and an LLM that is refitted by vLLM's calls.

    python engine_process.py FOLDER ADDRESS TP STEPS [lora]

Each worker writes its parameters to FOLDER/engine{step}-{replica}-{rank}.safetensors; FOLDER/told.json has what was refused.
FOLDER/started says that the engine is up.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcore_reshard.vllm import RefitWorker


class SavesParameters:
    """A `worker_extension_cls`: plain data in, none out, so that HTTP can call it."""

    vllm_config: Any
    get_model: Any

    def save_parameters(self, folder: str, step: int) -> None:
        from safetensors.torch import save_file

        from mcore_reshard.engines.vllm.adapters import without_adapters
        from mcore_reshard.engines.vllm.model import local_tensors

        parallel, model = self.vllm_config.parallel_config, self.get_model()
        with without_adapters(model):
            tensors = {name: tensor.clone().contiguous() for name, tensor in local_tensors(model).items()}
        name = f"engine{step}-{parallel.data_parallel_index}-{parallel.rank}.safetensors"
        save_file(tensors, Path(folder) / name)

    def layers_with_lora(self) -> int:
        from vllm.lora.layers import BaseLayerWithLoRA

        return sum(isinstance(layer, BaseLayerWithLoRA) for layer in self.get_model().modules())

    def step_with_tokens(self) -> str:
        """What a step of the scheduler meets; where nothing refuses it, the model runner does not know what it was given."""
        from types import SimpleNamespace

        try:
            self.model_runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=1))  # type: ignore[attr-defined]
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""


class RefitsAndSavesParameters(SavesParameters, RefitWorker):
    """Both, where workers are called by `collective_rpc` alone."""


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def main() -> None:
    from vllm import LLM

    folder, address, tp, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    lora: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8} if sys.argv[5:] == ["lora"] else {}
    llm = LLM(
        f"{folder}/checkpoint", weight_transfer_config={"backend": "mcore_reshard"}, tensor_parallel_size=tp,
        worker_cls="kernel_free_worker.CPUWorker", worker_extension_cls="engine_process.SavesParameters",
        load_format="dummy", enforce_eager=True, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=32,
        kv_cache_memory_bytes=64 << 20, gpu_memory_utilization=0.1, **lora,
    )  # fmt: skip

    def update(version: int) -> None:
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": version}})
        llm.finish_weight_update()

    def init(**info: Any) -> None:
        llm.init_weight_transfer_engine({"init_info": info})

    right: dict[str, Any] = {
        "store": address,
        "connect_timeout_s": 240.0,
        "options": {"transport": "gloo", "timeout_s": 60.0},
    }
    told: dict[str, Any] = {
        "wrong": refused(lambda: init(stor=address, replica=-1, options={"transport": "rdma", "bucket": 1})),
        "early": refused(lambda: update(1)),
    }
    Path(folder, "started").touch()
    init(**right)
    for step in range(1, steps + 1):
        update(step)
        llm.collective_rpc("save_parameters", args=(folder, step))
    told["layers_with_lora"] = llm.collective_rpc("layers_with_lora")[-1]
    for level in (1, 2):
        llm.sleep(level=level)
        told[f"asleep_{level}"] = refused(lambda: update(steps + 1))
        llm.wake_up()
        told[f"woken_{level}"] = llm.collective_rpc("step_with_tokens")[-1]
    update(steps + 1)  # the trainer's weights have not changed
    told["awake"] = llm.collective_rpc("step_with_tokens")[-1]
    right["options"]["session"] = "second"
    init(**right)
    update(steps + 2)
    llm.collective_rpc("save_parameters", args=(folder, steps + 2))
    Path(folder, "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
