"""Regions of global tensors and the pieces of them that local tensors hold.

Fused projections, stacked experts, padded vocabularies and transposed storage are all lists of pieces. A transfer is the
intersection of a source piece with a destination piece. Nothing here knows of ranks or bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from operator import mul


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """A half-open box `[start, stop)`, one entry per dim of the global parameter."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"region start {self.start} and stop {self.stop} have different ranks")
        if any(start < 0 or stop < start for start, stop in zip(self.start, self.stop, strict=True)):
            raise ValueError(f"region [{self.start}, {self.stop}) is not a box")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def elements(self) -> int:
        return prod(self.extents)

    def intersect(self, other: Region) -> Region | None:
        """The common box, or None where the two share no element."""
        starts = tuple(map(max, self.start, other.start))
        stops = tuple(map(min, self.stop, other.stop))
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        return Region(starts, stops)

    def contains(self, other: Region) -> bool:
        bounds = zip(self.start, other.start, other.stop, self.stop, strict=True)
        return all(start <= other_start and other_stop <= stop for start, other_start, other_stop, stop in bounds)

    def holds(self, point: tuple[int, ...]) -> bool:
        return all(start <= place < stop for start, place, stop in zip(self.start, point, self.stop, strict=True))

    def within(self, dim: int, start: int, stop: int) -> Region:
        """This region with `dim` replaced by `[start, stop)`."""
        return Region(
            (*self.start[:dim], start, *self.start[dim + 1 :]), (*self.stop[:dim], stop, *self.stop[dim + 1 :])
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{start}:{stop}" for start, stop in zip(self.start, self.stop, strict=True)) + "]"


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Element strides of a contiguous tensor: (2, 3, 4) -> (12, 4, 1)."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def ravel(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Element offset of an index in a contiguous tensor: (1, 2, 3) of (2, 3, 4) -> 23."""
    return sum(place * stride for place, stride in zip(index, row_major_strides(shape), strict=True))


def unravel(offset: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index at an element offset of a contiguous tensor: 23 of (2, 3, 4) -> (1, 2, 3)."""
    return tuple(offset // stride % size for stride, size in zip(row_major_strides(shape), shape, strict=True))


def permuted(sizes: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes with entry `d` moved to place `dims[d]`: (4, 5, 6) and (0, 2, 1) -> (4, 6, 5)."""
    return tuple(sizes[dims.index(place)] for place in range(len(dims)))


@dataclass(frozen=True, slots=True, order=True)
class LocalTensor:
    """A tensor of a live model: its name there, its exact shape and dtype.

    In a plan the name is a pattern. `{vp}` stands for the model chunk; `{layer}` and `{expert}` stand for the layer's
    and the expert's index in that model.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A region of a global parameter and the box of a local tensor that stores it.

    `view` is the local tensor's shape, or another row-major factoring of the same elements. Storage that interleaves needs
    one: a `[2 I, H]` matrix whose rows alternate gate and up has the view `(I, 2, H)`. `origin` is in coordinates of `view`.
    Global dim `d` runs along local dim `dims[d]`; the box has extent one in every other local dim. Experts that are stacked
    in one tensor follow each other along local dim `slot_dim`, and `origin` is that of slot 0.
    """

    region: Region
    tensor: LocalTensor
    origin: tuple[int, ...]
    dims: tuple[int, ...]
    view: tuple[int, ...] = ()
    slot_dim: int = -1

    def __post_init__(self) -> None:
        if not self.view:
            object.__setattr__(self, "view", self.tensor.shape)
        if len(self.origin) != len(self.view) or len(self.dims) != len(self.region.start):
            raise ValueError(f"{self.tensor.name}: origin {self.origin} or dims {self.dims} do not fit {self.view}")

    def local(self, slot: int = 0) -> Region:
        """The box of the local tensor, in the coordinates of `view`."""
        start = self._origin(slot)
        stop = [coordinate + 1 for coordinate in start]
        for extent, dim in zip(self.region.extents, self.dims, strict=True):
            stop[dim] = start[dim] + extent
        return Region(start, tuple(stop))

    @property
    def strides(self) -> tuple[int, ...]:
        """Element stride in the local tensor of each global dim."""
        local = row_major_strides(self.view)
        return tuple(local[dim] for dim in self.dims)

    def offset(self, point: tuple[int, ...], slot: int = 0) -> int:
        """Element offset, in the local tensor, of the global coordinate `point`, which lies in `region`."""
        inside = (coordinate - start for coordinate, start in zip(point, self.region.start, strict=True))
        return sum(map(mul, self._origin(slot), row_major_strides(self.view))) + sum(map(mul, inside, self.strides))

    def coordinate(self, offset: int, slot: int = 0) -> tuple[int, ...] | None:
        """The global coordinate stored at an element offset of the local tensor; None where the piece is not there."""
        local, box = unravel(offset, self.view), self.local(slot)
        if not box.holds(local):
            return None
        inside = (local[dim] - box.start[dim] for dim in self.dims)
        return tuple(start + offset for start, offset in zip(self.region.start, inside, strict=True))

    def _origin(self, slot: int) -> tuple[int, ...]:
        if self.slot_dim < 0 or not slot:
            return self.origin
        return (*self.origin[: self.slot_dim], self.origin[self.slot_dim] + slot, *self.origin[self.slot_dim + 1 :])
