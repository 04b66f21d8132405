"""Tiny configs and the checkpoints that the engine tests load."""

from __future__ import annotations

from typing import Any

import torch

from mcore_reshard.kernels.copies.cast_arithmetic import quantized
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.validation.engine.slices import GenSizes, StandInEngine
from mcore_reshard.validation.tiny import checkpoint_shapes, payload

Config = dict[str, Any]


def tiny(name: str, **changes: Any) -> Config:
    """A built-in tiny config with some fields changed."""
    return {**load_config(f"tiny-{name}"), **changes}


def checkpoint(config: Config, version: int) -> dict[str, torch.Tensor]:
    """HF tensors whose elements say where they belong; fresh ones, since vLLM's loaders may write into them."""
    tensors = dict(payload(checkpoint_shapes(config), version))
    for name, tensor in tensors.items():
        if name.endswith("A_log"):  # vLLM keeps -exp(A_log), which is -inf for most of the payload
            tensors[name] = torch.arange(tensor.numel()).float() / 8 + version / 16
    return tensors


def fp8_checkpoint(config: Config, block: tuple[int, int], version: int) -> dict[str, torch.Tensor]:
    """An FP8 checkpoint: E4M3 data that are hashes of where they are, and scales that differ from block to block."""
    names = StandInEngine(config, GenSizes(), 0).checkpoint_shapes
    weights = {name for name in names if f"{name}_scale_inv" in names}
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    tensors = {}
    for name, tensor in payload(checkpoint_shapes(plain), version, dict.fromkeys(weights, block)):
        if name in weights:
            tensors[name], tensors[name + "_scale_inv"] = quantized(tensor, block)
        else:
            tensors[name] = tensor
    return tensors
