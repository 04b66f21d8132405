"""Trainers with adapters of Megatron-Bridge, and with frozen parameters: what the engine has is what Bridge exports, merged."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.lora_refit import (
    Case,
    assert_the_engine_has_what_bridge_exports_merged,
    canonical_lora,
    frozen_embeddings,
    frozen_first_layer,
    lora,
    lora_on_attention,
    lora_on_latent_attention,
    lora_on_mamba,
    lora_on_routers,
)

from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.validation.engine.slices import GenSizes, StandInEngine

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("megatron.bridge") is None, reason="needs the extra `megatron`"
)
ALL_LINEARS = r"_proj\.weight$"
CASES = [
    Case("tiny-qwen3", TrainMesh(tp=2, pp=2, vpp=2), lora, ALL_LINEARS),
    Case("tiny-qwen3-moe", TrainMesh(tp=2, ep=2), lora, ALL_LINEARS),  # of experts too
    Case("tiny-llama", TrainMesh(tp=2), canonical_lora, ALL_LINEARS),
    Case("tiny-qwen2", TrainMesh(tp=2, pp=2), lora_on_attention, r"layers\.[13]\..*[qkvo]_proj\.weight$"),
    Case("tiny-llama-tied", TrainMesh(tp=2), frozen_embeddings, r"layers\.[123]\.|model\.norm"),
    Case(
        "tiny-nemotron-h", TrainMesh(tp=2), frozen_first_layer, r"layers\.[1-7]\.|embeddings|norm_f|lm_head"
    ),  # and misc
]
MORE = [
    Case("tiny-qwen3-moe-fp8", TrainMesh(tp=2, ep=2), lora, r"_proj\.weight(_scale_inv)?$", gen_dtype="fp8"),
    Case("tiny-qwen3", TrainMesh(tp=2, dp=2), canonical_lora, ALL_LINEARS),
    Case("tiny-qwen3-moe", TrainMesh(tp=2, ep=2, etp=2, dp=2), lora, ALL_LINEARS),
    Case("tiny-qwen3-moe", TrainMesh(tp=2, ep=2), lora_on_routers, r"gate\.weight$|[qkv]_proj"),
    # The bias of routers is a buffer: it always moves.
    Case("tiny-deepseek-v3", TrainMesh(tp=2, ep=2), lora_on_latent_attention, r"_proj\.weight$|_mqa\.|correction_bias"),
    Case(
        "tiny-nemotron-h",
        TrainMesh(tp=2),
        lora_on_mamba,
        r"[qkvo]_proj\.weight$|(in|out)_proj\.weight$|correction_bias",
    ),
]


def slices(folder: Path, sizes: GenSizes, rank: int) -> StandInEngine:
    return StandInEngine(load_config(folder), sizes, rank)


@pytest.fixture(scope="module")
def megatron() -> None:
    from mcore_reshard.validation.trainer.build import prepare

    prepare()  # once, so that every forked world finds it imported


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)], ids=str)
def test_the_engine_has_what_bridge_exports_merged(case: Case, tmp_path: Path, megatron: None) -> None:
    assert_the_engine_has_what_bridge_exports_merged(case, slices, tmp_path)
