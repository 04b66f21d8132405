"""What single ranks and single parameters do in a plan, as plain data for `show`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from fnmatch import translate
from typing import Any

import numpy as np

from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import Schedule, TransferTable, World
from mcore_reshard.planner.plan.transfers import Place, Transfer

Selection = Callable[[str], bool]


def selection(glob: str | None) -> Selection:
    """Which HF names a shell pattern means; all of them without one."""
    return (lambda name: True) if glob is None else re.compile(translate(glob)).match  # type: ignore[return-value]


def rank_report(plan: Plan, world: World, rank: int, glob: str | None = None) -> dict[str, Any]:
    """What a rank sends (train) or receives (gen): by stage and peer, and by local tensor.

    Where replicas relay, `relay` has what a generation rank passes on to others, and what they pass on to it.
    """
    schedule = schedule_of(plan, world, rank)
    stages, tensors = _by_stage(schedule, glob)
    mesh = plan.train if world == "train" else plan.gen
    relay = schedule.relay() if schedule.relay is not None else None
    return {
        "rank": f"{world}:{rank}",
        "digest": plan.digest,
        "coordinate": mesh.coordinate(rank),
        "parameter": glob,
        "transfers": sum(stage["transfers"] for stage in stages),
        "bytes": sum(stage["bytes"] for stage in stages),
        "stages": stages,
        "tensors": [
            {"tensor": held.name, "shape": list(held.shape), "dtype": held.dtype, "transfers": int(n), "bytes": int(b)}
            for held, (n, b) in zip(schedule.tensors, tensors, strict=True)
            if n
        ],
        "relay": relay and {"sends": _by_stage(relay.sends, glob)[0], "receives": _by_stage(relay.receives, glob)[0]},
    }


def _by_stage(schedule: Schedule, glob: str | None) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Totals of every stage, and (transfers, bytes) of every tensor."""
    select = _selected(schedule, selection(glob))
    stages, tensors = [], np.zeros((len(schedule.tensors), 2), dtype=np.int64)
    for stage in schedule.stages:
        rows = stage.sends if schedule.world == "train" else stage.recvs
        kept = select(rows)
        np.add.at(tensors, rows.tensor[kept], np.stack([np.ones_like(rows.nbytes), rows.nbytes], axis=1)[kept])
        stages.append({"pp_stage": stage.pp_stage, **_totals(rows, kept), "peers": _peers(rows, kept)})
    return stages, tensors


def _selected(schedule: Schedule, wanted: Selection) -> Callable[[TransferTable], np.ndarray]:
    def kept(rows: TransferTable) -> np.ndarray:
        pairs, inverse = np.unique(np.stack([rows.transfer_group, rows.member], axis=1), axis=0, return_inverse=True)
        matches = [bool(wanted(schedule.parameter_name(int(transfers), int(member)))) for transfers, member in pairs]
        return np.array(matches, dtype=bool)[inverse.reshape(-1)]

    return kept


def _totals(rows: TransferTable, kept: np.ndarray) -> dict[str, int]:
    return {"transfers": int(kept.sum()), "bytes": int(rows.nbytes[kept].sum())}


def _peers(rows: TransferTable, kept: np.ndarray) -> list[dict[str, int]]:
    peers = np.unique(rows.peer[kept])
    return [{"rank": int(peer), **_totals(rows, kept & (rows.peer == peer))} for peer in peers]


def transfer_as_dict(transfer: Transfer) -> dict[str, Any]:
    """One row of `show --parameter --json`."""
    if transfer.route != "bulk":
        whole = {"route": transfer.route, "reason": transfer.reason, "bytes": transfer.nbytes}
        return {"parameter": transfer.parameter, **whole}
    assert transfer.region is not None and transfer.src is not None and transfer.dst is not None
    return {
        "parameter": transfer.parameter,
        "route": transfer.route,
        "pp_stage": transfer.pp_stage,
        "view": transfer.view,
        "region": asdict(transfer.region),
        "bytes": transfer.nbytes,
        "src": _place_as_dict(transfer.src),
        "dst": _place_as_dict(transfer.dst),
        "relayed_by": transfer.relayed_by,
    }


def _place_as_dict(place: Place) -> dict[str, Any]:
    fields = asdict(place)
    del fields["world"]
    return fields
