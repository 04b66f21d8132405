"""Launch tile_sums.cu: checksums of sampled tiles of tensors on a GPU, once before they are read and once after."""

from __future__ import annotations

import numpy as np
import torch

from mcore_reshard.kernels.copies.copy_table import Ints
from mcore_reshard.kernels.copies.strata import Strata

from .copy_kernel import DeviceTable, KernelShape

# A warp has 4 KiB under way. It waits for each of its tiles, so many take turns on a multiprocessor.
_SHAPE = KernelShape(ctas=1056, threads=256)


class DeviceTileSums(DeviceTable):
    """Checksums of the tiles of `strata`, of tensors on `device`. `TileSums` says what its methods do.

    Work is queued on the current stream. It must be the same for both passes.
    """

    def __init__(self, strata: Strata, device: torch.device, shape: KernelShape = _SHAPE) -> None:
        self._device = device
        self._sums = torch.zeros(2, len(strata.table), dtype=torch.int64, device=device)
        self._changed = torch.zeros((), dtype=torch.int64, device=device)
        self._end = torch.cuda.Event()
        self._seed = 0
        macros = (("TILE_BYTES", strata.tile_bytes),)
        super().__init__(
            strata.table, device, shape, "tile_sums", macros=macros, arguments=self._arguments_of(again=False)
        )

    @property
    def nbytes(self) -> int:
        """Device memory of the table and the checksums."""
        return super().nbytes + self._sums.nbytes

    def take(self, seed: int) -> None:
        self._seed = seed
        self._queue(again=False)

    def take_again(self) -> None:
        self._end.record(self._queue(again=True))

    def is_done(self) -> bool:
        return self._end.query()

    def changed(self) -> Ints:
        if not self._changed.item():
            return np.zeros(0, np.int64)
        return torch.nonzero(self._sums[0] != self._sums[1]).reshape(-1).cpu().numpy()

    def _queue(self, *, again: bool) -> torch.cuda.Stream:
        self._arguments = self._arguments_of(again=again)
        stream = torch.cuda.current_stream(self._device)
        self.launch(stream)
        return stream

    def _arguments_of(self, *, again: bool) -> tuple[int, int, np.uint64, np.uint32]:
        return self._sums.data_ptr(), self._changed.data_ptr(), np.uint64(self._seed), np.uint32(again)
