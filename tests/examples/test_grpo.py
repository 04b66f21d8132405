"""examples/grpo_megatron_vllm on a CPU: its Megatron-Core policy and its refits; the engine is a plain Qwen3 in vLLM's layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "grpo_megatron_vllm"
sys.path.append(str(EXAMPLE))
STEPS, LIMIT_S = 6, 240

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra `megatron`"),
]


def started(out: Path, *options: str) -> subprocess.Popen[bytes]:
    here = Path(__file__).parent
    command = [
        sys.executable,
        str(here / "grpo_on_cpu.py"),
        "--device",
        "cpu",
        "--transport",
        "gloo",
        "--steps",
        str(STEPS),
    ]
    command += ["--engine", str(here / "engine_on_cpu.py"), "--out", str(out), *options]
    path = os.pathsep.join([str(ROOT), str(EXAMPLE)])
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})


def curve(process: subprocess.Popen[bytes], out: Path) -> dict[str, Any]:
    try:
        assert process.wait(LIMIT_S) == 0
    finally:
        process.terminate()
    return json.loads(out.read_text())


@pytest.mark.slow
def test_the_engine_answers_as_the_policy_does_only_with_every_tensor_of_every_refit(tmp_path: Path) -> None:
    """The difference of their log-probabilities, step by step; an engine that is killed and started again changes nothing."""
    arms = {"on": ["--restart-at", "4"], "off": ["--refits", "off"], "all-but-one": ["--refits", "all-but-one"]}
    files = {arm: tmp_path / f"{arm}.json" for arm in arms}
    processes = {arm: started(files[arm], *options) for arm, options in arms.items()}
    curves = {arm: curve(process, files[arm]) for arm, process in processes.items()}
    assert max(curves["on"]["difference"]) < 0.01
    for arm in ("off", "all-but-one"):
        assert curves[arm]["difference"][0] < 0.01  # the first refit is whole
        assert curves[arm]["difference"][-1] > 5 * max(curves["on"]["difference"])
    assert len(curves["on"]["reward"]) == STEPS


def run_of(refits: str, reward: float, **more: Any) -> dict[str, Any]:
    return {"refits": refits, "seed": 0, "place": "two GPUs", "reward": [0.0] * 30 + [reward] * 20, **more}


def test_the_verdict_names_every_run_on_the_wrong_side_of_its_threshold() -> None:
    import ablation

    good = [run_of("on", 0.95), run_of("off", 0.1), run_of("all-but-one", 0.5), run_of("on", 0.93, place="one GPU")]
    assert ablation.problems(good) == []
    bad = [run_of("on", 0.79), run_of("off", 0.7), run_of("on", 0.45, restart_at=75)]
    assert ablation.problems(bad) == [
        "two GPUs, refits on, seed 0: ends at 0.79, wants 0.8",
        "two GPUs, refits off, seed 0: ends at 0.70, with all refits at 0.79",
        "two GPUs, refits on, seed 0, restarted: ends at 0.45, wants 0.8",
    ]
    died = [{"refits": "on", "seed": 0, "place": "two GPUs", "error": "ended with 1"}, run_of("off", 0.1)]
    assert ablation.problems(died) == ["two GPUs, refits on, seed 0: ended with 1"]


def test_only_the_digits_backwards_are_worth_a_reward() -> None:
    import task
    import torch

    asked = task.prompts(3, torch.Generator().manual_seed(1))
    assert asked.shape == (3, task.PROMPT_TOKENS)
    backwards = asked[:, : task.DIGITS].flip(1)
    assert task.rewards(asked, backwards).mean() == 1
    wrong = backwards.clone()
    wrong[0, 0] += 1
    assert task.rewards(asked, wrong).sum() == 3 * task.ANSWER_TOKENS - 1
