"""Experts that a backend rearranges once they are loaded: where their elements end up, by vLLM's own code.

    loaded [gate; up]  ->  process_weights_after_loading of FlashInfer's CUTLASS backend  ->  [up; gate]

The rearrangement runs on a meta twin of the loaded layer. The backend is the live layer's: none is chosen anew, and no
kernel is built. Source: vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py, oracle/unquantized.py, 0.32.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from .walked import Modules

# Backends that rearrange in `convert_to_unquantized_kernel_format` alone, by operators that a recorder follows.
_TRACED_BACKENDS = {"FLASHINFER_CUTLASS"}


def rearranged_parameters(model: Modules) -> set[str]:
    """The parameters that a backend has rearranged after loading, and whose new order a trace can say."""
    return {f"{path}.{name}" for path, layer in _layers(model) for name, _ in layer.named_parameters(recurse=False)}


def rearrange(twin: torch.nn.Module) -> None:
    """Do to a loaded twin what the backends of the live model have done to its layers."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as unquantized

    built = mock.Mock()
    with mock.patch.object(unquantized, "make_unquantized_moe_kernel", lambda *_, **__: built):  # vLLM 0.26 builds one
        for _, layer in _layers(twin):
            layer.quant_method, layer.moe_config = copy.copy(layer.quant_method), copy.copy(layer.moe_config)
            layer.quant_method.moe_kernel = built  # vLLM 0.32 rearranges as for an update of weights
            layer.quant_method.process_weights_after_loading(layer)


def _layers(model: Modules) -> Iterator[tuple[str, Any]]:
    for path, layer in model.named_modules():
        method: Any = getattr(layer, "quant_method", None) if layer._parameters else None
        if type(method).__name__ == "UnquantizedFusedMoEMethod" and method.unquantized_backend.name in _TRACED_BACKENDS:
            yield path, layer
