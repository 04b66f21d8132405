"""One JSON file a run: what was measured on, and a row for each method on each workload, added as they come."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

COPY_ENGINE, NCCL_ALONE = "copy-engine", "nccl-alone"
_LIMIT_OF = {"direct": COPY_ENGINE, "auto": COPY_ENGINE, "session": COPY_ENGINE, "nccl": NCCL_ALONE}


class ResultFile:
    """The file while it is written. One process at a time adds to it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, header: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write({**header, "rows": []})

    def rows(self) -> list[Row]:
        rows: list[Row] = json.loads(self.path.read_text())["rows"]
        return rows

    def add(self, row: Row) -> None:
        """Append `row`, with its share of the limit that the same run has measured."""
        document = json.loads(self.path.read_text())
        document["rows"].append(with_share(row, document["rows"]))
        self._write(document)

    def _write(self, document: dict[str, Any]) -> None:
        partial = self.path.with_suffix(".partial")
        partial.write_text(line_by_line(document))
        partial.replace(self.path)


def line_by_line(document: dict[str, Any], *listed: str) -> str:
    """The text of a data file that has a line for each of its rows, which are many; by default those of `rows`."""
    listed = listed or ("rows",)
    text = json.dumps({**document, **{name: f"@{name}" for name in listed}}, indent=1)
    for name in listed:
        rows = ",\n  ".join(json.dumps(row, separators=(",", ":")) for row in document[name])
        text = text.replace(f'"@{name}"', f"[\n  {rows}\n ]", 1)
    return text + "\n"


def skipped(workload: str, method: str, reason: str) -> Row:
    return {"workload": workload, "method": method, "skipped": " ".join(reason.split())}


def with_share(row: Row, earlier: Sequence[Row]) -> Row:
    """`row` with `share` and `share_of`: direct counts against the copy engine, nccl against NCCL alone."""
    limit = _LIMIT_OF.get(row["method"].partition(":")[0])
    measured = [e["gb_per_s_per_receiver"] for e in earlier if e["method"] == limit and "skipped" not in e]
    if not measured or "skipped" in row:
        return row
    return {**row, "share": round(row["gb_per_s_per_receiver"] / measured[-1], 3), "share_of": limit}


def row_of(workload: str, method: str, told: Sequence[dict[str, Any]]) -> Row:
    """The row of a method from what every rank told.

    Each tells:

    - `spans`: (start, end) seconds of every run, on a clock that all share; the first run is the first call.
    - `cpu_ms`, `thread_ms`: CPU of the process and of the calling thread, in every run.
    - `prepare_s`, `nbytes` (received), `wrong_elements` (of all ranks).
    - `extra_bytes` (lost by the device), `allocated_bytes` (peak of torch's allocator).
    - `facts`: further columns. The last rank, a generation rank, says which; a row has the largest value of all ranks.
    """
    runs = [
        1e3 * (max(end for _, end in spans) - max(start for start, _ in spans))
        for spans in zip(*(word["spans"] for word in told), strict=True)
    ]
    steady = runs[1:] or runs
    median, received = statistics.median(steady), max(word["nbytes"] for word in told)
    row = {
        "workload": workload,
        "method": method,
        "ms": round(median, 3),
        "ms_min_max": [round(min(steady), 3), round(max(steady), 3)],
        "runs": len(steady),
        "first_ms": round(runs[0], 3),
        "gb_per_s_per_receiver": float(f"{received / median / 1e6:.4g}"),
        "gb_per_receiver": float(f"{received / 1e9:.5g}"),
        "wrong_elements": told[0]["wrong_elements"],
        "prepare_s": round(max(word["prepare_s"] for word in told), 3),
        "host_cpu_ms": _steady_most(told, "cpu_ms"),
        "host_thread_ms": _steady_most(told, "thread_ms"),
        "extra_memory_mb": round(max(word["extra_bytes"] for word in told) / 1e6, 1),
        "allocated_mb": round(max(word["allocated_bytes"] for word in told) / 1e6, 1),
    }
    for fact in told[-1]["facts"]:
        row[fact] = max(word["facts"][fact] for word in told if fact in word["facts"])
    return row


def _steady_most(told: Sequence[dict[str, Any]], field: str) -> float:
    """Of each rank the median of its runs without the first, and of these the most."""
    return round(max(statistics.median(word[field][1:] or word[field]) for word in told), 3)
