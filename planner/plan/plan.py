"""The plan: who sends which region to whom, for every parameter, as an immutable value.

    groups            parameters that differ in nothing but layer and expert number
    patterns          how a parameter is cut on both ends, and the overlaps between the cuts
    rank_grids        which rank holds replica r of part p
    transfer_groups   parameters that share a pattern and the ranks on both ends

A transfer group may be the eight experts of one expert-parallel rank in the layers of one pipeline stage. Nothing is
stored per rank or per parameter: `schedule_of` and `Plan.transfers` expand a part of the plan on demand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.layout.geometry import LocalTensor, Piece, Region
from mcore_reshard.planner.layout.mesh import GenMesh, LayerPlace, TrainMesh
from mcore_reshard.planner.layout.partitions import Partition
from mcore_reshard.planner.model.name_patterns import fill
from mcore_reshard.planner.model.parameters import ITEMSIZE, ParameterGroup
from mcore_reshard.planner.topology.topology import Topology

from .balance import MOST_WAVES, WAVE_LAGS, Rows, waves_for
from .bands import in_bands
from .carriers import Carried
from .loads import Loads, carried_of, from_trainer_of, loads_of
from .paths import NIC, Hop, HopKind, InDomains, Paths, Sites
from .rails import Rails
from .schedule import CARRIED, MemberNames, World

if TYPE_CHECKING:
    from mcore_reshard.planner.proof.prove import Proof

    from .transfers import Transfer

Policy = Literal["exact", "conservative"]

_WAVES = 8  # of a relay on one host, or on unknown ones


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
    """How one parameter is cut on both ends, and the overlaps of the cuts, ordered by destination part."""

    src: Partition
    dst: Partition
    overlaps: tuple[Overlap, ...]
    _in_bands: dict[int, TransferPattern] = field(default_factory=dict, init=False, repr=False, compare=False)

    def in_bands(self, largest: int) -> TransferPattern:
        """The pattern with overlaps of about `largest` bytes at most, as bands.py cuts them; itself if they are so."""
        if largest not in self._in_bands:
            overlaps = in_bands(self.overlaps, self.dst, largest)
            if overlaps == self.overlaps:
                return self
            self._in_bands[largest] = replace(self, overlaps=overlaps)
        return self._in_bands[largest]

    def ends(self, overlap: Overlap) -> tuple[Piece, Piece]:
        return self.src.pieces[overlap.src][overlap.src_piece], self.dst.pieces[overlap.dst][overlap.dst_piece]

    def carried_piece(self, overlap: Overlap, name: str = CARRIED) -> Piece:
        """How a carrier holds an overlap: as a tensor of its own."""
        region, dims = overlap.region, len(overlap.region.start)
        tensor = LocalTensor(name, region.extents, self.ends(overlap)[1].tensor.dtype)
        return Piece(region, tensor, (0,) * dims, tuple(range(dims)))

    @cached_property
    def parts(self) -> dict[World, NDArray[np.int64]]:
        """The part of each overlap, at the source ("train") and at the destination ("gen")."""
        src, dst = np.array([(o.src, o.dst) for o in self.overlaps], dtype=np.int64).reshape(-1, 2).T.copy()
        return {"train": src, "gen": dst}

    @cached_property
    def overlap_bytes(self) -> NDArray[np.int64]:
        """Bytes of each overlap on the wire, in the dtype that the destination holds."""
        nbytes = [overlap.region.elements * ITEMSIZE[self.ends(overlap)[1].tensor.dtype] for overlap in self.overlaps]
        return np.array(nbytes, dtype=np.int64)

    @cached_property
    def _moved(self) -> bytes:
        """Equal for patterns whose overlaps are of the same parts, and have as many bytes: their paths are the same."""
        return b"".join(column.tobytes() for column in (*self.parts.values(), self.overlap_bytes))

    def paths(self, sites: Sites, relay: bool, share: bool) -> Paths:
        """The paths of the overlaps if replicas are at `sites`. Other patterns that move the same have them too."""
        key = self._moved, relay, share
        if key not in sites.paths:
            parts = self.parts["train"], self.parts["gen"]
            sites.paths[key] = Paths(*parts, self.overlap_bytes, sites, relay, share)
        return sites.paths[key]


@dataclass(frozen=True, slots=True)
class TransferGroup:
    """Parameters (layers x experts of one group) that share pattern, stage, source and destination ranks.

    Member `k` is layer `k // experts`, expert `k % experts`. `balance` says how replicas take turns from
    `first_src_replica` on and, where replicas pass on, from `first_dst_replica` on.
    """

    group: int
    pattern: int
    pp_stage: int
    src: int  # index into Plan.rank_grids
    dst: int
    layers: tuple[LayerPlace, ...]  # in the trainer; engines name tensors by the HF number
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

    def tensor_names(self, tensor: LocalTensor, world: World) -> list[str]:
        """The names of the tensors that hold the members on one end, each once; `tensor.name` is their pattern."""
        patterns = [_tensor_name(tensor, world, place, "{expert}") for place in self.layers]
        if "{expert}" not in tensor.name:
            return patterns
        first = self.slot(world, 0)
        slots = range(first, first + self.expert_count)
        parts = [pattern.split("{expert}") for pattern in patterns]  # names may be 30,000: to fill each in takes longer
        return [f"{before}{slot}{behind}" for before, behind in parts for slot in slots]

    def tensor_name(self, tensor: LocalTensor, world: World, member: int) -> str:
        return _tensor_name(tensor, world, self.layers[member // self.expert_count], self.slot(world, member))


def _tensor_name(tensor: LocalTensor, world: World, place: LayerPlace, slot: int | str) -> str:
    vp, layer = (place.vp_stage, place.local) if world == "train" else (0, place.layer)
    return fill(tensor.name, vp=vp, layer=layer, expert=slot)


# What a transfer group moves, and between whom: all but turns.
_what = attrgetter("group", "pattern", "pp_stage", "src", "dst", "layers", "experts")


@dataclass(frozen=True, slots=True)
class AlikeTransfers:
    """Transfer groups with one pattern, the same paths and as many members, whose replicas are on the same rails.

    They differ in ranks, and in which replicas begin. Their hops are [groups, members, legs].
    """

    paths: Paths
    members: int
    rails: Rails | None
    numbers: list[int]  # index of each into Plan.transfer_groups, ascending
    transfer_groups: list[TransferGroup]
    lags: list[int]  # of their waves

    def of(self, transfer_groups: Sequence[TransferGroup]) -> AlikeTransfers:
        """The same ones of these, in which they have other turns."""
        return replace(self, transfer_groups=[transfer_groups[number] for number in self.numbers])

    def only(self, numbers: list[int]) -> AlikeTransfers:
        """Some of them."""
        places = np.searchsorted(self.numbers, numbers).tolist()
        groups, lags = ([column[place] for place in places] for column in (self.transfer_groups, self.lags))
        return replace(self, numbers=numbers, transfer_groups=groups, lags=lags)

    def first_hop(self, only: NDArray[np.bool_] | None = None, to: int | None = None) -> Hop:
        """What leaves the trainer: see `Paths.first_hop`."""
        first_src = np.array([each.first_src_replica for each in self.transfer_groups])[:, None, None]
        return self.paths.first_hop(first_src, self._first_dst, np.arange(self.members), only, to, self.rails)

    def later_hops(self, only: NDArray[np.bool_] | None = None) -> list[Hop]:
        """What replicas pass on to each other: see `Paths.later_hops`."""
        return self.paths.later_hops(self._first_dst, np.arange(self.members), only)

    def waves(self, waves: int) -> NDArray[np.int64]:
        """[groups, members, overlaps]: see `Paths.waves`."""
        return np.stack([self.paths.waves(self.members, waves, lag) for lag in self.lags])

    @property
    def _first_dst(self) -> NDArray[np.int64]:
        return np.array([each.first_dst_replica for each in self.transfer_groups])[:, None, None]


@dataclass(frozen=True, slots=True)
class RankInGroup:
    """A rank's place in a transfer group: the part that it holds, and its number among the part's replicas."""

    index: int  # into Plan.transfer_groups
    transfers: TransferGroup
    pattern: TransferPattern
    world: World
    part: int
    replica: int

    @property
    def partition(self) -> Partition:
        return self.pattern.src if self.world == "train" else self.pattern.dst

    @property
    def overlaps(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.pattern.parts[self.world] == self.part)


@dataclass(frozen=True, slots=True)
class UnplannedGroup:
    """A group that does not travel point to point, and why."""

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


@dataclass(frozen=True, slots=True)
class FrozenLayers:
    """Layers of a group that only an engine's first refit moves: nothing trains them. -1: of a group without layers."""

    group: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Everything both worlds must agree on. Built by `make_plan`, read from a file by `load_plan`."""

    model: str
    train: TrainMesh
    gen: GenMesh
    engine: str
    policy: Policy
    groups: tuple[ParameterGroup, ...]
    patterns: tuple[TransferPattern, ...]
    rank_grids: tuple[NDArray[np.int32], ...] = field(compare=False)  # grid[p, r]: the rank with replica r of part p
    transfer_groups: tuple[TransferGroup, ...]
    misc: tuple[UnplannedGroup, ...] = ()
    excluded: tuple[UnplannedGroup, ...] = ()
    relay: bool = False  # each overlap leaves the trainer once; the replica it lands on passes it on
    # Where ranks live; then each overlap enters an NVLink domain once. None: each may be on a host of its own.
    topology: Topology | None = None
    straight: bool = field(default=False, compare=False)  # nothing is passed on, whatever else the plan says
    pairs: tuple[QuantizedPair, ...] = ()
    casts: tuple[GroupCast, ...] = ()
    frozen: tuple[FrozenLayers, ...] = ()  # of frozen.py
    carriers: tuple[Carried, ...] = ()  # of carriers.py
    digest: str = field(default="", compare=False)
    replica_plans: dict[int, Plan] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # of replicas.py

    def names_of(self, transfers: TransferGroup) -> MemberNames:
        layers = tuple(place.layer for place in transfers.layers)
        pattern = self.groups[transfers.group].name_pattern
        return MemberNames(pattern, layers, transfers.experts[0], transfers.expert_count)

    @cached_property
    def names(self) -> tuple[MemberNames, ...]:
        """Of each transfer group's parameters."""
        return tuple(map(self.names_of, self.transfer_groups))

    def parameter_name(self, transfers: int, member: int) -> str:
        return self.names[transfers].name(member)

    def transfers(
        self,
        parameter: str | None = None,
        *,
        tensor: str | None = None,
        rank: str | None = None,
        element: Sequence[int] | None = None,
    ) -> Iterator[Transfer]:
        """The transfers of one refit, or only those of a parameter, of a rank's tensor, of a rank, or of an element.

        `parameter` is an HF name or a shell pattern of them, `rank` is "train:0" or "gen:3". What a rank carries is the
        transfer of the rank that wants it, and `relayed_by` the carrier. See `transfers_of`.
        """
        from .transfers import transfers_of

        return transfers_of(self, parameter, tensor, rank, element)

    def prove(self) -> Proof:
        """Check every rule that makes a plan sound. The proof is true or false, and lists the violations."""
        from mcore_reshard.planner.proof.prove import prove  # against the arrows, for this method alone

        return prove(self)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, whole or not at all. Raises PlanFileError where it cannot be written."""
        from .plan_file import save_plan

        save_plan(self, path)

    def groups_of(self, world: World, rank: int) -> Iterator[RankInGroup]:
        """The transfer groups that a rank takes part in, in order."""
        places: dict[int, list[list[int]]] = {}  # by rank grid: no [part, replica], or one
        for index, transfers in enumerate(self.transfer_groups):
            grid = transfers.src if world == "train" else transfers.dst
            if grid not in places:
                places[grid] = np.argwhere(self.rank_grids[grid] == rank)[:1].tolist()
            for place in places[grid]:
                yield RankInGroup(index, transfers, self.patterns[transfers.pattern], world, *place)

    def carried_by(self, rank: int) -> Iterator[RankInGroup]:
        """The transfer groups in which a generation rank carries for holders of a part, in order."""
        if rank not in self.carrier_ranks:
            return
        number, parts = int(np.searchsorted(self.carrier_ranks, rank)), dict[int, list[int]]()  # by rank grid
        for index, transfers in enumerate(self.transfer_groups):
            replica = self.dst_replicas(transfers) + number
            if transfers.dst not in parts:
                turns = self._turns_for(transfers.dst)
                parts[transfers.dst] = sorted({part for (part, _), taken in turns.items() if replica in taken})
            for part in parts[transfers.dst]:
                yield RankInGroup(index, transfers, self.patterns[transfers.pattern], "gen", part, replica)

    def carried_name(self, index: int, member: int, overlap: int, wave: int) -> str:
        """The name of the tensor in which a carrier holds one overlap of a member of a transfer group, in its wave."""
        return f"{CARRIED}{wave}:{self.parameter_name(index, member)}:{self.transfer_groups[index].dst}:{overlap}"

    def dst_replicas(self, transfers: TransferGroup) -> int:
        return self.rank_grids[transfers.dst].shape[1]

    @cached_property
    def alike(self) -> tuple[AlikeTransfers, ...]:
        """The transfer groups by pattern, paths, number of members and rails, for what depends on nothing else of them."""
        found: dict[tuple[int, int, int, bytes], AlikeTransfers] = {}
        rails_of: dict[tuple[int, int, int], tuple[Rails | None, bytes]] = {}  # with a key
        for number, transfers in enumerate(self.transfer_groups):
            paths, ends = self.paths(transfers), (transfers.src, transfers.dst, transfers.members)
            if ends not in rails_of:
                rails = self._rails_of(transfers)
                rails_of[ends] = rails, b"" if rails is None else rails.src.tobytes() + rails.dst.tobytes()
            rails, rails_key = rails_of[ends]
            key = transfers.pattern, id(paths), transfers.members, rails_key
            if key not in found:
                found[key] = AlikeTransfers(paths, transfers.members, rails, [], [], [])
            found[key].numbers.append(number)
            found[key].transfer_groups.append(transfers)
            found[key].lags.append(self.wave_lag(transfers))
        return tuple(found.values())

    def wave_lag(self, transfers: TransferGroup) -> int:
        """See `wave_of`. Of transfer groups that share a rank, most have other experts, another stage, or other parameters.

        Scales move with their weight. What is no expert, or all experts in one tensor, is cut into enough overlaps.
        """
        if not transfers.experts[1]:
            return WAVE_LAGS // 2
        group = self._weight_of.get(transfers.group, transfers.group)
        steps = 158 * transfers.experts[0] + 106 * transfers.pp_stage + 187 * group  # of 256
        return steps % 256 * WAVE_LAGS // 256

    @cached_property
    def _weight_of(self) -> dict[int, int]:
        """The group of the weight, of each group of scales."""
        return {pair.scales: pair.weight for pair in self.pairs}

    def ranks_of(
        self, world: World, alike: AlikeTransfers, part: NDArray[np.int64] | int, replica: NDArray[np.int64]
    ) -> NDArray[np.int32]:
        """The ranks of these replicas [groups, members, legs] of parts [legs], or of one part, of alike transfer groups."""
        grids = np.stack(
            [
                self.rank_grids[each.src] if world == "train" else self.receivers(each.dst)
                for each in alike.transfer_groups
            ]
        )
        ranks: NDArray[np.int32] = grids[np.arange(len(grids))[:, None, None], part, replica]
        return ranks

    @cached_property
    def carrier_ranks(self) -> NDArray[np.int32]:
        """The ranks that receive for others, ascending. Of a destination of R replicas they are the replicas from R on."""
        return np.unique([turn for each in self.carriers for turn in each.turns if turn != each.rank]).astype(np.int32)

    def receivers(self, grid: int) -> NDArray[np.int32]:
        """A destination's rank grid with carriers, [parts, replicas and carriers]: who may receive from the trainer."""
        if not self.carriers:
            return self.rank_grids[grid]
        if grid not in self._receivers:
            ranks, carriers = self.rank_grids[grid], self.carrier_ranks
            self._receivers[grid] = np.hstack([ranks, np.broadcast_to(carriers, (len(ranks), len(carriers)))])
        return self._receivers[grid]

    @cached_property
    def _receivers(self) -> dict[int, NDArray[np.int32]]:
        return {}

    @cached_property
    def carried(self) -> NDArray[np.int64]:
        """[waves, generation ranks] the bytes that each carries for others."""
        return carried_of(self)

    @cached_property
    def layer_sets(self) -> tuple[int, ...]:
        """Of each transfer group, the number of its layers among all that are different; to compare them takes longer."""
        known: dict[tuple[LayerPlace, ...], int] = {}
        return tuple(known.setdefault(transfers.layers, len(known)) for transfers in self.transfer_groups)

    @cached_property
    def later_hops(self) -> tuple[HopKind, ...]:
        """The hops among generation ranks, in order."""
        relays = any(alike.paths.relays for alike in self.alike)
        shares = any(alike.paths.shares for alike in self.alike)
        return (*(("relay",) if relays else ()), *(("share",) if shares else ()))

    @cached_property
    def waves(self) -> int:
        """Parts of a relay, each passed on while the next one lands; 1: nothing is passed on, or all at once."""
        if not self.later_hops or self.casts:  # scales are computed, and slots divided, for all that a rank sends
            return 1
        if not self.spans_hosts:
            return _WAVES
        if self.carriers:  # who hold what they carry in memory of its own, wave by wave
            return MOST_WAVES
        passed_on = received = landings = far = turns = 0
        for alike in self.alike:
            paths, members = alike.paths, alike.members * len(alike.transfer_groups)
            nbytes = members * paths.overlap_bytes
            passed_on += int((nbytes * paths.passed_on).sum())
            received += int(nbytes.sum()) * paths.sites.replicas
            by_nic = paths.pulls.links[paths.pulls.row] == NIC
            far_bytes = nbytes[paths.pulled[by_nic]]
            landings += members * len(far_bytes)
            far += int(far_bytes.sum())
            turns += int((far_bytes * paths.landings.sizes[paths.landings.row[by_nic]]).sum())
        of_rank, in_turn = landings // self.gen.world, turns // max(1, far)
        return waves_for(passed_on, received, of_rank, in_turn, far="relay" in self.later_hops)

    @property
    def balanced_waves(self) -> int:
        """The waves in which turns even out what ranks send and receive: all, between hosts; else the refit as a whole."""
        return self.waves if self.spans_hosts else 1

    @cached_property
    def spans_hosts(self) -> bool:
        """Whether ranks are known to be in several NVLink domains."""
        domains = [self.topology.domains(world) for world in ("train", "gen")] if self.topology else []
        return len({domain for of_world in domains for domain in of_world.tolist()}) > 1

    def turned(self, transfer_groups: Sequence[TransferGroup], *, relay: bool) -> Plan:
        """The plan with other turns: these transfer groups of the same patterns and ranks. Where those are stays known."""
        plan = replace(self, transfer_groups=tuple(transfer_groups), relay=relay)
        plan._sites.update(self._sites)
        if relay == self.relay:
            plan._paths.update(self._paths)
            if "alike" in vars(self) and [*map(_what, plan.transfer_groups)] == [*map(_what, self.transfer_groups)]:
                alike = [each.of(plan.transfer_groups) for each in self.alike]
                vars(plan)["alike"] = tuple(alike)  # those that differ in turns alone are alike as before
        return plan

    @cached_property
    def _sites(self) -> dict[tuple[int, int], Sites]:
        return {}

    @cached_property
    def _distinct_sites(self) -> dict[Hashable, Sites]:
        return {}

    @cached_property
    def _rows(self) -> Rows:
        return Rows()

    @cached_property
    def _in_domains(self) -> dict[int, dict[int, InDomains]]:
        """`Sites.in_domains` of each rank grid of engine ranks."""
        return {}

    @cached_property
    def _paths(self) -> dict[tuple[int, int, int], Paths]:
        return {}

    def paths(self, transfers: TransferGroup) -> Paths:
        """How the overlaps of a transfer group reach every replica."""
        key = transfers.pattern, transfers.src, transfers.dst
        if key not in self._paths:
            passes_on = (False, False) if self.straight else (self.relay, self.topology is not None)
            sites = self._sites_of((transfers.src, transfers.dst))
            self._paths[key] = self.patterns[transfers.pattern].paths(sites, *passes_on)
        return self._paths[key]

    def _sites_of(self, ends: tuple[int, int]) -> Sites:
        """Where the ranks of a source's and a destination's rank grid are. Those with one key are one."""
        if ends not in self._sites:
            src, dst = (self.rank_grids[end] for end in ends)
            if self.topology is None:
                sites = Sites.apart(src.shape, dst.shape)
            else:
                (src_gpus, dst_gpus), (src_domains, dst_domains) = self._gpus_and_domains
                domains = src_domains[src], dst_domains[dst]
                on_rail = self._on_rail(src, dst)
                in_domains = self._in_domains.setdefault(ends[1], {})
                turns = self._turns_for(ends[1])
                sites = Sites(
                    src_gpus[src],
                    domains[0],
                    dst_gpus[dst],
                    domains[1],
                    on_rail,
                    turns,
                    len(self.carrier_ranks),
                    self._rows,
                    in_domains,
                )
            self._sites[ends] = self._distinct_sites.setdefault(sites.key, sites)
        return self._sites[ends]

    @cached_property
    def _turns(self) -> dict[int, dict[tuple[int, int], tuple[int, ...]]]:
        return {}

    def _turns_for(self, grid: int) -> dict[tuple[int, int], tuple[int, ...]]:
        """`Sites.turns` of a rank grid of engine ranks. A rank whose carriers hold the part themselves needs none."""
        if grid not in self._turns:
            self._turns[grid] = self._new_turns_for(grid) if self.carriers else {}
        return self._turns[grid]

    def _new_turns_for(self, grid: int) -> dict[tuple[int, int], tuple[int, ...]]:
        found: dict[tuple[int, int], tuple[int, ...]] = {}
        ranks, number = self.rank_grids[grid], {rank: at for at, rank in enumerate(self.carrier_ranks.tolist())}
        carried = {each.rank: each.turns for each in self.carriers}
        for part, holders in enumerate(ranks.tolist()):
            for replica, rank in enumerate(holders):
                turns = carried.get(rank, ())
                if turns and holders.count(rank) == 1 and ({*turns} - {rank}).isdisjoint(holders):
                    found[part, replica] = tuple(
                        replica if turn == rank else len(holders) + number[turn] for turn in turns
                    )
        return found

    def first_hop(
        self,
        transfers: TransferGroup,
        member: NDArray[np.int64],
        only: NDArray[np.bool_] | None = None,
        to: int | None = None,
    ) -> Hop:
        """What leaves the trainer for these members of a transfer group: see `Paths.first_hop`."""
        firsts, rails = (transfers.first_src_replica, transfers.first_dst_replica), self._rails_of(transfers)
        return self.paths(transfers).first_hop(*firsts, member, only, to, rails)

    def _rails_of(self, transfers: TransferGroup) -> Rails | None:
        """The rails of a transfer group's replicas; None where all ranks are in one domain, or may be anywhere."""
        if not self.spans_hosts:
            return None
        src, dst = self._rails
        return Rails(src[self.rank_grids[transfers.src]], dst[self.receivers(transfers.dst)], transfers.members)

    def _on_rail(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> NDArray[np.bool_] | None:
        """`Sites.on_rail` of two rank grids. It is no matter where a domain has one replica of each part."""
        if dst.shape[1] == 1 or not self.spans_hosts:
            return None
        domains, (src_rails, dst_rails) = self._gpus_and_domains[1][1][dst], self._rails
        if (np.diff(np.sort(domains, axis=1), axis=1) > 0).all():
            return None
        has = np.zeros((len(src), 1 + int(max(src_rails.max(), dst_rails.max()))), np.bool_)
        has[np.arange(len(src))[:, None], src_rails[src]] = True
        on_rail: NDArray[np.bool_] = has[:, dst_rails[dst]]
        return None if on_rail.all() else on_rail

    @cached_property
    def _rails(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        assert self.topology is not None
        return self.topology.rails("train"), self.topology.rails("gen")

    @cached_property
    def _gpus_and_domains(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        assert self.topology is not None
        return [
            (self.topology.gpus("train"), self.topology.gpus("gen")),
            (self.topology.domains("train"), self.topology.domains("gen")),
        ]

    @cached_property
    def misc_names(self) -> tuple[str, ...]:
        return tuple(name for unplanned in self.misc for name in self.groups[unplanned.group].names())

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
        """The pattern of the scales, by the transfer group of a weight in a pair. The scales have a transfer group of their own."""
        scales_of = {pair.weight: pair.scales for pair in self.pairs}
        places = [(each.pp_stage, each.src, each.dst, each.layers, each.experts) for each in self.transfer_groups]
        placed = [*zip(self.transfer_groups, places, strict=True)]
        patterns = {(transfers.group, place): transfers.pattern for transfers, place in placed}
        keys = [(scales_of.get(transfers.group), place) for transfers, place in placed]
        return {index: patterns[key] for index, key in enumerate(keys) if key in patterns}

    @cached_property
    def wire_bytes(self) -> dict[str, int]:
        """Bytes that all generation ranks receive in one refit, by dtype on the wire, the most first."""
        carried: Counter[str] = Counter()
        for transfers in self.transfer_groups:
            pattern, copies = self.patterns[transfers.pattern], transfers.members * self.dst_replicas(transfers)
            for overlap, nbytes in zip(pattern.overlaps, pattern.overlap_bytes.tolist(), strict=True):
                carried[pattern.ends(overlap)[1].tensor.dtype] += nbytes * copies
        return dict(carried.most_common())

    @cached_property
    def from_trainer(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Bytes that every training rank sends in one refit, and every generation rank gets of them, by link."""
        return from_trainer_of(self)

    @cached_property
    def loads(self) -> Loads:
        """Bytes that every rank sends and receives in one refit, by link."""
        return loads_of(self)

    @property
    def send_bytes(self) -> NDArray[np.int64]:
        """Bytes that each training rank sends in one refit."""
        return np.asarray(self.from_trainer[0].sum(axis=0), np.int64)

    @cached_property
    def recv_bytes(self) -> NDArray[np.int64]:
        """Bytes that each generation rank receives in one refit, whoever sends them."""
        received = np.zeros(self.gen.world, np.int64)
        for alike in self.alike:
            nbytes = np.zeros((len(alike.paths.sites.dst_gpus), 1), np.int64)
            np.add.at(nbytes, alike.paths.dst_parts, alike.members * alike.paths.overlap_bytes[:, None])
            for transfers in alike.transfer_groups:
                received[self.rank_grids[transfers.dst]] += nbytes
        return received

    @property
    def relay_bytes(self) -> NDArray[np.int64]:
        """Bytes that each generation rank passes on to other replicas in one refit."""
        return np.asarray(self.loads.passed_on.sum(axis=0), np.int64)

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
