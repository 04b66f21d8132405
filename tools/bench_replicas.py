"""Measure what a change of replicas costs the others: one leaves, then another one joins, between refits.

    python tools/bench_replicas.py --out tools/results/replicas-x1.json                     # one GPU, by `direct`
    python tools/bench_replicas.py --device cpu --transport gloo --narrow 56 --out FILE     # no GPU: few bytes

Two trainers serve three replicas of one rank. The model is that of bench_prepare.py: DeepSeek-V3 cut so that a replica has
the tensors and transfers of a real rank of tp=32. `--narrow` divides the width of rows, as four engines share the GPU.

    refits 1, 2   replicas 0 1 2      the second one has nothing to connect
    refit 3       replicas 0 1        replica 2 has left: the others connect again
    refits 4, 5   replicas 0 1 3      replica 3 is a new process: the others connect again, once

Seconds are those of whole refits, and of their phases on the slowest trainer and on the slower of replicas 0 and 1.
`counts` are what these ranks had made, and found kept, after each refit. A second session keeps nothing: it binds, exports
and maps everything again for each change.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

# Counting GPUs through the driver would spoil this process for forking.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.transports.kept import Kept
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import World
from mcore_reshard.planning import plan as make_plan
from mcore_reshard.session.attendance import WAITS, ready_key
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint
from mcore_reshard.session.part import RankOfPlan
from mcore_reshard.session.plan_exchange import publish_plan
from mcore_reshard.session.store_server import serve_store
from mcore_reshard.validation.processes import run_processes

sys.path.insert(0, str(Path(__file__).parent))
import synthetic
from bench import machine
from bench_prepare import MODEL, PARTS, RESULTS, SHARE, cut_config, rounded, share_of, timed_phases

TRAINERS, REPLICAS = 2, 3
LEAVES, JOINS = 2, 3  # replicas
REFITS = {1: "first", 2: "nothing changed", 3: "a replica has left", 4: "a replica has joined", 5: "nothing changed"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One session, as all of its processes know it."""

    config: Mapping[str, Any]
    model: str
    train: str
    options: Options
    device: str
    address: str
    together: Any  # a barrier of all processes
    keeps: bool  # whether connections keep what has not changed

    def plan(self) -> Plan:
        return make_plan(self.config, self.train, f"tp=1,dp={REPLICAS}", model=self.model)

    def meet(self) -> None:
        self.together.wait(self.options.timeout_s)


def run_rank(number: int, setting: Setting) -> dict[str, Any]:
    """One process: a trainer, a replica that stays, the one that leaves, or the one that joins."""
    world: World = "train" if number < TRAINERS else "gen"
    rank = number if world == "train" else number - TRAINERS
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if setting.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    plan = setting.plan()
    part = RankOfPlan(plan, world, rank)
    replicas = range(REPLICAS) if rank != JOINS or world == "train" else (0, 1, JOINS)
    schedule = part.schedule(replicas)
    tensors = synthetic.allocate(schedule, device)
    if world == "train":
        synthetic.fill(plan, world, rank, tensors)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    if number == 0:
        publish_plan(plan, setting.address, setting.options)
    if not setting.keeps:
        keep_nothing()
    setting.meet()
    kind = TrainEndpoint if world == "train" else GenerationEndpoint
    endpoint = kind(part, tensors, store=setting.address, options=setting.options)
    refits: dict[int, dict[str, Any]] = {}
    here = world == "train" or rank != JOINS
    with timed_phases(endpoint._record, setting.options.transport):
        if here:
            endpoint.prepare()
        for version in REFITS:
            setting.meet()
            if version == 3 and world == "gen" and rank == LEAVES:
                endpoint.close()
                here = False
            if version == 4 and world == "gen" and rank == JOINS:
                endpoint.prepare()
                here = True
            setting.meet()
            if version == 4 and here and rank != JOINS:
                await_newcomer(endpoint, setting.options.timeout_s)
            if here:
                refits[version] = timed_refit(endpoint, version)
    setting.meet()
    endpoint.close()
    if rank == JOINS and (wrong := synthetic.wrong_elements(plan, world, 0, tensors)):
        raise SystemExit(f"{len(wrong)} parameters are wrong: {next(iter(wrong.items()))}")
    return {"world": world, "rank": rank, **share_of(schedule), "refits": refits}


def await_newcomer(endpoint: TrainEndpoint | GenerationEndpoint, timeout_s: float) -> None:
    """Wait until the replica that joins waits for a refit: none waits for a new replica before."""
    store, deadline = endpoint._store, monotonic() + timeout_s
    assert store is not None
    key = ready_key(f"gen:{JOINS}")
    while not (store.check([key]) and store.get(key).decode().endswith(WAITS)):
        if monotonic() > deadline:
            raise SystemExit(f"gen:{JOINS} waited for no refit within {timeout_s:g} s")
        sleep(0.005)


def keep_nothing() -> None:
    """Have this process bind, export and map everything again for each connection."""
    meet = Kept.meet

    def forget(kept: Kept, processes: Mapping[str, Any]) -> None:
        kept.close()
        meet(kept, processes)

    Kept.meet = forget  # type: ignore[method-assign, assignment]
    BoundSchedule.again = lambda *_: None  # type: ignore[method-assign, assignment]


def timed_refit(endpoint: TrainEndpoint | GenerationEndpoint, version: int) -> dict[str, Any]:
    start = perf_counter()
    endpoint.refit(version)
    return {
        "refit_s": perf_counter() - start,
        "phases": dict(endpoint._record._own_seconds),
        "counts": dict(endpoint._kept.counts),
    }


def measure(arguments: argparse.Namespace, *, keeps: bool) -> dict[str, Any]:
    """One session in fresh processes."""
    processes = TRAINERS + REPLICAS + 1
    options = Options(session="replicas", transport=arguments.transport, timeout_s=arguments.timeout_s)
    with serve_store() as store:
        together = multiprocessing.get_context("fork").Barrier(processes)
        config = cut_config(arguments.model, arguments.parts, arguments.narrow)
        setting = Setting(
            config, arguments.model, arguments.train, options, arguments.device, store.address, together, keeps
        )
        told = run_processes(processes, run_rank, (setting,), timeout_s=5 * arguments.timeout_s)
    stay = {
        "train": [each for each in told if each["world"] == "train"],
        "gen": [each for each in told if each["world"] == "gen" and each["rank"] not in (LEAVES, JOINS)],
    }
    refits = []
    for version, what in REFITS.items():
        of_side = {world: [each["refits"][version] for each in side] for world, side in stay.items()}
        slowest = {world: max(side, key=lambda each: sum(each["phases"].values())) for world, side in of_side.items()}
        refits.append(
            {
                "what": what,
                "refit_s": max(each["refit_s"] for side in of_side.values() for each in side),
                "phases": {world: each["phases"] for world, each in slowest.items()},
                "counts": {world: each["counts"] for world, each in slowest.items()},
            }
        )
    return {
        "keeps": keeps,
        "shares": {world: {key: side[0][key] for key in SHARE} for world, side in stay.items()},
        "refits": refits,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--transport", default="direct")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--train", default="ep=2,dp=2", help=f"the mesh of the {TRAINERS} trainers")
    parser.add_argument("--parts", type=int, default=PARTS, help="the engine's tensor parallelism that is cut out")
    parser.add_argument("--narrow", type=int, default=4, help="divide the width of rows: same tensors, fewer bytes")
    parser.add_argument("--timeout-s", type=float, default=100.0)
    parser.add_argument("--out", type=Path, default=RESULTS / "replicas-x1.json")
    arguments = parser.parse_args(argv)
    gpu = machine.gpus()[0] if arguments.device == "cuda" else None
    document: dict[str, Any] = {
        "command": machine.command("bench_replicas.py", sys.argv[1:] if argv is None else argv),
        "date": date.today().isoformat(),
        "hardware": f"1 x {gpu[0]}" if gpu else f"a {platform.machine()} CPU",
        **({"driver": gpu[1]} if gpu else {}),
        "cores": len(os.sched_getaffinity(0)),
        "versions": machine.versions("cuda-core"),
        "model": arguments.model,
        "transport": arguments.transport,
        "parts": arguments.parts,
        "narrow": arguments.narrow,
        "train": arguments.train,
        "gen": f"tp=1,dp={REPLICAS}",
        "sessions": [measure(arguments, keeps=keeps) for keeps in (True, False)],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(rounded(document), indent=1) + "\n")
    for session in document["sessions"]:
        print("keeps" if session["keeps"] else "keeps nothing")
        for refit in session["refits"]:
            print(f"  {refit['what']:22} {refit['refit_s']:.3f} s", json.dumps(rounded(refit["phases"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
