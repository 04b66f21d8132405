"""Layouts: for a group of parameters, which rank holds which part, and where in which local tensor.

A layout (megatron.py, vllm.py) answers `place(group)` with `PartitionOwners`, one for each pipeline stage and, for experts,
each expert-parallel rank: 256 experts share one `Partition`. The functions at the end are the ways to cut a parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.model.parameters import ParameterGroup, Role
from mcore_reshard.planner.model.precision import Format

from .geometry import LocalTensor, Piece, Region
from .mesh import LayerPlace

_UP_ROLES = {Role.UP, Role.EXPERT_UP, Role.SHARED_UP}


@dataclass(frozen=True, slots=True)
class Padding:
    """A box of a local tensor that no parameter fills, such as the tail of a padded vocabulary."""

    tensor: LocalTensor
    box: Region


@dataclass(frozen=True, slots=True)
class Partition:
    """The parts that one parameter is cut into: `pieces[c]` and `padding[c]` are in part `c`."""

    pieces: tuple[tuple[Piece, ...], ...]
    padding: tuple[tuple[Padding, ...], ...] = ()

    def padding_of(self, part: int) -> tuple[Padding, ...]:
        return self.padding[part] if self.padding else ()


@dataclass(frozen=True, slots=True, eq=False)
class PartitionOwners:
    """The ranks that hold a partition of some layers and experts."""

    partition: Partition
    ranks: NDArray[np.int32]  # [c, r]: replica r of part c
    pp_stage: int
    layers: tuple[LayerPlace, ...]  # one of layer -1 for a parameter in no layer
    experts: tuple[int, int] = (0, 0)  # half-open; expert e sits in slot e - experts[0]


@dataclass(frozen=True, slots=True)
class Misc:
    """The group travels by the misc route, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Excluded:
    """The group is not transferred at all, for this reason."""

    reason: str


Placed = tuple[PartitionOwners, ...] | Misc | Excluded
Rule = Callable[[Any, ParameterGroup], Partition | Misc]  # given a layout's context


class Layout(ABC):
    """One side of a plan: where every group of a model lies on a mesh."""

    name: str
    title: str  # as messages name the framework

    @abstractmethod
    def violations(self) -> list[str]:
        """Why the model cannot be cut this way; empty where it can."""

    @abstractmethod
    def scales(self, group: ParameterGroup, partition: Partition, form: Format) -> Partition | Misc:
        """The partition of the scales of a quantized group whose weights are cut into `partition`."""

    @abstractmethod
    def place(self, group: ParameterGroup) -> Placed:
        """The ranks that hold the group, or the reason why no rank receives it point to point."""


class RuledLayout(Layout):
    """A layout whose parameters are cut by rules, one for each role."""

    rules: Mapping[Role, Rule]
    context: Any  # given to its rules beside the group; `local_experts` is the number of experts on the rank

    @abstractmethod
    def stages(self, group: ParameterGroup) -> dict[int, tuple[LayerPlace, ...]]:
        """The group's layers by pipeline stage."""

    @abstractmethod
    def ranks(self, group: ParameterGroup, pp_stage: int) -> list[tuple[NDArray[np.int32], tuple[int, int]]]:
        """The sets of ranks of a stage that hold a group, each [degree, replicas], with the experts that each set holds."""

    def place(self, group: ParameterGroup) -> Placed:
        if (rule := self.rules.get(group.role)) is None:
            return Misc(f"no layout rule for {group.role.value!r} in {self.title}")
        partition_of = cache(lambda local_experts: rule(replace(self.context, local_experts=local_experts), group))
        owners = []
        for pp_stage, layers in self.stages(group).items():
            for ranks, experts in self.ranks(group, pp_stage):
                partition = partition_of(experts[1] - experts[0])
                if isinstance(partition, Misc):
                    return partition
                if len(partition.pieces) == 1:  # every rank is a replica
                    ranks = ranks.reshape(1, -1)
                owners.append(PartitionOwners(partition, ranks, pp_stage, layers, experts))
        return tuple(owners)


def indivisible(what: str, size: int, axis: str, degree: int) -> list[str]:
    """The violation of cutting `size` of something evenly; `what` has a place for the number, as in `{} experts`."""
    return [f"{what.format(size)} cannot be divided by {axis} = {degree}"] if size % degree else []


def unshareable(what: str, count: int, axis: str, degree: int) -> list[str]:
    """The violation if neither of `count` things and `degree` ranks divides the other."""
    if count % degree == 0 or degree % count == 0:
        return []
    return [f"{count} {what} are neither a multiple nor a divisor of {axis} = {degree}"]


def layers_by_stage(
    layers: Iterable[int], places: Sequence[tuple[int, LayerPlace]]
) -> dict[int, tuple[LayerPlace, ...]]:
    """The places of some layers, by pipeline stage; `places[layer]` is where the pipeline keeps a layer."""
    stages: dict[int, list[LayerPlace]] = {}
    for layer in layers:
        pp_stage, place = places[layer]
        stages.setdefault(pp_stage, []).append(place)
    return {stage: tuple(places_of_stage) for stage, places_of_stage in sorted(stages.items())}


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows `[start, start + rows)` of a global parameter, from row `local_start` of the local tensor on."""

    start: int
    rows: int
    local_start: int


RowRanges = Sequence[Sequence[RowRange]]  # for each part


def whole(group: ParameterGroup, name: str) -> Partition:
    """Every rank has the whole parameter in a tensor of its own: shape -> shape."""
    view, tensor = group.view, LocalTensor(name, group.shape, group.dtype)
    return Partition(((Piece(Region.whole(view), tensor, (0,) * len(view), tuple(range(len(view))), view),),))


def split(group: ParameterGroup, name: str, dim: int, degree: int, stack: int = 0) -> Partition:
    """Equal parts along `dim`: (R, C) -> (R / degree, C) for dim 0. `stack` experts per tensor: (stack, R / degree, C)."""
    rows = group.view[dim] // degree
    return rows_along(group, name, dim, rows, [(RowRange(c * rows, rows, 0),) for c in range(degree)], stack)


def rows_along(
    group: ParameterGroup, name: str, dim: int, local_rows: int, row_ranges: RowRanges, stack: int = 0
) -> Partition:
    """Ranges of rows placed in a (possibly fused) local tensor: `row_ranges[c]` lists what part `c` holds along `dim`.

    The local tensor has `local_rows` along `dim` and the parameter's extents elsewhere. With `stack` experts per tensor it
    has a leading dim of that extent.
    """
    lead = (stack,) if stack else ()
    shape = (*lead, *group.view[:dim], local_rows, *group.view[dim + 1 :])
    tensor = LocalTensor(name, shape, group.dtype)
    dims = tuple(range(len(lead), len(shape)))

    def piece(rows: RowRange) -> Piece:
        region = Region.whole(group.view).within(dim, rows.start, rows.start + rows.rows)
        origin = tuple(rows.local_start if d == dims[dim] else 0 for d in range(len(shape)))
        return Piece(region, tensor, origin, dims, shape, 0 if stack else -1)

    return Partition(tuple(tuple(map(piece, rows_of_part)) for rows_of_part in row_ranges))


def gate_up(
    group: ParameterGroup, name: str, degree: int, gated: bool, stack: int = 0, alternating: int = 0
) -> Partition:
    """Gate or up, (I, H), in a tensor of [gate_c; up_c] = (2 I / degree, H) per part; up alone where nothing gates it.

    With `alternating` rows, gate and up take turns: 4 rows of each, 2 alternating -> [gate 0:2; up 0:2; gate 2:4; up 2:4].
    """
    rows = group.view[0] // degree
    halves, block = (2, alternating or rows) if gated else (1, rows)
    local_start = block if gated and group.role in _UP_ROLES else 0
    starts = range(0, rows, block)
    row_ranges = [[RowRange(c * rows + at, block, local_start + halves * at) for at in starts] for c in range(degree)]
    return rows_along(group, name, 0, halves * rows, row_ranges, stack)


def split_sections(
    group: ParameterGroup, name: str, sections: Sequence[int], degree: int, uncut: Collection[int] = ()
) -> Partition:
    """Sections of rows, each cut in equal parts, one after another in every part; sections with an index in `uncut` stay whole.

    Sections (4, 2) at degree 2: part 0 holds rows 0, 1, 4 and part 1 holds rows 2, 3, 5.
    """
    row_ranges: list[list[RowRange]] = [[] for _ in range(degree)]
    start = local_start = 0
    for index, rows in enumerate(sections):
        count, step = (rows, 0) if index in uncut else (rows // degree, rows // degree)
        for c, part in enumerate(row_ranges):
            part.append(RowRange(start + c * step, count, local_start))
        start, local_start = start + rows, local_start + count
    return rows_along(group, name, 0, local_start, row_ranges)


def padded_rows(group: ParameterGroup, name: str, padded: int, degree: int) -> Partition:
    """Rows padded to `padded`, then cut in equal parts; the tail is declared padding: (V, H) -> (padded / degree, H)."""
    local_rows = padded // degree
    counts = [min(max(group.view[0] - c * local_rows, 0), local_rows) for c in range(degree)]  # without the padding
    row_ranges = [(RowRange(c * local_rows, rows, 0),) if rows else () for c, rows in enumerate(counts)]
    tensor = LocalTensor(name, (local_rows, *group.view[1:]), group.dtype)
    tails = [Padding(tensor, Region.whole(tensor.shape).within(0, rows, local_rows)) for rows in counts]
    padding = tuple((tail,) if tail.box.elements else () for tail in tails)
    return Partition(rows_along(group, name, 0, local_rows, row_ranges).pieces, padding)
