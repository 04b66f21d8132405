"""What works for models without layout rules: tiny ones refitted and compared, published ones planned and proven.

    PYTHONPATH=. .venv-vllm/bin/python tools/cover_traced.py [MODEL ...]
    PYTHONPATH=. .venv-vllm/bin/python tools/cover_traced.py --random 200

Tiny trainers of Megatron-Bridge are refitted into real vLLM models, as `mcore-reshard validate --traced` does. Published
configs are planned, as `mcore-reshard plan --traced` does. The cases are those of tests/helpers/traced_cases.py that the
installed Megatron-Bridge builds. They are written as they come, to tools/results/coverage.json, or coverage-newest.json
from Megatron-Bridge 0.6 on. A file that these versions wrote is continued: cases in it are not run again, unless they
failed, or `--again` asks for it. `--random N` refits random models in place of these cases, until N were compared
(tests/helpers/random_cases.py). Exit code 1 if any byte was wrong or a case failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from datetime import date
from pathlib import Path
from typing import Any

from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.traced import TracedLayoutError
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.proof.prove import require_proof
from mcore_reshard.report.text import starred
from mcore_reshard.validation.engine import vllm_engine
from mcore_reshard.validation.errors import BuildError, ValidationError
from mcore_reshard.validation.offline_plan import plan_offline
from mcore_reshard.validation.report import ValidationReport
from mcore_reshard.validation.runner import ValidationRequest, validate
from mcore_reshard.validation.trainer import build as trainer
from mcore_reshard.validation.trainer.bridge import bridge_release

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]
from bench import machine  # noqa: E402
from bench.results import line_by_line  # noqa: E402
from helpers import random_cases  # noqa: E402
from helpers import traced_cases as cases  # noqa: E402

WHAT = "models without layout rules: tiny ones refitted, every tensor of every generation rank byte by byte; published ones planned"
REFITS = 3
OPTIONS = Options(transport="gloo", timeout_s=180.0)
PARTS = ("cases", "random")
Case = tuple[str, str, str, str]  # model, training mesh, generation mesh, precision
Result = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="only these, as in tiny-olmoe (default: all)")
    parser.add_argument(
        "--random", type=int, default=0, metavar="N", help="random models instead, until N were compared"
    )
    parser.add_argument("--again", action="store_true", help="run also what has run")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time (default: 1)")
    arguments = parser.parse_args()
    is_newest = bridge_release() >= (0, 6)
    out = ROOT / "tools" / "results" / ("coverage-newest.json" if is_newest else "coverage.json")
    versions = machine.versions("megatron-core", "megatron-bridge", "transformers", "vllm")
    report = _begun(out, {"what": WHAT, "versions": versions})
    trainer.prepare()  # seconds, paid once: the cases are forked from here
    vllm_engine.prepare()
    # Workers are forked before the pool has threads, and fork the ranks of one case after the other.
    with ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        if arguments.random:
            run = _run_random(pool, report["random"], arguments.random, arguments.jobs)
        else:
            run = _run_all(pool, report["cases"], is_newest, arguments.models, arguments.again)
        for case in run:
            out.write_text(line_by_line(report, *PARTS))
            name = f"{case['model']:28} {case['train']:28} -> {case['gen']:10} {case.get('precision', ''):12}"
            print(f"{name} {_outcome(case)}", flush=True)
    bad = [case for part in PARTS for case in report[part] if _is_bad(case)]
    print(f"{', '.join(f'{len(report[part])} {part}' for part in PARTS)}, {len(bad)} bad")
    return 1 if bad else 0


def _run_all(
    pool: ProcessPoolExecutor, ran: list[Result], is_newest: bool, models: Sequence[str], again: bool
) -> Iterator[Result]:
    """Run the cases that have not run, and put each into `ran` when it has."""
    tiny = [(*case, cases.BF16) for case in (cases.NEWEST_FULL if is_newest else cases.FULL)]
    tiny += [] if is_newest else cases.FP8_FULL
    published = [] if is_newest else [(*case, cases.BF16) for case in cases.PUBLISHED]
    meshes = {(model, *cases.arguments(model, mesh), precision): mesh for model, mesh, precision in tiny}
    everything: list[Case] = [*meshes, *published]
    numbers = {case: number for number, case in enumerate(everything)}
    wanted = [case for case in everything if not models or case[0] in models]
    ran[:] = [result for result in ran if _key(result) in numbers and not (again and _key(result) in wanted)]
    has_run = {_key(result) for result in ran}
    running = [pool.submit(_run, case, meshes.get(case)) for case in wanted if case not in has_run]
    for done in as_completed(running):
        ran.append(done.result())
        ran.sort(key=lambda result: numbers[_key(result)])
        yield done.result()


def _run_random(pool: ProcessPoolExecutor, ran: list[Result], count: int, jobs: int) -> Iterator[Result]:
    """Run random cases in the order of their numbers, until `count` were compared, and put each into `ran`."""
    has_run = {result["number"] for result in ran}
    numbers = (number for number in itertools.count() if number not in has_run)
    running: set[Future[Result]] = set()
    while (left := count - sum("refits" in result for result in ran) - len(running)) > 0 or running:
        running |= {pool.submit(_run_drawn, next(numbers)) for _ in range(min(left, jobs - len(running)))}
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            ran.append(future.result())
            ran.sort(key=lambda result: result["number"])
            yield future.result()


def _is_bad(result: Result) -> bool:
    return bool(result.get("error") or result.get("wrong"))


def _key(case: Result) -> Case:
    return case["model"], case["train"], case["gen"], case["precision"]


def _begun(out: Path, about: Result) -> Result:
    """The report in `out` without what failed, if it is of the same versions; else an empty one."""
    begun: Result = json.loads(out.read_text()) if out.exists() else {}
    if not about.items() <= begun.items():
        begun = about
    return {**begun, **{part: [result for result in begun.get(part, ()) if not _is_bad(result)] for part in PARTS}}


def _run(case: Case, mesh: str | None) -> Result:
    """Refit a tiny model, whose mesh has a name; or plan a published one."""
    model, train, gen, precision = case
    what: Result = {"model": model, "mesh": mesh, "train": train, "gen": gen, "precision": precision}
    what["date"] = date.today().isoformat()
    start = time.perf_counter()
    try:
        request = cases.request(*case)
        plan, _ = plan_offline(request)
        require_proof(plan)
        if mesh is None:
            return {**what, **routes_of(plan), "seconds": round(time.perf_counter() - start, 1)}
        report = validate(ValidationRequest(request, plan=plan, options=OPTIONS, engine="vllm", refits=REFITS))
    except (BuildError, TracedLayoutError, ValidationError) as error:
        return {**what, "refused": str(error)}
    except Exception:
        return {**what, "error": traceback.format_exc()}
    return {**what, **_compared(report), **routes_of(plan)}


def _run_drawn(number: int) -> Result:
    case = random_cases.draw(number)
    what = {"number": number, "model": case.family, "train": case.train, "gen": case.gen}
    try:
        report = case.refit(OPTIONS)
    except Exception as error:
        if reason := random_cases.refusal(error):
            return {**what, "refused": reason}
        return {**what, "error": traceback.format_exc()}
    return {**what, **_compared(report)}


def _compared(report: ValidationReport) -> Result:
    wrong = [f"refit {refit.version}: {result}" for refit in report.refits for result in refit.wrong]
    counts = {"refits": len(report.refits), "tensors": len(report.parameters), "wrong": len(wrong)}
    return {**counts, **({"first_wrong": wrong[:3]} if wrong else {})}


def routes_of(plan: Plan) -> Result:
    """The bytes of each route, each parameter counted once, and what goes by misc or is excluded and why."""
    routes: Result = {"bytes": sum(group.count * group.nbytes for group in plan.groups)}
    for route, entries in (("misc", plan.misc), ("excluded", plan.excluded)):
        by_reason: dict[str, Result] = {}
        for entry in entries:
            group = plan.groups[entry.group]
            found = by_reason.setdefault(entry.reason, {"reason": entry.reason, "bytes": 0, "parameters": []})
            found["bytes"] += group.count * group.nbytes
            if (name := starred(group.name_pattern)) not in found["parameters"]:
                found["parameters"].append(name)
        routes[route] = [*by_reason.values()]
    return routes


def _outcome(case: Result) -> str:
    if "error" in case:
        return "ERROR " + case["error"].strip().splitlines()[-1]
    if "refused" in case:
        return f"refused: {case['refused'].splitlines()[0]}"
    if "refits" not in case:
        return f"planned, {case['seconds']} s"
    return f"{case['wrong']} of {case['tensors']} tensors wrong"


if __name__ == "__main__":
    sys.exit(main())
