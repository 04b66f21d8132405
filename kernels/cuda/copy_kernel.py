"""Launch copy_kernel.cu and cast_kernel.cu: one launch performs a whole table of copies or casts on the GPU.

The copy kernel is CUDA C++, compiled at run time with NVIDIA's own bindings (NVRTC through cuda.core). It reaches 375 GB/s
between two H200s, where the copy engine reaches 394. Two alternatives were measured beside it (tools/bench_kernels.py,
tools/results/kernels-x2.json). Triton walks the same tiles as fast, but needs a launch for each word size, more time to
start, and a C compiler. Bulk copies through shared memory (TMA) reach 375 as well, for one aligned region.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from cuda.core import Device, Kernel, LaunchConfig, Program, ProgramOptions, Stream, launch
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.casts import Casts

from .cast_tiles import BLOCK, CAST_TILE, MOST_ELEMENTS, GatherTables, blocks_of, scale_blocks
from .executed_tiles import NameOf, PlacedCopies, cast_tile_problems, tile_problems
from .tiles import CHECKSUMS, TILE

_SOURCES = {  # of each kernel, compiled as one text
    "copy_tiles": ("copy_kernel.cu",),
    "cast_tiles": ("copy_kernel.cu", "cast_kernel.cu"),
    "block_scales": ("copy_kernel.cu", "cast_kernel.cu"),
    "cast_blocks": ("copy_kernel.cu", "cast_kernel.cu"),
    "tile_sums": ("tile_sums.cu",),
}


@dataclass(frozen=True, slots=True)
class KernelShape:
    """How a launch is spread over the GPU. Each CTA takes a whole multiprocessor; an H200 has 132."""

    ctas: int = 48
    threads: int = 512  # a multiple of 32
    batch: int = 8  # loads under way in each thread

    def __post_init__(self) -> None:
        if self.ctas < 1 or self.batch < 1 or not 32 <= self.threads <= 1024 or self.threads % 32:
            raise ValueError(f"no kernel has this shape: {self}; threads are a multiple of 32, from 32 to 1024")


def own_gpu_shape(device: torch.device) -> KernelShape:
    """Of copies within a GPU, which its memory bounds. CTAs beyond those that fit begin as others end."""
    return KernelShape(ctas=4 * torch.cuda.get_device_properties(device).multi_processor_count, batch=4)


_SCALE_SHAPE = KernelShape(ctas=528, threads=256)  # a warp has 4 KiB under way: it takes many to read at full speed
_BLOCK_THREADS = 256  # of a CTA that casts whole blocks: it holds one in registers, in words of 8 elements


class DeviceTable:
    """A table on a device and the kernel that walks it, any number of times. Addresses in the table must stay valid."""

    def __init__(
        self,
        table: NDArray[np.void],
        device: torch.device,
        shape: KernelShape,
        kernel: str,
        *,
        macros: tuple[tuple[str, int], ...] = (),
        arguments: tuple[Any, ...] = (),
    ) -> None:
        self._config = LaunchConfig(grid=shape.ctas, block=shape.threads)
        self._count, self._dtype = len(table), table.dtype
        self._table = torch.from_numpy(table.view(np.uint8).copy()).to(device)
        self._arguments = arguments  # of the kernel, behind the table and its length
        macros = (("THREADS", shape.threads), ("BATCH", shape.batch), *macros)
        with torch.cuda.device(device):
            self._kernel = _compile(kernel, device.index, macros)
            self._launch(torch.cuda.Stream(device), 0)  # CUDA loads kernels when they are first launched: now

    @property
    def nbytes(self) -> int:
        """Device memory that it takes."""
        return self._table.nbytes

    def read_back(self) -> NDArray[np.void]:
        """The table as it lies on the device now."""
        return self._table.cpu().numpy().view(self._dtype)

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Queue the work on `stream`. Does not wait."""
        self._launch(stream, self._count)

    def _launch(self, stream: torch.cuda.Stream, count: int) -> None:
        arguments = (self._table.data_ptr(), np.uint32(count), *self._arguments)
        launch(Stream.from_handle(stream.cuda_stream), self._config, self._kernel, *arguments)


class DeviceCopies(DeviceTable):
    """Tiles (dtype TILE) on a device.

    With `checksums`, a tile is summed when it is read, and again at its destination; `damaged()` names copies that differ.
    """

    def __init__(
        self,
        tiles: NDArray[np.void],
        device: torch.device,
        shape: KernelShape = KernelShape(),
        *,
        checksums: bool = False,
        own_gpu: bool = False,  # whether all sources lie on `device`
        stop: torch.Tensor | None = None,  # see DeviceGather
        defines: tuple[tuple[str, int], ...] = (),
    ) -> None:
        assert tiles.dtype == TILE
        self._copy_of = tiles["copy"]
        self._sums = torch.zeros(len(tiles) if checksums else 0, CHECKSUMS, dtype=torch.int64, device=device)
        macros = (("CHECKSUMS", int(checksums)), ("OWN_GPU", int(own_gpu)), *defines)
        arguments = (self._sums.data_ptr(), _address(stop))
        super().__init__(tiles, device, shape, "copy_tiles", macros=macros, arguments=arguments)
        with torch.cuda.device(device):
            self.damaged()  # the first call loads kernels of torch

    @property
    def nbytes(self) -> int:
        """Device memory of the table and the checksums."""
        return super().nbytes + self._sums.nbytes

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Queue the copies on `stream`: one kernel, and a memset before it with checksums. Does not wait."""
        if len(self._sums):
            with torch.cuda.stream(stream):
                self._sums.zero_()
        super().launch(stream)

    def damaged(self) -> NDArray[np.int64]:
        """Indices of the copies that wrote other bytes than they read, ascending. The last launch must have ended."""
        if not len(self._sums):
            return np.zeros(0, np.int64)
        bad = torch.nonzero(self._sums[:, 0] != self._sums[:, 1]).reshape(-1).cpu().numpy()
        return np.unique(self._copy_of[bad]).astype(np.int64)


def device_scales(casts: Casts, tensors: Sequence[torch.Tensor], device: torch.device) -> DeviceTable | None:
    """A launcher that computes the scales of `casts`; None if none of them has scales."""
    addresses, elements = [tensor.data_ptr() for tensor in tensors], [tensor.numel() for tensor in tensors]
    blocks = scale_blocks(casts, addresses, elements)
    return DeviceTable(blocks, device, _SCALE_SHAPE, "block_scales") if len(blocks) else None


class DeviceGather:
    """Copies on the GPU, some of which may cast. Every kind of work takes one launch.

    Once `stop` (int32 [1], pinned) is not 0, launches that begin copy nothing, also those of graphs: the host needs no stream
    for that, which may have to wait for others. Not for copies that compute scales.
    """

    def __init__(
        self, tables: GatherTables, device: torch.device, shape: KernelShape, stop: torch.Tensor | None = None
    ) -> None:
        assert stop is None or not len(tables.scales) + len(tables.blocks)
        self._parts: dict[str, DeviceTable] = {}  # in the order in which they are walked
        of_blocks = KernelShape(shape.ctas, _BLOCK_THREADS, batch=MOST_ELEMENTS // _BLOCK_THREADS // 8)
        for name, table, kernel, of_kernel, arguments in (
            ("scales", tables.scales, "block_scales", _SCALE_SHAPE, ()),
            ("blocks", tables.blocks, "cast_blocks", of_blocks, ()),
            ("cast", tables.cast, "cast_tiles", shape, (_address(stop),)),
        ):
            if len(table):
                self._parts[name] = DeviceTable(table, device, of_kernel, kernel, arguments=arguments)
        if len(tables.plain):
            self._parts["plain"] = DeviceCopies(tables.plain, device, shape, stop=stop)

    @property
    def nbytes(self) -> int:
        """Device memory of the tables."""
        return sum(part.nbytes for part in self._parts.values())

    def problems(self, placed: PlacedCopies, casts: Casts, addresses: Sequence[int], name_of: NameOf) -> list[str]:
        """How the copies on the device differ from `placed`; `addresses` [tensors] says where scales lie."""
        is_cast = np.isin(placed.copies["src"], [*casts])
        plain, cast = np.flatnonzero(~is_cast), np.flatnonzero(is_cast)
        cast_tiles = np.concatenate([self._read_back("blocks", CAST_TILE), self._read_back("cast", CAST_TILE)])
        return [
            *tile_problems(self._read_back("plain", TILE), placed.only(plain), lambda row: name_of(int(plain[row]))),
            *cast_tile_problems(cast_tiles, placed.only(cast), casts, addresses, lambda row: name_of(int(cast[row]))),
        ]

    def computed(self) -> NDArray[np.void]:
        """The blocks (dtype BLOCK) whose scales it computes, as they are on the device."""
        return np.concatenate([self._read_back("scales", BLOCK), blocks_of(self._read_back("blocks", CAST_TILE))])

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Queue everything on `stream`. Does not wait."""
        self.launch_scales(stream)
        self.launch_copies(stream)

    def launch_scales(self, stream: torch.cuda.Stream) -> None:
        """Queue on `stream` what computes scales of blocks that are not cast whole here. Does not wait."""
        if "scales" in self._parts:
            self._parts["scales"].launch(stream)

    def launch_copies(self, stream: torch.cuda.Stream) -> None:
        """Queue everything else."""
        for name, part in self._parts.items():
            if name != "scales":
                part.launch(stream)

    def _read_back(self, name: str, dtype: np.dtype[np.void]) -> NDArray[np.void]:
        part = self._parts.get(name)
        return np.empty(0, dtype) if part is None else part.read_back()


def _address(stop: torch.Tensor | None) -> int:
    return 0 if stop is None else stop.data_ptr()


@cache
def _compile(kernel: str, device_index: int, macros: tuple[tuple[str, int], ...]) -> Kernel:
    """A kernel, loaded into the primary context of a device."""
    return _compiled(_SOURCES[kernel], device_index, macros).get_kernel(kernel)


@cache
def _compiled(sources: tuple[str, ...], device_index: int, macros: tuple[tuple[str, int], ...]) -> Any:
    """All kernels of these files."""
    Device(device_index).set_current()
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device_index))
    options = ProgramOptions(arch=arch, std="c++17", define_macro=[(name, str(value)) for name, value in macros])
    text = "\n".join(files(__package__).joinpath(source).read_text() for source in sources)
    return Program(text, "c++", options).compile("cubin")
