"""The console script's entry, in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.cli import Outcome, Run

from mcore_reshard.cli import main as cli

_PLANS: dict[tuple[str, ...], str] = {}  # files that `plan` wrote, by its arguments


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
        if text := _PLANS.get((*arguments,)):
            path.write_text(text)
            return path
        assert run("plan", *arguments, "--out", path).code == 0
        _PLANS[(*arguments,)] = path.read_text()
        return path

    return write
