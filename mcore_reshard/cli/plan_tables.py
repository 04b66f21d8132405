"""A whole plan as tables, drawn from its summary and, for names, from the plan itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mcore_reshard.planner.layout.partitions import Partition
from mcore_reshard.planner.model.parameters import ParameterGroup
from mcore_reshard.planner.plan.plan import Plan, UnplannedGroup
from mcore_reshard.planner.proof.prove import Proof

from .render import axes, count, facts, noted, ranges, say_what_is_left, shape, size, table, verdict
from .summary import busiest, starred

_STAGES_SHOWN, _VIOLATIONS_SHOWN, _ALIKE_SHOWN = 64, 20, 8


def plan_report(plan: Plan, proof: Proof, summary: dict[str, Any]) -> list[RenderableType]:
    """Summary, proof, stages, loads, and what does not travel point to point."""
    parts: list[RenderableType] = [_head(plan, summary), _proof(proof), _stages(summary), _loads(plan)]
    for title, found in (("Misc route", plan.misc), ("Excluded", plan.excluded)):
        if found:
            parts.append(_unplanned(plan, title, found))
    return parts + noted(summary["notes"])


def _head(plan: Plan, summary: dict[str, Any]) -> Table:
    parameters, nbytes = summary["parameters"], summary["bytes"]
    rows: list[tuple[str, str | Text]] = [
        ("model", Text(plan.model or "(unnamed)", style="bold")),
        ("training", "Megatron-Core  " + axes(summary["meshes"]["train"])),
        ("generation", f"{plan.engine}  " + axes(summary["meshes"]["gen"])),
        ("policy", plan.policy),
        ("dtypes", _dtypes(summary["wire_bytes"])),
    ]
    rows += [
        (route, f"{size(nbytes[route]):>8}  {count(parameters[route], 'parameter')}")
        for route in ("bulk", "misc", "excluded")
    ]
    rows.append(("total", f"{size(nbytes['total']):>8}  bulk and misc, each parameter once"))
    received, share = int(plan.recv_bytes.sum()), int(plan.recv_bytes.max())
    rows.append(("moved", f"{size(received):>8}  point to point in one refit, at most {size(share)} into one rank"))
    if plan.pairs:
        rows.append(("pairs", _pairs(summary["pairs"])))
    for (src, dst), found in _casts(summary["casts"]).items():
        nbytes_cast = size(sum(cast["bytes"] for cast in found))
        rows.append(
            ("casts", f"{src} -> {dst} in the trainer: {count(_number(found), 'parameter')}, {nbytes_cast} sent")
        )
    if summary["plan_seconds"] is not None:
        rows.append(("planned in", f"{summary['plan_seconds']:.2f} s, proof included"))
    rows.append(("digest", plan.digest))
    return facts(rows)


def _dtypes(wire_bytes: dict[str, int]) -> str:
    """Dtypes on the wire, with their shares of the moved bytes where there are several."""
    if len(wire_bytes) < 2:
        return ", ".join(wire_bytes) or "-"
    return "bytes moved: " + ", ".join(f"{dtype} {size(nbytes)}" for dtype, nbytes in wire_bytes.items())


def _pairs(pairs: list[dict[str, Any]]) -> str:
    routes = {route: [pair for pair in pairs if pair["route"] == route] for route in ("bulk", "misc", "excluded")}
    blocks = sorted({"x".join(map(str, pair["block"])) for pair in pairs})
    where = ", ".join(f"{_number(found):,} {route}" for route, found in routes.items() if found)
    return f"weights with scales: {where}; blocks {', '.join(blocks[:4])}{', ...' if len(blocks) > 4 else ''}"


def _casts(casts: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cast in casts:
        found.setdefault((cast["from"], cast["to"]), []).append(cast)
    return found


def _number(found: list[dict[str, Any]]) -> int:
    return sum(entry["count"] for entry in found)


def _proof(proof: Proof) -> RenderableType:
    covered = f"{proof.covered_bytes:,} of {proof.destination_bytes:,} destination bytes of the bulk route covered"
    if proof.ok:
        return facts([("proof", verdict(True, f"{covered}, each exactly once"))])
    shown = table(f"Proof violations ({len(proof.violations)})", "rule", "parameter", "ranks", "what is wrong")
    for violation in proof.violations[:_VIOLATIONS_SHOWN]:
        shown.add_row(violation.rule, violation.parameter, violation.ranks, violation.message)
    return Group(facts([("proof", verdict(False, covered))]), "", shown)


def _stages(summary: dict[str, Any]) -> Table:
    shown = table("Stages", "stage", "transfers", "bytes", "share", numbers=("stage", "transfers", "bytes", "share"))
    total = sum(stage["bytes"] for stage in summary["stages"]) or 1
    for stage in summary["stages"][:_STAGES_SHOWN]:
        share = f"{100 * stage['bytes'] / total:.1f}%"
        shown.add_row(str(stage["pp_stage"]), f"{stage['transfers']:,}", size(stage["bytes"]), share)
    say_what_is_left(shown, len(summary["stages"]) - _STAGES_SHOWN, "stage")
    return shown


def _loads(plan: Plan) -> Table:
    numbers = ("ranks", "least", "mean", "most", "most / mean")
    shown = table("Load per rank", "world", *numbers, "busiest", numbers=numbers)
    ways = [("train", "send", plan.send_bytes), ("gen", "receive", plan.recv_bytes)]
    if plan.relay:
        ways.append(("gen", "pass on", plan.relay_bytes))
    for world, verb, loads in ways:
        load = busiest(loads)
        ratio = f"{load['max'] / load['mean']:.2f}" if load["mean"] else "-"
        same = int(np.count_nonzero(loads == load["max"])) - 1
        shown.add_row(
            f"{world}, {verb}", str(len(loads)), size(load["min"]), size(load["mean"]), size(load["max"]), ratio,
            f"{world}:{load['rank']}" + (f" and {same} more" if same else ""),
        )  # fmt: skip
    return shown


def _unplanned(plan: Plan, title: str, found: tuple[UnplannedGroup, ...]) -> Table:
    """One line a group, or one for many groups that share a reason."""
    shown = table(title, "parameter", "layers", "count", "bytes", "reason", numbers=("count", "bytes"))
    by_reason: dict[str, list[ParameterGroup]] = {}
    for entry in found:
        by_reason.setdefault(entry.reason, []).append(plan.groups[entry.group])
    for reason, groups in by_reason.items():
        for alike in [groups] if len(groups) > _ALIKE_SHOWN else [[group] for group in groups]:
            name = parameter_names(alike[0]) + (f" and {len(alike) - 1} more names" if len(alike) > 1 else "")
            layers = ranges({layer for group in alike for layer in group.layers}) or "-"
            nbytes = size(sum(group.nbytes * group.count for group in alike))
            shown.add_row(name, layers, f"{sum(group.count for group in alike):,}", nbytes, reason)
    return shown


def routes(plan: Plan) -> Table:
    """One line a group of parameters: where the trainer keeps them and where the engine wants them."""
    shown = table(
        "Parameters", "parameter", "count", "shape", "route", "trainer tensor", "engine tensor", "cuts",
        numbers=("count",),
    )  # fmt: skip
    unplanned = {entry.group: "misc" for entry in plan.misc} | {entry.group: "excluded" for entry in plan.excluded}
    pattern_of: dict[int, int] = {}
    for transfers in plan.transfer_groups:
        pattern_of.setdefault(transfers.group, transfers.pattern)
    for number, group in enumerate(plan.groups):
        row: list[str | Text] = [parameter_names(group), f"{group.count:,}", shape(group.shape)]
        if number in pattern_of:
            pattern = plan.patterns[pattern_of[number]]
            ends = [", ".join(_tensors(partition)) for partition in (pattern.src, pattern.dst)]
            row += ["bulk", *ends, f"{len(pattern.src.pieces)} -> {len(pattern.dst.pieces)}"]
        else:
            row += [Text(unplanned[number], style="yellow"), "", "", ""]
        shown.add_row(*row)
    return shown


def _tensors(partition: Partition) -> Iterator[str]:
    """Names of the local tensors of a cut, stars for what varies."""
    names = dict.fromkeys(starred(piece.tensor.name) for held in partition.pieces for piece in held)
    yield from list(names)[:2]
    if len(names) > 2:
        yield f"... {len(names)} in all"


def parameter_names(group: ParameterGroup) -> str:
    return starred(group.name_pattern)
