"""What one rank sends or receives, as plain data for `show --rank`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mcore_reshard.planner.plan.make_schedule import relay_of, schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import Schedule, TransferTable, World


def rank_report(plan: Plan, world: World, rank: int) -> dict[str, Any]:
    """What a rank sends (train) or receives (gen): by stage and peer, and by local tensor.

    Where replicas relay, `relay` has what a generation rank passes on to others, and what they pass on to it.
    """
    schedule = schedule_of(plan, world, rank)
    stages = _stages(schedule)
    relay = relay_of(plan, rank) if plan.relay and world == "gen" else None
    return {
        "rank": f"{world}:{rank}",
        "digest": plan.digest,
        "coordinate": (plan.train if world == "train" else plan.gen).coordinate(rank),
        "parameter": None,
        "transfers": sum(stage["transfers"] for stage in stages),
        "bytes": sum(stage["bytes"] for stage in stages),
        "stages": stages,
        "tensors": _tensors(schedule),
        "relay": relay and {"sends": _stages(relay.sends), "receives": _stages(relay.receives)},
    }


def _stages(schedule: Schedule) -> list[dict[str, Any]]:
    """Totals of every stage, and of every peer in it."""
    stages = []
    for pp_stage, transfers in _transfers_of_stages(schedule):
        peers = [
            {"rank": peer, **_totals(transfers.nbytes[transfers.peer == peer])}
            for peer in np.unique(transfers.peer).tolist()
        ]
        stages.append({"pp_stage": pp_stage, **_totals(transfers.nbytes), "peers": peers})
    return stages


def _tensors(schedule: Schedule) -> list[dict[str, Any]]:
    """Totals of every local tensor that has any."""
    totals = np.zeros((len(schedule.tensors), 2), dtype=np.int64)
    for _, transfers in _transfers_of_stages(schedule):
        np.add.at(totals, transfers.tensor, np.stack([np.ones_like(transfers.nbytes), transfers.nbytes], axis=1))
    return [
        {
            "tensor": tensor.name,
            "shape": list(tensor.shape),
            "dtype": tensor.dtype,
            "transfers": number,
            "bytes": nbytes,
        }
        for tensor, (number, nbytes) in zip(schedule.tensors, totals.tolist(), strict=True)
        if number
    ]


def _transfers_of_stages(schedule: Schedule) -> list[tuple[int, TransferTable]]:
    return [(stage.pp_stage, stage.sends if schedule.world == "train" else stage.recvs) for stage in schedule.stages]


def _totals(nbytes: np.ndarray) -> dict[str, int]:
    return {"transfers": len(nbytes), "bytes": int(nbytes.sum())}
