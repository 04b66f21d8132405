"""`show` tells of a plan, one rank and some parameters."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.cli import HYBRID, MOE, Run


def test_show_repeats_the_plan_and_lists_its_parameters(run: Run, plan_of: Any) -> None:
    path = plan_of(HYBRID)
    planned, shown = run("plan", *HYBRID, "--json").json, run("show", path, "--json").json
    assert shown["plan_seconds"] is None
    assert planned.pop("memory"), "counting it takes seconds: `plan` does that"
    assert {**planned, "plan_seconds": None} == shown
    text = run("show", path).out
    assert "backbone.layers.*.mixer.in_proj.weight" in text and "vp*.decoder.layers.*.mixer.in_proj.weight" in text


def test_show_rank_adds_up_to_what_the_plan_says(run: Run, plan_of: Any) -> None:
    path = plan_of(MOE)
    ranks = run("show", path, "--json").json["ranks"]
    for world, key in (("train", "send_bytes"), ("gen", "recv_bytes")):
        report = run("show", path, "--rank", f"{world}:3", "--json").json
        assert report["bytes"] == ranks[world][3][key]
        assert report["bytes"] == sum(p["bytes"] for stage in report["stages"] for p in stage["peers"])
        assert report["bytes"] == sum(tensor["bytes"] for tensor in report["tensors"])
        assert report["transfers"] == sum(tensor["transfers"] for tensor in report["tensors"])
    assert "gen:3" in run("show", path, "--rank", "gen:3").out


def test_show_parameter_lists_transfers_with_both_ends(run: Run, plan_of: Any) -> None:
    path = plan_of(MOE)
    rows = run("show", path, "--parameter", "*.0.self_attn.k_proj.weight", "--json").json["transfers"]
    assert sum(row["bytes"] for row in rows) == 2 * 32 * 64 * 2  # two replicas of the engine, 2 bytes an element
    assert {row["dst"]["tensor"] for row in rows} == {"model.layers.0.self_attn.qkv_proj.weight"}
    mine = run("show", path, "--parameter", "*.0.self_attn.k_proj.weight", "--rank", "gen:1", "--json").json
    assert mine["transfers"] == [row for row in rows if row["dst"]["rank"] == 1]
    everything = run("show", path, "--parameter", "*", "--rank", "train:2", "--json").json["transfers"]
    assert sum(r["bytes"] for r in everything) == run("show", path, "--rank", "train:2", "--json").json["bytes"]
    text = run("show", path, "--parameter", "model.layers.0.*").out
    assert "linear_qkv.weight" in text and "more: --json lists all" in text


def test_show_parameter_gives_the_reason_of_a_misc_parameter(run: Run, plan_of: Any) -> None:
    path = plan_of(HYBRID)
    (row,) = run("show", path, "--parameter", "*.0.mixer.A_log", "--json").json["transfers"]
    assert row["route"] == "misc" and "not a byte copy" in row["reason"]
    assert "not a byte copy" in run("show", path, "--parameter", "*.0.mixer.A_log").out
    assert "has no part in" in run("show", path, "--parameter", "*.0.mixer.A_log", "--rank", "gen:0").out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--rank", "gen:4"], "gen:4 is outside of the 4 gen ranks of the plan"),
        (["--rank", "3"], "cannot read the rank '3', write train:0 or gen:3"),
        (["--parameter", "nothing.*"], "no parameter of the plan matches 'nothing.*'"),
    ],
)
def test_show_refuses_what_the_plan_does_not_have(run: Run, plan_of: Any, options: list[str], expected: str) -> None:
    outcome = run("show", plan_of(MOE), *options)
    assert (outcome.code, outcome.out) == (2, "") and expected in outcome.err


def test_show_names_an_unknown_rank_and_an_unmatched_glob_together(run: Run, plan_of: Any) -> None:
    outcome = run("show", plan_of(MOE), "--rank", "foo:1", "--parameter", "zzz*")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines() == [
        "mcore-reshard: 2 problems",
        "  - cannot read the rank 'foo:1', write train:0 or gen:3",
        "  - no parameter of the plan matches 'zzz*'; `show PLAN` lists them",
    ]
