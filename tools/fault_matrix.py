"""Run the fault matrix, real processes and all, and write what came of it to tools/results/faults.json.

python tools/fault_matrix.py                                   every cell of gloo and golden (`make test-faults`)
python tools/fault_matrix.py --transport direct --only kill     on this machine's GPUs; --only is a part of a cell's name
NCCL_SOCKET_IFNAME=lo NCCL_MAX_NCHANNELS=2 python tools/fault_matrix.py --transport nccl
python tools/fault_matrix.py --transport direct --again faults-direct.json --jobs 6    its late and missing cells

Ranks that share a GPU talk over sockets with NCCL; fewer channels make many sessions at a time light. Where there are
several GPUs, sessions take turns on them: the ranks of each share one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests")]

import torch  # noqa: E402
from bench import machine  # noqa: E402
from bench.results import line_by_line  # noqa: E402
from faults.cell import run_cell  # noqa: E402
from faults.matrix import DEADLINE_S, Cell, cells  # noqa: E402
from faults.model import plan_of  # noqa: E402
from faults.verdicts import PROBLEMS, Verdict, judge  # noqa: E402

LOGS = ROOT / "build" / "faults"
# Problems that a machine with too many cells at a time can cause: all of them are about time. Others are never forgiven.
OF_TIME = {"hung", "left", "unnamed", "late", "stuck", "paused", "broken", "missed"}


def row(cell: Cell, verdict: Verdict, seconds: float) -> dict[str, Any]:
    return {
        "phase": cell.phase,
        "fault": cell.fault,
        "victim": cell.victim,
        **({"seat": cell.seat} if cell.seat else {}),
        "transport": cell.transport,
        **({"replica_ranks": cell.replica_ranks} if cell.replica_ranks > 1 else {}),
        **({"commit": "staged"} if cell.staged else {}),
        **({"train_ranks": 1} if cell.train_ranks == 1 else {}),
        **({"replicas": 1} if cell.replicas == 1 else {}),
        "committed": verdict.committed,
        "known_s": verdict.known_s,
        "recovered_s": verdict.recovered_s,
        "seconds": round(seconds, 1),
        "problems": {kind: list(found) for kind, found in verdict.problems.items()},
    }


def run_one(numbered: tuple[int, Cell]) -> dict[str, Any]:
    number, cell = numbered
    log = LOGS / f"{number:03}.log"
    log.write_text(f"{cell}\n")
    start = time.monotonic()
    seen = run_cell(cell, log)
    verdict = judge(seen)
    if "missed" in verdict.problems and "broken" in verdict.problems:  # a busy machine was too slow to set it up
        seen = run_cell(cell, log)
        verdict = judge(seen)
    with log.open("a") as out:
        for process, steps in seen.steps.items():
            for step in steps:
                print(process, step, file=out)
        print(verdict, file=out)
    if verdict.ok:
        log.unlink()
    return row(cell, verdict, time.monotonic() - start)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many cells have each kind of problem."""
    counts = Counter(kind for each in rows for kind in each["problems"])
    return {kind: counts[kind] for kind in PROBLEMS}


def cells_again(before: dict[str, Any], chosen: Sequence[Cell]) -> list[int]:
    """The numbers of the cells that an earlier run did not come to, or whose problems are all of time."""
    known = {_shown(each): each["problems"] for each in before["rows"]}
    shown = [_shown(row(cell, Verdict(), 0.0)) for cell in chosen]
    if known.keys() - set(shown):
        raise SystemExit(
            "--again: that file has other cells; give the --transport, --only and --every that it was made with"
        )
    problems = [known.get(cell) for cell in shown]
    return [number for number, found in enumerate(problems) if found is None or (found and {*found} <= OF_TIME)]


def _shown(each: dict[str, Any]) -> tuple[str, ...]:
    names = ("phase", "fault", "victim", "seat", "transport", "replica_ranks", "commit", "train_ranks", "replicas")
    return tuple(str(each.get(name)) for name in names)


def run_all(
    chosen: Sequence[Cell], jobs: int, save: Callable[[list[dict[str, Any]]], None] = lambda rows: None
) -> list[dict[str, Any]]:
    """Run all cells, `jobs` of them at a time; rows in the order of `chosen`. `save` gets those that there are already."""
    for ranks in sorted({cell.ranks for cell in chosen}):
        plan_of(*ranks)  # once, for all processes
    LOGS.mkdir(parents=True, exist_ok=True)
    order = [*enumerate(chosen)]
    random.Random(1).shuffle(order)  # long and short cells beside each other
    rows: dict[int, dict[str, Any]] = {}
    with _Workers(jobs) as workers:
        for number, each in workers.map(order):
            rows[number] = each
            bad = "; ".join(f"{kind}: {found[0]}" for kind, found in each["problems"].items())
            print(
                f"{len(rows):4}/{len(order)} [{number:03}] {chosen[number]}: {bad or 'ok'} ({each['seconds']} s)",
                flush=True,
            )
            if len(rows) % 20 == 0:
                save([rows[number] for number in sorted(rows)])
    return [rows[number] for number in sorted(rows)]


class _Workers:
    """Processes that run cells. Not a pool: its workers are daemons, which may have no children."""

    def __init__(self, jobs: int) -> None:
        context: Any = multiprocessing.get_context("fork")
        self._asked, self._answered = context.SimpleQueue(), context.SimpleQueue()
        gpus = len(machine.gpus()) if shutil.which("nvidia-smi") else 0
        seen = [str(job % gpus) if gpus else None for job in range(jobs)]
        self._processes = [
            context.Process(target=_work, args=(self._asked, self._answered, gpu), daemon=False) for gpu in seen
        ]

    def __enter__(self) -> _Workers:
        for process in self._processes:
            process.start()
        return self

    def map(self, asked: Sequence[tuple[int, Cell]]) -> Any:
        for each in asked:
            self._asked.put(each)
        for _ in self._processes:
            self._asked.put(None)
        for _ in asked:
            yield self._answered.get()

    def __exit__(self, kind: Any, *_: object) -> None:
        for process in self._processes:
            if kind is not None:
                process.terminate()
            process.join()


def _work(asked: Any, answered: Any, gpu: str | None) -> None:
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    while (numbered := asked.get()) is not None:
        answered.put((numbered[0], run_one(numbered)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", action="append", help="gloo and golden if not given; also direct, nccl")
    parser.add_argument("--only", action="append", default=[], help="cells whose name contains all of these")
    parser.add_argument("--every", type=int, default=1, help="every so many of the cells")
    parser.add_argument("--jobs", type=int, default=4, help="cells at a time")
    parser.add_argument("--again", type=Path, metavar="FILE", help="of an earlier run, what had problems or is missing")
    parser.add_argument("--out", type=Path, help="where to write the results")
    arguments = parser.parse_args(argv)
    transports = arguments.transport or ["gloo", "golden"]
    every = [cell for name in transports for cell in cells(name)]
    chosen = [cell for cell in every if all(part in str(cell) for part in arguments.only)]
    chosen = chosen[:: arguments.every]
    before: dict[str, Any] = {"rows": [], "jobs": 0, "minutes": 0.0}
    if arguments.again:
        before = json.loads(arguments.again.read_text())
    numbers = cells_again(before, chosen) if arguments.again else [*range(len(chosen))]
    start = time.monotonic()

    def minutes() -> float:
        return round(float(before["minutes"]) + (time.monotonic() - start) / 60, 1)

    def save(rows: list[dict[str, Any]]) -> None:
        if arguments.out is None:
            return
        result = {
            "what": "sessions of real processes in which something breaks once",
            "date": date.today().isoformat(),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
            "hardware": torch.cuda.get_device_name(0) if transports[0] in ("direct", "nccl", "auto") else "CPU",
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "deadline_s": DEADLINE_S,
            "minutes": minutes(),
            "jobs": arguments.jobs,
            **(_note(before, len(numbers), arguments.jobs) if arguments.again else {}),
            "cells": len(rows),
            "planned": len(chosen),
            "counts": summary(rows),
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(line_by_line({**result, "rows": rows}))

    def joined(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        of_cell = {_shown(each): each for each in (*before["rows"], *rows)}
        return [of_cell[shown] for cell in chosen if (shown := _shown(row(cell, Verdict(), 0.0))) in of_cell]

    rows = joined(run_all([chosen[number] for number in numbers], arguments.jobs, lambda rows: save(joined(rows))))
    save(rows)
    print(json.dumps({"cells": len(rows), "minutes": minutes(), **summary(rows)}))
    return 1 if any(each["problems"] for each in rows) else 0


def _note(before: dict[str, Any], again: int, jobs: int) -> dict[str, str]:
    first = before.get("note") or f"A first run of {len(before['rows'])} cells ran {before['jobs']} at a time"
    problems = ", ".join(f"{count} {kind}" for kind, count in before["counts"].items() if count)
    why = f"which were missing, or had problems ({problems})," if problems else "which were missing,"
    return {"note": f"{first}; {again}, {why} are of another run, {jobs} at a time"}


if __name__ == "__main__":
    sys.exit(main())
