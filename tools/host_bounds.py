"""Refits between hosts of 8 GPUs beside the least time that any plan could take: by the plan's links, and simulated.

python tools/host_bounds.py --out tools/results/host-bounds.json     nine minutes, of which six are 1,024 to 512
python tools/host_bounds.py --out tools/results/host-bounds.json --only 32->128     replaces the rows of these cases

    links      the plan's busiest link at full bandwidth: what the plan itself costs
    gloo, auto the simulated rounds of these transports: what their order costs on top. `auto` takes nccl between
               hosts, also where replicas pass on
    nccl       the same of nccl alone, which has no pair of ranks on one GPU
    rail_share of the bytes by NIC, what leaves and enters by NICs of one number

`carriers` are refits in which engine ranks receive for others; of each the same without. `untuned` are refits that no
list had when relays were tuned, and of which `auto` or `nccl` takes long.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from bench.results import line_by_line  # noqa: E402

import mcore_reshard as mr  # noqa: E402
from mcore_reshard.planner.plan import make_plan  # noqa: E402
from mcore_reshard.planner.plan.least_time import LeastTime, least_time  # noqa: E402
from mcore_reshard.planner.plan.loads import busiest_link, rail_bytes  # noqa: E402
from mcore_reshard.planner.plan.locate import located  # noqa: E402
from mcore_reshard.planner.plan.plan import Plan  # noqa: E402
from mcore_reshard.planner.topology.topology import parse_topology  # noqa: E402
from mcore_reshard.simulate.simulate import simulate  # noqa: E402
from mcore_reshard.simulate.simulation import Simulation  # noqa: E402

CASES = ROOT / "tests" / "simulate" / "hosts.json"
TRANSPORTS = ("gloo", "auto")  # that run all cases; nccl takes no GPU twice
MACHINE = "h200-8"  # 50 GB/s each way for the NIC of a GPU, 400 GB/s for its NVLink


@dataclass(frozen=True)
class HostsCase:
    """A refit on hosts of 8 GPUs; `shared`: generation rank r is on the GPU of training rank r."""

    name: str
    config: str
    train: str
    gen: str
    shared: bool = False
    machine: str = MACHINE

    @cache  # noqa: B019  cases are few
    def plan(self) -> Plan:
        plan = mr.plan(self.config, train=self.train, gen=self.gen)
        machine = f"{self.machine},shared" if self.shared else self.machine
        return located(plan, parse_topology(machine, plan.train.world, plan.gen.world))

    @cache  # noqa: B019
    def least(self) -> LeastTime:
        return least_time(self.plan())

    def link_ratio(self) -> float:
        return busiest_link(self.plan()) / self.least().seconds

    def simulation(self, transport: str) -> Simulation:
        plan = self.plan()
        assert plan.topology is not None
        return simulate(plan, plan.topology, transport)


_V3_STAGES = "pp=8,layers=8+8+8+8+8+7+7+7"
_V3 = f"tp=8,ep=32,dp=4,{_V3_STAGES}"
CARRIERS = [
    HostsCase("DeepSeek-V3 256->128 tp32, racks", "deepseek-v3", _V3, "tp=32,dp=4", machine="gb200-nvl72"),
    HostsCase("the same, shared GPUs", "deepseek-v3", _V3, "tp=32,dp=4", shared=True, machine="gb200-nvl72"),
    HostsCase(
        "Qwen3-30B 32->12 tp4, 6 GPUs a host", "qwen3-30b-a3b", "tp=4,ep=8,dp=8", "tp=4,dp=3", machine="h200-8,gpus=6"
    ),
    HostsCase(
        "Llama-8B 16 GPUs shared, 2 a host",
        "llama-3.1-8b",
        "tp=4,dp=4",
        "tp=2,dp=8",
        shared=True,
        machine="h200-8,gpus=2",
    ),
]

UNTUNED = [
    HostsCase("Llama-8B 8->64 tp1", "llama-3.1-8b", "dp=8", "tp=1,dp=64"),
    HostsCase("Llama-8B 8->64 tp2", "llama-3.1-8b", "tp=2,dp=4", "tp=2,dp=32"),
    HostsCase("Qwen3-30B 8->64 tp4", "qwen3-30b-a3b", "tp=2,pp=2,ep=4,dp=2", "tp=4,dp=16"),
    HostsCase("Qwen3-30B 8->32 tp1", "qwen3-30b-a3b", "pp=2,ep=4,dp=4", "tp=1,dp=32"),
    HostsCase("gpt-oss-20b 8->32 tp1", "gpt-oss-20b", "ep=8,dp=8", "tp=1,dp=32"),
    HostsCase("gpt-oss-120b 32->32 tp2", "gpt-oss-120b", "tp=4,pp=2,ep=8,dp=4", "tp=2,dp=16"),
    HostsCase("DeepSeek-V3 128->64 tp16", "deepseek-v3", f"tp=4,ep=16,{_V3_STAGES},dp=4", "tp=16,dp=4"),
]


def all_cases() -> dict[str, HostsCase]:
    return {entry["name"]: HostsCase(**entry) for entry in json.loads(CASES.read_text())}


def busy_shares(outcome: Simulation) -> dict[str, float]:
    """Of the simulated time, how much the trainer's and the engine's GPUs have a message under way over a NIC: the mean."""
    messages = outcome.messages
    over_nic = messages.route == 2
    shares: dict[str, float] = {}
    for name, gpu in (("sending", messages.src_gpu), ("receiving", messages.dst_gpu)):
        seconds = []
        for each in np.unique(gpu[over_nic]).tolist():
            rows = over_nic & (gpu == each)
            start, end = messages.start_s[rows], np.maximum.accumulate(messages.end_s[rows])
            before = np.concatenate([[0.0], end[:-1]])
            seconds.append(float(np.maximum(end - np.maximum(start, before), 0.0).sum()))
        shares[name] = round(float(np.mean(seconds)) / outcome.seconds, 3) if seconds else 0.0
    return shares


def row_of(case: HostsCase) -> dict[str, Any]:
    plan, least = case.plan(), case.least()
    loads = plan.loads
    moved, rails = int(loads.received.sum()), rail_bytes(plan)
    row: dict[str, Any] = {
        "name": case.name,
        "train_ranks": plan.train.world,
        "gen_ranks": plan.gen.world,
        "hops": ["train", *plan.later_hops],
        "nic_share": round(float(loads.received[2].sum()) / moved, 4),
        "bound_seconds": {"nic_in": least.nic_in, "nic_out": least.nic_out, "gpu": least.gpu},
        "rail_share": round(rails.on_rail / rails.nbytes, 4) if rails.nbytes else None,
        "links": round(case.link_ratio(), 4),
    }
    for transport in (*TRANSPORTS, *([] if case.shared else ["nccl"])):
        started = time.perf_counter()
        outcome = case.simulation(transport)
        row[transport] = {
            "ratio": round(outcome.seconds / least.seconds, 4),
            "seconds": outcome.seconds,
            "messages": len(outcome.messages),
            "merged": outcome.merged,
            "busy": busy_shares(outcome),
            "simulation_seconds": round(time.perf_counter() - started, 1),
        }
    return row


def carriers_row(case: HostsCase) -> dict[str, Any]:
    row: dict[str, Any] = {"name": case.name, "machine": case.machine, "least_seconds": case.least().seconds}
    for name, patched in (("with", False), ("without", True)):
        each = replace(case, name=name)  # plans are kept by case
        with patch.object(make_plan, "carriers_for", lambda plan: ()) if patched else nullcontext():
            plan = each.plan()
        row[name] = {
            "carried_ranks": len(plan.carriers),
            "carriers": len(plan.carrier_ranks),
            "waves": plan.waves,
            "links": round(each.link_ratio(), 4),
            **{
                transport: round(each.simulation(transport).seconds / case.least().seconds, 4)
                for transport in TRANSPORTS
            },
        }
    return row


def untuned_row(case: HostsCase) -> dict[str, Any]:
    ratios = {
        transport: round(case.simulation(transport).seconds / case.least().seconds, 4)
        for transport in (*TRANSPORTS, "nccl")
    }
    row = {"name": case.name, "train": case.train, "gen": case.gen, "least_seconds": case.least().seconds}
    return {**row, "links": round(case.link_ratio(), 4), **ratios}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="a pattern of case names")
    args = parser.parse_args(argv)
    rows: dict[str, dict[str, Any]] = {}
    if args.only and args.out and args.out.exists():
        rows = {row["name"]: row for row in json.loads(args.out.read_text())["rows"]}
    for case in all_cases().values():
        if re.search(args.only, case.name):
            row = rows[case.name] = row_of(case)
            ratios = ", ".join(
                f"{transport} {row[transport]['ratio']:.2f}" for transport in (*TRANSPORTS, "nccl") if transport in row
            )
            print(f"{case.name}: links {row['links']:.3f}, {ratios}", flush=True)
    carriers = [carriers_row(case) for case in CARRIERS if re.search(args.only, case.name)]
    for row in carriers:
        print(
            f"{row['name']}: auto {row['without']['auto']:.2f} without carriers, {row['with']['auto']:.2f}", flush=True
        )
    untuned = [untuned_row(case) for case in UNTUNED if re.search(args.only, case.name)]
    for row in untuned:
        print(f"{row['name']}: auto {row['auto']:.2f}, nccl {row['nccl']:.2f}", flush=True)
    if args.only and args.out and args.out.exists():
        before = json.loads(args.out.read_text())
        carriers = _replaced(before.get("carriers", ()), carriers)
        untuned = _replaced(before.get("untuned", ()), untuned)
    result = {
        "what": "times of refits, divided by the least time that any plan could take; none was run",
        "machine": MACHINE,
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "rows": [*rows.values()],
        "carriers": carriers,
        "untuned": untuned,
    }
    if args.out:
        args.out.write_text(line_by_line(result, "rows", "carriers", "untuned"))
    return 0


def _replaced(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a file, with those of this run in their places."""
    return [*{row["name"]: row for row in (*before, *after)}.values()]


if __name__ == "__main__":
    sys.exit(main())
