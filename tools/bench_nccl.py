"""Measure the nccl executor on N GPUs, half of them training ranks and half generation ranks.

    python tools/bench_nccl.py --gpus 4

One run: what NCCL itself reaches with large messages between the same ranks, and with smaller ones; then the whole
model with several amounts of scratch, streams, slots and CTAs, each checked bit for bit before it is timed. The model
is synthetic: the tensors of the plan with content that the receivers can compute. With NCCL_P2P_DISABLE=1 and
NCCL_SHM_DISABLE=1 in the environment it measures the network path. Results go to tools/results/nccl-x<N>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import nccl.core
import torch
import torch.multiprocessing as mp
from torch.distributed import PrefixStore, TCPStore

from mcore_reshard.kernels.errors import Waiting
from mcore_reshard.kernels.gloo import GlooGroup
from mcore_reshard.kernels.nccl import DEFAULT_COPY_CTAS, NcclExecutor
from mcore_reshard.kernels.nccl_communicator import NcclCommunicator, NcclMessage, new_unique_id
from mcore_reshard.kernels.program import bind
from mcore_reshard.kernels.rounds import ScratchBudget
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
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to set the executor up."""

    budget: ScratchBudget
    copy_ctas: int = DEFAULT_COPY_CTAS


@dataclass(frozen=True, slots=True)
class Bench:
    """What to measure."""

    gpus: int
    model: str
    layers: int  # 0: as many as the model has
    train: str
    gen: str
    repeats: int
    message_mib: tuple[int, ...]  # for NCCL alone
    variants: tuple[Variant, ...]

    @property
    def train_ranks(self) -> int:
        return self.gpus // 2

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
        self.device = torch.device("cuda", number)
        torch.cuda.set_device(self.device)
        self._store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S))
        self._group = GlooGroup(PrefixStore("bench", self._store), number, bench.gpus, timeout_s=TIMEOUT_S)
        self._words = 0

    def run(self) -> list[dict[str, Any]]:
        """All figures, as known to rank 0."""
        rows: list[dict[str, Any]] = []

        def add(row: dict[str, Any]) -> None:
            rows.append(row)
            if self.number == 0:
                print(json.dumps(row), flush=True)

        for row in self._nccl_alone():
            add(row)
        limit = max(row["gb_per_s_per_receiver"] for row in rows)
        plan = self.bench.plan()
        schedule = schedule_of(plan, self.world, self.rank)
        tensors = synthetic.allocate(schedule, self.device)
        if self.world == "train":
            synthetic.fill(plan, self.world, self.rank, tensors)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        for number, variant in enumerate(self.bench.variants):
            row = self._measure(number, plan, schedule, tensors, variant)
            add({**row, "share_of_nccl": round(row["gb_per_s_per_receiver"] / limit, 3)})
        return rows

    def _nccl_alone(self) -> list[dict[str, Any]]:
        """Grouped messages from every training rank to every generation rank, nothing packed; one row a size."""
        half, ranks = self.bench.train_ranks, self.bench.gpus
        waiting = Waiting(f"rank {self.number}", "the others", None, "the bare messages", self.world == "train")
        if self.number == 0:
            self._store.set("id", new_unique_id().hex())
        unique_id = bytes.fromhex(self._store.get("id").decode())
        communicator = NcclCommunicator(unique_id, self.number, ranks, waiting)
        _until(lambda: communicator.is_idle(waiting))
        peers = range(half, ranks) if self.world == "train" else range(half)
        buffer = torch.zeros(max(self.bench.message_mib) * MIB * half, dtype=torch.uint8, device=self.device)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        rows = []
        for message_mib in self.bench.message_mib:
            size = message_mib * MIB
            messages = [
                NcclMessage(buffer[n * size : (n + 1) * size], peer, self.world == "train")
                for n, peer in enumerate(peers)
            ]
            groups = max(1, max(self.bench.message_mib) // message_mib)

            def exchange(messages: list[NcclMessage] = messages, groups: int = groups) -> None:
                for _ in range(groups):
                    communicator.start(messages, stream, waiting)
                    _until(lambda: communicator.is_idle(waiting))
                stream.synchronize()

            runs = [self._timed(exchange)[0] for _ in range(3 + self.bench.repeats)]
            told = self._gather({"ms": runs})
            median = statistics.median(max(word["ms"][n] for word in told) for n in range(3, len(runs)))
            rows.append(
                {
                    "figure": "nccl_alone",
                    "message_mib": message_mib,
                    "groups": groups,
                    "ms": round(median, 3),
                    "gb_per_s_per_receiver": round(size * groups * half / median / 1e6, 1),
                }
            )
        self._barrier()
        communicator.abort()
        return rows

    def _measure(
        self, number: int, plan: Plan, schedule: Schedule, tensors: dict[str, torch.Tensor], variant: Variant
    ) -> dict[str, Any]:
        """One variant: prepared afresh, checked, timed."""
        if self.world == "gen":
            for tensor in tensors.values():
                tensor.view(torch.uint8).fill_(synthetic.POISON)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._barrier()
        free = torch.cuda.mem_get_info()[0]
        start = time.perf_counter()
        program = bind(schedule, tensors)
        executor = NcclExecutor(
            program,
            PrefixStore(f"nccl/{number}", self._store),
            timeout_s=TIMEOUT_S,
            budget=variant.budget,
            copy_ctas=variant.copy_ctas,
        )
        prepare_s = time.perf_counter() - start
        self._barrier()
        runs = [self._timed(executor.run)]
        taken = free - torch.cuda.mem_get_info()[0]
        wrong = synthetic.wrong_elements(plan, self.world, self.rank, tensors) if self.world == "gen" else {}
        runs += [self._timed(executor.run) for _ in range(self.bench.repeats)]
        scratch, table, rounds = executor.scratch_bytes, executor.table_bytes, executor.round_count
        bucket_mib = executor.bucket_bytes / MIB
        self._barrier()
        executor.close()
        told = self._gather(
            {
                "wall_ms": [wall for wall, _, _ in runs],
                "cpu_ms": [cpu for _, cpu, _ in runs],
                "thread_ms": [thread for _, _, thread in runs],
                "prepare_s": prepare_s,
                "nbytes": program.nbytes if self.world == "gen" else 0,
                "scratch": scratch,
                "table": table,
                "rounds": rounds,
                "taken": taken,
                "wrong": dict(list(wrong.items())[:3]),
            }
        )
        if bad := [word["wrong"] for word in told if word["wrong"]]:
            raise SystemExit(f"elements are wrong with {variant}: {bad}")
        slowest = [max(word["wall_ms"][n] for word in told) for n in range(len(runs))]
        median = statistics.median(slowest[1:])
        received = max(word["nbytes"] for word in told)
        return {
            "figure": "nccl",
            "scratch_mib": variant.budget.scratch_bytes // MIB,
            "streams": variant.budget.streams,
            "slots": variant.budget.slots,
            "checksums": variant.budget.checksums,
            "copy_ctas": variant.copy_ctas,
            "bucket_mib": round(bucket_mib, 2),
            "rounds": max(word["rounds"] for word in told),
            "ms": round(median, 3),
            "ms_min_max": [round(min(slowest[1:]), 3), round(max(slowest[1:]), 3)],
            "first_ms": round(slowest[0], 3),
            "gb_per_s_per_receiver": round(received / median / 1e6, 1),
            "gb_per_receiver": round(received / 1e9, 3),
            "wrong_elements": 0,
            "prepare_s": round(max(word["prepare_s"] for word in told), 3),
            "host_cpu_ms": round(max(statistics.median(word["cpu_ms"][1:]) for word in told), 3),
            "host_thread_ms": round(max(statistics.median(word["thread_ms"][1:]) for word in told), 3),
            "scratch_bytes": max(word["scratch"] for word in told),
            "table_mb": round(max(word["table"] for word in told) / 1e6, 2),
            "device_memory_taken_mb": round(max(word["taken"] for word in told) / 1e6, 1),
        }

    def _timed(self, run: Callable[[], Any]) -> tuple[float, float, float]:
        """(wall, CPU of the whole process, CPU of this thread) in milliseconds, from a common start."""
        self._barrier()
        cpu, thread, start = time.process_time(), time.thread_time(), time.perf_counter()
        run()
        wall = time.perf_counter() - start
        return 1e3 * wall, 1e3 * (time.process_time() - cpu), 1e3 * (time.thread_time() - thread)

    def _barrier(self) -> None:
        """All ranks leave within tens of microseconds: over the CPU messages, through rank 0."""
        word = torch.zeros(1, dtype=torch.uint8)
        waiting = Waiting(f"rank {self.number}", "the others", None, "barrier", False)
        if self.number:
            self._group.send(word, 0, waiting).wait()
            self._group.recv(word, 0, waiting).wait()
            return
        for way in (self._group.recv, self._group.send):
            for message in [way(torch.zeros_like(word), peer, waiting) for peer in range(1, self.bench.gpus)]:
                message.wait()

    def _gather(self, word: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank said, on every rank."""
        self._words += 1
        self._store.set(f"word/{self._words}/{self.number}", json.dumps(word))
        return [json.loads(self._store.get(f"word/{self._words}/{other}")) for other in range(self.bench.gpus)]


def _until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not reached():
        if time.monotonic() > deadline:
            raise SystemExit(f"NCCL alone made no progress within {TIMEOUT_S} s")


def work(number: int, bench: Bench, address: tuple[str, int], out: str) -> None:
    rows = Rank(number, bench, address).run()
    if number == 0:
        write(bench, rows, Path(out))


def write(bench: Bench, rows: list[dict[str, Any]], out: Path) -> None:
    plan = bench.plan()
    versions = nccl.core.get_version()
    found = {
        "command": " ".join(sys.argv),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")},
        "date": date.today().isoformat(),
        "hardware": f"{bench.gpus} x {torch.cuda.get_device_name(0)}",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "nccl4py": str(versions.nccl4py),
            "nccl": str(versions.libnccl.version) if versions.libnccl else None,
        },
        "model": bench.model,
        "layers": bench.layers or "all",
        "train": bench.train,
        "gen": bench.gen,
        "gb_total_received": round(int(plan.recv_bytes.sum()) / 1e9, 2),
        "misc_bytes": plan.misc_bytes,
        "rows": rows,
    }
    out.parent.mkdir(exist_ok=True, parents=True)
    out.write_text(json.dumps(found, indent=1) + "\n")


def variants(args: argparse.Namespace) -> tuple[Variant, ...]:
    """The first of every list together, then every list with the first of the others, then the checksums' cost."""
    usual = Variant(ScratchBudget(args.scratch_mib[0] * MIB, args.streams[0], args.slots[0]), args.ctas[0])

    def with_budget(**changes: Any) -> Variant:
        return replace(usual, budget=replace(usual.budget, **changes))

    listed = [
        usual,
        *(with_budget(scratch_bytes=mib * MIB) for mib in args.scratch_mib),
        *(with_budget(streams=streams) for streams in args.streams),
        *(with_budget(slots=slots) for slots in args.slots),
        *(replace(usual, copy_ctas=ctas) for ctas in args.ctas),
        with_budget(checksums=True),
    ]
    return tuple(dict.fromkeys(listed))


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=0, help="cut the model short, to fit small GPUs")
    parser.add_argument("--train", help="training mesh; by default experts over all training ranks")
    parser.add_argument("--gen", help="generation mesh; by default tensor-parallel over all generation ranks")
    parser.add_argument("--message-mib", type=numbers, default=[1024, 512, 256, 128, 64, 32, 8])
    parser.add_argument("--scratch-mib", type=numbers, default=[512, 256, 128, 64, 1024, 2048])
    parser.add_argument("--streams", type=numbers, default=[2, 1])
    parser.add_argument("--slots", type=numbers, default=[2, 3, 4])
    parser.add_argument("--ctas", type=numbers, default=[DEFAULT_COPY_CTAS, 16, 64])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    half = args.gpus // 2
    if half < 1:
        raise SystemExit("NCCL needs a GPU for every rank: two at least")
    bench = Bench(
        gpus=args.gpus,
        model=args.model,
        layers=args.layers,
        train=args.train or f"tp=1,ep={half},dp={half}",
        gen=args.gen or f"tp={half}",
        repeats=args.repeats,
        message_mib=tuple(args.message_mib),
        variants=variants(args),
    )
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S))
    out = args.out or RESULTS / f"nccl-x{args.gpus}.json"
    mp.spawn(work, args=(bench, ("127.0.0.1", store.port), str(out)), nprocs=bench.gpus)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
