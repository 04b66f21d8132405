"""Golden against real for models planned from traces: Megatron-Bridge's trainers, vLLM's own loaders, every byte."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.traced_cases import (
    BF16,
    FAMILIES,
    FP8_FULL,
    FULL,
    NEWEST_FAMILIES,
    PRECISIONS,
    QUICK,
    REFUSED,
    arguments,
    request,
)
from helpers.validating import OPTIONS, assert_golden, flip_bit_on_gen_1
from helpers.validation_cases import in_blocks

from mcore_reshard.cli.main import main
from mcore_reshard.planner.layout import vllm_quantized
from mcore_reshard.planner.layout.geometry import Piece
from mcore_reshard.planner.layout.partitions import Misc, Partition
from mcore_reshard.planner.layout.traced import TracedLayoutError
from mcore_reshard.planner.model.configs import load_config, traced_names
from mcore_reshard.planning import read_traced_request
from mcore_reshard.validation.errors import BuildError, ValidationError
from mcore_reshard.validation.offline_plan import plan_offline
from mcore_reshard.validation.report import ValidationReport
from mcore_reshard.validation.runner import ValidationRequest, validate

# What goes by misc, and a word of the reason. What vLLM holds in float32, GLM's router and Qwen3-Next's A_log, is cast.
MISC = {
    "tiny-glm4-moe": {},
    "tiny-qwen3-next": {"model.layers.{layer}.linear_attn.norm.weight": "aten."},
}

QUICK_FP8 = [("tiny-olmoe", "EP2 -> TP2 EP2", "FP8 -> FP8"), ("tiny-glm4-moe", "TP2 EP2 -> TP2", "BF16 -> FP8")]


@pytest.fixture(scope="module", autouse=True)
def cache_of_these_tests(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def run(family: str, mesh: str, precision: str = BF16) -> ValidationReport:
    requested = request(family, *arguments(family, mesh), precision)
    return validate(ValidationRequest(requested, options=OPTIONS, engine="vllm", refits=3))


def assert_equals_golden(family: str, mesh: str) -> None:
    report = run(family, mesh)
    assert_golden(report)
    assert len(report.refits) == 3 and report.engine.startswith("vllm ")


@pytest.mark.parametrize(("family", "mesh"), QUICK)
def test_refit_of_a_model_without_rules_equals_golden(family: str, mesh: str) -> None:
    assert_equals_golden(family, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), sorted({*FULL} - {*QUICK}))
def test_refit_of_a_model_without_rules_equals_golden_everywhere(family: str, mesh: str) -> None:
    if mesh in REFUSED.get(family, ()):
        with pytest.raises((BuildError, TracedLayoutError), match=r"no Hugging Face tensor fills it|not supported"):
            run(family, mesh)
    else:
        assert_equals_golden(family, mesh)


@pytest.mark.parametrize(("family", "mesh", "precision"), QUICK_FP8)
def test_refit_into_fp8_of_a_model_without_rules_equals_golden(family: str, mesh: str, precision: str) -> None:
    report = run(family, mesh, precision)
    assert_golden(report)
    routes = {p.route for p in report.parameters if p.name.endswith("experts.w13_weight_scale_inv")}
    dtype = PRECISIONS[precision][0]
    assert routes == {"bulk"} and report.precision.startswith(f"{dtype} -> fp8 in blocks of 8x8")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh", "precision"), sorted({*FP8_FULL} - {*QUICK_FP8}))
def test_refit_into_fp8_of_a_model_without_rules_equals_golden_everywhere(
    family: str, mesh: str, precision: str
) -> None:
    report = run(family, mesh, precision)
    assert_golden(report)
    assert any(p.name.endswith("_scale_inv") and p.route == "bulk" for p in report.parameters)


def test_a_scale_that_is_off_by_a_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.1.mlp.experts.routed_experts.w2_weight_scale_inv"
    flip_bit_on_gen_1(monkeypatch, name, torch.int32, (2, 1))
    wrong = [(r.name, r.gen_rank) for refit in run(*QUICK_FP8[0]).refits for r in refit.wrong]
    assert wrong == [(name, 1)] * 3


def test_scales_that_a_rule_puts_elsewhere_than_the_loader_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scales of gate and up in each other's place."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known = vllm_quantized.scale_partition

    def exchanged(*args: Any) -> Any:
        def moved(piece: Piece) -> Piece:
            slot, row, *rest = piece.origin
            half = piece.view[1] // 2
            return replace(piece, origin=(slot, half - row, *rest)) if ".w13_" in piece.tensor.name else piece

        scales = known(*args)
        return scales if isinstance(scales, Misc) else Partition(tuple(tuple(map(moved, p)) for p in scales.pieces))

    monkeypatch.setattr(vllm_quantized, "scale_partition", exchanged)
    requested = read_traced_request(in_blocks("olmoe", (8, 8)), "tp=1", "tp=2", "exact", "bf16", "fp8")
    with pytest.raises(
        TracedLayoutError, match=r"w13_weight_scale_inv: of .* the plan has .*, the loader puts"
    ) as raised:
        plan_offline(requested)
    assert {problem.split(": ")[1].rpartition(".")[2] for problem in raised.value.problems} == {"w13_weight_scale_inv"}


def test_every_tiny_config_has_its_meshes() -> None:
    tiny = {name for name in traced_names() if name.startswith("tiny-")}
    assert {*FAMILIES} == tiny - {*NEWEST_FAMILIES}
    assert {*QUICK} <= {*FULL}


@pytest.mark.parametrize("name", [*MISC])
def test_what_goes_by_misc_has_its_reason(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, gen = arguments(name, "TP2 EP2 -> TP2")
    assert main(["plan", name, "--train", train, "--gen", gen, "--traced", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["misc"]
    misc = {re.sub(r"\.[0-9]+\.", ".{layer}.", entry["parameter"]): entry["reason"] for entry in entries}
    assert misc.keys() == MISC[name].keys()
    assert all(word in misc[pattern] for pattern, word in MISC[name].items())


def test_one_flipped_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    flip_bit_on_gen_1(monkeypatch, "model.layers.1.mlp.experts.routed_experts.w2_weight", torch.int16, (5, 3))
    report = run("tiny-olmoe", "TP2 EP2 -> TP2")
    wrong = [(result.name, result.gen_rank) for refit in report.refits for result in refit.wrong]
    assert wrong == [("model.layers.1.mlp.experts.routed_experts.w2_weight", 1)] * 3


def test_plain_slices_do_not_know_these_models() -> None:
    request = read_traced_request("tiny-olmoe", "tp=2", "tp=2")
    with pytest.raises(ValidationError, match="validate a traced plan with vLLM"):
        validate(ValidationRequest(request, engine="slices"))


def test_a_saved_plan_is_shown_explained_and_validated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = str(tmp_path / "plan.json")
    assert main(["plan", "tiny-olmoe", "--train", "tp=2,ep=2", "--gen", "tp=2", "--traced", "--out", plan]) == 0
    assert main(["show", plan, "--parameter", "*.1.mlp.experts.3.up_proj.weight"]) == 0
    assert main(["explain", plan, "model.layers.1.mlp.experts.3.up_proj.weight[20,3]", "--gen-rank", "1"]) == 0
    said = capsys.readouterr().out
    assert "trainer tensor  vp0.decoder.layers.1.mlp.experts.linear_fc1.weight3" in said
    assert "engine tensor   model.layers.1.mlp.experts.routed_experts.w13_weight" in said
    assert main(["validate", plan, "--refits", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["model"] == "tiny-olmoe"
    assert main(["validate", plan, "--train", "tp=4"]) == 2
    assert "--train is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "train", "gen", "expected"),
    [
        ({"architectures": ["NoSuchForCausalLM"]}, "tp=1", "tp=1", "Megatron-Bridge cannot build this model: "),
        ({}, "tp=3", "tp=1", "Megatron-Bridge cannot build this model at tp=3,"),
        ({}, "tp=1", "tp=3", "vllm cannot build this model at tp=3,"),
        # Megatron-Bridge exports norms of one width, and vLLM's keys have fewer heads than its queries.
        ({"num_key_value_heads": 4}, "tp=1", "tp=1", "vllm cannot build this model at tp=1,"),
        ({}, "ep=3,dp=3", "tp=1", "Megatron-Bridge cannot build this model at tp=1,pp=1,ep=3,"),
    ],
)
def test_what_cannot_be_built_is_bad_input_in_upstreams_words(
    config: dict[str, Any], train: str, gen: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**load_config("tiny-olmoe"), **config}))
    assert main(["plan", str(file), "--train", train, "--gen", gen, "--traced"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"mcore-reshard: {expected}") and "Error: " in said and "Traceback" not in said


SECOND_START = """
import sys
from mcore_reshard.cli.main import main
code = main(["plan", "tiny-olmoe", "--train", "tp=2", "--gen", "tp=2", "--traced", "--json"])
heavy = {"vllm", "megatron.core", "transformers"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else code)
"""


def test_the_second_start_imports_no_loader_and_gives_the_same_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny-olmoe", "--train", "tp=2", "--gen", "tp=2", "--traced", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    again = subprocess.run([sys.executable, "-c", SECOND_START], check=True, capture_output=True, text=True)
    assert json.loads(again.stdout)["digest"] == first["digest"]
