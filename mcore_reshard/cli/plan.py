"""`mcore-reshard plan`: plan a refit, prove it, and write it down."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from rich.console import RenderableType

from mcore_reshard.kernels.transports.memory import session_memory
from mcore_reshard.planner.plan.plan_file import PlanFileError, dump_plan
from mcore_reshard.planning import InputError, TracedRequest, read_request, read_traced_request

from .inputs import about_racks, place_problems, plan_from_traces, with_topology
from .memory import as_json, memory_parts
from .render import progress
from .summary import print_plan, summarize


def run(args: argparse.Namespace) -> int:
    problems = place_problems(args.topology, args.hosts) + ([] if args.out is None else unwritable(args.out))
    read = read_traced_request if args.traced else read_request
    try:
        dtypes = args.train_dtype, args.gen_dtype
        request = read(args.config, args.train, args.gen, args.policy, *dtypes, args.engine)
    except InputError as error:
        raise InputError([*error.problems, *problems], error.remedy) from None
    if problems:
        raise InputError(problems)
    started = time.perf_counter()
    if isinstance(request, TracedRequest):
        plan, notes = plan_from_traces(request)
        plan = with_topology(plan, args.topology, args.hosts)
        proof = plan.prove()
    else:
        with progress(f"planning {request.model}"):
            plan, notes = with_topology(request.plan(), args.topology, args.hosts), request.notes
            proof = plan.prove()
    seconds = time.perf_counter() - started
    more: list[RenderableType] = []
    if args.out is not None and proof.ok:
        try:
            if os.path.exists(args.out) and os.path.samestat(os.stat(args.out), os.fstat(1)):
                sys.stdout.write(dump_plan(plan))  # /dev/stdout, wherever it leads: the report follows
            else:
                plan.save(args.out)
        except (OSError, PlanFileError) as error:
            failure = error.__cause__ or error  # a PlanFileError's is an OSError
            raise InputError([cannot_write(args.out, getattr(failure, "strerror", None) or str(failure))]) from error
        more = [f"plan written to {Path(args.out)}"]
    summary = summarize(plan, proof, seconds, (*notes, *about_racks(plan.topology)))
    summary["memory"] = None
    if proof.ok:
        with progress("counting its memory"):
            memory = session_memory(plan)
        summary["memory"] = as_json(memory)
        more = [*memory_parts(memory), *more]
    print_plan(plan, proof, summary, args.json, more)
    return 0


def unwritable(path: str) -> list[str]:
    """One reason why a plan cannot be written there, or none. It does not try to write."""
    target = Path(path)
    reasons = {
        "the path is empty": not path,
        "it is a directory": target.is_dir(),
        f"{target.parent} is no directory": not target.parent.is_dir(),
        "permission denied": not os.access(target if target.exists() else target.parent, os.W_OK),
    }
    return [cannot_write(path, reason) for reason, holds in reasons.items() if holds][:1]


def cannot_write(path: str, reason: str) -> str:
    return f"cannot write {path or repr(path)}: {reason}; give --out a file in a folder that exists and is yours"
