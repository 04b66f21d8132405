"""Launching ranks: results in order, and one clear error, soon, whatever goes wrong in any of them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_reshard.validation import processes
from mcore_reshard.validation.processes import ProcessError, run_processes


def test_results_come_back_in_index_order() -> None:
    def square(index: int, offset: int) -> tuple[int, int, int]:
        time.sleep(0.02 * (3 - index))
        return index**2 + offset, os.getpid(), torch.get_num_threads()

    results = run_processes(3, square, (1,))
    assert [value for value, _, _ in results] == [1, 2, 5]
    assert len({process for _, process, _ in results} | {os.getpid()}) == 4
    assert {threads for _, _, threads in results} == {1}


def test_large_results_do_not_block() -> None:
    assert [len(result) for result in run_processes(2, lambda index: bytes(10_000_000))] == [10_000_000] * 2


def test_the_first_failure_ends_all_and_is_shown_with_its_traceback(tmp_path: Path) -> None:
    def fail(index: int) -> None:
        if index == 1:
            raise ValueError("no such weight")
        time.sleep(30)
        (tmp_path / "survived").touch()

    start = time.monotonic()
    with pytest.raises(ProcessError, match=r"process 1 failed:(.|\n)*in fail(.|\n)*ValueError: no such weight"):
        run_processes(3, fail)
    assert time.monotonic() - start < 5
    assert not (tmp_path / "survived").exists()


def test_a_killed_process_is_named() -> None:
    def die(index: int) -> None:
        if index == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)

    with pytest.raises(ProcessError, match="process 2 was killed by SIGKILL"):
        run_processes(3, die)


def test_an_exit_is_a_failure_too() -> None:
    with pytest.raises(ProcessError, match="process 0 ended with exit code 7 before it returned"):
        run_processes(1, lambda index: os._exit(7))
    with pytest.raises(ProcessError, match="SystemExit: 3"):
        run_processes(1, lambda index: exit(3))


def test_a_result_that_cannot_be_pickled_is_a_failure() -> None:
    with pytest.raises(ProcessError, match="process 0 failed"):
        run_processes(1, lambda index: lambda: index)


def test_the_deadline_names_who_is_late_and_where_it_was() -> None:
    def wait_in_vain(index: int) -> None:
        if index == 1:
            time.sleep(30)

    with pytest.raises(ProcessError, match=r"after 0\.5 s: processes \[1\]\n(.|\n)*in wait_in_vain"):
        run_processes(2, wait_in_vain, timeout_s=0.5)


def test_a_failure_before_others_have_started_is_still_the_one_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = processes._run_child

    def slow_start(index: int, *args: Any) -> None:
        time.sleep(3 * index)  # its stack file does not exist yet when process 0 fails
        real(index, *args)

    monkeypatch.setattr(processes, "_run_child", slow_start)
    with pytest.raises(ProcessError, match=r"process 0 failed:(.|\n)*ZeroDivisionError(.|\n)*its start"):
        run_processes(2, lambda index: 1 // index)
