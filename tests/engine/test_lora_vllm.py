"""Trainers with adapters into real vLLM models: the first refit moves everything, the second what is trained, merged."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.lora_refit import Case, assert_the_engine_has_what_bridge_exports_merged, canonical_lora, lora
from test_dtensor_vllm import VllmRank

from mcore_reshard.planner.layout.mesh import TrainMesh

OLMOE = Case("tiny-olmoe", TrainMesh(tp=2), lora, r"_proj\.weight$")  # planned from traces
MORE = [
    Case("tiny-qwen3-moe", TrainMesh(tp=2, ep=2), lora, r"_proj\.weight$"),
    Case("tiny-gemma2", TrainMesh(tp=2, pp=2), canonical_lora, r"_proj\.weight$"),
]


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra `megatron` beside vLLM")
@pytest.mark.parametrize("case", [OLMOE, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)], ids=str)
def test_vllm_has_what_bridge_exports_merged(case: Case, tmp_path: Path) -> None:
    from mcore_reshard.validation.trainer.build import prepare

    prepare()
    assert_the_engine_has_what_bridge_exports_merged(case, VllmRank, tmp_path)
