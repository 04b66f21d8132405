"""Bad input, unsound plans and unexpected errors: one clear message, and the exit code that belongs to it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import FP8, MOE, Run

from mcore_reshard import planning
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.plan_file import digest_of, load_plan, save_plan


def test_every_violation_of_both_meshes_and_the_model_is_listed_at_once(run: Run) -> None:
    outcome = run("plan", "tiny-llama", "--train", "tp=3,ep=2,pp=3", "--gen", "tp=5,ep=3", "--json")
    assert (outcome.code, outcome.out) == (2, "")
    lines = outcome.err.splitlines()
    assert lines[0] == f"mcore-reshard: {len(lines) - 1} problems"
    assert [line.startswith("  - training: ") for line in lines[1:]].count(True) == 5
    for expected in (
        "ep*etp = 2*1 must divide tp*cp*dp = 3*1*1 = 3",
        "8 attention heads cannot be divided by tp = 3",
        "4 layers do not divide over pp*vpp = 3",
        "ep = 3 must be 1 (experts cut by tp) or tp*dp = 5*1 = 5",
        "MLP width 96 cannot be divided by tp = 5",
    ):
        assert expected in outcome.err


def test_a_machine_that_is_wrong_is_listed_with_the_meshes(run: Run) -> None:
    meshes = "plan", "tiny-llama", "--train", "tp=3", "--gen", "tp=2"
    outcome = run(*meshes, "--topology", "h3", "--hosts", "train=a*x,gen=b*2", "--out", "/no/such/folder/plan.json")
    assert outcome.code == 2
    for problem in ("tp = 3", "no machine 'h3'", "'a*x' is not", "/no/such/folder"):
        assert problem in outcome.err
    assert "needs --topology" in run(*meshes, "--hosts", "train=a*3").err
    assert "--hosts: it is empty" in run(*meshes, "--topology", "h200-8", "--hosts", "").err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tiny-lama", "--train", "tp=2", "--gen", "tp=2"], "did you mean tiny-llama"),
        (["tiny-llama", "--train", "tp=two", "--gen", "tp=2"], "'tp=two' is not a number, write for example tp=2"),
        (["tiny-llama", "--train", "xp=2", "--gen", "tp=2"], "training: unknown axis 'xp', known: cp, dp"),
        (
            ["tiny-llama", "--train", "tp=2", "--gen", "cp=2"],
            "generation: unknown axis 'cp', known: dp, ep, layers, pp, tp",
        ),
        (["tiny-llama", "--train", "tp=2,pp=2,layers=3+2", "--gen", "tp=2"], "adds up to 5, the model has 4"),
        (["tiny-llama", "--train", "", "--gen", "tp=2", "--train-dtype", "fp4"], "training: unknown dtype 'fp4'"),
        (["tiny-llama", "--train", "", "--gen", "tp=2", "--gen-dtype", "int4"], "generation: unknown dtype 'int4'"),
        (["tiny-llama", "--train", "tp=2", "--gen", "tp=2", "--out", "/nowhere/plan.json"], "cannot write /nowhere"),
    ],
)
def test_bad_input_is_one_clear_message_and_exit_code_2(run: Run, arguments: list[str], expected: str) -> None:
    for flags in ([], ["--json"]):
        outcome = run("plan", *arguments, *flags)
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.err.startswith("mcore-reshard: ") and expected in outcome.err
        assert "Traceback" not in outcome.err


def test_configs_that_cannot_be_read_or_known_are_bad_input(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    meshes = ["--train", "tp=2", "--gen", "tp=2"]
    for content, expected in (
        ("{", "not readable as JSON"),
        ('{"model_type": "gpt2"}', "model_type 'gpt2' is not known"),
        (json.dumps({**load_config("tiny-llama"), "num_attention_heads": 7}), "not divisible"),
    ):
        config.write_text(content)
        outcome = run("plan", config, *meshes)
        assert outcome.code == 2 and expected in outcome.err


def test_a_plan_where_a_config_is_wanted_is_recognized(run: Run, plan_of: Any) -> None:
    plan = plan_of(MOE)
    outcome = run("plan", plan, "--train", "tp=2", "--gen", "tp=2")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == (
        f"mcore-reshard: {plan}: this is a plan, where the config of a model is wanted\n"
        f"See what it does with `mcore-reshard show {plan}`; `explain` and `validate` take plans too.\n"
    )


def test_a_config_where_a_plan_is_wanted_is_recognized(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-70b").mkdir()
    (tmp_path / "my-70b" / "config.json").write_text(json.dumps(load_config("tiny-llama")))
    for source in ("my-70b", "my-70b/config.json", "qwen3-4b"):
        for command in (["show", source], ["explain", source, "model.norm.weight[0]"]):
            outcome = run(*command)
            assert (outcome.code, outcome.out) == (2, "")
            assert outcome.err == (
                f"mcore-reshard: {source}: this is the config of a model, where a plan is wanted\n"
                f"Make a plan of it with `mcore-reshard plan {source} --train ... --gen ... --out plan.json`.\n"
            )
    (tmp_path / "empty").mkdir()
    assert "cannot read plan empty: Is a directory" in run("show", "empty").err


def test_misspelled_fields_of_a_config_are_asked_about_and_its_file_is_named(run: Run, tmp_path: Path) -> None:
    text = json.dumps({**load_config("tiny-qwen3-moe"), "quantization_config": FP8})
    for right, wrong in (("num_experts", "num_expert"), ("hidden_size", "hiden_size"), ("quant_method", "quant_methd")):
        text = text.replace(f'"{right}"', f'"{wrong}"')
    config = tmp_path / "config.json"
    config.write_text(text)
    for source in (config, tmp_path):
        outcome = run("plan", source, "--train", "tp=2", "--gen", "tp=2")
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.err.splitlines() == [
            "mcore-reshard: 3 problems",
            f"  - {config}: hidden_size is missing; did you mean it by 'hiden_size'?",
            f"  - {config}: num_experts is missing; did you mean it by 'num_expert'?",
            f"  - {config}: quantization_config: quant_method is missing; did you mean it by 'quant_methd'?",
            "Correct these fields in config.json.",
        ]


@pytest.mark.parametrize("command", [["show"], ["explain", "model.norm.weight[0]"]], ids=lambda c: c[0])
def test_plan_files_that_are_not_plans_are_told_apart(
    run: Run, plan_of: Any, tmp_path: Path, command: list[str]
) -> None:
    good = plan_of(MOE).read_text()
    bad = tmp_path / "bad.json"
    for content, expected in (
        ("not json", "it is not JSON"),
        ('{"format": "something else"}', "is not a plan"),
        (re.sub('"version":[0-9]+', '"version":99', good), "is a plan of version 99"),
        (good.replace("qkv", "qvk", 1), "is damaged"),
        (good[: len(good) // 2], "it is not JSON"),
    ):
        bad.write_text(content)
        outcome = run(command[0], bad, *command[1:], "--json")
        assert (outcome.code, outcome.out) == (2, "") and expected in outcome.err
    missing = run(command[0], tmp_path / "none.json", *command[1:])
    assert missing.code == 2 and "cannot read plan" in missing.err


def test_usage_errors_are_bad_input_too(run: Run) -> None:
    for argv in ([], ["nonsense"], ["plan"], ["plan", "tiny-llama"], ["plan", *MOE, "--policy", "brave"]):
        outcome = run(*argv)
        assert (outcome.code, outcome.out) == (2, "") and "usage: mcore-reshard" in outcome.err


def _broken(path: Path) -> Path:
    """A plan that sends one destination twice and another never, sealed as if it were right."""
    plan = load_plan(path)
    pattern = plan.patterns[0]
    overlaps = (pattern.overlaps[0], *pattern.overlaps[:-1])
    return _sealed(
        replace(plan, patterns=(replace(pattern, overlaps=overlaps), *plan.patterns[1:])),
        path,
    )


def _sealed(plan: Plan, path: Path) -> Path:
    object.__setattr__(plan, "digest", digest_of(plan))
    save_plan(plan, path)
    return path


def test_an_unsound_plan_exits_with_3_and_names_the_parameter(run: Run, plan_of: Any) -> None:
    path = _broken(plan_of(MOE))
    outcome = run("show", path, "--json")
    assert outcome.code == 3
    assert outcome.json["proof"]["ok"] is False
    assert {"rule", "parameter", "ranks", "message"} == set(outcome.json["proof"]["violations"][0])
    assert "the plan is not sound" in outcome.err and "model.embed_tokens.weight" in outcome.err
    assert "FAILED" in run("show", path).out
    for command in (["show", path, "--rank", "gen:0"], ["explain", path, "model.norm.weight[0]"], ["validate", path]):
        outcome = run(*command, "--json")
        assert (outcome.code, outcome.out) == (3, "") and "model.embed_tokens.weight" in outcome.err


@pytest.mark.parametrize("machine", [[], ["--topology", "h200-8,gpus=2"]], ids=["anywhere", "on hosts"])
def test_a_plan_with_ranks_that_are_not_there_is_unsound(
    run: Run, plan_of: Any, tmp_path: Path, machine: list[str]
) -> None:
    plan = load_plan(plan_of([*MOE, *machine]))
    grids = [grid.copy() for grid in plan.rank_grids]
    grids[plan.transfer_groups[0].dst][0, 0] = 77
    path = _sealed(replace(plan, rank_grids=tuple(grids)), tmp_path / "far.json")
    for command in (["show", path], ["report", path, "-o", tmp_path / "page.html"]):
        outcome = run(*command)
        assert (outcome.code, outcome.out) == (3, "") and "the plan is not sound" in outcome.err and "77" in outcome.err


def test_a_plan_that_fails_its_proof_is_not_written(
    run: Run, plan_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = load_plan(_broken(plan_of(MOE)))
    monkeypatch.setattr(planning, "make_plan", lambda *_, **__: broken)
    target = tmp_path / "unsound.json"
    outcome = run("plan", *MOE, "--out", target, "--json")
    assert outcome.code == 3 and outcome.json["proof"]["ok"] is False and not target.exists()


def test_an_unexpected_error_is_one_line_and_exit_code_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from mcore_reshard.cli import doctor

    def fail(_: object) -> int:
        raise RuntimeError("the roof is on fire")

    monkeypatch.setattr(doctor, "run", fail)
    outcome = run("doctor", "--json")
    assert (outcome.code, outcome.out) == (1, "")
    assert "unexpected RuntimeError: the roof is on fire" in outcome.err and "Traceback" not in outcome.err
    assert "Traceback" in run("doctor", "--debug").err
