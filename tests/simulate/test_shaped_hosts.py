"""Refits between network namespaces: every link carries what the plan says, and a refit takes as long as simulated."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import namespaces
import pytest
import shaped_hosts
from helpers.plans import Case

RESULTS = Path(shaped_hosts.__file__).parent / "results" / "shaped-hosts.json"
_SMALL = (("hidden_size", 384), ("intermediate_size", 1024), ("num_hidden_layers", 2), ("vocab_size", 4096))
Row = dict[str, Any]
COUNTED = ["relay, 6 replicas on 3 hosts", "2 stages, 2 to a host", "shared GPUs"]


def small(name: str) -> Case:
    case = shaped_hosts.CASES[name]
    return replace(case, changes=tuple({**dict(case.changes), **dict(_SMALL), "head_dim": 24}.items()))


@pytest.fixture(scope="module")
def row_of() -> Iterator[Callable[[str], Row]]:
    """A refit of a case, in namespaces."""
    if reason := namespaces.unavailable_reason():
        pytest.skip(reason)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:  # ranks are forks: of one thread
        yield cache(lambda name: alone.submit(shaped_hosts.measure, name, small(name), 1).result(timeout=90))


@pytest.mark.sampled(5)
@pytest.mark.long
@pytest.mark.parametrize("name", COUNTED)
def test_every_link_carries_what_the_plan_says(row_of: Callable[[str], Row], name: str) -> None:
    assert shaped_hosts.unplanned(row_of(name)) == []
    assert max(max(link["planned"]) for link in row_of(name)["links"]) > 30 * shaped_hosts.TALK


@pytest.mark.long
def test_each_byte_leaves_the_trainer_once_and_enters_each_host_once(row_of: Callable[[str], Row]) -> None:
    """Both ranks of each of the three engine hosts want the whole model."""
    row = row_of("relay, 6 replicas on 3 hosts")
    assert row["hops"] == ["train", "relay", "share"]
    nic = {link["gpu"]: link["counted"] for link in row["links"] if link["link"] == "eth0"}
    hosts = [[nic[gpu][end] + nic[gpu + 1][end] for end in (0, 1)] for gpu in (0, 2, 4, 6)]
    once = pytest.approx(row["model_bytes"], rel=0.05)
    assert hosts[0][0] == once
    assert [into for _, into in hosts[1:]] == [once] * 3
    assert sum(out for out, _ in hosts[1:]) == pytest.approx(2 * row["model_bytes"], rel=0.05)


@pytest.mark.long
def test_the_count_notices_a_plan_of_other_paths(row_of: Callable[[str], Row]) -> None:
    """The refits did not run the plan without relays, and the comparison says so."""
    name = "relay, 6 replicas on 3 hosts"
    other = shaped_hosts.planned_bytes(replace(small(name).plan(), straight=True))
    links = [{**link, "planned": other[link["link"]][link["gpu"]]} for link in row_of(name)["links"]]
    problems = shaped_hosts.unplanned({**row_of(name), "links": links})
    assert sum("into eth0" in problem for problem in problems) == 6  # twice as much should come from the trainer
    assert sum("out of nvlink0" in problem for problem in problems) == 6


def test_recorded_refits_carried_what_their_plans_said() -> None:
    recorded = json.loads(RESULTS.read_text())["rows"]
    assert [row["case"] for row in recorded] == [*shaped_hosts.CASES]
    assert [problem for row in recorded for problem in shaped_hosts.unplanned(row)] == []


def test_recorded_refits_took_about_as_long_as_predicted() -> None:
    first, *others = json.loads(RESULTS.read_text())["rows"]
    assert first["predicted"] == pytest.approx(median(first["seconds"]), rel=1e-3)  # it calibrates
    off = {row["case"]: row["predicted"] / median(row["seconds"]) - 1 for row in others}
    assert max(map(abs, off.values())) < 0.15, off


@pytest.mark.parametrize("name", [*shaped_hosts.CASES])
def test_recorded_rows_are_of_the_plans_and_the_simulation_of_today(name: str) -> None:
    """Bytes of every link as planned now, and the prediction with the recorded bandwidth."""
    data = json.loads(RESULTS.read_text())
    row = next(row for row in data["rows"] if row["case"] == name)
    assert stale_parts(row, data["calibrated_bytes_per_s"]) == [], "run tools/shaped_hosts.py anew"


def stale_parts(row: dict[str, Any], nic: float) -> list[str]:
    """What of a recorded row is not as it is planned and predicted now."""
    plan = shaped_hosts.CASES[row["case"]].plan()
    planned = shaped_hosts.planned_bytes(plan)
    stale = [
        f"{link['link']} of GPU {link['gpu']}"
        for link in row["links"]
        if link["planned"] != [*planned[link["link"]][link["gpu"]]]
    ]
    if shaped_hosts.predicted(plan, nic) != pytest.approx(row["predicted"], rel=1e-3):
        stale.append("prediction")
    return stale


def test_a_row_of_another_plan_is_seen() -> None:
    data = json.loads(RESULTS.read_text())
    row, nic = data["rows"][0], data["calibrated_bytes_per_s"]
    first = row["links"][0]
    other = {**first, "planned": [first["planned"][0], first["planned"][1] + 1]}
    assert stale_parts({**row, "links": [other, *row["links"][1:]]}, nic) == [f"{first['link']} of GPU {first['gpu']}"]
    assert stale_parts({**row, "predicted": row["predicted"] * 1.01}, nic) == ["prediction"]
