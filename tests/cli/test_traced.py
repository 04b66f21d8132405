"""Models without layout rules on the command line: what to add, what to install, and what a plan from traces refuses."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from helpers.cli import Run

MESHES = ("--train", "tp=2", "--gen", "tp=2")


@pytest.mark.parametrize("command", ["plan", "validate"])
def test_a_model_without_rules_is_told_of_traces_and_of_what_they_need(run: Run, command: str) -> None:
    outcome = run(command, "tiny-olmoe", *MESHES)
    assert (outcome.code, outcome.out) == (2, "")
    assert "model_type 'olmoe' is not known" in outcome.err
    assert "add `--traced` to `mcore-reshard plan` or `validate`" in outcome.err
    assert "torch, megatron-core, megatron-bridge and vllm must be installed" in outcome.err


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
@pytest.mark.parametrize("command", ["plan", "validate"])
def test_traces_without_the_engine_say_what_to_install(run: Run, command: str) -> None:
    outcome = run(command, "tiny-olmoe", *MESHES, "--traced")
    assert (outcome.code, outcome.out) == (1, "")
    (line,) = outcome.err.splitlines()
    assert line.startswith("mcore-reshard: a plan from traces runs the loaders of Megatron-Bridge and vllm: ")
    assert line.endswith("vllm not installed; from a clone of mcore-reshard: pip install '.[megatron,vllm]'")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tiny-olmoe", *MESHES, "--policy", "conservative"], "policy 'conservative' is for layout rules"),
        (["tiny-olmoe", *MESHES, "--gen-dtype", "fp8"], "fp8: give the config the engine's quantization_config"),
        (["tiny-olmoe", *MESHES, "--gen-dtype", "mxfp8"], "has the engine in bf16 or fp8, not in mxfp8"),
        (["tiny-olmoe", *MESHES, "--train-dtype", "fp8"], "has the trainer in bf16, or both sides in fp8"),
        (["tiny-olmo", *MESHES], "did you mean tiny-olmoe"),
        (["tiny-olmoe", "--train", "tp=2,ep=3", "--gen", "tp=2"], "training: ep*etp = 3*1 must divide tp*cp*dp"),
        (["tiny-olmoe", "--train", "tp=2", "--gen", "cp=2"], "generation: unknown axis 'cp'"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "validate"])
def test_bad_input_is_found_before_a_loader_runs(run: Run, command: str, arguments: list[str], expected: str) -> None:
    outcome = run(command, *arguments, "--traced")
    assert (outcome.code, outcome.out) == (2, "")
    assert expected in outcome.err and "Traceback" not in outcome.err


def test_all_problems_of_a_traced_request_are_listed_at_once(run: Run) -> None:
    arguments = ("--train", "xp=2", "--gen", "tp=0", "--policy", "conservative", "--train-dtype", "fp8")
    outcome = run("plan", "tiny-olmoe", *arguments, "--traced", "--out", "/nowhere/plan.json")
    assert outcome.code == 2 and outcome.err.startswith("mcore-reshard: 5 problems")
