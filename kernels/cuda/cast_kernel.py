"""Perform casts on the GPU, and compute the scales they use: the launchers of cast_kernel.cu."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from cuda.core import LaunchConfig, Stream, launch
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.casts import Casts

from .cast_tiles import BLOCK, CAST_TILE, cut_cast_tiles, scale_blocks, split_casts
from .copy_kernel import DeviceCopies, KernelShape, compiled
from .tiles import cut_tiles

_SOURCES = ("copy_kernel.cu", "cast_kernel.cu")
_SCALE_SHAPE = KernelShape(ctas=528, threads=256)  # a warp has 4 KiB under way: it takes many to read at full speed


class _Launcher:
    """A table on a device, and the kernel that walks it."""

    def __init__(self, table: NDArray[np.void], device: torch.device, shape: KernelShape, kernel: str) -> None:
        self._shape = shape
        self._count = len(table)
        self._table = torch.from_numpy(table.view(np.uint8).copy()).to(device)
        macros = (("THREADS", shape.threads), ("BATCH", shape.batch))
        with torch.cuda.device(device):
            self._kernel = compiled(torch.cuda.get_device_capability(device), device.index, macros, _SOURCES, kernel)
            self._launch(torch.cuda.Stream(device), 0)  # CUDA loads kernels when they are first launched: now

    @property
    def nbytes(self) -> int:
        """Device memory of the table."""
        return self._table.nbytes

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Queue the work on `stream`. Does not wait."""
        self._launch(stream, self._count)

    def _launch(self, stream: torch.cuda.Stream, count: int) -> None:
        launch(
            Stream.from_handle(stream.cuda_stream),
            LaunchConfig(grid=self._shape.ctas, block=self._shape.threads),
            self._kernel,
            self._table.data_ptr(),
            np.uint32(count),
        )


class DeviceCasts(_Launcher):
    """Tiles (dtype CAST_TILE) on a device, ready to be cast any number of times. Their addresses must stay valid."""

    def __init__(self, tiles: NDArray[np.void], device: torch.device, shape: KernelShape) -> None:
        assert tiles.dtype == CAST_TILE
        super().__init__(tiles, device, shape, "cast_tiles")


class DeviceScales(_Launcher):
    """Blocks (dtype BLOCK) of weights on a device: computes their scales, any number of times."""

    def __init__(self, blocks: NDArray[np.void], device: torch.device) -> None:
        assert blocks.dtype == BLOCK
        super().__init__(blocks, device, _SCALE_SHAPE, "block_scales")


def device_scales(casts: Casts, tensors: Sequence[torch.Tensor], device: torch.device) -> DeviceScales | None:
    """The launcher that computes the scales of `casts`; None where there are none."""
    blocks = scale_blocks(casts, tensors)
    return DeviceScales(blocks, device) if len(blocks) else None


class DeviceGather:
    """A table of copies (dtype COPY) on the GPU; some may cast. Plain copies take one launch, casts another."""

    def __init__(
        self,
        copies: NDArray[np.void],
        addresses: NDArray[np.uint64],
        casts: Casts,
        device: torch.device,
        shape: KernelShape,
        tile_bytes: int,
    ) -> None:
        plain, cast = split_casts(copies, casts)
        self._parts: Sequence[DeviceCopies | DeviceCasts] = (
            *([DeviceCopies(cut_tiles(plain, addresses, tile_bytes), device, shape)] if len(plain) else ()),
            *([DeviceCasts(cut_cast_tiles(cast, addresses, casts, tile_bytes), device, shape)] if len(cast) else ()),
        )

    @property
    def nbytes(self) -> int:
        """Device memory of the tables."""
        return sum(part.nbytes for part in self._parts)

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Queue the copies on `stream`. Does not wait."""
        for part in self._parts:
            part.launch(stream)
