"""`pytest --fast` skips whatever starts a process or imports Megatron or transformers, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SLOW = """
import multiprocessing, os, subprocess, sys
import pytest
from helpers.ranks import run_ranks
from mcore_reshard.validation.processes import run_processes

def fork(): os._exit(0) if os.fork() == 0 else None
def call(): subprocess.run([sys.executable, "--version"])
def spawn(): multiprocessing.get_context("spawn").Process(target=print).start()
def ranks(): run_ranks(1, print)
def processes(): run_processes(1, print)
def megatron(): import megatron.core
def transformers(): import transformers

@pytest.mark.parametrize("act", [fork, call, spawn, ranks, processes, megatron, transformers])
def test_slow(act): act()

def test_quick(): import torch
"""


def test_tests_are_skipped_as_they_start_a_process_or_import_models(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(SLOW)
    command = [sys.executable, "-m", "pytest", "--fast", "-c", ROOT / "pyproject.toml", "-p", "conftest", file]
    paths = os.pathsep.join(map(str, (ROOT / "tests", ROOT)))
    told = subprocess.run(
        [*map(str, command), "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert "1 passed, 7 skipped" in told.stdout, told.stdout + told.stderr
