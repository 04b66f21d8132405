"""Refits of small real plans by live endpoints, with content that every rank can check for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import synthetic
import torch
from helpers.gpu import device_of
from helpers.plans import Case

from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.session.endpoints import GenerationEndpoint, RefitReport, TrainEndpoint
from mcore_reshard.session.part import RankOfPlan

Endpoint = TrainEndpoint | GenerationEndpoint
REFITS = 2


def refit(
    number: int, address: str, case: Case, device: str, *, timeout_s: float = 30.0, **options: Any
) -> tuple[set[str], dict[str, int]]:
    """Rank `number`, training ranks first, refits twice: (what moved the bytes, wrong elements by parameter).

    On "cuda" ranks take the GPUs in turn, on "cuda:0" they share one. Destinations are poisoned before each refit.
    """
    plan = case.plan()
    rank, tensors, endpoint = endpoint_of(number, address, plan, device, Options(timeout_s=timeout_s, **options))
    ways, wrong = set(), {}
    for report, of_refit in _refits(endpoint, plan, rank, tensors):
        ways.add(report.transport)
        wrong |= of_refit
    return ways, wrong


def endpoint_of(
    number: int, address: str, plan: Plan, device: str, options: Options
) -> tuple[int, dict[str, torch.Tensor], Endpoint]:
    """Rank `number`, training ranks first: its rank in its world, its tensors, and its endpoint. `device` as in `refit`."""
    train = number < plan.train.world
    world, rank = ("train", number) if train else ("gen", number - plan.train.world)
    place = device_of(number) if device == "cuda" else torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    schedule = schedule_of(plan, world, rank)  # type: ignore[arg-type]
    tensors = synthetic.allocate(schedule, place)
    if train:
        synthetic.fill(plan, "train", rank, tensors)
    kind = TrainEndpoint if train else GenerationEndpoint
    return rank, tensors, kind(schedule, tensors, store=address, options=options)


def refits_of_plan(
    number: int, address: str, case: Case, options: Options, leaves: int = -1
) -> Iterator[tuple[Endpoint, RefitReport, dict[str, int]]]:
    """Rank `number` of a session that may plan anew refits twice on the CPU; generation rank `leaves` goes after the first.

    Yields of each refit the rank's endpoint, its report, and wrong elements by parameter.
    """
    plan = case.plan()
    train = number < plan.train.world
    rank = number if train else number - plan.train.world
    part = RankOfPlan(plan, "train" if train else "gen", rank)
    tensors = synthetic.allocate(part.schedule(range(plan.gen.dp)), torch.device("cpu"))
    if train:
        synthetic.fill(plan, "train", rank, tensors)
    endpoint = (TrainEndpoint if train else GenerationEndpoint)(part, tensors, store=address, options=options)
    count = REFITS if train or rank != leaves else 1
    for report, wrong in _refits(endpoint, plan, rank, tensors, count):
        yield endpoint, report, wrong


def _refits(
    endpoint: Endpoint, plan: Plan, rank: int, tensors: dict[str, torch.Tensor], count: int = REFITS
) -> Iterator[tuple[RefitReport, dict[str, int]]]:
    endpoint.prepare()
    for version in range(1, count + 1):
        if endpoint.world == "gen":
            for tensor in tensors.values():
                tensor.view(torch.uint8).fill_(synthetic.POISON)
        report = endpoint.refit(version)
        yield report, synthetic.wrong_elements(plan, "gen", rank, tensors) if endpoint.world == "gen" else {}
    endpoint.close()
