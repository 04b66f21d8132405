"""Measure what the checks of written weights cost a refit: checksums of what is sent, before it is read and after.

    python tools/bench_source_checks.py          # writes tools/results/source-checks-x<GPUs>.json

One process holds a training rank's tensors on one GPU and an engine rank's on another; with one GPU, both on that. It
pulls with the kernel and the table of `direct`, as one refit does, and checks as a session's training rank does. Every
pull is timed from the call to its end, with no checks, sampled and full checks in turn, so that a machine that warms up
slows all alike. `passes_ms` is the two passes alone. After the pulls a write of one tensor must be found.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule, bind
from mcore_reshard.kernels.copies.peer_table import peer_table
from mcore_reshard.kernels.copies.strata import SAMPLED_SHARE, Strata
from mcore_reshard.kernels.errors import TornWeightsError
from mcore_reshard.kernels.options import SOURCE_CHECKS, Options
from mcore_reshard.kernels.transports.source_checks import SourceChecks
from mcore_reshard.planner.plan.make_schedule import schedule_of

sys.path.insert(0, str(Path(__file__).parent))
import synthetic
from bench import machine
from bench.workloads import WORKLOADS, Case, case_of

RESULTS = Path(__file__).parent / "results"
NAMES = ("moe-ep-tp", "dense-tp-tp", "moe-fp8")
SHARES, TILES = (0.0, 0.01, 0.02, 0.05, 0.1), (2 << 10, 4 << 10, 16 << 10, 64 << 10)


def tensors_of(case: Case, device: torch.device, world: Any) -> BoundSchedule:
    """The tensors of rank 0 on a GPU, full of random bytes."""
    schedule = schedule_of(case.plan(), world, 0)
    tensors = synthetic.allocate(schedule, device)
    for tensor in tensors.values():
        tensor.view(torch.uint8).random_(0, 256)
    return bind(schedule, tensors)


def puller(train: BoundSchedule, gen: BoundSchedule) -> Callable[[], None]:
    """All transfers between the two by one launch of the copy kernel, from the call to its end."""
    from mcore_reshard.kernels.cuda.copy_kernel import DeviceCopies
    from mcore_reshard.kernels.cuda.tiles import DEFAULT_TILE_BYTES, cut_tiles

    assert gen.schedule.view is not None and gen.device is not None
    table = peer_table(gen.schedule)
    sources = [train.by_name[source.tensor] for source in table.theirs]
    first = gen.tensors[0].view(torch.uint8).view(-1)[:1]  # torch enables access, either way, with the first copy
    first.copy_(sources[0].view(torch.uint8).view(-1)[:1])
    sources[0].view(torch.uint8).view(-1)[:1].copy_(first)
    addresses = np.array([tensor.data_ptr() for tensor in (*gen.tensors, *sources)], np.uint64)
    copies = DeviceCopies(cut_tiles(table.copies, addresses, DEFAULT_TILE_BYTES), gen.device)
    stream = torch.cuda.Stream(gen.device)

    def pull() -> None:
        torch.cuda.current_stream(train.device).synchronize()  # as READY does
        with torch.cuda.device(gen.device):
            copies.launch(stream)
        stream.synchronize()

    return pull


def timed_ms(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize(0)
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def nothing() -> None:
    torch.cuda.current_stream().synchronize()


def row_of(
    case: Case, checks: str, checker: SourceChecks, times_ms: Sequence[float], plain_ms: float
) -> dict[str, Any]:
    passes = [timed_ms(checker.around(nothing)) for _ in range(21)][1:]
    ms, passes_ms = statistics.median(times_ms), statistics.median(passes) if checks != "off" else 0.0
    return {
        "workload": case.name,
        "checks": checks,
        "ms": round(ms, 3),
        "ms_min_max": [round(min(times_ms), 3), round(max(times_ms), 3)],
        "cost": round(ms / plain_ms - 1, 4),
        "passes_ms": round(passes_ms, 3),
        "passes_cost": round(passes_ms / plain_ms, 4),
        "checked_mb": round(checker.checked_bytes / 1e6, 1),
        "tiles": checker.tiles,
        "memory_mb": round(checker.table_bytes / 1e6, 1),
    }


def measured(case: Case, repeats: int) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """(facts, rows, sweep) of a workload."""
    gen_device = torch.device("cuda", torch.cuda.device_count() - 1)
    train, gen = tensors_of(case, torch.device("cuda", 0), "train"), tensors_of(case, gen_device, "gen")
    torch.cuda.set_device(0)
    pull = puller(train, gen)
    start = time.perf_counter()
    checkers = {checks: SourceChecks(train, Options(source_checks=checks)) for checks in SOURCE_CHECKS}
    bind_s = time.perf_counter() - start
    times: dict[str, list[float]] = {checks: [] for checks in SOURCE_CHECKS}
    for turn in range(repeats + 1):
        for checks, checker in checkers.items():
            ms = timed_ms(checker.around(pull))
            if turn:
                times[checks].append(ms)
    plain_ms = statistics.median(times["off"])
    rows = [row_of(case, checks, checkers[checks], times[checks], plain_ms) for checks in SOURCE_CHECKS]
    for checks in ("sampled", "full"):
        check_that_it_finds(train, checkers[checks])
    nbytes = np.array([tensor.nbytes for tensor in train.tensors], np.int64)
    facts = {
        "what": f"{case.model}: {case.what}, {', '.join(case.dtypes)}",
        "tensors": len(nbytes),
        "gb": round(int(nbytes.sum()) / 1e9, 2),
        "bind_s": round(bind_s, 3),
    }
    sweep = [swept(train, nbytes, share, tile) for tile in TILES for share in SHARES if case.name == NAMES[0]]
    return facts, rows, [{"workload": case.name, **each} for each in sweep]


def check_that_it_finds(train: BoundSchedule, checker: SourceChecks) -> None:
    tensor = train.tensors[len(train.tensors) // 2]
    try:
        checker.around(lambda: tensor.data.view(torch.uint8).bitwise_xor_(1))()
    except TornWeightsError:
        return
    raise SystemExit("the write of a tensor was not found")


def swept(train: BoundSchedule, nbytes: Any, share: float, tile_bytes: int) -> dict[str, Any]:
    """Both passes with other samples."""
    from mcore_reshard.kernels.cuda.tile_sums import DeviceTileSums

    tiles = -(-nbytes // tile_bytes)
    samples = np.maximum(np.minimum(tiles, 1), np.ceil(tiles * share).astype(np.int64))
    addresses = np.array([tensor.data_ptr() for tensor in train.tensors], np.int64)
    sums = DeviceTileSums(Strata.of(addresses, nbytes, samples, tile_bytes), torch.device("cuda", 0))

    def passes(seed: int) -> None:
        sums.take(seed)
        sums.take_again()
        torch.cuda.synchronize(0)
        assert sums.is_done() and not len(sums.changed())

    ms = statistics.median(timed_ms(partial(passes, seed)) for seed in range(15))
    return {
        "share": share,
        "tile_bytes": tile_bytes,
        "tiles": int(samples.sum()),
        "passes_ms": round(ms, 3),
        "gb_per_s": round(2e-6 * int(np.minimum(nbytes, samples * tile_bytes).sum()) / ms, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--layers", type=int, default=0, help="cut the models short")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    gpus = min(2, torch.cuda.device_count())
    if not gpus:
        raise SystemExit("there is no CUDA device")
    name, driver = machine.gpus()[0]
    document: dict[str, Any] = {
        "command": machine.command("bench_source_checks.py", sys.argv[1:]),
        "date": date.today().isoformat(),
        "hardware": f"{gpus} x {name}",
        "driver": driver,
        "versions": machine.versions("cuda-core"),
        "environment": {key: value for key, value in sorted(os.environ.items()) if key.startswith("NCCL_")},
        "repeats": args.repeats,
        "share": SAMPLED_SHARE,
        "workloads": {},
        "rows": [],
        "sweep": [],
    }
    out = args.out or RESULTS / f"source-checks-x{gpus}.json"
    for workload in WORKLOADS:
        if workload.name in NAMES:
            case = case_of(workload, 2, layers=args.layers)
            document["workloads"][case.name], rows, sweep = measured(case, args.repeats)
            document["rows"] += rows
            document["sweep"] += sweep
            print(*(str(row) for row in (document["workloads"][case.name], *rows, *sweep)), sep="\n", flush=True)
            out.write_text(json.dumps(document, indent=1) + "\n")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
