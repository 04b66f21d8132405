"""Ways to change a plan as a buggy planner would: consistently, with moves that follow the wrong cuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mcore_reshard.planner.layout.geometry import LocalTensor, Piece, Region
from mcore_reshard.planner.layout.partitions import Shards
from mcore_reshard.planner.model.parameters import Role
from mcore_reshard.planner.plan.plan import Bundle, Holding, Move, Plan, Template
from mcore_reshard.planner.plan.plan_file import digest_of

Recut = Callable[[int, Sequence[Piece]], Sequence[Piece]]


def bundles_of(plan: Plan, *roles: Role) -> list[int]:
    return [i for i, bundle in enumerate(plan.bundles) if plan.groups[bundle.group].role in roles]


def edit_bundles(plan: Plan, indices: Sequence[int], change: Callable[[Bundle], Bundle]) -> Plan:
    """The plan with some bundles changed, and all in stage order again."""
    bundles = [change(bundle) if i in set(indices) else bundle for i, bundle in enumerate(plan.bundles)]
    bundles.sort(key=lambda bundle: bundle.pp_stage)
    return replace(plan, bundles=tuple(bundles))


def without_bundles(plan: Plan, indices: Sequence[int]) -> Plan:
    return replace(plan, bundles=tuple(bundle for i, bundle in enumerate(plan.bundles) if i not in set(indices)))


def without_groups(plan: Plan, *roles: Role) -> Plan:
    """The plan as if the catalogue had never listed these parameters."""
    kept = [i for i, group in enumerate(plan.groups) if group.role not in roles]
    new = {old: index for index, old in enumerate(kept)}
    return replace(
        plan,
        groups=tuple(plan.groups[i] for i in kept),
        bundles=tuple(replace(b, group=new[b.group]) for b in plan.bundles if b.group in new),
        misc=tuple(replace(u, group=new[u.group]) for u in plan.misc if u.group in new),
        excluded=tuple(replace(u, group=new[u.group]) for u in plan.excluded if u.group in new),
    )


def with_holding(plan: Plan, ranks) -> tuple[Plan, int]:  # type: ignore[no-untyped-def]
    return replace(plan, holdings=(*plan.holdings, Holding(ranks))), len(plan.holdings)


def recut(plan: Plan, role: Role, *, src: Recut | None = None, dst: Recut | None = None) -> Plan:
    """Other pieces for a role's shards, and the moves that follow: what a wrong layout rule gives."""
    templates = list(plan.templates)
    for index in {plan.bundles[i].template for i in bundles_of(plan, role)}:
        template = templates[index]
        source = _recut(template.src, src) if src else template.src
        target = _recut(template.dst, dst) if dst else template.dst
        templates[index] = Template(source, target, moves_between(source, target))
    return replace(plan, templates=tuple(templates))


def _recut(shards: Shards, change: Recut) -> Shards:
    return replace(shards, pieces=tuple(tuple(change(c, pieces)) for c, pieces in enumerate(shards.pieces)))


def moves_between(src: Shards, dst: Shards) -> tuple[Move, ...]:
    """Every source piece against every destination piece."""
    return tuple(
        Move(a, i, b, j, common)
        for b, wanted in enumerate(dst.pieces)
        for j, to in enumerate(wanted)
        for a, held in enumerate(src.pieces)
        for i, of in enumerate(held)
        if (common := of.region.intersect(to.region)) is not None
    )


def retensor(plan: Plan, role: Role, change: Callable[[LocalTensor], LocalTensor], *, source: bool) -> Plan:
    """Another name, shape or dtype for the tensors that a role lies in, on one side; moves stay."""
    templates = list(plan.templates)
    for index in {plan.bundles[i].template for i in bundles_of(plan, role)}:
        template = templates[index]
        shards = template.src if source else template.dst
        pieces = tuple(tuple(replace(p, tensor=change(p.tensor)) for p in held) for held in shards.pieces)
        padding = tuple(tuple(replace(p, tensor=change(p.tensor)) for p in held) for held in shards.padding)
        shards = Shards(pieces, padding)
        templates[index] = replace(template, src=shards) if source else replace(template, dst=shards)
    return replace(plan, templates=tuple(templates))


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
