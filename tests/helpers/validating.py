"""Run validations for tests, and spoil one on purpose."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.transports.base import StageReport
from mcore_reshard.kernels.transports.gloo import GlooExecutor
from mcore_reshard.planner.plan.plan import Policy
from mcore_reshard.planning import read_request
from mcore_reshard.validation.report import ValidationReport
from mcore_reshard.validation.runner import ValidationRequest, validate

OPTIONS = Options(transport="gloo", timeout_s=60.0)


def run_validation(
    config: dict[str, Any],
    train: str,
    gen: str,
    *,
    policy: Policy = "exact",
    train_dtype: str | None = None,
    gen_dtype: str | None = None,
    **how: Any,
) -> ValidationReport:
    """The report of two refits, or as `how` says: other fields of a ValidationRequest."""
    planning = read_request(config, train, gen, policy, train_dtype, gen_dtype)
    return validate(ValidationRequest(planning, **{"options": OPTIONS, "refits": 2, **how}))


def assert_golden(report: ValidationReport) -> None:
    assert report.ok, [str(parameter) for refit in report.refits for parameter in refit.wrong][:5]


def flip_bit_on_gen_1(monkeypatch: pytest.MonkeyPatch, name: str, word: torch.dtype, index: tuple[int, int]) -> None:
    """Generation rank 1 spoils one element of a tensor, seen in words of `word`, after its transfers have landed."""
    run = GlooExecutor.run

    def spoiling(self: GlooExecutor) -> tuple[StageReport, ...]:
        stages = run(self)
        if self._bound.rank_name == "gen:1":
            self._bound.by_name[name].view(word)[index] ^= 1
        return stages

    monkeypatch.setattr(GlooExecutor, "run", spoiling)
