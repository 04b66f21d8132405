"""Which tiles of tensors a refit samples for checksums, and these checksums on the CPU.

A tensor is cut into tiles. Every refit checks some of them, chosen anew at random: one in each of several equal parts of
a tensor, its strata.

    tensor of 8 tiles, 2 strata     0 1 2 3 | 4 5 6 7      one of the first four, one of the last four

Where a fraction f of a tensor's tiles changes, its k samples all miss it with a probability of at most (1 - f) ** k. Where
every tile changes, nothing is missed: every tensor has a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from .bind import BoundSchedule
from .copy_table import Ints, repeat
from .tensors import byte_array

SAMPLED_SHARE = 0.01  # of the bytes that a refit sends
SAMPLED_TILE_BYTES = 4 << 10
FULL_TILE_BYTES = 128 << 10
_FRACTION_BITS = 32  # tiles are counted in fixed point, so that all parts of a tensor are equal
_ODD = 0x9E3779B97F4A7C15

STRATUM = np.dtype(  # the struct Stratum of tile_sums.cu, 32 bytes
    [
        ("address", np.uint64),  # of the tensor
        ("nbytes", np.uint64),  # of the tensor
        ("first", np.uint64),  # where the stratum begins, in tiles of the tensor, with _FRACTION_BITS after the point
        ("width", np.uint64),
    ]
)


class Strata(NamedTuple):
    """The parts of tensors that have one sampled tile each."""

    table: NDArray[np.void]  # dtype STRATUM
    tensor: Ints  # [strata] index of the tensor
    tile_bytes: int

    @classmethod
    def of(cls, addresses: Ints, nbytes: Ints, samples: Ints, tile_bytes: int) -> Strata:
        """`samples` equal strata of each tensor, at most one a tile. The three columns have a row for each tensor."""
        tiles = -(-nbytes // tile_bytes)
        samples = np.minimum(samples, tiles)
        tensor, number = repeat(samples)
        count = samples[tensor]

        def edge(number: Ints) -> NDArray[np.uint64]:
            whole, rest = np.divmod(number * tiles[tensor], count)
            fixed: Ints = (whole << _FRACTION_BITS) + (rest << _FRACTION_BITS) // count
            return fixed.astype(np.uint64)

        table = np.zeros(len(tensor), STRATUM)
        table["address"], table["nbytes"] = addresses[tensor], nbytes[tensor]
        table["first"] = edge(number)
        table["width"] = edge(number + 1) - table["first"]
        return cls(table, tensor, tile_bytes)

    def chosen(self, seed: int) -> tuple[Ints, Ints]:
        """(first byte, end) of the tile of each stratum that `seed` chooses, counted within its tensor."""
        low = np.uint64((1 << 32) - 1)
        number = np.arange(1, len(self.table) + 1, dtype=np.uint64)
        random = _mix(np.uint64(seed) + number * np.uint64(_ODD)) >> np.uint64(32)
        width = self.table["width"]
        within = (width >> np.uint64(32)) * random + (((width & low) * random) >> np.uint64(32))
        tile = ((self.table["first"] + within) >> np.uint64(_FRACTION_BITS)).astype(np.int64)
        start = tile * self.tile_bytes
        return start, np.minimum(start + self.tile_bytes, self.table["nbytes"].astype(np.int64))


class TileSums(Protocol):
    """Takes the checksums of a table of strata, twice in each refit."""

    def take(self, seed: int) -> None:
        """Take checksums of the tiles that `seed` chooses. On a GPU this and `take_again` only queue it."""

    def take_again(self) -> None:
        """Take the checksums of the same tiles again."""

    def is_done(self) -> bool:
        """Whether the checksums are there."""

    def changed(self) -> Ints:
        """The strata in which the two differ, ascending. Call it when they are there."""


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


def strata_of(bound: BoundSchedule, checks: str) -> Strata:
    """The strata of all tensors that the rank sends from. `checks` is as in `Options.source_checks`."""
    schedule = bound.schedule
    nbytes = np.array([tensor.nbytes for tensor in bound.tensors], np.int64)
    addresses = np.array([tensor.data_ptr() for tensor in bound.tensors], np.int64)
    checked = np.zeros(len(nbytes), bool)
    sent = 0
    if checks != "off":
        for stage in schedule.stages:
            checked[stage.sends.tensor] = True
            sent += int(stage.sends.nbytes.sum())
    checked[[index for index, local in enumerate(schedule.tensors) if local.name not in bound.fingerprints]] = False
    tile_bytes = FULL_TILE_BYTES if checks == "full" else SAMPLED_TILE_BYTES
    tiles = np.where(checked, -(-nbytes // tile_bytes), 0)
    if checks == "full":
        return Strata.of(addresses, nbytes, tiles, tile_bytes)
    share = min(1.0, SAMPLED_SHARE * sent / max(1, int(nbytes[checked].sum())))
    return Strata.of(addresses, nbytes, np.ceil(tiles * share).astype(np.int64), tile_bytes)


def _mix(number: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each bit of the result depends on every bit of `number`; `mix` of tile_sums.cu is the same (Murmur3's finalizer)."""
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
        number = (number ^ (number >> np.uint64(shift))) * np.uint64(factor)
    return number ^ (number >> np.uint64(33))
