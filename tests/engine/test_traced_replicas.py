"""The plan for another number of replicas is what the traces of that many replicas of a real vLLM give."""

from __future__ import annotations

import pytest
from helpers.traced_cases import BF16, request

from mcore_reshard.planner.plan.plan_file import dump_plan
from mcore_reshard.planner.plan.replicas import with_replicas
from mcore_reshard.validation.offline_plan import plan_offline

CASES = [
    ("tiny-llama-nemotron", "tp=4", "tp=4", BF16),
    ("tiny-gemma3-vl", "tp=2", "pp=2", BF16),
    ("tiny-glm4-moe", "tp=2", "tp=4", "BF16 -> FP8"),
]


@pytest.mark.parametrize(("family", "train", "gen", "precision"), CASES)
def test_derived_plans_are_those_of_traces(family: str, train: str, gen: str, precision: str) -> None:
    plans = [plan_offline(request(family, train, f"{gen},dp={count}", precision))[0] for count in (1, 3)]
    assert dump_plan(with_replicas(plans[0], 3)) == dump_plan(plans[1])
    assert dump_plan(with_replicas(plans[1], 1)) == dump_plan(plans[0])
