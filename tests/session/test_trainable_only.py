"""Sessions of plans with frozen parameters, in real processes: what each refit brings, and what it leaves as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.frozen import half_of, moves
from helpers.plans import Case
from helpers.ranks import run_ranks, values
from helpers.simulate import numbered_tensors

from mcore_reshard.kernels.errors import StaleTensorError, VersionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.plan.frozen import with_frozen, without_frozen
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.session.endpoints import GenerationEndpoint, RefitReport, TrainEndpoint
from mcore_reshard.session.refitter import Refitter

CASES = [
    Case("tiny-llama", "tp=2", "tp=1,dp=3"),  # replicas relay
    Case("tiny-qwen3-moe", "ep=2,dp=2", "tp=2", dtypes=("bf16", "fp8"), block=(8, 16)),
]


class Rank:
    """One rank of the case's plan, half of whose layers are frozen."""

    def __init__(self, number: int, address: str, case: Case) -> None:
        whole = case.plan()
        self.plan = with_frozen(whole, half_of(whole), {})
        self.is_train = number < whole.train.world
        rank = number if self.is_train else number - whole.train.world
        self.schedule = schedule_of(self.plan, "train" if self.is_train else "gen", rank)
        computed = {self.schedule.tensors[index].name for index in self.schedule.computed}
        self.tensors = {
            local.name: torch.zeros(local.shape, dtype=getattr(torch, local.dtype))
            for local in self.schedule.tensors
            if local.name not in computed
        }
        numbered = numbered_tensors(whole, self.schedule.world).items()
        self.numbers = {local.name: numbers for (owner, local), numbers in numbered if owner == rank}
        self.address = address

    def join(self, session: str) -> TrainEndpoint | GenerationEndpoint:
        kind = TrainEndpoint if self.is_train else GenerationEndpoint
        endpoint = kind(self.schedule, lambda: self.tensors, store=self.address, options=self.options(session))
        endpoint.prepare()
        return endpoint

    def options(self, session: str) -> Options:
        return Options(timeout_s=20.0, session=session)

    def train(self, version: int) -> None:
        """Change all weights, the frozen ones too: a refit that brings them shows."""
        for name, tensor in self.tensors.items() if self.is_train else ():
            values = torch.from_numpy(np.sin(self.numbers[name] * 0.37 + version))
            tensor.copy_(values)

    def bits(self) -> dict[str, np.ndarray]:
        return {name: tensor.view(torch.uint8).numpy().copy() for name, tensor in self.tensors.items()}

    def differing(self, before: dict[str, np.ndarray], trained: bool) -> int:
        """How many trained, or frozen, elements have other bits than before."""
        count = 0
        for name, bits in self.bits().items() if not self.is_train else ():
            numbers = self.numbers[name]
            differs = (bits != before[name]).reshape(*numbers.shape, -1).any(axis=-1)
            count += int((differs & (numbers >= 0) & (moves(self.plan, numbers) == trained)).sum())
        return count


def refit_thrice(number: int, address: str, case: Case) -> Any:
    me = Rank(number, address, case)
    endpoint, reports, differences = me.join("first"), [], []

    def refit(version: int, train: bool = True, **given: Any) -> None:
        before = me.bits()
        if train:
            me.train(version)
        reports.append(endpoint.refit(version, **given))
        differences.append((me.differing(before, True), me.differing(before, False)))

    refit(1)
    with pytest.raises(VersionError):
        endpoint.refit(1)
    refit(2)
    last_rank = me.schedule.name == f"gen:{me.schedule.gen_ranks - 1}"
    refit(3, train=False, everything=last_rank)
    refit(4)
    endpoint.close()
    endpoint = me.join("second")
    refit(5)
    return reports, differences


@pytest.mark.parametrize("case", CASES, ids=str)
def test_later_refits_bring_what_is_trained_and_nothing_else(case: Case) -> None:
    plan = with_frozen(case.plan(), half_of(case.plan()), {})
    assert plan.relay == (case is CASES[0])
    outcomes = values(run_ranks(plan.train.world + plan.gen.world, refit_thrice, case, timeout_s=90.0))
    reports: list[list[RefitReport]] = [reports for reports, _ in outcomes]
    moved = ["everything", "trainable parameters", "everything", "trainable parameters", "everything"]
    assert [[report.moved for report in of_rank] for of_rank in reports] == [moved] * len(reports)
    sent = [sum(of_rank[refit].nbytes for of_rank in reports[: plan.train.world]) for refit in range(5)]
    whole, later = int(plan.send_bytes.sum()), int(without_frozen(plan).send_bytes.sum())
    assert sent == [whole, later, whole, later, whole] and 0 < later < whole
    for _, differences in outcomes[plan.train.world :]:
        trained, frozen = zip(*differences, strict=True)
        assert frozen[1] == frozen[3] == 0 and min(frozen[0], frozen[2], frozen[4]) > 0
        assert trained[2] == 0 and min(trained[:2]) > 0  # the third refit brings the weights of the second


def refit_until_it_fails(number: int, address: str) -> list[str]:
    me = Rank(number, address, CASES[0])
    endpoint, moved = me.join("first"), []
    for version in (1, 2, 3):
        me.train(version)
        if version == 3 and me.schedule.name == "train:1":
            me.tensors = {name: tensor.clone() for name, tensor in me.tensors.items()}
        try:
            moved.append(endpoint.refit(version).moved)
        except StaleTensorError:
            moved.append("failed")
        except Exception as error:
            assert "bound tensors changed" in str(error)
            moved.append("failed")
    endpoint = me.join("second")
    return [*moved, *(endpoint.refit(version).moved for version in (3, 4))]


def test_after_a_failure_the_next_session_begins_with_everything() -> None:
    moved = ["everything", "trainable parameters", "failed", "everything", "trainable parameters"]
    assert values(run_ranks(5, refit_until_it_fails, timeout_s=60.0)) == [moved] * 5


@pytest.mark.parametrize(("written", "share"), [(0, 0.0), (4096, 1.0)])
def test_a_replica_that_others_pass_everything_to_is_mixed_once_they_may_have_written(
    written: int, share: float
) -> None:
    """A refit of few parameters may bring a replica nothing from the trainer."""
    rank: Any = SimpleNamespace(_staged=None, _bulk_began=True)
    program: Any = SimpleNamespace(
        bound=SimpleNamespace(nbytes=0), executor=SimpleNamespace(written_bytes=written), names=()
    )
    attempt: Any = SimpleNamespace(written_by_name=0, share_by_name=0.0)
    assert Refitter._written_share(rank, program, attempt) == share
