"""Perform a table of copies on the GPU with one launch: the launcher of copy_kernel.cu.

The kernel is CUDA C++, compiled at run time with NVIDIA's own bindings (NVRTC through cuda.core). Measured beside it on
two H200s (tools/bench_kernels.py, tools/results/kernels-x2.json): kernels in Triton that walk the same tiles reach the
same rate, 375 GB/s where the copy engine has 394, but take a launch for each size of words, longer to start and a C
compiler on the machine; bulk copies through shared memory (TMA) 375 as well, of one aligned region.
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
    """How a launch is spread over the GPU. `ctas` is the budget: each fills a multiprocessor (an H200 has 132)."""

    ctas: int = 48
    threads: int = 512  # a multiple of 32
    batch: int = 8  # loads under way in each thread

    def __post_init__(self) -> None:
        if self.ctas < 1 or self.batch < 1 or not 32 <= self.threads <= 1024 or self.threads % 32:
            raise ValueError(f"no kernel has this shape: {self}")


class DeviceCopies:
    """Tiles (dtype TILE) on a device, to be performed as often as wanted; their addresses must stay valid.

    With `checksums`, every tile is summed as it is read, read back and summed again; `damaged()` says which differ.
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
        """Copies of which the last launch, which must have completed, wrote other bytes than it read; ascending."""
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
    """A kernel of `sources`, which are compiled as one, loaded into the primary context of a device."""
    Device(device_index).set_current()
    options = ProgramOptions(
        arch="sm_{}{}".format(*capability), std="c++17", define_macro=[(name, str(value)) for name, value in macros]
    )
    text = "\n".join(files(__package__).joinpath(source).read_text() for source in sources)
    return Program(text, "c++", options).compile("cubin").get_kernel(name)
