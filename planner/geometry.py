"""Regions of global tensors and the pieces of them that local tensors hold.

A `Region` is a half-open box in the coordinates of one global parameter. A `Piece` says where such a region lies inside
a local tensor. Everything else (fused projections, stacked experts, padded vocabularies, transposed storage) is a list
of pieces, and a transfer is the intersection of a held piece with a wanted one. Nothing here knows of ranks or bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """A half-open box `[start, stop)`, one entry per dim of the global parameter."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"region start {self.start} and stop {self.stop} have different ranks")
        if any(low < 0 or high < low for low, high in zip(self.start, self.stop)):
            raise ValueError(f"region [{self.start}, {self.stop}) is not a box")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(high - low for low, high in zip(self.start, self.stop))

    @property
    def elements(self) -> int:
        return prod(self.extents)

    def intersect(self, other: Region) -> Region | None:
        """The common box, or None where the two share no element."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(low >= high for low, high in zip(start, stop)):
            return None
        return Region(start, stop)

    def contains(self, other: Region) -> bool:
        return all(a <= b for a, b in zip(self.start, other.start)) and all(
            a >= b for a, b in zip(self.stop, other.stop)
        )

    def within(self, dim: int, start: int, stop: int) -> Region:
        """This region with `dim` replaced by `[start, stop)`."""
        return Region(
            self.start[:dim] + (start,) + self.start[dim + 1 :], self.stop[:dim] + (stop,) + self.stop[dim + 1 :]
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{low}:{high}" for low, high in zip(self.start, self.stop)) + "]"


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Element strides of a contiguous tensor: (2, 3, 4) -> (12, 4, 1)."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class Piece:
    """A region of a global parameter and the box of a local tensor that stores it.

    `shape` is the local tensor's shape, or a finer row-major factoring of it where rows interleave: a `[2 I, H]` matrix
    whose rows alternate gate and up is `(I, 2, H)`. Global dim `d` runs along local dim `dims[d]`; local dims that no
    global dim runs along have extent one.
    """

    region: Region
    tensor: str
    shape: tuple[int, ...]
    origin: tuple[int, ...]
    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.origin) != len(self.shape) or len(self.dims) != len(self.region.start):
            raise ValueError(f"{self.tensor}: origin {self.origin} or dims {self.dims} do not fit shape {self.shape}")
        if len(set(self.dims)) != len(self.dims):
            raise ValueError(f"{self.tensor}: two global dims run along one local dim: {self.dims}")

    @property
    def local(self) -> Region:
        """The box of the local tensor, in the coordinates of `shape`."""
        stop = [low + 1 for low in self.origin]
        for extent, dim in zip(self.region.extents, self.dims):
            stop[dim] = self.origin[dim] + extent
        return Region(self.origin, tuple(stop))

    @property
    def strides(self) -> tuple[int, ...]:
        """Element stride in the local tensor of each global dim."""
        local = row_major_strides(self.shape)
        return tuple(local[dim] for dim in self.dims)

    def offset(self, at: tuple[int, ...]) -> int:
        """Element offset, in the local tensor, of the global coordinate `at` (which must lie in `region`)."""
        base = sum(low * stride for low, stride in zip(self.origin, row_major_strides(self.shape)))
        return base + sum(
            (point - low) * stride for point, low, stride in zip(at, self.region.start, self.strides)
        )
