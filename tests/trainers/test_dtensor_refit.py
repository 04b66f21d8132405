"""Refits out of sharded transformers models into engines of plain slices, whose loader is traced as a real one is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from helpers.dtensor_refit import Case, assert_every_byte_arrives

from mcore_reshard.planner.layout.traces import HfTensor, RankTrace
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.tracing.recorder import Recorder
from mcore_reshard.validation.engine.slices import GenSizes, StandInEngine

pytest.importorskip("transformers")


class TracedStandIn(StandInEngine):
    def __init__(self, folder: Path, sizes: GenSizes, rank: int) -> None:
        super().__init__(load_config(folder), sizes, rank)
        self._given = (load_config(folder), sizes, rank)

    def trace(self, checkpoint: Mapping[str, HfTensor]) -> RankTrace:
        twin, recorder = StandInEngine(*self._given, "meta"), Recorder()
        with torch.no_grad(), recorder:
            twin.load_weights((name, recorder.source(name, tensor)) for name, tensor in checkpoint.items())
        return RankTrace(tuple(recorder.read(name, tensor) for name, tensor in twin.loaded.items()))


CASES = [
    Case("llama_tied", "fsdp", 3, GenSizes(tp=2)),  # 3 divides no size
    Case("qwen3", "tp x fsdp", 4, GenSizes(tp=2)),
    Case("qwen3", "fsdp", 2, GenSizes(tp=2), torch.float32),  # as mixed precision keeps them
    Case("qwen3_moe", "fsdp", 4, GenSizes(tp=2)),
    Case("qwen3_moe", "hsdp", 4, GenSizes(tp=2, ep=2)),
    # The engine keeps the experts' bias in float32, and transformers 4 in bfloat16: it is cast on the way.
    Case("deepseek_v3", "fsdp", 2, GenSizes(tp=2)),
    Case("gpt_oss", "tp x fsdp", 4, GenSizes(tp=1, pp=2)),
    Case("qwen2", "replicated", 2, GenSizes(tp=2)),
    # The engine fuses q with k and v, which are frozen.
    Case("qwen3", "fsdp", 2, GenSizes(tp=2), frozen=r"embed|norm|[kv]_proj|layers\.0\.|mlp|lm_head"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_byte_arrives(case: Case, tmp_path: Path) -> None:
    assert_every_byte_arrives(case, TracedStandIn, tmp_path)
