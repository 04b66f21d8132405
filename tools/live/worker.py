"""The package's worker extension, and what only a live engine can say: its kernels, and sums of all its bytes."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from mcore_reshard.engines.vllm.model import local_tensors
from mcore_reshard.vllm import RefitWorker

_DERIVED = ("W_UV", "W_UK_T", "sinks")  # what attention derives from weights after loading


class LiveWorker(RefitWorker):
    """`LLM(..., worker_extension_cls="live.worker.LiveWorker")`; vLLM calls the methods on every worker."""

    weight_transfer_engine: Any
    model_runner: Any  # these and the others belong to the worker
    device: torch.device
    get_model: Callable[[], torch.nn.Module]

    def live_kernels(self) -> dict[str, int]:
        """How vLLM computes each kind of layer, and of how many layers: {"UnquantizedFusedMoEMethod/TRITON": 4}."""
        kinds: Counter[str] = Counter()
        for layer in self.get_model().modules():
            if (method := getattr(layer, "quant_method", None)) is not None:
                names = [type(method).__name__]
                names += [
                    getattr(method, name).name
                    for name in ("unquantized_backend", "fp8_backend")
                    if hasattr(method, name)
                ]
                if getattr(method, "fp8_linear", None) is not None:
                    names.append(type(method.fp8_linear).__name__)
                kinds["/".join(names)] += 1
            if hasattr(layer, "impl") and hasattr(layer, "_k_scale"):
                kinds[type(layer.impl).__name__] += 1
        return dict(kinds)

    def live_sums(self) -> dict[str, int]:
        """CRC-32 of the bytes of each parameter, and of each tensor that attention derives from some."""
        tensors: dict[str, torch.Tensor] = dict(self.get_model().named_parameters())
        for name, layer in self.get_model().named_modules():
            for owner in (layer, getattr(layer, "impl", None)):
                for leaf in _DERIVED:
                    if isinstance(value := getattr(owner, leaf, None), torch.Tensor):
                        tensors[f"{name}.{leaf}, derived"] = value
        return {name: _sum_of(tensor) for name, tensor in tensors.items()}

    def live_poison(self) -> None:
        """Fill all that a refit writes with NaN: what the next one leaves out shows in its sum."""
        for tensor in local_tensors(self.get_model()).values():
            tensor.view(-1).view(torch.uint8).fill_(0xFF)

    def live_report(self) -> dict[str, Any]:
        """The report of the last refit by weight transfer."""
        return asdict(self.weight_transfer_engine.last_report)

    def live_close(self) -> None:
        """Leave the session, by whichever door this worker came."""
        if (engine := getattr(self, "weight_transfer_engine", None)) is not None:
            engine.shutdown()
        self.close_refit()

    def live_memory_bytes(self) -> int:
        """The most that torch has allocated on this worker's GPU."""
        return torch.cuda.max_memory_allocated()


def _sum_of(tensor: Any) -> int:
    return zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
