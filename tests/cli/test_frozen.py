"""Scripts rely on the text of every `--help` and the keys of every `--json`: neither changes unseen.

`python tests/cli/test_frozen.py` writes frozen.json anew; a change of it is a change for users and goes into CHANGELOG.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mcore_reshard.cli.main import main
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.store import connect_store
from mcore_reshard.session.attempts import HEAD, Head
from mcore_reshard.session.record import SEEN

FROZEN = Path(__file__).with_name("frozen.json")
MOE = ["tiny-qwen3-moe", "--train", "tp=2,pp=2,ep=2,dp=2", "--gen", "tp=2,dp=2"]
HYBRID = ["tiny-nemotron-h", "--train", "tp=2,pp=2,ep=2", "--gen", "tp=2"]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
COMMANDS = ("plan", "show", "explain", "validate", "simulate", "advise", "report", "store", "watch", "doctor")
HELP = ([], *([name] for name in COMMANDS))
JSON: dict[str, list[str]] = {
    "plan": ["plan", *MOE],
    "plan fp8": ["plan", "tiny-qwen3-moe-fp8", *MOE[1:], "--train-dtype", "bf16", "--gen-dtype", "fp8"],
    "plan misc": ["plan", *HYBRID],
    "show": ["show", "PLAN"],
    "show rank": ["show", "PLAN", "--rank", "gen:1"],
    "show parameter": ["show", "PLAN", "--parameter", "model.layers.0.*"],
    "explain": ["explain", "PLAN", f"{Q_PROJ}[0,0]"],
    "advise": ["advise", MOE[0], "--gpus-train", "4", "--gpus-gen", "2"],
    "doctor": ["doctor"],
    "report": ["report", "PLAN", "-o", os.devnull],
    "simulate": ["simulate", "PLAN", "--topology", "h200-8,gpus=4"],
    "simulate what-if": ["simulate", *MOE, "--gen", "tp=4", "--topology", "h200-8"],
}
VALIDATE = ["validate", "tiny-llama", "--train", "tp=2", "--gen", "tp=1", "--refits", "1"]


def output_of(arguments: list[str]) -> str:
    with redirect_stdout(StringIO()) as out, mock.patch.dict(os.environ, COLUMNS="100"):
        assert main(arguments) == 0
    return out.getvalue()


def keys_of(value: Any, path: str = "") -> Iterator[str]:
    """Where each key stands in an object: `misc[].reason`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{path}.{key}".lstrip(".")
            yield from keys_of(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner, f"{path}[]")


def json_keys(arguments: list[str], plan: str) -> list[str]:
    arguments = [plan if argument == "PLAN" else argument for argument in arguments]
    return sorted_keys(output_of([*arguments, "--json"]))


def sorted_keys(output: str) -> list[str]:
    return sorted({*keys_of(json.loads(output))})


def session_keys() -> dict[str, list[str]]:
    """The keys of `store`, and of `watch` beside a session of one rank, whose first attempt is under way."""
    command = [sys.executable, "-m", "mcore_reshard", "store", "--host", "127.0.0.1", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        answer = process.stdout.readline()
        address = json.loads(answer)["address"]
        said = {"state": "intact", "version": None, "committed": None, "doing": None, "since": None, "failure": None}
        try:
            with warnings.catch_warnings(action="ignore"), connect_store(address, Options(timeout_s=30)) as rank:
                rank.take_seat("train:0", {"pid": 7})
                rank.set(f"{SEEN}/train:0", json.dumps({**said, "world": [1, 1, 1]}))
                rank.set(HEAD, json.dumps(asdict(Head("leader", 1, "connect", ""))))
                seen = output_of(["watch", address, "--json"])
        finally:
            process.terminate()
    return {"store": sorted_keys(answer), "watch": sorted_keys(seen)}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("plans") / "plan.json")
    output_of(["plan", *MOE, "--out", path])
    return path


@pytest.fixture(scope="module")
def frozen() -> dict[str, dict[str, Any]]:
    kept: dict[str, dict[str, Any]] = json.loads(FROZEN.read_text())
    return kept


@pytest.mark.parametrize("command", HELP, ids=lambda command: " ".join(["mcore-reshard", *command]))
def test_the_help_is_what_it_was(command: list[str], frozen: dict[str, dict[str, Any]]) -> None:
    assert output_of([*command, "--help"]).splitlines() == frozen["help"][" ".join(command)]


@pytest.mark.parametrize("name", JSON)
def test_the_keys_of_json_are_what_they_were(name: str, plan: str, frozen: dict[str, dict[str, Any]]) -> None:
    assert json_keys(JSON[name], plan) == frozen["json"][name]


def test_the_keys_of_a_validation_are_what_they_were(frozen: dict[str, dict[str, Any]]) -> None:
    """Of a process in which nothing but the command imports Megatron."""
    if find_spec("megatron") is None:
        pytest.skip("needs the megatron extra")
    command = [sys.executable, "-m", "mcore_reshard", *VALIDATE, "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert sorted_keys(done.stdout) == frozen["json"]["validate"]


def test_the_keys_of_store_and_watch_are_what_they_were(frozen: dict[str, dict[str, Any]]) -> None:
    kept = {name: frozen["json"][name] for name in ("store", "watch")}
    assert session_keys() == kept


def test_a_key_more_or_less_is_seen() -> None:
    assert {*keys_of({"misc": [{"reason": ""}, {"bytes": 1}]})} == {"misc", "misc[].reason", "misc[].bytes"}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/plan.json"
        output_of(["plan", *MOE, "--out", path])
        kept: dict[str, Any] = {
            "help": {" ".join(command): output_of([*command, "--help"]).splitlines() for command in HELP},
            "json": {
                **{name: json_keys(arguments, path) for name, arguments in {**JSON, "validate": VALIDATE}.items()},
                **session_keys(),
            },
        }
    FROZEN.write_text(json.dumps(kept, indent=1) + "\n")
