"""Where `plan --out` writes: files whole or not at all; devices, pipes and terminals are written into."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers.cli import MOE, Run

from mcore_reshard import planning
from mcore_reshard.planner.plan.plan_file import load_plan, parse_plan

COMMAND = [sys.executable, "-m", "mcore_reshard", "plan", *MOE, "--out"]


def test_a_fifo_is_written_into_and_stays_a_fifo(run: Run, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    texts: list[str] = []
    reader = threading.Thread(target=lambda: texts.append(fifo.read_text()))
    reader.start()
    digest = run("plan", *MOE, "--out", fifo, "--json").json["digest"]
    reader.join(timeout=30)
    assert parse_plan(texts[0]).digest == digest
    assert stat.S_ISFIFO(fifo.stat().st_mode) and [path.name for path in tmp_path.iterdir()] == ["fifo"]


def test_a_device_is_written_into_and_stays_a_device(run: Run, tmp_path: Path) -> None:
    null = tmp_path / "null"
    null.symlink_to("/dev/null")  # a link, so that no mistake can replace the machine's own
    assert run("plan", *MOE, "--out", null).code == 0
    assert null.is_symlink() and stat.S_ISCHR(null.stat().st_mode)


def test_stdout_gets_the_plan_and_then_the_report(tmp_path: Path) -> None:
    piped = subprocess.run([*COMMAND, "/dev/stdout", "--json"], capture_output=True, text=True, timeout=60)
    assert piped.returncode == 0, piped.stderr
    first, _, report = piped.stdout.partition("\n")
    assert parse_plan(first).digest == json.loads(report)["digest"]
    log = tmp_path / "log"
    log.write_text("kept\n")
    with log.open("a") as stdout:
        subprocess.run([*COMMAND, "/dev/stdout", "--json"], stdout=stdout, check=True, timeout=60)
    assert log.read_text() == f"kept\n{first}\n" + log.read_text().partition("}\n")[2]
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_link_stays_a_link_to_a_file_that_is_replaced_whole(run: Run, tmp_path: Path) -> None:
    target, link = tmp_path / "plan.json", tmp_path / "latest.json"
    target.write_text("old")
    inode = target.stat().st_ino
    link.symlink_to(target)
    digest = run("plan", *MOE, "--out", link, "--json").json["digest"]
    assert link.is_symlink() and load_plan(target).digest == digest and target.stat().st_ino != inode


def test_a_place_that_cannot_be_written_is_told_before_planning(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "make_plan", lambda *_, **__: pytest.fail("planned"))
    (tmp_path / "file").write_text("")
    for path, reason in (
        (tmp_path, "it is a directory"),
        (tmp_path / "none" / "plan.json", f"{tmp_path / 'none'} is no directory"),
        (tmp_path / "file" / "plan.json", f"{tmp_path / 'file'} is no directory"),
    ):
        outcome = run("plan", *MOE, "--out", path)
        assert (outcome.code, outcome.out) == (2, "")
        hint = "give --out a file in a folder that exists and is yours"
        assert outcome.err == f"mcore-reshard: cannot write {path}: {reason}; {hint}\n"
    assert "cannot write '': the path is empty" in run("plan", *MOE, "--out", "").err


def test_a_place_without_permission_is_told_before_planning(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "make_plan", lambda *_, **__: pytest.fail("planned"))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    assert "permission denied" in run("plan", *MOE, "--out", tmp_path / "plan.json").err


def test_a_bad_mesh_and_a_bad_place_are_told_together(run: Run, tmp_path: Path) -> None:
    outcome = run("plan", "tiny-llama", "--train", "tp=3", "--gen", "tp=2", "--out", tmp_path)
    assert outcome.code == 2 and "8 attention heads cannot be divided by tp = 3" in outcome.err
    assert f"  - cannot write {tmp_path}: it is a directory" in outcome.err


def test_a_disk_that_is_full_is_one_clear_error() -> None:
    done = subprocess.run([*COMMAND, "/dev/full"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("mcore-reshard: cannot write /dev/full: No space left on device; ")
