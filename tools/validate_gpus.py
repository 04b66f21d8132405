"""Golden against real on this machine's GPUs: `validate` over every family and every mesh that fits, several at a time.

    python tools/validate_gpus.py --out tools/results/validate-x4.json

It does what `mcore-reshard validate` does, for all cases of tests/helpers/validation_cases.py. `direct` takes them all,
since ranks may share a GPU; `nccl` and `auto` take those with no more ranks than there are GPUs. For `auto` one pair of
ranks is declared unreachable, so that both transports take part wherever there are more pairs. `--few` takes as many
cases as give each family and each mesh once. Results are written as they come. A file that this machine and these
versions wrote is continued: its cases are not run again. Exit code 1 if any byte was wrong or a case failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # counting GPUs must not keep ranks from being forked
import torch

from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.transports.peer_access import UNREACHABLE_VARIABLE
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planning import read_request
from mcore_reshard.validation.processes import run_processes
from mcore_reshard.validation.runner import ValidationError, ValidationRequest, validate
from mcore_reshard.validation.trainer import build as trainer

sys.path.insert(0, str(Path(__file__).parent))
from bench import machine
from bench.results import line_by_line

TRANSPORTS = ("direct", "nccl", "auto")
SHARING = {"direct"}  # transports whose ranks may share a GPU
TESTS = Path(__file__).parents[1] / "tests"
TIMEOUT_S = 60.0
WHAT = "golden vs real with real Megatron-Core models on GPUs: every tensor of every generation rank, byte by byte"
ONE_PAIR = "train:0-gen:0"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", nargs="+", choices=TRANSPORTS, default=TRANSPORTS, help="default: all")
    parser.add_argument("--few", action="store_true", help="each family and each mesh once for each transport")
    parser.add_argument("--refits", type=int, default=3, metavar="N", help="of each case (default: 3)")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 8), help="cases at a time")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    if not gpus:
        parser.error("there is no CUDA device")
    report = _begun(arguments.out, {"what": WHAT, **_machine(gpus)})
    ran = {(case["transport"], case["family"], case["mesh"]) for case in report["cases"]}
    wanted = [
        (transport, family, mesh, arguments.refits)
        for transport in arguments.transport
        for family, mesh in cases_on(gpus, transport, arguments.few)
        if (transport, family, mesh) not in ran
    ]
    trainer.prepare(on_cuda=True)  # seconds, paid once: the cases are forked from here
    for case in _run_all(wanted, arguments.jobs):
        report["source"] = case.pop("source", report["source"])  # of all cases
        report["cases"].append(case)
        arguments.out.write_text(line_by_line(report, "cases"))
        print(f"{case['transport']:6} {case['family']:12} {case['mesh']:28} {_outcome(case)}", flush=True)
    bad = [case for case in report["cases"] if case.get("error") or case.get("wrong")]
    print(f"{len(report['cases'])} cases, {len(bad)} bad")
    return 1 if bad else 0


def cases_on(gpus: int, transport: str, few: bool) -> list[tuple[str, str]]:
    """(family, mesh) of every case that fits."""
    cases = _cases()
    fitting = cases.on_gpus(gpus, shared=transport in SHARING)
    return list(cases.covering(fitting) if few else fitting)


def _begun(out: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The report in `out` without its failed cases, if it is about the same; else a report without cases."""
    source, cases = "", []
    if out.exists():
        begun = json.loads(out.read_text())
        if about.items() <= begun.items():
            source = begun["source"]
            cases = [case for case in begun["cases"] if not (case.get("error") or case.get("wrong"))]
    return {**about, "source": source, "cases": cases}


def _run_all(wanted: list[tuple[str, str, str, int]], jobs: int) -> Iterator[dict[str, Any]]:
    """Workers are forked before the pool has threads, and fork the ranks of one case after the other."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        running = [pool.submit(_run, *case) for case in wanted]
        for done in as_completed(running):
            yield done.result()


def _run(transport: str, family: str, mesh: str, refits: int) -> dict[str, Any]:
    train, gen, overrides = _cases().arguments(family, mesh)
    case: dict[str, Any] = {"transport": transport, "family": family, "mesh": mesh, "train": train, "gen": gen}
    start = time.perf_counter()
    os.environ[UNREACHABLE_VARIABLE] = ONE_PAIR if transport == "auto" else ""
    try:
        planning = read_request({**load_config(f"tiny-{family}"), **overrides}, train, gen)
        options = Options(transport=transport, timeout_s=TIMEOUT_S)
        report = validate(ValidationRequest(planning, options=options, refits=refits))
    except ValidationError as error:
        return {**case, "refused": str(error)}
    except Exception:
        return {**case, "error": traceback.format_exc()}
    wrong = [f"refit {refit.version}: {result}" for refit in report.refits for result in refit.wrong]
    return {
        **case,
        "source": report.source,
        "carried_by": report.transport,
        "refits": len(report.refits),
        "tensors": len(report.parameters),
        "bytes": sum(refit.bulk_bytes + refit.misc_bytes for refit in report.refits),
        "misc_bytes": sum(refit.misc_bytes for refit in report.refits),
        "wrong": len(wrong),
        **({"first_wrong": wrong[:3]} if wrong else {}),
        "seconds": round(time.perf_counter() - start, 1),
    }


def _outcome(case: dict[str, Any]) -> str:
    if "error" in case:
        return "ERROR " + case["error"].strip().splitlines()[-1]
    if "refused" in case:
        return f"refused: {case['refused']}"
    return f"{case['wrong']} of {case['tensors']} tensors wrong, {case['seconds']} s"


def _machine(gpus: int) -> dict[str, Any]:
    name, nccl = run_processes(1, lambda _: (torch.cuda.get_device_name(0), torch.cuda.nccl.version()))[0]
    packages = ("megatron-core", "megatron-bridge", "transformer-engine", "transformers", "nccl4py", "cuda-core")
    versions = machine.versions(*packages, nccl=".".join(map(str, nccl)))
    return {"date": date.today().isoformat(), "hardware": f"{gpus} x {name}", "versions": versions}


def _cases() -> ModuleType:
    """tests/helpers/validation_cases.py, which the tests and the support table of docs/support.md use too."""
    sys.path.insert(0, str(TESTS))
    from helpers import validation_cases

    return validation_cases


if __name__ == "__main__":
    sys.exit(main())
