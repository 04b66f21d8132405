"""The parts of all ranks over nccl, of real plans with content that every rank can check for itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import synthetic
import torch
from helpers.nccl_devices import Communicators, Device
from helpers.plans import Case
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import bind
from mcore_reshard.kernels.copies.buckets import cut_buckets
from mcore_reshard.kernels.copies.cpu import run_copies
from mcore_reshard.kernels.copies.tensors import byte_array
from mcore_reshard.kernels.transports.nccl.staging import ScratchBudget, divide, divide_windows, pair_count
from mcore_reshard.kernels.transports.relay import _joined
from mcore_reshard.planner.plan.make_schedule import relays_of
from mcore_reshard.planner.plan.make_schedule import schedule_of as planned_schedule
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import Schedule


def schedules_of(plan: Plan) -> list[Schedule]:
    worlds = (("train", plan.train.world), ("gen", plan.gen.world))
    return [planned_schedule(plan, world, rank) for world, ranks in worlds for rank in range(ranks)]  # type: ignore[arg-type]


def joined_parts(case: Case, budget: ScratchBudget) -> tuple[list[dict[int, Device]], Communicators, list[Any]]:
    """The parts of all ranks, their communicators, and the tensors of each rank."""
    plan = case.plan()
    schedules = schedules_of(plan)
    tensors = [synthetic.allocate(schedule, torch.device("cpu")) for schedule in schedules]
    for rank in range(plan.train.world):
        synthetic.fill(plan, "train", rank, tensors[rank])
    of_ranks = []
    for schedule, held in zip(schedules, tensors, strict=True):
        bound = bind(schedule, held)
        assert schedule.view is not None
        waves = [bound.part(wave) for wave in schedule.view.waves()]
        views = [wave.schedule.view for wave in waves if schedule.world == "gen"]
        of_ranks.append(_joined(bound, waves, [view.relays()[0] for view in views if view is not None]))
    parts, devices = [[*part] for part in zip(*of_ranks, strict=True)], []
    for part in parts:
        ranks = [[bound.schedule for bound in of_rank] for of_rank in part]
        pairs = [sum(map(pair_count, of_rank)) for of_rank in ranks]
        passes_on = any(len(of_rank) > 1 for of_rank in ranks)
        division, _ = divide_windows(divide(budget, pairs, passes_on=passes_on), ranks, plan.train.world)
        division = replace(division, members=tuple(range(len(ranks))))
        devices.append({rank: Device.of(bounds, division, plan.train.world) for rank, bounds in enumerate(part)})
    return devices, {0: tuple(range(len(schedules)))}, tensors


def share(plan: Plan, tensors: list[dict[str, torch.Tensor]]) -> None:
    """Run the hop within hosts, if the plan has one."""
    ends = [relays_of(plan, rank)[1:] for rank in range(plan.gen.world)]
    sent: dict[tuple[int, ...], NDArray[np.uint8]] = {}
    for sends in (True, False):
        for rank, (relay,) in ((rank, hop) for rank, hop in enumerate(ends) if hop):
            whole = bind(planned_schedule(plan, "gen", rank), tensors[plan.train.world + rank])
            bound = whole.part(relay.sends if sends else relay.receives)
            for bucket in cut_buckets(bound.schedule, 4096):
                key = bucket.stage, bucket.number, *((rank, bucket.peer) if sends else (bucket.peer, rank))
                content = sent.setdefault(key, np.zeros(bucket.nbytes, np.uint8))
                run_copies(bucket.copies, [*map(byte_array, bound.tensors), content])
