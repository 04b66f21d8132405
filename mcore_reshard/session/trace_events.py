"""A rank's last attempts as a chrome trace (Trace Event Format), for Perfetto or chrome://tracing.

    train:0   row 0   refit 7: [meet][bulk            ][agree][misc][decide]
              row 1   stage 0        [        ]
              row 2   stage 1           [        ]

Times are those of the hosts' clocks. Processes have numbers of their own, so traces of several ranks can be joined.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .record import Attempt, Record

_GEN_PROCESSES = 1_000_000  # gen:3 is process 1,000,003 of a trace, train:3 is process 3


def write_trace(path: str | os.PathLike[str], record: Record) -> None:
    """Write the attempts that a record still has. Raises OSError."""
    events = [*_events(record)]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _events(record: Record) -> Iterator[dict[str, Any]]:
    world, _, rank = record.rank_name.partition(":")
    process = int(rank) + (_GEN_PROCESSES if world == "gen" else 0)
    attempts = [*record.attempts]
    rows = {0: "attempts", **{1 + s.pp_stage: f"stage {s.pp_stage}" for a in attempts for s in a.stages}}
    yield _named("process_name", process, 0, f"{record.rank_name} of {record.session}")
    yield from (_named("thread_name", process, row, name) for row, name in sorted(rows.items()))
    for attempt in attempts:
        if attempt.end is not None:
            for name, row, start, end, arguments in _spans(attempt):
                times = {"ts": 1e6 * (start + record.clock_offset), "dur": 1e6 * (end - start)}
                yield {
                    "name": name,
                    "cat": attempt.kind,
                    "ph": "X",
                    "pid": process,
                    "tid": row,
                    **times,
                    "args": arguments,
                }


def _spans(attempt: Attempt) -> Iterator[tuple[str, int, float, float, dict[str, Any]]]:
    """(name, row, start, end, arguments): the attempt, then what lies in it."""
    assert attempt.end is not None
    name = attempt.kind if attempt.version is None else f"{attempt.kind} {attempt.version}"
    of_plan = {"plan": attempt.plan} if attempt.plan else {}
    yield name, 0, attempt.start, attempt.end, {"outcome": attempt.outcome, "attempt": attempt.number, **of_plan}
    for phase, start, end in sorted(attempt.phases, key=lambda each: (each[1], -each[2])):
        yield phase, 0, start, min(end, attempt.end), {}
    for stage in attempt.stages:
        if stage.start and stage.transfers:
            arguments = {"bytes": stage.nbytes, "transfers": stage.transfers, "buckets": stage.buckets}
            yield f"stage {stage.pp_stage}", 1 + stage.pp_stage, stage.start, stage.start + stage.seconds, arguments


def _named(kind: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}
