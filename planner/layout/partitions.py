"""What a layout says: for a group of parameters, who holds which part, and where in which local tensor.

A layout (planner/megatron.py, planner/vllm.py) answers `place(group)` with placements. A placement covers some layers
and experts of the group on one pipeline stage; its parts are shared by everything that is cut alike, so the 256 experts
of 58 layers have one `Partition` between them. The builders below are the few ways in which parameters are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.model.parameters import ParameterGroup, Role
from mcore_reshard.planner.model.precision import Format

from .geometry import LocalTensor, Piece, Region
from .mesh import LayerPlace

_UP_ROLES = {Role.UP, Role.EXPERT_UP, Role.SHARED_UP}


@dataclass(frozen=True, slots=True)
class Padding:
    """A box of a local tensor that no parameter fills (the tail of a padded vocabulary)."""

    tensor: LocalTensor
    box: Region


@dataclass(frozen=True, slots=True)
class Partition:
    """The parts one parameter is cut into: `pieces[c]` and `padding[c]` are what coordinate `c` of the cut holds."""

    pieces: tuple[tuple[Piece, ...], ...]
    padding: tuple[tuple[Padding, ...], ...] = ()

    def padding_of(self, part: int) -> tuple[Padding, ...]:
        return self.padding[part] if self.padding else ()


@dataclass(frozen=True, slots=True, eq=False)
class PartitionOwners:
    """One share of a group: `ranks[c, r]` is replica `r` of part `c`. Layer places are -1 where there is no layer.

    `experts` is a half-open range of expert numbers; expert `e` sits in slot `e - experts[0]` of its holders.
    """

    partition: Partition
    ranks: NDArray[np.int32]
    pp_stage: int
    layers: tuple[LayerPlace, ...]
    experts: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Misc:
    """The group travels by the misc route, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Excluded:
    """The group is not transferred at all, for this reason."""

    reason: str


class Layout(Protocol):
    """One side of a plan. `violations` lists why the model cannot be cut this way (empty: it can).

    `scales` says where the scales of a quantized group lie, whose weights are cut into `partition`; `misquantized` lists what
    this side would quantize though it must not.
    """

    name: str

    def violations(self) -> list[str]: ...

    def place(self, group: ParameterGroup) -> tuple[PartitionOwners, ...] | Misc | Excluded: ...

    def misquantized(self) -> list[str]: ...

    def scales(self, group: ParameterGroup, partition: Partition, form: Format) -> Partition | Misc: ...


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows `[start, start + rows)` of a global parameter, at local row `at`."""

    start: int
    rows: int
    at: int


def whole(group: ParameterGroup, name: str, dtype: str = "") -> Partition:
    """Every holder has the whole parameter in a tensor of its own: shape -> shape."""
    view = group.view
    tensor = LocalTensor(name, group.shape, dtype or group.dtype)
    return Partition(((Piece(Region.whole(view), tensor, (0,) * len(view), tuple(range(len(view))), view),),))


def split(
    group: ParameterGroup, name: str, dim: int, degree: int, stack: int = 0, shape: tuple[int, ...] = ()
) -> Partition:
    """Equal parts along `dim`: (R, C) -> (R / degree, C) for dim 0. `stack` experts per tensor: (stack, R / degree, C)."""
    local_view = (*group.view[:dim], group.view[dim] // degree, *group.view[dim + 1 :])
    runs = [(RowRange(c * local_view[dim], local_view[dim], 0),) for c in range(degree)]
    return runs_along(group, name, dim, local_view[dim], runs, stack, shape)


def runs_along(
    group: ParameterGroup,
    name: str,
    dim: int,
    local_rows: int,
    runs: Sequence[Sequence[RowRange]],
    stack: int = 0,
    shape: tuple[int, ...] = (),
) -> Partition:
    """Runs of rows placed in a (possibly fused) local tensor: `runs[c]` lists what coordinate `c` holds along `dim`.

    The local tensor has `local_rows` along `dim` and the parameter's extents elsewhere, and a leading dim of `stack`
    experts if that is not 0. `shape` is the tensor's own shape where it differs from that.
    """
    view = (*group.view[:dim], local_rows, *group.view[dim + 1 :])
    lead = (stack,) if stack else ()
    tensor = LocalTensor(name, shape or lead + view, group.dtype)
    dims = tuple(d + len(lead) for d in range(len(view)))
    pieces = []
    for held in runs:
        row = []
        for run in held:
            region = Region.whole(group.view).within(dim, run.start, run.start + run.rows)
            origin = [0] * len(lead + view)
            origin[dims[dim]] = run.at
            row.append(Piece(region, tensor, tuple(origin), dims, lead + view, 0 if stack else -1))
        pieces.append(tuple(row))
    return Partition(tuple(pieces))


def gate_up(group: ParameterGroup, name: str, degree: int, gated: bool, stack: int = 0) -> Partition:
    """Gate or up, (I, H), in a tensor of [gate_c; up_c] = (2 I / degree, H) per part; up alone where nothing gates it."""
    rows = group.view[0] // degree
    at = rows if gated and group.role in _UP_ROLES else 0
    runs = [(RowRange(c * rows, rows, at),) for c in range(degree)]
    return runs_along(group, name, 0, rows * (2 if gated else 1), runs, stack)


def padded_rows(group: ParameterGroup, name: str, padded: int, degree: int) -> Partition:
    """Rows padded to `padded`, then cut in equal parts; the tail is declared padding: (V, H) -> (padded / degree, H)."""
    rows, held = padded // degree, group.view[0]
    runs, padding = [], []
    tensor = LocalTensor(name, (rows, *group.view[1:]), group.dtype)
    for c in range(degree):
        start, stop = min(c * rows, held), min((c + 1) * rows, held)
        runs.append((RowRange(start, stop - start, 0),) if start < stop else ())
        tail = Region.whole(tensor.shape).within(0, stop - start, rows)
        padding.append((Padding(tensor, tail),) if tail.elements else ())
    return Partition(runs_along(group, name, 0, rows, runs).pieces, tuple(padding))
