"""How long `prepare` takes with the share of a DeepSeek-V3 rank: the runs of tools/bench_prepare.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .text import noted, wrapped

RESULTS = Path(__file__).resolve().parents[1] / "results"
LINKS = "../tools/results"
_PHASES = ("plan", "bind", "meet", "exchange", "map", "tables", "checks")  # the others are the last column


def prepare_section(folder: Path = RESULTS) -> str:
    """Connects by session, then the phases of the last one; what traces cost. Says so where nothing was measured yet."""
    parts = [_of_file(file) for file in sorted(folder.glob("prepare-x*.json"))]
    return "\n\n".join(parts) or "Not measured on a GPU yet; `python tools/bench_prepare.py` does."


def _of_file(file: Path) -> str:
    data = json.loads(file.read_text())
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    driver = f", driver {data['driver']}" if "driver" in data else ""
    lines = [
        wrapped(
            f"{data['hardware']}{driver}, {data['cores']} cores, {versions}, {data['date']} (`python"
            f" tools/bench_prepare.py`, [data]({LINKS}/{file.name})). {data['model']}, transport `{data['transport']}`."
        ),
        "",
        "| session | largest training rank | engine's rank | connect, fresh processes | later | first refit | second |",
        f"|{'---|' * 7}",
    ]
    for session in data["sessions"]:
        train, gen = (
            f"{share['tensors']:,} tensors, {share['transfers']:,} transfers"
            for share in (session["largest"][world] for world in ("train", "gen"))
        )
        first, last = session["connects"][0], session["connects"][-1]
        refits = " | ".join(f"{last[key] * 1e3:.0f} ms" for key in ("first_refit_s", "second_refit_s"))
        later_s = session["median_later_connect_s"]
        lines.append(
            f"| {session['ranks']} | {train} | {gen} | {first['connect_s']:.2f} s | {later_s:.2f} s | {refits} |"
        )
    lines += [
        "",
        "The last connect of each, by phase, in seconds; of each side the slowest rank:",
        "",
        f"| session | rank | {' | '.join(_PHASES)} | other |",
        f"|{'---|' * (len(_PHASES) + 3)}",
    ]
    for session in data["sessions"]:
        for world, phases in session["connects"][-1]["phases"].items():
            shown = [phases.get(name, 0.0) for name in _PHASES]
            cells = [f"{seconds:.2f}" for seconds in (*shown, sum(phases.values()) - sum(shown))]
            lines.append(f"| {session['ranks']} | {world} | {' | '.join(cells)} |")
    traces = " ".join(_trace(side, data["traces"][world]) for world, side in (("train", "trainer"), ("gen", "engine")))
    from bench.goals import prepares

    verdicts = [
        f"{session['ranks']} takes {verdict.measured}, {'reached' if verdict.reached else 'not reached'}"
        for session, verdict in zip(data["sessions"], prepares(data), strict=True)
    ]
    lines += [
        "",
        wrapped(
            f"{traces} The goal is {data['goal_s']:g} s for the slowest connect and all measured traces from a full"
            f" cache together: {'; '.join(verdicts)}.{noted(data)}"
        ),
    ]
    return "\n".join(lines)


def _trace(side: str, trace: dict[str, Any]) -> str:
    if (reason := trace.get("not_measured")) is not None:
        return f"The trace of a real rank of the {side} was not measured: {reason}."
    return (
        f"The trace of a real rank of the {side} takes {trace['cold_s']:.2f} s with an empty cache,"
        f" {trace['warm_s']:.2f} s with a full one."
    )
