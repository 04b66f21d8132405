"""Expand a plan into one rank's schedule, from the plan and the rank number alone.

It computes with columns, transfer group by transfer group. A generation rank of DeepSeek-V3 has 45,000 transfers; its
schedule takes a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.layout.geometry import LocalTensor, Piece, Region, ravel, row_major_strides
from mcore_reshard.planner.layout.mesh import replica_ranks

from .frozen import without_frozen
from .held import Held, NamedCast, held_pieces
from .paths import HopKind
from .plan import AlikeTransfers, Plan, RankInGroup, TransferPattern
from .schedule import (
    Cast,
    Chain,
    OtherEnd,
    OtherEndView,
    Relay,
    Schedule,
    StageSchedule,
    StridedBox,
    TransferTable,
    View,
    World,
)

_WIDE = {"offset", "nbytes"}
_NO_ROWS = {column.name: np.zeros(0, np.int64) for column in fields(TransferTable)}
_Columns = dict[str, NDArray[np.int64]]
_End = Literal["src", "dst"]
_Expanded = tuple[_Columns, dict[LocalTensor, int], dict[StridedBox, int]]


def schedule_of(plan: Plan, world: World, rank: int) -> Schedule:
    """The transfers of a rank between trainer and engine. Raises IndexError for a rank outside of its mesh."""
    return RankView(plan, world, rank).schedule()


def relays_of(plan: Plan, gen_rank: int) -> tuple[Relay, ...]:
    """The later hops of a generation rank, in order; () where nothing is passed on. Raises IndexError as `schedule_of`."""
    return RankView(plan, "gen", gen_rank).relays()


def has_chain(plan: Plan) -> bool:
    """Whether replicas can be a chain: in one domain of NVLink, they pass on in one hop, and all hold the same parts."""
    step = replica_ranks(plan.gen)
    if len(plan.later_hops) != 1 or step == plan.gen.world or plan.spans_hosts:
        return False
    grids = [plan.rank_grids[number] for number in {transfers.dst for transfers in plan.transfer_groups}]
    parts = [{*part} for grid in grids for part in grid.tolist()]
    return all(other in part for part in parts for rank in part for other in range(rank % step, plan.gen.world, step))


@dataclass(frozen=True, slots=True)
class _Places:
    """A rank's places in alike transfer groups, where it holds one part, as one replica."""

    alike: AlikeTransfers  # these transfer groups alone
    pattern: TransferPattern
    part: int
    replica: int
    dst_replicas: int  # from which number on they are carriers
    is_own: NDArray[np.bool_]  # [overlaps]: which are of the part

    @property
    def is_carrier(self) -> bool:
        """Of a place of a generation rank: whether it does not hold the part."""
        return self.replica >= self.dst_replicas

    @classmethod
    def of(cls, alike: AlikeTransfers, places: Sequence[RankInGroup]) -> _Places:
        """Of some of the transfer groups that are alike."""
        own, one = alike.only([place.index for place in places]), places[0]
        is_own = one.pattern.parts[one.world] == one.part
        return cls(own, one.pattern, one.part, one.replica, alike.paths.sites.replicas, is_own)


@dataclass(frozen=True)
class _Legs:
    """Legs in alike transfer groups that a rank has an end of, and on which end they are looked at."""

    places: _Places
    overlap: NDArray[np.int64]  # [legs]
    chosen: NDArray[np.bool_]  # [groups, members, legs]: which are the rank's
    peers: NDArray[np.int32]  # [groups, members, legs]
    piece: _End
    order: _End  # whose memory order the extents have
    # [groups, members, legs]: where a carrier holds the overlap, as a tensor of its own
    carried: NDArray[np.bool_] | bool = False

    @cached_property
    def overlaps(self) -> NDArray[np.int64]:
        """Each once, ascending."""
        return np.unique(self.overlap)

    def by_holder(self) -> list[_Legs]:
        """Those that holders have an end of, and those that carriers have; none that are not chosen."""
        carried = np.broadcast_to(self.carried, self.chosen.shape)
        if not carried.any():
            return [replace(self, carried=False)]
        ends = (False, self.chosen & ~carried), (True, self.chosen & carried)
        return [replace(self, chosen=chosen, carried=of_carriers) for of_carriers, chosen in ends if chosen.any()]

    @cached_property
    def pieces(self) -> list[Piece]:
        """Of each overlap."""
        pattern = self.places.pattern
        if self.carried is True:
            return [pattern.carried_piece(pattern.overlaps[index]) for index in self.overlaps]
        return [pattern.ends(pattern.overlaps[index])[self.piece == "dst"] for index in self.overlaps]

    @cached_property
    def tensors(self) -> list[LocalTensor]:
        """The tensors of these pieces, each once."""
        return [*dict.fromkeys(piece.tensor for piece in self.pieces)]


_LegsOf = Callable[..., _Legs | None]


@dataclass(frozen=True, slots=True)
class RankView(View):
    """One rank of a plan, or of one wave of its relay. Computes everything on demand."""

    plan: Plan
    world: World
    rank: int
    wave: int | None = None  # None: all of them
    rows: tuple[NDArray[np.int64], ...] | None = None  # of each stage; None: all of them
    gen_seats: tuple[int, ...] = ()  # as in Schedule
    layouts: dict[int, tuple[Plan, Held]] = field(default_factory=dict, repr=False, compare=False)  # waves share it
    expanded: dict[tuple[Any, ...], _Expanded] = field(default_factory=dict, repr=False, compare=False)  # and this
    # Both are numbered in the order of first use, anew in every copy that `replace` makes.
    tensors: dict[LocalTensor, int] = field(default_factory=dict, init=False)
    strided_boxes: dict[StridedBox, int] = field(default_factory=dict, init=False)
    # Those of the members of transfer groups, by what their names depend on: many groups share them.
    tensor_ids: dict[tuple[Any, ...], NDArray[np.int64]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        size = self.plan.train.world if self.world == "train" else self.plan.gen.world
        if not 0 <= self.rank < size:
            raise IndexError(f"{self.world} rank {self.rank} is outside of the {size} ranks that the plan has")

    def schedule(self) -> Schedule:
        view, is_sender = replace(self), self.world == "train"
        casts = view._casts() if is_sender else ()
        computed = tuple(sorted(cast.scales for cast in casts if cast.scales is not None))
        schedule = view._schedule(is_sender, RankView._sends if is_sender else RankView._receives)
        later = None
        if self.plan.frozen and self.wave is None:
            later = replace(self, plan=without_frozen(self.plan)).schedule()
        return replace(
            schedule, casts=casts, computed=computed, later_hops=self.plan.later_hops, view=self, later=later
        )

    def with_rows(self, masks: Sequence[NDArray[np.bool_] | NDArray[np.int64]]) -> RankView:
        if self.rows is None:
            numbers = [np.flatnonzero(mask) if mask.dtype == bool else mask.astype(np.int64) for mask in masks]
        else:
            numbers = [rows[mask] for rows, mask in zip(self.rows, masks, strict=True)]
        return replace(self, rows=tuple(numbers))

    def other_end(self) -> OtherEnd:
        if self.rows is not None and not any(map(len, self.rows)):
            none = (_table(_NO_ROWS),) * self.plan.train.pp
            return OtherEnd(self.rank, self.plan.digest, (), (), none, self._computed_scales())
        view = replace(self)
        legs_of: _LegsOf = RankView._sends if self.world == "train" else RankView._receives
        tables = tuple(view._tables(legs_of, "dst" if self.world == "train" else "src").values())
        if self.rows is not None:
            tables = tuple(table.rows(rows) for table, rows in zip(tables, self.rows, strict=True))
        tensors, boxes = tuple(view.tensors), tuple(view.strided_boxes)
        return OtherEnd(self.rank, self.plan.digest, tensors, boxes, tables, self._computed_scales())

    def _computed_scales(self) -> frozenset[int]:
        """The transfer groups of scales of weights that are cast."""
        cast = {cast.group for cast in self.plan.casts}
        scales = {pair.scales for pair in self.plan.pairs if pair.weight in cast}
        return frozenset(n for n, transfers in enumerate(self.plan.transfer_groups) if transfers.group in scales)

    def relays(self) -> tuple[Relay, ...]:
        return tuple(self._relay(kind, hop) for hop, kind in enumerate(self.plan.later_hops, 1))

    def _relay(self, kind: HopKind, hop: int) -> Relay:
        sending, receiving = replace(self), replace(self)
        sends = replace(sending._schedule(True, RankView._passes_on, kind, True), world="train")
        receives = receiving._schedule(False, RankView._passes_on, kind, False)
        return Relay(*(self._among_replicas(end, hop) for end in (sends, receives)))

    def _among_replicas(self, end: Schedule, hop: int) -> Schedule:
        hops, seats = self.plan.later_hops, end.gen_seats
        # Replicas keep the same tensors: this is both ends, unless some carry for others.
        other = OtherEnd(self.rank, self.plan.digest, end.tensors, end.strided_boxes, tuple(end.tables))
        if self.plan.carriers:
            there = replace(self)
            tables = there._tables(RankView._passes_on, hops[hop - 1], end.world == "train", True)
            tensors, boxes = tuple(there.tensors), tuple(there.strided_boxes)
            other = OtherEnd(self.rank, self.plan.digest, tensors, boxes, tuple(tables.values()))
        view = OtherEndView(other, of_rank=self)
        return replace(
            end, later_hops=hops, hop=hop, train_ranks=end.gen_ranks, padding=(), relay_seats=seats, view=view
        )

    def held(self) -> Held:
        if id(self.plan) not in self.layouts:
            self.layouts[id(self.plan)] = self.plan, self._held()
        return self.layouts[id(self.plan)][1]

    def _held(self) -> Held:
        view = replace(self)
        casts = view._casts() if self.world == "train" else ()
        tensors = [local.name for local in view.tensors]
        named = {
            tensors[cast.tensor]: NamedCast(cast.to, None if cast.scales is None else tensors[cast.scales], cast.block)
            for cast in casts
        }
        names = {number: group.name_pattern for number, group in enumerate(self.plan.groups)}
        return Held(tuple(held_pieces(self.plan, self.world, self.rank)), names, named)

    def unrelayed(self) -> Schedule:
        plan = replace(self.plan, straight=True, digest=self.plan.digest)
        return RankView(plan, self.world, self.rank, gen_seats=self.gen_seats).schedule()

    def chain(self) -> Chain | None:
        if not has_chain(self.plan):
            return None
        step, pulls = replica_ranks(self.plan.gen), self.unrelayed()
        if self.world == "train":
            return Chain(pulls.with_peers(range(step)), None)
        before, behind = self.rank - step, self.rank + step
        sends = replace(self)._schedule(True, RankView._whole, behind if behind < self.plan.gen.world else None)
        receives = replace(self)._schedule(False, RankView._whole, before if before >= 0 else None)
        passes = Relay(self._among_replicas(replace(sends, world="train"), 1), self._among_replicas(receives, 1))
        return Chain(pulls if before < 0 else pulls.with_peers(()), passes)

    def waves(self) -> tuple[Schedule, ...]:
        waves = self.plan.waves if self.plan.waves > 1 else 0
        expanded: dict[tuple[Any, ...], _Expanded] = {}  # of this plan alone
        return tuple(replace(self, wave=wave, expanded=expanded).schedule() for wave in range(waves))

    def _schedule(self, is_sender: bool, legs_of: _LegsOf, *args: Any) -> Schedule:
        """Of `legs_of(view, places, *args)` of the places of the rank."""
        plan = self.plan
        tables, none = self._tables(legs_of, *args), _table(_NO_ROWS)
        padding = () if is_sender or self.wave is not None else tuple(dict.fromkeys(self._padding()))
        tensors = tuple(self.tensors)  # after the padding: nothing else may lie in some of them
        if self.wave is not None:
            used = np.unique(np.concatenate([table.tensor for table in tables.values()]))
            tensors = tuple(tensors[tensor] for tensor in used.tolist())
            for stage, table in tables.items():
                tables[stage] = replace(table, tensor=np.searchsorted(used, table.tensor).astype(np.int32))
        both = ((stage, (table, none) if is_sender else (none, table)) for stage, table in tables.items())
        return Schedule(
            world=self.world,
            rank=self.rank,
            digest=plan.digest,
            train_ranks=plan.train.world,
            gen_ranks=plan.gen.world,
            tensors=tensors,
            strided_boxes=tuple(self.strided_boxes),
            stages=tuple(StageSchedule(stage, *columns) for stage, columns in both),
            padding=padding,
            misc=plan.misc_names,
            names={place.index: plan.names[place.index] for place in self._ends()},
            pairs=tuple((plan.groups[pair.weight], plan.groups[pair.scales]) for pair in plan.pairs),
            gen_seats=self.gen_seats,
        )

    def _tables(self, legs_of: _LegsOf, *args: Any) -> dict[int, TransferTable]:
        columns = self._of_all_waves(legs_of, *args)
        if self.wave is not None:
            columns = _chosen(columns, columns["wave"] == self.wave)
        stages = np.array([transfers.pp_stage for transfers in self.plan.transfer_groups], np.int64)
        stage = stages[columns["transfer_group"]]
        return {number: _table(_chosen(columns, stage == number)) for number in range(self.plan.train.pp)}

    def _of_all_waves(self, legs_of: _LegsOf, *args: Any) -> _Columns:
        """What the rank moves, by transfer group; it is worked out once for all waves."""
        if self.wave is None:
            return self._columns(legs_of, *args)
        key = legs_of, *args
        if key not in self.expanded:
            self.expanded[key] = self._columns(legs_of, *args), self.tensors, self.strided_boxes
        columns, tensors, strided_boxes = self.expanded[key]
        self.tensors.update(tensors)
        self.strided_boxes.update(strided_boxes)
        return columns

    def _sends(self, places: _Places, piece: _End = "src") -> _Legs:
        """Sends of a training rank to generation ranks, as they lie here or ("dst") in their tensors."""
        hop = places.alike.first_hop(places.is_own)
        peers = self.plan.ranks_of("gen", places.alike, places.pattern.parts["gen"][hop.overlap], hop.dst)
        carried = hop.dst >= places.dst_replicas if piece == "dst" else False
        return _Legs(places, hop.overlap, hop.src == places.replica, peers, piece, order="src", carried=carried)

    def _receives(self, places: _Places, piece: _End = "dst") -> _Legs:
        """Receives of a generation rank from training ranks, as they lie here or ("src") in their tensors."""
        hop = places.alike.first_hop(places.is_own, to=places.replica)
        peers = self.plan.ranks_of("train", places.alike, places.pattern.parts["train"][hop.overlap], hop.src)
        carried = piece == "dst" and places.is_carrier
        return _Legs(places, hop.overlap, hop.dst == places.replica, peers, piece, order="src", carried=carried)

    def _passes_on(self, places: _Places, kind: HopKind, sends: bool, there: bool = False) -> _Legs | None:
        """What this generation rank sends to, or receives from, other replicas of its part in a later hop.

        As it lies in its tensors, or `there`: in those of the others.
        """
        for hop in places.alike.later_hops(places.is_own):
            if hop.kind == kind:
                own, other = (hop.src, hop.dst) if sends else (hop.dst, hop.src)
                chosen = hop.runs & (own == places.replica)
                peers = self.plan.ranks_of("gen", places.alike, places.part, other)
                carried = (other if there else own) >= places.dst_replicas
                return _Legs(places, hop.overlap, chosen, peers, piece="dst", order="dst", carried=carried)
        return None

    def _whole(self, places: _Places, replica: int | None) -> _Legs | None:
        """All of the rank's part, to or from the rank of another replica that holds the same; None: of no rank."""
        if replica is None:
            return None
        overlap = np.flatnonzero(places.is_own)
        peers = np.full((len(places.alike.numbers), places.alike.members, len(overlap)), replica, np.int32)
        return _Legs(places, overlap, np.ones(peers.shape, bool), peers, piece="dst", order="dst")

    def _ends(self) -> Iterator[RankInGroup]:
        """The transfer groups that the rank has an end of, as a holder and then as a carrier."""
        return chain(
            self.plan.groups_of(self.world, self.rank), self.plan.carried_by(self.rank) if self.world == "gen" else ()
        )

    def _places(self) -> list[_Places]:
        """Its places in all transfer groups, by the first one."""
        alike_of = {number: alike for alike in self.plan.alike for number in alike.numbers}
        found: dict[tuple[int, int, int], list[RankInGroup]] = {}
        for place in self._ends():
            found.setdefault((id(alike_of[place.index]), place.part, place.replica), []).append(place)
        return [_Places.of(alike_of[together[0].index], together) for together in found.values()]

    def _columns(self, legs_of: _LegsOf, *args: Any) -> _Columns:
        """One row for each transfer of the rank, by transfer group, member and overlap."""
        found = [legs for places in self._places() if (legs := legs_of(self, places, *args)) and len(legs.overlap)]
        known = [part for legs in found for part in legs.by_holder()]
        of_number = sorted((number, part) for part, legs in enumerate(known) for number in legs.places.alike.numbers)
        tensors = {(number, part): self._tensors_of(number, known[part]) for number, part in of_number}
        none = {**_NO_ROWS, "overlap": np.zeros(0, np.int64)}
        parts = [
            none,
            *(
                self._rows(legs, [tensors[number, part] for number in legs.places.alike.numbers])
                for part, legs in enumerate(known)
            ),
        ]
        columns = [np.concatenate([part[name] for part in parts]) for name in ("overlap", "member", "transfer_group")]
        order = np.lexsort(columns) if self.plan.carriers else np.argsort(columns[-1], kind="stable")
        # Column by column, as there may be millions of rows.
        return {name: np.concatenate([part.pop(name) for part in parts])[order] for name in _NO_ROWS}

    def _tensors_of(self, number: int, legs: _Legs) -> list[NDArray[np.int64]]:
        """[tensors of the legs, members]: the tensors of the members of a transfer group."""
        if legs.carried is True:
            return []
        return [self._tensor_ids(number, tensor, legs.piece == "src") for tensor in legs.tensors]

    def _carried_ids(self, pattern: TransferPattern, *places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tensors in which a carrier holds overlaps [rows]. `places` are transfer groups, members, overlaps, waves."""
        ids: list[int] = []
        for index, member, overlap, wave in zip(*(column.tolist() for column in places), strict=True):
            name = self.plan.carried_name(index, member, overlap, wave)
            tensor = pattern.carried_piece(pattern.overlaps[overlap], name).tensor
            ids.append(self.tensors.setdefault(tensor, len(self.tensors)))
        return np.array(ids, np.int64)

    def _rows(self, legs: _Legs, tensors: Sequence[Sequence[NDArray[np.int64]]]) -> _Columns:
        """One row for each chosen leg: the peer, and where it lies; `tensors` are those of each transfer group."""
        alike, pattern, source = legs.places.alike, legs.places.pattern, legs.piece == "src"
        of_group = [(each.src_slot if source else each.dst_slot, each.expert_count) for each in alike.transfer_groups]
        offset, slot_stride, tensor, box = np.zeros((4, len(legs.overlaps)), np.int64)
        for place, (index, local) in enumerate(zip(legs.overlaps, legs.pieces, strict=True)):
            overlap = pattern.overlaps[index]
            offset[place] = local.offset(overlap.region.start)
            slot_stride[place] = row_major_strides(local.view)[local.slot_dim] if local.slot_dim >= 0 else 0
            tensor[place] = legs.tensors.index(local.tensor)
            extents = wire_box(overlap.region, pattern.ends(overlap)[legs.order == "dst"], local)
            box[place] = self.strided_boxes.setdefault(extents, len(self.strided_boxes))
        group, member, leg = np.nonzero(legs.chosen)
        first_slot, experts = np.array(of_group, np.int64)[group].T
        column = np.searchsorted(legs.overlaps, legs.overlap)[leg]
        wave = np.zeros(len(leg), np.int64)
        if self.plan.waves > 1:
            wave = alike.waves(self.plan.waves)[group, member, legs.overlap[leg]]
        transfer_group = np.array(alike.numbers, np.int64)[group]
        if legs.carried is True:
            tensor_ids = self._carried_ids(pattern, transfer_group, member, legs.overlap[leg], wave)
        else:
            tensor_ids = np.array(tensors)[group, tensor[column], member]
        return {
            "peer": legs.peers[legs.chosen].astype(np.int64),
            "tensor": tensor_ids,
            "strided_box": box[column],
            "offset": offset[column] + (first_slot + member % experts) * slot_stride[column],
            "nbytes": pattern.overlap_bytes[legs.overlap[leg]],
            "transfer_group": transfer_group,
            "member": member,
            "wave": wave,
            "overlap": legs.overlap[leg],
        }

    def _casts(self) -> tuple[Cast, ...]:
        """The casts of a training rank: one entry a tensor, also if several parameters are fused in it."""
        dtypes = {cast.group: cast.dst for cast in self.plan.casts}
        blocks = {pair.weight: pair.block for pair in self.plan.pairs}
        casts: dict[int, Cast] = {}
        for place in self.plan.groups_of(self.world, self.rank) if dtypes else ():
            if place.transfers.group not in dtypes:
                continue
            scales = self.plan.scale_patterns.get(place.index)
            block = blocks.get(place.transfers.group, (0, 0))
            for number, piece in enumerate(place.partition.pieces[place.part]):
                tensors = self._tensor_ids(place.index, piece.tensor, source=True).tolist()
                scale_tensors: list[int | None] = [None] * len(tensors)
                if scales is not None:
                    scale_piece = self.plan.patterns[scales].src.pieces[place.part][number]
                    scale_tensors = self._tensor_ids(place.index, scale_piece.tensor, source=True).tolist()
                for tensor, scale_tensor in zip(tensors, scale_tensors, strict=True):
                    casts[tensor] = Cast(tensor, dtypes[place.transfers.group], scale_tensor, block)
        return tuple(casts[tensor] for tensor in sorted(casts))

    def _tensor_ids(self, number: int, pattern: LocalTensor, source: bool) -> NDArray[np.int64]:
        """[members] of a transfer group: the tensor of each."""
        transfers = self.plan.transfer_groups[number]
        first_slot = transfers.slot("train" if source else "gen", 0) if "{expert}" in pattern.name else 0
        key = pattern, source, self.plan.layer_sets[number], first_slot, transfers.expert_count
        if key not in self.tensor_ids:
            names = transfers.tensor_names(pattern, "train" if source else "gen")
            tensors = [LocalTensor(name, pattern.shape, pattern.dtype) for name in names]
            ids = [self.tensors.setdefault(tensor, len(self.tensors)) for tensor in tensors]
            self.tensor_ids[key] = np.repeat(np.array(ids, dtype=np.int64), transfers.members // len(names))
        return self.tensor_ids[key]

    def _padding(self) -> Iterator[tuple[int, int, StridedBox]]:
        """(tensor, offset, strided box) of elements that no parameter fills, maybe several times."""
        for place in self.plan.groups_of(self.world, self.rank):
            for padding in place.partition.padding_of(place.part):
                strides = row_major_strides(padding.tensor.shape)
                offset = ravel(padding.box.start, padding.tensor.shape)
                for tensor in dict.fromkeys(self._tensor_ids(place.index, padding.tensor, source=False).tolist()):
                    yield tensor, offset, StridedBox(padding.box.extents, strides)


def wire_box(region: Region, ordering: Piece, local: Piece) -> StridedBox:
    """Extents and strides in wire order: the sender's memory order, so that it reads forwards. Unit dims are dropped."""
    order = sorted(range(len(region.start)), key=lambda dim: -ordering.strides[dim])
    kept = [dim for dim in order if region.extents[dim] != 1]
    return StridedBox(tuple(region.extents[dim] for dim in kept), tuple(local.strides[dim] for dim in kept))


def _chosen(columns: _Columns, rows: NDArray[np.bool_] | NDArray[np.int64]) -> _Columns:
    return {name: column[rows] for name, column in columns.items()}


def _table(columns: _Columns) -> TransferTable:
    typed: dict[str, NDArray[Any]] = {
        name: column.astype(np.int64 if name in _WIDE else np.int32) for name, column in columns.items()
    }
    return TransferTable(**typed)
