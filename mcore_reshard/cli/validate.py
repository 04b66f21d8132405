"""`mcore-reshard validate`: refit a real model between real processes and compare every byte with golden."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from mcore_reshard.planner.layout.mesh import format_mesh
from mcore_reshard.planner.model.configs import builtin_names, load_config
from mcore_reshard.planner.model.precision import BLOCK_FP8, PRECISION_OF
from mcore_reshard.planner.plan.make_plan import make_plan
from mcore_reshard.planner.plan.plan import Plan, Policy
from mcore_reshard.planner.plan.plan_file import load_plan
from mcore_reshard.planner.proof.prove import ProofError, prove
from mcore_reshard.planning import InputError, PlanRequest, read_request

from .inputs import is_plan_file
from .render import count, facts, noted, say_what_is_left, size, table, verdict, write, write_json

if TYPE_CHECKING:
    from mcore_reshard.validation.report import Mismatch, ParameterResult, ValidationReport

EXIT_MISMATCH = 4
_ROWS_SHOWN = 40


def run(args: argparse.Namespace) -> int:
    if args.refits < 1 or not 0 < args.timeout < math.inf:
        raise InputError(["--refits and --timeout must be above zero, and finite"])
    request, plan = _read(args)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # counting GPUs must not keep ranks from being forked
    from mcore_reshard.kernels.transports.registry import device_of  # torch: not before the input is known to be good

    device_of(args.transport)
    from mcore_reshard.validation.runner import validate

    if sys.stderr.isatty():  # no spinner: the ranks are forked from here, and threads do not survive that
        ranks = count(request.train.world + request.gen.world, "process", "processes")
        print(f"validating {request.model} in {ranks}, {count(args.refits, 'refit')} ...", file=sys.stderr)
    report = validate(
        request.config,
        request.train,
        request.gen,
        model=request.model,
        policy=request.policy,
        transport=args.transport,
        refits=args.refits,
        timeout_s=args.timeout,
        engine=args.engine,
        plan=plan,
        train_dtype=request.train_dtype,
        gen_dtype=request.gen_dtype,
    )
    if args.json:
        write_json({**report.as_dict(), "notes": list(request.notes)})
    else:
        write(*_tables(report), *noted(request.notes))
    if report.ok:
        return 0
    wrong = [(refit.version, result) for refit in report.refits for result in refit.wrong]
    print(f"mcore-reshard: {_verdict(report)}", file=sys.stderr)
    if wrong:
        version, result = wrong[0]
        print(f"  first: refit {version}, gen:{result.gen_rank} {result.name}: {_what(result)}", file=sys.stderr)
    return EXIT_MISMATCH


def _read(args: argparse.Namespace) -> tuple[PlanRequest, Plan | None]:
    """What to validate; with a plan file also the plan, whose meshes and policy then hold."""
    if is_plan_file(args.source):
        return _from_plan(args)
    load_config(args.source)  # what cannot be read at all is the first thing to say
    missing = [f"--{side}" for side in ("train", "gen") if getattr(args, side) is None]
    if missing:
        raise InputError([f"{' and '.join(missing)} wanted: {args.source} is no plan file, which would say"])
    if args.config is not None:
        raise InputError(["--config goes with a plan file; here CONFIG itself is the config"])
    policy: Policy = args.policy or "exact"
    return read_request(args.source, args.train, args.gen, policy, args.train_dtype, args.gen_dtype), None


def _from_plan(args: argparse.Namespace) -> tuple[PlanRequest, Plan]:
    plan = load_plan(args.source)
    proof = prove(plan)
    if not proof.ok:
        raise ProofError(proof)
    source = args.config or (plan.model if plan.model in builtin_names() else None)
    if source is None:
        raise InputError([f"the plan is of {plan.model!r}, which is not built in: give its config with --config"])
    meshes = {"train": format_mesh(plan.train), "gen": format_mesh(plan.gen)}
    ends = args.train or meshes["train"], args.gen or meshes["gen"]
    asked, planned_dtypes = (args.train_dtype, args.gen_dtype), _dtypes_of(plan)
    dtypes = asked if any(asked) else planned_dtypes
    request = read_request(source, *ends, plan.policy, *dtypes)
    problems = [
        f"--{side} is {format_mesh(asked)}, the plan is for {meshes[side]}"
        for side, asked, planned in (
            ("train", request.train.canonical(request.model_parameters.architecture.layers), plan.train),
            ("gen", request.gen, plan.gen),
        )
        if asked != planned
    ]
    said, wanted = (" -> ".join(dtype or "bf16" for dtype in both) for both in (dtypes, planned_dtypes))
    again = make_plan(
        request.model_parameters, request.train, request.gen, policy=plan.policy,
        train_dtype=request.train_dtype, gen_dtype=request.gen_dtype,
    )  # fmt: skip
    if said != wanted and any(getattr(again, of) != getattr(plan, of) for of in ("groups", "pairs", "casts", "misc")):
        problems.append(f"--train-dtype and --gen-dtype say {said}, the plan is of {wanted}")
    if args.policy not in {None, plan.policy}:
        problems.append(f"--policy is {args.policy}, the plan follows {plan.policy}")
    if again.groups != plan.groups:
        problems.append(f"the plan is of another model than {source}: their parameters differ")
    elif not problems and again.misc != plan.misc:
        problems.append(
            f"the plan sends other parameters by misc than one of {said} does: it is of other dtypes, give them as"
            " --train-dtype and --gen-dtype"
        )
    if problems:
        raise InputError(problems)
    return request, plan


def _dtypes_of(plan: Plan) -> tuple[str | None, str | None]:
    """What the sides of a plan seem to hold: where nothing is cast, the trainer has what the engine has, or all is misc."""
    wanted = PRECISION_OF.get(plan.groups[0].dtype)
    if plan.pairs:
        wanted = "fp8" if plan.groups[plan.pairs[0].scales].dtype == BLOCK_FP8.scales else "mxfp8"
    return PRECISION_OF[plan.casts[0].src] if plan.casts else wanted, wanted


# --- text


def _tables(report: ValidationReport) -> Iterator[RenderableType]:
    yield facts(
        [
            ("model", Text(report.model, style="bold")),
            ("training", f"{report.train}  {report.source}"),
            ("generation", f"{report.gen}  {report.engine}"),
            *([("precision", report.precision)] if report.precision else []),
            ("policy", report.policy),
            ("transport", report.transport),
            ("digest", report.digest),
        ]
    )
    numbers = ("refit", "seconds", "bulk", "misc", "tensors", "wrong")
    refits = table("Refits", "refit", "weights", "seconds", "bulk", "misc", "tensors", "wrong", numbers=numbers)
    for refit in report.refits:
        refits.add_row(
            str(refit.version), refit.change, f"{refit.seconds:.2f}", size(refit.bulk_bytes), size(refit.misc_bytes),
            f"{len(refit.parameters):,}", f"{len(refit.wrong):,}",
        )  # fmt: skip
    yield refits
    yield _by_name(report.parameters)
    wrong = [(refit.version, result) for refit in report.refits for result in refit.wrong]
    if wrong:
        shown = table("Differences from golden", "refit", "rank", "tensor", "route", "what", numbers=("refit",))
        for version, result in wrong[:_ROWS_SHOWN]:
            shown.add_row(str(version), f"gen:{result.gen_rank}", result.name, result.route, _what(result))
        say_what_is_left(shown, len(wrong) - _ROWS_SHOWN, "tensor")
        yield shown
    yield facts([("golden", verdict(report.ok, _verdict(report)))])


def _by_name(results: Iterable[ParameterResult]) -> RenderableType:
    """Results over all layers, ranks and refits, one line a tensor name and route."""
    groups: dict[tuple[str, str], list[ParameterResult]] = {}
    for result in results:
        groups.setdefault((re.sub(r"\.[0-9]+\.", ".*.", result.name), result.route), []).append(result)
    numbers = ("compared", "bytes", "differing elements")
    shown = table("Engine tensors", "tensor", "route", *numbers, numbers=numbers)
    for (name, route), alike in groups.items():
        nbytes, differing = sum(r.nbytes for r in alike), sum(r.mismatches for r in alike)
        shown.add_row(name, route, f"{len(alike):,}", size(nbytes), f"{differing:,}")
    return shown


def _verdict(report: ValidationReport) -> str:
    if not report.parameters:
        return "nothing was compared"
    wrong = sum(len(refit.wrong) for refit in report.refits)
    compared = f"{count(len(report.parameters), 'tensor')} compared over {count(len(report.refits), 'refit')}"
    return f"{wrong:,} of {compared} differ from golden" if wrong else f"{compared}, every byte is golden's"


def _what(result: ParameterResult) -> str:
    if result.problem or result.first is None:
        return result.problem
    return f"{count(result.mismatches, 'element')} differ, {_first(result.first)}"


def _first(first: Mismatch) -> str:
    at = ",".join(map(str, first.index))
    got, golden = (f"{value:g}" if value is not None else "nan or inf" for value in (first.got, first.expected))
    return f"first [{at}]: got {got} (0x{first.got_bits}), golden {golden} (0x{first.expected_bits})"
