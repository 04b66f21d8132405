"""Engines with `enable_lora`: refits write the base weights that vLLM's layers with LoRA wrap, and leave the wrapping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny
from live_refits import Tensors, refit, refits, worker_of

from mcore_reshard.engines.vllm.adapters import without_adapters
from mcore_reshard.engines.vllm.model import load_weights, local_tensors
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.validation.engine.slices import GenSizes
from mcore_reshard.validation.engine.vllm_engine import build_engine, engine_config


def wrapped_by_vllm(model: torch.nn.Module, config: Any) -> None:
    """What a model runner with `enable_lora` does to its model."""
    from vllm.config import LoRAConfig, set_current_vllm_config
    from vllm.lora.model_manager import create_lora_manager

    config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=1, lora_dtype=torch.bfloat16)
    with set_current_vllm_config(config):
        create_lora_manager(model, 1, 8, 0, config.lora_config, config, torch.device("cpu"))  # type: ignore[arg-type]


def generate(rank: int, sizes: GenSizes, folder: Path, address: str) -> Any:
    model, config = build_engine(folder / "1", sizes, rank), engine_config(folder / "1", sizes, rank)
    wrapped_by_vllm(model, config)

    def tensors() -> Tensors:
        with without_adapters(model):
            return local_tensors(model)

    def load(golden: Tensors) -> Tensors:
        with without_adapters(model):
            load_weights(model, golden.items())
            return local_tensors(model)

    worker = worker_of(config, model)
    before = [(name, type(layer).__name__) for name, layer in model.named_modules()]
    differing = [*refits(worker, tensors, folder, address, load)]
    assert [(name, type(layer).__name__) for name, layer in model.named_modules()] == before
    return sum("WithLoRA" in kind for _, kind in before), differing


@pytest.mark.parametrize(
    ("name", "train", "sizes"), [("qwen3", TrainMesh(tp=2), GenSizes(tp=2)), ("gemma2", TrainMesh(), GenSizes())]
)
def test_base_weights_of_an_engine_with_lora_are_refitted(
    name: str, train: TrainMesh, sizes: GenSizes, tmp_path: Path
) -> None:
    """By rules, and by traces of vLLM's own loader."""
    _, engines = refit(name, train, sizes, f"tp={sizes.tp}", tmp_path, generate)
    for wrapped, differing in engines:
        assert wrapped > 4 and differing == []


def test_base_layers_are_there_within_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny("qwen3")))
    model, config = build_engine(tmp_path, GenSizes(), 0), engine_config(tmp_path, GenSizes(), 0)
    plain = dict(model.named_parameters())
    wrapped_by_vllm(model, config)
    assert "model.layers.0.self_attn.qkv_proj.base_layer.weight" in dict(model.named_parameters())
    with pytest.raises(OSError, match="while loading"), without_adapters(model):
        assert {name: id(tensor) for name, tensor in model.named_parameters()} == {n: id(t) for n, t in plain.items()}
        raise OSError("while loading")
    assert dict(model.named_parameters()).keys() != plain.keys()
