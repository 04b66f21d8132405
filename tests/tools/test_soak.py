"""The soak: a short one, and that growth is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import soak
from pages.reliability import faults_section


def samples(**growing: float) -> list[dict[str, Any]]:
    """Twenty samples in which the figures that are given grow by so much with each."""
    start = {
        "rss_mb": 200.0,
        "descriptors": 20,
        "threads": 3,
        "store_keys": 105,
        "store_rss_mb": 33.0,
        "fastest_ms": 50.0,
    }
    return [{name: value + number * growing.get(name, 0) for name, value in start.items()} for number in range(20)]


def test_steady_figures_are_no_problem() -> None:
    assert soak.problems({"train:0": samples()}) == []


@pytest.mark.parametrize(
    ("name", "growth"),
    [
        ("rss_mb", 0.5),
        ("descriptors", 1),
        ("threads", 1),
        ("store_keys", 1),
        ("store_rss_mb", 0.5),
        ("fastest_ms", 2.0),
    ],
)
def test_what_grows_is_found(name: str, growth: float) -> None:
    (problem,) = soak.problems({"train:0": samples(**{name: growth})})
    assert problem.startswith("train:0: ") and ("times as long" if name == "fastest_ms" else name) in problem


def test_growth_while_a_session_warms_up_is_none() -> None:
    warming = samples()
    warming[0]["rss_mb"] = 150.0
    assert soak.problems({"train:0": warming}) == []


def test_a_short_soak_gives_samples_of_every_rank() -> None:
    by_rank = soak.run(40)
    assert [*by_rank] == ["train:0", "train:1", "gen:0", "gen:1"]
    assert all(each[-1]["refits"] == 40 and each[0]["descriptors"] > 0 for each in by_rank.values())
    keys = [each["store_keys"] for each in by_rank["train:0"]]
    assert len(set(keys[len(keys) // 2 :])) == 1, keys


def test_replicas_that_come_and_go_leave_no_keys() -> None:
    by_rank = soak.run(40, visit_every=10)
    keys = {each["refits"]: each["store_keys"] for each in by_rank["train:0"]}
    assert keys[20] == keys[30] == keys[40], keys  # before a visit; the one after refit 10 was the first


def test_a_page_says_which_cells_have_a_problem(tmp_path: Path) -> None:
    row = {
        "phase": "voted", "fault": "kill", "victim": "gen:0", "transport": "gloo", "committed": False,
        "known_s": 1.5, "recovered_s": 2.5, "seconds": 4.0, "problems": {"torn": ["gen:1 has not committed version 2"]},
    }  # fmt: skip
    data = {
        "machine": "2 cores", "hardware": "CPU", "versions": {"python": "3", "torch": "2"}, "date": "2026-11-23",
        "deadline_s": 4.0, "counts": {"torn": 1}, "rows": [row, {**row, "problems": {}}],
    }  # fmt: skip
    (tmp_path / "faults.json").write_text(json.dumps(data))
    page = faults_section(tmp_path)
    assert "| torn commits | 1 |" in page and "| voted | 2, 1 bad |" in page
    assert "- kill of gen:0, voted, gloo: torn commits: gen:1 has not committed version 2" in page
