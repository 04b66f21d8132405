"""A whole plan, as `plan` and `show` print it: plain data for `--json`, and tables drawn from it and from the plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain
from math import prod
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.table import Table

from mcore_reshard.planner.layout.engines import engine_named
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh, format_mesh
from mcore_reshard.planner.layout.partitions import Partition
from mcore_reshard.planner.model.parameters import ITEMSIZE
from mcore_reshard.planner.plan.loads import busy_seconds, rail_bytes
from mcore_reshard.planner.plan.paths import LINK_NAMES
from mcore_reshard.planner.plan.plan import Plan, UnplannedGroup
from mcore_reshard.planner.proof.prove import Proof, ProofError
from mcore_reshard.report.text import rails_text, seconds_text, starred

from .render import Cell, count, facts, grouped, noted, print_report, ranges, size, styled, table, verdict

_MUCH_MISC = 0.1  # share of the bytes by misc from which on a note says so
_STAGES_SHOWN, _VIOLATIONS_SHOWN, _ALIKE_SHOWN, _BLOCKS_SHOWN = 64, 20, 8, 4
_ROUTES = ("bulk", "misc", "excluded")


def print_plan(
    plan: Plan, proof: Proof, summary: dict[str, Any], as_json: bool, more: Iterable[RenderableType]
) -> None:
    """Print a whole plan, then `more` where the proof holds. Raises ProofError, after printing, where it does not."""
    print_report(as_json, summary, chain(_report(plan, proof, summary), more if proof.ok else ()))
    if not proof.ok:
        raise ProofError(proof)


def summarize(plan: Plan, proof: Proof, plan_seconds: float | None = None, notes: Iterable[str] = ()) -> dict[str, Any]:
    """Everything about a whole plan. `plan_seconds` covers planning and proof; None: the plan was read from a file.

    `bytes` and `parameters` count each parameter once, however many ranks receive it. `bytes.total` is bulk and misc
    together, as excluded parameters do not travel. `proof` and `wire_bytes` count bytes over all generation ranks.
    """
    parameters, nbytes = (dict.fromkeys(("total", *_ROUTES), 0) for _ in range(2))
    for (route, _), group in zip(routes_of(plan), plan.groups, strict=True):
        for key in (route, "total"):
            parameters[key] += group.count
            nbytes[key] += group.count * group.nbytes
    nbytes["total"] -= nbytes["excluded"]
    meshes: dict[str, TrainMesh | GenMesh] = {"train": plan.train, "gen": plan.gen}
    return {
        "model": plan.model,
        "engine": plan.engine,
        "policy": plan.policy,
        "digest": plan.digest,
        "meshes": {side: {**asdict(mesh), "world": mesh.world} for side, mesh in meshes.items()},
        "dtypes": list(plan.wire_bytes),
        "wire_bytes": plan.wire_bytes,
        "proof": {"ok": proof.ok, **asdict(proof)},
        "bytes": nbytes,
        "parameters": parameters,
        "pairs": list(_pairs(plan)),
        "casts": list(_casts(plan)),
        "misc": _unplanned(plan, plan.misc),
        "excluded": _unplanned(plan, plan.excluded),
        "stages": [
            {"pp_stage": stage, "transfers": number, "bytes": sent} for stage, number, sent in plan.stage_totals
        ],
        "ranks": {
            "train": [{"rank": rank, "send_bytes": sent} for rank, sent in enumerate(plan.send_bytes.tolist())],
            "gen": [
                {"rank": rank, "recv_bytes": received, "relay_bytes": relayed}
                for rank, (received, relayed) in enumerate(np.stack([plan.recv_bytes, plan.relay_bytes], 1).tolist())
            ],
        },
        "relay": plan.relay,
        "hops": ["train", *plan.later_hops],
        "topology": _topology(plan),
        "plan_seconds": plan_seconds,
        "notes": [*notes, *_notes(plan, nbytes)],
    }


def summarize_any(plan: Plan, proof: Proof) -> dict[str, Any]:
    """The summary of a plan that may be unsound.

    Raises ProofError where it names ranks that are not there: nothing else can be said of it.
    """
    try:
        return summarize(plan, proof)
    except IndexError:
        if proof.ok:
            raise
        raise ProofError(proof) from None


def routes_of(plan: Plan) -> list[tuple[str, str]]:
    """The route of every group, and the reason for it where it is not bulk."""
    lists = (("misc", plan.misc), ("excluded", plan.excluded))
    unplanned = {entry.group: (route, entry.reason) for route, entries in lists for entry in entries}
    return [unplanned.get(number, ("bulk", "")) for number in range(len(plan.groups))]


def _pairs(plan: Plan) -> Iterator[dict[str, Any]]:
    """Quantized weights and their scales, one entry a group, with the route of both and why it is misc."""
    routes = routes_of(plan)
    for pair in plan.pairs:
        weight, scales, (route, reason) = plan.groups[pair.weight], plan.groups[pair.scales], routes[pair.weight]
        yield {
            "weight": weight.name_pattern,
            "scales": scales.name_pattern,
            "layers": list(weight.layers),
            "block": list(pair.block),
            "count": weight.count,
            "bytes": weight.count * (weight.nbytes + scales.nbytes),
            "route": route,
            "reason": reason,
        }


def _casts(plan: Plan) -> Iterator[dict[str, Any]]:
    """Groups that change their dtype on the way; `bytes` are those on the wire, each parameter once."""
    for cast in plan.casts:
        group = plan.groups[cast.group]
        yield {
            "parameter": group.name_pattern,
            "layers": list(group.layers),
            "count": group.count,
            "from": cast.src,
            "to": cast.dst,
            "bytes": group.count * prod(group.shape) * ITEMSIZE[cast.dst],
        }


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
        share, how = f"{nbytes['misc'] / nbytes['total']:.1%}", "whole tensors, over CPU memory, to every rank"
        notes.append(f"{share} of the bytes go by misc, in every refit: {how}; the reasons are above")
    reasons = [(starred(plan.groups[entry.group].name_pattern), entry.reason) for entry in plan.misc]
    return notes + engine_named(plan.engine).notes(reasons)


def _topology(plan: Plan) -> dict[str, Any] | None:
    """The machine, the bytes that each link brings to generation ranks, how long the busiest GPU's link is busy, and rails."""
    if plan.topology is None:
        return None
    on_rails = rail_bytes(plan)
    return {
        "machine": asdict(plan.topology.machine),
        "hosts": len(plan.topology.hosts),
        "links": [
            {"link": name, "bytes": int(plan.loads.received[link].sum()), "busiest_s": busy_s}
            for (link, name), busy_s in zip(LINK_NAMES.items(), busy_seconds(plan, on_rails), strict=True)
        ],
        "rails": {"bytes": on_rails.nbytes, "on_rail_bytes": on_rails.on_rail},
        "carriers": [{"rank": each.rank, "turns": [*each.turns]} for each in plan.carriers],
    }


# --- text

_HOPS: dict[tuple[str, ...], str] = {
    (): "the trainer serves every rank",
    ("share",): "each byte enters an NVLink domain once, and is passed on there",
    ("relay",): "each byte leaves the trainer once, and is passed on",
    ("relay", "share"): "each byte leaves the trainer once, enters an NVLink domain once, and is passed on there",
}


def _report(plan: Plan, proof: Proof, summary: dict[str, Any]) -> Iterator[RenderableType]:
    """Summary, proof, stages, loads, and what does not travel point to point."""
    yield facts(_head(plan, summary))
    covered = f"{proof.covered_bytes:,} of {proof.destination_bytes:,} destination bytes of the bulk route covered"
    yield facts([("proof", verdict(proof.ok, covered + ", each exactly once" * proof.ok))])
    if not proof.ok:
        violations = ((v.rule, v.parameter, v.ranks, v.message) for v in proof.violations[:_VIOLATIONS_SHOWN])
        yield table(f"Proof violations ({len(proof.violations)})", "rule, parameter, ranks, what is wrong", violations)
    total = sum(sent for _, _, sent in plan.stage_totals) or 1
    stages = ((stage, number, size(sent), f"{sent / total:.1%}") for stage, number, sent in plan.stage_totals)
    yield table("Stages", ">stage, >transfers, >bytes, >share", stages, most=_STAGES_SHOWN, noun="stage")
    yield _loads(plan)
    if summary["topology"] is not None:
        links = summary["topology"]["links"]
        moved = _sum(links, "bytes") or 1
        rows = (
            (link["link"], size(link["bytes"]), f"{link['bytes'] / moved:.1%}", seconds_text(link["busiest_s"]))
            for link in links
        )
        yield table("Links", "link, >bytes, >share, >at least", rows)
    for title, entries in (("Misc route", plan.misc), ("Excluded", plan.excluded)):
        if entries:
            yield table(title, "parameter, layers, >count, >bytes, reason", _unplanned_rows(plan, entries))
    yield from noted(summary["notes"])


def _head(plan: Plan, summary: dict[str, Any]) -> Iterator[tuple[str, Cell]]:
    parameters, nbytes, wire_bytes = summary["parameters"], summary["bytes"], summary["wire_bytes"]
    yield "model", styled(plan.model or "(unnamed)", "bold")
    yield "training", f"Megatron-Core  {_axes(plan.train)}"
    yield "generation", f"{plan.engine}  {_axes(plan.gen)}"
    yield "policy", plan.policy
    if plan.topology is not None:
        machine, hosts = plan.topology.machine, count(len(plan.topology.hosts), "host")
        yield "topology", f"{machine.name}  {hosts}; {_HOPS[plan.later_hops]}"
        yield from rails_fact(summary["topology"]["rails"])
    if plan.carriers:
        carriers = ranges(np.flatnonzero(plan.carried.any(axis=0)).tolist())
        carried = ranges(each.rank for each in plan.carriers)
        yield "carriers", f"gen {carriers} receive by their NICs for gen {carried}, and pass it on"
    if len(wire_bytes) > 1:
        yield "dtypes", "bytes moved: " + ", ".join(f"{dtype} {size(moved)}" for dtype, moved in wire_bytes.items())
    else:
        yield "dtypes", ", ".join(wire_bytes) or "-"
    for route in _ROUTES:
        yield route, f"{size(nbytes[route]):>8}  {count(parameters[route], 'parameter')}"
    yield "total", f"{size(nbytes['total']):>8}  bulk and misc, each parameter once"
    received, most = int(plan.recv_bytes.sum()), int(plan.recv_bytes.max())
    yield "moved", f"{size(received):>8}  point to point in one refit, at most {size(most)} into one rank"
    if summary["pairs"]:
        yield "pairs", _pairs_fact(summary["pairs"])
    for (src, dst), casts in grouped(summary["casts"], lambda cast: (cast["from"], cast["to"])).items():
        number, sent = _sum(casts, "count"), size(_sum(casts, "bytes"))
        yield "casts", f"{src} -> {dst} in the trainer: {count(number, 'parameter')}, {sent} sent"
    if summary["plan_seconds"] is not None:
        yield "planned in", f"{summary['plan_seconds']:.2f} s, proof included"
    yield "digest", plan.digest


def rails_fact(rails: dict[str, int]) -> Iterator[tuple[str, Cell]]:
    """How much of what goes by NIC stays on its rail; nothing where nothing goes by NIC."""
    if text := rails_text(rails["bytes"], rails["on_rail_bytes"]):
        yield "rails", text


def _axes(mesh: TrainMesh | GenMesh) -> str:
    return f"{format_mesh(mesh).replace(',', ' ')}  ({count(mesh.world, 'rank')})"


def _pairs_fact(pairs: list[dict[str, Any]]) -> str:
    by_route = {route: [pair for pair in pairs if pair["route"] == route] for route in _ROUTES}
    blocks = sorted({"x".join(map(str, pair["block"])) for pair in pairs})
    numbers = ", ".join(f"{_sum(alike, 'count'):,} {route}" for route, alike in by_route.items() if alike)
    more = ", ..." if len(blocks) > _BLOCKS_SHOWN else ""
    return f"weights with scales: {numbers}; blocks {', '.join(blocks[:_BLOCKS_SHOWN])}{more}"


def _sum(entries: list[dict[str, Any]], key: str) -> int:
    return sum(entry[key] for entry in entries)


def _loads(plan: Plan) -> Table:
    """Least, mean and most bytes over the ranks of each world, and which rank is the busiest."""
    rows = []
    loads = [("train", "send", plan.send_bytes), ("gen", "receive", plan.recv_bytes)]
    for world, verb, load in [*loads, ("gen", "pass on", plan.relay_bytes)] if plan.later_hops else loads:
        mean, most = float(load.mean()), int(load.max())
        as_busy = int(np.count_nonzero(load == most)) - 1
        busiest = f"{world}:{int(load.argmax())}" + (f" and {as_busy} more" if as_busy else "")
        sizes = (size(int(load.min())), size(mean), size(most), f"{most / mean:.2f}" if mean else "-")
        rows.append((f"{world}, {verb}", len(load), *sizes, busiest))
    return table("Load per rank", "world, >ranks, >least, >mean, >most, >most / mean, busiest", rows)


def _unplanned_rows(plan: Plan, entries: tuple[UnplannedGroup, ...]) -> Iterator[tuple[Cell, ...]]:
    """One line a group, or one for many groups that share a reason."""
    for reason, sharing in grouped(entries, lambda entry: entry.reason).items():
        groups = [plan.groups[entry.group] for entry in sharing]
        for alike in [groups] if len(groups) > _ALIKE_SHOWN else [[group] for group in groups]:
            more = f" and {len(alike) - 1} more names" if len(alike) > 1 else ""
            layers = ranges({layer for group in alike for layer in group.layers}) or "-"
            nbytes = size(sum(group.nbytes * group.count for group in alike))
            yield starred(alike[0].name_pattern) + more, layers, sum(g.count for g in alike), nbytes, reason


def parameters_table(plan: Plan) -> Iterator[RenderableType]:
    """One line a group of parameters: where the trainer keeps them and where the engine wants them."""
    patterns = {transfers.group: plan.patterns[transfers.pattern] for transfers in reversed(plan.transfer_groups)}
    rows: list[tuple[Cell, ...]] = []
    for number, (group, (route, _)) in enumerate(zip(plan.groups, routes_of(plan), strict=True)):
        ends: tuple[Cell, ...] = (styled(route, "yellow"), "", "", "")
        if pattern := patterns.get(number):
            cuts = f"{len(pattern.src.pieces)} -> {len(pattern.dst.pieces)}"
            ends = (route, _tensors(pattern.src), _tensors(pattern.dst), cuts)
        rows.append((starred(group.name_pattern), group.count, str(list(group.shape)), *ends))
    yield table("Parameters", "parameter, >count, shape, route, trainer tensor, engine tensor, cuts", rows)


def _tensors(partition: Partition) -> str:
    """Names of the local tensors of a cut, stars for what varies."""
    names = list(dict.fromkeys(starred(piece.tensor.name) for pieces in partition.pieces for piece in pieces))
    return ", ".join([*names[:2], *([f"... {len(names)} in all"] if len(names) > 2 else [])])
