"""`mcore-reshard show`: what a plan does as a whole, for one rank, or for some parameters."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mcore_reshard.planner.layout.geometry import Region
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import World
from mcore_reshard.planner.proof.prove import ProofError, prove
from mcore_reshard.planning import InputError

from .inputs import read_plan
from .plan_tables import plan_report, routes
from .render import count, facts, say_what_is_left, shape, size, table, write, write_json
from .summary import summarize
from .transfers import parameter_rows, parse_rank, rank_report

_ROWS_SHOWN = 40


def run(args: argparse.Namespace) -> int:
    plan = read_plan(args.plan)
    if args.rank is None and args.parameter is None:
        return _whole(plan, args.json)
    proof = prove(plan)
    if not proof.ok:
        raise ProofError(proof)
    rank = _rank(plan, args.rank, args.parameter)
    if args.parameter is None:
        assert rank is not None
        report = rank_report(plan, *rank)
        write_json(report) if args.json else write(*_rank_tables(report))
        return 0
    rows = parameter_rows(plan, args.parameter, rank)
    if args.json:
        transfers = list(rows)
        write_json({"digest": plan.digest, "parameter": args.parameter, "rank": args.rank, "transfers": transfers})
    else:
        found = list(islice(rows, _ROWS_SHOWN))
        write(*_transfers(args.parameter, args.rank, found, sum(1 for _ in rows)))
    return 0


def _rank(plan: Plan, text: str | None, glob: str | None) -> tuple[World, int] | None:
    """The rank asked for, if any. Raises InputError if the plan lacks it, or parameters that match, or both."""
    rank = None
    problems: list[str] = []
    if text is not None:
        try:
            rank = parse_rank(plan, text)
        except InputError as error:
            problems += error.problems
    if glob is not None and next(parameter_rows(plan, glob), None) is None:
        problems.append(f"no parameter of the plan matches {glob!r}; `show PLAN` lists them")
    if problems:
        raise InputError(problems)
    return rank


def _whole(plan: Plan, as_json: bool) -> int:
    proof = prove(plan)
    summary = summarize(plan, proof)
    if as_json:
        write_json(summary)
    else:
        write(*plan_report(plan, proof, summary), *([routes(plan)] if proof.ok else []))
    if not proof.ok:
        raise ProofError(proof)
    return 0


def _rank_tables(report: dict[str, Any]) -> Iterator[RenderableType]:
    sends = report["rank"].startswith("train")
    verb = "sends" if sends else "receives"
    yield facts(
        [
            ("rank", report["rank"]),
            ("coordinate", " ".join(f"{axis}={at}" for axis, at in report["coordinate"].items())),
            (verb, f"{size(report['bytes'])} in {count(report['transfers'], 'transfer')}"),
        ]
    )
    yield _peers("Stages and peers", report["stages"], "to gen" if sends else "from train")
    if report["relay"] is not None:
        yield _peers("Passed on by other replicas", report["relay"]["receives"], "from gen")
        yield _peers("Passed on to other replicas", report["relay"]["sends"], "to gen")
    numbers = ("transfers", "bytes")
    tensors = table("Tensors", "tensor", "shape", "dtype", "transfers", "bytes", numbers=numbers)
    for held in report["tensors"][:_ROWS_SHOWN]:
        tensors.add_row(
            held["tensor"], shape(held["shape"]), held["dtype"], f"{held['transfers']:,}", size(held["bytes"])
        )
    say_what_is_left(tensors, len(report["tensors"]) - _ROWS_SHOWN, "tensor")
    yield tensors


def _peers(title: str, stages: list[dict[str, Any]], way: str) -> Table:
    direction, world = way.split()
    shown = table(title, "stage", direction, "transfers", "bytes", numbers=("stage", "transfers", "bytes"))
    for stage in stages:
        for peer in stage["peers"]:
            name = f"{world}:{peer['rank']}"
            shown.add_row(str(stage["pp_stage"]), name, f"{peer['transfers']:,}", size(peer["bytes"]))
    return shown


def _transfers(glob: str, rank: str | None, rows: list[dict[str, Any]], left: int) -> Iterator[RenderableType]:
    if not rows:
        yield f"{rank} has no part in moving {glob}"
    for alike in _between_two_tensors(rows):
        first = alike[0]
        lines: list[tuple[str, str | Text]] = [("parameter", Text(first["parameter"], style="bold"))]
        if first["route"] != "bulk":
            yield facts([*lines, ("route", f"{first['route']}: {first['reason']}"), ("bytes", size(first["bytes"]))])
            continue
        for what, end in (("trainer tensor", first["src"]), ("engine tensor", first["dst"])):
            lines.append((what, f"{end['tensor']}  {end['dtype']} {shape(end['shape'])}"))
        lines.append(("regions", f"in coordinates of {shape(first['view'])}"))
        yield facts(lines)
        numbers = ("stage", "bytes", "at element")
        shown = table(None, "stage", "region", "bytes", "from", "at element", "to", "at element", numbers=numbers)
        for row in alike:
            region = Region(tuple(row["region"]["start"]), tuple(row["region"]["stop"]))
            ends = [(f"{world}:{row[end]['rank']}", f"{row[end]['offset']:,}") for world, end in _ENDS]
            if row["relayed_by"] is not None:
                ends[0] = (f"{ends[0][0]} via gen:{row['relayed_by']}", ends[0][1])
            shown.add_row(str(row["pp_stage"]), str(region), size(row["bytes"]), *ends[0], *ends[1])
        yield shown
    if left:
        yield f"and {count(left, 'transfer')} more: --json lists all"


_ENDS = (("train", "src"), ("gen", "dst"))


def _between_two_tensors(rows: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Rows of one parameter, one trainer tensor and one engine tensor, together."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        tensors = (row[end]["tensor"] for _, end in _ENDS) if row["route"] == "bulk" else ()
        groups.setdefault((row["parameter"], *tensors), []).append(row)
    yield from groups.values()
