"""Expand a plan into one rank's schedule, from the plan and the rank number alone.

Work is done bundle by bundle with columns, never transfer by transfer: a generation rank of DeepSeek-V3 has 45,000
transfers and its schedule takes a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.layout.geometry import LocalTensor, Piece, Region, row_major_strides

from .plan import Bundle, Plan, Template
from .schedule import Cast, Geometry, Pulls, Relay, Schedule, StageSchedule, TransferTable, World

WAVES = 8  # of a relay; more overlap better, and every wave takes some words between all ranks
_COLUMNS = ("peer", "tensor", "geometry", "offset", "nbytes", "bundle", "member")
_WIDE = {"offset", "nbytes"}
_End = Literal["src", "dst"]


def schedule_of(plan: Plan, world: World, rank: int) -> Schedule:
    """What `rank` of `world` ("train" or "gen") sends or receives. Raises IndexError for a rank outside of its mesh.

    Of a relayed plan this is what passes between trainer and engine; `Schedule.relay` has the rest.
    """
    _check_rank(plan, world, rank)
    whole = _schedule(plan, world, rank)
    if not plan.relay:
        return whole
    return replace(
        whole,
        unrelayed=partial(schedule_of, replace(plan, relay=False, digest=plan.digest), world, rank),
        # Scales are computed, and slots divided, for a trainer's whole program.
        waves=() if plan.casts else tuple(partial(_schedule, plan, world, rank, wave) for wave in range(WAVES)),
    )


def _schedule(plan: Plan, world: World, rank: int, wave: int | None = None) -> Schedule:
    expansion = _Expansion(plan, world, rank, wave)
    if world == "train":
        casts = expansion.casts()
        return replace(
            expansion.schedule(expansion.sends, sends=True),
            casts=casts,
            computed=tuple(sorted(cast.scales for cast in casts if cast.scales is not None)),
        )
    return replace(
        expansion.schedule(expansion.receives, sends=False),
        pulls=partial(pulls_of, plan, rank, wave),
        relay=partial(relay_of, plan, rank, wave) if plan.relay else None,
    )


def pulls_of(plan: Plan, gen_rank: int, wave: int | None = None) -> Pulls:
    """Where in the training ranks' tensors lies what `gen_rank` receives, row by row as its schedule lists it.

    All of it, or what one of the schedule's waves lists.

    Raises IndexError for a rank outside of the generation mesh.
    """
    _check_rank(plan, "gen", gen_rank)
    expansion = _Expansion(plan, "gen", gen_rank, wave)
    return expansion.pulls(expansion.pulled)


def relay_of(plan: Plan, gen_rank: int, wave: int | None = None) -> Relay:
    """What a generation rank passes on to other replicas and what these pass on to it, in a plan that relays.

    All of it, or that of one wave.

    Raises IndexError for a rank outside of the generation mesh.
    """
    _check_rank(plan, "gen", gen_rank)
    sending, receiving = (_Expansion(plan, "gen", gen_rank, wave) for _ in range(2))
    receives = receiving.schedule(receiving.relay_receives, sends=False)

    def pulls() -> Pulls:  # replicas keep the same tensors: what lies here lies there too
        return Pulls(
            gen_rank,
            plan.digest,
            receives.tensors,
            receives.geometries,
            tuple(stage.recvs for stage in receives.stages),
        )

    return Relay(
        _among_replicas(replace(sending.schedule(sending.relay_sends, sends=True), world="train")),
        _among_replicas(replace(receives, pulls=pulls)),
    )


def _among_replicas(schedule: Schedule) -> Schedule:
    return replace(schedule, between_replicas=True, train_ranks=schedule.gen_ranks, padding=())


def _check_rank(plan: Plan, world: World, rank: int) -> None:
    size = plan.train.world if world == "train" else plan.gen.world
    if not 0 <= rank < size:
        raise IndexError(f"{world} rank {rank} is outside of the {size} ranks that the plan has")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank stands in a bundle: the shard and the replica of it that it holds."""

    index: int  # into Plan.bundles
    bundle: Bundle
    template: Template
    shard: int
    replica: int


_Columns = dict[str, NDArray[np.int64]]


@dataclass(slots=True)
class _Expansion:
    """Rows of one rank; tensors and geometries are numbered as they are met."""

    plan: Plan
    world: World
    rank: int
    wave: int | None = None  # None: all of them
    tensors: dict[LocalTensor, int] = field(default_factory=dict)
    geometries: dict[Geometry, int] = field(default_factory=dict)

    def schedule(self, rows_of: Callable[[_Place], _Columns], *, sends: bool) -> Schedule:
        plan = self.plan
        tables, none = self._tables(rows_of), _table([])
        padding = () if sends or self.wave is not None else tuple(dict.fromkeys(self._padding()))
        tensors = tuple(self.tensors)  # after the padding: nothing else may lie in some of them
        if self.wave is not None:
            tensors, tables = _those_used(tensors, tables)
        return Schedule(
            world=self.world,
            rank=self.rank,
            digest=plan.digest,
            train_ranks=plan.train.world,
            gen_ranks=plan.gen.world,
            tensors=tensors,
            geometries=tuple(self.geometries),
            stages=tuple(
                StageSchedule(stage, table if sends else none, none if sends else table)
                for stage, table in tables.items()
            ),
            padding=padding,
            misc=tuple(plan.misc_names()),
            parameter_name=plan.parameter_name,
            pair_names=plan.pair_names,
        )

    def pulls(self, rows_of: Callable[[_Place], _Columns]) -> Pulls:
        tables = tuple(self._tables(rows_of).values())
        return Pulls(self.rank, self.plan.digest, tuple(self.tensors), tuple(self.geometries), tables)

    def _tables(self, rows_of: Callable[[_Place], _Columns]) -> dict[int, TransferTable]:
        rows: dict[int, list[_Columns]] = {stage: [] for stage in range(self.plan.train.pp)}
        for place in self._places():
            columns = rows_of(place)
            if self.wave is not None:
                mine = _wave_of(place.bundle)[columns["member"]] == self.wave
                columns = {name: column[mine] for name, column in columns.items()}
            if len(columns["peer"]):
                columns["bundle"] = np.full_like(columns["peer"], place.index)
                rows[place.bundle.pp_stage].append(columns)
        return {stage: _table(parts) for stage, parts in rows.items()}

    def _places(self) -> Iterator[_Place]:
        """The bundles this rank takes part in."""
        found: dict[int, tuple[int, int] | None] = {}
        for index, bundle in enumerate(self.plan.bundles):
            holding = bundle.src if self.world == "train" else bundle.dst
            if holding not in found:
                at = np.argwhere(self.plan.holdings[holding].ranks == self.rank)
                found[holding] = (int(at[0, 0]), int(at[0, 1])) if len(at) else None
            if (place := found[holding]) is not None:
                yield _Place(index, bundle, self.plan.templates[bundle.template], *place)

    def sends(self, at: _Place) -> _Columns:
        """What a training rank sends."""
        plan, bundle = self.plan, at.bundle
        moves = _numbers(i for i, move in enumerate(at.template.moves) if move.src == at.shard)
        member, move = np.arange(bundle.members)[:, None, None], moves[None, :, None]
        dst = np.arange(plan.dst_replicas(bundle))[None, None, :]
        mine = plan.served_by(bundle, member, move, dst) == at.replica
        if plan.relay:
            mine = mine & (plan.lands_on(bundle, member, move) == dst)
        member_of, move_of, dst_of = np.nonzero(mine)
        peers = plan.holdings[bundle.dst].ranks[[at.template.moves[i].dst for i in moves]]
        columns = self._local(at, moves, member_of, move_of, piece="src", order="src")
        return {"peer": peers[move_of, dst_of].astype(np.int64), **columns}

    def casts(self) -> tuple[Cast, ...]:
        """What a training rank casts: one entry a tensor, also where several parameters are fused in it."""
        dtypes = {cast.group: cast.dst for cast in self.plan.casts}
        blocks = {pair.weight: pair.block for pair in self.plan.pairs}
        found: dict[int, Cast] = {}
        for at in self._places() if dtypes else ():
            if at.bundle.group not in dtypes:
                continue
            scales = self.plan.scale_templates.get(at.index)
            for number, piece in enumerate(at.template.src.pieces[at.shard]):
                tensors = self._tensor_ids(at.bundle, piece.tensor, source=True).tolist()
                beside: list[int | None] = [None] * len(tensors)
                if scales is not None:
                    scale_piece = self.plan.templates[scales].src.pieces[at.shard][number]
                    beside = self._tensor_ids(at.bundle, scale_piece.tensor, source=True).tolist()
                block = blocks.get(at.bundle.group, (0, 0))
                for tensor, scale in zip(tensors, beside, strict=True):
                    found[tensor] = Cast(tensor, dtypes[at.bundle.group], scale, block)
        return tuple(found[tensor] for tensor in sorted(found))

    def receives(self, at: _Place) -> _Columns:
        """What a generation rank receives from training ranks, as it lies here."""
        return self._from_trainer(at, piece="dst")

    def pulled(self, at: _Place) -> _Columns:
        """The same, as it lies in the training ranks' tensors."""
        return self._from_trainer(at, piece="src")

    def _from_trainer(self, at: _Place, piece: _End) -> _Columns:
        plan, bundle = self.plan, at.bundle
        member, moves = np.arange(bundle.members)[:, None], self._moves_in(at)
        served = plan.served_by(bundle, member, moves[None, :], at.replica)
        mine = plan.lands_on(bundle, member, moves[None, :]) == at.replica if plan.relay else np.ones_like(served, bool)
        member_of, move_of = np.nonzero(mine)
        shards = _numbers(at.template.moves[i].src for i in moves)
        peers = plan.holdings[bundle.src].ranks[shards[move_of], served[member_of, move_of]].astype(np.int64)
        return {"peer": peers, **self._local(at, moves, member_of, move_of, piece, order="src")}

    def relay_sends(self, at: _Place) -> _Columns:
        """What landed on this generation rank, for each of the other replicas."""
        moves = self._moves_in(at)
        member = np.arange(at.bundle.members)[:, None]
        landed = self.plan.lands_on(at.bundle, member, moves[None, :]) == at.replica
        replicas = self.plan.holdings[at.bundle.dst].ranks[at.shard]
        others = np.arange(len(replicas)) != at.replica
        member_of, move_of, dst_of = np.nonzero(landed[:, :, None] & others)
        columns = self._local(at, moves, member_of, move_of, piece="dst", order="dst")
        return {"peer": replicas[dst_of].astype(np.int64), **columns}

    def relay_receives(self, at: _Place) -> _Columns:
        """What landed on other replicas of this generation rank's shard."""
        moves = self._moves_in(at)
        landed = self.plan.lands_on(at.bundle, np.arange(at.bundle.members)[:, None], moves[None, :])
        member_of, move_of = np.nonzero(landed != at.replica)
        peers = self.plan.holdings[at.bundle.dst].ranks[at.shard][landed[member_of, move_of]].astype(np.int64)
        return {"peer": peers, **self._local(at, moves, member_of, move_of, piece="dst", order="dst")}

    def _moves_in(self, at: _Place) -> NDArray[np.int64]:
        return _numbers(i for i, move in enumerate(at.template.moves) if move.dst == at.shard)

    def _local(self, at: _Place, moves: NDArray[np.int64], member_of: NDArray[np.int64], move_of: NDArray[np.int64],
               piece: _End, order: _End) -> _Columns:  # fmt: skip
        """Where the moves lie in the tensors of one end, for every (member, move) row, in memory order of one end."""
        bundle, template, source = at.bundle, at.template, piece == "src"
        slot0 = bundle.src_slot if source else bundle.dst_slot
        slots = slot0 + np.arange(bundle.members) % bundle.expert_count
        tensor = np.zeros((bundle.members, len(moves)), dtype=np.int64)
        offset = np.zeros((bundle.members, len(moves)), dtype=np.int64)
        geometry = np.zeros(len(moves), dtype=np.int64)
        for column, index in enumerate(moves):
            move = template.moves[index]
            src, dst = template.src.pieces[move.src][move.src_piece], template.dst.pieces[move.dst][move.dst_piece]
            local = src if source else dst
            tensor[:, column] = self._tensor_ids(bundle, local.tensor, source)
            slot_stride = row_major_strides(local.view)[local.slot_dim] if local.slot_dim >= 0 else 0
            offset[:, column] = local.offset(move.region.start) + slots * slot_stride
            geometry[column] = self._geometry(_wire_geometry(move.region, src if order == "src" else dst, local))
        return {
            "tensor": tensor[member_of, move_of],
            "geometry": geometry[move_of],
            "offset": offset[member_of, move_of],
            "nbytes": template.move_bytes[moves][move_of],
            "member": member_of,
        }

    def _tensor_ids(self, bundle: Bundle, pattern: LocalTensor, source: bool) -> NDArray[np.int64]:
        """Index of the tensor that holds each member of the bundle."""
        first = bundle.src_slot if source else bundle.dst_slot
        count = bundle.expert_count if "{expert}" in pattern.name else 1
        ids = []
        for at in bundle.layers:
            vp, layer = (at.vp_stage, at.src_local) if source else (0, at.dst_local)
            for slot in range(first, first + count):
                name = pattern.name.format(vp=vp, layer=layer, expert=slot)
                ids.append(self.tensors.setdefault(LocalTensor(name, pattern.shape, pattern.dtype), len(self.tensors)))
        return np.repeat(np.array(ids, dtype=np.int64), bundle.expert_count // count)

    def _geometry(self, geometry: Geometry) -> int:
        return self.geometries.setdefault(geometry, len(self.geometries))

    def _padding(self) -> Iterator[tuple[int, int, Geometry]]:
        """(tensor, offset, geometry) of what no parameter fills, maybe several times."""
        for at in self._places():
            declared = at.template.dst.padding
            for padding in declared[at.shard] if declared else ():
                strides = row_major_strides(padding.tensor.shape)
                offset = sum(low * stride for low, stride in zip(padding.box.start, strides, strict=True))
                for tensor in dict.fromkeys(self._tensor_ids(at.bundle, padding.tensor, source=False).tolist()):
                    yield tensor, offset, Geometry(padding.box.extents, strides)


def _those_used(
    tensors: tuple[LocalTensor, ...], tables: Mapping[int, TransferTable]
) -> tuple[tuple[LocalTensor, ...], dict[int, TransferTable]]:
    """The tensors that rows name, and the tables with their new numbers."""
    used = np.unique(np.concatenate([table.tensor for table in tables.values()]))
    return tuple(tensors[tensor] for tensor in used.tolist()), {
        stage: replace(table, tensor=np.searchsorted(used, table.tensor).astype(np.int32))
        for stage, table in tables.items()
    }


def _wave_of(bundle: Bundle) -> NDArray[np.int64]:
    """The wave of every member: as many follow each other in one wave, so that in each wave all ranks get their turn.

    A weight and its scales have the same members and so the same waves; single tensors, such as an embedding, are in
    the middle, where both hops are under way.
    """
    return (2 * np.arange(bundle.members) + 1) * WAVES // (2 * bundle.members)


def _numbers(values: Iterable[int]) -> NDArray[np.int64]:
    return np.array(list(values), dtype=np.int64)


def _wire_geometry(region: Region, ordering: Piece, local: Piece) -> Geometry:
    """Extents and strides in wire order: the sender's memory order, so that it reads forwards. Unit dims are dropped."""
    order = sorted(range(len(region.start)), key=lambda dim: -ordering.strides[dim])
    kept = [dim for dim in order if region.extents[dim] != 1]
    return Geometry(tuple(region.extents[dim] for dim in kept), tuple(local.strides[dim] for dim in kept))


def _table(parts: list[dict[str, NDArray[np.int64]]]) -> TransferTable:
    columns: dict[str, Any] = {}
    for name in _COLUMNS:
        dtype = np.int64 if name in _WIDE else np.int32
        columns[name] = (
            np.concatenate([part[name] for part in parts]).astype(dtype) if parts else np.zeros(0, dtype=dtype)
        )
    return TransferTable(**columns)
