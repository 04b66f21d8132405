"""Where `explain` says that an element comes from and goes to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import FP8, HYBRID, MOE, Run

from mcore_reshard.cli.explain import parse_element
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planning import InputError


def test_explain_answers_for_scales(run: Run, tmp_path: Path) -> None:
    quantized, plan = tmp_path / "config.json", tmp_path / "plan.json"
    quantized.write_text(json.dumps({**load_config("tiny-llama"), "quantization_config": FP8}))
    run("plan", quantized, "--train", "tp=2", "--gen", "tp=4", "--gen-dtype", "fp8", "--out", plan)
    scale = run("explain", plan, "model.layers.1.mlp.up_proj.weight_scale_inv[11,7]", "--json").json
    (origin,) = scale["origins"]
    assert origin["dst"]["tensor"] == "model.layers.1.mlp.gate_up_proj.weight_scale_inv"
    assert (origin["dst"]["rank"], origin["dst"]["index"]) == (3, [5, 7])
    assert origin["src"]["tensor"] == "vp0.decoder.layers.1.mlp.linear_fc1.weight._rowwise_scale_inv"
    assert (origin["src"]["rank"], origin["src"]["index"]) == (1, [11, 7])
    assert scale["notes"] == [
        "it is the scale of model.layers.1.mlp.up_proj.weight[88:96, 56:64]",
        "the trainer holds no scales: it computes this one as it casts the block",
    ]
    weight = run("explain", plan, "model.layers.1.mlp.up_proj.weight[90,60]", "--json").json
    assert weight["notes"] == [
        "the trainer holds bfloat16 and sends float8_e4m3fn",
        "its scale is model.layers.1.mlp.up_proj.weight_scale_inv[11,7], of a block of 8x8",
    ]
    tensor = "model.layers.1.mlp.gate_up_proj.weight_scale_inv[5,7]"
    local = run("explain", plan, tensor, "--gen-rank", 3, "--json").json
    assert (local["origins"], local["notes"]) == (scale["origins"], scale["notes"])


def test_explain_says_what_the_engine_repeats_and_what_no_plan_has(run: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    dtypes = ("--train-dtype", "bf16", "--gen-dtype", "fp8")
    run("plan", "tiny-qwen3-moe-fp8", "--train", "tp=2,ep=2", "--gen", "tp=4", *dtypes, "--out", plan)
    engines = "model.layers.0.mlp.experts.routed_experts.w13_weight_scale_inv"
    beside = run("explain", plan, f"{engines}.blocks[0,0,0]", "--gen-rank", 1).out
    assert f"note: a tensor beside the engine's own, which repeats {engines} from it" in beside
    own = run("explain", plan, f"{engines}[0,0,0]", "--gen-rank", 1)
    assert (own.code, own.out) == (2, "")
    assert f"on gen:1: the engine repeats it from {engines}.blocks, which the plan fills" in own.err
    cache = run("explain", plan, "model.layers.0.self_attn.attn.k_scale[0]")
    assert cache.code == 2 and "no plan has scales of the KV cache, refit(kv_scales=...) brings them" in cache.err


def test_explain_follows_one_element_from_all_three_names_of_it(run: Run, plan_of: Any) -> None:
    path = plan_of(MOE)
    forward = run("explain", path, "model.layers.3.self_attn.q_proj.weight[37,3]", "--gen-rank", 1, "--json").json
    (origin,) = forward["origins"]
    assert (origin["route"], origin["pp_stage"], forward["kind"]) == ("bulk", 1, "parameter")
    assert origin["dst"]["rank"] == 1 and origin["dst"]["tensor"] == "model.layers.3.self_attn.qkv_proj.weight"
    assert origin["src"]["tensor"] == "vp0.decoder.layers.1.self_attention.linear_qkv.weight"
    assert origin["src"]["byte_offset"] == 2 * origin["src"]["offset"]
    assert origin["src"]["rank"] in {place["rank"] for place in forward["holders"]}
    for end, flag in (("dst", "--gen-rank"), ("src", "--train-rank")):
        place = origin[end]
        element = f"{place['tensor']}[{','.join(map(str, place['index']))}]"
        assert origin in run("explain", path, element, flag, place["rank"], "--json").json["origins"]


def test_explain_prefers_the_parameter_and_says_how_to_mean_the_tensor(run: Run, plan_of: Any) -> None:
    path = plan_of(MOE)
    outcome = run("explain", path, "lm_head.weight[200,0]", "--gen-rank", 1)
    assert "is also a tensor of gen:1, [128, 64] of [256, 64]" in outcome.out and "[72,0]" in outcome.out
    (origin,) = run("explain", path, "gen:lm_head.weight[72,0]", "--gen-rank", 1, "--json").json["origins"]
    assert origin["index"] == [200, 0]


def test_explain_says_padding_misc_and_nobody(run: Run, plan_of: Any, tmp_path: Path) -> None:
    path = plan_of(HYBRID)
    assert "vLLM stores A = -exp(A_log)" in run("explain", path, "backbone.layers.0.mixer.A_log[0]").out
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**load_config("tiny-llama"), "vocab_size": 250}))
    padded = tmp_path / "padded.json"
    assert run("plan", config, "--train", "dp=2", "--gen", "tp=2", "--out", padded).code == 0
    assert "no parameter fills it" in run("explain", padded, "gen:lm_head.weight[127,0]", "--gen-rank", 1).out
    element = "lm_head.weight[0,0]"
    answer = run("explain", padded, element, "--json").json
    (idle,) = {place["rank"] for place in answer["holders"]} - {origin["src"]["rank"] for origin in answer["origins"]}
    assert "its replicas serve every pull" in run("explain", padded, element, "--train-rank", idle).out
    assert "gen:1 does not hold this element (held by gen 0)" in run("explain", padded, element, "--gen-rank", 1).out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["model.norm.weight"],
            "model.norm.weight has shape [64]: name one element, for example 'model.norm.weight[0]'",
        ),
        (["model.norm.weight[64]"], "index [64] is outside of model.norm.weight"),
        (["model.nrm.weight[0]"], "did you mean model.norm.weight"),
        (["model.norm.weight[a]"], "cannot read the index [a]"),
        (["model.norm.weight[0]", "--gen-rank", "9"], "gen:9 is outside of the 4 gen ranks"),
        (["model.layers.0.self_attn.qkv_proj.weight[0,0]"], "name one with --gen-rank N"),
        (["vp0.decoder.final_layernorm.weight[0]"], "name one with --train-rank N"),
        (["vp0.decoder.final_layernorm.weight[0]", "--train-rank", "0"], "no planned transfer touches"),
    ],
)
def test_explain_refuses_what_it_cannot_answer(run: Run, plan_of: Any, arguments: list[str], expected: str) -> None:
    outcome = run("explain", plan_of(MOE), *arguments)
    assert (outcome.code, outcome.out) == (2, "") and expected in outcome.err


_NO_RANKS = [
    "gen:77 is outside of the 4 gen ranks of the plan (0 to 3)",
    "train:99 is outside of the 8 train ranks of the plan (0 to 7)",
]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["x[5000,9003]", "--gen-rank", 77, "--train-rank", 99],
            [*_NO_RANKS, "the plan has no parameter 'x'; `show PLAN --parameter '*'` lists them"],
        ),
        (
            ["model.norm.weight[5000]", "--gen-rank", 77, "--train-rank", 99],
            [*_NO_RANKS, "index [5000] is outside of model.norm.weight, which has shape [64]: write [0] to [63]"],
        ),
        (
            ["model.norm.weight[a]", "--gen-rank", 77, "--train-rank", 0],
            [
                _NO_RANKS[0],
                "cannot read the index [a], write whole numbers, for example model.norm.weight[5,3]",
            ],
        ),
        (
            ["gen:x[0]", "--gen-rank", 1, "--train-rank", 99],
            [_NO_RANKS[1], "no planned transfer touches 'x' on gen:1"],
        ),
    ],
)
def test_explain_names_everything_that_is_wrong(
    run: Run, plan_of: Any, arguments: list[object], expected: list[str]
) -> None:
    outcome = run("explain", plan_of(MOE), *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines() == [
        f"mcore-reshard: {len(expected)} problems",
        *(f"  - {problem}" for problem in expected),
    ]


def test_elements_are_read_and_misread() -> None:
    element = parse_element(" a.b[5, 3] ")
    assert (element.name, element.index) == ("a.b", (5, 3))
    assert parse_element("a.b").index is None
    for text in ("a[1", "a[x]", "a[]", "[1]", "a b[1]", "a[1:2]", "a[1][2]"):
        with pytest.raises(InputError, match="write"):
            parse_element(text)
