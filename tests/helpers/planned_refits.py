"""Refits of small real plans by live endpoints, with content that every rank can check for itself."""

from __future__ import annotations

from typing import Any

import synthetic
import torch
from helpers.gpu import device_of
from helpers.plans import Case

from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint

REFITS = 2


def refit(
    number: int, address: str, case: Case, device: str, *, timeout_s: float = 30.0, **options: Any
) -> tuple[set[str], dict[str, int]]:
    """Rank `number`, training ranks first, refits twice: (what moved the bytes, wrong elements by parameter).

    On "cuda" ranks take the GPUs in turn, on "cuda:0" they share one. Destinations are poisoned before each refit.
    """
    plan = case.plan()
    train = number < plan.train.world
    world, rank = ("train", number) if train else ("gen", number - plan.train.world)
    place = device_of(number) if device == "cuda" else torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    schedule = schedule_of(plan, world, rank)  # type: ignore[arg-type]
    tensors = synthetic.allocate(schedule, place)
    if train:
        synthetic.fill(plan, "train", rank, tensors)
    endpoint = (TrainEndpoint if train else GenerationEndpoint)(
        schedule, tensors, store=address, options=Options(timeout_s=timeout_s, **options)
    )
    endpoint.prepare()
    ways, wrong = set(), {}
    for version in range(1, REFITS + 1):
        if not train:
            for tensor in tensors.values():
                tensor.view(torch.uint8).fill_(synthetic.POISON)
        ways.add(endpoint.refit(version).transport)
        wrong |= {} if train else synthetic.wrong_elements(plan, "gen", rank, tensors)
    endpoint.close()
    return ways, wrong
