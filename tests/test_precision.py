"""Quantised weights in plans: pairs of data and scales, casts, and what goes to misc for which reason."""

from __future__ import annotations

import pytest
from plans import QUANTISED, Case
from simulate import damage, scale_damage

from mcore_reshard.planner.proof import prove


@pytest.mark.parametrize("case", QUANTISED, ids=str)
def test_a_quantised_plan_is_sound_and_delivers(case: Case) -> None:
    plan = case.plan()
    proof = prove(plan)
    assert proof.violations == ()
    assert proof.ok
    assert damage(plan) == []


@pytest.mark.parametrize("case", [case for case in QUANTISED if case.plan().pairs], ids=str)
def test_every_element_lies_with_the_scale_of_its_own_block(case: Case) -> None:
    assert scale_damage(case.plan()) == []
