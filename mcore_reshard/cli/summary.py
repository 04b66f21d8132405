"""A plan as plain data: what `--json` prints and tables are drawn from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.layout.engines import engine_named
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.model.parameters import ITEMSIZE
from mcore_reshard.planner.plan.plan import Plan, UnplannedGroup
from mcore_reshard.planner.proof.prove import Proof

_MUCH_MISC = 0.1  # share of the bytes by misc from which on a note says so


def summarize(plan: Plan, proof: Proof, plan_seconds: float | None = None, notes: Iterable[str] = ()) -> dict[str, Any]:
    """Everything about a whole plan. `plan_seconds` covers planning and proof; None: the plan was read from a file.

    `bytes` and `parameters` count each parameter once, however many ranks receive it. `bytes.total` is bulk and misc
    together, as excluded parameters do not travel. `proof` and `wire_bytes` count bytes over all generation ranks.
    """
    routes = unplanned_routes(plan)
    parameters, nbytes = (dict.fromkeys(("total", "bulk", "misc", "excluded"), 0) for _ in range(2))
    for number, group in enumerate(plan.groups):
        route, _ = routes.get(number, ("bulk", ""))
        for key in (route, "total"):
            parameters[key] += group.count
            nbytes[key] += group.count * group.nbytes
    nbytes["total"] -= nbytes["excluded"]
    return {
        "model": plan.model,
        "engine": plan.engine,
        "policy": plan.policy,
        "digest": plan.digest,
        "meshes": {"train": _mesh_as_dict(plan.train), "gen": _mesh_as_dict(plan.gen)},
        "dtypes": list(plan.wire_bytes),
        "wire_bytes": plan.wire_bytes,
        "proof": {"ok": proof.ok, **asdict(proof)},
        "bytes": nbytes,
        "parameters": parameters,
        "pairs": _pairs(plan),
        "casts": _casts(plan),
        "misc": _unplanned(plan, plan.misc),
        "excluded": _unplanned(plan, plan.excluded),
        "stages": [
            {"pp_stage": stage, "transfers": number, "bytes": sent} for stage, number, sent in plan.stage_totals
        ],
        "ranks": {
            "train": _ranks(send_bytes=plan.send_bytes),
            "gen": _ranks(recv_bytes=plan.recv_bytes, relay_bytes=plan.relay_bytes),
        },
        "relay": plan.relay,
        "plan_seconds": plan_seconds,
        "notes": [*notes, *_notes(plan, nbytes)],
    }


def unplanned_routes(plan: Plan) -> dict[int, tuple[str, str]]:
    """Group -> its route and the reason for it, of groups that do not go by bulk."""
    lists = (("misc", plan.misc), ("excluded", plan.excluded))
    return {entry.group: (route, entry.reason) for route, entries in lists for entry in entries}


def starred(pattern: str) -> str:
    """A pattern of names with stars for what varies: `layers.{layer}.mlp` -> `layers.*.mlp`."""
    return re.sub(r"\{\w+\}", "*", pattern)


def _mesh_as_dict(mesh: TrainMesh | GenMesh) -> dict[str, Any]:
    return {**asdict(mesh), "world": mesh.world}


def _ranks(**loads: NDArray[np.int64]) -> list[dict[str, int]]:
    """Of every rank of a world, its number and its loads."""
    columns = {"rank": range(len(next(iter(loads.values())))), **{key: load.tolist() for key, load in loads.items()}}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _pairs(plan: Plan) -> list[dict[str, Any]]:
    """Quantized weights and their scales, one entry a group, with the route of both and why it is misc."""
    routes = unplanned_routes(plan)
    entries = []
    for pair in plan.pairs:
        weight, scales = plan.groups[pair.weight], plan.groups[pair.scales]
        route, reason = routes.get(pair.weight, ("bulk", ""))
        entries.append(
            {
                "weight": weight.name_pattern,
                "scales": scales.name_pattern,
                "layers": list(weight.layers),
                "block": list(pair.block),
                "count": weight.count,
                "bytes": weight.count * (weight.nbytes + scales.nbytes),
                "route": route,
                "reason": reason,
            }
        )
    return entries


def _casts(plan: Plan) -> list[dict[str, Any]]:
    """Groups that change their dtype on the way; `bytes` are those on the wire, each parameter once."""
    groups = [(plan.groups[cast.group], cast) for cast in plan.casts]
    return [
        {
            "parameter": group.name_pattern,
            "layers": list(group.layers),
            "count": group.count,
            "from": cast.src,
            "to": cast.dst,
            "bytes": group.count * prod(group.shape) * ITEMSIZE[cast.dst],
        }
        for group, cast in groups
    ]


def _unplanned(plan: Plan, entries: Iterable[UnplannedGroup]) -> list[dict[str, Any]]:
    return [
        {"parameter": name, "reason": entry.reason, "bytes": plan.groups[entry.group].nbytes}
        for entry in entries
        for name in plan.groups[entry.group].names()
    ]


def _notes(plan: Plan, nbytes: dict[str, int]) -> list[str]:
    """Why a proven plan may still be a bad one."""
    notes = []
    if nbytes["misc"] > _MUCH_MISC * nbytes["total"]:
        notes.append(
            f"{nbytes['misc'] / nbytes['total']:.1%} of the bytes go by misc, in every refit: whole tensors, over CPU memory,"
            " to every rank; the reasons are above"
        )
    reasons = [(starred(plan.groups[entry.group].name_pattern), entry.reason) for entry in plan.misc]
    return notes + engine_named(plan.engine).notes(reasons)
