"""The benchmark of prepare: its sessions hold what a real rank holds, and it moves right bytes on a CPU."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import bench_prepare as bench
import pytest
from pages.prepared import prepare_section

from mcore_reshard.planner.plan import make_plan as planner
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planning import plan as make_plan


def test_the_one_engine_rank_has_the_share_of_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = schedule_of(make_plan(bench.MODEL, bench.TRAIN, bench.GEN), "gen", bench.GEN_RANK)
    config = bench.cut_config(bench.MODEL, bench.PARTS, 1)
    for train in bench.SESSIONS.values():
        cut = schedule_of(make_plan(config, train, "tp=1", model=bench.MODEL), "gen", 0)
        shares = [bench.share_of(each) for each in (real, cut)]
        assert shares[1]["tensors"] == shares[0]["tensors"]
        assert shares[1]["transfers"] == pytest.approx(shares[0]["transfers"], rel=0.05)  # a small model is cut finer
        assert shares[1]["bytes"] == pytest.approx(shares[0]["bytes"], rel=1e-3)
        with monkeypatch.context() as patch:
            patch.setattr(planner, "_LARGEST_OF_SMALL_MODELS", planner._LARGEST_OVERLAP)
            cut = schedule_of(make_plan(config, train, "tp=1", model=bench.MODEL), "gen", 0)
        assert bench.share_of(cut)["transfers"] == shares[0]["transfers"]


def test_fewer_bytes_leave_the_tensors_as_many() -> None:
    wide, narrow = (
        schedule_of(make_plan(bench.cut_config(bench.MODEL, 32, by), "tp=1", "tp=1", model=bench.MODEL), "gen", 0)
        for by in (1, 56)
    )
    assert len(wide.tensors) == len(narrow.tensors)
    assert 40 * sum(prod(each.shape) for each in narrow.tensors) < sum(prod(each.shape) for each in wide.tensors)


def test_a_run_on_the_cpu_leaves_phases_of_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "prepare.json"
    arguments = ["--device", "cpu", "--transport", "gloo", "--model", "tiny-deepseek-v3", "--parts", "1"]
    arguments += ["--train", "tp=2", "--gen", "tp=2", "--train-rank", "1", "--gen-rank", "1"]
    assert bench.main([*arguments, "--sessions", "one trainer", "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    (session,) = data["sessions"]
    assert session["ranks"] == "1 -> 1"
    assert len(session["connects"]) == bench.CONNECTS
    for connect in session["connects"]:
        for phases in connect["phases"].values():
            assert {"plan", "bind", "exchange", "checks"} <= {*phases}
            assert sum(phases.values()) <= connect["connect_s"] + 1e-3
    assert data["real"]["gen"]["peers"] == 2
    assert {*data["traces"]} == {"train", "gen"}


def test_timed_functions_of_direct_are_there() -> None:
    """Their modules import on GPUs alone."""
    root = Path(__file__).parents[2]
    for names in bench._TIMED_DIRECT.values():
        for name in names:
            *place, last = name.removeprefix("mcore_reshard.").split(".")
            file = root.joinpath(*place).with_suffix(".py")
            if not file.exists():
                file = root.joinpath(*place[:-1]).with_suffix(".py")
                assert f"class {place[-1]}" in file.read_text(), name
            assert last in file.read_text(), name


def test_the_page_says_whether_the_goal_is_reached(tmp_path: Path) -> None:
    assert "Not measured" in prepare_section(tmp_path)
    share = {"tensors": 845, "transfers": 45395, "bytes": 1, "peers": 1}
    connect = {"connect_s": 1.0, "first_refit_s": 0.1, "second_refit_s": 0.05}
    connect |= {"phases": {"train": {"plan": 0.25, "connect": 0.5}, "gen": {"plan": 0.25}}}
    data = {"hardware": "1 x GPU", "cores": 16, "versions": {"python": "3.12"}, "date": "2026-11-24", "goal_s": 3.0}
    data |= {"model": "deepseek-v3", "transport": "direct"}
    data["sessions"] = [
        {
            "ranks": "1 -> 1",
            "largest": {"train": share, "gen": share},
            "connects": [{**connect, "connect_s": 2.5}, connect],
        }
        | {"median_later_connect_s": 1.0}
    ]
    data["traces"] = {"train": {"cold_s": 4.0, "warm_s": 0.3}, "gen": {"not_measured": "no vLLM"}}
    for warm_s, verdict in (
        (0.3, "1 -> 1 takes 2.80 s, reached"),
        (0.6, "1 -> 1 takes 3.10 s, not reached"),
    ):
        data["traces"]["train"]["warm_s"] = warm_s
        (tmp_path / "prepare-x1.json").write_text(json.dumps(data))
        assert verdict in prepare_section(tmp_path).replace("\n", " ")
    assert "| 1 -> 1 | train | 0.25 | 0.00 | 0.00 | 0.00 | 0.00 | 0.00 | 0.00 | 0.50 |" in prepare_section(tmp_path)
