"""Measure planning: time and memory for DeepSeek-V3, and how both grow with ranks. One core, no GPU.

Each case runs in a fresh process, so that its peak memory is its own. Results go to tools/results/planner.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "planner.json"
MODEL = "deepseek-v3"
REPEATS = 5
# Training ranks -> generation ranks; the second is the case the README and docs/performance.md quote.
CASES = [
    ("tp=2,pp=1,ep=32,dp=16", "tp=16,dp=1"),
    ("tp=8,pp=8,ep=32,etp=1,dp=4,layers=8+8+8+8+8+7+7+7", "tp=32,dp=4"),
    ("tp=4,pp=4,ep=16,dp=4,layers=16+15+15+15", "tp=16,dp=2"),
    ("tp=8,pp=8,ep=64,dp=8,layers=8+8+8+8+8+7+7+7", "tp=32,dp=8"),
    ("tp=8,pp=16,ep=64,dp=8,layers=4+4+4+4+4+4+4+4+4+4+4+4+4+3+3+3", "tp=32,dp=16"),
    ("tp=8,pp=16,ep=64,dp=16,layers=4+4+4+4+4+4+4+4+4+4+4+4+4+3+3+3", "tp=32,dp=32"),
    ("tp=8,pp=8,ep=32,dp=4,layers=8+8+8+8+8+7+7+7", "tp=4,dp=32,ep=128"),
]


# Planned again for hosts of h200-8, and simulated with the extra memory of each rank, as `mcore-reshard simulate` does.
LOCATED = [CASES[1], CASES[6]]
PLANNED_FOR_HOSTS = [*LOCATED, ("tp=8,pp=16,ep=64,dp=16,layers=4+4+4+4+4+4+4+4+4+4+4+4+4+3+3+3", "tp=32,dp=32")]


def measure_located(train_text: str, gen_text: str) -> dict[str, object]:
    """CPU seconds, for a case on known hosts: to plan, and for smaller ones to simulate and to count memory."""
    import mcore_reshard as mr
    from mcore_reshard.kernels.transports.memory import session_memory
    from mcore_reshard.planner.plan.locate import located
    from mcore_reshard.planner.topology.topology import parse_topology
    from mcore_reshard.simulate.simulate import simulate

    plan = mr.plan(MODEL, train=train_text, gen=gen_text)
    topology = parse_topology("h200-8", plan.train.world, plan.gen.world)
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        started = time.process_time()
        result = work()
        seconds[name] = round(time.process_time() - started, 3)
        return result

    for_hosts = timed("plan", lambda: located(plan, topology))
    if (train_text, gen_text) in LOCATED:
        timed("simulate", lambda: simulate(for_hosts, topology))
        timed("memory", lambda: session_memory(for_hosts, transports=("auto",)))
    worlds = {"train_ranks": plan.train.world, "gen_ranks": plan.gen.world}
    return {"model": MODEL, "train": train_text, "gen": gen_text, **worlds, "cpu_seconds": seconds}


def measure(train_text: str, gen_text: str) -> dict[str, object]:
    """Plan, prove and expand one rank of each world, timed apart; seconds are medians."""
    from mcore_reshard.planner.layout.mesh import parse_gen_mesh, parse_train_mesh
    from mcore_reshard.planner.model.configs import load_config
    from mcore_reshard.planner.model.families import parameters_from_config
    from mcore_reshard.planner.plan.make_plan import make_plan
    from mcore_reshard.planner.plan.make_schedule import schedule_of
    from mcore_reshard.planner.plan.plan_file import dump_plan
    from mcore_reshard.planner.proof.prove import prove

    train, gen = parse_train_mesh(train_text), parse_gen_mesh(gen_text)
    config = load_config(MODEL)
    seconds: dict[str, list[float]] = {"plan": [], "proof": [], "train_schedule": [], "gen_schedule": []}
    for _ in range(REPEATS):
        started = time.perf_counter()
        plan = make_plan(parameters_from_config(config), train, gen, model=MODEL)
        seconds["plan"].append(time.perf_counter() - started)
        started = time.perf_counter()
        proof = prove(plan)
        seconds["proof"].append(time.perf_counter() - started)
        for world, rank in (("train", train.world - 1), ("gen", gen.world - 1)):
            started = time.perf_counter()
            schedule_of(plan, world, rank)  # type: ignore[arg-type]
            seconds[f"{world}_schedule"].append(time.perf_counter() - started)
        if not proof.ok:
            raise SystemExit(f"plan of {train_text} -> {gen_text} is not sound: {proof.violations[:3]}")
    return {
        "model": MODEL,
        "train": train_text,
        "gen": gen_text,
        "train_ranks": train.world,
        "gen_ranks": gen.world,
        "parameters": sum(group.count for group in plan.groups),
        "transfers": sum(transfers for _, transfers, _ in plan.stage_totals),
        "transfer_groups": len(plan.transfer_groups),
        "patterns": len(plan.patterns),
        "plan_file_bytes": len(dump_plan(plan)),
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)  # one case, in this process
    parser.add_argument("--located", action="store_true", help="only the cases on known hosts; keep the others")
    arguments = parser.parse_args()
    if arguments.case and arguments.located:
        print(json.dumps(measure_located(*arguments.case)))
        return
    if arguments.case:
        print(json.dumps(measure(*arguments.case)))
        return
    rows = []
    for case in () if arguments.located else CASES:
        row = _in_a_process("--case", *case)
        rows.append(row)
        seconds = row["seconds"]
        print(
            f"{row['train_ranks']:5} -> {row['gen_ranks']:5} ranks  {row['transfers']:10} transfers  plan {seconds['plan']:.3f} s"
            f"  proof {seconds['proof']:.3f} s  schedule {seconds['train_schedule']:.3f} / {seconds['gen_schedule']:.3f} s"
            f"  {row['peak_rss_mb']:.0f} MB  file {row['plan_file_bytes'] / 1e3:.0f} kB"
        )
    located_rows = []
    for case in PLANNED_FOR_HOSTS:
        located_rows.append(_in_a_process("--located", "--case", *case))
        print(f"on hosts: {located_rows[-1]}")
    RESULTS.parent.mkdir(exist_ok=True)
    on_hosts = {"on_hosts": {"date": date.today().isoformat(), "machine": "h200-8", "cases": located_rows}}
    if arguments.located:
        RESULTS.write_text(json.dumps({**json.loads(RESULTS.read_text()), **on_hosts}, indent=2) + "\n")
        return
    document = {
        "what": "planning, proof and one rank's schedule; medians of 5, one process a case, one thread",
        "date": date.today().isoformat(),
        "cpu": _cpu(),
        "python": platform.python_version(),
        "numpy": __import__("numpy").__version__,
        "cases": rows,
        **on_hosts,
    }
    RESULTS.write_text(json.dumps(document, indent=2) + "\n")
    print(f"wrote {RESULTS.relative_to(Path.cwd()) if RESULTS.is_relative_to(Path.cwd()) else RESULTS}")


def _in_a_process(*arguments: str) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, __file__, *arguments],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    row: dict[str, Any] = json.loads(run.stdout)
    return row


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
