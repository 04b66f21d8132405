"""The plan: who sends which region to whom, for every parameter, as an immutable value.

Parameters that move alike share a `TransferPattern` (the cuts on both ends and their intersections). A `TransferGroup` is a set of
parameters that share a pattern and the ranks on both ends: the eight experts of one expert-parallel rank in the layers
of one pipeline stage, say. Nothing is stored per rank or per parameter; `schedule_of` expands what one rank needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.layout.geometry import LocalTensor, Piece, Region
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.layout.partitions import Partition
from mcore_reshard.planner.model.parameters import ITEMSIZE, ParameterGroup

from .schedule import World

if TYPE_CHECKING:
    from .transfers import Transfer

Policy = Literal["exact", "conservative"]
Numbers = NDArray[np.int64] | int


@dataclass(frozen=True, slots=True)
class Overlap:
    """One region of a parameter that goes from a piece of source part `src` to a piece of destination part `dst`."""

    src: int  # source part (coordinate of the cut)
    src_piece: int
    dst: int
    dst_piece: int
    region: Region


@dataclass(frozen=True)
class TransferPattern:
    """How one parameter is cut on both ends, and the moves between the cuts, ordered by destination part."""

    src: Partition
    dst: Partition
    overlaps: tuple[Overlap, ...]

    def ends(self, overlap: Overlap) -> tuple[Piece, Piece]:
        """The source piece and the destination piece of an overlap."""
        return self.src.pieces[overlap.src][overlap.src_piece], self.dst.pieces[overlap.dst][overlap.dst_piece]

    @cached_property
    def src_parts(self) -> NDArray[np.int64]:
        """The source part of each overlap."""
        return np.array([overlap.src for overlap in self.overlaps], dtype=np.int64)

    @cached_property
    def dst_parts(self) -> NDArray[np.int64]:
        """The destination part of each overlap."""
        return np.array([overlap.dst for overlap in self.overlaps], dtype=np.int64)

    @cached_property
    def order_in_source(self) -> NDArray[np.int64]:
        """For each move, how many earlier moves leave the same source part."""
        return _order_within([overlap.src for overlap in self.overlaps])

    @cached_property
    def overlaps_of_source(self) -> NDArray[np.int64]:
        """For each source part, how many moves leave it."""
        return np.bincount([overlap.src for overlap in self.overlaps], minlength=len(self.src.pieces)).astype(np.int64)

    @cached_property
    def order_in_destination(self) -> NDArray[np.int64]:
        """For each move, how many earlier moves enter the same destination part."""
        return _order_within([overlap.dst for overlap in self.overlaps])

    @cached_property
    def overlaps_of_destination(self) -> NDArray[np.int64]:
        """For each destination part, how many moves enter it."""
        return np.bincount([overlap.dst for overlap in self.overlaps], minlength=len(self.dst.pieces)).astype(np.int64)

    @cached_property
    def overlap_bytes(self) -> NDArray[np.int64]:
        """Bytes of each move on the wire, in the dtype that the destination holds."""
        return np.array(
            [
                overlap.region.elements * ITEMSIZE[self.dst.pieces[overlap.dst][overlap.dst_piece].tensor.dtype]
                for overlap in self.overlaps
            ],
            dtype=np.int64,
        )


def _order_within(values: Sequence[int]) -> NDArray[np.int64]:
    """For each value, how many equal ones come before it: [3, 7, 3] -> [0, 0, 1]."""
    seen: dict[int, int] = {}
    order = []
    for value in values:
        order.append(seen.get(value, 0))
        seen[value] = order[-1] + 1
    return np.array(order, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TransferLayer:
    """One layer of a transfer group: its HF number and where both ends keep it. All -1 or 0 outside of layers."""

    layer: int
    vp_stage: int
    src_local: int
    dst_local: int


@dataclass(frozen=True, slots=True)
class TransferGroup:
    """Parameters (layers x experts of one group) that share pattern, stage, source and destination ranks.

    Member `k` is layer `k // experts`, expert `k % experts`. Pull number `p` of member `k` on a source part is served
    by replica `(first_src_replica + k * step + p) % replicas`: round robin, so that replicas share the load. The step is the number
    of pulls, or a little more, so that pulls of one number, which go to one rank, take all replicas in turn as well. Where
    the plan relays, `first_dst_replica` turns a round robin over the destination's replicas in the same way.
    """

    group: int
    pattern: int
    pp_stage: int
    src: int  # index into Plan.rank_grids
    dst: int
    layers: tuple[TransferLayer, ...]
    experts: tuple[int, int] = (0, 0)  # half-open range of expert numbers
    src_slot: int = 0  # slot of the first expert at the source
    dst_slot: int = 0
    first_src_replica: int = 0
    first_dst_replica: int = 0

    @property
    def expert_count(self) -> int:
        return max(1, self.experts[1] - self.experts[0])

    @property
    def members(self) -> int:
        return len(self.layers) * self.expert_count

    def member(self, layer: int | None, expert: int | None) -> int | None:
        """The number of the member that is this layer and expert; None where the group does not carry it."""
        number = -1 if layer is None else layer
        position = next((i for i, place in enumerate(self.layers) if place.layer == number), None)
        if position is None or (expert is not None and not self.experts[0] <= expert < self.experts[1]):
            return None
        return position * self.expert_count + (0 if expert is None else expert - self.experts[0])

    def slot(self, world: World, member: int) -> int:
        """The slot of a member's expert in the tensors of one end that stack experts."""
        return (self.src_slot if world == "train" else self.dst_slot) + member % self.expert_count

    def tensor_name(self, tensor: LocalTensor, world: World, member: int) -> str:
        """The name of the tensor that holds a member, of which the plan has the pattern."""
        place = self.layers[member // self.expert_count]
        vp, layer = (place.vp_stage, place.src_local) if world == "train" else (0, place.dst_local)
        return tensor.name.format(vp=vp, layer=layer, expert=self.slot(world, member))


@dataclass(frozen=True, slots=True)
class RankInGroup:
    """Where one rank stands in a transfer group: the part that it holds, and which replica of it it is."""

    index: int  # into Plan.transfer_groups
    transfers: TransferGroup
    pattern: TransferPattern
    partition: Partition  # of the pattern, on the rank's own side
    part: int
    replica: int


@dataclass(frozen=True, slots=True)
class UnplannedGroup:
    """A group that does not move point to point, and why."""

    group: int
    reason: str


@dataclass(frozen=True, slots=True)
class QuantizedPair:
    """A quantized weight and its scales, groups of one plan: one route, the same transfer groups, cut on block edges.

    The scale of element (r, c) is entry (r // block[0], c // block[1]) of the group `scales`. `touched`: the engine cuts
    inside of blocks, and each of its ranks gets the scales of all blocks that it has a part of.
    """

    weight: int
    scales: int
    block: tuple[int, int]
    touched: bool = False


@dataclass(frozen=True, slots=True)
class GroupCast:
    """A group that changes its dtype on the way: the source casts. A cast to FP8 computes the scales of its pair."""

    group: int
    src: str
    dst: str


@dataclass(frozen=True)
class Plan:
    """Everything both worlds must agree on. Built by `planning.make_plan`, read from a file by `plan_file.load_plan`."""

    model: str
    train: TrainMesh
    gen: GenMesh
    engine: str
    policy: Policy
    groups: tuple[ParameterGroup, ...]
    patterns: tuple[TransferPattern, ...]
    rank_grids: tuple[NDArray[np.int32], ...] = field(
        compare=False
    )  # grid[p, r] is the rank that holds replica r of part p
    transfer_groups: tuple[TransferGroup, ...]
    misc: tuple[UnplannedGroup, ...] = ()
    excluded: tuple[UnplannedGroup, ...] = ()
    relay: bool = False  # each move leaves the trainer once; the replica it lands on passes it on to the others
    pairs: tuple[QuantizedPair, ...] = ()
    casts: tuple[GroupCast, ...] = ()
    digest: str = field(default="", compare=False)

    def parameter_name(self, transfers: int, member: int) -> str:
        held = self.transfer_groups[transfers]
        at, expert = divmod(member, held.expert_count)
        return self.groups[held.group].name(held.layers[at].layer, held.experts[0] + expert)

    def transfers(
        self,
        parameter: str | None = None,
        *,
        tensor: str | None = None,
        rank: str | None = None,
        element: Sequence[int] | None = None,
    ) -> Iterator[Transfer]:
        """Every transfer of one refit, or those that concern a parameter, a rank, a tensor or an element: `transfers_of`."""
        from .transfers import transfers_of  # late: it builds on this module

        return transfers_of(self, parameter, tensor=tensor, rank=rank, element=element)

    def groups_of(self, world: World, rank: int) -> Iterator[RankInGroup]:
        """The transfer groups that a rank takes part in, in order."""
        places: dict[int, tuple[int, int] | None] = {}  # by rank grid
        for index, transfers in enumerate(self.transfer_groups):
            pattern = self.patterns[transfers.pattern]
            grid, partition = (transfers.src, pattern.src) if world == "train" else (transfers.dst, pattern.dst)
            if grid not in places:
                entries = np.argwhere(self.rank_grids[grid] == rank)
                places[grid] = (int(entries[0, 0]), int(entries[0, 1])) if len(entries) else None
            if (place := places[grid]) is not None:
                yield RankInGroup(index, transfers, pattern, partition, *place)

    def src_replicas(self, transfers: TransferGroup) -> int:
        return self.rank_grids[transfers.src].shape[1]

    def dst_replicas(self, transfers: TransferGroup) -> int:
        return self.rank_grids[transfers.dst].shape[1]

    def train_pulls(self, transfers: TransferGroup) -> int:
        """How often each move leaves the trainer."""
        return 1 if self.relay else self.dst_replicas(transfers)

    def served_by(
        self, transfers: TransferGroup, member: Numbers, overlap: Numbers, dst_replica: Numbers
    ) -> NDArray[np.int64]:
        """The source replica that a move comes from, for one destination replica; arguments broadcast."""
        turn = 0 * np.asarray(dst_replica) if self.relay else dst_replica
        pattern = self.patterns[transfers.pattern]
        return replica_of(
            pattern,
            transfers,
            self.src_replicas(transfers),
            self.train_pulls(transfers),
            member,
            overlap,
            turn,
        )

    def lands_on(self, transfers: TransferGroup, member: Numbers, overlap: Numbers) -> NDArray[np.int64]:
        """Where the plan relays: the destination replica that a move goes to from the trainer; arguments broadcast."""
        pattern = self.patterns[transfers.pattern]
        return landing_of(pattern, transfers, self.dst_replicas(transfers), member, overlap)

    def misc_names(self) -> Iterator[str]:
        for unplanned in self.misc:
            yield from self.groups[unplanned.group].names()

    def pair_names(self) -> dict[str, tuple[str, str]]:
        """Every quantized weight -> the name of its scales, and their dtype."""
        found: dict[str, tuple[str, str]] = {}
        for pair in self.pairs:
            scales = self.groups[pair.scales]
            names = zip(self.groups[pair.weight].names(), scales.names(), strict=True)
            found |= {weight: (beside, scales.dtype) for weight, beside in names}
        return found

    @property
    def misc_bytes(self) -> int:
        """Bytes of the full tensors that travel by the misc route."""
        return sum(self.groups[m.group].nbytes * self.groups[m.group].count for m in self.misc)

    @property
    def bulk_bytes(self) -> int:
        """Bytes of the parameters that move point to point, each counted once."""
        skipped = {u.group for u in (*self.misc, *self.excluded)}
        return sum(group.nbytes * group.count for i, group in enumerate(self.groups) if i not in skipped)

    @cached_property
    def scale_patterns(self) -> dict[int, int]:
        """Of each transfer group of a weight in a pair, the pattern of its scales: those in the transfer group beside it."""
        scales_of = {pair.weight: pair.scales for pair in self.pairs}
        by_place = {(b.group, b.pp_stage, b.src, b.dst, b.layers, b.experts): b.pattern for b in self.transfer_groups}
        places = {
            index: (scales_of[b.group], b.pp_stage, b.src, b.dst, b.layers, b.experts)
            for index, b in enumerate(self.transfer_groups)
            if b.group in scales_of
        }
        return {index: by_place[place] for index, place in places.items() if place in by_place}

    @cached_property
    def wire_bytes(self) -> dict[str, int]:
        """Bytes that all generation ranks receive in one refit, by dtype on the wire, the most first."""
        carried: dict[str, int] = {}
        for transfers in self.transfer_groups:
            pattern, copies = (
                self.patterns[transfers.pattern],
                transfers.members * self.dst_replicas(transfers),
            )
            for overlap, nbytes in zip(pattern.overlaps, pattern.overlap_bytes.tolist(), strict=True):
                dtype = pattern.dst.pieces[overlap.dst][overlap.dst_piece].tensor.dtype
                carried[dtype] = carried.get(dtype, 0) + nbytes * copies
        return dict(sorted(carried.items(), key=lambda item: -item[1]))

    @cached_property
    def send_bytes(self) -> NDArray[np.int64]:
        """Bytes that each training rank sends in one refit."""
        load = np.zeros(self.train.world, dtype=np.int64)
        for transfers in self.transfer_groups:
            pattern = self.patterns[transfers.pattern]
            served = replica_bytes(pattern, transfers, self.src_replicas(transfers), self.train_pulls(transfers))
            np.add.at(load, self.rank_grids[transfers.src], served)
        return load

    @cached_property
    def recv_bytes(self) -> NDArray[np.int64]:
        """Bytes that each generation rank receives in one refit."""
        load = np.zeros(self.gen.world, dtype=np.int64)
        for transfers in self.transfer_groups:
            pattern = self.patterns[transfers.pattern]
            arriving = np.zeros(len(pattern.dst.pieces), dtype=np.int64)
            np.add.at(arriving, [overlap.dst for overlap in pattern.overlaps], pattern.overlap_bytes)
            np.add.at(load, self.rank_grids[transfers.dst], (arriving * transfers.members)[:, None])
        return load

    @cached_property
    def relay_bytes(self) -> NDArray[np.int64]:
        """Bytes that each generation rank passes on to other replicas in one refit."""
        load = np.zeros(self.gen.world, dtype=np.int64)
        for transfers in self.transfer_groups if self.relay else ():
            replicas = self.dst_replicas(transfers)
            landed = landing_bytes(self.patterns[transfers.pattern], transfers, replicas)
            np.add.at(load, self.rank_grids[transfers.dst], landed * (replicas - 1))
        return load

    @property
    def busiest_link(self) -> int:
        """The most bytes that any rank sends or receives in one refit."""
        return int(max(load.max(initial=0) for load in (self.send_bytes, self.recv_bytes, self.relay_bytes)))

    @cached_property
    def stage_totals(self) -> tuple[tuple[int, int, int], ...]:
        """(pp_stage, transfers, bytes) of every stage."""
        totals = {stage: [0, 0] for stage in range(self.train.pp)}
        for transfers in self.transfer_groups:
            pattern = self.patterns[transfers.pattern]
            pulls = transfers.members * self.dst_replicas(transfers)
            totals[transfers.pp_stage][0] += pulls * len(pattern.overlaps)
            totals[transfers.pp_stage][1] += pulls * int(pattern.overlap_bytes.sum())
        return tuple((stage, count, nbytes) for stage, (count, nbytes) in totals.items())


def replica_of(
    pattern: TransferPattern,
    transfers: TransferGroup,
    replicas: int,
    pulls_each: int,
    member: Numbers,
    overlap: Numbers,
    dst_replica: Numbers,
) -> NDArray[np.int64]:
    """Which source replica serves a pull; arguments broadcast against each other.

    `replicas` is the number of source replicas, `pulls_each` how often each move is pulled: once by every destination
    replica, or once where these relay.
    """
    sources = np.array([m.src for m in pattern.overlaps], dtype=np.int64)
    step = _coprime(pattern.overlaps_of_source * pulls_each, replicas)[sources[overlap]]
    number = pattern.order_in_source[overlap] * pulls_each + dst_replica
    return (transfers.first_src_replica + member * step + number) % replicas


def replica_bytes(
    pattern: TransferPattern, transfers: TransferGroup, replicas: int, pulls_each: int
) -> NDArray[np.int64]:
    """Bytes that each source replica serves, as [parts, replicas]."""
    dst = np.arange(pulls_each)[None, None, :]
    return _round_robin_bytes(
        pattern, transfers, replicas, [m.src for m in pattern.overlaps], len(pattern.src.pieces),
        lambda member, overlap: replica_of(pattern, transfers, replicas, pulls_each, member, overlap, dst),
    )  # fmt: skip


def landing_of(
    pattern: TransferPattern, transfers: TransferGroup, replicas: int, member: Numbers, overlap: Numbers
) -> NDArray[np.int64]:
    """Which destination replica a move lands on where the plan relays; arguments broadcast against each other."""
    parts = np.array([m.dst for m in pattern.overlaps], dtype=np.int64)
    step = _coprime(pattern.overlaps_of_destination, replicas)[parts[overlap]]
    found: NDArray[np.int64] = (
        transfers.first_dst_replica + member * step + pattern.order_in_destination[overlap]
    ) % replicas
    return found


def _coprime(counts: NDArray[np.int64], replicas: int) -> NDArray[np.int64]:
    """The first numbers, from each count on, that share no factor with `replicas`: [2, 3], 4 -> [3, 3]."""
    found = counts.copy()
    while (shared := np.gcd(found, replicas) > 1).any():
        found[shared] += 1
    return found


def landing_bytes(pattern: TransferPattern, transfers: TransferGroup, replicas: int) -> NDArray[np.int64]:
    """Bytes that land on each destination replica where the plan relays, as [parts, replicas]."""
    return _round_robin_bytes(
        pattern, transfers, replicas, [m.dst for m in pattern.overlaps], len(pattern.dst.pieces),
        lambda member, overlap: landing_of(pattern, transfers, replicas, member, overlap),
    )  # fmt: skip


def _round_robin_bytes(pattern: TransferPattern, transfers: TransferGroup, replicas: int, part_of: Sequence[int], parts: int,
                       chosen: Callable[[Numbers, Numbers], NDArray[np.int64]]) -> NDArray[np.int64]:  # fmt: skip
    """Bytes by (part, chosen replica). `chosen` takes members [m, 1, 1] and moves [1, n, 1] and is periodic in the member."""
    taken = np.zeros((parts, replicas), dtype=np.int64)
    period = min(replicas, transfers.members)
    member = np.arange(period)
    repeats = transfers.members // period + (member < transfers.members % period)
    found = chosen(member[:, None, None], np.arange(len(pattern.overlaps))[None, :, None])
    weight = repeats[:, None, None] * pattern.overlap_bytes[None, :, None]
    part = np.array(part_of, dtype=np.int64)[None, :, None]
    np.add.at(taken, (np.broadcast_to(part, found.shape), found), np.broadcast_to(weight, found.shape))
    return taken
