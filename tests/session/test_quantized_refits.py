"""Quantized weights and their scales through real processes and gloo, bit for bit; the trainer's padding stays behind."""

from __future__ import annotations

import pytest
from helpers import planned_refits
from helpers.plans import Case
from helpers.ranks import run_ranks, values

CASES = [
    Case("tiny-llama", "tp=2,pp=2", "tp=2", dtypes=("fp8", "fp8"), block=(8, 8)),
    Case("tiny-qwen3-moe", "tp=2,ep=2,etp=2,dp=2", "tp=2", dtypes=("fp8", "fp8"), block=(8, 8)),
    Case("tiny-deepseek-v3", "tp=1", "tp=1,dp=3", dtypes=("fp8", "fp8"), block=(8, 8)),  # replicas relay
    Case("tiny-deepseek-v3", "ep=2,dp=2", "tp=1", changes=(("kv_lora_rank", 32),), dtypes=("mxfp8", "mxfp8")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pairs_arrive(case: Case) -> None:
    plan = case.plan()
    assert plan.pairs and not plan.misc

    def refit(number: int, address: str) -> tuple[set[str], dict[str, int]]:
        return planned_refits.refit(number, address, case, "cpu")

    ranks = plan.train.world + plan.gen.world
    assert values(run_ranks(ranks, refit)) == [({"gloo"}, {})] * ranks


def test_a_relayed_plan_keeps_pairs_together() -> None:
    plan = CASES[2].plan()
    assert plan.relay
    turns = {(b.group, b.layers, b.experts): (b.first_src_replica, b.first_dst_replica) for b in plan.transfer_groups}
    for pair in plan.pairs:
        for (group, layers, experts), turn in turns.items():
            if group == pair.weight:
                assert turns[pair.scales, layers, experts] == turn
