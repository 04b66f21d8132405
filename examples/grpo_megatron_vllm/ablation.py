"""Does the curve show what a refit does? Five seeds with refits, without them, and with one tensor put back after each.

    python ablation.py --out ../../tools/results/grpo-x2.json     on two GPUs, all runs at the same time

The thresholds were fixed before any run. `LEARNED` is asked of every seed with refits, and of the runs on one shared GPU and
with an engine that is killed in the middle. Every seed of the other arms must end `MARGIN` below the same seed with refits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]

SEEDS, STEPS, RESTART_AT = 5, 200, 100
GRACE_S = 15.0  # a run has to end its engine
LAST = 20  # steps whose mean reward is the end of a curve
LEARNED, MARGIN = 0.8, 0.4
APART, SHARED = "two GPUs", "one GPU"
PACKAGES = ("vllm", "megatron-core", "transformers", "triton")


def runs() -> list[dict[str, Any]]:
    """What each run is given."""
    arms = [
        {"refits": refits, "seed": seed, "place": APART}
        for seed in range(SEEDS)
        for refits in ("on", "off", "all-but-one")
    ]
    return [
        *arms,
        {"refits": "on", "seed": 0, "place": SHARED},
        {"refits": "on", "seed": 1, "place": APART, "restart_at": RESTART_AT},
    ]


def start(run: dict[str, Any], out: Path, more: list[str]) -> subprocess.Popen[bytes]:
    """One run of grpo.py."""
    gpus = ("0,1", "1,0") if run["place"] == APART else ("0", "0")
    command = [sys.executable, str(HERE / "grpo.py"), "--seed", str(run["seed"]), "--refits", run["refits"]]
    command += ["--steps", str(STEPS), "--engine-gpus", gpus[1], "--out", str(out), *more]
    if run.get("restart_at"):
        command += ["--restart-at", str(run["restart_at"])]
    caches = {"VLLM_CACHE_ROOT": str(out.with_suffix(".cache")), "OMP_NUM_THREADS": "1"}
    with out.with_suffix(".log").open("wb") as log:
        environment = {**os.environ, **caches, "CUDA_VISIBLE_DEVICES": gpus[0]}
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def end_of(run: dict[str, Any]) -> float:
    """The mean reward of the last steps."""
    last = run["reward"][-LAST:]
    return float(sum(last) / len(last))


def problems(done: list[dict[str, Any]]) -> list[str]:
    """Every run that is not on the side of its threshold where it must be."""
    apart = {(run["refits"], run["seed"]): run for run in done if run["place"] == APART and not run.get("restart_at")}
    found = []
    for run in done:
        name = f"{run['place']}, refits {run['refits']}, seed {run['seed']}" + (
            ", restarted" if run.get("restart_at") else ""
        )
        if "error" in run:
            found.append(f"{name}: {run['error']}")
            continue
        whole = apart["on", run["seed"]]
        if run["refits"] == "on" and end_of(run) < LEARNED:
            found.append(f"{name}: ends at {end_of(run):.2f}, wants {LEARNED}")
        if run["refits"] != "on" and "error" not in whole and end_of(run) > end_of(whole) - MARGIN:
            found.append(f"{name}: ends at {end_of(run):.2f}, with all refits at {end_of(whole):.2f}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-s", type=float, default=900.0, help="of all runs together (default: 900)")
    parser.add_argument("--folder", type=Path, help="for logs (default: a temporary one)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        done = run_all(arguments.folder or Path(temporary), arguments.limit_s)
    from bench import machine

    gpus = machine.gpus()
    found = problems(done)
    report = {
        "what": "GRPO from scratch: Megatron-Core learns, vLLM generates, a refit after each step",
        "date": date.today().isoformat(), "hardware": f"{len(gpus)} x {gpus[0][0]}", "driver": gpus[0][1],
        "versions": machine.versions(*PACKAGES), "learned": LEARNED, "margin": MARGIN, "last": LAST, "problems": found,
        "runs": done,
    }  # fmt: skip
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report) + "\n")
    for run in done:
        print(f"{run['place']}, refits {run['refits']}, seed {run['seed']}:", run.get("error") or f"{end_of(run):.3f}")
    print("\n".join(found) or "every run is where it must be")
    return 1 if found else 0


def run_all(folder: Path, limit_s: float) -> list[dict[str, Any]]:
    """Run everything at the same time; each run with its curve, or an error. Ends at most `GRACE_S` after the limit."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = runs()
    files = [folder / f"run{number}.json" for number in range(len(wanted))]
    processes = [start(run, out, []) for run, out in zip(wanted, files, strict=True)]
    late = running_after(limit_s, processes)
    for process in late:
        process.terminate()  # it ends its engine
    for process in running_after(GRACE_S, late):
        process.kill()
    return [
        result(run, out, process.wait(), process in late)
        for run, out, process in zip(wanted, files, processes, strict=True)
    ]


def running_after(seconds: float, processes: list[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    """Wait for processes, so long at most; those that have not ended by then."""
    deadline = time.monotonic() + seconds
    while (running := [process for process in processes if process.poll() is None]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return running


def result(run: dict[str, Any], out: Path, code: int, late: bool) -> dict[str, Any]:
    """What one run wrote, or why it wrote nothing."""
    if code == 0:
        return {**run, **json.loads(out.read_text()), "place": run["place"]}
    last = out.with_suffix(".log").read_text(errors="replace").strip().splitlines()[-1:]
    why = "was not done at the limit" if late else f"ended with {code}"
    return {**run, "error": f"{why}: {''.join(last)}"}


if __name__ == "__main__":
    sys.exit(main())
