"""The parts of all ranks over nccl, of real plans with content that every rank can check for itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import synthetic
import torch
from helpers.nccl_devices import Communicators, Device
from helpers.plans import Case
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import BoundSchedule, bind
from mcore_reshard.kernels.copies.buckets import cut_buckets
from mcore_reshard.kernels.copies.cast_arithmetic import compute_scales
from mcore_reshard.kernels.copies.cpu import run_copies
from mcore_reshard.kernels.copies.tensors import byte_array
from mcore_reshard.kernels.transports.nccl.staging import ScratchBudget, divide, divide_windows, pair_count
from mcore_reshard.kernels.transports.reach import joined_hops, shared_gpus
from mcore_reshard.kernels.transports.relay import _joined
from mcore_reshard.planner.plan.make_schedule import relays_of
from mcore_reshard.planner.plan.make_schedule import schedule_of as planned_schedule
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import Schedule


def schedules_of(plan: Plan) -> list[Schedule]:
    worlds = (("train", plan.train.world), ("gen", plan.gen.world))
    return [planned_schedule(plan, world, rank) for world, ranks in worlds for rank in range(ranks)]  # type: ignore[arg-type]


def joined_parts(
    case: Case, budget: ScratchBudget, *, shares: bool = True, transport: str = "auto"
) -> tuple[list[dict[int, Device]], Communicators, list[Any]]:
    """The parts of all ranks, their communicators, and the tensors of each rank, in which what goes by `direct` has landed.

    Unless it `shares`, all members are in one communicator, as if no GPU had ranks of both sides.
    """
    plan = case.plan()
    assert plan.topology is not None
    shared = shared_gpus(plan, plan.topology, "auto") if shares and transport == "auto" else None
    schedules = schedules_of(plan)
    tensors = [synthetic.allocate(schedule, torch.device("cpu")) for schedule in schedules]
    for rank in range(plan.train.world):
        synthetic.fill(plan, "train", rank, tensors[rank])
    bounds = [bind(schedule, held) for schedule, held in zip(schedules, tensors, strict=True)]
    of_ranks = [far_parts(plan, bound, transport) for bound in bounds]
    if transport == "auto":
        by_hand([bound.part(bound.schedule.with_peers(peers(plan, bound.schedule, near=True))) for bound in bounds])
    parts_of_all = [[*part] for part in zip(*of_ranks, strict=True)]
    pairs = [[sum(pair_count(bound.schedule) for bound in of_rank) for of_rank in part] for part in parts_of_all]
    members = tuple(np.flatnonzero(np.sum(pairs, axis=0)).tolist())
    devices: list[dict[int, Device]] = []
    for part, of_part in zip(parts_of_all, pairs, strict=True):
        ranks = [[bound.schedule for bound in of_rank] for of_rank in part]
        hops = {schedule.hop_kind for of_rank in ranks for schedule in of_rank[1:]}
        division = divide(budget, of_part, parts=len(parts_of_all), hops=hops, members=members, shared=shared)
        division, _ = divide_windows(division, ranks, plan.train.world)
        devices.append({rank: Device.of(part[rank], division, plan.train.world) for rank in members})
    return devices, division.communicators(), tensors


def far_parts(plan: Plan, bound: BoundSchedule, transport: str = "auto") -> list[list[BoundSchedule]]:
    """What a rank exchanges over nccl: with other domains, or with all ranks."""
    assert plan.topology is not None
    schedule, joined = bound.schedule, joined_hops(plan, plan.topology, transport)
    assert schedule.view is not None
    waves = [bound.part(wave) for wave in schedule.view.waves()] or [bound]
    views = [wave.schedule.view for wave in waves if schedule.world == "gen"]
    hops = [*zip(*(view.relays() for view in views if view is not None), strict=True)]
    parts = _joined(bound, waves, hops, joined)
    if transport == "nccl":
        return parts
    far = peers(plan, schedule, near=False)
    return [[first.part(first.schedule.with_peers(far)), *later] for first, *later in parts]


def peers(plan: Plan, schedule: Schedule, *, near: bool) -> list[int]:
    """The ranks of the other world in a rank's domain, or the others."""
    assert plan.topology is not None
    other = plan.topology.domains("gen" if schedule.world == "train" else "train")
    is_near = other == plan.topology.domains(schedule.world)[schedule.rank]
    return np.flatnonzero(is_near == near).tolist()


def share(plan: Plan, tensors: list[dict[str, torch.Tensor]]) -> None:
    """Run the hop within hosts, if the plan has one."""
    bounds = []
    for rank in range(plan.gen.world if "share" in plan.later_hops else 0):
        whole = bind(planned_schedule(plan, "gen", rank), tensors[plan.train.world + rank])
        relay = relays_of(plan, rank)[-1]
        bounds += [whole.part(relay.sends), whole.part(relay.receives)]
    by_hand(bounds)


def by_hand(bounds: Sequence[BoundSchedule]) -> None:
    """Move all that these ranks exchange, bucket by bucket."""
    sent: dict[tuple[int, ...], NDArray[np.uint8]] = {}
    for bound in sorted(bounds, key=lambda bound: bound.schedule.world, reverse=True):  # senders first
        schedule, sends = bound.schedule, bound.schedule.world == "train"
        compute_scales(bound.casts, bound.tensors)
        for bucket in cut_buckets(schedule, 4096):
            ends = (schedule.rank, bucket.peer) if sends else (bucket.peer, schedule.rank)
            key = bucket.stage, bucket.number, *ends
            content = sent.setdefault(key, np.zeros(bucket.nbytes, np.uint8))
            run_copies(bucket.copies, [*map(byte_array, bound.tensors), content], bound.casts)
