"""`mcore-reshard plan`: plan a refit, prove it, and write it down."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from mcore_reshard.planner.plan.plan_file import save_plan
from mcore_reshard.planner.proof.prove import ProofError, prove
from mcore_reshard.planning import InputError, read_request

from .plan_tables import plan_report
from .render import progress, write, write_json
from .summary import summarize


def run(args: argparse.Namespace) -> int:
    request = read_request(args.config, args.train, args.gen, args.policy, args.train_dtype, args.gen_dtype)
    with progress(f"planning {request.model}"):
        started = time.perf_counter()
        plan = request.plan()
        proof = prove(plan)
        seconds = time.perf_counter() - started
    if args.out is not None and proof.ok:
        try:
            save_plan(plan, args.out)
        except (OSError, ValueError) as error:  # ValueError: a path that names no file
            raise InputError(
                [f"cannot write {args.out or repr(args.out)}: {getattr(error, 'strerror', None) or error}"]
            ) from error
    summary = summarize(plan, proof, seconds, request.notes)
    if args.json:
        write_json(summary)
    else:
        written = [f"plan written to {Path(args.out)}"] if args.out is not None and proof.ok else []
        write(*plan_report(plan, proof, summary), *written)
    if not proof.ok:
        raise ProofError(proof)
    return 0
