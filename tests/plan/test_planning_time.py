"""Planning for known hosts stays fast: CPU seconds with a wide margin, which planner.json has without it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import mcore_reshard as mr
from mcore_reshard.kernels.transports.memory import session_memory
from mcore_reshard.planner.plan.locate import located
from mcore_reshard.planner.topology.topology import parse_topology
from mcore_reshard.simulate.simulate import simulate

RESULTS = Path(__file__).parents[2] / "tools" / "results" / "planner.json"
LAYERS = {8: "8+8+8+8+8+7+7+7", 16: "4+4+4+4+4+4+4+4+4+4+4+4+4+3+3+3"}
MARGIN = 3.0  # cores that others use as well take this much longer


def spent(train: str, gen: str, machine: str = "h200-8", *, sees: bool = False) -> float:
    """CPU seconds to plan DeepSeek-V3 for known hosts; if it `sees`, also to simulate it and to count memory."""
    started = time.process_time()
    plan = mr.plan("deepseek-v3", train=train, gen=gen)
    topology = parse_topology(machine, plan.train.world, plan.gen.world)
    plan = located(plan, topology)
    if sees:
        simulate(plan, topology)
        session_memory(plan, transports=("auto",))
    return time.process_time() - started


@pytest.mark.long
@pytest.mark.parametrize("gen", ["tp=32,dp=4", "tp=4,dp=32,ep=128"])
def test_256_ranks_to_128_are_planned_for_their_hosts_within_a_second(gen: str) -> None:
    assert spent(f"tp=8,pp=8,ep=32,dp=4,layers={LAYERS[8]}", gen) < 1.0 * MARGIN


@pytest.mark.long
@pytest.mark.parametrize("machine", ["h200-8", "h200-8,shared", "gb200-nvl72"])
def test_2048_ranks_to_1024_are_planned_for_their_hosts_within_five_seconds(machine: str) -> None:
    assert spent(f"tp=8,pp=16,ep=64,dp=16,layers={LAYERS[16]}", "tp=32,dp=32", machine) < 5.0 * MARGIN


@pytest.mark.slow
def test_256_ranks_to_128_are_simulated_within_ten_seconds() -> None:
    assert spent(f"tp=8,pp=8,ep=32,dp=4,layers={LAYERS[8]}", "tp=32,dp=4", sees=True) < 10.0 * MARGIN


def test_the_recorded_seconds_keep_the_goals() -> None:
    cases = json.loads(RESULTS.read_text())["on_hosts"]["cases"]
    seconds = {(case["train_ranks"], case["gen"]): case["cpu_seconds"] for case in cases}
    assert max(of_case["plan"] for (ranks, _), of_case in seconds.items() if ranks == 256) < 1.0
    assert seconds[2048, "tp=32,dp=32"]["plan"] < 5.0
    assert max(sum(of_case.values()) for (ranks, _), of_case in seconds.items() if ranks == 256) < 10.0
