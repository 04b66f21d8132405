"""Whole tensors that arrive by name are no larger than the plan allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import synthetic
import torch
from helpers.plans import Case
from helpers.ranks import run_ranks

from mcore_reshard.kernels.options import Options
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint
from mcore_reshard.session.part import RankOfPlan

CASE = Case("tiny-llama", "tp=1", "tp=1")
OPTIONS = Options(timeout_s=20.0, transport="golden")


def export_one(number: int, address: str, times: int) -> Any:
    """A refit in which one tensor of the export has `times` the bytes of the whole model."""
    plan = CASE.plan()
    part = RankOfPlan(plan, "train" if number == 0 else "gen", 0)
    tensors = synthetic.allocate(part.schedule((0,)), torch.device("cpu"))
    elements = times * part.bytes_by_name(everything=True)

    def export(names: Sequence[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.norm.weight", torch.zeros(elements, dtype=torch.uint8)

    loaded: list[int] = []

    def load(pairs: Any) -> None:
        loaded.extend(tensor.nbytes for _, tensor in pairs)

    with_way = {"export": export} if number == 0 else {"load_weights": load}
    endpoint = (TrainEndpoint if number == 0 else GenerationEndpoint)(
        part, tensors, store=address, options=OPTIONS, **with_way
    )
    endpoint.prepare()
    try:
        endpoint.refit(1)
    finally:
        endpoint.close()
    return [nbytes // elements for nbytes in loaded]


@pytest.mark.parametrize(("times", "is_refused"), [(8, False), (9, True)])
def test_a_tensor_larger_than_the_plan_allows_is_refused_before_it_is_read(times: int, is_refused: bool) -> None:
    outcomes = run_ranks(2, export_one, times)
    if not is_refused:
        assert [outcome.value for outcome in outcomes] == [[], [1]]
        return
    for outcome in outcomes:
        assert "model.norm.weight is announced with" in str(outcome.error), outcome
