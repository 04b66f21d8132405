"""Checksums of sampled tiles of tensors in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .copy_table import Ints
from .strata import Strata
from .tensors import byte_array


class CpuTileSums:
    """Checksums of tensors in host memory, `tensors` by the indices of the strata."""

    def __init__(self, strata: Strata, tensors: Sequence[torch.Tensor]) -> None:
        self._strata = strata
        self._bytes = [byte_array(tensor) for tensor in tensors]
        self._seed = 0
        self._sums: list[list[int]] = []

    def take(self, seed: int) -> None:
        self._seed = seed
        self._sums = [self._take()]

    def take_again(self) -> None:
        self._sums.append(self._take())

    def is_done(self) -> bool:
        return True

    def changed(self) -> Ints:
        return np.flatnonzero([first != second for first, second in zip(*self._sums, strict=True)])

    def _take(self) -> list[int]:
        """Python's own hash of bytes: SipHash, of 64 bits. It keeps the GIL, which a busy trainer would not give back."""
        columns = (self._strata.tensor, *self._strata.chosen(self._seed))
        tiles = zip(*(column.tolist() for column in columns), strict=True)
        return [hash(self._bytes[tensor][start:end].tobytes()) for tensor, start, end in tiles]
