"""Golden against real on real Megatron-Core models: every family, every mesh, every byte.

The default cases cover each family and each mesh at least once; `make validate-all` runs the full cross product.
"""

from __future__ import annotations

import re

import pytest
import torch

from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.model.parameters import Role
from mcore_reshard.planning import InputError

pytest.importorskip("megatron", reason="needs the megatron extra")

from helpers.validating import assert_golden, flip_bit_on_gen_1, run_validation
from helpers.validation_cases import DEFAULT, FAMILIES, FULL, MESHES, REFUSED, arguments, covering, on_gpus

from mcore_reshard.validation.errors import ValidationError
from mcore_reshard.validation.trainer.bridge import bridge_release


def check(family, mesh, **how):
    train, gen, overrides = arguments(family, mesh)
    return run_validation({**load_config(f"tiny-{family}"), **overrides}, train, gen, **how)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "mesh"), DEFAULT)
def test_refit_equals_golden(family, mesh):
    if family == "moonlight" and bridge_release() >= (0, 6):
        pytest.skip("Megatron-Bridge has no mapping for the norm that newer Megatron-Core fuses into linear_q_proj")
    report = check(family, mesh)
    assert_golden(report)
    assert len(report.refits) == 2 and all(refit.parameters for refit in report.refits)


def test_an_optimizer_step_between_refits_arrives():
    report = check("qwen3", "TP2 -> TP4", refits=3)
    assert_golden(report)
    assert report.refits[2].change == "an SGD step"


def test_experts_as_modules_of_their_own():
    report = check("qwen3-moe", "EP2 -> gen EP2", experts="sequential")
    assert_golden(report)


def test_the_default_cases_cover_every_family_and_every_mesh():
    assert {family for family, _ in DEFAULT} == set(FAMILIES)
    assert {mesh for _, mesh in DEFAULT} == set(MESHES)


def test_the_cases_for_gpus_cover_what_fits_and_nothing_else():
    assert on_gpus(1, shared=False) == []
    assert on_gpus(2, shared=False) == [(family, "TP1 -> TP1") for family in FAMILIES]
    four, any_number = on_gpus(4, shared=False), on_gpus(4, shared=True)
    assert set(four) < set(any_number) and not {("llama", "TP2 -> TP4")} & set(four)
    for cases in (four, any_number):
        few = covering(cases)
        assert len(few) < len(cases) / 4
        assert {name for case in few for name in case} == {name for case in cases for name in case}
        assert set(FAMILIES) <= {family for family, _ in few}
        assert not set(REFUSED) & set(cases)


@pytest.mark.parametrize(("family", "mesh"), REFUSED)
def test_what_megatron_or_vllm_refuse_is_refused_before_anything_starts(family, mesh):
    with pytest.raises(InputError):
        check(family, mesh)


@pytest.mark.parametrize("policy", ["exact", "conservative"])
def test_both_policies_give_the_same_weights(policy):
    report = check("qwen2", "2 KV heads, TP2 -> TP4", policy=policy)
    assert_golden(report)
    misc = {p.name.rpartition("self_attn.")[2] for p in report.parameters if p.route == "misc"}
    assert misc == ({"qkv_proj.weight", "qkv_proj.bias"} if policy == "conservative" else set())


def test_a_parameter_that_no_rule_knows_arrives_by_the_misc_route():
    report = check("qwen3", "TP2 -> TP4", unknown=frozenset({Role.DOWN, Role.K_NORM}))
    assert_golden(report)
    assert {p.name.rpartition("layers.")[2][2:] for p in report.parameters if p.route == "misc"} == {
        "mlp.down_proj.weight",
        "self_attn.k_norm.weight",
    }
    assert report.refits[0].misc_bytes > 0


def test_golden_transport_moves_everything_by_name(monkeypatch):
    monkeypatch.setenv("MCORE_RESHARD_TRANSPORT", "golden")
    report = check("qwen3-moe", "TP1 EP4 -> TP2")
    assert_golden(report)
    assert report.transport == "golden" and report.refits[0].bulk_bytes == 0 < report.refits[0].misc_bytes


def test_one_flipped_bit_is_reported_with_rank_tensor_and_coordinate(monkeypatch):
    """The check itself can fail: generation rank 1 spoils one element after its transfers have landed."""
    flip_bit_on_gen_1(monkeypatch, "model.layers.2.mlp.down_proj.weight", torch.int16, (5, 3))
    report = check("llama", "TP4 -> TP2")
    assert not report.ok
    for refit in report.refits:
        (wrong,) = refit.wrong
        assert (wrong.name, wrong.gen_rank, wrong.mismatches) == ("model.layers.2.mlp.down_proj.weight", 1, 1)
        assert wrong.first is not None and wrong.first.index == (5, 3)
        assert int(wrong.first.got_bits, 16) ^ int(wrong.first.expected_bits, 16) == 1


def test_a_model_that_is_too_large_for_one_machine_is_refused():
    with pytest.raises(ValidationError, match="validate a small config of the same family"):
        run_validation(load_config("qwen3-30b-a3b"), "ep=4,dp=4", "tp=4")


@pytest.mark.parametrize(
    ("name", "changes", "train", "why"),
    [
        ("tiny-llama", {"mlp_bias": True}, "tp=1", "no mapping for model.layers.{layer}.mlp.gate_proj.bias"),
        ("tiny-llama", {"attention_bias": True}, "tp=1", "without biases in attention"),
        ("tiny-qwen3-moe", {"mlp_only_layers": [1]}, "tp=1", "with experts in every layer"),
        ("tiny-deepseek-v3", {}, "cp=3", "4096 positions in 2*cp = 6 parts"),
        ("tiny-deepseek-v3", {"num_nextn_predict_layers": 1}, "pp=2,layers=4+0", "no multi-token prediction"),
    ],
)
def test_a_model_that_megatron_bridge_does_not_make_is_refused(name, changes, train, why):
    with pytest.raises(ValidationError, match=re.escape(why)):
        run_validation({**load_config(name), **changes}, train, "tp=1")


def test_no_shared_experts_at_all():
    config = {**load_config("tiny-deepseek-v3"), "n_shared_experts": 0}
    report = run_validation(config, "tp=2,ep=2", "tp=2", refits=1)
    assert_golden(report)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), FULL)
def test_refit_equals_golden_everywhere(family, mesh):
    report = check(family, mesh)
    assert_golden(report)
