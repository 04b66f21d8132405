"""`mcore-reshard show`: what a plan does as a whole, for one rank, or for some parameters."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.table import Table

from mcore_reshard.planner.plan.make_schedule import relays_of, schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import Schedule, TransferTable, World, is_carried
from mcore_reshard.planner.plan.transfers import Place, Transfer, parse_rank
from mcore_reshard.planning import InputError

from .inputs import collect_problems, read_plan
from .render import Cell, and_more, count, facts, grouped, print_report, size, styled, table
from .summary import parameters_table, print_plan, summarize_any

_ROWS_SHOWN = 40
_ELEMENT = "world rank tensor shape dtype index offset byte_offset"


def run(args: argparse.Namespace) -> int:
    if args.rank is None and args.parameter is None:
        plan = read_plan(args.plan, proven=False)
        proof = plan.prove()
        print_plan(plan, proof, summarize_any(plan, proof), args.json, parameters_table(plan))
        return 0
    plan = read_plan(args.plan)
    rank, problems = None, list[str]()
    with collect_problems(problems):
        rank = None if args.rank is None else parse_rank(plan, args.rank)
    with collect_problems(problems):
        plan.transfers(args.parameter)
    if problems:
        raise InputError(problems)
    if args.parameter is not None:
        transfers = plan.transfers(args.parameter, rank=args.rank)
        # The text takes the transfers one by one.
        rows = [transfer_as_dict(transfer) for transfer in transfers] if args.json else []
        report = {"digest": plan.digest, "parameter": args.parameter, "rank": args.rank, "transfers": rows}
        print_report(args.json, report, _transfers(args, transfers))
    elif rank is not None:
        report = _rank_report(plan, *rank)
        print_report(args.json, report, _rank_tables(report))
    return 0


def _rank_report(plan: Plan, world: World, rank: int) -> dict[str, Any]:
    """What a rank sends (train) or receives (gen): by stage and peer, and by local tensor.

    Where replicas relay, `relay` has what a generation rank passes on to others, and what they pass on to it.
    """
    schedule = schedule_of(plan, world, rank)
    stages = _stages(schedule)
    relays = relays_of(plan, rank) if world == "gen" else ()
    return {
        "rank": f"{world}:{rank}",
        "digest": plan.digest,
        "coordinate": (plan.train if world == "train" else plan.gen).coordinate(rank),
        "parameter": None,
        "transfers": sum(stage["transfers"] for stage in stages),
        "bytes": sum(stage["bytes"] for stage in stages),
        "stages": stages,
        "tensors": _tensors(schedule),
        "carries": _totals(_carried_bytes(schedule)),
        "relay": {
            "sends": [stage for relay in relays for stage in _stages(relay.sends)],
            "receives": [stage for relay in relays for stage in _stages(relay.receives)],
        }
        if relays
        else None,
    }


def _stages(schedule: Schedule) -> list[dict[str, Any]]:
    """Totals of every stage, and of every peer in it."""
    stages = []
    for pp_stage, rows in _transfers_of_stages(schedule):
        peers = [{"rank": peer, **_totals(rows.nbytes[rows.peer == peer])} for peer in np.unique(rows.peer).tolist()]
        stages.append({"pp_stage": pp_stage, **_totals(rows.nbytes), "peers": peers})
    return stages


def _tensors(schedule: Schedule) -> list[dict[str, Any]]:
    """Totals of every local tensor that has any."""
    totals = np.zeros((len(schedule.tensors), 2), dtype=np.int64)
    for _, transfers in _transfers_of_stages(schedule):
        np.add.at(totals, transfers.tensor, np.stack([np.ones_like(transfers.nbytes), transfers.nbytes], axis=1))
    return [
        {"tensor": t.name, "shape": list(t.shape), "dtype": t.dtype, "transfers": number, "bytes": nbytes}
        for t, (number, nbytes) in zip(schedule.tensors, totals.tolist(), strict=True)
        if number and not is_carried(t.name)
    ]


def _carried_bytes(schedule: Schedule) -> NDArray[np.int64]:
    """Bytes of each transfer that the rank receives for others."""
    carried = [table.nbytes[np.isin(table.tensor, [*schedule.carried])] for table in schedule.tables]
    return np.concatenate([np.zeros(0, np.int64), *carried])


def _transfers_of_stages(schedule: Schedule) -> list[tuple[int, TransferTable]]:
    return [(stage.pp_stage, stage.sends if schedule.world == "train" else stage.recvs) for stage in schedule.stages]


def _totals(nbytes: NDArray[np.int64]) -> dict[str, int]:
    return {"transfers": len(nbytes), "bytes": int(nbytes.sum())}


# --- text


def _rank_tables(report: dict[str, Any]) -> Iterator[RenderableType]:
    sends = report["rank"].startswith("train")
    moved = f"{size(report['bytes'])} in {count(report['transfers'], 'transfer')}"
    coordinate = " ".join(f"{axis}={number}" for axis, number in report["coordinate"].items())
    carries = report["carries"]
    carried = (
        f"{size(carries['bytes'])} of these in {count(carries['transfers'], 'transfer')}, for other ranks of its host"
    )
    yield facts(
        [
            ("rank", report["rank"]),
            ("coordinate", coordinate),
            ("sends" if sends else "receives", moved),
            *([("carries", carried)] if carries["transfers"] else []),
        ]
    )
    yield _peers("Stages and peers", report["stages"], *(("to", "gen") if sends else ("from", "train")))
    if report["relay"] is not None:
        yield _peers("Passed on by other replicas", report["relay"]["receives"], "from", "gen")
        yield _peers("Passed on to other replicas", report["relay"]["sends"], "to", "gen")
    rows = (
        (tensor["tensor"], str(tensor["shape"]), tensor["dtype"], tensor["transfers"], size(tensor["bytes"]))
        for tensor in report["tensors"]
    )
    yield table("Tensors", "tensor, shape, dtype, >transfers, >bytes", rows, most=_ROWS_SHOWN, noun="tensor")


def _peers(title: str, stages: list[dict[str, Any]], direction: str, world: str) -> Table:
    rows = (
        (stage["pp_stage"], f"{world}:{peer['rank']}", peer["transfers"], size(peer["bytes"]))
        for stage in stages
        for peer in stage["peers"]
    )
    return table(title, f">stage, {direction}, >transfers, >bytes", rows)


def _transfers(args: argparse.Namespace, transfers: Iterator[Transfer]) -> Iterator[RenderableType]:
    """The first transfers, those between the same two tensors together."""
    shown = list(islice(transfers, _ROWS_SHOWN))
    if not shown:
        yield f"{args.rank} has no part in moving {args.parameter}"
    for alike in grouped(shown, lambda t: (t.parameter, *tensors_of(t))).values():
        first = alike[0]
        lines = [("parameter", styled(first.parameter, "bold"))]
        if first.route != "bulk":
            yield facts([*lines, ("route", f"{first.route}: {first.reason}"), ("bytes", size(first.nbytes))])
            continue
        yield facts([*lines, *tensor_lines(first), ("regions", f"in coordinates of {list(first.view)}")])
        rows = (
            (str(t.pp_stage), str(t.region), size(t.nbytes), sender(t), offset(t.src), rank_name(t.dst), offset(t.dst))
            for t in alike
        )
        yield table(None, ">stage, region, >bytes, from, >at element, to, >at element", rows)
    if left := sum(1 for _ in transfers):
        yield and_more(left, "transfer")


# --- transfers, as `explain` prints them too


def transfer_as_dict(transfer: Transfer) -> dict[str, Any]:
    """One row of `show --parameter --json`."""
    if transfer.route != "bulk":
        return _as_dict(transfer, "parameter route reason bytes", "")
    keys = "parameter route pp_stage view region bytes src dst relayed_by"
    return _as_dict(transfer, keys, "rank tensor shape dtype offset strides")


def origin_as_dict(transfer: Transfer) -> dict[str, Any]:
    """One of the `origins` of `explain --json`."""
    return _as_dict(transfer, "parameter index route reason pp_stage region src dst relayed_by view", _ELEMENT)


def _as_dict(transfer: Transfer, keys: str, place_keys: str) -> dict[str, Any]:
    values = {
        "index": transfer.element or (),
        "bytes": transfer.nbytes,
        "region": transfer.region and asdict(transfer.region),
        "src": place_as_dict(transfer.src, place_keys),
        "dst": place_as_dict(transfer.dst, place_keys),
        "view": transfer.view if transfer.parameter else None,
    }
    return {key: values[key] if key in values else getattr(transfer, key) for key in keys.split()}


def place_as_dict(place: Place | None, keys: str = _ELEMENT) -> dict[str, Any] | None:
    """One end of a transfer, or one of the `holders` of `explain --json`."""
    return None if place is None else {key: getattr(place, key) for key in keys.split()}


def tensor_lines(transfer: Transfer) -> Iterator[tuple[str, Cell]]:
    """The local tensors at both ends, if the transfer has any."""
    for title, place in (("trainer tensor", transfer.src), ("engine tensor", transfer.dst)):
        if place is not None:
            yield title, f"{place.tensor}  {place.dtype} {list(place.shape)}"


def tensors_of(transfer: Transfer) -> list[str]:
    """The names of the local tensors, of both ends where there are two."""
    return [place.tensor for place in (transfer.src, transfer.dst) if place is not None]


def sender(transfer: Transfer) -> str:
    """`train:1`, or `train:1 via gen:0` where a replica passes it on."""
    return rank_name(transfer.src) + ("" if transfer.relayed_by is None else f" via gen:{transfer.relayed_by}")


def rank_name(place: Place | None) -> str:
    return "-" if place is None else f"{place.world}:{place.rank}"


def offset(place: Place | None) -> Cell:
    return "" if place is None else place.offset
