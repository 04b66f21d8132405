"""Perform casts on the GPU, and compute the scales they use: the launchers of cast_kernel.cu."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.casts import Casts

from .cast_tiles import cut_cast_tiles, scale_blocks, split_casts
from .copy_kernel import DeviceCopies, DeviceTable, KernelShape
from .tiles import cut_tiles

_SCALE_SHAPE = KernelShape(ctas=528, threads=256)  # a warp has 4 KiB under way: it takes many to read at full speed


def device_scales(casts: Casts, tensors: Sequence[torch.Tensor], device: torch.device) -> DeviceTable | None:
    """What computes the scales of `casts`, any number of times; None where there are none."""
    blocks = scale_blocks(casts, tensors)
    return DeviceTable(blocks, device, _SCALE_SHAPE, "block_scales") if len(blocks) else None


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
        self._parts: list[DeviceTable] = []
        if len(plain):
            self._parts.append(DeviceCopies(cut_tiles(plain, addresses, tile_bytes), device, shape))
        if len(cast):
            tiles = cut_cast_tiles(cast, addresses, casts, tile_bytes)
            self._parts.append(DeviceTable(tiles, device, shape, "cast_tiles"))

    @property
    def nbytes(self) -> int:
        """Device memory of the tables."""
        return sum(part.nbytes for part in self._parts)

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Queue the copies on `stream`. Does not wait."""
        for part in self._parts:
            part.launch(stream)
