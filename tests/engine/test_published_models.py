"""The oracle's tensors at full size: names, shapes and dtypes of published models as vLLM builds them, no bytes."""

from __future__ import annotations

import pytest

from mcore_reshard.engines.vllm.model import local_tensors
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.validation.engine.slices import GenSizes, StandInEngine
from mcore_reshard.validation.engine.vllm_engine import build_engine

CASES = [
    ("llama-3.1-8b", GenSizes(tp=8)),
    ("qwen3-4b", GenSizes(tp=2, pp=2)),
    ("qwen3-30b-a3b", GenSizes(tp=4, ep=4)),
    ("qwen3-235b-a22b", GenSizes(tp=4, dp=2, ep=8)),
    ("deepseek-v3", GenSizes(tp=32, dp=4)),
    ("deepseek-v3", GenSizes(tp=16, pp=2)),
    ("kimi-k2", GenSizes(tp=16, dp=2, ep=32)),
    ("nemotron-3-nano-30b-a3b", GenSizes(tp=4)),
    ("nemotron-3-nano-30b-a3b", GenSizes(tp=2, ep=2)),
    ("gpt-oss-20b", GenSizes(tp=4, ep=4)),
    ("gpt-oss-120b", GenSizes(tp=8)),
]


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=str)
def test_oracle_has_the_tensors_of_vllm(name, sizes, config_folder):
    config = {
        key: value for key, value in load_config(name).items() if key != "quantization_config"
    }  # refits move bf16
    folder = config_folder(config)
    for gen_rank in (0, sizes.world - 1):
        built = local_tensors(build_engine(folder, sizes, gen_rank, device="meta"))
        expected = StandInEngine(config, sizes, gen_rank, device="meta").tensors
        assert {n: (t.shape, t.dtype) for n, t in built.items()} == {n: (t.shape, t.dtype) for n, t in expected.items()}
