"""Measure refits side by side: the links' limits, our transports, golden and other stacks, on the same weights.

    python tools/bench_refit.py --nemo-rl ~/RL                              # every workload and method, all GPUs
    python tools/bench_refit.py --colocated --methods direct                # trainer and engine share every GPU
    python tools/bench_refit.py --as-hosts --methods nccl                   # planned as if every GPU were a host
    python tools/bench_refit.py --isolated --methods copy-engine direct     # all GPUs visible, and one to each process
    python tools/bench_refit.py --workloads moe-ep-tp --methods direct:ctas=16 direct:ctas=64 direct:tile_kib=64
    python tools/bench_refit.py --device cpu --ranks 4 --moe tiny-qwen3-moe --dense tiny-qwen3 --methods gloo golden

Weights are synthetic: the tensors of the plan, with content that receivers can compute. Every method starts from
poisoned destinations and is compared bit for bit before it is timed. Other stacks run in processes of their own, after
ours; what cannot run is in the results with the reason. Results go to tools/results/refit-x<ranks>.json,
hosts-x<ranks>.json, isolated-x<ranks>.json or refit-colocated-x<GPUs>.json, row by row.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

# Counting GPUs through the driver would spoil this process for forking.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

from mcore_reshard.planner.layout.mesh import MeshError
from mcore_reshard.validation.processes import ProcessError, run_processes

sys.path.insert(0, str(Path(__file__).parent))
from bench import machine
from bench.methods import KINDS, Method, parse_method
from bench.ranks import Launch, run_rank
from bench.results import COPY_ENGINE, NCCL_ALONE, ResultFile, skipped
from bench.workloads import MODELS, WORKLOADS, Case, case_of

RESULTS = Path(__file__).parent / "results"
LIMITS = (COPY_ENGINE, NCCL_ALONE)
_SETTINGS = ("NCCL_", "CUDA_MPS_")  # of the environment, written down with the results


@dataclass(frozen=True, slots=True)
class Run:
    """The command line, parsed."""

    work: tuple[tuple[Case, tuple[Method, ...]], ...]
    ranks: int
    device: str
    gpus: int
    colocated: bool
    repeats: int
    timeout_s: float
    limit_s: float
    out: Path
    nemo_rl: Path | None

    def launches(self) -> list[tuple[Case, tuple[Method, ...]]]:
        """The methods of each workload that may share a launch, then each of the others alone, golden last."""
        shared = [(case, tuple(m for m in methods if not m.kind.alone)) for case, methods in self.work]
        alone = [(case, (m,)) for case, methods in self.work for m in methods if m.kind.alone]
        order = list(KINDS)
        alone.sort(key=lambda launch: order.index(launch[1][0].name))
        return [launch for launch in (*shared, *alone) if launch[1]]


def measure(run: Run, results: ResultFile) -> None:
    start = time.monotonic()
    for case, methods in run.launches():
        todo = list(methods)
        while todo:
            if run.limit_s and time.monotonic() - start > run.limit_s:
                for method in todo:
                    results.add(skipped(case.name, method.text, f"not started within --limit-s {run.limit_s:g}"))
                break
            failure = _launched(run, case, tuple(todo))
            done = {row["method"] for row in results.rows() if row["workload"] == case.name}
            todo = [method for method in todo if method.text not in done]
            if todo:  # the first of them is the one that failed
                results.add(skipped(case.name, todo[0].text, failure or "it left no result"))
                print(f"{case.name} {todo[0].text}: {failure}", file=sys.stderr, flush=True)
                todo = todo[1:]


def _launched(run: Run, case: Case, methods: tuple[Method, ...]) -> str | None:
    """Start the ranks for these methods and wait for them; why they failed, if they did."""
    with tempfile.TemporaryDirectory(prefix="bench-refit-") as folder:
        launch = Launch(
            case,
            methods,
            run.device,
            run.gpus,
            run.colocated,
            run.repeats,
            run.timeout_s,
            run.out,
            Path(folder),
            run.nemo_rl,
        )
        try:
            run_processes(run.ranks, run_rank, (launch,), timeout_s=run.timeout_s * (len(methods) + 1))
        except ProcessError as error:
            print(error, file=sys.stderr, flush=True)
            return reason_of(str(error), run.timeout_s)
    return None


def reason_of(error: str, timeout_s: float) -> str:
    """The line of a `ProcessError` that says most."""
    first = error.partition("\nprocess ")[0].strip().splitlines()
    if "failed:" in first[0]:
        return first[-1]
    return f"no result within {timeout_s:g} s, or its process ended: {first[0]}"


def header(run: Run) -> dict[str, Any]:
    """The first part of the result file: hardware, versions, settings, date and workloads."""
    return {
        "command": machine.command("bench_refit.py", sys.argv[1:]),
        "date": date.today().isoformat(),
        **_hardware(run),
        "versions": _versions(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)},
        "repeats": run.repeats,
        "workloads": {
            case.name: {
                "what": case.what,
                "model": case.model,
                "layers": case.layers or "all",
                "train": case.train,
                "gen": case.gen,
                "ranks": f"{case.train_ranks} -> {case.gen_ranks}",
                "dtypes": " -> ".join(case.dtypes),
                **({"as_hosts": True, "waves": case.plan().waves} if case.as_hosts else {}),
            }
            for case, _ in run.work
        },
    }


def _hardware(run: Run) -> dict[str, Any]:
    if run.device == "cpu":
        return {"hardware": f"{run.ranks} processes on a {platform.machine()} CPU"}
    gpus = machine.gpus()
    names = " and ".join(sorted({name for name, _ in gpus}))
    shared = {"shared": _sharing(run)} if run.ranks > run.gpus else {}
    return {"hardware": f"{min(run.ranks, run.gpus)} x {names}", "driver": gpus[0][1], **shared}


def _sharing(run: Run) -> str:
    if run.colocated:
        return "every GPU has a rank of both sides"
    return f"{run.ranks} ranks on {run.gpus} GPUs, those of a side together"


def _versions() -> dict[str, str]:
    nccl = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if torch.version.cuda else {}
    return machine.versions("nccl4py", "megatron-core", **nccl)


def parsed(arguments: Sequence[str]) -> Run:
    """Read the command line. Exits with everything that is wrong with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpus = torch.cuda.device_count()
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--workloads", nargs="+", metavar="NAME", help=f"of {', '.join(names)}; by default all")
    parser.add_argument("--methods", nargs="+", metavar="NAME[:OPTION=N,...]", help=_methods_help())
    parser.add_argument("--ranks", type=int, help="of both sides; by default one a GPU, or two if colocated")
    parser.add_argument("--colocated", action="store_true", help="every GPU has a rank of both sides")
    parser.add_argument("--as-hosts", action="store_true", help="plan as if every rank were on a host of its own")
    parser.add_argument("--isolated", action="store_true", help="also measure processes that see one GPU each")
    parser.add_argument("--train-gpus", type=int, default=0, help="ranks that train; by default half of them")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if gpus else "cpu")
    parser.add_argument("--moe", default=MODELS["moe"], metavar="MODEL", help="model of the moe workloads")
    parser.add_argument("--dense", default=MODELS["dense"], metavar="MODEL", help="model of the dense workloads")
    parser.add_argument("--layers", type=int, default=0, help="cut the models short")
    parser.add_argument("--repeats", type=int, default=5, help="steady runs of each method")
    parser.add_argument("--timeout-s", type=float, default=90.0, help="of each method")
    parser.add_argument("--limit-s", type=float, default=0.0, help="start nothing after this; 0: no limit")
    parser.add_argument("--nemo-rl", type=Path, metavar="PATH", help="a checkout of github.com/NVIDIA-NeMo/RL")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    if args.ranks is None:
        args.ranks = max(2, 2 * gpus if args.colocated else gpus)
    problems: list[str] = []
    if args.device == "cuda" and not gpus:
        problems.append("there is no CUDA device: --device cpu")
    if args.device == "cpu" and args.colocated:
        problems.append("--colocated is of GPUs, and --device cpu has none")
    if args.as_hosts and args.colocated:
        problems.append("--as-hosts and --colocated contradict each other")
    if args.isolated and (args.colocated or args.device == "cpu" or args.ranks > gpus):
        problems.append("--isolated is of processes that have a GPU each")
    if args.ranks < 2:
        problems.append(f"--ranks {args.ranks}: a refit takes two at least")
    if args.train_gpus and not 0 < args.train_gpus < args.ranks:
        problems.append(f"--train-gpus {args.train_gpus} leaves no rank of {args.ranks} on one side")
    if args.nemo_rl and not (args.nemo_rl / "nemo_rl").is_dir():
        problems.append(f"--nemo-rl {args.nemo_rl}: there is no folder nemo_rl in it")
    problems += [
        f"unknown workload {name!r}, known: {', '.join(names)}" for name in args.workloads or () if name not in names
    ]
    for text in args.methods or ():
        try:
            parse_method(text)
        except ValueError as error:
            problems.append(str(error))
    work = [] if problems else _work(args, problems)
    if problems:
        parser.error("\n  ".join(["", *problems]))
    return Run(
        tuple(work),
        args.ranks,
        args.device,
        gpus,
        args.colocated,
        args.repeats,
        args.timeout_s,
        args.limit_s,
        args.out or RESULTS / _default_out(args, gpus),
        args.nemo_rl.resolve() if args.nemo_rl else None,
    )


def _default_out(args: argparse.Namespace, gpus: int) -> str:
    if args.colocated:
        return f"refit-colocated-x{gpus}.json"
    kind = "hosts" if args.as_hosts else "isolated" if args.isolated else "refit"
    return f"{kind}-x{args.ranks}.json"


def _work(args: argparse.Namespace, problems: list[str]) -> list[tuple[Case, tuple[Method, ...]]]:
    work = []
    models = {"moe": args.moe, "dense": args.dense}
    for workload in WORKLOADS:
        if workload.name not in (args.workloads or [workload.name]) or args.ranks < workload.least_ranks:
            continue
        case = case_of(
            workload, args.ranks, train_ranks=args.train_gpus, layers=args.layers, model=models[workload.model]
        )
        case = replace(case, as_hosts=args.as_hosts)
        try:
            case.plan()
        except (MeshError, ValueError) as error:
            problems.append(f"{workload.name}: {error}")
        methods = tuple(map(parse_method, args.methods or workload.methods))
        work.append((case, methods))
        if args.isolated:
            isolated = replace(case, name=f"{case.name}, isolated", isolated=True)
            work.append((isolated, tuple(method for method in methods if method.name not in LIMITS)))
    return work


def _methods_help() -> str:
    listed = [name + (f" ({', '.join(kind.options)})" if kind.options else "") for name, kind in KINDS.items()]
    return f"instead of those of each workload: {', '.join(listed)}"


def main() -> None:
    run = parsed(sys.argv[1:])
    results = ResultFile(run.out)
    results.start(header(run))
    measure(run, results)
    print(f"wrote {run.out}")


if __name__ == "__main__":
    main()
