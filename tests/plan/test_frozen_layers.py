"""Later refits of plans with frozen parameters: the transfers of the others, all of them and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.frozen import half_of, moves
from helpers.plans import QUANTIZED, TINY, Case
from helpers.simulate import UNTOUCHED, execute, numbered_tensors, sources_of

from mcore_reshard.planner.plan.frozen import trained_layers, with_frozen, without_frozen
from mcore_reshard.planner.plan.plan import FrozenLayers
from mcore_reshard.planner.plan.plan_file import dump_plan, parse_plan
from mcore_reshard.planner.proof.prove import prove

CASES = (*TINY[::3], *QUANTIZED[::3], Case("tiny-llama", "tp=2", "tp=1,dp=3"))  # the last one relays


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_later_refit_moves_what_is_trained_and_nothing_else(case: Case) -> None:
    whole = case.plan()
    plan = with_frozen(whole, half_of(whole), {})
    assert prove(plan) and plan.digest != whole.digest and plan.frozen
    later = without_frozen(plan)
    assert later.digest == plan.digest
    everywhere = {key: np.full(tensor.shape, UNTOUCHED) for key, tensor in numbered_tensors(whole, "gen").items()}
    arrived, faults = execute(later, sources_of(whole), everywhere)
    assert faults == []
    for key, numbers in numbered_tensors(whole, "gen").items():
        assert np.array_equal(arrived[key], np.where(moves(plan, numbers), numbers, UNTOUCHED)), key


def test_a_plan_that_relays_is_among_the_cases() -> None:
    assert any(case.plan().relay for case in CASES)


def test_the_digest_and_the_file_have_what_is_frozen() -> None:
    plan = with_frozen(TINY[0].plan(), {(0, -1)}, {})
    assert parse_plan(dump_plan(plan)) == plan and plan.frozen


def test_a_layer_is_trained_if_any_rank_trains_a_part_of_it() -> None:
    plan = Case("tiny-qwen3", "tp=2,pp=2", "tp=2").plan()
    names = {index: group.name_pattern for index, group in enumerate(plan.groups)}
    qkv = "vp0.decoder.layers.1.self_attention.linear_qkv.weight"
    tensors = {
        transfers.tensor_name(piece.tensor, "train", member)
        for transfers in plan.transfer_groups
        for part in plan.patterns[transfers.pattern].src.pieces
        for piece in part
        for member in range(transfers.members)
    }
    of_rank = [trained_layers(plan, rank, tensors - {qkv}) for rank in range(plan.train.world)]
    fused = {f"model.layers.{{layer}}.self_attn.{part}_proj.weight" for part in "qkv"}
    assert [{(names[group], layer) for group, layer in trained} for trained in of_rank] == [
        *[{(name, 1) for name in fused}] * 2,
        *[{(name, 3) for name in fused}] * 2,  # of the second stage
    ]


def test_misc_parameters_of_a_layer_move_together_and_unknown_ones_always() -> None:
    plan = Case("tiny-llama", "tp=2", "tp=8", policy="conservative").plan()
    names = plan.misc_names
    trained = dict.fromkeys(names, False) | {"model.layers.2.self_attn.q_proj.weight": True}
    del trained["model.layers.3.self_attn.k_proj.weight"]
    later = without_frozen(with_frozen(plan, set(), trained))
    assert sorted(later.misc_names) == sorted(name for name in names if ".layers.2." in name or ".layers.3." in name)
    assert not later.transfer_groups


@pytest.mark.parametrize(
    ("frozen", "said"),
    [
        (FrozenLayers(99, (0,)), "group 99: layers [0] are frozen, they are not layers of []"),
        (FrozenLayers(3, (0, 0)), "layers [0, 0] are frozen"),
        (FrozenLayers(3, (17,)), "layers [17] are frozen"),
    ],
    ids=str,
)
def test_what_cannot_be_frozen_is_refused(frozen: FrozenLayers, said: str) -> None:
    proof = prove(replace(TINY[0].plan(), frozen=(frozen,)))
    assert any(
        violation.rule == "references" and said in f"{violation.parameter}: {violation.message}"
        for violation in proof.violations
    )


def test_a_weight_is_frozen_with_its_scales() -> None:
    plan = QUANTIZED[0].plan()
    (pair, *_), layers = plan.pairs, plan.groups[plan.pairs[0].weight].layers
    proof = prove(replace(plan, frozen=(FrozenLayers(pair.weight, layers),)))
    assert any("and scales () are frozen" in violation.message for violation in proof.violations)
