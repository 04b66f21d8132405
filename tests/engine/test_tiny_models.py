"""Real vLLM loads whole every tiny model that is planned from traces, from a checkpoint under Megatron-Bridge's names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.traced_cases import has_experts
from helpers.zoo_newest import IS_NEWEST, NEWEST_MESHES

from mcore_reshard.planner.model.configs import load_config, traced_names
from mcore_reshard.validation.engine.slices import GenSizes
from mcore_reshard.validation.engine.vllm_engine import build_engine
from mcore_reshard.validation.tiny import checkpoint_shapes, payload
from mcore_reshard.validation.trainer.build import prepare

# vLLM leaves the layer scales of the first's vision tower as it made them. Its CPU platform has no sparse attention for the
# second.
UNLOADED = {"tiny-nemotron-nano-vl", "tiny-glm5"} | (set() if IS_NEWEST else set(NEWEST_MESHES))
TINY = [name for name in traced_names() if name.startswith("tiny-") and name not in UNLOADED]


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    prepare()  # once for all forked processes; it registers configs that transformers lacks


@pytest.mark.parametrize("name", TINY)
def test_every_parameter_is_loaded(tmp_path: Path, name: str) -> None:
    config = load_config(name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = checkpoint_shapes(config)
    meshes = [GenSizes(tp=2), GenSizes(tp=4)]
    if has_experts(config):
        meshes.append(GenSizes(tp=2, ep=2))
    for sizes in meshes:
        for gen_rank in (0, sizes.world - 1):
            engine = build_engine(tmp_path, sizes, gen_rank)
            poisoned = {name: parameter.detach().clone() for name, parameter in engine.named_parameters()}
            with torch.no_grad():
                engine.load_weights(payload(shapes, 1))
            left = [name for name, tensor in engine.named_parameters() if _same_bytes(tensor, poisoned[name])]
            assert left == [], (sizes, gen_rank)


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.detach().contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
