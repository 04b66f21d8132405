"""Measure one-sided puts of NCCL, NVSHMEM and NIXL beside NCCL's sends and a copy engine: between two GPUs, in GB/s.

    python tools/bench_puts.py                                       # with the libraries that are installed
    LD_PRELOAD=/path/to/libnccl.so.2 python tools/bench_puts.py      # with another NCCL; its puts need 2.29

Each library runs in two processes of its own: one that fails or hangs costs no rows of another. Rows of other libraries
and versions stay in tools/results/puts-x2.json. `matmuls` is what the receiving GPU keeps of its speed in matrix products
meanwhile. Every method starts from a poisoned destination, which is compared once it has run.
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
from importlib import metadata
from pathlib import Path
from typing import Any

# Counting GPUs through the driver would spoil this process for forking.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

from mcore_reshard.validation.errors import ProcessError
from mcore_reshard.validation.processes import run_processes

sys.path.insert(0, str(Path(__file__).parent))
from bench import machine, nvshmem

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20
WINDOW = 2048 * MIB  # that a method fills several times
FILLS, REPEATS = 8, 5
MESSAGES = (8 * MIB, 64 * MIB, 512 * MIB)
SIDE, PRODUCTS = 8192, 16  # they take less time than the window's fills
TIMEOUT_S = 60.0  # of each library

Row = dict[str, Any]
Move = Callable[[], None]  # fills the window once: on the current stream, or else `Pair.settle` waits for it too


class Pair:
    """One of two processes: 0 sends, 1 receives."""

    def __init__(self, number: int, folder: str) -> None:
        torch.cuda.set_device(number)
        self.number, self.sends = number, number == 0
        self._store = torch.distributed.FileStore(f"{folder}/store", 2)
        self._meetings = 0
        self._arrivals: list[Callable[[], bool]] = []

    def expect(self, arrived: Callable[[], bool]) -> None:
        """Let `settle` call this until it is true: no stream knows of that arrival."""
        self._arrivals.append(arrived)

    def settle(self) -> None:
        """Wait until this GPU is idle and all that was expected has arrived."""
        torch.cuda.synchronize()
        while self._arrivals:
            if self._arrivals[-1]():
                self._arrivals.pop()

    def meet(self) -> None:
        """Wait until both are here and have settled."""
        self.settle()
        self._meetings += 1
        self._store.set(f"{self._meetings}/{self.number}", "")
        self._store.wait([f"{self._meetings}/{1 - self.number}"])

    def start(self) -> None:
        """Say that this one starts now: whoever puts does not wait for the other."""
        self._store.set(f"start/{self._meetings}/{self.number}", repr(time.monotonic()))

    def first_start(self) -> float:
        """When the first of both started, by the clock of their host."""
        return min(float(self._store.get(f"start/{self._meetings}/{number}")) for number in range(2))

    def told(self, key: str, value: Callable[[], str], by: int = 0) -> str:
        """What one of the two says."""
        if self.number == by:
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


def measured(pair: Pair, move: Move, window: torch.Tensor) -> Row:
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
        pair.settle()
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


def measured_row(
    pair: Pair, library: str, method: str, move: Move, window: torch.Tensor, size: int | None = None
) -> Row:
    """What is recorded of one method with messages of `size` bytes."""
    named = {"library": library, "method": method, "message_mib": None if size is None else size // MIB}
    return {**named, **measured(pair, move, window)}


def nccl_rows(number: int, folder: str) -> list[Row]:
    """A copy engine, sends, and puts where NCCL has them."""
    from nccl.core import Communicator, UniqueId, WindowFlag, get_unique_id
    from nccl.core.interop.torch import empty

    pair = Pair(number, folder)
    unique_id = pair.told("id", lambda: bytes(get_unique_id()).hex())
    communicator = Communicator.init(2, number, UniqueId.from_bytes(bytes.fromhex(unique_id)))
    version = loaded_nccl()
    library = "NCCL " + ".".join(map(str, version))
    plain = torch.empty(WINDOW, dtype=torch.uint8, device="cuda")
    rows = [measured_row(pair, library, "copy engine", copies(pair, plain), plain)]
    for size in MESSAGES:
        rows.append(
            measured_row(pair, library, "send and receive", both_ends(pair, communicator, plain, size), plain, size)
        )
    if version >= (2, 29):
        window = empty(WINDOW, dtype=torch.uint8, device=number)
        registered = communicator.register_window(window, WindowFlag.COLL_SYMMETRIC)
        for size in MESSAGES:
            rows.append(
                measured_row(pair, library, "put", puts(pair, communicator, window, registered, size), window, size)
            )
    pair.meet()
    return rows


def nvshmem_puts(pair: Pair, library: Any, window: torch.Tensor, signal: int, size: int) -> Move:
    """Puts of one side, each of which raises the word at `signal`; the other side waits for the last one's value."""
    sent = 0

    def move() -> None:
        nonlocal sent
        stream = torch.cuda.current_stream().cuda_stream
        if pair.sends:
            for at in range(window.data_ptr(), window.data_ptr() + WINDOW, size):
                sent += 1
                # The receiver's memory is named by the address of the same place in the sender's.
                library.nvshmemx_putmem_signal_on_stream(at, at, size, signal, sent, nvshmem.SIGNAL_SET, 1, stream)
        else:
            sent += WINDOW // size
            library.nvshmemx_signal_wait_until_on_stream(signal, nvshmem.AT_LEAST, sent, stream)

    return move


def nvshmem_rows(number: int, folder: str) -> list[Row]:
    """Puts with signals of NVSHMEM, queued by the host."""
    pair = Pair(number, folder)
    pair.meet()  # makes this GPU's context current
    library = nvshmem.load()
    nvshmem.initialize(library, number, pair.told("id", lambda: nvshmem.unique_id(library)))
    name = f"NVSHMEM {nvshmem.version(library)}"
    memory = nvshmem.SymmetricMemory(library, WINDOW + 8 * len(MESSAGES)).tensor
    memory[WINDOW:] = 0  # a signal for each size of message
    pair.meet()
    window, signals = memory[:WINDOW], memory.data_ptr() + WINDOW
    rows = [
        measured_row(pair, name, "put", nvshmem_puts(pair, library, window, signals + 8 * index, size), window, size)
        for index, size in enumerate(MESSAGES)
    ]
    pair.meet()
    return rows


def nixl_writes(pair: Pair, agent: Any, window: torch.Tensor, address: int, size: int) -> Move:
    """Writes of NIXL, to `address` in the receiver's memory. They know no streams: the host posts and polls.

    So the sender's call returns once all bytes have arrived. The receiver's returns at once, and `Pair.settle` polls for
    the notification: while the receiver multiplies, its host does nothing.
    """
    if not pair.sends:
        return lambda: pair.expect(lambda: agent.check_remote_xfer_done("0", b"filled"))
    starts = range(0, WINDOW, size)
    source = agent.get_xfer_descs([window[start : start + size] for start in starts])
    destination = agent.get_xfer_descs([(address + start, size, 1) for start in starts], "VRAM")
    request = agent.initialize_xfer("WRITE", source, destination, "1", b"filled")

    def move() -> None:
        state = agent.transfer(request, b"filled")
        while state == "PROC":
            state = agent.check_xfer_state(request)
        if state != "DONE":
            raise RuntimeError(f"a NIXL transfer of {size} bytes a message ended in state {state}")

    return move


def nixl_rows(number: int, folder: str) -> list[Row]:
    """Writes of NIXL over UCX, into plain GPU memory that the receiver registered."""
    os.environ.setdefault("UCX_TLS", "cuda,sm,tcp,self")
    from nixl_cu13 import nixl_agent

    pair = Pair(number, folder)
    window = torch.empty(WINDOW, dtype=torch.uint8, device="cuda")
    agent = nixl_agent(str(number))  # takes this GPU's context
    agent.register_memory(window)
    described = pair.told("agent", lambda: f"{window.data_ptr()} {agent.get_agent_metadata().hex()}", by=1)
    address, agents_metadata = described.split()
    if pair.sends:
        agent.add_remote_agent(bytes.fromhex(agents_metadata))
    name = f"NIXL {metadata.version('nixl-cu13')} (UCX)"
    rows = [
        measured_row(pair, name, "write", nixl_writes(pair, agent, window, int(address), size), window, size)
        for size in MESSAGES
    ]
    pair.meet()
    return rows


LIBRARIES = {"nccl4py": nccl_rows, "nvidia-nvshmem-cu13": nvshmem_rows, "nixl-cu13": nixl_rows}  # by package


def record(out: Path, rows: list[Row]) -> None:
    """Put `rows` in the place of those of their library; the others stay, if they are of the same hardware."""
    (name, driver), *_ = machine.gpus()
    hardware = f"2 x {name}"
    earlier: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"hardware": hardware, "rows": []}
    if earlier["hardware"] != hardware:
        print(f"the rows of {earlier['hardware']} are left out of {out}", flush=True)
        earlier["rows"] = []
    libraries = {row["library"] for row in rows}
    result = {
        "what": "GB/s from one GPU to another, and what the receiver keeps of its speed in matrix products",
        "date": date.today().isoformat(),
        "hardware": hardware,
        "driver": driver,
        "versions": machine.versions(*LIBRARIES),
        "rows": [row for row in earlier["rows"] if row["library"] not in libraries] + rows,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "puts-x2.json")
    args = parser.parse_args()
    if torch.cuda.device_count() < 2:
        parser.error("two GPUs are needed")
    failed = []
    for package, rank in LIBRARIES.items():
        if package not in machine.versions(package):
            print(f"{package} is not installed: skipped", flush=True)
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                _, rows = run_processes(2, rank, (folder,), timeout_s=TIMEOUT_S)
            if wrong := [row for row in rows if not row["right"]]:
                raise ProcessError(f"other bytes arrived: {wrong}")
        except ProcessError as error:
            failed.append(package)
            print(f"{package} failed: {error}", flush=True)
            continue
        record(args.out, rows)
        for measurement in rows:
            print(measurement, flush=True)
    if failed:
        raise SystemExit(f"no rows of {', '.join(failed)}")


if __name__ == "__main__":
    main()
