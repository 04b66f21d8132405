"""`mcore-reshard show`: what a plan does as a whole, for one rank, or for some parameters."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import World
from mcore_reshard.planner.plan.transfers import Transfer, UnknownElementError, parse_rank
from mcore_reshard.planner.proof.prove import ProofError, prove
from mcore_reshard.planning import InputError

from .inputs import read_plan
from .plan_tables import plan_report, routes
from .render import count, facts, say_what_is_left, shape, size, table, write, write_json
from .summary import summarize
from .transfers import rank_report, transfer_as_dict

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
    transfers = plan.transfers(args.parameter, rank=args.rank)
    if args.json:
        rows = [transfer_as_dict(transfer) for transfer in transfers]
        write_json({"digest": plan.digest, "parameter": args.parameter, "rank": args.rank, "transfers": rows})
    else:
        shown = list(islice(transfers, _ROWS_SHOWN))
        write(*_transfers(args.parameter, args.rank, shown, sum(1 for _ in transfers)))
    return 0


def _rank(plan: Plan, text: str | None, glob: str | None) -> tuple[World, int] | None:
    """The rank asked for, if any. Raises InputError if the plan lacks it, or parameters that match, or both."""
    rank = None
    problems: list[str] = []
    try:
        rank = None if text is None else parse_rank(plan, text)
    except UnknownElementError as error:
        problems.append(str(error))
    try:
        plan.transfers(glob)
    except UnknownElementError as error:
        problems.append(str(error))
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


def _transfers(glob: str, rank: str | None, transfers: list[Transfer], left: int) -> Iterator[RenderableType]:
    if not transfers:
        yield f"{rank} has no part in moving {glob}"
    for alike in _between_two_tensors(transfers):
        first = alike[0]
        lines: list[tuple[str, str | Text]] = [("parameter", Text(first.parameter, style="bold"))]
        if first.src is None or first.dst is None:
            yield facts([*lines, ("route", f"{first.route}: {first.reason}"), ("bytes", size(first.nbytes))])
            continue
        for what, place in (("trainer tensor", first.src), ("engine tensor", first.dst)):
            lines.append((what, f"{place.tensor}  {place.dtype} {shape(place.shape)}"))
        lines.append(("regions", f"in coordinates of {shape(first.view)}"))
        yield facts(lines)
        numbers = ("stage", "bytes", "at element")
        shown = table(None, "stage", "region", "bytes", "from", "at element", "to", "at element", numbers=numbers)
        for transfer in alike:
            assert transfer.src is not None and transfer.dst is not None
            via = "" if transfer.relayed_by is None else f" via gen:{transfer.relayed_by}"
            source = (f"train:{transfer.src.rank}{via}", f"{transfer.src.offset:,}")
            destination = (f"gen:{transfer.dst.rank}", f"{transfer.dst.offset:,}")
            row = (str(transfer.pp_stage), str(transfer.region), size(transfer.nbytes))
            shown.add_row(*row, *source, *destination)
        yield shown
    if left:
        yield f"and {count(left, 'transfer')} more: --json lists all"


def _between_two_tensors(transfers: list[Transfer]) -> list[list[Transfer]]:
    """Transfers of one parameter, one trainer tensor and one engine tensor, together."""
    groups: dict[tuple[str | None, ...], list[Transfer]] = {}
    for transfer in transfers:
        tensors = (None if place is None else place.tensor for place in (transfer.src, transfer.dst))
        groups.setdefault((transfer.parameter, *tensors), []).append(transfer)
    return list(groups.values())
