"""Golden against real with real vLLM models as the destination and vLLM's own loaders as golden."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.validating import assert_golden, run_validation
from helpers.validation_cases import REFINED_COLUMNS, REFINED_EXPERTS, in_blocks

from mcore_reshard.cli.main import main
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.model.parameters import Role
from mcore_reshard.validation.engine import vllm_engine
from mcore_reshard.validation.engine.slices import GenSizes
from mcore_reshard.validation.processes import ProcessError

CASES = [
    ("llama", "tp=2", "tp=4", {}),
    ("llama-tied", "pp=2,layers=3+1", "tp=2,pp=2", {"vocab_size": 250}),
    ("qwen2", "tp=2", "tp=4", {"num_key_value_heads": 2}),
    ("qwen3", "cp=2", "tp=2,dp=2", {}),
    ("qwen3-moe", "tp=2,ep=2,etp=2,dp=2", "tp=2,pp=2", {}),
    ("qwen3-moe", "pp=2,vpp=2", "tp=2,dp=2,ep=4", {"num_experts": 10}),
    ("deepseek-v3", "tp=2,ep=4,dp=2", "tp=2,dp=2,ep=4", {}),
    ("moonlight", "tp=2", "tp=2", {}),
    ("kimi-k2", "pp=2", "tp=2", {}),
    ("nemotron-h", "tp=2,ep=2", "tp=4", {}),
    ("gpt-oss", "ep=4,dp=4", "tp=2", {}),
    ("gpt-oss", "tp=2", "tp=2,ep=2", {}),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "train", "gen", "overrides"), CASES)
def test_refit_into_real_vllm_equals_golden(family, train, gen, overrides):
    config = {**load_config(f"tiny-{family}"), **overrides}
    report = run_validation(config, train, gen, engine="vllm")
    assert report.engine.startswith("vllm ")
    assert_golden(report)


def test_a_parameter_that_no_rule_knows_is_loaded_by_vllm_itself():
    unknown = frozenset({Role.EXPERT_DOWN})
    report = run_validation(load_config("tiny-qwen3-moe"), "tp=2,ep=2", "tp=2", engine="vllm", unknown=unknown)
    assert_golden(report)
    assert {p.name.rpartition(".")[2] for p in report.parameters if p.route == "misc"} == {"w2_weight"}


IN_FP8 = [
    ("llama", "tp=2,pp=2", "tp=2", "fp8", (16, 16), {}),  # heads of 8 rows: QKV goes to misc
    ("qwen3", "tp=2", "tp=4", "bf16", (8, 8), {}),
    ("qwen3-moe", "tp=2,ep=2,etp=2,dp=2", "tp=2", "fp8", (8, 8), {}),
    ("qwen3-moe", "ep=2,dp=2", "tp=2,dp=2,ep=4", "bf16", (16, 16), {}),
    *(("qwen3-moe", "ep=2,dp=2", "tp=4", dtype, *refined) for dtype in ("fp8", "bf16") for refined in REFINED_EXPERTS),
    ("qwen3-moe", "ep=2,dp=2", "tp=2", "bf16", *REFINED_COLUMNS),
    ("deepseek-v3", "tp=2,ep=2,pp=2", "tp=2", "fp8", (8, 8), {}),
    ("deepseek-v3", "tp=2,ep=2", "tp=2,ep=2", "bf16", (8, 16), {}),
    ("deepseek-v3-fp8", "tp=2", "tp=2", "fp8", (128, 128), {}),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "train", "gen", "train_dtype", "block", "changes"), IN_FP8)
def test_refit_into_real_vllm_in_fp8_equals_golden(family, train, gen, train_dtype, block, changes):
    config = in_blocks(family, block, **changes)
    report = run_validation(config, train, gen, engine="vllm", train_dtype=train_dtype, gen_dtype="fp8")
    assert report.engine.startswith("vllm ")
    assert_golden(report)
    scales = {p.name.rpartition(".")[2]: p.route for p in report.parameters if p.name.endswith("_scale_inv")}
    assert scales
    if changes:
        route = "misc" if block == (128, 128) else "bulk"
        assert {scales["w13_weight_scale_inv"], scales["w2_weight_scale_inv"]} == {route}


REFUSED = [
    (
        {"moe_intermediate_size": 200},
        "tp=1",
        "gen:0: ValueError: The output_size of gate's and up's weight = 200 is not",
    ),
    (
        {"head_dim": 96},
        "tp=1",
        "gen:0, loading model.layers.0.self_attn.v_proj.weight_scale_inv: RuntimeError: start (5)",
    ),
    (
        {"hidden_size": 384, "moe_intermediate_size": 320},
        "tp=2",
        "gen:0, loading model.layers.0.mlp.experts.0.down_proj.weight_scale_inv: RuntimeError: The size of tensor a (5)",
    ),
]


@pytest.mark.parametrize(("changes", "gen", "why"), REFUSED)
def test_a_model_that_vllm_cannot_hold_is_bad_input_with_vllms_reason(changes, gen, why, tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**load_config("tiny-qwen3-moe-fp8"), **changes}))
    dtypes = ("--train-dtype", "fp8", "--gen-dtype", "fp8")
    assert main(["validate", str(file), "--train", "ep=2,dp=2", "--gen", gen, *dtypes]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"mcore-reshard: vLLM refuses this model, so nothing can be compared: {why}")
    assert said.endswith("; change the config or --gen to what vLLM holds\n") and "Traceback" not in said


@pytest.mark.parametrize("error", [TypeError, RuntimeError])
def test_what_else_goes_wrong_in_vllm_is_no_refusal(error, monkeypatch):
    def build(*_, **__):
        raise error("a bug")

    monkeypatch.setattr(vllm_engine, "build_engine", build)
    with pytest.raises(ProcessError, match=f"{error.__name__}: a bug"):
        run_validation(load_config("tiny-llama"), "tp=1", "tp=1", engine="vllm")


@pytest.mark.parametrize("error", [KeyError, NotImplementedError, RuntimeError])
def test_a_loader_that_refuses_sizes_and_one_that_fails(error, monkeypatch):
    class Model:
        def load_weights(self, tensors):
            assert [name for name, _ in tensors] == ["a", "b"]
            raise error("sizes")

    monkeypatch.setattr(vllm_engine, "build_engine", lambda *_, **__: Model())
    checkpoint = dict.fromkeys(("a", "b"), torch.empty(1))
    if error is RuntimeError:
        assert vllm_engine.refusal("folder", GenSizes(), checkpoint) == "gen:0, loading b: RuntimeError: sizes"
    else:
        with pytest.raises(error):
            vllm_engine.refusal("folder", GenSizes(), checkpoint)
