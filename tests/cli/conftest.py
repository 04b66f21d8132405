"""The console script's entry, in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.cli import Outcome, Run

from mcore_reshard.cli import main as cli


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The console script's entry, in this process."""

    def call(*argv: object) -> Outcome:
        code = cli.main([str(arg) for arg in argv])
        return Outcome(code, *capsys.readouterr())

    return call


@pytest.fixture
def plan_of(run: Run, tmp_path: Path) -> Callable[[list[str]], Path]:
    def write(arguments: list[str]) -> Path:
        path = tmp_path / f"{arguments[0]}.json"
        assert run("plan", *arguments, "--out", path).code == 0
        return path

    return write
