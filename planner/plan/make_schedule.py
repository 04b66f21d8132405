"""Expand a plan into one rank's schedule, from the plan and the rank number alone.

It computes with columns, transfer group by transfer group. A generation rank of DeepSeek-V3 has 45,000 transfers; its
schedule takes a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.layout.geometry import LocalTensor, Piece, Region, ravel, row_major_strides

from .frozen import without_frozen
from .held import Held, NamedCast, held_pieces
from .plan import Plan, RankInGroup, TransferGroup
from .schedule import (
    Cast,
    Relay,
    Schedule,
    SourceTable,
    SourceView,
    StageSchedule,
    StridedBox,
    TransferTable,
    View,
    World,
)

WAVES = 8  # of a relay; more overlap better, and every wave takes some words between all ranks
_WIDE = {"offset", "nbytes"}
_Columns = dict[str, NDArray[np.int64]]
_End = Literal["src", "dst"]


def schedule_of(plan: Plan, world: World, rank: int) -> Schedule:
    """The transfers of a rank between trainer and engine. Raises IndexError for a rank outside of its mesh."""
    return RankView(plan, world, rank).schedule()


def relay_of(plan: Plan, gen_rank: int) -> Relay:
    """The second hop of a generation rank, in a plan that relays. Raises IndexError as `schedule_of`."""
    return RankView(plan, "gen", gen_rank).relay()


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
    # Both are numbered in the order of first use, anew in every copy that `replace` makes.
    tensors: dict[LocalTensor, int] = field(default_factory=dict, init=False)
    strided_boxes: dict[StridedBox, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        size = self.plan.train.world if self.world == "train" else self.plan.gen.world
        if not 0 <= self.rank < size:
            raise IndexError(f"{self.world} rank {self.rank} is outside of the {size} ranks that the plan has")

    def schedule(self) -> Schedule:
        view, is_sender = replace(self), self.world == "train"
        casts = view._casts() if is_sender else ()
        computed = tuple(sorted(cast.scales for cast in casts if cast.scales is not None))
        schedule = view._schedule(view._sends if is_sender else view._receives, is_sender)
        later = None
        if self.plan.frozen and self.wave is None:
            later = replace(self, plan=without_frozen(self.plan)).schedule()
        return replace(schedule, casts=casts, computed=computed, relayed=self.plan.relay, view=self, later=later)

    def with_rows(self, masks: Sequence[NDArray[np.bool_]]) -> RankView:
        before = [np.arange(len(mask)) for mask in masks] if self.rows is None else self.rows
        return replace(self, rows=tuple(rows[mask] for rows, mask in zip(before, masks, strict=True)))

    def source_table(self) -> SourceTable:
        view = replace(self)
        tables = tuple(view._tables(partial(view._receives, piece="src")).values())
        if self.rows is not None:
            tables = tuple(table.rows(rows) for table, rows in zip(tables, self.rows, strict=True))
        return SourceTable(self.rank, self.plan.digest, tuple(view.tensors), tuple(view.strided_boxes), tables)

    def relay(self) -> Relay:
        sending, receiving = replace(self), replace(self)
        sends = replace(sending._schedule(sending._relay_sends, is_sender=True), world="train")
        receives = receiving._schedule(receiving._relay_receives, is_sender=False)
        recvs = tuple(stage.recvs for stage in receives.stages)  # replicas keep the same tensors: this is both ends
        table = SourceTable(self.rank, self.plan.digest, receives.tensors, receives.strided_boxes, recvs)
        view = SourceView(table, of_rank=self)
        return Relay(_among_replicas(replace(sends, view=self)), _among_replicas(replace(receives, view=view)))

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
        plan = replace(self.plan, relay=False, digest=self.plan.digest)
        return RankView(plan, self.world, self.rank, gen_seats=self.gen_seats).schedule()

    def waves(self) -> tuple[Schedule, ...]:
        if self.plan.casts or not self.plan.relay:  # scales are computed, and slots divided, for all that a rank sends
            return ()
        return tuple(replace(self, wave=wave).schedule() for wave in range(WAVES))

    def _schedule(self, rows_of: Callable[[RankInGroup], _Columns], is_sender: bool) -> Schedule:
        plan = self.plan
        tables, none = self._tables(rows_of), _table([])
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
            misc=tuple(plan.misc_names()),
            names={place.index: plan.names_of(place.transfers) for place in plan.groups_of(self.world, self.rank)},
            pairs=tuple((plan.groups[pair.weight], plan.groups[pair.scales]) for pair in plan.pairs),
            gen_seats=self.gen_seats,
        )

    def _tables(self, rows_of: Callable[[RankInGroup], _Columns]) -> dict[int, TransferTable]:
        rows: dict[int, list[_Columns]] = {stage: [] for stage in range(self.plan.train.pp)}
        for place in self.plan.groups_of(self.world, self.rank):
            columns = rows_of(place)
            if self.wave is not None:
                in_wave = _wave_of(place.transfers)[columns["member"]] == self.wave
                columns = {name: column[in_wave] for name, column in columns.items()}
            if len(columns["peer"]):
                columns["transfer_group"] = np.full_like(columns["peer"], place.index)
                rows[place.transfers.pp_stage].append(columns)
        return {stage: _table(parts) for stage, parts in rows.items()}

    def _sends(self, place: RankInGroup) -> _Columns:
        plan, transfers, overlaps = self.plan, place.transfers, place.overlaps
        member, overlap = np.arange(transfers.members)[:, None, None], overlaps[:, None]
        dst = np.arange(plan.dst_replicas(transfers))
        sent = plan.served_by(transfers, member, overlap, dst) == place.replica
        if plan.relay:
            sent = sent & (plan.lands_on(transfers, member, overlap) == dst)
        peers = plan.rank_grids[transfers.dst][place.pattern.parts["gen"][overlaps]]
        return self._columns(place, sent, peers, piece="src", order="src")

    def _receives(self, place: RankInGroup, piece: _End = "dst") -> _Columns:
        """Receives of a generation rank from training ranks, as they lie here or ("src") in their tensors."""
        plan, transfers, overlaps = self.plan, place.transfers, place.overlaps
        member = np.arange(transfers.members)[:, None]
        served = plan.served_by(transfers, member, overlaps, place.replica)
        lands = np.ones_like(served, bool)
        if plan.relay:
            lands = plan.lands_on(transfers, member, overlaps) == place.replica
        peers = plan.rank_grids[transfers.src][place.pattern.parts["train"][overlaps], served]
        return self._columns(place, lands, peers, piece, order="src")

    def _relay_sends(self, place: RankInGroup) -> _Columns:
        """Sends of the second hop: everything that landed on this generation rank, to each of the other replicas."""
        member = np.arange(place.transfers.members)[:, None]
        landed = self.plan.lands_on(place.transfers, member, place.overlaps) == place.replica
        replicas = self.plan.rank_grids[place.transfers.dst][place.part]
        others = np.arange(len(replicas)) != place.replica
        return self._columns(place, landed[:, :, None] & others, replicas, piece="dst", order="dst")

    def _relay_receives(self, place: RankInGroup) -> _Columns:
        """Receives of the second hop: everything that landed on other replicas of this generation rank's part."""
        landed = self.plan.lands_on(place.transfers, np.arange(place.transfers.members)[:, None], place.overlaps)
        peers = self.plan.rank_grids[place.transfers.dst][place.part][landed]
        return self._columns(place, landed != place.replica, peers, piece="dst", order="dst")

    def _columns(
        self, place: RankInGroup, chosen: NDArray[np.bool_], peers: NDArray[np.int32], piece: _End, order: _End
    ) -> _Columns:
        """One row for each `chosen` [members, overlaps, ...] of the rank's part: the peer, and where it lies on one end.

        `peers` broadcasts to `chosen`; `order` says whose memory order the extents have.
        """
        transfers, pattern, overlaps, source = place.transfers, place.pattern, place.overlaps, piece == "src"
        slot0 = transfers.src_slot if source else transfers.dst_slot
        slots = slot0 + np.arange(transfers.members) % transfers.expert_count
        tensor, offset = np.zeros((2, transfers.members, len(overlaps)), dtype=np.int64)
        strided_box = np.zeros(len(overlaps), dtype=np.int64)
        for column, index in enumerate(overlaps):
            overlap = pattern.overlaps[index]
            src, dst = pattern.ends(overlap)
            local = src if source else dst
            tensor[:, column] = self._tensor_ids(transfers, local.tensor, source)
            slot_stride = row_major_strides(local.view)[local.slot_dim] if local.slot_dim >= 0 else 0
            offset[:, column] = local.offset(overlap.region.start) + slots * slot_stride
            box = _wire_box(overlap.region, src if order == "src" else dst, local)
            strided_box[column] = self.strided_boxes.setdefault(box, len(self.strided_boxes))
        member_of, overlap_of, *_ = np.nonzero(chosen)
        return {
            "peer": np.broadcast_to(peers, chosen.shape)[chosen].astype(np.int64),
            "tensor": tensor[member_of, overlap_of],
            "strided_box": strided_box[overlap_of],
            "offset": offset[member_of, overlap_of],
            "nbytes": pattern.overlap_bytes[overlaps][overlap_of],
            "member": member_of,
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
        tensors = (LocalTensor(name, pattern.shape, pattern.dtype) for name in names)
        ids = [self.tensors.setdefault(tensor, len(self.tensors)) for tensor in tensors]
        return np.repeat(np.array(ids, dtype=np.int64), transfers.members // len(names))

    def _padding(self) -> Iterator[tuple[int, int, StridedBox]]:
        """(tensor, offset, strided box) of elements that no parameter fills, maybe several times."""
        for place in self.plan.groups_of(self.world, self.rank):
            for padding in place.partition.padding_of(place.part):
                strides = row_major_strides(padding.tensor.shape)
                offset = ravel(padding.box.start, padding.tensor.shape)
                for tensor in dict.fromkeys(self._tensor_ids(place.transfers, padding.tensor, source=False).tolist()):
                    yield tensor, offset, StridedBox(padding.box.extents, strides)


def _among_replicas(schedule: Schedule) -> Schedule:
    seats = schedule.gen_seats
    return replace(schedule, between_replicas=True, train_ranks=schedule.gen_ranks, padding=(), relay_seats=seats)


def _wave_of(transfers: TransferGroup) -> NDArray[np.int64]:
    """The wave of every member. Each wave has equally many, so that all ranks have work in it.

    Single tensors, such as an embedding, are in the middle, where both hops are under way.
    """
    return (2 * np.arange(transfers.members) + 1) * WAVES // (2 * transfers.members)


def _wire_box(region: Region, ordering: Piece, local: Piece) -> StridedBox:
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
