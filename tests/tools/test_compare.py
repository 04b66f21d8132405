"""tools/compare_frameworks.py: the meter counts what it should, wrong bytes end a run, and a whole run on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compare.measure import Part, Referee

from mcore_reshard.validation.processes import run_processes

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
needs_clear_refs = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="this kernel has no /proc/self/clear_refs"
)


def measured(folder: Path, gen: dict[str, Any], repeats: int = 2) -> dict[str, Any]:
    """What a referee measures of a training process that does nothing and an engine process that is given."""
    referee = Referee(1, 2, folder)

    def take_part(index: int) -> dict[str, Any]:
        run = {"idle": lambda: None, "busy": gen["run"] if index else lambda: None}
        differences = gen.get("differences", lambda version: []) if index else lambda version: []
        part = Part(
            set_up=dict.fromkeys(run, lambda: None),
            run=run,
            set_weights=lambda version: None,
            differences=differences,
        )
        return referee.rounds(index, part, repeats)

    return run_processes(2, take_part, timeout_s=60.0)[0]


@needs_clear_refs
def test_peaks_and_files_are_those_of_the_path_and_of_the_process(tmp_path: Path) -> None:
    def run() -> tuple[int, int]:
        bytearray(b"x" * (64 * MIB))  # two of 64 MiB at a time, and gone
        return 7, 5

    samples = measured(tmp_path, {"run": run})["samples"]
    assert [sample["path"] for sample in samples] == ["idle", "busy"] * 2
    for sample in samples:
        busy = sample["path"] == "busy"
        assert sample["peak_extra_bytes"]["train"][0] < 16 * MIB
        assert (120 * MIB < sample["peak_extra_bytes"]["gen"][0] < 144 * MIB) == busy
        assert sample.get("file_bytes") == ({"written": 7, "read": 5} if busy else None)


@needs_clear_refs
def test_memory_that_stays_counts_as_kept(tmp_path: Path) -> None:
    held: list[bytes] = []

    def run() -> None:
        if not held:
            held.append(b"x" * (64 * MIB))

    kept = measured(tmp_path, {"run": run})["kept_bytes"]
    assert kept["idle"]["gen"][0] < 16 * MIB < 60 * MIB < kept["busy"]["gen"][0]
    assert kept["busy"]["train"][0] < 16 * MIB


def test_wrong_bytes_after_a_path_end_the_run_by_name(tmp_path: Path) -> None:
    wrong = {"run": lambda: None, "differences": lambda version: ["lm_head.weight"]}
    with pytest.raises(Exception, match=r"idle: 1 tensors of process 1 have wrong bytes: lm_head\.weight"):
        measured(tmp_path, wrong)


def compared(framework: str, folder: Path) -> dict[str, Any]:
    out = folder / "out.json"
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools" / "compare_frameworks.py"), framework]
    command += ["--size", "tiny", "--repeats", "1", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    (run,) = json.loads(out.read_text())["runs"]
    return run


@pytest.mark.sglang
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang: run `make test-sglang`")
@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_a_run_against_sglang_has_every_path(tmp_path: Path) -> None:
    run = compared("sglang", tmp_path)
    samples = {sample["path"]: sample for sample in run["samples"]}
    assert [*samples] == [*run["paths"]]
    weights = run["model_bytes"]
    # The trainer's two halves meet on both ranks, and all goes to both ranks of the engine.
    assert 2.9 * weights < samples["distributed"]["network_bytes"] < 3.5 * weights
    assert 0.9 * weights < samples["ours"]["network_bytes"] < 1.5 * weights
    assert samples["disk"]["file_bytes"]["read"] == 2 * weights
    assert weights < samples["disk"]["file_bytes"]["written"] < 1.1 * weights


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs Megatron")
@pytest.mark.skipif("MCORE_RESHARD_NEMO_RL" not in os.environ, reason="set MCORE_RESHARD_NEMO_RL to a checkout")
@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_a_run_against_nemo_rls_golden_counts_what_each_sends(tmp_path: Path) -> None:
    run = compared("nemo_rl", tmp_path)
    samples, weights = {sample["path"]: sample for sample in run["samples"]}, run["model_bytes"]
    assert 0.9 * weights < samples["ours"]["network_bytes"] < 0.6 * samples["golden"]["network_bytes"]


@pytest.mark.vllm
@pytest.mark.slow  # a whole vLLM
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: run `make test-vllm`")
@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_a_run_against_a_whole_vllm_has_both_paths(tmp_path: Path) -> None:
    run = compared("vllm", tmp_path)
    samples = {sample["path"]: sample for sample in run["samples"]}
    assert [*samples] == ["disk", "ours"]
    assert samples["disk"]["file_bytes"]["read"] == 2 * run["model_bytes"]
    assert 0.9 * run["model_bytes"] < samples["ours"]["network_bytes"] < 1.5 * run["model_bytes"]
    assert len(samples["ours"]["peak_extra_bytes"]["gen"]) == 2
