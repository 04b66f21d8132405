"""Which tiles of tensors a refit samples for checksums.

A tensor is cut into tiles. Every refit checks some of them, chosen anew at random: one in each of several equal parts of
a tensor, its strata.

    tensor of 8 tiles, 2 strata     0 1 2 3 | 4 5 6 7      one of the first four, one of the last four

Where a fraction f of a tensor's tiles changes, its k samples all miss it with a probability of at most (1 - f) ** k. Where
every tile changes, nothing is missed: every tensor has a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.plan.schedule import Schedule

from .casts import itemsizes
from .copy_table import Ints, repeat

SAMPLED_SHARE = 0.01  # of the bytes that a refit sends
SAMPLED_TILE_BYTES = 4 << 10
FULL_TILE_BYTES = 128 << 10
CHECKSUM_BYTES = 8
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

    @property
    def nbytes(self) -> int:
        """Memory of the table and of a refit's checksums, two for each stratum."""
        return self.table.nbytes + 2 * CHECKSUM_BYTES * len(self.table)

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


def strata_of(schedule: Schedule, addresses: Sequence[int], checks: str) -> Strata:
    """The strata of all tensors that the rank sends from. `checks` is as in `Options.source_checks`.

    `addresses` [tensors] is where each of the schedule's tensors lies.
    """
    nbytes = np.array([prod(local.shape) for local in schedule.tensors], np.int64) * itemsizes(schedule)
    checked = np.zeros(len(nbytes), bool)
    sent = 0
    if checks != "off":
        for stage in schedule.stages:
            checked[stage.sends.tensor] = True
            sent += int(stage.sends.nbytes.sum())
    checked[[cast.scales for cast in schedule.casts if cast.scales is not None]] = False  # each refit computes them
    tile_bytes = FULL_TILE_BYTES if checks == "full" else SAMPLED_TILE_BYTES
    tiles = np.where(checked, -(-nbytes // tile_bytes), 0)
    share = 1.0
    if checks != "full":
        share = min(1.0, SAMPLED_SHARE * sent / max(1, int(nbytes[checked].sum())))
    return Strata.of(np.array(addresses, np.int64), nbytes, np.ceil(tiles * share).astype(np.int64), tile_bytes)


def _mix(number: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each bit of the result depends on every bit of `number`; `mix` of tile_sums.cu is the same (Murmur3's finalizer)."""
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
        number = (number ^ (number >> np.uint64(shift))) * np.uint64(factor)
    return number ^ (number >> np.uint64(33))
