"""`mcore-reshard validate`: refit a real model between real processes and compare every byte with golden."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from rich.console import RenderableType

from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.mesh import format_mesh
from mcore_reshard.planner.model.configs import builtin_names, load_config, traced_names
from mcore_reshard.planner.model.parameters import Role
from mcore_reshard.planner.model.precision import BLOCK_FP8, FP8, PRECISION_OF
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planning import InputError, PlanRequest, TracedRequest, read_request, read_traced_request

from .inputs import is_plan_file, plan_from_traces, read_plan
from .printable import printable
from .render import Cell, count, facts, grouped, noted, print_report, size, styled, table, verdict

if TYPE_CHECKING:
    from mcore_reshard.validation.report import ParameterResult, ValidationReport

EXIT_MISMATCH = 4
_ROWS_SHOWN = 40


def run(args: argparse.Namespace) -> int:
    if args.refits < 1 or not 0 < args.timeout < math.inf:
        raise InputError(["--refits and --timeout must be above zero, and finite"])
    notes: tuple[str, ...]
    request, plan = _from_plan(args) if is_plan_file(args.source) else (_from_config(args), None)
    if isinstance(request, PlanRequest):
        notes = request.notes
    elif plan is None:
        plan, notes = plan_from_traces(request)
    else:
        notes = _compare_with_traces(request, plan)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # counting GPUs must not keep ranks from being forked
    from mcore_reshard.kernels.errors import TransportUnavailable
    from mcore_reshard.kernels.transports.registry import device_of  # torch: not before the input is known to be good

    try:
        device_of(args.transport)
    except TransportUnavailable as error:
        remedy = "`mcore-reshard doctor` says what this machine can run; --transport gloo needs no GPU."
        raise InputError([str(error)], remedy) from None
    from mcore_reshard.validation.runner import ValidationRequest, validate

    if sys.stderr.isatty():  # no spinner: the ranks are forked from here, and threads do not survive that
        ranks = count(request.train.world + request.gen.world, "process", "processes")
        refits = count(args.refits, "refit")
        print(f"validating {printable(request.model)} in {ranks}, {refits} ...", file=sys.stderr)
    options = Options(transport=args.transport, timeout_s=args.timeout)
    report = validate(ValidationRequest(request, plan, options, engine=args.engine, refits=args.refits))
    parts = chain(_tables(report), noted(notes))
    print_report(args.json, {**report.as_dict(), "notes": list(notes)}, parts)
    if report.ok:
        return 0
    print(f"mcore-reshard: {_verdict(report)}", file=sys.stderr)
    for version, result in _differences(report)[:1]:
        first = f"refit {version}, gen:{result.gen_rank} {result.name}: {_difference(result)}"
        print(f"  first: {printable(first)}", file=sys.stderr)
    return EXIT_MISMATCH


def _from_config(args: argparse.Namespace) -> PlanRequest | TracedRequest:
    load_config(args.source)  # report an unreadable source before all else
    missing = [f"--{side}" for side in ("train", "gen") if getattr(args, side) is None]
    if missing:
        options = " and ".join(missing)
        raise InputError([f"give {options}: {args.source} is a config, and only a plan file states its meshes"])
    if args.config is not None:
        raise InputError([f"leave out --config: {args.source} is the config, and --config belongs to a plan file"])
    read = read_traced_request if args.traced else read_request
    return read(args.source, args.train, args.gen, args.policy or "exact", args.train_dtype, args.gen_dtype)


def _from_plan(args: argparse.Namespace) -> tuple[PlanRequest | TracedRequest, Plan]:
    """The plan, and the request that leads to it. Raises InputError with every option that contradicts the plan."""
    plan = read_plan(args.source)
    config = args.config or (plan.model if plan.model in builtin_names() + traced_names() else None)
    if config is None:
        raise InputError([f"the plan is of {plan.model!r}, which is not built in: give its config with --config"])
    if any(group.role is Role.TRACED for group in plan.groups):
        return _from_traced_plan(args, config, plan), plan
    if args.traced:
        raise InputError([f"{args.source} is planned by layout rules: leave out --traced, or give the model's config"])
    train, gen, planned_dtypes = format_mesh(plan.train), format_mesh(plan.gen), _dtypes_of(plan)
    asked_dtypes = (args.train_dtype, args.gen_dtype)
    dtypes = asked_dtypes if any(asked_dtypes) else planned_dtypes
    request = read_request(config, args.train or train, args.gen or gen, plan.policy, dtypes[0], dtypes[1], plan.engine)
    planned_again = request.plan()
    problems = []
    for side, planned, mesh in (("train", train, planned_again.train), ("gen", gen, planned_again.gen)):
        if (asked := format_mesh(mesh)) != planned:
            problems.append(f"--{side} is {asked}, the plan is for {planned}")
    asked, planned = (" -> ".join(dtype or "bf16" for dtype in both) for both in (dtypes, planned_dtypes))
    fields = ("groups", "pairs", "casts", "misc")
    differs = {name for name in fields if getattr(planned_again, name) != getattr(plan, name)}
    if asked != planned and differs:
        problems.append(f"--train-dtype and --gen-dtype say {asked}, the plan is of {planned}")
    if args.policy not in {None, plan.policy}:
        problems.append(f"--policy is {args.policy}, the plan follows {plan.policy}")
    if "groups" in differs:
        problems.append(f"the plan is of another model than {config}: their parameters differ")
    elif "misc" in differs and not problems:
        other = "it is of other dtypes, give them as --train-dtype and --gen-dtype"
        problems.append(f"the plan's misc parameters are not those of a plan of {asked}: {other}")
    if problems:
        raise InputError(problems)
    return request, plan


def _from_traced_plan(args: argparse.Namespace, config: str, plan: Plan) -> TracedRequest:
    train_dtype, gen_dtype = args.train_dtype, args.gen_dtype
    if not (train_dtype or gen_dtype):
        train_dtype, gen_dtype = _dtypes_of_pairs(plan)
    request = read_traced_request(
        config,
        args.train or plan.train,
        args.gen or plan.gen,
        args.policy or plan.policy,
        train_dtype,
        gen_dtype,
        plan.engine,
    )
    sides = (("train", plan.train, request.train), ("gen", plan.gen, request.gen))
    if problems := [
        f"--{side} is {format_mesh(asked)}, the plan is for {format_mesh(planned)}"
        for side, planned, asked in sides
        if asked != planned
    ]:
        raise InputError(problems)
    return replace(request, model=plan.model)


def _compare_with_traces(request: TracedRequest, plan: Plan) -> tuple[str, ...]:
    """Raise InputError if the plan is not what the installed loaders give. Returns notes on them."""
    planned_again, notes = plan_from_traces(request)
    if planned_again.groups != plan.groups:
        raise InputError([f"the plan is of another model than {request.model}: their parameters differ"])
    if planned_again.digest != plan.digest:
        raise InputError(["the loaders that are installed here lead to another plan: plan again with --traced"])
    return notes


def _dtypes_of(plan: Plan) -> tuple[str | None, str | None]:
    """The dtypes that a plan was probably made for.

    A plan without casts names only the engine's dtypes: the trainer has the same, or everything goes by misc.
    """
    gen_dtype = PRECISION_OF.get(plan.groups[0].dtype)
    if plan.pairs:
        gen_dtype = "fp8" if plan.groups[plan.pairs[0].scales].dtype == BLOCK_FP8.scales else "mxfp8"
    return PRECISION_OF[plan.casts[0].src] if plan.casts else gen_dtype, gen_dtype


def _dtypes_of_pairs(plan: Plan) -> tuple[str | None, str | None]:
    """The dtypes that a plan from traces was made for: its casts to FP8 start in bfloat16."""
    if not plan.pairs:
        return None, None
    return "bf16" if any(cast.dst == FP8 for cast in plan.casts) else "fp8", "fp8"


# --- text


def _tables(report: ValidationReport) -> Iterator[RenderableType]:
    lines: list[tuple[str, Cell]] = [
        ("model", styled(report.model, "bold")),
        ("training", f"{report.train}  {report.source}"),
        ("generation", f"{report.gen}  {report.engine}"),
        *((name, getattr(report, name)) for name in ("precision", "policy", "transport", "digest")),
    ]
    yield facts((name, value) for name, value in lines if value)
    refits = (
        (
            r.version,
            r.change,
            f"{r.seconds:.2f}",
            size(r.bulk_bytes),
            size(r.misc_bytes),
            len(r.parameters),
            len(r.wrong),
        )
        for r in report.refits
    )
    yield table("Refits", ">refit, weights, >seconds, >bulk, >misc, >tensors, >wrong", refits)
    groups = grouped(report.parameters, lambda result: (re.sub(r"\.[0-9]+\.", ".*.", result.name), result.route))
    tensors = (
        (*name_and_route, len(alike), size(sum(r.nbytes for r in alike)), sum(r.mismatches for r in alike))
        for name_and_route, alike in groups.items()  # over all layers, ranks and refits
    )
    yield table("Engine tensors", "tensor, route, >compared, >bytes, >differing elements", tensors)
    if differences := _differences(report):
        rows = ((version, f"gen:{r.gen_rank}", r.name, r.route, _difference(r)) for version, r in differences)
        columns = ">refit, rank, tensor, route, what"
        yield table("Differences from golden", columns, rows, most=_ROWS_SHOWN, noun="tensor")
    yield facts([("golden", verdict(report.ok, _verdict(report)))])


def _differences(report: ValidationReport) -> list[tuple[int, ParameterResult]]:
    """(refit, result) of every tensor that differs from golden."""
    return [(refit.version, result) for refit in report.refits for result in refit.wrong]


def _verdict(report: ValidationReport) -> str:
    if not report.parameters:
        return "nothing was compared"
    wrong = len(_differences(report))
    compared = f"{count(len(report.parameters), 'tensor')} compared over {count(len(report.refits), 'refit')}"
    return f"{wrong:,} of {compared} differ from golden" if wrong else f"{compared}, every byte is golden's"


def _difference(result: ParameterResult) -> str:
    if result.problem or result.first is None:
        return result.problem
    first, index = result.first, ",".join(map(str, result.first.index))
    refitted, golden = (f"{value:g}" if value is not None else "nan or inf" for value in (first.got, first.expected))
    bits = f"got {refitted} (0x{first.got_bits}), golden {golden} (0x{first.expected_bits})"
    return f"{count(result.mismatches, 'element')} differ, first [{index}]: {bits}"
