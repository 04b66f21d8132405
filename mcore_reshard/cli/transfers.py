"""What single ranks and single parameters do in a plan, as plain data for `show`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fnmatch import translate
from typing import Any

import numpy as np

from mcore_reshard.planner.layout.geometry import Piece, Region
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan, TransferGroup
from mcore_reshard.planner.plan.schedule import Schedule, TransferTable, World
from mcore_reshard.planning import InputError

Selection = Callable[[str], bool]


def selection(glob: str | None) -> Selection:
    """Which HF names a shell pattern means; all of them without one."""
    return (lambda name: True) if glob is None else re.compile(translate(glob)).match  # type: ignore[return-value]


def parse_rank(plan: Plan, text: str) -> tuple[World, int]:
    """`gen:3` -> ("gen", 3). Raises InputError for anything that is no rank of the plan."""
    match = re.fullmatch(r"(train|gen):([0-9]+)", text)
    if match is None:
        raise InputError([f"cannot read the rank {text!r}, write train:0 or gen:3"])
    world: World = "train" if match[1] == "train" else "gen"
    size = plan.train.world if world == "train" else plan.gen.world
    if int(match[2]) >= size:
        raise InputError([f"{text} is outside of the {size} {world} ranks of the plan (0 to {size - 1})"])
    return world, int(match[2])


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


def parameter_rows(plan: Plan, glob: str, only: tuple[World, int] | None = None) -> Iterator[dict[str, Any]]:
    """Every transfer of the parameters that match, by parameter and stage; one row for a misc or excluded parameter.

    With `only`, transfers that this rank takes part in. Regions are in coordinates of the parameter's `view`.
    """
    wanted = selection(glob)
    for number, group in enumerate(plan.groups):
        for layer in group.layers or (-1,):
            for expert in range(max(1, group.experts)):
                name = group.name(layer, expert)
                if wanted(name):
                    yield from _parameter(plan, number, name, layer, expert, only)


def _parameter(
    plan: Plan, group: int, name: str, layer: int, expert: int, only: tuple[World, int] | None
) -> Iterator[dict[str, Any]]:
    for route, unplanned in (("misc", plan.misc), ("excluded", plan.excluded)):
        for entry in unplanned:
            if entry.group == group and only is None:
                yield {"parameter": name, "route": route, "reason": entry.reason, "bytes": plan.groups[group].nbytes}
    for transfers in plan.transfer_groups:
        if transfers.group != group or (
            transfers.experts[1] and not transfers.experts[0] <= expert < transfers.experts[1]
        ):
            continue
        for position, at in enumerate(transfers.layers):
            if at.layer == layer:
                yield from _overlaps(plan, transfers, name, position, max(0, expert - transfers.experts[0]), only)


def _overlaps(
    plan: Plan, transfers: TransferGroup, name: str, layer: int, expert: int, only: tuple[World, int] | None
) -> Iterator[dict[str, Any]]:
    pattern = plan.patterns[transfers.pattern]
    sources, receivers = plan.rank_grids[transfers.src], plan.rank_grids[transfers.dst]
    member, replicas = layer * transfers.expert_count + expert, np.arange(receivers.shape[1])
    at = transfers.layers[layer]
    for number, overlap in enumerate(pattern.overlaps):
        served = plan.served_by(transfers, member, number, replicas)
        src, dst = (
            pattern.src.pieces[overlap.src][overlap.src_piece],
            pattern.dst.pieces[overlap.dst][overlap.dst_piece],
        )
        ends = {
            "src": _end(src, overlap.region, at.vp_stage, at.src_local, transfers.src_slot + expert),
            "dst": _end(dst, overlap.region, 0, at.dst_local, transfers.dst_slot + expert),
        }
        landing_rank = int(receivers[overlap.dst, plan.lands_on(transfers, member, number)]) if plan.relay else None
        for replica in replicas.tolist():
            train_rank, gen_rank = int(sources[overlap.src, served[replica]]), int(receivers[overlap.dst, replica])
            if only is not None and only not in (("train", train_rank), ("gen", gen_rank)):
                continue
            yield {
                "parameter": name,
                "route": "bulk",
                "pp_stage": transfers.pp_stage,
                "view": list(plan.groups[transfers.group].view),
                "region": {"start": list(overlap.region.start), "stop": list(overlap.region.stop)},
                "bytes": int(pattern.overlap_bytes[number]),
                "src": {"rank": train_rank, **ends["src"]},
                "dst": {"rank": gen_rank, **ends["dst"]},
                "relayed_by": None if landing_rank == gen_rank else landing_rank,
            }


def _end(piece: Piece, region: Region, vp: int, layer: int, slot: int) -> dict[str, Any]:
    """Where a region lies in a local tensor: the offset of its first element, and element strides of its dims."""
    return {
        "tensor": piece.tensor.name.format(vp=vp, layer=layer, expert=slot),
        "shape": list(piece.tensor.shape),
        "dtype": piece.tensor.dtype,
        "offset": piece.offset(region.start, slot),
        "strides": list(piece.strides),
    }
