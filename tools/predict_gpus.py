"""Predicted beside measured on the GPUs of one host: simulate the refits that bench_refit measured.

python tools/predict_gpus.py tools/results/{refit-x2,refit-colocated-x2,one-gpu-x1}.json --out predicted.json

The files are those of `tools/bench_refit.py`. One workload calibrates each kind of GPU: its first row for each transport
gives the bandwidth that payload reaches over NVLink, and its first row on one GPU that of the GPU's memory. Without such a row
the preset has that. All other rows are predicted with these numbers. A rule leaves out rows that the simulation does not
describe; each then has the reason.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from bench.results import line_by_line  # noqa: E402
from bench.workloads import WORKLOADS, Case  # noqa: E402

from mcore_reshard.planner.plan.plan import Plan  # noqa: E402
from mcore_reshard.planner.topology.topology import GB, MACHINES, Machine, Place, Topology  # noqa: E402
from mcore_reshard.simulate.simulate import simulate  # noqa: E402

METHODS = ("direct", "nccl")  # with options of their own they are sweeps
CALIBRATES = "moe-ep-tp"
WITHIN = 0.15  # of the measured time
_USUAL = MACHINES["h200-8"]  # of GPUs that no preset is named after


class RowsError(ValueError):
    """Measured rows that nothing can be predicted from; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A row of a file of bench_refit, and where its ranks were."""

    file: str
    date: str
    hardware: str
    case: Case
    method: str
    ms: float
    gpus: tuple[int, ...]  # of each rank, training ranks first

    @property
    def kind(self) -> str:
        """The kind of GPU: all of one kind are taken to be as fast."""
        return self.hardware.partition(" x ")[2]

    @property
    def on_one_gpu(self) -> bool:
        return len({*self.gpus}) == 1

    @property
    def shares(self) -> bool:
        """Whether ranks of both sides are on one GPU."""
        train = self.case.train_ranks
        return bool({*self.gpus[:train]} & {*self.gpus[train:]})

    @property
    def not_simulated(self) -> str:
        """Why a simulation does not describe this row; empty where it does."""
        if self.case.dtypes == ("bf16", "fp8") and self.method == "nccl":
            return "all scales are computed before the first message"
        return ""


def rows_of(file: Path) -> list[Measured]:
    """The rows of our transports, with their default options. Raises RowsError where the file is not of bench_refit."""
    data = json.loads(file.read_text())
    if not data.get("workloads") or "hardware" not in data:
        raise RowsError(f"{file} has no workloads or no hardware: give a file that tools/bench_refit.py wrote")
    found = []
    for row in data["rows"]:
        if row["method"] in METHODS and "ms" in row:
            case = _case(row["workload"], data["workloads"][row["workload"]])
            gpus = _gpus(case, data)
            found.append(Measured(file.name, data["date"], data["hardware"], case, row["method"], row["ms"], gpus))
    return found


def _case(name: str, of_workload: dict[str, Any]) -> Case:
    workload = next(each for each in WORKLOADS if each.name == name)
    train, gen = (int(ranks) for ranks in of_workload["ranks"].split(" -> "))
    source, target = of_workload["dtypes"].split(" -> ")
    layers = 0 if of_workload["layers"] == "all" else of_workload["layers"]
    return Case(
        name,
        of_workload["what"],
        of_workload["model"],
        layers,
        workload.experts_only,
        of_workload["train"],
        of_workload["gen"],
        train,
        gen,
        (source, target),
    )


def _gpus(case: Case, data: dict[str, Any]) -> tuple[int, ...]:
    """The GPU of each rank, as `Launch.gpu_of` deals them out."""
    ranks = case.train_ranks + case.gen_ranks
    counted = re.match(r"([0-9]+) x ", data["hardware"])
    if counted is None:
        raise RowsError(f"{data['hardware']!r} says no number of GPUs, as in '2 x NVIDIA H200'")
    gpus = int(counted[1])
    if "both sides" in data.get("shared", ""):
        return tuple(rank % gpus for side in (case.train_ranks, case.gen_ranks) for rank in range(side))
    return tuple(rank * min(gpus, ranks) // ranks for rank in range(ranks))


@cache
def _plan(case: Case) -> Plan:
    return case.plan()


def predicted_s(row: Measured, machine: Machine) -> float:
    """Simulated seconds of a refit on this machine."""
    places = [Place(0, gpu) for gpu in row.gpus]
    machine = replace(machine, gpus=1 + max(row.gpus))
    train = row.case.train_ranks
    topology = Topology(machine, ("host",), tuple(places[:train]), tuple(places[train:]))
    return simulate(_plan(row.case), topology, row.method).seconds


def calibrated(rows: Sequence[Measured], workload: str) -> tuple[dict[str, Machine], list[Measured]]:
    """A machine for each transport, and the rows that say how fast it is; `rows` are of one kind of GPU.

    Raises RowsError where a row that calibrates is missing.
    """
    usable = [row for row in rows if row.case.name == workload and not row.not_simulated]
    found: dict[str, Machine] = {}
    used: list[Measured] = []
    machine = next((machine for name, machine in MACHINES.items() if name[:4].upper() in rows[0].kind), _USUAL)
    memory = next((row for row in usable if row.on_one_gpu), None)
    if memory is not None:
        machine = replace(machine, memory=round(machine.memory * predicted_s(memory, machine) / memory.ms * 1e3))
        used.append(memory)
    for method in METHODS:
        link = next((row for row in usable if row.method == method and not row.shares), None)
        if link is not None:
            nvlink = round(machine.nvlink * predicted_s(link, machine) / link.ms * 1e3)
            found[method] = replace(machine, nvlink=nvlink)
            used.append(link)
        elif any(row.method == method and not row.on_one_gpu for row in rows):
            raise RowsError(f"{rows[0].kind}: measure {workload} by {method} on GPUs that no ranks share as well")
        else:
            found[method] = machine
    return found, used


def compare(files: Sequence[Path], workload: str = CALIBRATES) -> dict[str, Any]:
    """Every row measured and predicted, as data. Raises RowsError."""
    rows = [row for file in files for row in rows_of(file)]
    of_kind = {kind: [row for row in rows if row.kind == kind] for kind in dict.fromkeys(row.kind for row in rows)}
    calibrations = {kind: calibrated(of_one, workload) for kind, of_one in of_kind.items()}
    return {
        "what": "refits on the GPUs of one host, measured by bench_refit and simulated",
        "calibrated_by": workload,
        "gb_per_s": {kind: _gb_per_s(machines, used) for kind, (machines, used) in calibrations.items()},
        "rows": [_compared(row, *calibrations[row.kind]) for row in rows],
    }


def _gb_per_s(machines: dict[str, Machine], used: Sequence[Measured]) -> dict[str, float]:
    """What calibration found: over NVLink by transport, and within a GPU."""
    speeds: dict[str, float] = {}
    for row in used:
        machine = machines[row.method]
        name, speed = ("memory", machine.memory) if row.on_one_gpu else (f"NVLink, {row.method}", machine.nvlink)
        speeds[name] = round(speed / GB, 1)
    return speeds


def _compared(row: Measured, machines: dict[str, Machine], used: Sequence[Measured]) -> dict[str, Any]:
    train = row.case.train_ranks
    entry: dict[str, Any] = {
        "file": row.file,
        "date": row.date,
        "hardware": row.hardware,
        "workload": row.case.name,
        "method": row.method,
        "train": row.case.train,
        "gen": row.case.gen,
        "gpus": {"train": row.gpus[:train], "gen": row.gpus[train:]},
        "measured_ms": row.ms,
        "calibrates": row in used,
    }
    if row.not_simulated:
        return {**entry, "not_predicted": row.not_simulated}
    predicted_ms = round(predicted_s(row, machines[row.method]) * 1e3, 3)
    return {**entry, "predicted_ms": predicted_ms, "ratio": round(predicted_ms / row.ms, 4)}


def far_off(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows whose prediction is not within 15% of what was measured."""
    return [
        f"{row['file']}: {row['workload']} by {row['method']}: {row['ratio'] - 1:+.0%}"
        for row in rows
        if "ratio" in row and abs(row["ratio"] - 1) > WITHIN
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="written by tools/bench_refit.py")
    parser.add_argument("--calibrate", default=CALIBRATES, metavar="WORKLOAD", help=f"by default {CALIBRATES}")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    try:
        result = compare(args.files, args.calibrate)
    except (RowsError, OSError) as error:
        parser.error(str(error))
    for row in result["rows"]:
        said = row.get("not_predicted") or f"predicted {row['predicted_ms']:.1f} ms ({row['ratio'] - 1:+.0%})"
        calibrates = ", calibrates" if row["calibrates"] else ""
        print(
            f"{row['file']}: {row['workload']} by {row['method']}: measured {row['measured_ms']:.1f} ms, {said}{calibrates}"
        )
    if args.out:
        args.out.write_text(line_by_line(result))
    if problems := far_off(result["rows"]):
        print("\n".join(["more than 15% off:", *problems]), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
