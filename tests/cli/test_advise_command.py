"""`advise` prints meshes, why, and what to run next."""

from __future__ import annotations

import pytest
from helpers.cli import Run

from mcore_reshard.planner.layout.mesh import format_mesh
from mcore_reshard.planning import read_request
from mcore_reshard.report.text import seconds_text


def test_the_command_prints_what_it_found_and_what_to_run_next(run: Run) -> None:
    arguments = ["advise", "qwen3-4b", "--gpus-train", "4", "--gpus-gen", "2"]
    report, text = run(*arguments, "--json").json, run(*arguments).out
    assert report["gpus"] == {"train": 4, "gen": 2} and report["pairs"]
    best = report["pairs"][0]
    assert seconds_text(best["simulated_seconds"]) in text and best["reason"] in text
    assert all(assumption in text for assumption in report["assumptions"])
    command = text.splitlines()[-1].removeprefix("next: mcore-reshard ").split()
    assert run(*command, "--json").json["seconds"] == best["simulated_seconds"]
    planned = read_request("qwen3-4b", command[3], command[5])
    assert (format_mesh(planned.train), format_mesh(planned.gen)) == (best["train"], best["gen"])


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        (
            ["qwen3-4b", "--gpus-train", "0", "--gpus-gen", "5000"],
            ["--gpus-train 0", "--gpus-gen 5000: give 1 to 4,096"],
        ),
        (["qwen3-4b", "--gpus-train", "4", "--gpus-gen", "4", "--topology", "tpu"], ["there is no machine 'tpu'"]),
        (["qwen3-4b", "--gpus-train", "2", "--gpus-gen", "4", "--topology", "h200-8,shared"], ["cannot share"]),
        (
            ["no-such-model", "--gpus-train", "-1", "--gpus-gen", "1", "--topology", "tpu"],
            ["no-such-model", "--gpus-train -1", "there is no machine 'tpu'"],
        ),
        (["qwen3-4b", "--gpus-train", "2", "--gpus-gen", "2", "--gen-dtype", "fp3"], ["unknown dtype 'fp3'"]),
    ],
)
def test_bad_input_is_listed_with_exit_code_two(arguments: list[str], problems: list[str], run: Run) -> None:
    outcome = run("advise", *arguments)
    assert outcome.code == 2 and outcome.out == ""
    assert all(problem in outcome.err for problem in problems), outcome.err
