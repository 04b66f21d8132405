"""Measure what GPUs of one host reach when they read each other: in GB/s into each GPU that reads.

    python tools/bench_links.py                  # four GPUs; writes tools/results/links-x4.json

On two or three GPUs only the patterns that these have are measured. The copy kernel of the direct transport, and the copy
engines, move the same 2 GiB eight times between each pair of a pattern. A GPU that reads several others takes from one after
the other, or in turns of a tile. As a replica in a relay does, it also has two kernels at once: one pulls from the trainer, the
other one pulls from the others, or pushes to them.

One process drives all kernels. Copy engines have a process for each GPU that reads: of one process, the driver lets copies
wait for those that another GPU had to or from the same one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from itertools import permutations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Counting GPUs through the driver would spoil this process for forking.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import numpy as np
import torch

from mcore_reshard.kernels.copies.copy_table import COPY
from mcore_reshard.kernels.cuda.tiles import DEFAULT_TILE_BYTES, cut_tiles, interleaved
from mcore_reshard.kernels.transports.direct.turns import engine_orders
from mcore_reshard.validation.processes import run_processes

sys.path.insert(0, str(Path(__file__).parent))
from bench import machine

if TYPE_CHECKING:
    from mcore_reshard.kernels.cuda.copy_kernel import DeviceCopies

RESULTS = Path(__file__).parent / "results"
NBYTES = 2 << 30  # between two GPUs
TIMES = 8  # that they are moved: what it takes to begin and to end is not the link's
REPEATS = 4
TIMEOUT_S = 120.0
ROW_BYTES = 16 << 20  # of what a copy engine is told at a time
SOON_S = 0.02  # all processes begin so much after they have met

Pattern = Mapping[int, Sequence[int]]  # GPU -> those it reads; GPU 0 is the trainer
PATTERNS: dict[str, Pattern] = {
    "one reads another": {1: [0]},
    "two read one": {1: [0], 2: [0]},
    "two read two": {2: [0, 1], 3: [0, 1]},
    "two read each other": {0: [1], 1: [0]},
    "three read each other": {1: [2, 3], 2: [3, 1], 3: [1, 2]},
    "two read each other and a third": {1: [0, 2], 2: [0, 1]},
    "three read each other and a fourth": {1: [0, 2, 3], 2: [0, 3, 1], 3: [0, 1, 2]},
    "each reads the one before": {1: [0], 2: [1], 3: [2]},
}


def patterns_of(count: int) -> dict[str, Pattern]:
    """The patterns that so many GPUs have."""
    return {
        name: pattern
        for name, pattern in PATTERNS.items()
        if count > max(gpu for reader, peers in pattern.items() for gpu in (reader, *peers))
    }


CTAS = [(48, 48), (24, 48), (32, 64)]  # of two kernels: from the trainer; from the others, or to them


class Gpus:
    """Buffers and streams on every GPU, with access to each other."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sources = [torch.randint(0, 255, (NBYTES,), dtype=torch.uint8, device=gpu) for gpu in range(count)]
        self.places = [torch.empty((count - 1) * NBYTES, dtype=torch.uint8, device=gpu) for gpu in range(count)]
        self.streams = [[torch.cuda.Stream(gpu) for _ in range(count)] for gpu in range(count)]
        for one, other in permutations(range(count), 2):  # torch enables access with the first copy
            self.places[one][:1].copy_(self.sources[other][:1])

    def copies(self, gpu: int, peers: Sequence[int], ctas: int, *, by_tile: bool, pushes: bool = False) -> DeviceCopies:
        """The kernel with which `gpu` moves 2 GiB from, or to, each of `peers`."""
        from mcore_reshard.kernels.cuda.copy_kernel import DeviceCopies, KernelShape  # need CUDA's Python packages

        table = np.zeros(len(peers), COPY)
        addresses = []
        for number, peer in enumerate(peers):
            src, dst = (gpu, peer) if pushes else (peer, gpu)
            place = (gpu if pushes else number) % (self.count - 1) * NBYTES
            addresses += [self.sources[src].data_ptr(), self.places[dst].data_ptr() + place]
            table[number] = (2 * number, 2 * number + 1, 0, 0, (1, 1, 1), (0, 0, 0), (0, 0, 0), NBYTES)
        table = np.repeat(table, TIMES)
        tiles = cut_tiles(table, np.array(addresses, np.uint64), DEFAULT_TILE_BYTES)
        order = interleaved(tiles["copy"].astype(np.int64) // TIMES, gpu, 1 if by_tile else None)
        with torch.cuda.device(gpu):
            return DeviceCopies(tiles[order], torch.device("cuda", gpu), KernelShape(ctas=ctas))

    def fastest_s(self, launches: Sequence[Callable[[], Any]]) -> float:
        """Seconds from the first launch until all GPUs are done; the best of several times."""
        seconds = []
        for _ in range(REPEATS):
            self.settle()
            start = time.perf_counter()
            for launch in launches:
                launch()
            self.settle()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    def settle(self) -> None:
        for gpu in range(self.count):
            torch.cuda.synchronize(gpu)


def kernel_rate(gpus: Gpus, pattern: Pattern, *, by_tile: bool, pushes: bool = False) -> float:
    from mcore_reshard.kernels.cuda.copy_kernel import KernelShape

    launches = []
    for gpu, peers in pattern.items():
        copies = gpus.copies(gpu, peers, KernelShape().ctas, by_tile=by_tile, pushes=pushes)
        launches.append(lambda copies=copies, gpu=gpu: copies.launch(gpus.streams[gpu][0]))
    return rate(pattern, gpus.fastest_s(launches))


def engine_rates(patterns: Mapping[str, Pattern]) -> dict[str, dict[str, float]]:
    """By way and pattern: engines take one GPU after another, as in the direct transport. Call it before CUDA is used."""
    count = 1 + max(
        gpu for pattern in patterns.values() for reader, peers in pattern.items() for gpu in (reader, *peers)
    )
    with tempfile.TemporaryDirectory() as folder:
        seconds, *_ = run_processes(count, engine_process, (count, patterns, folder), timeout_s=TIMEOUT_S)
    return {
        way: {name: rate(patterns[name], of_pattern) for name, of_pattern in of_way.items()}
        for way, of_way in seconds.items()
    }


def engine_process(
    number: int, count: int, patterns: Mapping[str, Pattern], folder: str
) -> dict[str, dict[str, float]]:
    """Seconds of each pattern, of all processes together, by pulls and by pushes: the best of several times."""
    from mcore_reshard.kernels.cuda.copy_engine import EngineCopies
    from mcore_reshard.kernels.cuda.engine_rows import ENGINE_STREAMS, Rows

    torch.cuda.set_device(number)
    gpus = Gpus(count)
    streams = [torch.cuda.Stream() for _ in range(ENGINE_STREAMS)]
    store = torch.distributed.FileStore(f"{folder}/store", count)

    def told(key: str, value: float) -> list[float]:
        """What all processes say."""
        store.set(f"{key}/{number}", repr(value))
        store.wait([f"{key}/{other}" for other in range(count)])
        return [float(store.get(f"{key}/{other}")) for other in range(count)]

    def places_of(peer: int, turn: int, *, pushes: bool) -> tuple[int, int]:
        """Addresses that 2 GiB come from and go to."""
        src, dst, place = (number, peer, number % (count - 1)) if pushes else (peer, number, turn)
        return gpus.sources[src].data_ptr(), gpus.places[dst].data_ptr() + place * NBYTES

    def copies_of(pattern: Pattern, *, pushes: bool) -> EngineCopies | None:
        """What this GPU copies: it reads its peers, or writes to those that would read it."""
        if pushes:
            pattern = {gpu: [reader for reader, peers in pattern.items() if gpu in peers] for gpu in range(count)}
        if not pattern.get(number):
            return None
        copied = {gpu: dict.fromkeys(peers, NBYTES) for gpu, peers in pattern.items()}
        order = engine_orders(copied, range(count)).get(number, pattern[number])
        offset = np.tile(np.arange(0, NBYTES, ROW_BYTES).astype(np.uint64), TIMES)
        sources, places = zip(*(places_of(peer, turn, pushes=pushes) for turn, peer in enumerate(order)), strict=True)
        src, dst = (np.concatenate([np.uint64(base) + offset for base in bases]) for bases in (sources, places))
        row = np.arange(len(src))
        nbytes, turn = np.full(len(src), ROW_BYTES, np.uint64), np.repeat(np.arange(len(order)), len(offset))
        return EngineCopies(
            Rows(src, dst, nbytes, turn, row, np.zeros_like(row), row), torch.device("cuda", number), ENGINE_STREAMS
        )

    best: dict[str, dict[str, float]] = {"pull": {}, "push": {}}
    for way, (name, pattern) in product(best, patterns.items()):
        copies = copies_of(pattern, pushes=way == "push")
        seconds = []
        for repeat in range(1 + REPEATS):
            begin = max(told(f"{way}/{name}/{repeat}/begin", time.monotonic() + SOON_S))
            while time.monotonic() < begin:
                pass
            if copies is not None:
                copies.launch(streams)
            gpus.settle()
            seconds.append(max(told(f"{way}/{name}/{repeat}/end", time.monotonic())) - begin)
        best[way][name] = min(seconds[1:])
    return best


def two_kernels_rate(gpus: Gpus, pattern: Pattern, ctas_of: tuple[int, int], *, pushes: bool) -> float:
    launches = []
    for gpu, peers in pattern.items():
        for number, (some, ctas) in enumerate(zip(([0], [peer for peer in peers if peer]), ctas_of, strict=True)):
            copies = gpus.copies(gpu, some, ctas, by_tile=True, pushes=pushes and number > 0)
            launches.append(lambda copies=copies, stream=gpus.streams[gpu][number]: copies.launch(stream))
    return rate(pattern, gpus.fastest_s(launches))


def rate(pattern: Pattern, seconds: float) -> float:
    return round(max(map(len, pattern.values())) * TIMES * NBYTES / seconds / 1e9)


def measured(gpus: Gpus, name: str, pattern: Pattern, by_engine: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "pattern": name,
        "copy_engine": by_engine["pull"][name],
        "engine_push": by_engine["push"][name],
    }
    several = max(map(len, pattern.values())) > 1
    row["pull"] = kernel_rate(gpus, pattern, by_tile=False)
    if several:
        row["pull_by_tile"] = kernel_rate(gpus, pattern, by_tile=True)
    reads_trainer = any(0 in peers for peers in pattern.values())
    if not reads_trainer or not several:
        row["push_by_tile"] = kernel_rate(gpus, pattern, by_tile=True, pushes=True)
    if (
        several
        and reads_trainer
        and any(peer in pattern for peers in pattern.values() for peer in peers)
        and 0 not in pattern
    ):
        for way, pushes in (("two_pulls", False), ("pull_and_push", True)):
            row[way] = {f"{a} and {b} CTAs": two_kernels_rate(gpus, pattern, (a, b), pushes=pushes) for a, b in CTAS}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count = min(4, torch.cuda.device_count())
    parser.add_argument("--out", type=Path, default=RESULTS / f"links-x{count}.json")
    arguments = parser.parse_args()
    patterns = patterns_of(count)
    if not patterns:
        parser.error(f"the patterns are of two to four GPUs, there are {count}: run it where GPUs can read each other")
    by_engine = engine_rates(patterns)
    kind, driver = machine.gpus()[0]
    gpus = Gpus(count)
    document = {
        "what": "GB/s into each GPU that reads",
        "date": date.today().isoformat(),
        "hardware": f"{count} x {kind}",
        "driver": driver,
        "versions": {"torch": torch.__version__},
        "rows": [measured(gpus, name, pattern, by_engine) for name, pattern in patterns.items()],
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    for row in document["rows"]:
        print(row)


if __name__ == "__main__":
    main()
