"""Profile the kernels that copy and cast within a GPU with Nsight Compute: what bounds each of them.

    python tools/profile_kernels.py              # one GPU, and ncu; writes tools/results/profile-x1.json

Two layers of qwen3-30b-a3b are packed, as a trainer packs them: in BF16, and made block FP8 on the way. Clocks are left alone.
Counters of NVLink need two GPUs; what bounds kernels there is in tools/bench_links.py.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from bench import machine
from bench.results import line_by_line
from synthetic import allocate, fill

RESULTS = Path(__file__).parent / "results"
MODEL, LAYERS = "qwen3-30b-a3b", 2
BUCKET_BYTES = 64 << 20
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "WarpStateStats", "Occupancy", "LaunchStats")
STALLED = "smsp__average_warps_issue_stalled_"
FIGURES = {  # of a kernel: the name in the data file, ncu's metric, and how many of its units are one of ours
    "us": ("gpu__time_duration.sum", 1e3),
    "dram_read_mb": ("dram__bytes_read.sum", 1e6),
    "dram_written_mb": ("dram__bytes_write.sum", 1e6),
    "dram_percent": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "sm_percent": ("sm__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "warps_percent": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1.0),
    "registers": ("launch__registers_per_thread", 1.0),
}


def gathers() -> Iterator[tuple[str, Any]]:
    """(case, what packs two layers into one buffer): by as many CTAs as within a GPU, and as where others work as well."""
    import mcore_reshard as mr
    from mcore_reshard.kernels.copies.bind import bind
    from mcore_reshard.kernels.copies.buckets import aligned, cut_buckets
    from mcore_reshard.kernels.copies.copy_table import joined
    from mcore_reshard.kernels.cuda.cast_tiles import cut_rounds
    from mcore_reshard.kernels.cuda.copy_kernel import DeviceGather, KernelShape, own_gpu_shape
    from mcore_reshard.kernels.cuda.tiles import DEFAULT_TILE_BYTES
    from mcore_reshard.planner.model.configs import load_config
    from mcore_reshard.planner.plan.make_schedule import schedule_of

    device = torch.device("cuda", 0)
    config = {**load_config(MODEL), "num_hidden_layers": LAYERS}
    copying = own_gpu_shape(device), KernelShape()
    casting = KernelShape(ctas=528, threads=256), KernelShape(ctas=88, threads=256)  # as in transports/direct/slots.py
    for name, gen_dtype, shapes in (("BF16", "bf16", copying), ("BF16 made block FP8", "fp8", casting)):
        plan = mr.plan(config, train="tp=1", gen="tp=1", gen_dtype=gen_dtype, model=MODEL)
        schedule = schedule_of(plan, "train", 0)
        tensors = allocate(schedule, device)
        fill(plan, "train", 0, tensors)
        bound = bind(schedule, tensors)
        buckets = cut_buckets(schedule, BUCKET_BYTES)
        starts = np.cumsum([0, *(aligned(bucket.nbytes) for bucket in buckets)]).tolist()
        packed = torch.empty(starts[-1], dtype=torch.uint8, device=device)
        base = len(bound.tensors)
        copies = joined([bucket.copies_at(base, start) for bucket, start in zip(buckets, starts, strict=False)])
        addresses = np.array([tensor.data_ptr() for tensor in (*bound.tensors, packed)], np.uint64)
        elements = [tensor.numel() for tensor in bound.tensors]
        (tables,) = cut_rounds([copies], addresses, bound.casts, DEFAULT_TILE_BYTES, elements)
        for shape in shapes:
            yield name, DeviceGather(tables, device, shape)


def work() -> None:
    """Launch every case twice; ncu looks at the second time."""
    stream = torch.cuda.current_stream()
    for case, gather in gathers():
        gather.launch(stream)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        gather.launch(stream)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        print(case, flush=True)


def profiled(folder: Path) -> list[dict[str, Any]]:
    """A row for each kernel, in the order of launches, as ncu prints it."""
    report = folder / "kernels.ncu-rep"
    sections = [word for section in SECTIONS for word in ("--section", section)]
    options = ["--clock-control", "none", "--profile-from-start", "off", *sections]
    metrics = ["--metrics", "dram__bytes_read.sum,dram__bytes_write.sum"]
    script = [sys.executable, __file__, "--work"]
    subprocess.run(["ncu", *options, *metrics, "--export", str(report), *script], check=True)
    page = ["ncu", "--import", str(report), "--csv", "--page", "raw", "--print-units", "base"]
    text = subprocess.run(page, check=True, capture_output=True, text=True).stdout
    (folder / "kernels.csv").write_text(text)
    return [row for row in csv.DictReader(io.StringIO(text)) if row["ID"].isdigit()]


def figures(row: dict[str, Any]) -> dict[str, Any]:
    """What the data file keeps of a kernel."""
    found = {name: round(float(row[metric].replace(",", "")) / per, 1) for name, (metric, per) in FIGURES.items()}
    stalls = {
        name.removeprefix(STALLED).removesuffix("_per_issue_active.ratio"): float(value)
        for name, value in row.items()
        if name.startswith(STALLED) and name.endswith("_per_issue_active.ratio")
    }
    total = sum(stalls.values())
    most = sorted(stalls, key=lambda name: -stalls[name])[:3]
    grid = int(row["launch__grid_size"].replace(",", ""))
    kernel = row["Kernel Name"].partition("(")[0]
    return {
        "kernel": kernel,
        "ctas": grid,
        **found,
        "stalled_on": {name: round(stalls[name] / total, 2) for name in most},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "profile-x1.json")
    parser.add_argument("--keep", type=Path, help="a folder for ncu's own report")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work()
        return
    if not shutil.which("ncu"):
        parser.error("ncu, of Nsight Compute, is not installed")
    name, driver = machine.gpus()[0]
    with tempfile.TemporaryDirectory() as fresh:
        folder = arguments.keep or Path(fresh)
        folder.mkdir(parents=True, exist_ok=True)
        rows = [figures(row) for row in profiled(folder)]
    header = {
        "what": "kernels within a GPU: time, and shares of what the GPU can do, by Nsight Compute",
        "date": date.today().isoformat(),
        "hardware": f"1 x {name}",
        "driver": driver,
        "versions": machine.versions("cuda-core", "cuda-bindings"),
        "model": f"{MODEL}, {LAYERS} layers",
    }
    arguments.out.write_text(line_by_line({**header, "rows": rows}))


if __name__ == "__main__":
    main()
