"""Measure why the copy kernel is CUDA C++ and not Triton or bulk copies (TMA): one GPU of a host reads another.

    python tools/bench_kernels.py                # two GPUs; writes tools/results/kernels-x2.json

The same bytes by every method: the copy engine, our kernel as `direct` launches it, two kernels in Triton
(bench/triton_copies.py) and bulk copies. A method is tried in several configurations and its best counts; users get
ours with 48 CTAs. Before a configuration is timed, its result is compared with torch's, bit for bit. One that is wrong,
or raises, is recorded as such, without a figure.

The first launch is that of a small table with words of 2, 4, 8 and 16 bytes; of bulk copies, a small region. It runs in
a process of its own, with modules imported before, nothing cached, and the kernel compiled for it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.copy_table import COPY
from mcore_reshard.kernels.cuda.tiles import cut_tiles

sys.path.insert(0, str(Path(__file__).parent))
from bench import machine
from bench.results import ResultFile

RESULTS = Path(__file__).parent / "results"
NBYTES = 4 << 30
FIRST_NBYTES = 8 << 20  # of the first launch
REPEATS = 7
LIMIT_S = 120.0  # configurations that are not started by then are not measured
POISON = 255  # no byte of the source
ALIGNMENT = 256  # of regions: that of separate tensors

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Region:
    """Rows that lie `pitch` bytes apart at the source and one after the other at the destination."""

    rows: int
    row_bytes: int
    pitch: int
    src: int  # offsets
    dst: int


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    what: str
    regions: tuple[Region, ...]

    @property
    def nbytes(self) -> int:
        return sum(region.rows * region.row_bytes for region in self.regions)

    def copies(self) -> NDArray[np.void]:
        """The table (dtype COPY) from base 0 to base 1."""
        return np.array(
            [
                (0, 1, r.src, r.dst, (1, 1, r.rows), (0, 0, r.pitch), (0, 0, r.row_bytes), r.row_bytes)
                for r in self.regions
            ],
            COPY,
        )


def cases(nbytes: int) -> list[Case]:
    """Cases of about `nbytes`, of which the source has twice as many."""
    return [
        _case("one region", "contiguous, aligned", nbytes, [(nbytes, nbytes)]),
        _case("rows, 2 KiB apart", "rows of 1,024 of 2,048 bytes", nbytes, [(1024, 2048)]),
        _case("rows, 3 KiB apart", "rows of 1,536 of 3,072 bytes", nbytes, [(1536, 3072)]),
        _case(
            "odd rows",
            "rows of 1,538, 1,540, 1,544 and 1,536 bytes, every second one: words of 2, 4, 8 and 16 bytes",
            nbytes // 2,
            [(1538, 3076), (1540, 3080), (1544, 3088), (1536, 3072)],
        ),
    ]


def _case(name: str, what: str, nbytes: int, rows: list[tuple[int, int]]) -> Case:
    regions: list[Region] = []
    src = dst = 0
    for row_bytes, pitch in rows:
        region = Region(nbytes // len(rows) // row_bytes, row_bytes, pitch, src, dst)
        regions.append(region)
        src += -(-region.rows * pitch // ALIGNMENT) * ALIGNMENT
        dst += -(-region.rows * row_bytes // ALIGNMENT) * ALIGNMENT
    return Case(name, what, tuple(regions))


class Memory:
    """The source on the device that is read and the destination, with bytes to spare, on the one that reads."""

    def __init__(self, nbytes: int, reader: torch.device, read: torch.device) -> None:
        self.src = torch.randint(0, POISON, (2 * nbytes,), dtype=torch.uint8, device=read)
        self.dst = torch.empty(nbytes + (1 << 20), dtype=torch.uint8, device=reader)
        self.dst[:1].copy_(self.src[:1])  # torch enables access with the first copy
        self.src[:1].copy_(self.dst[:1])

    @property
    def device(self) -> torch.device:
        return self.dst.device

    def tiles(self, case: Case, tile_bytes: int) -> NDArray[np.void]:
        addresses = np.array([self.src.data_ptr(), self.dst.data_ptr()], np.uint64)
        return cut_tiles(case.copies(), addresses, tile_bytes)

    def wanted(self, case: Case) -> torch.Tensor:
        """The whole destination as it must be in the end; what the case does not write stays poisoned."""
        wanted = torch.full_like(self.dst, POISON)
        for region in case.regions:
            rows = self.src.as_strided((region.rows, region.row_bytes), (region.pitch, 1), region.src).contiguous()
            wanted[region.dst :][: rows.numel()].copy_(rows.view(-1))
        return wanted

    def settle(self) -> None:
        for device in {self.src.device, self.dst.device}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


class Copies(Protocol):
    """A case made ready: `launch` queues it on the current stream with so many launches, or calls of the driver."""

    @property
    def launches(self) -> int: ...

    def launch(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Launches:
    launch: Callable[[], Any]
    launches: int


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    modules: tuple[str, ...]  # that it needs
    configs: tuple[Config, ...]
    prepare: Callable[[Memory, Case, Config], Copies]
    only_one_region: bool = False
    compiles: bool = True

    def missing(self) -> str | None:
        for module in self.modules:
            try:
                import_module(module)
            except ImportError as error:
                return f"{module} cannot be imported: {error}"
        return None

    def takes(self, case: Case) -> bool:
        return not self.only_one_region or case.name == "one region"


def copy_engine(memory: Memory, case: Case, config: Config) -> Copies:
    """cudaMemcpy2DAsync for each region, and torch for a contiguous one (of others it makes contiguous ones first)."""
    if all(region.rows == 1 for region in case.regions):
        (region,) = case.regions
        src, dst = memory.src[region.src :][: region.row_bytes], memory.dst[region.dst :][: region.row_bytes]
        return Launches(lambda: dst.copy_(src, non_blocking=True), 1)

    from cuda.bindings import runtime

    def copy() -> None:
        stream = torch.cuda.current_stream(memory.device).cuda_stream
        for region in case.regions:
            src, dst = memory.src.data_ptr() + region.src, memory.dst.data_ptr() + region.dst
            size = (region.row_bytes, region.rows)
            kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
            (error,) = runtime.cudaMemcpy2DAsync(dst, region.row_bytes, src, region.pitch, *size, kind, stream)
            if error != runtime.cudaError_t.cudaSuccess:
                raise RuntimeError(f"cudaMemcpy2DAsync: {error}")

    return Launches(copy, len(case.regions))


def ours(memory: Memory, case: Case, config: Config) -> Copies:
    from mcore_reshard.kernels.cuda.copy_kernel import DeviceCopies, KernelShape

    copies = DeviceCopies(memory.tiles(case, _tile_bytes()), memory.device, KernelShape(**config))
    return Launches(lambda: copies.launch(torch.cuda.current_stream(memory.device)), 1)


def in_triton(walk: str, memory: Memory, case: Case, config: Config) -> Copies:
    from bench.triton_copies import TritonCopies

    return TritonCopies(memory.tiles(case, _tile_bytes()), memory.device, walk, **config)


def bulk(memory: Memory, case: Case, config: Config) -> Copies:
    from cuda.bindings import driver
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, Stream, launch

    (region,) = case.regions
    assert region.row_bytes % config["bytes"] == 0
    index = memory.device.index
    Device(index).set_current()
    macros = [("BULK_BYTES", str(config["bytes"])), ("STAGES", str(config["stages"]))]
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability(index))
    options = ProgramOptions(arch=arch, std="c++17", define_macro=macros)
    text = (Path(__file__).parent / "bench" / "bulk_copy.cu").read_text()
    kernel = Program(text, "c++", options).compile("cubin").get_kernel("bulk_copy")
    shared = config["bytes"] * config["stages"]
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (error,) = driver.cuKernelSetAttribute(
        attribute, shared, driver.CUkernel(int(kernel.handle)), driver.CUdevice(index)
    )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{shared} bytes of shared memory: {error}")
    launched = LaunchConfig(grid=config["ctas"], block=32, shmem_size=shared)
    arguments = memory.src.data_ptr() + region.src, memory.dst.data_ptr() + region.dst, np.uint64(region.row_bytes)

    def copy() -> None:
        launch(Stream.from_handle(torch.cuda.current_stream(memory.device).cuda_stream), launched, kernel, *arguments)

    return Launches(copy, 1)


def _tile_bytes() -> int:
    from mcore_reshard.kernels.cuda.tiles import DEFAULT_TILE_BYTES

    return DEFAULT_TILE_BYTES


TRITON_CONFIGS = tuple(
    {"ctas": ctas, "warps": warps, "block": block}
    for (warps, block), ctas in itertools.product(((16, 4096), (16, 8192), (32, 8192), (8, 2048)), (48, 132, 264))
)
BULK_CONFIGS = tuple(
    {"bytes": nbytes, "stages": stages, "ctas": ctas}
    for (nbytes, stages), ctas in itertools.product(
        ((4096, 16), (8192, 24), (16384, 12), (32768, 6), (65536, 3)), (48, 96, 132)
    )
)
METHODS = (  # what may hang or damage the context last
    Method("copy engine", ("cuda.bindings",), ({},), copy_engine, compiles=False),
    Method("ours", ("cuda.core",), ({"ctas": 48}, {"ctas": 132}), ours),
    *(
        Method(
            f"Triton, {walk}",
            ("triton", "cuda.core"),
            TRITON_CONFIGS,
            lambda memory, case, config, walk=walk: in_triton(walk, memory, case, config),  # type: ignore[misc]
        )
        for walk in ("flat", "rows")
    ),
    Method("bulk copies", ("cuda.core", "cuda.bindings"), BULK_CONFIGS, bulk, only_one_region=True),
)


def launched(memory: Memory, copies: Copies, wanted: torch.Tensor) -> int:
    """Bytes that are wrong after the copies were performed once."""
    memory.dst.fill_(POISON)
    memory.settle()
    copies.launch()
    memory.settle()
    return 0 if torch.equal(memory.dst, wanted) else int((memory.dst != wanted).sum())


def timed_ms(memory: Memory, copies: Copies) -> float:
    """Milliseconds from the launch until both devices are done; the median of several times."""
    times_ms = []
    for _ in range(REPEATS):
        memory.settle()
        start = time.perf_counter()
        copies.launch()
        memory.settle()
        times_ms.append(1e3 * (time.perf_counter() - start))
        if sum(times_ms) > 2000:
            break
    return statistics.median(times_ms)


def tried(
    memory: Memory, case: Case, wanted: torch.Tensor, prepare: Callable[[Memory, Case, Config], Copies], config: Config
) -> dict[str, Any]:
    """A configuration and what came of it: `ms`, `gb_per_s` and `launches`, or `error`."""
    try:
        copies = prepare(memory, case, config)
        if wrong := launched(memory, copies, wanted):
            return {"config": config, "error": f"{wrong:,} bytes are wrong"}
        ms = timed_ms(memory, copies)
    except Exception as error:
        return {"config": config, "error": said(error)}
    gb_per_s = round(case.nbytes / ms / 1e6, 1)
    return {"config": config, "ms": round(ms, 3), "gb_per_s": gb_per_s, "launches": copies.launches}


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def row_of(case: Case, method: Method, attempts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """A method on a case: the attempt that was fastest, or why there is none, and all attempts."""
    row: dict[str, Any] = {"case": case.name, "method": method.name}
    if reason := method.missing():
        return {**row, "error": reason, "tried": []}
    attempts = list(attempts)
    if measured := [attempt for attempt in attempts if "ms" in attempt]:
        return {**row, **min(measured, key=lambda attempt: attempt["ms"]), "tried": attempts}
    return {**row, "error": attempts[0]["error"], "tried": attempts}


def attempted(
    memory: Memory, case: Case, wanted: torch.Tensor, method: Method, deadline: float
) -> Iterator[dict[str, Any]]:
    for config in method.configs:
        if time.monotonic() > deadline:
            yield {"config": config, "error": f"not started within {LIMIT_S:g} s"}
        else:
            yield tried(memory, case, wanted, method.prepare, config)


def first_launches() -> dict[str, float | str]:
    """Seconds from a table until a process has performed it for the first time, or why it could not, by method."""
    seconds: dict[str, float | str] = {}
    for number, method in enumerate(METHODS):
        if method.compiles and not method.missing():
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
                seconds[method.name] = fresh.submit(first_launch, number).result()
    return seconds


def first_launch(number: int) -> float | str:
    """For a process that has launched nothing: how long it takes until `METHODS[number]` has copied its first table."""
    method = METHODS[number]
    method.missing()  # imports
    torch.cuda.set_stream(torch.cuda.Stream(0))
    case = next(case for case in reversed(cases(FIRST_NBYTES)) if method.takes(case))
    memory = Memory(FIRST_NBYTES, torch.device("cuda", 0), torch.device("cuda", 1))
    wanted = memory.wanted(case)
    memory.dst.fill_(POISON)
    memory.settle()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        start = time.perf_counter()
        try:
            method.prepare(memory, case, method.configs[0]).launch()
            memory.settle()
        except Exception as error:
            return said(error)
        seconds = round(time.perf_counter() - start, 3)
    return seconds if torch.equal(memory.dst, wanted) else "wrong bytes"


def main() -> None:
    deadline = time.monotonic() + LIMIT_S
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "kernels-x2.json")
    arguments = parser.parse_args()
    if (count := torch.cuda.device_count()) < 2:
        parser.error(f"one GPU reads another, there are {count}")
    name, driver = machine.gpus()[0]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        torch.cuda.set_device(0)
        torch.cuda.set_stream(torch.cuda.Stream(0))
        results = ResultFile(arguments.out)
        header = {
            "what": "GB/s into a GPU that reads another",
            "date": date.today().isoformat(),
            "hardware": f"2 x {name}",
            "driver": driver,
            "versions": machine.versions("triton", "cuda-core", "cuda-bindings"),
            "cases": {case.name: {"what": case.what, "nbytes": case.nbytes} for case in cases(NBYTES)},
            "first_launch_s": first_launches(),
        }
        print(header, flush=True)
        results.start(header)
        memory = Memory(NBYTES, torch.device("cuda", 0), torch.device("cuda", 1))
        for method in METHODS:
            for case in filter(method.takes, cases(NBYTES)):
                wanted = memory.wanted(case)
                row = row_of(case, method, attempted(memory, case, wanted, method, deadline))
                results.add(row)
                shown = {key: value for key, value in row.items() if key != "tried"}
                failed = sorted({attempt["error"] for attempt in row["tried"] if "error" in attempt})
                print(shown, f"of {len(row['tried'])} configurations", *failed, flush=True)
    print(f"{LIMIT_S - deadline + time.monotonic():.0f} s")


if __name__ == "__main__":
    main()
