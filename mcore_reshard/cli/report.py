"""`mcore-reshard report`: a plan as one HTML page that needs no network."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType

from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.plan_file import PlanFileError
from mcore_reshard.planner.proof.prove import Proof, ProofError
from mcore_reshard.planning import InputError
from mcore_reshard.report.measured import Measured, MeasuredError, read_measured
from mcore_reshard.report.page import chart_library, report_page
from mcore_reshard.simulate.simulate import TRANSPORTS, simulate

from .inputs import (
    about_racks,
    collect_problems,
    machine_of,
    of_session,
    place_problems,
    planned_anew,
    read_plan,
    uses_pxn,
)
from .memory import as_json, counted_beside
from .plan import cannot_write, unwritable
from .render import facts, noted, print_report, progress, size, verdict
from .summary import summarize_any


def run(args: argparse.Namespace) -> int:
    problems = unwritable(args.out) or _overwritten(args)
    try:
        plan = read_plan(args.plan, proven=False)
    except PlanFileError as error:
        raise InputError([*problems, str(error), *place_problems(args.topology, args.hosts)]) from error
    topology, measured = None, _measured(args, plan, problems)
    with collect_problems(problems):
        topology = machine_of(plan, args.topology, args.hosts)
    if problems:
        raise InputError(problems)
    chart_library()  # before the work: it may be missing
    started = time.perf_counter()
    with progress(f"drawing {plan.model}"):
        given, proof = plan.digest, plan.prove()
        if (
            proof.ok and (anew := of_session(plan, topology)).digest != given
        ):  # what is wrong with a file is shown of itself
            plan, proof = anew, anew.prove()
        simulation, summary = None, summarize_any(plan, proof)
        summary["memory"] = None
        if proof.ok:
            with counted_beside(plan, topology, TRANSPORTS) as counted:
                try:
                    simulation = simulate(plan, topology, args.transport, pxn=uses_pxn()) if topology else None
                except ValueError as error:
                    raise InputError([str(error)]) from error
                summary["memory"] = as_json(counted())
        page = report_page(plan, proof, summary, topology, simulation, measured)
    content = page.encode("utf-8", "replace")
    try:
        Path(args.out).write_bytes(content)
    except OSError as error:
        raise InputError([cannot_write(args.out, error.strerror or str(error))]) from error
    seconds = time.perf_counter() - started
    predicted = simulation.seconds if simulation is not None else None
    report = {
        "out": args.out,
        "digest": plan.digest,
        "proof_ok": proof.ok,
        "page_bytes": len(content),
        "predicted_seconds": predicted,
        "measured_seconds": measured.moving_s if measured is not None else None,
        "report_seconds": seconds,
    }
    notes = [*([] if plan.digest == given else [planned_anew(plan)]), *about_racks(topology)]
    print_report(args.json, report, [*_parts(args.out, proof, len(content), seconds), *noted(notes)])
    if not proof.ok:
        raise ProofError(proof)
    return 0


def _overwritten(args: argparse.Namespace) -> list[str]:
    """One reason, if the page would take the place of what it is made from."""
    out = Path(args.out)
    read = [each for each in (args.plan, *(args.measured or ())) if Path(each).is_file()]
    return [
        f"{out} would be overwritten: give -o another file" for each in read if out.exists() and out.samefile(each)
    ][:1]


def _measured(args: argparse.Namespace, plan: Plan, problems: list[str]) -> Measured | None:
    if not args.measured:
        return None
    try:
        return read_measured(args.measured, plan)
    except MeasuredError as error:
        problems.append(str(error))
        return None


def _parts(out: str, proof: Proof, nbytes: int, seconds: float) -> Iterator[RenderableType]:
    yield facts(
        [
            ("proof", verdict(proof.ok, f"{proof.covered_bytes:,} of {proof.destination_bytes:,} bytes covered")),
            ("page", f"{out}, {size(nbytes)}, in {seconds:.1f} s; open it in a browser, no network is needed"),
        ]
    )
