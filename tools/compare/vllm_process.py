"""What runs in vLLM's own processes: a whole LLM that does what it is told, and what its workers are asked in a comparison.

    python -m compare.vllm_process FOLDER TP EXTENSION      connects to FOLDER/line, and takes (method, args) of collective_rpc

EXTENSION is the `worker_extension_cls`, a subclass of `Compared`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch

from mcore_reshard.vllm import RefitWorker

VERSIONS = (1, 2)


class Compared(RefitWorker):
    """A worker whose weights are destroyed before each path, and compared after it."""

    get_model: Any
    expected: dict[int, dict[str, torch.Tensor]]
    handed: list[int]

    def hold_expected(self, folder: str) -> int:
        """Keep what vLLM's loader makes of both checkpoints, count what it is handed from now on; returns the process id."""
        from safetensors.torch import load_file

        from mcore_reshard.engines.vllm.model import load_weights

        model, self.expected, self.handed = self.get_model(), {}, []
        for version in VERSIONS:
            load_weights(model, load_file(f"{folder}/{version}/model.safetensors").items())
            self.expected[version] = {name: tensor.clone() for name, tensor in self._tensors().items()}
        handed, load = self.handed, type(model).load_weights

        def load_and_count(self: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
            def counted() -> Iterator[tuple[str, torch.Tensor]]:
                for name, tensor in weights:
                    handed.append(tensor.nbytes)
                    yield name, tensor

            return load(self, counted(), *args, **kwargs)

        type(model).load_weights = load_and_count  # of the class: a trace of ours loads into a copy of the model
        return os.getpid()

    def destroy(self) -> None:
        from mcore_reshard.validation.engine.slices import poison

        self.handed.clear()
        for tensor in self._tensors().values():
            poison(tensor)

    def differences(self, version: int) -> list[str]:
        found = self._tensors()
        return [
            name for name, tensor in self.expected[version].items()
            if not tensor.view(torch.uint8).equal(found[name].view(torch.uint8))
        ]  # fmt: skip

    def connect_compared(self, store: str, options: dict[str, Any]) -> str:
        """`connect_refit` by position, as this process is told."""
        return str(self.connect_refit(store, **options))

    def handed_bytes(self) -> int:
        return sum(self.handed)

    def trim(self) -> None:
        from compare.measure import trim

        trim()

    def _tensors(self) -> dict[str, torch.Tensor]:
        from mcore_reshard.engines.vllm.model import local_tensors

        return dict(local_tensors(self.get_model()))


def main(folder: Path, tp: int, extension: str) -> None:
    from vllm import LLM

    llm = LLM(
        str(folder / "1"), tensor_parallel_size=tp, worker_cls="kernel_free_worker.CPUWorker",
        worker_extension_cls=extension, load_format="auto", enforce_eager=True, skip_tokenizer_init=True,
        dtype="bfloat16", max_model_len=32, kv_cache_memory_bytes=64 << 20, gpu_memory_utilization=0.1,
    )  # fmt: skip
    with Client(str(folder / "line")) as line:
        line.send("up")
        while True:
            try:
                method, args = line.recv()
            except EOFError:  # who told it is gone
                return
            try:
                line.send((True, llm.collective_rpc(method, args=args)))
            except Exception as error:
                line.send((False, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
