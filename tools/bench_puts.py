"""Measure NCCL's one-sided puts beside its sends and a copy engine: from one GPU to another, in GB/s.

    python tools/bench_puts.py                                       # with the NCCL that torch brings
    LD_PRELOAD=/path/to/libnccl.so.2 python tools/bench_puts.py      # with another one; puts need 2.29

Rows of other versions stay in tools/results/puts-x2.json. `matmuls` is what the receiving GPU keeps of its speed in
matrix products meanwhile. Every method starts from a poisoned destination, which is compared once it has run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

# Counting GPUs through the driver would spoil this process for forking.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

from mcore_reshard.validation.processes import run_processes

sys.path.insert(0, str(Path(__file__).parent))
from bench import machine

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20
WINDOW = 2048 * MIB  # that a method fills several times
FILLS, REPEATS = 8, 5
MESSAGES = (8 * MIB, 64 * MIB, 512 * MIB)
SIDE, PRODUCTS = 8192, 16  # they take less time than the window's fills
TIMEOUT_S = 120.0

Move = Callable[[], None]  # fills the window once, on the current stream


class Pair:
    """One of two processes: 0 sends, 1 receives."""

    def __init__(self, number: int, folder: str) -> None:
        torch.cuda.set_device(number)
        self.number, self.sends = number, number == 0
        self._store = torch.distributed.FileStore(f"{folder}/store", 2)
        self._meetings = 0

    def meet(self) -> None:
        """Wait until both are here and their GPUs are idle."""
        torch.cuda.synchronize()
        self._meetings += 1
        self._store.set(f"{self._meetings}/{self.number}", "")
        self._store.wait([f"{self._meetings}/{1 - self.number}"])

    def start(self) -> None:
        """Say that this one starts now: whoever puts does not wait for the other."""
        self._store.set(f"start/{self._meetings}/{self.number}", repr(time.monotonic()))

    def first_start(self) -> float:
        """When the first of both started, by the clock of their host."""
        return min(float(self._store.get(f"start/{self._meetings}/{number}")) for number in range(2))

    def told(self, key: str, value: Callable[[], str]) -> str:
        """What the sender says."""
        if self.sends:
            self._store.set(key, value())
        return self._store.get(key).decode()


class Products:
    """Matrix products on a stream of their own."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._a, self._b = (torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        self._out = torch.empty_like(self._a)
        torch.cuda.synchronize()

    def seconds(self) -> float:
        """How long they take beside what has been queued on other streams."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            first.record()
            for _ in range(PRODUCTS):
                torch.mm(self._a, self._b, out=self._out)
            last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


def measured(pair: Pair, move: Move, window: torch.Tensor) -> dict[str, Any]:
    """Move the window over and over; the receiver times it, alone and while it multiplies."""
    window.fill_(7 if pair.sends else 255)
    pair.meet()
    move()
    pair.meet()
    is_right = bool((window == 7).all())
    best = float("inf")
    for _ in range(REPEATS):
        pair.meet()
        pair.start()
        for _ in range(FILLS):
            move()
        torch.cuda.synchronize()
        best = min(best, time.monotonic() - pair.first_start())
    products = Products()
    products.seconds()
    alone = products.seconds()
    pair.meet()
    for _ in range(FILLS):
        move()
    beside = products.seconds()
    pair.meet()
    return {"gb_per_s": round(FILLS * WINDOW / best / 1e9, 1), "matmuls": round(alone / beside, 3), "right": is_right}


def copies(pair: Pair, window: torch.Tensor) -> Move:
    """The receiver's copy engine reads."""
    from mcore_reshard.kernels.cuda.ipc import Export, Mappings, export

    said = pair.told("memory", lambda: export({"window": window}).to_json())
    if pair.sends:
        return lambda: None
    from cuda.bindings import driver

    mappings = Mappings(window.device)
    (source,) = mappings.addresses(Export.from_json(said), ["window"], "rank 0")

    def copy() -> None:
        assert mappings is not None  # its memory stays mapped
        driver.cuMemcpyAsync(window.data_ptr(), int(source), WINDOW, torch.cuda.current_stream().cuda_stream)

    return copy


def both_ends(pair: Pair, communicator: Any, window: torch.Tensor, size: int) -> Move:
    """Sends and receives, one message after the other."""
    call = communicator.send if pair.sends else communicator.recv

    def move() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for start in range(0, WINDOW, size):
            call(window[start : start + size], 1 - pair.number, stream=stream)

    return move


def puts(pair: Pair, communicator: Any, window: torch.Tensor, registered: Any, size: int) -> Move:
    """Puts of one side, each with a signal; the other side waits for all of them."""
    from nccl.core import WaitSignalDesc

    count = WINDOW // size

    def move() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        if pair.sends:
            for start in range(0, WINDOW, size):
                communicator.put_signal(window[start : start + size], 1, registered, start, stream=stream)
        else:
            communicator.wait_signal([WaitSignalDesc(peer=0, op_count=count)], stream=stream)

    return move


def loaded_nccl() -> tuple[int, int, int]:
    """The version of the library that is measured."""
    from nccl.core import get_version

    library = get_version().libnccl
    assert library is not None, "its calls would have failed"
    found = library.version
    return found.major, found.minor, found.micro


def rank(number: int, folder: str) -> list[dict[str, Any]]:
    from nccl.core import Communicator, UniqueId, WindowFlag, get_unique_id
    from nccl.core.interop.torch import empty

    pair = Pair(number, folder)
    unique_id = pair.told("id", lambda: bytes(get_unique_id()).hex())
    communicator = Communicator.init(2, number, UniqueId.from_bytes(bytes.fromhex(unique_id)))
    rows: list[dict[str, Any]] = []

    def add(method: str, move: Move, window: torch.Tensor, size: int | None = None) -> None:
        rows.append({"method": method, "message_mib": None if size is None else size // MIB,
                     **measured(pair, move, window)})  # fmt: skip

    plain = torch.empty(WINDOW, dtype=torch.uint8, device="cuda")
    add("copy engine", copies(pair, plain), plain)
    for size in MESSAGES:
        add("send and receive", both_ends(pair, communicator, plain, size), plain, size)
    if loaded_nccl() >= (2, 29):
        window = empty(WINDOW, dtype=torch.uint8, device=number)
        registered = communicator.register_window(window, WindowFlag.COLL_SYMMETRIC)
        for size in MESSAGES:
            add("put", puts(pair, communicator, window, registered, size), window, size)
    pair.meet()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "puts-x2.json")
    args = parser.parse_args()
    if torch.cuda.device_count() < 2:
        parser.error("two GPUs are needed")
    with tempfile.TemporaryDirectory() as folder:
        _, rows = run_processes(2, rank, (folder,), timeout_s=TIMEOUT_S)
    nccl = ".".join(map(str, loaded_nccl()))
    earlier = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    (name, driver), *_ = machine.gpus()
    result = {
        "what": "GB/s from one GPU to another, and what the receiver keeps of its speed in matrix products",
        "date": date.today().isoformat(),
        "hardware": f"2 x {name}",
        "driver": driver,
        "versions": machine.versions("nccl4py"),
        "rows": [row for row in earlier if row["nccl"] != nccl] + [{"nccl": nccl, **row} for row in rows],
    }
    if wrong := [row for row in rows if not row["right"]]:
        raise SystemExit(f"other bytes arrived: {wrong}")
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(nccl, row, flush=True)


if __name__ == "__main__":
    main()
