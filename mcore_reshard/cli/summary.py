"""A plan as plain data: what `--json` prints and tables are drawn from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict
from math import prod
from typing import Any

import numpy as np

from mcore_reshard.planner.layout.engines import engine_named
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.model.parameters import ITEMSIZE
from mcore_reshard.planner.plan.plan import Plan, UnplannedGroup
from mcore_reshard.planner.proof.prove import Proof

_MUCH = 0.1  # share of the bytes by misc that a plan makes a note of


def summarize(plan: Plan, proof: Proof, plan_seconds: float | None = None, notes: Iterable[str] = ()) -> dict[str, Any]:
    """Everything there is to say about a whole plan. `plan_seconds` covers planning and proof; None: read from a file.

    Parameters count once in `bytes` and `parameters`, whatever the number of ranks that receive them; `total` is bulk
    and misc together, what is excluded does not travel. `proof` and `wire_bytes` count bytes over all generation ranks.
    """
    bulk, misc = plan.bulk_bytes, plan.misc_bytes
    return {
        "model": plan.model,
        "engine": plan.engine,
        "policy": plan.policy,
        "digest": plan.digest,
        "meshes": {"train": mesh_as_dict(plan.train), "gen": mesh_as_dict(plan.gen)},
        "dtypes": list(plan.wire_bytes),
        "wire_bytes": plan.wire_bytes,
        "proof": {
            "ok": proof.ok,
            "violations": [asdict(violation) for violation in proof.violations],
            "destination_bytes": proof.destination_bytes,
            "covered_bytes": proof.covered_bytes,
        },
        "bytes": {
            "total": bulk + misc,
            "bulk": bulk,
            "misc": misc,
            "excluded": sum(plan.groups[u.group].nbytes * plan.groups[u.group].count for u in plan.excluded),
        },
        "parameters": _parameter_counts(plan),
        "pairs": pairs_of(plan),
        "casts": casts_of(plan),
        "misc": _unplanned(plan, plan.misc),
        "excluded": _unplanned(plan, plan.excluded),
        "stages": [
            {"pp_stage": stage, "transfers": transfers, "bytes": nbytes}
            for stage, transfers, nbytes in plan.stage_totals
        ],
        "ranks": {
            "train": [{"rank": rank, "send_bytes": sent} for rank, sent in enumerate(plan.send_bytes.tolist())],
            "gen": [
                {"rank": rank, "recv_bytes": received, "relay_bytes": passed_on}
                for rank, (received, passed_on) in enumerate(
                    zip(plan.recv_bytes.tolist(), plan.relay_bytes.tolist(), strict=True)
                )
            ],
        },
        "relay": plan.relay,
        "plan_seconds": plan_seconds,
        "notes": [*notes, *_notes(plan)],
    }


def mesh_as_dict(mesh: TrainMesh | GenMesh) -> dict[str, Any]:
    return {**asdict(mesh), "world": mesh.world}


def pairs_of(plan: Plan) -> list[dict[str, Any]]:
    """Quantized weights and their scales, one entry a group, with the route of both and why it is misc."""
    unplanned = {u.group: ("misc", u.reason) for u in plan.misc} | {
        u.group: ("excluded", u.reason) for u in plan.excluded
    }
    found = []
    for pair in plan.pairs:
        weight, scales = plan.groups[pair.weight], plan.groups[pair.scales]
        route, reason = unplanned.get(pair.weight, ("bulk", ""))
        found.append(
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
    return found


def casts_of(plan: Plan) -> list[dict[str, Any]]:
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


def busiest(loads: np.ndarray) -> dict[str, Any]:
    """Least, mean and most bytes over ranks, and the first rank with the most."""
    most = int(loads.argmax())
    return {"min": int(loads.min()), "mean": float(loads.mean()), "max": int(loads[most]), "rank": most}


def _notes(plan: Plan) -> list[str]:
    """What makes a proven plan a bad one."""
    total = plan.bulk_bytes + plan.misc_bytes
    notes = []
    if plan.misc_bytes > _MUCH * total:
        notes.append(
            f"{plan.misc_bytes / total:.1%} of the bytes go by misc, in every refit: whole tensors, over CPU memory, to every"
            " rank; the reasons are above"
        )
    reasons = [(starred(plan.groups[entry.group].name_pattern), entry.reason) for entry in plan.misc]
    return notes + engine_named(plan.engine).notes(reasons)


def starred(pattern: str) -> str:
    """A name of parameters or tensors with stars for what varies."""
    return re.sub(r"\{\w+\}", "*", pattern)


def _parameter_counts(plan: Plan) -> dict[str, int]:
    misc, excluded = (sum(plan.groups[u.group].count for u in found) for found in (plan.misc, plan.excluded))
    total = sum(group.count for group in plan.groups)
    return {"total": total, "bulk": total - misc - excluded, "misc": misc, "excluded": excluded}


def _unplanned(plan: Plan, found: Iterable[UnplannedGroup]) -> list[dict[str, Any]]:
    return [
        {"parameter": name, "reason": entry.reason, "bytes": plan.groups[entry.group].nbytes}
        for entry in found
        for name in plan.groups[entry.group].names()
    ]
