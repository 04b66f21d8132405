"""The fault matrix: a smoke of it, and that its checks fail when they should."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import fault_matrix
import pytest
from faults import cell as running
from faults.cell import Observed, children, run_cell
from faults.matrix import PHASES, RANK_FAULTS, SMOKE, STORE, STORE_FAULTS, Cell, cells
from faults.model import Weights, plan_of, whole_tensors
from faults.rank import Step
from faults.verdicts import PROBLEMS, Verdict, judge

CELL = Cell("before the vote", "exception", "gen:1")
TOLD = "gen:1: CallbackError: on fire"


def test_sessions_survive_the_faults_of_the_smoke() -> None:
    """All but the times, which `make test-faults` judges on a machine that does nothing else."""
    rows = fault_matrix.run_all(SMOKE, jobs=4)
    found = {str(cell): row["problems"] for cell, row in zip(SMOKE, rows, strict=True) if {*row["problems"]} - {"late"}}
    assert found == {}


def test_the_matrix_has_every_phase_fault_and_victim() -> None:
    found = cells("gloo")
    assert {cell.phase for cell in found} == {*PHASES}
    assert {cell.fault for cell in found} == {*RANK_FAULTS, *STORE_FAULTS}
    assert {cell.victim for cell in found} == {"train:0", "train:1", "gen:0", "gen:1", "gen:2", "gen:3", STORE}
    assert len(set(found)) == len(found)
    kills = {(cell.phase, cell.victim) for cell in found if cell.fault == "kill" and cell.replica_ranks == 1}
    assert [plan_of(*ranks).later_hops for ranks in ((1, 2, 2), (1, 1, 2))] == [(), ("relay",)]
    assert kills == {(phase, victim) for phase, victims in PHASES.items() for victim in victims}


@pytest.mark.parametrize("ranks", [(1, 2, 2), (2, 2, 2), (1, 1, 1), (1, 1, 2)])
def test_bytes_tell_their_version(ranks: tuple[int, int, int]) -> None:
    *_, replicas = ranks
    weights = Weights(plan_of(*ranks), "gen", replicas - 1)
    assert weights.schedule.padding and weights.names
    assert weights.held() == 0
    for version in (1, 2):
        for name, tensor in weights._content(version).items():
            weights.tensors[name].copy_(tensor)
        assert weights.held() is None, "what moves by name is still of the version before"
        for name, tensor in whole_tensors(weights.names, version):
            weights.load(name, tensor)
        assert weights.held() == version


def test_only_cells_that_were_late_or_are_missing_run_again() -> None:
    chosen = [CELL, replace(CELL, victim="gen:0"), replace(CELL, victim="train:0")]
    problems = [{"left": ["train:0 has not exited"]}, {}, {"late": ["gen:0"], "torn": ["gen:1"]}]
    rows = [
        {**fault_matrix.row(cell, Verdict(), 1.0), "problems": found}
        for cell, found in zip(chosen, problems, strict=True)
    ]
    assert fault_matrix.cells_again({"rows": rows}, chosen) == [0], "a torn commit is no matter of time"
    assert fault_matrix.cells_again({"rows": rows[1:]}, chosen) == [0]
    assert fault_matrix.cells_again({"rows": rows[:1]}, chosen[::-1]) == [0, 1, 2]
    with pytest.raises(SystemExit, match="other cells"):
        fault_matrix.cells_again({"rows": rows}, chosen[1:])
    assert {*PROBLEMS} - fault_matrix.OF_TIME == {"torn", "unreported", "wrong", "alarm"}


# --- every check fails when it should ------------------------------------------------------------------------------


def seen(**changes: Any) -> Observed:
    """A cell in which all went as it should, but for steps that `changes` replaces: "gen_0": {"fault": {...}}."""
    steps: dict[str, list[Step]] = {}
    for seat in CELL.seats:
        gen = seat.startswith("gen:")
        steps[seat] = [
            Step("set up", 1.0, 1.2, None, None, 1, (0, 1), 1, ("complete", 1, None, 0.0) if gen else None, 1),
            Step("fault", 2.0, 2.2, TOLD, "SessionFailed", None, (), 1, ("mixed", 1, 2, 0.5) if gen else None, None),
            Step("recovery", 2.2, 2.4, None, None, 10, (0, 1), 10, ("complete", 10, None, 0.0) if gen else None, 10),
        ]
        for name, fields in changes.get(seat.replace(":", "_"), {}).items():
            steps[seat] = [replace(step, **fields) if step.name == name else step for step in steps[seat]]
    return Observed(changes.get("cell", CELL), steps, "127.0.0.1:29600", fault_s=2.1)


def problems(observed: Observed) -> set[str]:
    return {*judge(observed).problems}


def test_a_cell_without_a_problem_is_found_to_have_none() -> None:
    verdict = judge(seen())
    assert verdict.ok, verdict
    assert (verdict.committed, verdict.known_s, verdict.recovered_s) == (False, 0.1, 0.3)


PLANTED = {
    "torn": {"gen_0": {"fault": {"error": None, "version": 2, "replicas": (0, 1), "committed": 2,
                                 "state": ("complete", 2, None, 0.0), "held": 2}}},
    "unreported": {"gen_0": {"fault": {"state": ("intact", 1, None, 0.0), "held": None}}},
    "alarm": {"gen_0": {"fault": {"held": 1}}},
    "wrong": {"gen_0": {"recovery": {"held": 9, "state": ("complete", 9, None, 0.0)}}},
    "unnamed": {"train_0": {"fault": {"error": "train:1: DeadlineError: nobody came"}}},
    "late": {"gen_0": {"fault": {"end_s": 2.1 + 3.5}}},
    "stuck": {"gen_1": {"recovery": {"error": "no refit is possible", "version": None}}},
    "paused": {"cell": replace(CELL, fault="freeze, short")},
}  # fmt: skip


@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_planted_is_found(kind: str) -> None:
    assert problems(seen(**PLANTED[kind])) == {kind}


@pytest.mark.parametrize("state", [("intact", 10, None, 0.0), ("complete", 1, None, 0.0), ("mixed", 1, 10, 0.9)])
def test_a_rank_that_has_committed_is_complete(state: tuple[str, int, int | None, float]) -> None:
    assert "unreported" in problems(seen(gen_0={"recovery": {"state": state}}))


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_that_is_no_part_of_a_mixture_is_found(share: float) -> None:
    assert problems(seen(gen_0={"fault": {"state": ("mixed", 1, 2, share)}})) == {"unreported"}


def test_a_mixture_that_holds_all_of_the_next_version_is_one_only_with_a_share_of_1() -> None:
    whole = {"gen_0": {"fault": {"state": ("mixed", 1, 2, 1.0), "held": 2}}}
    part = {"gen_0": {"fault": {"state": ("mixed", 1, 2, 0.9), "held": 2}}}
    assert problems(seen(**whole)) == set() and problems(seen(**part)) == {"alarm"}


@pytest.mark.parametrize(("ended_s", "is_torn"), [(6.2, False), (8.9, True)])
def test_a_call_that_ended_while_the_leader_was_frozen_is_no_part_of_its_refit(ended_s: float, is_torn: bool) -> None:
    cell = Cell("between refits", "freeze, long", "train:0")  # it begins version 2 once it wakes, at 8.6
    committed = {"error": None, "version": 2, "replicas": (0,), "committed": 2, "end_s": 9.0}
    others = {seat: {"fault": {"end_s": 9.0, "committed": 2}} for seat in ("train_1", "gen_1")}
    observed = seen(cell=cell, train_0={"fault": committed}, gen_0={"fault": {"end_s": ended_s}}, **others)
    assert ("torn" in problems(observed)) == is_torn


def test_ranks_that_recover_while_others_try_the_old_version_need_no_culprit() -> None:
    told = "different versions are refitted at once: 2 on train:0; 10 on train:1; pass one to all ranks"
    for kind, expected in (("VersionError", set()), ("SessionError", {"unnamed"})):
        assert problems(seen(train_0={"fault": {"error": told, "kind": kind}})) == expected


def test_the_store_must_be_named_by_its_address() -> None:
    cell = Cell("before the vote", "store killed", STORE, seat="gen:0")
    assert "unnamed" in problems(seen(cell=cell))


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("hung", "hung", ["gen:0"]),
        ("left", "left", ["process 7"]),
        ("broken", "broken", ["x"]),
        ("missed", "fault_s", None),
    ],
)
def test_processes_that_hang_or_stay_or_break_are_counted(kind: str, field: str, value: Any) -> None:
    observed = seen()
    setattr(observed, field, value)
    assert problems(observed) == {kind}


def test_every_kind_of_problem_is_planted_here() -> None:
    assert {*PLANTED, "hung", "left", "broken", "missed"} == {*PROBLEMS}


def _hangs(pipe: Any, *_: Any) -> None:
    time.sleep(60)


def test_ranks_that_hang_are_noted_and_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(running, "main", _hangs)
    monkeypatch.setattr(running, "LIMIT_S", 0.5)
    observed = run_cell(CELL, tmp_path / "log")
    assert sorted(observed.hung) == sorted(CELL.seats) and not observed.left


def test_a_process_that_stays_is_seen() -> None:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    process.start()
    try:
        assert process.pid in children()
    finally:
        process.kill()
        process.join()
