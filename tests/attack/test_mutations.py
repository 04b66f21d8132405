"""The attack on the proof, and on what follows it: every known bug class, put in on purpose, is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from helpers.golden import differences
from helpers.plans import QUANTIZED, TINY, Case

from attack import single_field
from attack.mutants import BUGS, LAYERS, MUTANTS, NOTES, Mutant
from attack.mutants.with_processes import WATCHES, Rank, outcomes_of
from attack.verdicts import EQUIVALENT, NAMES_TENSORS, attack
from attack.wrong_layouts import wrong_layouts

SINGLE_FIELD_MUTANTS, WRONG_LAYOUTS = 40, 20  # of each case; tools/mutation_score.py draws more


def test_every_bug_class_is_attacked() -> None:
    assert {mutant.bug for mutant in MUTANTS} == set(BUGS) == set(range(1, 38))
    assert {mutant.expected[0] for mutant in MUTANTS} == set(LAYERS)
    assert set(NOTES) <= set(BUGS)
    assert len({str(mutant) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_is_refused_and_the_message_names_parameter_and_ranks(mutant: Mutant) -> None:
    rejection = mutant.refused()
    assert rejection is not None, "it got through"
    assert (rejection.layer, rejection.rule) == mutant.expected, rejection
    assert re.search(r"\d", rejection.ranks) or mutant.expected[0] == "file", rejection  # a file is nobody's yet
    assert rejection.parameter and rejection.message, rejection
    if rejection.layer == "proof":
        assert re.fullmatch(r"(model|backbone|lm_head)\.[\w.{}]+", rejection.parameter), rejection


@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if mutant.shows], ids=str)
def test_a_plan_that_is_refused_would_have_done_damage(mutant: Mutant) -> None:
    """Otherwise the mutant says nothing about the proof."""
    assert mutant.shows is not None
    assert bool(mutant.shows()) != bool(mutant.harm)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", TINY + QUANTIZED, ids=str)
def test_a_wrong_layout_that_the_whole_plan_follows_is_refused(case: Case) -> None:
    for verdict in attack(case, wrong_layouts, seed=(TINY + QUANTIZED).index(case), count=WRONG_LAYOUTS):
        assert verdict.by not in {"missed", "equivalent"}, verdict
        if verdict.by == "BindError":
            assert verdict.field == "other_dim", verdict  # sound in itself; the model's tensors have other shapes


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", TINY + QUANTIZED, ids=str)
def test_single_field_damage_is_refused_or_changes_nothing(case: Case) -> None:
    for verdict in attack(case, single_field.mutants, seed=(TINY + QUANTIZED).index(case), count=SINGLE_FIELD_MUTANTS):
        assert verdict.by != "missed", verdict
        if verdict.by == "equivalent":
            assert verdict.field in EQUIVALENT, verdict
        elif verdict.by == "BindError":
            assert verdict.field in NAMES_TENSORS, verdict
        else:
            assert verdict.parameter and re.search(r"\d", verdict.ranks), verdict


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", TINY, ids=str)
def test_good_plans_deliver_what_golden_does(case: Case) -> None:
    assert differences(case) == []


@pytest.mark.parametrize("watch", WATCHES)
def test_sessions_without_harm_are_quiet(watch: Callable[[Rank], Any]) -> None:
    def change(rank: Rank) -> None:
        rank.versions = (1, 2, 3)
        watch(rank)

    assert [(outcome.error, outcome.value) for outcome in outcomes_of(change)] == [(None, [])] * 3
