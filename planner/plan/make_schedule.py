"""Expand a plan into one rank's schedule, from the plan and the rank number alone.

It computes with columns, transfer group by transfer group. A generation rank of DeepSeek-V3 has 45,000 transfers; its
schedule takes a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.layout.geometry import LocalTensor, Piece, Region, ravel, row_major_strides
from mcore_reshard.planner.layout.mesh import replica_ranks

from .frozen import without_frozen
from .held import Held, NamedCast, held_pieces
from .paths import Hop, HopKind
from .plan import Plan, RankInGroup, TransferGroup
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
_Columns = dict[str, NDArray[np.int64]]
_End = Literal["src", "dst"]
_Expanded = tuple[list[tuple[RankInGroup, _Columns]], dict[LocalTensor, int], dict[StridedBox, int]]
_NO_LEGS = np.zeros(0, np.int64), np.zeros((0, 0), np.bool_), np.zeros((0, 0), np.int32)  # overlap, chosen, peers


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
    # The numbers of tensors by (shape, dtype) and name: some thousands are looked up for each hundred that is new.
    numbers: dict[tuple[Any, ...], dict[str, int]] = field(default_factory=dict, init=False, repr=False, compare=False)

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
        view = replace(self)
        rows_of, piece = (RankView._sends, "dst") if self.world == "train" else (RankView._receives, "src")
        tables = tuple(view._tables(rows_of, piece).values())
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
        # Replicas keep the same tensors: this is both ends.
        other = OtherEnd(self.rank, self.plan.digest, end.tensors, end.strided_boxes, tuple(end.tables))
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

    def _schedule(self, is_sender: bool, rows_of: Callable[..., _Columns], *args: Any) -> Schedule:
        """Of `rows_of(view, place, *args)` of the places of the rank."""
        plan = self.plan
        tables, none = self._tables(rows_of, *args), _table([])
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
            names={place.index: plan.names_of(place.transfers) for place in plan.groups_of(self.world, self.rank)},
            pairs=tuple((plan.groups[pair.weight], plan.groups[pair.scales]) for pair in plan.pairs),
            gen_seats=self.gen_seats,
        )

    def _tables(self, rows_of: Callable[..., _Columns], *args: Any) -> dict[int, TransferTable]:
        rows: dict[int, list[_Columns]] = {stage: [] for stage in range(self.plan.train.pp)}
        for place, columns in self._of_all_waves(rows_of, *args):
            if self.wave is not None:
                in_wave = columns["wave"] == self.wave
                columns = {name: column[in_wave] for name, column in columns.items()}
            if len(columns["peer"]):
                columns["transfer_group"] = np.full_like(columns["peer"], place.index)
                rows[place.transfers.pp_stage].append(columns)
        return {stage: _table(parts) for stage, parts in rows.items()}

    def _of_all_waves(self, rows_of: Callable[..., _Columns], *args: Any) -> Iterable[tuple[RankInGroup, _Columns]]:
        """What the rank moves in each transfer group; it is worked out once for all waves."""
        places = self.plan.groups_of(self.world, self.rank)
        if self.wave is None:
            return ((place, rows_of(self, place, *args)) for place in places)
        key = rows_of, *args
        if key not in self.expanded:
            columns = [(place, rows_of(self, place, *args)) for place in places]
            self.expanded[key] = columns, self.tensors, self.strided_boxes
        columns, tensors, strided_boxes = self.expanded[key]
        self.tensors.update(tensors)
        self.strided_boxes.update(strided_boxes)
        return columns

    def _sends(self, place: RankInGroup, piece: _End = "src") -> _Columns:
        """Sends of a training rank to generation ranks, as they lie here or ("dst") in their tensors."""
        plan, transfers = self.plan, place.transfers
        hop = self._first_hop(place)
        peers = plan.rank_grids[transfers.dst][place.pattern.parts["gen"][hop.overlap], hop.dst]
        return self._columns(place, hop.overlap, hop.src == place.replica, peers, piece, order="src")

    def _receives(self, place: RankInGroup, piece: _End = "dst") -> _Columns:
        """Receives of a generation rank from training ranks, as they lie here or ("src") in their tensors."""
        hop = self._first_hop(place, to=place.replica)
        peers = self.plan.rank_grids[place.transfers.src][place.pattern.parts["train"][hop.overlap], hop.src]
        return self._columns(place, hop.overlap, hop.dst == place.replica, peers, piece, order="src")

    def _passes_on(self, place: RankInGroup, kind: HopKind, sends: bool) -> _Columns:
        """What this generation rank sends to, or receives from, other replicas of its part in a later hop."""
        transfers, replicas = place.transfers, self.plan.rank_grids[place.transfers.dst][place.part]
        hops = self.plan.paths(transfers).later_hops(
            transfers.first_dst_replica, np.arange(transfers.members), self._only(place)
        )
        for hop in hops:
            if hop.kind == kind:
                own, other = (hop.src, hop.dst) if sends else (hop.dst, hop.src)
                chosen = hop.runs & (own == place.replica)
                return self._columns(place, hop.overlap, chosen, replicas[other], piece="dst", order="dst")
        return self._columns(place, *_NO_LEGS, piece="dst", order="dst")

    def _whole(self, place: RankInGroup, replica: int | None) -> _Columns:
        """All of the rank's part, to or from the rank of another replica that holds the same; None: of no rank."""
        if replica is None:
            return self._columns(place, *_NO_LEGS, piece="dst", order="dst")
        overlap = np.flatnonzero(self._only(place))
        peers = np.full((place.transfers.members, len(overlap)), replica, np.int32)
        return self._columns(place, overlap, np.ones(peers.shape, bool), peers, piece="dst", order="dst")

    def _first_hop(self, place: RankInGroup, to: int | None = None) -> Hop:
        members = np.arange(place.transfers.members)
        return self.plan.first_hop(place.transfers, members, self._only(place), to)

    def _only(self, place: RankInGroup) -> NDArray[np.bool_]:
        return place.pattern.parts[self.world] == place.part

    def _columns(
        self,
        place: RankInGroup,
        overlap: NDArray[np.int64],
        chosen: NDArray[np.bool_],
        peers: NDArray[np.int32],
        piece: _End,
        order: _End,
    ) -> _Columns:
        """One row for each `chosen` [members, legs] of the rank's part: the peer, and where it lies on one end.

        `overlap` [legs] is that of each leg, `peers` [members, legs]; `order` says whose memory order the extents have.
        """
        transfers, pattern, source = place.transfers, place.pattern, piece == "src"
        overlaps, column_of = np.unique(overlap, return_inverse=True)
        slot0 = transfers.src_slot if source else transfers.dst_slot
        slots = slot0 + np.arange(transfers.members) % transfers.expert_count
        tensor, offset = np.zeros((2, transfers.members, len(overlaps)), dtype=np.int64)
        strided_box = np.zeros(len(overlaps), dtype=np.int64)
        for column, index in enumerate(overlaps):
            overlap_here = pattern.overlaps[index]
            src, dst = pattern.ends(overlap_here)
            local = src if source else dst
            tensor[:, column] = self._tensor_ids(transfers, local.tensor, source)
            slot_stride = row_major_strides(local.view)[local.slot_dim] if local.slot_dim >= 0 else 0
            offset[:, column] = local.offset(overlap_here.region.start) + slots * slot_stride
            box = wire_box(overlap_here.region, src if order == "src" else dst, local)
            strided_box[column] = self.strided_boxes.setdefault(box, len(self.strided_boxes))
        member_of, leg_of = np.nonzero(chosen)
        overlap_of, wave = column_of[leg_of], np.zeros(len(leg_of), np.int64)
        if self.plan.waves > 1:
            waves = self.plan.paths(transfers).waves(transfers.members, self.plan.waves)
            wave = waves[member_of, overlap[leg_of]]
        return {
            "peer": peers[chosen].astype(np.int64),
            "tensor": tensor[member_of, overlap_of],
            "strided_box": strided_box[overlap_of],
            "offset": offset[member_of, overlap_of],
            "nbytes": pattern.overlap_bytes[overlaps][overlap_of],
            "member": member_of,
            "wave": wave,
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
                tensors = self._tensor_ids(place.transfers, piece.tensor, source=True).tolist()
                scale_tensors: list[int | None] = [None] * len(tensors)
                if scales is not None:
                    scale_piece = self.plan.patterns[scales].src.pieces[place.part][number]
                    scale_tensors = self._tensor_ids(place.transfers, scale_piece.tensor, source=True).tolist()
                for tensor, scale_tensor in zip(tensors, scale_tensors, strict=True):
                    casts[tensor] = Cast(tensor, dtypes[place.transfers.group], scale_tensor, block)
        return tuple(casts[tensor] for tensor in sorted(casts))

    def _tensor_ids(self, transfers: TransferGroup, pattern: LocalTensor, source: bool) -> NDArray[np.int64]:
        names = transfers.tensor_names(pattern, "train" if source else "gen")
        known = self.numbers.setdefault((pattern.shape, pattern.dtype), {})
        for name in names:
            if name not in known:
                tensor = LocalTensor(name, pattern.shape, pattern.dtype)
                known[name] = self.tensors.setdefault(tensor, len(self.tensors))
        ids = [known[name] for name in names]
        return np.repeat(np.array(ids, dtype=np.int64), transfers.members // len(names))

    def _padding(self) -> Iterator[tuple[int, int, StridedBox]]:
        """(tensor, offset, strided box) of elements that no parameter fills, maybe several times."""
        for place in self.plan.groups_of(self.world, self.rank):
            for padding in place.partition.padding_of(place.part):
                strides = row_major_strides(padding.tensor.shape)
                offset = ravel(padding.box.start, padding.tensor.shape)
                for tensor in dict.fromkeys(self._tensor_ids(place.transfers, padding.tensor, source=False).tolist()):
                    yield tensor, offset, StridedBox(padding.box.extents, strides)


def wire_box(region: Region, ordering: Piece, local: Piece) -> StridedBox:
    """Extents and strides in wire order: the sender's memory order, so that it reads forwards. Unit dims are dropped."""
    order = sorted(range(len(region.start)), key=lambda dim: -ordering.strides[dim])
    kept = [dim for dim in order if region.extents[dim] != 1]
    return StridedBox(tuple(region.extents[dim] for dim in kept), tuple(local.strides[dim] for dim in kept))


def _table(parts: list[_Columns]) -> TransferTable:
    columns: dict[str, NDArray[Any]] = {}
    for name in (column.name for column in fields(TransferTable)):
        values = np.concatenate([np.zeros(0, np.int64), *(part[name] for part in parts)])
        columns[name] = values.astype(np.int64 if name in _WIDE else np.int32)
    return TransferTable(**columns)
