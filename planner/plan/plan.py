"""The plan: who sends which region to whom, for every parameter, as an immutable value.

Parameters that move alike share a `Template` (the cuts on both ends and their intersections). A `Bundle` is a set of
parameters that share a template and the ranks on both ends: the eight experts of one expert-parallel rank in the layers
of one pipeline stage, say. Nothing is stored per rank or per parameter; `schedule_of` expands what one rank needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.layout.geometry import Region
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.layout.partitions import Shards
from mcore_reshard.planner.model.parameters import ITEMSIZE, ParameterGroup

Policy = Literal["exact", "conservative"]
Numbers = NDArray[np.int64] | int


@dataclass(frozen=True, slots=True)
class Move:
    """One region of a parameter that goes from a piece of source shard `src` to a piece of destination shard `dst`."""

    src: int  # source shard (coordinate of the cut)
    src_piece: int
    dst: int
    dst_piece: int
    region: Region


@dataclass(frozen=True)
class Template:
    """How one parameter is cut on both ends, and the moves between the cuts, ordered by destination shard."""

    src: Shards
    dst: Shards
    moves: tuple[Move, ...]

    @cached_property
    def order_in_source(self) -> NDArray[np.int64]:
        """For each move, how many earlier moves leave the same source shard."""
        return _order_within([move.src for move in self.moves])

    @cached_property
    def moves_of_source(self) -> NDArray[np.int64]:
        """For each source shard, how many moves leave it."""
        return np.bincount([move.src for move in self.moves], minlength=len(self.src.pieces)).astype(np.int64)

    @cached_property
    def order_in_destination(self) -> NDArray[np.int64]:
        """For each move, how many earlier moves enter the same destination shard."""
        return _order_within([move.dst for move in self.moves])

    @cached_property
    def moves_of_destination(self) -> NDArray[np.int64]:
        """For each destination shard, how many moves enter it."""
        return np.bincount([move.dst for move in self.moves], minlength=len(self.dst.pieces)).astype(np.int64)

    @cached_property
    def move_bytes(self) -> NDArray[np.int64]:
        """Bytes of each move on the wire, in the dtype that the destination holds."""
        return np.array(
            [
                move.region.elements * ITEMSIZE[self.dst.pieces[move.dst][move.dst_piece].tensor.dtype]
                for move in self.moves
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


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """`ranks[c, r]` holds replica `r` of shard `c`; ranks count within their world."""

    ranks: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BundleLayer:
    """One layer of a bundle: its HF number and where both ends keep it. All -1 or 0 outside of layers."""

    layer: int
    vp_stage: int
    src_local: int
    dst_local: int


@dataclass(frozen=True, slots=True)
class Bundle:
    """Parameters (layers x experts of one group) that share template, stage, source and destination ranks.

    Member `k` is layer `k // experts`, expert `k % experts`. Pull number `p` of member `k` on a source shard is served
    by replica `(rotation + k * step + p) % replicas`: round robin, so that replicas share the load. The step is the number
    of pulls, or a little more, so that pulls of one number, which go to one rank, take all replicas in turn as well. Where
    the plan relays, `landing` turns a round robin over the destination's replicas in the same way.
    """

    group: int
    template: int
    pp_stage: int
    src: int  # index into Plan.holdings
    dst: int
    layers: tuple[BundleLayer, ...]
    experts: tuple[int, int] = (0, 0)  # half-open range of expert numbers
    src_slot: int = 0  # slot of the first expert at the source
    dst_slot: int = 0
    rotation: int = 0
    landing: int = 0

    @property
    def expert_count(self) -> int:
        return max(1, self.experts[1] - self.experts[0])

    @property
    def members(self) -> int:
        return len(self.layers) * self.expert_count


@dataclass(frozen=True, slots=True)
class UnplannedGroup:
    """A group that does not move point to point, and why."""

    group: int
    reason: str


@dataclass(frozen=True, slots=True)
class Pair:
    """A quantised weight and its scales, groups of one plan: one route, the same bundles, cut on block edges.

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
    templates: tuple[Template, ...]
    holdings: tuple[Holding, ...]
    bundles: tuple[Bundle, ...]
    misc: tuple[UnplannedGroup, ...] = ()
    excluded: tuple[UnplannedGroup, ...] = ()
    relay: bool = False  # each move leaves the trainer once; the replica it lands on passes it on to the others
    pairs: tuple[Pair, ...] = ()
    casts: tuple[GroupCast, ...] = ()
    digest: str = field(default="", compare=False)

    def parameter_name(self, bundle: int, member: int) -> str:
        held = self.bundles[bundle]
        at, expert = divmod(member, held.expert_count)
        return self.groups[held.group].name(held.layers[at].layer, held.experts[0] + expert)

    def src_replicas(self, bundle: Bundle) -> int:
        return self.holdings[bundle.src].ranks.shape[1]

    def dst_replicas(self, bundle: Bundle) -> int:
        return self.holdings[bundle.dst].ranks.shape[1]

    def train_pulls(self, bundle: Bundle) -> int:
        """How often each move leaves the trainer."""
        return 1 if self.relay else self.dst_replicas(bundle)

    def served_by(self, bundle: Bundle, member: Numbers, move: Numbers, dst_replica: Numbers) -> NDArray[np.int64]:
        """The source replica that a move comes from, for one destination replica; arguments broadcast."""
        turn = 0 * np.asarray(dst_replica) if self.relay else dst_replica
        template = self.templates[bundle.template]
        return replica_of(template, bundle, self.src_replicas(bundle), self.train_pulls(bundle), member, move, turn)

    def lands_on(self, bundle: Bundle, member: Numbers, move: Numbers) -> NDArray[np.int64]:
        """Where the plan relays: the destination replica that a move goes to from the trainer; arguments broadcast."""
        template = self.templates[bundle.template]
        return landing_of(template, bundle, self.dst_replicas(bundle), member, move)

    def misc_names(self) -> Iterator[str]:
        for unplanned in self.misc:
            yield from self.groups[unplanned.group].names()

    def pair_names(self) -> dict[str, tuple[str, str]]:
        """Every quantised weight -> the name of its scales, and their dtype."""
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
    def scale_templates(self) -> dict[int, int]:
        """Of each bundle of a weight in a pair, the template of its scales: those in the bundle beside it."""
        scales_of = {pair.weight: pair.scales for pair in self.pairs}
        by_place = {(b.group, b.pp_stage, b.src, b.dst, b.layers, b.experts): b.template for b in self.bundles}
        places = {
            index: (scales_of[b.group], b.pp_stage, b.src, b.dst, b.layers, b.experts)
            for index, b in enumerate(self.bundles)
            if b.group in scales_of
        }
        return {index: by_place[place] for index, place in places.items() if place in by_place}

    @cached_property
    def wire_bytes(self) -> dict[str, int]:
        """Bytes that all generation ranks receive in one refit, by dtype on the wire, the most first."""
        carried: dict[str, int] = {}
        for bundle in self.bundles:
            template, copies = self.templates[bundle.template], bundle.members * self.dst_replicas(bundle)
            for move, nbytes in zip(template.moves, template.move_bytes.tolist(), strict=True):
                dtype = template.dst.pieces[move.dst][move.dst_piece].tensor.dtype
                carried[dtype] = carried.get(dtype, 0) + nbytes * copies
        return dict(sorted(carried.items(), key=lambda item: -item[1]))

    @cached_property
    def send_bytes(self) -> NDArray[np.int64]:
        """Bytes that each training rank sends in one refit."""
        load = np.zeros(self.train.world, dtype=np.int64)
        for bundle in self.bundles:
            template = self.templates[bundle.template]
            served = replica_bytes(template, bundle, self.src_replicas(bundle), self.train_pulls(bundle))
            np.add.at(load, self.holdings[bundle.src].ranks, served)
        return load

    @cached_property
    def recv_bytes(self) -> NDArray[np.int64]:
        """Bytes that each generation rank receives in one refit."""
        load = np.zeros(self.gen.world, dtype=np.int64)
        for bundle in self.bundles:
            template = self.templates[bundle.template]
            arriving = np.zeros(len(template.dst.pieces), dtype=np.int64)
            np.add.at(arriving, [move.dst for move in template.moves], template.move_bytes)
            np.add.at(load, self.holdings[bundle.dst].ranks, (arriving * bundle.members)[:, None])
        return load

    @cached_property
    def relay_bytes(self) -> NDArray[np.int64]:
        """Bytes that each generation rank passes on to other replicas in one refit."""
        load = np.zeros(self.gen.world, dtype=np.int64)
        for bundle in self.bundles if self.relay else ():
            replicas = self.dst_replicas(bundle)
            landed = landing_bytes(self.templates[bundle.template], bundle, replicas)
            np.add.at(load, self.holdings[bundle.dst].ranks, landed * (replicas - 1))
        return load

    @property
    def busiest_link(self) -> int:
        """The most bytes that any rank sends or receives in one refit."""
        return int(max(load.max(initial=0) for load in (self.send_bytes, self.recv_bytes, self.relay_bytes)))

    @cached_property
    def stage_totals(self) -> tuple[tuple[int, int, int], ...]:
        """(pp_stage, transfers, bytes) of every stage."""
        totals = {stage: [0, 0] for stage in range(self.train.pp)}
        for bundle in self.bundles:
            template = self.templates[bundle.template]
            pulls = bundle.members * self.dst_replicas(bundle)
            totals[bundle.pp_stage][0] += pulls * len(template.moves)
            totals[bundle.pp_stage][1] += pulls * int(template.move_bytes.sum())
        return tuple((stage, transfers, nbytes) for stage, (transfers, nbytes) in totals.items())


def replica_of(template: Template, bundle: Bundle, replicas: int, pulls_each: int, member: Numbers, move: Numbers,
               dst_replica: Numbers) -> NDArray[np.int64]:  # fmt: skip
    """Which source replica serves a pull; arguments broadcast against each other.

    `replicas` is the number of source replicas, `pulls_each` how often each move is pulled: once by every destination
    replica, or once where these relay.
    """
    sources = np.array([m.src for m in template.moves], dtype=np.int64)
    step = _coprime(template.moves_of_source * pulls_each, replicas)[sources[move]]
    number = template.order_in_source[move] * pulls_each + dst_replica
    return (bundle.rotation + member * step + number) % replicas


def replica_bytes(template: Template, bundle: Bundle, replicas: int, pulls_each: int) -> NDArray[np.int64]:
    """Bytes that each source replica serves, as [shards, replicas]."""
    dst = np.arange(pulls_each)[None, None, :]
    return _round_robin_bytes(
        template, bundle, replicas, [m.src for m in template.moves], len(template.src.pieces),
        lambda member, move: replica_of(template, bundle, replicas, pulls_each, member, move, dst),
    )  # fmt: skip


def landing_of(template: Template, bundle: Bundle, replicas: int, member: Numbers, move: Numbers) -> NDArray[np.int64]:
    """Which destination replica a move lands on where the plan relays; arguments broadcast against each other."""
    shards = np.array([m.dst for m in template.moves], dtype=np.int64)
    step = _coprime(template.moves_of_destination, replicas)[shards[move]]
    found: NDArray[np.int64] = (bundle.landing + member * step + template.order_in_destination[move]) % replicas
    return found


def _coprime(counts: NDArray[np.int64], replicas: int) -> NDArray[np.int64]:
    """The first numbers, from each count on, that share no factor with `replicas`: [2, 3], 4 -> [3, 3]."""
    found = counts.copy()
    while (shared := np.gcd(found, replicas) > 1).any():
        found[shared] += 1
    return found


def landing_bytes(template: Template, bundle: Bundle, replicas: int) -> NDArray[np.int64]:
    """Bytes that land on each destination replica where the plan relays, as [shards, replicas]."""
    return _round_robin_bytes(
        template, bundle, replicas, [m.dst for m in template.moves], len(template.dst.pieces),
        lambda member, move: landing_of(template, bundle, replicas, member, move),
    )  # fmt: skip


def _round_robin_bytes(template: Template, bundle: Bundle, replicas: int, shard_of: Sequence[int], shards: int,
                       chosen: Callable[[Numbers, Numbers], NDArray[np.int64]]) -> NDArray[np.int64]:  # fmt: skip
    """Bytes by (shard, chosen replica). `chosen` takes members [m, 1, 1] and moves [1, n, 1] and is periodic in the member."""
    taken = np.zeros((shards, replicas), dtype=np.int64)
    period = min(replicas, bundle.members)
    member = np.arange(period)
    repeats = bundle.members // period + (member < bundle.members % period)
    found = chosen(member[:, None, None], np.arange(len(template.moves))[None, :, None])
    weight = repeats[:, None, None] * template.move_bytes[None, :, None]
    shard = np.array(shard_of, dtype=np.int64)[None, :, None]
    np.add.at(taken, (np.broadcast_to(shard, found.shape), found), np.broadcast_to(weight, found.shape))
    return taken
