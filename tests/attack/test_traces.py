"""Faults that a tracer could have, put in on purpose: each is found by the gate, by the rules, or by a load of tagged weights."""

from __future__ import annotations

from collections import Counter

import pytest

from attack.traces import (
    FAULTS,
    MODEL,
    mutants,
    refused_by_gate,
    refused_by_rules,
    shown_by_load,
    traced_plan,
    true_traces,
)
from mcore_reshard.planner.plan.plan import Plan

COUNT = 12  # mutants of each fault
# The gate cannot see what agrees with itself, because names mean nothing to it. One such fault: two parameters of one shape
# are in each other's place. Another: one rank has zeros where another has the whole parameter, as with gpt-oss's biases.
NOT_ALWAYS_SEEN = {"exchanged_parameters", "data_as_padding"}


def test_true_traces_make_a_sound_plan_that_moves_what_the_rules_move() -> None:
    plan, rules = traced_plan(true_traces()), MODEL.plan()
    assert plan.prove().ok and not plan.misc and not plan.excluded
    assert plan.recv_bytes.tolist() == rules.recv_bytes.tolist()
    assert _delivered(plan) == _delivered(rules)


def _delivered(plan: Plan) -> Counter[tuple[str, int]]:
    """Bytes by parameter and engine rank."""
    count: Counter[tuple[str, int]] = Counter()
    for transfer in plan.transfers():
        count[transfer.parameter, transfer.dst.rank] += transfer.region.elements
    return count


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_survives(fault: str) -> None:
    found = mutants(fault, seed=0, count=COUNT)
    assert len(found) == COUNT
    seen = 0
    for mutant in found:
        assert shown_by_load(mutant), f"{mutant} changes nothing"
        assert refused_by_rules(mutant), mutant
        seen += bool(refused_by_gate(mutant))
    assert seen == COUNT or (fault in NOT_ALWAYS_SEEN and seen > COUNT // 2), f"{seen} of {COUNT}"
