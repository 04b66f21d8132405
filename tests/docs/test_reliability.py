"""The table of events in docs/reliability.md promises no more than the fault matrix has found."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EVENTS = (ROOT / "docs" / "reliability.md").read_text().partition("## States")[0]
ROUNDED_S = 0.1
# What the page says of a fault, and so how long others may take to know of it, with this deadline.
PROMISES = {
    "kill": ("| all, within 3 s |", lambda deadline_s: 3.0),
    "freeze, long": ("| all, at the deadline or up to 3 s later; the rank itself", lambda s: s + 3.0),
    "store frozen, long": (
        "| all, at the deadline or up to 3 s later; after a vote up to two deadlines later |",
        lambda s: 3 * s,
    ),
    "connections to ranks": ("| all, mostly after 3 s; at the latest a second after the deadline |", lambda s: s + 1.0),
    "store restarted": ("| all, when they next ask it |", lambda deadline_s: 3.0),
}


def broken_promises(data: Mapping[str, Any]) -> Iterable[str]:
    """Cells in which others knew later than the page says; those that the page lists as gone wrong are left out."""
    for row in data["rows"]:
        for fault, (_, limit_s) in PROMISES.items():
            late_s = (row["known_s"] or 0.0) - limit_s(data["deadline_s"])
            if row["fault"].startswith(fault) and late_s > ROUNDED_S and "late" not in row["problems"]:
                yield f"{row['fault']} of {row['victim']}, {row['phase']}: known after {row['known_s']} s"


@pytest.mark.parametrize("file", sorted((ROOT / "tools" / "results").glob("faults*.json")), ids=lambda file: file.stem)
def test_others_knew_as_soon_as_the_page_says(file: Path) -> None:
    assert [*broken_promises(json.loads(file.read_text()))] == []


@pytest.mark.parametrize("fault", PROMISES)
def test_the_page_has_each_promise(fault: str) -> None:
    assert PROMISES[fault][0] in EVENTS


def test_a_promise_that_the_data_breaks_is_found() -> None:
    row = {"fault": "connections to ranks dropped", "victim": "gen:1", "phase": "before reads", "problems": {}}
    assert [*broken_promises({"deadline_s": 4.0, "rows": [{**row, "known_s": 5.0}]})] == []
    assert len([*broken_promises({"deadline_s": 4.0, "rows": [{**row, "known_s": 5.2}]})]) == 1
