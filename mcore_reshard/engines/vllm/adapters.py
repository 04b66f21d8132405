"""Engines with `enable_lora`: vLLM wraps layers, and a refit writes what is wrapped, the base weights.

    model.layers.0.self_attn.qkv_proj.base_layer.weight      outside of `without_adapters`
    model.layers.0.self_attn.qkv_proj.weight                 within it, as `load_weights` and layout rules have it

Source: vllm/lora/model_manager.py (create_lora_manager) and lora/layers/base.py, 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Within it, base layers are in the place of the layers with LoRA that wrap them. No forward may run meanwhile."""
    from vllm.lora.layers import BaseLayerWithLoRA

    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    try:
        for parent, name, child in wrapped:
            parent._modules[name] = child.base_layer
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child
