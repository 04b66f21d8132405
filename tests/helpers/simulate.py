"""Run a plan element by element on numpy arrays: the judge of plans and of their proof.

Every element of every parameter gets a number of its own. The pieces of a *good* plan give the numbers in the source
tensors, and the expected ones in the destination tensors. In between, the schedules of all ranks of the plan are run.
This file uses only `schedule_of` and `relays_of` of the planner, and reads pieces with plain numpy slices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.layout.geometry import LocalTensor, Piece
from mcore_reshard.planner.layout.mesh import LayerPlace
from mcore_reshard.planner.model.parameters import ITEMSIZE
from mcore_reshard.planner.plan.make_schedule import relays_of, schedule_of
from mcore_reshard.planner.plan.plan import Plan, TransferGroup
from mcore_reshard.planner.plan.schedule import Schedule, StridedBox, TransferTable, World

UNTOUCHED = -1
TRAINER_PADDING = -2

Ids = NDArray[np.int64]
Tensors = dict[tuple[int, LocalTensor], Ids]  # by rank and tensor, in the tensor's own shape


@dataclass(frozen=True)
class Transfer:
    """One row of a schedule, with its table indices resolved."""

    tensor: LocalTensor
    strided_box: StridedBox
    offset: int
    nbytes: int
    parameter: str
    wire: str  # dtype on the wire: the tensor's, or that of its cast


def numbered_tensors(plan: Plan, world: World) -> Tensors:
    """The tensors of a world's ranks, filled with numbers as the plan's pieces say; UNTOUCHED where no piece lies."""
    tensors: Tensors = {}
    first_id = np.cumsum([0] + [group.count * prod(group.shape) for group in plan.groups])
    for transfers in plan.transfer_groups:
        group = plan.groups[transfers.group]
        layers = group.layers or (-1,)
        for place in transfers.layers:
            for expert in range(*transfers.experts) if group.experts else (0,):
                member = layers.index(place.layer) * max(1, group.experts) + expert
                ids = first_id[transfers.group] + member * prod(group.shape) + np.arange(prod(group.shape))
                for rank, name, piece, slot in _pieces(plan, transfers, world, place, expert - transfers.experts[0]):
                    local = LocalTensor(name, piece.tensor.shape, piece.tensor.dtype)
                    tensor = tensors.setdefault((rank, local), np.full(local.shape, UNTOUCHED))
                    _store(tensor, piece, slot, ids.reshape(group.view))
    return tensors


def _pieces(
    plan: Plan, transfers: TransferGroup, world: World, place: LayerPlace, number: int
) -> Iterator[tuple[int, str, Piece, int]]:
    """(rank, tensor name, piece, slot) of one member on every rank of the world that holds a part of it."""
    pattern = plan.patterns[transfers.pattern]
    if world == "train":
        partition, ranks, slot = pattern.src, plan.rank_grids[transfers.src], transfers.src_slot + number
        fields = {"vp": place.vp_stage, "layer": place.local, "expert": slot}
    else:
        partition, ranks, slot = pattern.dst, plan.rank_grids[transfers.dst], transfers.dst_slot + number
        fields = {"vp": 0, "layer": place.layer, "expert": slot}
    for part, holders in enumerate(ranks.tolist()):
        for piece in partition.pieces[part]:
            for rank in holders:
                yield rank, piece.tensor.name.format(**fields), piece, slot


def _store(tensor: Ids, piece: Piece, slot: int, ids: Ids) -> None:
    """Write the ids of the piece's region into its box of the local tensor."""
    sizes = [1] * len(piece.view)
    for start, stop, dim in zip(piece.region.start, piece.region.stop, piece.dims, strict=True):
        sizes[dim] = stop - start
    origin = list(piece.origin)
    if piece.slot_dim >= 0:
        origin[piece.slot_dim] += slot
    box = tensor.reshape(piece.view)[tuple(slice(start, start + n) for start, n in zip(origin, sizes, strict=True))]
    part = ids[tuple(map(slice, piece.region.start, piece.region.stop))]
    part = part.transpose(np.argsort(piece.dims)).reshape(sizes)
    assert ((box == UNTOUCHED) | (box == part)).all(), f"{piece.tensor.name} holds two parameters"
    box[...] = part


def sources_of(plan: Plan) -> Tensors:
    """The tensors of the training ranks. Elements outside of all pieces have a number that no destination wants."""
    return {
        key: np.where(tensor == UNTOUCHED, TRAINER_PADDING, tensor)
        for key, tensor in numbered_tensors(plan, "train").items()
    }


def execute(plan: Plan, sources: Tensors, wanted: Tensors) -> tuple[Tensors, list[str]]:
    """Run every rank's schedule: the tensors of `wanted` as they end up, and everything that went wrong on the way."""
    train = [schedule_of(plan, "train", rank) for rank in range(plan.train.world)]
    gen = [schedule_of(plan, "gen", rank) for rank in range(plan.gen.world)]
    arrived = {key: np.full(tensor.size, UNTOUCHED) for key, tensor in wanted.items()}
    arrived |= {
        (schedule.rank, schedule.tensors[index]): np.full(prod(schedule.tensors[index].shape), UNTOUCHED)
        for schedule in gen
        for index in schedule.carried
    }
    faults = list(_exchange(train, gen, sources, arrived))
    relays = [relays_of(plan, rank) for rank in range(plan.gen.world)]
    for hop in zip(*relays, strict=True):  # only now: a replica passes on what has arrived
        faults += _exchange([r.sends for r in hop], [r.receives for r in hop], arrived, arrived)
    return {key: arrived[key].reshape(tensor.shape) for key, tensor in wanted.items()}, faults


def _exchange(senders: list[Schedule], receivers: list[Schedule], sources: Tensors, arrived: Tensors) -> Iterator[str]:
    """Run the schedules of senders against those of receivers, pair by pair; yields the faults."""
    for stage in range(len(senders[0].stages)):
        sent = {(s.rank, peer): rows for s in senders for peer, rows in _by_peer(s, s.stages[stage].sends).items()}
        received = {
            (peer, r.rank): rows for r in receivers for peer, rows in _by_peer(r, r.stages[stage].recvs).items()
        }
        for src, dst in sorted(sent.keys() | received.keys()):
            where = f"stage {stage}, {senders[0].name_of('train', src)} -> gen:{dst}"
            sends, recvs = sent.get((src, dst), []), received.get((src, dst), [])
            if len(sends) != len(recvs):
                yield f"{where}: {len(sends)} sends for {len(recvs)} receives"
                continue
            for send, recv in zip(sends, recvs, strict=True):
                if message := _move(send, recv, sources.get((src, send.tensor)), arrived.get((dst, recv.tensor))):
                    yield f"{where}, {send.parameter}: {message}"


def _by_peer(schedule: Schedule, table: TransferTable) -> dict[int, list[Transfer]]:
    rows: dict[int, list[Transfer]] = defaultdict(list)
    casts = {cast.tensor: cast.to for cast in schedule.casts}
    for n in range(len(table)):
        rows[int(table.peer[n])].append(
            Transfer(
                schedule.tensors[table.tensor[n]],
                schedule.strided_boxes[table.strided_box[n]],
                int(table.offset[n]),
                int(table.nbytes[n]),
                schedule.parameter_name(int(table.transfer_group[n]), int(table.member[n])),
                casts.get(int(table.tensor[n]), schedule.tensors[table.tensor[n]].dtype),
            )
        )
    return rows


def _move(send: Transfer, recv: Transfer, source: Ids | None, into: Ids | None) -> str:
    """Copy one transfer's elements; "" or what is wrong with it."""
    for end, array, what in ((send, source, "source"), (recv, into, "destination")):
        if array is None:
            return f"there is no {what} tensor {end.tensor}"
    assert source is not None and into is not None
    elements = prod(send.strided_box.extents)
    if (send.parameter, send.nbytes, send.strided_box.extents, send.wire) != (
        recv.parameter, elements * ITEMSIZE[recv.tensor.dtype], recv.strided_box.extents, recv.tensor.dtype,
    ) or send.nbytes != recv.nbytes:  # fmt: skip
        return f"the ends disagree: {send} / {recv}"
    read, write = _indices(send), _indices(recv)
    if read.size == 0:
        return "it is empty"
    if read.min() < 0 or read.max() >= source.size or write.min() < 0 or write.max() >= into.size:
        return "it runs out of a tensor"
    if (into[write] != UNTOUCHED).any() or len(np.unique(write)) != write.size:
        return "it writes what is already written"
    into[write] = source.reshape(-1)[read]
    return ""


def _indices(transfer: Transfer) -> Ids:
    indices = np.array(transfer.offset)
    for extent, stride in zip(transfer.strided_box.extents, transfer.strided_box.strides, strict=True):
        indices = indices[..., None] + np.arange(extent) * stride
    return indices.reshape(-1)


def damage(good: Plan, plan: Plan | None = None) -> list[str]:
    """The differences between the outcome of `plan` and the good plan's pieces; [] if every element is right.

    Only transfer groups in which the two plans differ are executed, and those of the good plan decide what they should do.
    """
    whole = plan or good
    if plan is None:
        before, after = good, good
    else:
        before, after = _differing(good, plan)
    sources, wanted = sources_of(before), numbered_tensors(before, "gen")
    try:
        arrived, faults = execute(after, sources, wanted)
    except (ArithmeticError, LookupError, ValueError, TypeError, AssertionError) as error:
        return [f"no schedule: {type(error).__name__}: {error}"]
    faults += [] if before is after else _padding_changes(before, after)
    faults += [] if (good.pairs, good.casts) == (whole.pairs, whole.casts) else _cast_changes(good, whole)
    for (rank, local), tensor in wanted.items():
        wrong = np.argwhere(arrived[rank, local] != tensor)
        if len(wrong):
            first = tuple(wrong[0].tolist())
            faults.append(
                f"gen {rank} {local.name}{list(first)}: {len(wrong)} of {tensor.size} elements wrong, first has"
                f" {arrived[rank, local][first]}, wanted {tensor[first]}"
            )
    return faults


def scale_damage(plan: Plan) -> list[str]:
    """Where an element and its scale do not lie together.

    Element (r, c) of a local matrix has its scale at (r // block rows, c // block columns) of the scales' tensor. That place
    must hold the scale of the element's block in the parameter. One scale a tensor is a block as large as the matrix.
    """
    faults: list[str] = []
    first_id = np.cumsum([0] + [group.count * prod(group.shape) for group in plan.groups])
    worlds: tuple[World, ...] = ("train", "gen")
    for world in worlds:
        tensors = numbered_tensors(plan, world)
        by_name = {(rank, local.name): tensor for (rank, local), tensor in tensors.items()}
        for (rank, local), ids in tensors.items():
            group = int(np.searchsorted(first_id, ids[ids >= 0][:1], side="right")[0]) - 1
            pair = next((pair for pair in plan.pairs if pair.weight == group), None)
            if pair is None:
                continue
            wanted = _scale_ids(plan, first_id, ids)
            rows, columns = ids.shape[-2:]
            one = plan.groups[pair.scales].shape == (1,)
            if pair.touched and world == "gen":
                touched = by_name[rank, local.name + "_scale_inv.blocks"]
                faults += _touched_damage(f"{world} {rank} {local.name}", wanted, touched)
                continue
            block = (rows, columns) if one else pair.block
            name = next(n for n in _scale_names(local.name) if (rank, n) in by_name)
            scales = by_name[rank, name].reshape((*ids.shape[:-2], 1, 1) if one else by_name[rank, name].shape)
            nearby = scales[..., np.arange(rows)[:, None] // block[0], np.arange(columns) // block[1]]
            if (nearby != wanted).any():
                first = tuple(np.argwhere(nearby != wanted)[0].tolist())
                faults.append(
                    f"{world} {rank} {local.name}{list(first)}: scale {nearby[first]}, wanted {wanted[first]}"
                )
    return faults


def _touched_damage(where: str, wanted: Ids, scales: Ids) -> list[str]:
    """Experts that lie with other scales than those of the blocks that they have a part of."""
    return [
        f"{where}[{expert}]: other scales than those of its blocks"
        for expert in range(len(wanted))
        if not np.array_equal(np.unique(wanted[expert]), np.unique(scales[expert]))
    ]


def _scale_names(weight: str) -> tuple[str, ...]:
    return tuple(weight + suffix for suffix in ("._rowwise_scale_inv", "._scale_inv", "_scale_inv", "_scale"))


def _scale_ids(plan: Plan, first_id: Ids, ids: Ids) -> Ids:
    """The numbers of the scales of numbered elements of weights."""
    scale_ids = np.full_like(ids, UNTOUCHED)
    groups = np.searchsorted(first_id, ids, side="right") - 1
    for pair in (pair for pair in plan.pairs if (groups == pair.weight).any()):
        weight, scales = plan.groups[pair.weight], plan.groups[pair.scales]
        member, element = np.divmod(ids - first_id[pair.weight], prod(weight.shape))
        row, column = np.divmod(element, weight.shape[1])
        block = row // pair.block[0] * scales.view[1] + column // pair.block[1]
        of_this_pair = first_id[pair.scales] + member * prod(scales.shape) + block
        scale_ids = np.where(groups == pair.weight, of_this_pair, scale_ids)
    return scale_ids


def _differing(good: Plan, plan: Plan) -> tuple[Plan, Plan]:
    """Both plans without the transfer groups that they have in common."""
    if (good.train, good.gen) != (plan.train, plan.gen):
        return good, plan

    def resolved(of: Plan) -> dict[object, TransferGroup]:
        return {
            (
                replace(transfers, group=0, pattern=0, src=0, dst=0),
                id(of.groups[transfers.group]) if transfers.group < len(of.groups) else None,
                *(id(table[n]) if 0 <= n < len(table) else None for table, n in (
                    (of.patterns, transfers.pattern), (of.rank_grids, transfers.src), (of.rank_grids, transfers.dst))),
            ): transfers
            for transfers in of.transfer_groups
        }  # fmt: skip

    before_by_key, after_by_key = resolved(good), resolved(plan)
    twice = len(after_by_key) != len(plan.transfer_groups)
    before = tuple(transfers for key, transfers in before_by_key.items() if key not in after_by_key or twice)
    after = (
        tuple(plan.transfer_groups)
        if twice
        else tuple(transfers for key, transfers in after_by_key.items() if key not in before_by_key)
    )
    return replace(good, transfer_groups=before), replace(plan, transfer_groups=after)


def padding_damage(plan: Plan) -> list[str]:
    """Where declared padding and the elements that no piece fills are not the same."""
    declared, faults = declared_padding(plan), []
    for (rank, local), tensor in numbered_tensors(plan, "gen").items():
        empty = set(np.flatnonzero(tensor.reshape(-1) == UNTOUCHED).tolist())
        padded = declared.get((rank, local), set())
        if empty != padded:
            faults.append(f"gen {rank} {local.name}: {len(empty)} elements unfilled, {len(padded)} declared")
    return faults


def _padding_changes(good: Plan, plan: Plan) -> list[str]:
    before, after = declared_padding(good), declared_padding(plan)
    return [
        f"gen {rank} {local.name}: other padding"
        for rank, local in before.keys() | after.keys()
        if before.get((rank, local)) != after.get((rank, local))
    ]


def _cast_changes(good: Plan, plan: Plan) -> list[str]:
    """Training ranks that would cast something else, or in other blocks."""
    ranks = range(good.train.world)
    return [f"train {rank}: other casts" for rank in ranks if casts_of(good, rank) != casts_of(plan, rank)]


def casts_of(plan: Plan, rank: int) -> dict[str, tuple[str, str | None, tuple[int, int]]]:
    """The casts of a training rank, by tensor: (dtype on the wire, tensor of the scales, block)."""
    schedule = schedule_of(plan, "train", rank)
    name = [local.name for local in schedule.tensors]
    return {
        name[cast.tensor]: (cast.to, None if cast.scales is None else name[cast.scales], cast.block)
        for cast in schedule.casts
    }


def declared_padding(plan: Plan) -> dict[tuple[int, LocalTensor], set[int]]:
    """The elements that the schedules declare as padding."""
    declared: dict[tuple[int, LocalTensor], set[int]] = defaultdict(set)
    if any(pattern.dst.padding for pattern in plan.patterns):
        for rank in range(plan.gen.world):
            schedule = schedule_of(plan, "gen", rank)
            for tensor, offset, strided_box in schedule.padding:
                box = Transfer(schedule.tensors[tensor], strided_box, offset, 0, "", "")
                declared[rank, box.tensor] |= set(_indices(box).tolist())
    return declared
