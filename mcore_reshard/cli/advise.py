"""`mcore-reshard advise`: the meshes with the fastest refits among those that fit in memory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType

from mcore_reshard.advise.advise import MOST_GPUS, Advised, advise
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh, format_mesh
from mcore_reshard.planning import InputError, read_request
from mcore_reshard.report.text import seconds_text

from .inputs import place_problems, topology_of, uses_pxn
from .render import count, facts, noted, print_report, progress, size, styled, table


def run(args: argparse.Namespace) -> int:
    counts = {"--gpus-train": args.gpus_train, "--gpus-gen": args.gpus_gen}
    problems = [
        f"{name} {given}: give 1 to {MOST_GPUS:,} GPUs" for name, given in counts.items() if not 1 <= given <= MOST_GPUS
    ]
    problems += place_problems(args.topology, "")
    try:
        request = read_request(args.config, TrainMesh(), GenMesh(), "exact", args.train_dtype, args.gen_dtype)
    except InputError as error:
        raise InputError([*error.problems, *problems], error.remedy) from None
    if problems:
        raise InputError(problems)
    topology = topology_of(args.topology, args.gpus_train, args.gpus_gen)
    with progress(f"looking for meshes for {request.model}"):
        advised = advise(request, topology, pxn=uses_pxn())
    print_report(args.json, _as_json(args, advised), _parts(args, advised))
    return 0


def _as_json(args: argparse.Namespace, advised: Advised) -> dict[str, Any]:
    """Sizes in bytes, times in seconds; meshes as `--train` and `--gen` take them."""
    return {
        "model": advised.model,
        "gpus": {"train": args.gpus_train, "gen": args.gpus_gen},
        "topology": args.topology,
        "gpu_bytes": advised.gpu_bytes,
        "meshes": {
            side: {"allowed": allowed, "fitting": fitting}
            for side, allowed, fitting in zip(("train", "gen"), advised.allowed, advised.fitting, strict=True)
        },
        "pairs": [
            {
                "train": format_mesh(advice.train),
                "gen": format_mesh(advice.gen),
                "bound_seconds": advice.bound_seconds,
                "simulated_seconds": advice.simulated_seconds,
                "train_bytes": advice.train_bytes,
                "gen_bytes": advice.gen_bytes,
                "reason": advice.reason,
            }
            for advice in advised.pairs
        ],
        "assumptions": list(advised.assumptions),
    }


def _parts(args: argparse.Namespace, advised: Advised) -> Iterator[RenderableType]:
    (allowed_train, allowed_gen), (train, gen) = advised.allowed, advised.fitting
    yield facts([
        ("model", styled(advised.model or "(unnamed)", "bold")),
        ("training", f"{count(args.gpus_train, 'GPU')}: {train} of {count(allowed_train, 'mesh', 'meshes')} fit in memory"),
        ("generation", f"{count(args.gpus_gen, 'GPU')}: {gen} of {count(allowed_gen, 'mesh', 'meshes')} fit in memory"),
        ("topology", f"{args.topology}, {size(advised.gpu_bytes)} a GPU"),
    ])  # fmt: skip
    rows = (
        (
            _short(advice.train),
            _short(advice.gen),
            seconds_text(advice.bound_seconds),
            "" if advice.simulated_seconds is None else seconds_text(advice.simulated_seconds),
            size(advice.train_bytes),
            size(advice.gen_bytes),
            advice.reason,
        )
        for advice in advised.pairs
    )
    yield table("Fastest refits", "--train, --gen, >bound, >simulated, >trainer, >engine, why", rows)
    yield from noted(advised.assumptions)
    best = advised.pairs[0]
    meshes = f"--train {_short(best.train)} --gen {_short(best.gen)} --topology {args.topology}"
    yield f"next: mcore-reshard simulate {args.config} {meshes}"


def _short(mesh: TrainMesh | GenMesh) -> str:
    """The mesh without its axes of size 1: tp=1,pp=1,dp=8 -> dp=8."""
    axes = [axis for axis in format_mesh(mesh).split(",") if not axis.endswith("=1")]
    return ",".join(axes) or "tp=1"
