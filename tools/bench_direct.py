"""Measure the direct executor on N GPUs, half of them training ranks and half generation ranks.

    python tools/bench_direct.py --gpus 4

One run: the copy engine's limit between disjoint pairs of the same GPUs, then the whole model with several CTA counts
and tile sizes, each checked bit for bit before it is timed. With one GPU both ranks share it, and no link is measured.
The model is synthetic: the tensors of the plan with content that the receivers can compute. Results go to
tools/results/direct-x<N>.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import date, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from cuda.bindings import driver
from torch.distributed import PrefixStore, TCPStore

from mcore_reshard.kernels.device_copies import KernelShape
from mcore_reshard.kernels.direct import DirectExecutor, DirectOptions
from mcore_reshard.kernels.errors import Waiting
from mcore_reshard.kernels.gloo import GlooGroup
from mcore_reshard.kernels.ipc import Export, Mappings, export
from mcore_reshard.kernels.program import bind
from mcore_reshard.planner.configs import load_config
from mcore_reshard.planner.families import catalogue_from_config
from mcore_reshard.planner.mesh import parse_gen_mesh, parse_train_mesh
from mcore_reshard.planner.plan import Plan
from mcore_reshard.planner.planning import make_plan
from mcore_reshard.planner.schedule import Schedule, World
from mcore_reshard.planner.scheduling import schedule_of

sys.path.insert(0, str(Path(__file__).parent))
import synthetic

RESULTS = Path(__file__).parent / "results"
TIMEOUT_S = 120.0
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Bench:
    """What to measure."""

    gpus: int
    model: str
    layers: int  # 0: as many as the model has
    train: str
    gen: str
    repeats: int
    out: Path
    variants: tuple[DirectOptions, ...]

    @property
    def train_ranks(self) -> int:
        return max(1, self.gpus // 2)

    @property
    def ranks(self) -> int:
        return max(2, self.gpus)

    def plan(self) -> Plan:
        config = load_config(self.model)
        if self.layers:
            config = {**config, "num_hidden_layers": self.layers}
        return make_plan(
            catalogue_from_config(config), parse_train_mesh(self.train), parse_gen_mesh(self.gen), model=self.model
        )


class Rank:
    """One process of the benchmark."""

    def __init__(self, number: int, bench: Bench, address: tuple[str, int]) -> None:
        self.bench, self.number = bench, number
        self.world: World = "train" if number < bench.train_ranks else "gen"
        self.rank = number if self.world == "train" else number - bench.train_ranks
        self.device = torch.device("cuda", number % bench.gpus)
        torch.cuda.set_device(self.device)
        self._store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
        self._group = GlooGroup(PrefixStore("bench", self._store), number, bench.ranks, timeout_s=TIMEOUT_S)
        self._words = 0

    def run(self) -> None:
        """Measure everything; rank 0 reports it."""
        rows = [self._limit()]
        self._show(rows)
        start = time.perf_counter()
        plan = self.bench.plan()
        schedule = schedule_of(plan, self.world, self.rank)
        plan_s = time.perf_counter() - start
        tensors = synthetic.allocate(schedule, self.device)
        if self.world == "train":
            synthetic.fill(plan, self.world, self.rank, tensors)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        for number, options in enumerate(self.bench.variants):
            row = self._measure(number, plan, schedule, tensors, options, plan_s)
            row["share_of_limit"] = round(row["gb_per_s_per_receiver"] / rows[0]["gb_per_s_per_receiver"], 3)
            rows.append(row)
            self._show(rows)

    def _show(self, rows: list[dict[str, Any]]) -> None:
        """Say the newest figure and write all there are, so that a run that is cut short leaves its own."""
        if self.number == 0:
            print(json.dumps(rows[-1]), flush=True)
            write(self.bench, rows)

    def _measure(
        self,
        number: int,
        plan: Plan,
        schedule: Schedule,
        tensors: dict[str, torch.Tensor],
        options: DirectOptions,
        plan_s: float,
    ) -> dict[str, Any]:
        """One variant: prepared afresh, checked, timed."""
        if self.world == "gen":
            for tensor in tensors.values():
                tensor.view(torch.uint8).fill_(synthetic.POISON)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        self._barrier()
        free = torch.cuda.mem_get_info()[0]
        start = time.perf_counter()
        program = bind(schedule, tensors)
        bind_s = time.perf_counter() - start
        executor = DirectExecutor(
            PrefixStore(f"direct/{number}", self._store), program, timeout_s=TIMEOUT_S, options=options
        )
        prepare_s = time.perf_counter() - start
        self._barrier()
        runs = [self._timed(executor.run)]
        extra = torch.cuda.max_memory_allocated() - allocated
        taken = free - torch.cuda.mem_get_info()[0]
        wrong = synthetic.wrong_elements(plan, self.world, self.rank, tensors)
        runs += [self._timed(executor.run) for _ in range(self.bench.repeats)]
        table_bytes = executor.table_bytes
        self._barrier()
        executor.close()
        told = self._gather(
            {
                "spans": [span for *span, _ in runs],
                "cpu_ms": [cpu for *_, cpu in runs],
                "prepare_s": prepare_s,
                "bind_s": bind_s,
                "plan_s": plan_s,
                "nbytes": program.nbytes if self.world == "gen" else 0,
                "table_bytes": table_bytes,
                "extra_bytes": extra - table_bytes,
                "device_memory_taken": taken,
                "wrong": sum(wrong.values()),
            }
        )
        if bad := sum(word["wrong"] for word in told):
            raise SystemExit(f"{bad} elements are wrong: {wrong}")
        slowest = _milliseconds(told)
        median = statistics.median(slowest[1:])
        received = max(word["nbytes"] for word in told)
        return {
            "figure": "direct",
            **asdict(options.shape),
            "tile_kib": options.tile_bytes >> 10,
            "turn_kib": options.turn_bytes >> 10 if options.turn_bytes else "default",
            "checksums": options.checksums,
            "ms": round(median, 3),
            "ms_min_max": [round(min(slowest[1:]), 3), round(max(slowest[1:]), 3)],
            "first_ms": round(slowest[0], 3),
            "gb_per_s_per_receiver": round(received / median / 1e6, 1),
            "gb_per_receiver": round(received / 1e9, 3),
            "wrong_elements": 0,
            "prepare_s": round(max(word["prepare_s"] for word in told), 3),
            "bind_s": round(max(word["bind_s"] for word in told), 3),
            "plan_s": round(max(word["plan_s"] for word in told), 3),
            "host_cpu_ms": round(max(statistics.median(word["cpu_ms"][1:]) for word in told), 3),
            "table_mb": round(max(word["table_bytes"] for word in told) / 1e6, 2),
            "extra_memory_bytes": max(word["extra_bytes"] for word in told),
            "device_memory_taken_mb": round(max(word["device_memory_taken"] for word in told) / 1e6, 1),
        }

    def _limit(self) -> dict[str, Any]:
        """The copy engine from training rank i to generation rank i, all pairs at once."""
        nbytes = 2 * GIB
        buffer = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize()
        if self.world == "train":
            self._store.set(f"limit/{self.rank}", export({"limit": buffer}).to_json())
            copy: Callable[[], None] = lambda: None  # noqa: E731
        else:
            mappings = Mappings(self.device)
            exported = Export.from_json(self._store.get(f"limit/{self.rank % self.bench.train_ranks}"))
            (source,) = mappings.addresses(exported, ["limit"], "train")
            stream = torch.cuda.current_stream()

            def copy() -> None:
                driver.cuMemcpyAsync(buffer.data_ptr(), source, nbytes, stream.cuda_stream)
                stream.synchronize()

        runs = [self._timed(copy) for _ in range(3 + self.bench.repeats)]
        told = self._gather({"ms": [1e3 * (end - start) for start, end, _ in runs]})
        if self.world == "gen":
            mappings.close()
        self._barrier()
        # By each receiver's own clock: nothing keeps a copy from starting before the last rank has arrived.
        median = statistics.median(max(word["ms"][n] for word in told) for n in range(3, len(runs)))
        return {
            "figure": "copy_engine_limit",
            "ms": round(median, 3),
            "gb_per_s_per_receiver": round(nbytes / median / 1e6, 1),
        }

    def _timed(self, run: Callable[[], Any]) -> tuple[float, float, float]:
        """(start and end in seconds of the clock that all processes share, milliseconds of CPU in the whole process)."""
        self._barrier()
        cpu, start = time.process_time(), time.perf_counter()
        run()
        return start, time.perf_counter(), 1e3 * (time.process_time() - cpu)

    def _barrier(self) -> None:
        """All ranks leave within tens of microseconds: over the CPU messages, through rank 0."""
        word = torch.zeros(1, dtype=torch.uint8)
        waiting = Waiting(f"rank {self.number}", "the others", None, "barrier", False)
        if self.number:
            self._group.send(word, 0, waiting).wait()
            self._group.recv(word, 0, waiting).wait()
            return
        for way in (self._group.recv, self._group.send):
            for message in [way(torch.zeros_like(word), peer, waiting) for peer in range(1, self.bench.ranks)]:
                message.wait()

    def _gather(self, word: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank said, on every rank."""
        self._words += 1
        self._store.set(f"word/{self._words}/{self.number}", json.dumps(word))
        return [json.loads(self._store.get(f"word/{self._words}/{other}")) for other in range(self.bench.ranks)]


def _milliseconds(told: list[dict[str, Any]]) -> list[float]:
    """Of each run, from when the last rank called to when the last one returned."""
    runs = zip(*(word["spans"] for word in told), strict=True)
    return [1e3 * (max(end for _, end in spans) - max(start for start, _ in spans)) for spans in runs]


def work(number: int, bench: Bench, address: tuple[str, int]) -> None:
    Rank(number, bench, address).run()


def write(bench: Bench, rows: list[dict[str, Any]]) -> None:
    plan = bench.plan()
    _, version = driver.cuDriverGetVersion()
    found = {
        "command": f"bench_direct.py --gpus {bench.gpus} --model {bench.model} --train {bench.train} --gen {bench.gen}",
        "date": date.today().isoformat(),
        "hardware": f"{bench.gpus} x {torch.cuda.get_device_name(0)}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda_driver": version},
        "model": bench.model,
        "layers": bench.layers or "all",
        "train": bench.train,
        "gen": bench.gen,
        "train_ranks": bench.train_ranks,
        "gb_total_received": round(int(plan.recv_bytes.sum()) / 1e9, 2),
        "misc_bytes": plan.misc_bytes,
        "rows": rows,
    }
    bench.out.parent.mkdir(exist_ok=True, parents=True)
    bench.out.write_text(json.dumps(found, indent=1) + "\n")


def variants(args: argparse.Namespace) -> tuple[DirectOptions, ...]:
    """The first of each list, with one of them varied at a time, or all with `--grid`; then with checksums."""
    axes = (args.ctas, args.shapes, args.tiles_kib, args.turns_kib)
    usual = tuple(axis[0] for axis in axes)
    varied = [(*usual[:n], value, *usual[n + 1 :]) for n, axis in enumerate(axes) for value in axis]
    listed = [
        DirectOptions(KernelShape(ctas, *shape), tile << 10, turn << 10 if turn else None)
        for ctas, shape, tile, turn in (product(*axes) if args.grid else varied)
    ]
    summed = [replace(options, checksums=True) for options in listed[: 1 if args.grid else len(args.ctas)]]
    return tuple(dict.fromkeys([*listed, *summed]))


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def shapes(text: str) -> list[tuple[int, int]]:
    """Threads x loads under way in each, as "512x8,1024x4"."""
    return [(int(threads), int(batch)) for threads, batch in (word.split("x") for word in text.split(","))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=0, help="cut the model short, to fit one GPU")
    parser.add_argument("--train", help="training mesh; by default experts over all training ranks")
    parser.add_argument("--gen", help="generation mesh; by default tensor-parallel over all generation ranks")
    parser.add_argument("--ctas", type=numbers, default=[48, 16, 32, 64, 132])
    parser.add_argument("--tiles-kib", type=numbers, default=[128, 32, 64, 256, 512])
    parser.add_argument("--turns-kib", type=numbers, default=[0], help="taken from a source at a time; 0: the default")
    parser.add_argument("--shapes", type=shapes, default=[(KernelShape().threads, KernelShape().batch)])
    parser.add_argument("--grid", action="store_true", help="every combination of these")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    half = max(1, args.gpus // 2)
    bench = Bench(
        gpus=args.gpus,
        model=args.model,
        layers=args.layers,
        train=args.train or f"tp=1,ep={half},dp={half}",
        gen=args.gen or f"tp={half}",
        repeats=args.repeats,
        out=args.out or RESULTS / f"direct-x{args.gpus}.json",
        variants=variants(args),
    )
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S))
    mp.spawn(work, args=(bench, ("127.0.0.1", store.port)), nprocs=bench.ranks)
    print(f"wrote {bench.out}")


if __name__ == "__main__":
    main()
