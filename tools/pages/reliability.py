"""The tables of docs/reliability.md: what the fault matrix and the soak found."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .text import noted, wrapped

RESULTS = Path(__file__).resolve().parents[1] / "results"
LINKS = "../tools/results"
COUNTED = {
    "hung": "hung",
    "left": "left processes",
    "torn": "torn commits",
    "unreported": "unreported mixtures",
    "wrong": "wrong bytes reported as success",
    "unnamed": "unnamed culprits",
    "late": "told too late",
    "stuck": "not recovered",
    "paused": "ended by a short pause",
    "alarm": "mixtures reported where there is none",
    "broken": "processes that broke",
    "missed": "faults that never came",
}


def faults_section(folder: Path = RESULTS) -> str:
    """Of every run of tools/fault_matrix.py: its counts, then a row for each fault, then a map of the phases."""
    parts = []
    for file in sorted(folder.glob("faults*.json")):
        data = json.loads(file.read_text())
        rows = data["rows"]
        transports = " and ".join(dict.fromkeys(row["transport"] for row in rows))
        where = data["machine"] if data["hardware"] == "CPU" else data["hardware"]
        relay = ", one training rank to two replicas" if all(_is_of_relay(row) for row in rows) else ""
        parts += [
            wrapped(
                f"{len(rows)} cells over {transports}{relay}; {where}; Python {data['versions']['python']},"
                f" torch {data['versions']['torch']}; {data['date']}; a deadline of {data['deadline_s']:g} s"
                f" ([data]({LINKS}/{file.name})).{noted(data)}"
            ),
            "\n".join(["| cells with | |", "|---|---|", *_counts(data["counts"])]),
            "\n".join([_FAULT_HEAD, *_fault_rows(rows)]),
            "\n".join(_phase_table(rows)),
        ]
        if bad := [row for row in rows if row["problems"]]:
            parts.append("\n".join(["What went wrong:", "", *map(_problem_line, bad)]))
    return "\n\n".join(parts)


_FAULT_HEAD = (
    "| fault | cells | refit committed | others knew after, at most | recovered after, median | at most |\n"
    "|---|---|---|---|---|---|"
)


def _is_of_relay(row: Mapping[str, Any]) -> bool:
    return row.get("train_ranks") == 1 and "replicas" not in row


def _counts(counts: Mapping[str, int]) -> list[str]:
    return [f"| {title} | {counts.get(kind, 0)} |" for kind, title in COUNTED.items()]


def _fault_rows(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    for fault in dict.fromkeys(row["fault"] for row in rows):
        of_fault = [row for row in rows if row["fault"] == fault]
        known = [row["known_s"] for row in of_fault if row["known_s"] is not None]
        recovered = [row["recovered_s"] for row in of_fault if row["recovered_s"] is not None]
        times = [
            f"{max(known):.1f} s" if known else "nobody had to",
            f"{statistics.median(recovered):.1f} s" if recovered else "",
            f"{max(recovered):.1f} s" if recovered else "",
        ]
        committed = sum(row["committed"] for row in of_fault)
        yield f"| {fault} | {len(of_fault)} | {committed} | {' | '.join(times)} |"


def _phase_table(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Cells by phase and kind of fault; where some have a problem, how many."""
    kinds = list(dict.fromkeys(_kind(row["fault"]) for row in rows))
    yield f"| phase | {' | '.join(kinds)} |"
    yield f"|---|{'---|' * len(kinds)}"
    for phase in dict.fromkeys(row["phase"] for row in rows):
        cells = []
        for kind in kinds:
            found = [row for row in rows if row["phase"] == phase and _kind(row["fault"]) == kind]
            bad = sum(bool(row["problems"]) for row in found)
            cells.append(f"{len(found)}, {bad} bad" if bad else str(len(found) or ""))
        yield f"| {phase} | {' | '.join(cells)} |"


def _kind(fault: str) -> str:
    if fault.startswith("connection"):
        return "socket"
    return "store" if fault.startswith("store") else fault.partition(",")[0]


def _problem_line(row: Mapping[str, Any]) -> str:
    said = "; ".join(f"{COUNTED[kind]}: {found[0]}" for kind, found in row["problems"].items())
    seat = f" of {row['seat']}" if "seat" in row else ""
    return wrapped(f"- {row['fault']} of {row['victim']}, {row['phase']}{seat}, {row['transport']}: {said}", "  ")


def soak_section(folder: Path = RESULTS) -> str:
    data = json.loads((folder / "soak.json").read_text())
    grown = data["growth"].values()
    memory = max(each["rss_mb"] for each in grown)
    slower = max(each["slower"] for each in grown)
    store = data["growth"]["train:0"]
    return wrapped(
        f"{data['refits']:,} refits in one session, every fiftieth of which fails on purpose ({data['date']},"
        f" `make soak`, [data]({LINKS}/soak.json)): {len(data['problems'])} problems. After every fiftieth a third"
        f" replica comes, takes part in two, and leaves. From the second quarter to the last one memory grew by"
        f" {memory:g} MB at most on a rank and by {store['store_rss_mb']:g} MB in the store."
        f" Descriptors grew by {max(each['descriptors'] for each in grown):g},"
        f" threads by {max(each['threads'] for each in grown):g}, keys by {store['store_keys']:g}."
        f" The fastest refits took {slower:.2f} times as long.{noted(data)}"
    )
