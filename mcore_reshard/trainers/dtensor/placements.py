"""Which elements of a tensor a rank holds, from DTensor's placements: arithmetic, no communication.

    10 rows over 4 ranks, Shard(0)                              0:3, 3:6, 6:9, 9:10
    8 rows over dp 2 x tp 2, (_StridedShard(0, sf=2), Shard(0))  rank (1, 0) holds 2:4, rank (0, 1) holds 4:6

Placements apply in the order of the mesh's dims, each to what the one before left. A dim is cut as torch.chunk cuts it:
in parts of the ceiling, so that the last ranks hold less, or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mcore_reshard.planner.layout.geometry import row_major_strides
from mcore_reshard.planner.layout.strided import StridedCopy

_Ranges = list[tuple[int, int]]  # half-open, along one dim of the whole tensor, in the order in which the rank has them


def copies_to_local(tensor: torch.Tensor) -> list[StridedCopy]:
    """Copies from a whole tensor to this rank's part of it; from a plain tensor, which all ranks have, one of everything.

    Empty where this rank holds nothing. Raises ValueError for a placement that leaves sums to be added up, or that is
    unknown, and where the part does not have the shape that the placements say.
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return _copies(shape, [[(0, size)] for size in shape])
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    held = ranges_held(shape, tensor.placements, mesh.shape, coordinate)
    with torch.no_grad():
        local = tuple(tensor.to_local().shape)
    expected = tuple(sum(stop - start for start, stop in ranges) for ranges in held)
    if expected != local and not 0 == prod(expected) == prod(local):
        placements = ", ".join(map(str, tensor.placements))
        raise ValueError(f"({placements}) of {list(shape)} give this rank {list(expected)}, it holds {list(local)}")
    return _copies(shape, held)


def ranges_held(
    shape: Sequence[int], placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> list[list[tuple[int, int]]]:
    """Half-open ranges along each dim of the whole tensor that the rank at `coordinate` has, in its own order.

    Raises ValueError for a placement that leaves sums to be added up, or that is unknown.
    """
    held: list[_Ranges] = [[(0, size)] for size in shape]
    for placement, count, index in zip(placements, mesh_shape, coordinate, strict=True):
        held = _place(held, placement, count, index)
    return held


def _place(held: list[_Ranges], placement: Any, count: int, index: int) -> list[_Ranges]:
    """What is left to one of `count` ranks."""
    if placement.is_replicate():
        return held
    if placement.is_partial():
        raise ValueError(f"{placement} holds terms of a sum: redistribute it to Shard or Replicate first")
    parts = _parts_first_cut(placement)
    if parts is None:
        raise ValueError(
            f"{type(placement).__name__} is no placement with a known rule (Shard, _StridedShard, Replicate)"
        )
    dim = placement.dim % len(held)
    own = [part for whole in _chunks(held[dim], parts) for part in _chunks(whole, count)[index]]
    return [*held[:dim], _joined(own), *held[dim + 1 :]]


def _parts_first_cut(placement: Any) -> int | None:
    """In how many parts a placement cuts the dim before it cuts each part over the ranks; None if it is no shard.

    Until torch 2.9 _StridedShard, which FSDP2 makes of a dim that tensor parallelism has cut, is a kind of Shard.
    """
    if type(placement).__name__ == "_StridedShard":
        return int(placement.split_factor)
    return 1 if type(placement).__name__ == "Shard" else None


def _chunks(ranges: _Ranges, count: int) -> list[_Ranges]:
    """`count` parts of the ceiling; the last may be shorter, or empty."""
    size = sum(stop - start for start, stop in ranges)
    part = -(-size // count)
    return [_between(ranges, min(i * part, size), min((i + 1) * part, size)) for i in range(count)]


def _between(ranges: _Ranges, start: int, stop: int) -> _Ranges:
    """Elements `start` to `stop`, counted along the ranges."""
    found, before = [], 0
    for first, last in ranges:
        low, high = max(start, before), min(stop, before + last - first)
        if low < high:
            found.append((first + low - before, first + high - before))
        before += last - first
    return found


def _joined(ranges: _Ranges) -> _Ranges:
    joined: _Ranges = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return joined


def _copies(shape: Sequence[int], held: Sequence[_Ranges]) -> list[StridedCopy]:
    """One copy for each combination of ranges; the local tensor is contiguous."""
    src_strides = row_major_strides(tuple(shape))
    dst_strides = row_major_strides(tuple(sum(stop - start for start, stop in ranges) for ranges in held))
    copies = []
    for box in product(*(_with_places(ranges) for ranges in held)):
        src_offset = sum(start * stride for (start, _, _), stride in zip(box, src_strides, strict=True))
        dst_offset = sum(place * stride for (_, _, place), stride in zip(box, dst_strides, strict=True))
        extents = tuple(stop - start for start, stop, _ in box)
        if prod(extents):
            copies.append(StridedCopy(extents, src_offset, src_strides, dst_offset, dst_strides).coalesced())
    return copies


def _with_places(ranges: _Ranges) -> list[tuple[int, int, int]]:
    """(start, stop, place in the local tensor)."""
    placed, place = [], 0
    for start, stop in ranges:
        placed.append((start, stop, place))
        place += stop - start
    return placed
