"""Golden against real where the engine holds block FP8: kept by a trainer in FP8, or quantized on the way from bf16.

Trainers are real Megatron-Core models with quantized parameters of the stand-in for Transformer Engine: real E4M3 bytes
and padded scales. `make validate-all` runs the meshes that the default suite leaves out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import partial

import pytest
import torch

from mcore_reshard.planner.model.configs import load_config

pytest.importorskip("megatron", reason="needs the megatron extra")

from helpers.quantized_standin import ends_in_bf16
from helpers.validating import assert_golden, flip_bit_on_gen_1, run_validation
from helpers.validation_cases import FP8_DEFAULT, FP8_FULL, REFINED_EXPERTS, in_blocks

from mcore_reshard.validation import runner
from mcore_reshard.validation.errors import ValidationError
from mcore_reshard.validation.trainer import build as trainer


def check(family, train, gen, train_dtype, block, changes=None, **how):
    config = in_blocks(family, block, **changes or {})
    return run_validation(config, train, gen, train_dtype=train_dtype, gen_dtype="fp8", **how)


def routes(report):
    """The routes of the engine's tensors by the end of their names, experts' and layers' numbers left out."""
    found = defaultdict(set)
    for parameter in report.parameters:
        found[re.sub(r".*layers\.[0-9]+\.", "", parameter.name)].add(parameter.route)
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "train", "gen", "train_dtype", "block"), FP8_DEFAULT)
def test_refit_equals_golden(family, train, gen, train_dtype, block):
    report = check(family, train, gen, train_dtype, block)
    assert_golden(report)
    assert report.precision.startswith(f"{train_dtype} -> fp8 in blocks of {block[0]}x{block[1]}")
    found = routes(report)
    scales = {name for name in found if name.endswith("_scale_inv")}
    assert scales and all(found[name] == found[name.removesuffix("_scale_inv")] for name in scales)
    small_heads = block[0] > 8 and "self_attn.qkv_proj.weight" in found
    assert {name for name in scales if found[name] == {"misc"}} == (
        {"self_attn.qkv_proj.weight_scale_inv"} if small_heads else set()
    )


@pytest.mark.parametrize(
    ("block", "changes", "train_dtype"),
    [
        pytest.param(*case, dtype, marks=[] if dtype == quick else pytest.mark.slow)
        for case, quick in zip(REFINED_EXPERTS, ("bf16", "fp8"), strict=True)
        for dtype in ("bf16", "fp8")
    ],
    ids=[f"{parts} a block-{dtype}" for parts in ("one part", "one or two parts") for dtype in ("bf16", "fp8")],
)
def test_experts_whose_blocks_vllm_refines(block, changes, train_dtype):
    report = check("qwen3-moe", "ep=2,dp=2", "tp=4", train_dtype, block, changes, engine="slices")
    assert_golden(report)
    routes_of = {p.name.rpartition(".")[2]: p.route for p in report.parameters}
    route = "bulk" if block == (64, 64) else "misc"
    assert {routes_of["w13_weight_scale_inv"], routes_of["w2_weight_scale_inv"]} == {route}
    width = changes["moe_intermediate_size"] // 4
    scales = [p for p in report.parameters if p.name.endswith("w2_weight_scale_inv")]
    assert {p.nbytes for p in scales} == {8 * (128 // 32) * (width // 32) * 4}


@pytest.mark.parametrize(
    ("family", "train", "gen", "at_ends", "kept"),
    [
        ("llama", "tp=2,pp=2,layers=3+1", "tp=2", (1, 1), ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("qwen3-moe", "pp=2,vpp=2,dp=2,ep=2", "tp=2,ep=2", (2, 1), ()),
    ],
)
def test_a_trainer_that_keeps_first_and_last_layers_in_bf16(monkeypatch, family, train, gen, at_ends, kept):
    first, last = at_ends
    monkeypatch.setattr(trainer, "_FP8", trainer._FP8 | ends_in_bf16(first, last))
    layers = [*range(first), *range(4 - last, 4)]
    # what plan_refit reads off the model must be this plan, or each training process refuses
    monkeypatch.setattr(runner, "make_plan", partial(runner.make_plan, train_unquantized_layers=layers))
    config = in_blocks(family, (8, 8))
    modules = {"qkv_proj": "self_attn", "o_proj": "self_attn", "gate_up_proj": "mlp", "down_proj": "mlp"}
    names = [f"model.layers.{layer}.{modules[name]}.{name}" for name in kept for layer in (2, 3)]
    config["quantization_config"]["modules_to_not_convert"] += names
    report = run_validation(config, train, gen, train_dtype="fp8", gen_dtype="fp8")
    assert_golden(report)
    routes = {p.name: p.route for p in report.parameters if p.name.endswith("proj.weight")}
    assert {name for name, route in routes.items() if route == "misc"} == {
        f"{name}.weight" for name in names if ".2." in name
    }


@pytest.mark.parametrize("train_dtype", ["bf16", "fp8"])
def test_after_an_optimizer_step_and_with_float32_beside(train_dtype):
    report = check("deepseek-v3", "ep=2,dp=2", "tp=2", train_dtype, (8, 16), refits=3)
    assert_golden(report)
    assert report.refits[2].change == "an SGD step"
    biases = [p for p in report.parameters if p.name.endswith("e_score_correction_bias")]
    assert {(p.route, p.nbytes, p.mismatches) for p in biases} == {("bulk", 8 * 4, 0)}


def test_golden_transport_moves_pairs_by_name(monkeypatch):
    monkeypatch.setenv("MCORE_RESHARD_TRANSPORT", "golden")
    report = check("qwen3-moe", "ep=2,dp=2", "tp=2", "fp8", (8, 8), refits=1)
    assert_golden(report)
    assert report.transport == "golden" and report.refits[0].bulk_bytes == 0


@pytest.mark.parametrize("train_dtype", ["bf16", "fp8"])
def test_one_flipped_bit_of_a_scale_is_reported_with_rank_tensor_and_coordinate(train_dtype, monkeypatch):
    flip_bit_on_gen_1(monkeypatch, "model.layers.2.mlp.down_proj.weight_scale_inv", torch.int32, (5, 1))
    report = check("llama", "tp=2", "tp=2", train_dtype, (8, 16), refits=1)
    (wrong,) = report.refits[0].wrong
    assert (wrong.name, wrong.gen_rank, wrong.mismatches) == ("model.layers.2.mlp.down_proj.weight_scale_inv", 1, 1)
    assert wrong.first is not None and wrong.first.index == (5, 1)
    assert wrong.first.got != wrong.first.expected
    assert int(wrong.first.got_bits, 16) ^ int(wrong.first.expected_bits, 16) == 1


@pytest.mark.parametrize(
    ("name", "changes", "dtypes", "why"),
    [
        ("tiny-qwen3-fp8", {}, ("fp8", "bf16"), "fp8 -> bf16 is not validated here"),
        ("tiny-qwen3", {}, ("mxfp8", "mxfp8"), "what can be compared is bf16 -> fp8, fp8 -> fp8, and bf16 on both sides"),
        ("tiny-qwen3-fp8", {"quantization_config": {"quant_method": "fp8"}}, ("fp8", "fp8"), "only FP8 in blocks"),
        ("tiny-qwen3-fp8", {"torch_dtype": "float32"}, ("bf16", "fp8"), "beside bfloat16, and this one is in float32"),
        ("tiny-llama", {"torch_dtype": "float32"}, (None, None), "validated in bfloat16, or FP8"),
        ("tiny-llama", {"torch_dtype": "float16"}, (None, None), "this one is in float16"),
        ("tiny-qwen3", {}, ("bf16", "fp8"), "parts share a block of 128 rows; tiny models with matrices of several"),
        ("tiny-gpt-oss", {}, ("bf16", "fp8"), "gpt_oss in FP8 is not written down here"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(name, changes, dtypes, why):
    with pytest.raises(ValidationError, match=re.escape(why)):
        run_validation(
            {**load_config(name), **changes},
            "tp=1",
            "tp=1",
            engine="slices",
            train_dtype=dtypes[0],
            gen_dtype=dtypes[1],
        )


@pytest.mark.slow
@pytest.mark.parametrize(("family", "train", "gen", "train_dtype", "block"), FP8_FULL)
def test_refit_equals_golden_everywhere(family, train, gen, train_dtype, block):
    report = check(family, train, gen, train_dtype, block)
    assert_golden(report)
