"""Golden against real on real Megatron-Core models: every family, every mesh, every byte.

The default cases cover each family and each mesh at least once; `make validate-all` runs the full cross product.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest

from mcore_reshard.planner.configs import load_config
from mcore_reshard.planner.families import catalogue_from_config
from mcore_reshard.planner.mesh import MeshError, parse_gen_mesh, parse_train_mesh
from mcore_reshard.planner.parameters import Role
from mcore_reshard.planner.planning import make_plan
from mcore_reshard.planner.proof import prove

pytest.importorskip("megatron", reason="needs the megatron extra")

from mcore_reshard.validation.runner import ValidationError, validate

TIMEOUT_S = 60.0
FAMILIES = (
    "llama", "llama-tied", "qwen2", "qwen3", "qwen3-moe", "deepseek-v3", "moonlight", "kimi-k2", "nemotron-h", "gpt-oss",
)  # fmt: skip
MOE = {"qwen3-moe", "deepseek-v3", "moonlight", "kimi-k2", "nemotron-h", "gpt-oss"}
# name: (training mesh, generation mesh, config overrides, only for families with experts)
MESHES = {
    "TP2 -> TP4": ("tp=2", "tp=4", {}, False),
    "TP4 -> TP2": ("tp=4", "tp=2", {}, False),
    "TP2 PP2 -> TP2": ("tp=2,pp=2", "tp=2", {}, False),
    "TP1 EP4 -> TP2": ("ep=4,dp=4", "tp=2", {}, True),
    "TP2 EP4 ETP1 -> TP4": ("tp=2,ep=4,etp=1,dp=2", "tp=4", {}, True),
    "TP2 EP2 ETP2 -> TP2": ("tp=2,ep=2,etp=2,dp=2", "tp=2", {}, True),
    "PP2 VPP2 -> TP1 DP2": ("pp=2,vpp=2", "tp=1,dp=2", {}, False),
    "PP2 3+1 layers -> TP2": ("pp=2,layers=3+1", "tp=2", {}, False),
    "CP2 -> TP2": ("cp=2", "tp=2", {}, False),
    "CP2 EP2 -> TP1": ("cp=2,ep=2", "tp=1", {}, True),
    "DP2 -> TP2 DP2": ("dp=2", "tp=2,dp=2", {}, False),
    "2 KV heads, TP2 -> TP4": ("tp=2", "tp=4", {"num_key_value_heads": 2}, False),
    "2 KV heads, TP4 -> TP2": ("tp=4", "tp=2", {"num_key_value_heads": 2}, False),
    "1 KV head, TP4 -> TP2": ("tp=4", "tp=2", {"num_key_value_heads": 1}, False),
    "EP2 -> gen EP2": ("ep=2,dp=2", "tp=2,ep=2", {}, True),
    "TP2 -> gen EP4 over TP2 DP2": ("tp=2", "tp=2,dp=2,ep=4", {}, True),
    "TP2 -> gen PP2": ("tp=2", "pp=2", {}, False),
    "PP2 -> gen PP2 TP2": ("pp=2", "tp=2,pp=2", {}, False),
    "vocabulary 250, TP4 -> TP2": ("tp=4", "tp=2", {"vocab_size": 250}, False),
    "vocabulary 130, TP1 -> TP4": ("tp=1", "tp=4", {"vocab_size": 130}, False),
    "embedding and loss alone": ("pp=4,layers=0+3+1+0", "tp=2", {}, False),
    "uneven chunks": ("pp=2,vpp=2,layers=1+2+1+0", "tp=1", {}, False),
}

# What the default suite runs: each family once with tensor and once with pipeline or expert parallelism, each mesh once.
DEFAULT = [
    ("llama", "TP2 -> TP4"),
    ("llama", "PP2 3+1 layers -> TP2"),
    ("llama", "vocabulary 250, TP4 -> TP2"),
    ("llama", "embedding and loss alone"),
    ("llama-tied", "TP2 PP2 -> TP2"),
    ("llama-tied", "PP2 -> gen PP2 TP2"),
    ("llama-tied", "vocabulary 130, TP1 -> TP4"),
    ("qwen2", "TP4 -> TP2"),
    ("qwen2", "2 KV heads, TP2 -> TP4"),
    ("qwen3", "2 KV heads, TP4 -> TP2"),
    ("qwen3", "1 KV head, TP4 -> TP2"),
    ("qwen3", "CP2 -> TP2"),
    ("qwen3", "DP2 -> TP2 DP2"),
    ("qwen3-moe", "TP1 EP4 -> TP2"),
    ("qwen3-moe", "TP2 EP4 ETP1 -> TP4"),
    ("qwen3-moe", "TP2 EP2 ETP2 -> TP2"),
    ("qwen3-moe", "PP2 VPP2 -> TP1 DP2"),
    ("qwen3-moe", "CP2 EP2 -> TP1"),
    ("qwen3-moe", "uneven chunks"),
    ("deepseek-v3", "TP2 -> gen EP4 over TP2 DP2"),
    ("deepseek-v3", "TP2 PP2 -> TP2"),
    ("moonlight", "EP2 -> gen EP2"),
    ("kimi-k2", "TP2 EP2 ETP2 -> TP2"),
    ("nemotron-h", "TP2 -> TP4"),
    ("nemotron-h", "TP2 PP2 -> TP2"),
    ("nemotron-h", "EP2 -> gen EP2"),
    ("gpt-oss", "TP2 -> gen PP2"),
    ("gpt-oss", "TP1 EP4 -> TP2"),
    ("gpt-oss", "TP2 EP4 ETP1 -> TP4"),
]


def check(family, mesh, refits=2, **options):
    train, gen, overrides, _ = MESHES[mesh]
    config = {**load_config(f"tiny-{family}"), **overrides}
    if family == "nemotron-h":  # 8 layers
        train = train.replace("3+1", "6+2").replace("0+6+2+0", "0+4+4+0")
    return validate(
        config, parse_train_mesh(train), parse_gen_mesh(gen), model=family, refits=refits, timeout_s=TIMEOUT_S, **options
    )


def show(report):
    return [str(parameter) for refit in report.refits for parameter in refit.wrong][:5]


@pytest.mark.parametrize(("family", "mesh"), DEFAULT)
def test_refit_equals_golden(family, mesh):
    report = check(family, mesh)
    assert report.ok, show(report)
    assert len(report.refits) == 2 and all(refit.parameters for refit in report.refits)


def test_an_optimizer_step_between_refits_arrives():
    report = check("qwen3", "TP2 -> TP4", refits=3)
    assert report.ok, show(report)
    assert report.refits[2].change == "an SGD step"


def test_experts_as_modules_of_their_own():
    report = check("qwen3-moe", "EP2 -> gen EP2", experts="sequential")
    assert report.ok, show(report)


@functools.cache
def _default_families():
    return {family for family, _ in DEFAULT}, {mesh for _, mesh in DEFAULT}


def test_the_default_cases_cover_every_family_and_every_mesh():
    assert _default_families() == (set(FAMILIES), set(MESHES))


@pytest.mark.parametrize("policy", ["exact", "conservative"])
def test_both_policies_give_the_same_weights(policy):
    report = check("qwen2", "2 KV heads, TP2 -> TP4", policy=policy)
    assert report.ok, show(report)
    misc = {p.name.rpartition("self_attn.")[2] for p in report.parameters if p.route == "misc"}
    assert misc == ({"qkv_proj.weight", "qkv_proj.bias"} if policy == "conservative" else set())


def test_a_parameter_that_no_rule_knows_arrives_by_the_misc_route():
    report = check("qwen3", "TP2 -> TP4", unknown=(Role.DOWN, Role.K_NORM))
    assert report.ok, show(report)
    assert {p.name.rpartition("layers.")[2][2:] for p in report.parameters if p.route == "misc"} == {
        "mlp.down_proj.weight",
        "self_attn.k_norm.weight",
    }
    assert report.refits[0].misc_bytes > 0


def test_golden_transport_moves_everything_by_name(monkeypatch):
    monkeypatch.setenv("MCORE_RESHARD_TRANSPORT", "golden")
    report = check("qwen3-moe", "TP1 EP4 -> TP2")
    assert report.ok, show(report)
    assert report.transport == "golden" and report.refits[0].bulk_bytes == 0 < report.refits[0].misc_bytes


def test_a_plan_that_moves_the_wrong_bytes_is_caught_with_coordinates():
    """Gate and up change places at the destination: every byte is still written once, so only golden can tell."""
    config = load_config("tiny-llama")
    catalogue = catalogue_from_config(config)
    train, gen = parse_train_mesh("tp=2"), parse_gen_mesh("tp=2")
    plan = make_plan(catalogue, train, gen)
    template_of = {catalogue.groups[bundle.group].role: bundle.template for bundle in plan.bundles}
    gate, up = template_of[Role.GATE], template_of[Role.UP]
    templates = list(plan.templates)
    templates[gate] = replace(templates[gate], dst=plan.templates[up].dst)
    templates[up] = replace(templates[up], dst=plan.templates[gate].dst)
    swapped = replace(plan, templates=tuple(templates))
    assert prove(swapped).ok
    report = validate(config, train, gen, plan=swapped, refits=1, timeout_s=TIMEOUT_S)
    assert not report.ok
    wrong = report.refits[0].wrong
    assert {parameter.name.rpartition(".mlp.")[2] for parameter in wrong} == {"gate_up_proj.weight"}
    assert {parameter.gen_rank for parameter in wrong} == {0, 1}
    first = wrong[0].first
    assert first is not None and first.index == (0, 0) and first.got_bits != first.expected_bits


def test_a_model_that_is_too_large_for_one_machine_is_refused():
    with pytest.raises(ValidationError, match="validate a small config of the same family"):
        validate(load_config("qwen3-30b-a3b"), parse_train_mesh("ep=4,dp=4"), parse_gen_mesh("tp=4"))


FULL = [
    (family, mesh)
    for family, (mesh, (_, _, overrides, experts)) in itertools.product(FAMILIES, MESHES.items())
    if (family, mesh) not in DEFAULT
    and (family in MOE or not experts)
    and not (overrides.get("num_key_value_heads") and family in {"deepseek-v3", "moonlight", "kimi-k2"})
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), FULL)
def test_refit_equals_golden_everywhere(family, mesh):
    try:
        report = check(family, mesh)
    except MeshError as error:
        pytest.skip(f"{family} cannot be cut like this: {error}")
    assert report.ok, show(report)
