"""All transfers of a plan at once: the rows of every rank's schedule, as a few columns.

`schedule_of` expands one rank and says where every byte lies. A simulation needs all ranks, and of each transfer only its
size and its ends. DeepSeek-V3 from 256 to 128 ranks has 5.8 million.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.buckets import aligned
from mcore_reshard.planner.model.parameters import ITEMSIZE
from mcore_reshard.planner.plan.make_schedule import wire_box
from mcore_reshard.planner.plan.paths import HopKind
from mcore_reshard.planner.plan.plan import AlikeTransfers, Plan
from mcore_reshard.planner.plan.schedule import World

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shape:
    """What `cut_buckets` must know of a transfer: extents in wire order, and bytes of an element on the wire."""

    extents: tuple[int, ...]
    itemsize: int
    is_cast: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """The transfers of one hop by wave, stage and pair of ranks; those of a pair are in the order that both ends have.

    Ranks count training ranks first, then generation ranks.
    """

    hop: int
    kind: HopKind
    wave: Ints  # [pairs]: of a relay; 0 where there are none
    stage: Ints  # [pairs]: index into Schedule.stages
    src: Ints  # [pairs]: in a later hop, the generation rank that passes on
    dst: Ints  # [pairs]
    first: Ints  # [pairs + 1]: where the transfers of each pair begin
    shape: NDArray[np.int32]  # [transfers]: index into shapes
    shapes: tuple[Shape, ...]

    @property
    def shape_bytes(self) -> Ints:
        """Bytes of each shape on the wire."""
        return np.array([prod(shape.extents) * shape.itemsize for shape in self.shapes], np.int64)

    @property
    def pair_bytes(self) -> Ints:
        """[pairs]: bytes of all transfers of each, on the wire."""
        return np.asarray(np.add.reduceat(self.shape_bytes[self.shape], self.first[:-1]), np.int64)

    @property
    def aligned_pair_bytes(self) -> Ints:
        """The same, each transfer rounded up to where the next may start, as `fewest_buckets` wants them."""
        return np.asarray(np.add.reduceat(aligned(self.shape_bytes)[self.shape], self.first[:-1]), np.int64)

    def of_pairs(self, chosen: Ints) -> Traffic:
        """The transfers of the chosen pairs, in that order."""
        counts = np.diff(self.first)[chosen]
        first = np.concatenate([[0], np.cumsum(counts)])
        rows = np.arange(first[-1]) + np.repeat(self.first[chosen] - first[:-1], counts)
        wave, stage, src, dst = (column[chosen] for column in (self.wave, self.stage, self.src, self.dst))
        return Traffic(self.hop, self.kind, wave, stage, src, dst, first, self.shape[rows], self.shapes)


@dataclass(frozen=True, slots=True, eq=False)
class _Legs:
    """Legs of the members of alike transfer groups: each takes an overlap from one rank to another."""

    overlap: Ints  # [legs]
    src: NDArray[np.int32]  # [groups, members, legs]: ranks
    dst: NDArray[np.int32]
    runs: NDArray[np.bool_]  # [groups, members, legs]: whether the member takes that leg


def traffic_of(plan: Plan) -> tuple[Traffic, ...]:
    """The traffic of each hop."""
    hops: dict[HopKind, list[tuple[AlikeTransfers, _Legs]]] = {kind: [] for kind in ("train", *plan.later_hops)}
    for alike in plan.alike:
        for kind, legs in _hops(plan, alike):
            hops[kind].append((alike, legs))
    return tuple(_traffic(plan, legs, hop, kind) for hop, (kind, legs) in enumerate(hops.items()))


def _traffic(plan: Plan, of_groups: list[tuple[AlikeTransfers, _Legs]], hop: int, kind: HopKind) -> Traffic:
    stages, ranks = plan.train.pp, (plan.gen.world if hop else plan.train.world, plan.gen.world)
    shapes: dict[Shape, int] = {}
    of_pattern: dict[int, NDArray[np.int32]] = {}  # the shape of each overlap
    keys = [np.zeros(0, np.int64)] * (1 + len(plan.transfer_groups))
    rows = [np.zeros(0, np.int32)] * len(keys)
    for alike, legs in of_groups:
        pattern = alike.transfer_groups[0].pattern
        if pattern not in of_pattern:
            known = [shapes.setdefault(shape, len(shapes)) for shape in _shapes(plan, pattern, hop)]
            of_pattern[pattern] = np.array(known, np.int32)
        waves = alike.waves(plan.waves)[..., legs.overlap]
        shape = np.broadcast_to(of_pattern[pattern][legs.overlap], waves.shape[1:])
        for index, wave, src, dst, taken in zip(alike.numbers, waves, legs.src, legs.dst, legs.runs, strict=True):
            place = wave * stages + plan.transfer_groups[index].pp_stage
            keys[index] = ((place * ranks[0] + src) * ranks[1] + dst)[taken]
            rows[index] = shape[taken]
    key = np.concatenate(keys)
    count = np.bincount(key, minlength=1)
    pairs = np.flatnonzero(count)
    order = _stable_order((np.cumsum(count > 0) - 1)[key])
    first = np.concatenate([[0], np.cumsum(count[pairs])])
    wave, stage, src, dst = np.unravel_index(pairs, (plan.waves, stages, *ranks))
    columns = wave, stage, src + (plan.train.world if hop else 0), dst + plan.train.world
    return Traffic(hop, kind, *columns, first, np.concatenate(rows)[order], tuple(shapes))


def _stable_order(key: Ints) -> Ints:
    """`np.argsort(key, kind="stable")` for keys from 0 on; numpy sorts 16 bits at a time in linear time."""
    order = np.argsort((key & 0xFFFF).astype(np.uint16), kind="stable")
    digits = 16
    while int(key.max(initial=0)) >> digits:
        digit = (key[order] >> digits & 0xFFFF).astype(np.uint16)
        order = order[np.argsort(digit, kind="stable")]
        digits += 16
    return order


def _shapes(plan: Plan, pattern: int, hop: int) -> Iterator[Shape]:
    """The shape of each overlap of a pattern; a replica that passes on reads in the order of its own memory."""
    for overlap in plan.patterns[pattern].overlaps:
        src, dst = plan.patterns[pattern].ends(overlap)
        extents = wire_box(overlap.region, dst if hop else src, dst).extents
        is_cast = not hop and src.tensor.dtype != dst.tensor.dtype
        yield Shape(extents, ITEMSIZE[dst.tensor.dtype], is_cast)


def _hops(plan: Plan, alike: AlikeTransfers) -> Iterator[tuple[HopKind, _Legs]]:
    """The legs of each hop of alike transfer groups."""
    parts = plan.patterns[alike.transfer_groups[0].pattern].parts
    for hop in (alike.first_hop(), *alike.later_hops()):
        side: World = "train" if hop.kind == "train" else "gen"
        src = plan.ranks_of(side, alike, parts[side][hop.overlap], hop.src)
        dst = plan.ranks_of("gen", alike, parts["gen"][hop.overlap], hop.dst)
        yield hop.kind, _Legs(hop.overlap, src, dst, hop.runs)
