"""Ways to change a plan as a buggy planner would: consistently, with moves that follow the wrong cuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mcore_reshard.planner.layout.geometry import LocalTensor, Piece, Region
from mcore_reshard.planner.layout.partitions import Partition
from mcore_reshard.planner.model.parameters import Role
from mcore_reshard.planner.plan.plan import Overlap, Plan, TransferGroup, TransferPattern
from mcore_reshard.planner.plan.plan_file import digest_of

Recut = Callable[[int, Sequence[Piece]], Sequence[Piece]]


def transfer_groups_of(plan: Plan, *roles: Role) -> list[int]:
    return [i for i, transfers in enumerate(plan.transfer_groups) if plan.groups[transfers.group].role in roles]


def edit_transfers(plan: Plan, indices: Sequence[int], change: Callable[[TransferGroup], TransferGroup]) -> Plan:
    """The plan with some transfer groups changed, and all in stage order again."""
    transfer_groups = [
        change(transfers) if i in set(indices) else transfers for i, transfers in enumerate(plan.transfer_groups)
    ]
    transfer_groups.sort(key=lambda transfers: transfers.pp_stage)
    return replace(plan, transfer_groups=tuple(transfer_groups))


def without_transfers(plan: Plan, indices: Sequence[int]) -> Plan:
    return replace(
        plan,
        transfer_groups=tuple(transfers for i, transfers in enumerate(plan.transfer_groups) if i not in set(indices)),
    )


def without_groups(plan: Plan, *roles: Role) -> Plan:
    """The plan as if the model's parameters had never listed these parameters."""
    kept = [i for i, group in enumerate(plan.groups) if group.role not in roles]
    new = {old: index for index, old in enumerate(kept)}
    return replace(
        plan,
        groups=tuple(plan.groups[i] for i in kept),
        transfer_groups=tuple(replace(b, group=new[b.group]) for b in plan.transfer_groups if b.group in new),
        misc=tuple(replace(u, group=new[u.group]) for u in plan.misc if u.group in new),
        excluded=tuple(replace(u, group=new[u.group]) for u in plan.excluded if u.group in new),
    )


def with_rank_grid(plan: Plan, ranks) -> tuple[Plan, int]:  # type: ignore[no-untyped-def]
    return replace(plan, rank_grids=(*plan.rank_grids, ranks)), len(plan.rank_grids)


def recut(plan: Plan, role: Role, *, src: Recut | None = None, dst: Recut | None = None) -> Plan:
    """Other pieces for a role's parts, and the moves that follow: what a wrong layout rule gives."""
    patterns = list(plan.patterns)
    for index in {plan.transfer_groups[i].pattern for i in transfer_groups_of(plan, role)}:
        pattern = patterns[index]
        source = _recut(pattern.src, src) if src else pattern.src
        target = _recut(pattern.dst, dst) if dst else pattern.dst
        patterns[index] = TransferPattern(source, target, overlaps_between(source, target))
    return replace(plan, patterns=tuple(patterns))


def _recut(partition: Partition, change: Recut) -> Partition:
    return replace(partition, pieces=tuple(tuple(change(c, pieces)) for c, pieces in enumerate(partition.pieces)))


def overlaps_between(src: Partition, dst: Partition) -> tuple[Overlap, ...]:
    """Every source piece against every destination piece."""
    return tuple(
        Overlap(a, i, b, j, common)
        for b, wanted in enumerate(dst.pieces)
        for j, to in enumerate(wanted)
        for a, held in enumerate(src.pieces)
        for i, of in enumerate(held)
        if (common := of.region.intersect(to.region)) is not None
    )


def retensor(plan: Plan, role: Role, change: Callable[[LocalTensor], LocalTensor], *, source: bool) -> Plan:
    """Another name, shape or dtype for the tensors that a role lies in, on one side; moves stay."""
    patterns = list(plan.patterns)
    for index in {plan.transfer_groups[i].pattern for i in transfer_groups_of(plan, role)}:
        pattern = patterns[index]
        partition = pattern.src if source else pattern.dst
        pieces = tuple(tuple(replace(p, tensor=change(p.tensor)) for p in held) for held in partition.pieces)
        padding = tuple(tuple(replace(p, tensor=change(p.tensor)) for p in held) for held in partition.padding)
        partition = Partition(pieces, padding)
        patterns[index] = replace(pattern, src=partition) if source else replace(pattern, dst=partition)
    return replace(plan, patterns=tuple(patterns))


def rows(piece: Piece, start: int, stop: int, at: int | None = None) -> Piece:
    """The piece with other rows of the parameter, and another place in its tensor."""
    origin = piece.origin if at is None else _at(piece, at)
    return replace(piece, region=piece.region.within(0, start, stop), origin=origin)


def moved(piece: Piece, at: int) -> Piece:
    return replace(piece, origin=_at(piece, at))


def _at(piece: Piece, at: int) -> tuple[int, ...]:
    dim = piece.dims[0]
    return (*piece.origin[:dim], at, *piece.origin[dim + 1 :])


def sealed(plan: Plan) -> Plan:
    """The plan with the digest of what it now says: a buggy planner seals what it makes."""
    plan = replace(plan)
    object.__setattr__(plan, "digest", digest_of(plan))
    return plan


def whole_of(plan: Plan, role: Role) -> Region:
    return Region.whole(next(group.view for group in plan.groups if group.role is role))
