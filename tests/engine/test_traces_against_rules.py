"""Rules and loaders, which share no code, say the same of every tensor of every rank, on every mesh of the support table.

The trainer's ranks are traced in worlds of which they are the only one, the engine's in one process; no weights are made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.validation_cases import DEFAULT, FAMILIES, FP8_DEFAULT, FP8_FULL, MESHES, arguments, in_blocks, standing

from mcore_reshard.planner.layout.mesh import parse_gen_mesh, parse_train_mesh
from mcore_reshard.planner.layout.strided import StridedCopy
from mcore_reshard.planner.layout.traces import RankTrace
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import World
from mcore_reshard.planner.plan.trace_check import _planned, checkpoint_of, trace_faults
from mcore_reshard.planning import plan as plan_refit
from mcore_reshard.planning import read_request, read_traced_request
from mcore_reshard.validation.offline_plan import plan_offline
from mcore_reshard.validation.processes import run_processes
from mcore_reshard.validation.tiny import tiny_config

ALL = [(family, mesh) for family in FAMILIES for mesh in MESHES if standing(family, mesh) in "TA"]
Case = tuple[str, str]


def plan_of(case: Case) -> tuple[dict[str, Any], Plan]:
    family, mesh = case
    train, gen, overrides = arguments(family, mesh)
    name = {"moonlight": "deepseek_v3_nolora"}.get(family, family.replace("-", "_"))
    config = tiny_config(name, **overrides)
    return config, plan_refit(config, train=train, gen=gen)


def faults_of_side(side: int, cases: Sequence[Case], folder: str) -> dict[Case, tuple[int, list[str]]]:
    """The number of tensors that were traced, and what they contradict, of each case; side 0 is the trainer's."""
    from mcore_reshard.validation.engine import vllm_engine
    from mcore_reshard.validation.offline_traces import trace_engine, trace_trainer
    from mcore_reshard.validation.trainer import build

    (build if side == 0 else vllm_engine).prepare()
    found = {}
    for number, case in enumerate(cases):
        for name in [name for name in os.environ if name.startswith("NVTE_")]:
            del os.environ[name]  # Megatron-Core sets them once in a process, and refuses others
        config, plan = plan_of(case)
        train, gen, _ = arguments(*case)
        place = Path(folder) / f"{side}-{number}"
        place.mkdir()
        (place / "config.json").write_text(json.dumps(config))
        trace = (
            partial(trace_trainer, str(place), parse_train_mesh(train))
            if side == 0
            else partial(trace_engine, "vllm", str(place), parse_gen_mesh(gen))
        )
        traces: tuple[RankTrace, ...] = trace(checkpoint_of(plan), lambda trace: trace)
        world = "train" if side == 0 else "gen"
        faults = [f for rank, each in enumerate(traces) for f in trace_faults(plan, world, rank, each)]
        found[case] = sum(len(each.tensors) for each in traces), faults
    return found


def check(cases: Sequence[Case], folder: Path) -> None:
    for found in run_processes(2, faults_of_side, (cases, str(folder)), timeout_s=3600):
        assert {case: faults for case, (_, faults) in found.items() if faults} == {}
        assert all(tensors for tensors, _ in found.values())


def test_loaders_place_every_tensor_as_the_rules_say(tmp_path: Path) -> None:
    check(DEFAULT[::4], tmp_path)


# Block FP8: (family, training mesh, generation mesh, what the trainer holds, blocks)
FP8_CASES = [
    ("qwen3-moe", "ep=2,dp=2", "tp=2", "fp8", (8, 8)),
    *FP8_DEFAULT,
    ("deepseek-v3", "tp=2", "tp=2", "bf16", (16, 16)),
]


def assert_same_plan(family: str, train: str, gen: str, dtype: str, block: tuple[int, int]) -> None:
    """Plans of an FP8 engine by rules and from traces have the same tensors, scales too, and the same misc parameters."""
    arguments = in_blocks(family, block), train, gen, "exact", dtype, "fp8"
    by_rules, from_traces = read_request(*arguments).plan(), plan_offline(read_traced_request(*arguments))[0]
    assert from_traces.prove()
    for world in ("train", "gen"):
        for rank in range(getattr(by_rules, world).world):
            assert planned_copies(from_traces, world, rank) == planned_copies(by_rules, world, rank)
    assert {*from_traces.misc_names} == {*by_rules.misc_names}
    assert len(from_traces.pairs) == len(by_rules.pairs) > 0


def planned_copies(plan: Plan, world: World, rank: int) -> dict[str, dict[str, frozenset[StridedCopy]]]:
    planned, _ = _planned(plan, world, rank)
    return {tensor: {name: frozenset(copies) for name, copies in of.items()} for tensor, of in planned.items()}


def test_traces_of_an_fp8_engine_make_the_plan_of_the_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert_same_plan(*FP8_CASES[0])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "train", "gen", "dtype", "block"), [*FP8_CASES[1:], *FP8_FULL])
def test_traces_of_an_fp8_engine_make_the_plan_of_the_rules_everywhere(
    family: str,
    train: str,
    gen: str,
    dtype: str,
    block: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert_same_plan(family, train, gen, dtype, block)


@pytest.mark.slow
def test_loaders_place_every_tensor_as_the_rules_say_on_all_meshes(tmp_path: Path) -> None:
    check(ALL, tmp_path)
