r"""Names out of configs and plan files never command the terminal: an escape character shows as `\x1b`."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import HYBRID, Run

from mcore_reshard.cli.printable import printable
from mcore_reshard.planner.model.configs import load_config

CLEAR = "\x1b[2J"
MESHES = ["--train", "tp=2", "--gen", "tp=2"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"q{CLEAR}", r"q\x1b[2J"),
        ("a\rb\x07\x9b1m", r"a\rb\x07\x9b1m"),
        ("one\ntwo", "one\ntwo"),
        ("left\u202eright", r"left\u202eright"),
        ("lone \udcff", r"lone \udcff"),
        ("层.é │ ok", "层.é │ ok"),
    ],
)
def test_only_what_shows_is_left_as_it_is(text: str, shown: str) -> None:
    assert printable(text) == shown
    shown.encode()


@pytest.fixture
def hostile(plan_of: Any) -> Path:
    """A plan whose model, names and reasons hold escape sequences; its digest is right."""
    path: Path = plan_of(HYBRID)
    document = json.loads(path.read_text())
    text = json.dumps(document["plan"]).replace("tiny-nemotron-h", f"model{CLEAR}".replace("\x1b", "\\u001b"))
    text = text.replace("mixer", "mix\\u001bcer").replace("vLLM stores", "vLLM\\u001b]0;title\\u0007 stores")
    document["plan"] = json.loads(text)
    canonical = json.dumps(document["plan"], sort_keys=True, separators=(",", ":"))
    document["digest"] = hashlib.sha256(canonical.encode()).hexdigest()
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    "options",
    [
        ["show"],
        ["show", "--rank", "train:0"],
        ["show", "--parameter", "*"],
        ["show", "--parameter", "*.0.*A_log"],
        ["explain", "backbone.layers.0.mix\x1bcer.A_log[0]"],
        ["explain", "backbone.layers.0.mix\x1bcer.in_proj.weight[0,0]", "--gen-rank", "0"],
        ["explain", "backbone.layers.0.mixer.in_proj.weight[0,0]"],
        ["validate"],
    ],
    ids=lambda options: " ".join(options).replace("\x1b", "ESC"),
)
def test_a_hostile_plan_shows_its_escapes(run: Run, hostile: Path, options: list[str]) -> None:
    outcome = run(options[0], hostile, *options[1:])
    shown = outcome.out + outcome.err
    assert "\x1b" not in shown and "\x07" not in shown and r"\x1b" in shown
    if outcome.code == 0:
        as_json = run(options[0], hostile, *options[1:], "--json")
        assert "\\u001b" in as_json.out and "\x1b" not in as_json.out


def test_a_hostile_config_shows_its_escapes(run: Run, tmp_path: Path) -> None:
    config = tmp_path / f"model{CLEAR}.json"
    config.write_text(json.dumps(load_config("tiny-llama")))
    shown = run("plan", config, *MESHES)
    assert shown.code == 0 and "\x1b" not in shown.out and r"model\x1b[2J" in shown.out
    config.write_text(json.dumps({"model_type": f"llama{CLEAR}"}))
    refused = run("plan", config, *MESHES)
    assert refused.code == 2 and "\x1b" not in refused.err and r"\x1b[2J.json" in refused.err


def test_progress_shows_the_escapes_of_a_name(tmp_path: Path) -> None:
    config = tmp_path / "model\x1b]0;title\x07.json"
    config.write_text(json.dumps(load_config("tiny-llama")))
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "mcore_reshard", "plan", str(config), *MESHES]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=inside, timeout=60, env={**os.environ, "TERM": "xterm"})
    os.close(inside)
    shown = os.read(terminal, 1 << 16)
    os.close(terminal)
    assert rb"planning model\x1b]0;title\x07" in shown and b"\x1b]0;" not in shown
