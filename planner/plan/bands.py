"""Overlaps in bands: replicas, and the waves of a relay, share the work of one that is large.

overlap of 3 MiB, 1,024 rows     at most 1 MiB ->     rows 0 to 341, 341 to 682, 682 to 1,024
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from mcore_reshard.planner.layout.geometry import Region
from mcore_reshard.planner.layout.partitions import Partition
from mcore_reshard.planner.model.parameters import ITEMSIZE
from mcore_reshard.planner.model.precision import FP8

if TYPE_CHECKING:
    from .plan import Overlap


def in_bands(overlaps: Iterable[Overlap], dst: Partition, largest: int) -> tuple[Overlap, ...]:
    """The overlaps. One of more than `largest` bytes is cut along its first dimension of several rows, into bands of about as many.

    They may be in other bands already. Those of weights with scales stay: bands might end within a block.
    """
    divided: list[Overlap] = []
    for overlap in _whole(overlaps):
        region, (dim, rows, bands) = overlap.region, _bands_of(overlap, dst, largest)
        edges = [region.start[dim] + rows * band // bands for band in range(bands + 1)] if bands > 1 else []
        for edge in pairwise(edges):
            start, stop = (
                (*end[:dim], at, *end[dim + 1 :]) for end, at in zip((region.start, region.stop), edge, strict=True)
            )
            divided.append(replace(overlap, region=Region(start, stop)))
        divided += [overlap] * (bands <= 1)
    return tuple(divided)


def band_count(overlaps: Iterable[Overlap], dst: Partition, largest: int) -> int:
    """How many overlaps `in_bands` makes of these."""
    return sum(max(1, _bands_of(overlap, dst, largest)[2]) for overlap in _whole(overlaps))


def _bands_of(overlap: Overlap, dst: Partition, largest: int) -> tuple[int, int, int]:
    """The dimension that is divided, its rows, and the number of bands."""
    region, dtype = overlap.region, dst.pieces[overlap.dst][overlap.dst_piece].tensor.dtype
    dim = next((dim for dim, extent in enumerate(region.extents) if extent > 1), 0)  # an expert is one of its dim
    rows = region.extents[dim] if region.extents else 1
    return dim, rows, 1 if dtype == FP8 else min(rows, -(-region.elements * ITEMSIZE[dtype] // largest))


def _whole(overlaps: Iterable[Overlap]) -> Iterable[Overlap]:
    """Bands of the same two pieces as one overlap again: what two boxes share is one box."""
    whole: dict[tuple[int, int, int, int], Overlap] = {}
    for overlap in overlaps:
        ends = overlap.src, overlap.src_piece, overlap.dst, overlap.dst_piece
        first = whole.setdefault(ends, overlap)
        if first is not overlap:  # bands follow each other
            whole[ends] = replace(overlap, region=Region(first.region.start, overlap.region.stop))
    return whole.values()
