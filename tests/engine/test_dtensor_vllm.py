"""Refits out of FSDP2 models of transformers 5, which stacks experts in memory, into real vLLM models: every byte compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch
from helpers.dtensor_refit import Case, assert_every_byte_arrives

from mcore_reshard.engines.vllm import model as vllm_model
from mcore_reshard.engines.vllm.trace import trace_loading
from mcore_reshard.planner.layout.traces import HfTensor, RankTrace
from mcore_reshard.validation.engine.slices import GenSizes
from mcore_reshard.validation.engine.vllm_engine import build_engine


class VllmRank:
    """A real vLLM model with its own loader."""

    def __init__(self, folder: Path, sizes: GenSizes, rank: int) -> None:
        self._model = build_engine(folder, sizes, rank)
        self.tensors = vllm_model.local_tensors(self._model)

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        vllm_model.load_weights(self._model, named_tensors)

    def trace(self, checkpoint: Mapping[str, HfTensor]) -> RankTrace:
        return trace_loading(self._model, checkpoint)


CASES = [
    Case("llama_tied", "fsdp", 3, GenSizes(tp=2)),  # 3 divides no size
    Case("qwen3", "tp x fsdp", 4, GenSizes(tp=2)),
    Case("qwen3", "hsdp", 4, GenSizes(tp=1, pp=2), torch.float32),  # as mixed precision keeps them
    Case("qwen3_moe", "fsdp", 3, GenSizes(tp=2)),  # 8 experts: 3, 3 and 2
    Case("qwen3_moe", "tp x fsdp", 4, GenSizes(tp=2, ep=2)),
    Case("deepseek_v3", "fsdp", 2, GenSizes(tp=2)),
    Case("gpt_oss", "fsdp", 4, GenSizes(tp=2)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_byte_arrives_in_vllm(case: Case, tmp_path: Path) -> None:
    assert_every_byte_arrives(case, VllmRank, tmp_path)
