"""Refits between "hosts" on one machine, over gloo: bytes of each link beside the plan's, seconds beside simulated.

python tools/shaped_hosts.py --out tools/results/shaped-hosts.json     needs root, ip and tc; four minutes

Each GPU is a network namespace, see `namespaces`. The first case calibrates one number: the bandwidth that payload
reaches on a NIC. All cases are then predicted with it. Every element is checked. The kernel counts the bytes of every
link, with headers, acknowledgements, and what ranks say to each other.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import re
import resource
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests")]

import namespaces  # noqa: E402
import synthetic  # noqa: E402
import torch  # noqa: E402
from bench.results import line_by_line  # noqa: E402
from helpers.plans import Case  # noqa: E402

from mcore_reshard.kernels.options import Options  # noqa: E402
from mcore_reshard.planner.plan.make_schedule import schedule_of  # noqa: E402
from mcore_reshard.planner.plan.plan import Plan  # noqa: E402
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint  # noqa: E402
from mcore_reshard.simulate.simulate import simulate  # noqa: E402

REFITS = 5  # measured, after one that warms up
# Of the bytes of both directions: 66 for each packet. It has up to 64 KiB until it leaves the machine; 4 KiB were seen.
HEADERS = 0.016
TALK = 100_000  # bytes of a refit: words at the store, and between ranks
BUSY = 0.2  # share of the machine's cores that other processes took, from which a measurement is in doubt
OPTIONS = Options(transport="gloo", session="hosts", bucket_bytes=1 << 20, timeout_s=120.0, source_checks="off")
_LONGEST_S = 300.0  # of a case
_PORT = 29600
_MODEL = (
    ("hidden_size", 768), ("intermediate_size", 2048), ("num_hidden_layers", 6), ("vocab_size", 8192),
    ("num_attention_heads", 16), ("num_key_value_heads", 8), ("head_dim", 48),
)  # fmt: skip
_LINKS = ",nic=0.015,nvlink=0.4,memory=0.8"  # GB/s; so slow that two cores keep up


def _case(train: str, gen: str, machine: str, hosts: str = "") -> Case:
    return Case("tiny-qwen3", train, gen, changes=_MODEL, machine=machine + _LINKS, hosts=hosts)


CASES = {
    "2 hosts to 4": _case("tp=2", "tp=4", "h200-8,gpus=1"),
    "4 hosts to 4": _case("tp=4", "tp=4", "h200-8,gpus=1"),
    "4 stages": _case("pp=4,layers=2+2+1+1", "tp=4", "h200-8,gpus=1"),
    "2 stages, 2 to a host": _case("tp=2,pp=2", "tp=4", "h200-8,gpus=2"),
    "4 replicas, 2 to a host": _case("tp=2,dp=2", "tp=1,dp=4", "h200-8,gpus=2"),
    "relay, 3 hosts": _case("tp=2", "tp=2,dp=3", "h200-8,gpus=2"),
    "relay, 6 replicas on 3 hosts": _case("tp=2", "tp=1,dp=6", "h200-8,gpus=2"),
    "shared GPUs": _case("tp=4", "tp=2,dp=2", "h200-8,gpus=2,shared"),
    "shared host": _case("tp=2,dp=2", "tp=2,dp=3", "h200-8,gpus=4", "train=a*2+b*2,gen=a*2@2+c*2+c*2@2"),
}


def rank(case: Case, name: str, refits: int) -> dict[str, Any]:
    """One rank, in its namespace: seconds of each refit, and by how much the counters of its GPU grew."""
    torch.set_num_threads(1)
    plan, (world, number) = case.plan(), name.split(":")
    schedule = schedule_of(plan, "train" if world == "train" else "gen", int(number))
    tensors = synthetic.allocate(schedule, torch.device("cpu"))
    if world == "train":
        synthetic.fill(plan, "train", int(number), tensors)
    endpoint = (TrainEndpoint if world == "train" else GenerationEndpoint)(
        schedule, tensors, store=f"{namespaces.STORE_ADDRESS}:{_PORT}", options=OPTIONS
    )
    endpoint.prepare()
    seconds: list[float] = []
    grown: list[dict[str, list[int]]] = []
    for version in range(1, refits + 2):
        time.sleep(0.2)  # all have read their counters
        before, started = namespaces.counters(), time.perf_counter()
        endpoint.refit(version)
        seconds.append(time.perf_counter() - started)
        time.sleep(0.2)  # what is on its way
        after = namespaces.counters()
        grown.append({link: [after[link][end] - before[link][end] for end in (0, 1)] for link in after})
    wrong = {} if world == "train" else synthetic.wrong_elements(plan, "gen", int(number), tensors)
    endpoint.close()
    return {"seconds": seconds[1:], "links": grown[1:], "wrong": len(wrong)}


def _in_namespace(namespace: str, pipe: Any, *work: Any) -> None:
    warnings.filterwarnings("ignore", "this session has no token")
    try:
        namespaces.enter(namespace)
        pipe.send(rank(*work))
    except BaseException:
        pipe.send(f"{work[1]} failed:\n{traceback.format_exc()[-2000:]}")


def run(case: Case, refits: int) -> list[dict[str, Any]]:
    """What every rank measured, training ranks first. Raises RuntimeError with the traceback of a rank that failed."""
    topology = case.plan().topology
    assert topology is not None
    ranks = [(f"train:{rank}", gpu) for rank, gpu in enumerate(topology.gpus("train").tolist())]
    ranks += [(f"gen:{rank}", gpu) for rank, gpu in enumerate(topology.gpus("gen").tolist())]
    host_of = [gpu // topology.machine.gpus for gpu in range(1 + max(gpu for _, gpu in ranks))]
    forks = multiprocessing.get_context("fork")  # torch has been imported, and no thread runs
    here = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    with namespaces.gpu_namespaces(host_of, topology.machine.nic * 8 / 1e6) as names:
        command = ["-m", "mcore_reshard", "store", "--host", namespaces.STORE_ADDRESS, "--port", str(_PORT)]
        store = subprocess.Popen(
            ["ip", "netns", "exec", namespaces.SWITCH, sys.executable, *command], env=here, stdout=subprocess.DEVNULL
        )
        started: list[tuple[Any, Any]] = []
        try:
            for name, gpu in ranks:
                pipe, own = forks.Pipe()
                process = forks.Process(target=_in_namespace, args=(names[gpu], own, case, name, refits), daemon=True)
                process.start()
                started.append((process, pipe))
            answers: list[Any] = [pipe.recv() if pipe.poll(_LONGEST_S) else "no answer" for _, pipe in started]
            if failed := [answer for answer in answers if isinstance(answer, str)]:
                raise RuntimeError("\n".join(failed))
            return answers
        finally:
            for process, _ in started:
                process.kill()
                process.join()
            store.terminate()
            store.wait()


def planned_bytes(plan: Plan) -> dict[str, list[tuple[int, int]]]:
    """What the plan says goes out of and into every GPU, by interface."""
    topology, loads = plan.topology, plan.loads
    assert topology is not None
    train, gen = topology.gpus("train"), topology.gpus("gen")
    planned: dict[str, list[tuple[int, int]]] = {}
    for link, interface in enumerate(namespaces.INTERFACES):
        out, into = np.zeros((2, 1 + max(train.max(), gen.max())), np.int64)
        np.add.at(out, train, loads.sent[link])
        np.add.at(out, gen, loads.passed_on[link])
        np.add.at(into, gen, loads.received[link])
        planned[interface] = [*zip(out.tolist(), into.tolist(), strict=True)]
    return planned


def measure(name: str, case: Case, refits: int) -> dict[str, Any]:
    """A row: seconds of each refit, and of every link in use the bytes out of and into its GPU, planned and counted."""
    plan = case.plan()
    before, started = _user_seconds(), time.perf_counter()
    answers = run(case, refits)
    busy, own = (after - at for after, at in zip(_user_seconds(), before, strict=True))
    cores_s = (time.perf_counter() - started) * (os.cpu_count() or 1)
    if any(answer["wrong"] for answer in answers):
        raise RuntimeError(f"{name}: wrong elements arrived")
    topology = plan.topology
    assert topology is not None
    gpus = [*topology.gpus("train").tolist(), *topology.gpus("gen").tolist()]
    links = []
    for interface, of_gpus in planned_bytes(plan).items():
        for gpu in sorted(set(gpus)):
            grown = [each[interface] for each in answers[gpus.index(gpu)]["links"]]
            counted = [int(median(each[end] for each in grown)) for end in (0, 1)]
            if any(counted):
                links.append({"gpu": gpu, "link": interface, "planned": of_gpus[gpu], "counted": counted})
    of_refit = zip(*(answer["seconds"] for answer in answers), strict=True)
    return {
        "case": name,
        "train": case.train,
        "gen": case.gen,
        "hosts": len({gpu // topology.machine.gpus for gpu in gpus}),
        "gpus": len(set(gpus)),
        "hops": ["train", *plan.later_hops],
        "model_bytes": plan.bulk_bytes,
        "seconds": [round(max(each), 4) for each in of_refit],
        "others": round(max(0.0, busy - own) / cores_s, 3),
        "links": links,
    }


def unplanned(row: Mapping[str, Any]) -> list[str]:
    """The links of a row that carried less than the plan says, or more than that with headers and words."""
    problems = []
    for link in row["links"]:
        slack = HEADERS * sum(link["planned"]) + TALK
        for direction, planned, counted in zip(("out of", "into"), link["planned"], link["counted"], strict=True):
            if not planned <= counted <= planned + slack:
                problems.append(
                    f"{counted:,} bytes {direction} {link['link']} of GPU {link['gpu']}, planned {planned:,}"
                )
    return problems


def _user_seconds() -> tuple[float, float]:
    """Seconds of all processes outside of the kernel so far: of the machine, and of this process and its children."""
    user, nice = Path("/proc/stat").read_text().split()[1:3]
    own = sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return (int(user) + int(nice)) / os.sysconf("SC_CLK_TCK"), own


def predicted(plan: Plan, nic: float) -> float:
    """Simulated seconds if payload reaches `nic` bytes per second."""
    assert plan.topology is not None
    machine = replace(plan.topology.machine, nic=round(nic))
    return simulate(plan, replace(plan.topology, machine=machine), "gloo", options=OPTIONS).seconds


def calibrated(plan: Plan, seconds: float) -> float:
    """The bandwidth of a NIC at which the simulation takes so long. Where NICs alone count, time is inverse to it."""
    assert plan.topology is not None
    nic = plan.topology.machine.nic
    return predicted(plan, nic) * nic / seconds


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="a pattern of case names; the first case calibrates nevertheless")
    parser.add_argument("--refits", type=int, default=REFITS)
    args = parser.parse_args(argv)
    if reason := namespaces.unavailable_reason():
        print(reason, file=sys.stderr)
        return 1
    rows: list[dict[str, Any]] = []
    nic = 0.0
    for name, case in CASES.items():
        if rows and args.only and not re.search(args.only, name):
            continue
        row, plan = measure(name, case, args.refits), case.plan()
        measured = median(row["seconds"])
        nic = nic or calibrated(plan, measured)
        row["predicted"] = round(predicted(plan, nic), 4)
        row["calibrates"] = not rows
        rows.append(row)
        for problem in unplanned(row):
            print(f"{name}: {problem}", file=sys.stderr)
        warning = f"; other processes took {row['others']:.0%} of the cores" if row["others"] > BUSY else ""
        print(f"{name}: measured {measured:.2f} s, predicted {row['predicted']:.2f} s{warning}", flush=True)
    first = next(iter(CASES.values())).plan().topology
    assert first is not None
    result = {
        "what": "refits over gloo between network namespaces whose NICs are shaped",
        "date": date.today().isoformat(),
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nic_bytes_per_s": first.machine.nic,
        "calibrated_bytes_per_s": round(nic),
        "bucket_bytes": OPTIONS.bucket_bytes,
        "rows": rows,
    }
    if args.out:
        args.out.write_text(line_by_line(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
