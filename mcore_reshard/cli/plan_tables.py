"""A whole plan as tables, drawn from its summary and, for names, from the plan itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.table import Table

from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh, format_mesh
from mcore_reshard.planner.layout.partitions import Partition
from mcore_reshard.planner.plan.plan import Plan, UnplannedGroup
from mcore_reshard.planner.proof.prove import Proof, ProofError

from .render import Cell, count, facts, grouped, noted, print_report, ranges, shape, size, styled, table, verdict
from .summary import starred, unplanned_routes

_STAGES_SHOWN, _VIOLATIONS_SHOWN, _ALIKE_SHOWN, _BLOCKS_SHOWN = 64, 20, 8, 4
_ROUTES = ("bulk", "misc", "excluded")


def print_plan(
    plan: Plan, proof: Proof, summary: dict[str, Any], as_json: bool, more: Iterable[RenderableType]
) -> None:
    """Print a whole plan, then `more` where the proof holds. Raises ProofError, after printing, where it does not."""
    print_report(as_json, summary, chain(_report(plan, proof, summary), more if proof.ok else ()))
    if not proof.ok:
        raise ProofError(proof)


def _report(plan: Plan, proof: Proof, summary: dict[str, Any]) -> Iterator[RenderableType]:
    """Summary, proof, stages, loads, and what does not travel point to point."""
    yield facts(_head(plan, summary))
    covered = f"{proof.covered_bytes:,} of {proof.destination_bytes:,} destination bytes of the bulk route covered"
    yield facts([("proof", verdict(proof.ok, covered + ", each exactly once" * proof.ok))])
    if not proof.ok:
        rows = [[v.rule, v.parameter, v.ranks, v.message] for v in proof.violations[:_VIOLATIONS_SHOWN]]
        title = f"Proof violations ({len(proof.violations)})"
        yield table(title, ("rule", "parameter", "ranks", "what is wrong"), rows)
    total = sum(stage["bytes"] for stage in summary["stages"]) or 1
    rows = [
        [str(stage["pp_stage"]), f"{stage['transfers']:,}", size(stage["bytes"]), f"{stage['bytes'] / total:.1%}"]
        for stage in summary["stages"]
    ]
    numbers = ("stage", "transfers", "bytes", "share")
    yield table("Stages", numbers, rows, numbers, most=_STAGES_SHOWN, noun="stage")
    yield _loads(plan)
    for title, entries in (("Misc route", plan.misc), ("Excluded", plan.excluded)):
        if entries:
            columns = ("parameter", "layers", "count", "bytes", "reason")
            yield table(title, columns, _unplanned(plan, entries), numbers=("count", "bytes"))
    yield from noted(summary["notes"])


def _head(plan: Plan, summary: dict[str, Any]) -> Iterator[tuple[str, Cell]]:
    parameters, nbytes, wire_bytes = summary["parameters"], summary["bytes"], summary["wire_bytes"]
    yield "model", styled(plan.model or "(unnamed)", "bold")
    yield "training", f"Megatron-Core  {_axes(plan.train)}"
    yield "generation", f"{plan.engine}  {_axes(plan.gen)}"
    yield "policy", plan.policy
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
        yield "pairs", _pairs(summary["pairs"])
    for (src, dst), casts in grouped(summary["casts"], lambda cast: (cast["from"], cast["to"])).items():
        number, sent = _sum(casts, "count"), size(_sum(casts, "bytes"))
        yield "casts", f"{src} -> {dst} in the trainer: {count(number, 'parameter')}, {sent} sent"
    if summary["plan_seconds"] is not None:
        yield "planned in", f"{summary['plan_seconds']:.2f} s, proof included"
    yield "digest", plan.digest


def _axes(mesh: TrainMesh | GenMesh) -> str:
    return f"{format_mesh(mesh).replace(',', ' ')}  ({count(mesh.world, 'rank')})"


def _pairs(pairs: list[dict[str, Any]]) -> str:
    by_route = grouped(pairs, lambda pair: str(pair["route"]))
    blocks = sorted({"x".join(map(str, pair["block"])) for pair in pairs})
    numbers = ", ".join(f"{_sum(by_route[route], 'count'):,} {route}" for route in _ROUTES if route in by_route)
    more = ", ..." if len(blocks) > _BLOCKS_SHOWN else ""
    return f"weights with scales: {numbers}; blocks {', '.join(blocks[:_BLOCKS_SHOWN])}{more}"


def _sum(entries: list[dict[str, Any]], key: str) -> int:
    return sum(entry[key] for entry in entries)


def _loads(plan: Plan) -> Table:
    """Least, mean and most bytes over the ranks of each world, and which rank is the busiest."""
    rows = []
    loads = [("train", "send", plan.send_bytes), ("gen", "receive", plan.recv_bytes)]
    for world, verb, load in [*loads, ("gen", "pass on", plan.relay_bytes)] if plan.relay else loads:
        mean, most = float(load.mean()), int(load.max())
        as_busy = int(np.count_nonzero(load == most)) - 1
        busiest = f"{world}:{int(load.argmax())}" + (f" and {as_busy} more" if as_busy else "")
        sizes = [size(int(load.min())), size(mean), size(most), f"{most / mean:.2f}" if mean else "-"]
        rows.append([f"{world}, {verb}", str(len(load)), *sizes, busiest])
    numbers = ("ranks", "least", "mean", "most", "most / mean")
    return table("Load per rank", ("world", *numbers, "busiest"), rows, numbers=numbers)


def _unplanned(plan: Plan, entries: tuple[UnplannedGroup, ...]) -> Iterator[tuple[str, ...]]:
    """One line a group, or one for many groups that share a reason."""
    for reason, sharing in grouped(entries, lambda entry: entry.reason).items():
        groups = [plan.groups[entry.group] for entry in sharing]
        for alike in [groups] if len(groups) > _ALIKE_SHOWN else [[group] for group in groups]:
            more = f" and {len(alike) - 1} more names" if len(alike) > 1 else ""
            layers = ranges({layer for group in alike for layer in group.layers}) or "-"
            nbytes = size(sum(group.nbytes * group.count for group in alike))
            number = f"{sum(group.count for group in alike):,}"
            yield starred(alike[0].name_pattern) + more, layers, number, nbytes, reason


def parameters_table(plan: Plan) -> Iterator[RenderableType]:
    """One line a group of parameters: where the trainer keeps them and where the engine wants them."""
    routes = unplanned_routes(plan)
    patterns = {transfers.group: plan.patterns[transfers.pattern] for transfers in reversed(plan.transfer_groups)}
    rows: list[list[Cell]] = []
    for number, group in enumerate(plan.groups):
        row: list[Cell] = [starred(group.name_pattern), f"{group.count:,}", shape(group.shape)]
        if pattern := patterns.get(number):
            tensors = [_tensors(partition) for partition in (pattern.src, pattern.dst)]
            row += ["bulk", *tensors, f"{len(pattern.src.pieces)} -> {len(pattern.dst.pieces)}"]
        else:
            row += [styled(routes[number][0], "yellow"), "", "", ""]
        rows.append(row)
    columns = ("parameter", "count", "shape", "route", "trainer tensor", "engine tensor", "cuts")
    yield table("Parameters", columns, rows, numbers=("count",))


def _tensors(partition: Partition) -> str:
    """Names of the local tensors of a cut, stars for what varies."""
    names = list(dict.fromkeys(starred(piece.tensor.name) for pieces in partition.pieces for piece in pieces))
    return ", ".join([*names[:2], *([f"... {len(names)} in all"] if len(names) > 2 else [])])
