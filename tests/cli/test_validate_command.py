"""`validate` checks its input before it starts, and reports every difference."""

from __future__ import annotations

import hashlib
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import MOE, Run

from mcore_reshard.planner.plan.plan_file import load_plan


@pytest.mark.parametrize("dtypes", ["fp32 -> bf16", "bf16 -> fp32", "fp32 -> fp8", "mxfp8 -> mxfp8"])
def test_validate_reads_off_a_plan_file_which_dtypes_it_cannot_compare(run: Run, tmp_path: Path, dtypes: str) -> None:
    train, gen = dtypes.split(" -> ")
    plan = tmp_path / "plan.json"
    run(
        "plan",
        "tiny-qwen3",
        "--train",
        "tp=2",
        "--gen",
        "tp=2",
        "--train-dtype",
        train,
        "--gen-dtype",
        gen,
        "--out",
        plan,
    )
    outcome = run("validate", plan)
    assert (outcome.code, outcome.out) == (2, "")
    assert f"{dtypes} is not validated here" in outcome.err


def test_validate_refuses_a_plan_whose_trainer_is_in_fp8_and_whose_engine_is_not(run: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    run("plan", "tiny-qwen3-fp8", "--train", "tp=2", "--gen", "tp=2", "--train-dtype", "fp8", "--out", plan)
    outcome = run("validate", plan)
    assert (outcome.code, outcome.out) == (2, "")
    assert "misc parameters are not those of a plan of bf16 -> bf16" in outcome.err
    outcome = run("validate", plan, "--train-dtype", "fp8", "--gen-dtype", "bf16")
    assert (outcome.code, outcome.out) == (2, "")
    assert "fp8 -> bf16 is not validated here" in outcome.err and "the plan is of" not in outcome.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tiny-llama"], "give --train and --gen: tiny-llama is a config"),
        (["tiny-llama", "--train", "tp=3", "--gen", "tp=2"], "8 attention heads cannot be divided by tp = 3"),
        (["tiny-llama", "--train", "tp=2", "--gen", "tp=2", "--refits", "0"], "must be above zero"),
        (["tiny-llama", "--train", "tp=2", "--gen", "tp=2", "--timeout", "nan"], "must be above zero, and finite"),
        (
            ["tiny-llama", "--train", "tp=2", "--gen", "tp=2", "--config", "x"],
            "leave out --config: tiny-llama is the config",
        ),
        (["tiny-llama", "--train", "tp=2", "--gen", "tp=2", "--transport", "nccl"], "--transport gloo needs no GPU"),
    ],
)
def test_validate_checks_its_input_before_it_starts_anything(run: Run, arguments: list[str], expected: str) -> None:
    outcome = run("validate", *arguments, "--json")
    assert (outcome.code, outcome.out) == (2, "") and expected in outcome.err


def test_validate_holds_a_plan_to_what_it_says(run: Run, plan_of: Any) -> None:
    path = plan_of(MOE)
    outcome = run("validate", path, "--train", "tp=2", "--policy", "conservative", "--config", "tiny-llama")
    assert outcome.code == 2
    for expected in (
        "--train is tp=2,pp=1,ep=1,etp=1,cp=1,dp=1,vpp=1, the plan is for tp=2,pp=2,ep=2",
        "--policy is conservative, the plan follows exact",
        "the plan is of another model than tiny-llama",
    ):
        assert expected in outcome.err


def _needs_megatron() -> None:
    if find_spec("megatron") is None:
        pytest.skip("needs the megatron extra")


def test_validate_compares_every_byte_of_a_plan_file(run: Run, plan_of: Any) -> None:
    _needs_megatron()
    path = plan_of(["tiny-qwen3", "--train", "tp=2", "--gen", "tp=1"])
    outcome = run("validate", path, "--refits", 1, "--engine", "slices", "--json")
    assert outcome.code == 0, outcome.err
    report = outcome.json
    assert report["ok"] is True and report["digest"] == load_plan(path).digest
    assert all(row["mismatches"] == 0 for refit in report["refits"] for row in refit["parameters"])


def test_validate_says_that_it_leaves_a_quantized_checkpoint_unquantized(run: Run) -> None:
    _needs_megatron()
    arguments = ("tiny-qwen3-fp8", "--train", "tp=1", "--gen", "tp=1", "--refits", 1, "--engine", "slices")
    outcome = run("validate", *arguments)
    assert outcome.code == 0, outcome.err
    assert "note: the checkpoint is quantized (fp8), the plan moves bfloat16 weights" in outcome.out


def test_validate_finds_a_plan_that_is_sound_and_wrong(run: Run, plan_of: Any) -> None:
    """Two norms of one shape swapped at the source: no proof can see it, the comparison names the first element."""
    _needs_megatron()
    path = plan_of(["tiny-qwen3", "--train", "tp=1", "--gen", "tp=1"])
    swapped = {"q_layernorm": "k_layernorm", "k_layernorm": "q_layernorm"}
    document = json.loads(re.sub("[qk]_layernorm", lambda match: swapped[match[0]], path.read_text()))
    canonical = json.dumps(document["plan"], sort_keys=True, separators=(",", ":"))
    document["digest"] = hashlib.sha256(canonical.encode()).hexdigest()
    path.write_text(json.dumps(document))
    outcome = run("validate", path, "--refits", 1, "--engine", "slices")
    assert outcome.code == 4
    assert "model.layers.0.self_attn.k_norm.weight" in outcome.err and "first [0]: got" in outcome.err
    assert "differ from golden" in outcome.out and "FAILED" in outcome.out
