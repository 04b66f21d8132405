"""Perform a table of copies on the GPU with one launch: the launcher of copy_kernel.cu.

The kernel is CUDA C++, compiled at run time with NVIDIA's own bindings (NVRTC through cuda.core). It reaches 375 GB/s
between two H200s, where the copy engine reaches 394. Two alternatives were measured beside it (tools/bench_kernels.py,
tools/results/kernels-x2.json). Triton walks the same tiles as fast, but needs a launch for each word size, more time to
start, and a C compiler. Bulk copies through shared memory (TMA) reach 375 as well, for one aligned region.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
import torch
from cuda.core import Device, Kernel, LaunchConfig, Program, ProgramOptions, Stream, launch
from numpy.typing import NDArray

from .tiles import TILE

_SOURCE = "copy_kernel.cu"


@dataclass(frozen=True, slots=True)
class KernelShape:
    """How a launch is spread over the GPU. Each CTA takes a whole multiprocessor; an H200 has 132."""

    ctas: int = 48
    threads: int = 512  # a multiple of 32
    batch: int = 8  # loads under way in each thread

    def __post_init__(self) -> None:
        if self.ctas < 1 or self.batch < 1 or not 32 <= self.threads <= 1024 or self.threads % 32:
            raise ValueError(f"no kernel has this shape: {self}; threads are a multiple of 32, from 32 to 1024")


class DeviceCopies:
    """Tiles (dtype TILE) on a device, ready to be performed any number of times. Their addresses must stay valid.

    With `checksums`, every tile is summed as it is read, then read back and summed again; `damaged()` names those that
    differ.
    """

    def __init__(
        self,
        tiles: NDArray[np.void],
        device: torch.device,
        shape: KernelShape = KernelShape(),
        *,
        checksums: bool = False,
        defines: tuple[tuple[str, int], ...] = (),
    ) -> None:
        assert tiles.dtype == TILE
        self._config = LaunchConfig(grid=shape.ctas, block=shape.threads)
        self._count = len(tiles)
        self._tiles = torch.from_numpy(tiles.view(np.uint8).copy()).to(device)
        self._copy_of = tiles["copy"]
        self._sums = torch.zeros(self._count if checksums else 0, 2, dtype=torch.int64, device=device)
        macros = (("THREADS", shape.threads), ("BATCH", shape.batch), ("CHECKSUMS", int(checksums)), *defines)
        with torch.cuda.device(device):
            self._kernel = compiled(torch.cuda.get_device_capability(device), device.index, macros)
            self._launch(torch.cuda.Stream(device), 0)  # CUDA loads kernels when they are first launched: now
            self.damaged()

    @property
    def nbytes(self) -> int:
        """Device memory of the table and the checksums."""
        return self._tiles.nbytes + self._sums.nbytes

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Queue the copies on `stream`: one kernel, and a memset before it with checksums. Does not wait."""
        if len(self._sums):
            with torch.cuda.stream(stream):
                self._sums.zero_()
        self._launch(stream, self._count)

    def damaged(self) -> NDArray[np.int64]:
        """Indices of the copies that wrote other bytes than they read, ascending. The last launch must have ended."""
        if not len(self._sums):
            return np.zeros(0, np.int64)
        bad = torch.nonzero(self._sums[:, 0] != self._sums[:, 1]).reshape(-1).cpu().numpy()
        return np.unique(self._copy_of[bad]).astype(np.int64)

    def _launch(self, stream: torch.cuda.Stream, count: int) -> None:
        launch(
            Stream.from_handle(stream.cuda_stream),
            self._config,
            self._kernel,
            self._tiles.data_ptr(),
            np.uint32(count),
            self._sums.data_ptr(),
        )


@cache
def compiled(
    capability: tuple[int, int],
    device_index: int,
    macros: tuple[tuple[str, int], ...],
    sources: tuple[str, ...] = (_SOURCE,),
    name: str = "copy_tiles",
) -> Kernel:
    """A kernel of `sources`, compiled as one text and loaded into the primary context of a device."""
    Device(device_index).set_current()
    options = ProgramOptions(
        arch="sm_{}{}".format(*capability), std="c++17", define_macro=[(name, str(value)) for name, value in macros]
    )
    text = "\n".join(files(__package__).joinpath(source).read_text() for source in sources)
    return Program(text, "c++", options).compile("cubin").get_kernel(name)
