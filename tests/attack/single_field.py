"""Random single-field damage to a good plan: one number, name or entry of one record is other than it was.

`mutants(plan, seed)` yields them without end. The record, the field and the new value are drawn at random; what is
drawn may change nothing that matters, which is for the simulator to say.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from mcore_reshard.planner.layout.geometry import LocalTensor, Piece, Region
from mcore_reshard.planner.layout.partitions import Padding, Shards
from mcore_reshard.planner.plan.plan import Bundle, BundleLayer, Holding, Move, Plan, Template, UnplannedGroup

T = TypeVar("T")


@dataclass(frozen=True)
class Mutant:
    """A damaged plan, and the field that differs, e.g. `Piece.origin`."""

    field: str
    plan: Plan
    change: str


def mutants(plan: Plan, seed: int) -> Iterator[Mutant]:
    """Damaged plans without end. Draws that change nothing, or that no record can hold, are drawn again."""
    rng = random.Random(seed)
    kinds: list[Callable[[Plan, random.Random], Mutant | None]] = [
        _move, _piece, _piece, _piece, _tensor, _padding, _bundle, _bundle, _layer, _holding, _route, _group, _mesh,
    ]  # fmt: skip
    kinds += [_pair] * (3 if plan.pairs else 0) + [_cast] * (2 if plan.casts else 0)
    while True:
        try:
            mutant = rng.choice(kinds)(plan, rng)
        except ValueError:
            continue
        if mutant is not None:
            yield mutant


def _nudge(rng: random.Random, value: int) -> int:
    return value + rng.choice((-2, -1, 1, 2, rng.randint(-16, 64)))


def _nudge_one(rng: random.Random, values: tuple[int, ...]) -> tuple[int, ...]:
    """One entry other, two entries exchanged, or one entry more or less."""
    if not values:
        return (rng.randint(0, 2),)
    at = rng.randrange(len(values))
    match rng.randrange(6):
        case 0:
            other = rng.randrange(len(values))
            swapped = list(values)
            swapped[at], swapped[other] = swapped[other], swapped[at]
            return tuple(swapped)
        case 1:
            return values[:at] + values[at + 1 :]
        case _:
            return _put(values, at, _nudge(rng, values[at]))


def _region(rng: random.Random, region: Region) -> Region:
    match rng.randrange(3):
        case 0:
            return Region(_nudge_one(rng, region.start), region.stop)
        case 1:
            return Region(region.start, _nudge_one(rng, region.stop))
    dim = rng.randrange(max(1, len(region.start)))
    by = _nudge(rng, 0)
    return region.within(dim, region.start[dim] + by, region.stop[dim] + by)


def _put(items: tuple[T, ...], at: int, item: T) -> tuple[T, ...]:
    return (*items[:at], item, *items[at + 1 :])


def _without(items: tuple[T, ...], at: int) -> tuple[T, ...]:
    return items[:at] + items[at + 1 :]


def _changed(rng: random.Random, record: Any, field: str, value: Any) -> tuple[Any, str]:
    if value == getattr(record, field):
        raise ValueError("no change")
    return replace(record, **{field: value}), f"{getattr(record, field)} -> {value}"


def _pick_template(plan: Plan, rng: random.Random) -> tuple[int, Template]:
    index = rng.randrange(len(plan.templates))
    return index, plan.templates[index]


def _with_template(plan: Plan, index: int, template: Template) -> Plan:
    return replace(plan, templates=_put(plan.templates, index, template))


def _move(plan: Plan, rng: random.Random) -> Mutant | None:
    index, template = _pick_template(plan, rng)
    at = rng.randrange(len(template.moves))
    move: Move = template.moves[at]
    field = rng.choice(("src", "src_piece", "dst", "dst_piece", "region", "absent", "twice", "order"))
    if field == "absent":
        moves, change = _without(template.moves, at), str(move)
    elif field == "twice":
        moves, change = (*template.moves[: at + 1], *template.moves[at:]), str(move)
    elif field == "order":
        moves, change = tuple(rng.sample(template.moves, len(template.moves))), "shuffled"
    else:
        old = getattr(move, field)
        new = _region(rng, old) if field == "region" else _nudge(rng, old)
        changed, change = _changed(rng, move, field, new)
        moves = _put(template.moves, at, changed)
    return Mutant(f"Move.{field}", _with_template(plan, index, replace(template, moves=moves)), change)


def _pick_piece(template: Template, rng: random.Random) -> tuple[str, int, int, Piece] | None:
    side = rng.choice(("src", "dst"))
    shards: Shards = getattr(template, side)
    shard = rng.randrange(len(shards.pieces))
    if not shards.pieces[shard]:
        return None
    at = rng.randrange(len(shards.pieces[shard]))
    return side, shard, at, shards.pieces[shard][at]


def _with_piece(template: Template, side: str, shard: int, at: int, piece: Piece | None) -> Template:
    shards: Shards = getattr(template, side)
    held = shards.pieces[shard]
    held = _without(held, at) if piece is None else _put(held, at, piece)
    changed: Template = replace(template, **{side: replace(shards, pieces=_put(shards.pieces, shard, held))})
    return changed


def _piece(plan: Plan, rng: random.Random) -> Mutant | None:
    index, template = _pick_template(plan, rng)
    picked = _pick_piece(template, rng)
    if picked is None:
        return None
    side, shard, at, piece = picked
    field = rng.choice(("region", "origin", "origin", "dims", "dims", "view", "slot_dim", "absent"))
    if field == "absent":
        return Mutant(
            "Piece.absent", _with_template(plan, index, _with_piece(template, side, shard, at, None)), str(piece)
        )
    value: Any
    if field == "region":
        value = _region(rng, piece.region)
    elif field == "slot_dim":
        value = rng.randrange(-1, len(piece.view))
    elif field == "dims" and rng.randrange(2):
        value = tuple(rng.sample(piece.dims, len(piece.dims)))
    elif field == "view" and rng.randrange(2):
        value = tuple(rng.sample(piece.view, len(piece.view)))
    else:
        value = _nudge_one(rng, getattr(piece, field))
    changed, change = _changed(rng, piece, field, value)
    where = f"{side} {shard} {piece.tensor.name} {change}"
    return Mutant(f"Piece.{field}", _with_template(plan, index, _with_piece(template, side, shard, at, changed)), where)


def _other_tensor(plan: Plan, rng: random.Random, tensor: LocalTensor) -> tuple[str, LocalTensor, str]:
    field = rng.choice(("name", "shape", "dtype"))
    value: Any
    if field == "name":
        names = sorted({p.tensor.name for t in plan.templates for s in (t.src, t.dst) for h in s.pieces for p in h})
        value = rng.choice(
            (rng.choice(names), tensor.name.replace("{layer}", "0"), tensor.name.replace("{expert}", "1"),
             tensor.name.replace("{vp}", "0"), tensor.name + "_")
        )  # fmt: skip
    elif field == "dtype":
        value = rng.choice(("float32", "float16", "uint8", "complex128"))
    else:
        value = (
            tuple(rng.sample(tensor.shape, len(tensor.shape))) if rng.randrange(2) else _nudge_one(rng, tensor.shape)
        )
    changed, change = _changed(rng, tensor, field, value)
    return field, changed, change


def _tensor(plan: Plan, rng: random.Random) -> Mutant | None:
    index, template = _pick_template(plan, rng)
    picked = _pick_piece(template, rng)
    if picked is None:
        return None
    side, shard, at, piece = picked
    field, tensor, change = _other_tensor(plan, rng, piece.tensor)
    changed = replace(piece, tensor=tensor)
    return Mutant(
        f"LocalTensor.{field}", _with_template(plan, index, _with_piece(template, side, shard, at, changed)), change
    )


def _padding(plan: Plan, rng: random.Random) -> Mutant | None:
    padded = [
        (index, side, shard, at)
        for index, template in enumerate(plan.templates)
        for side in ("src", "dst")
        for shard, row in enumerate(getattr(template, side).padding)
        for at in range(len(row))
    ]
    if not padded:
        return None
    index, side, shard, at = rng.choice(padded)
    shards: Shards = getattr(plan.templates[index], side)
    padding: Padding = shards.padding[shard][at]
    field = rng.choice(("box", "tensor", "absent"))
    if field == "absent":
        row, change = _without(shards.padding[shard], at), str(padding)
    elif field == "box":
        changed, change = _changed(rng, padding, "box", _region(rng, padding.box))
        row = _put(shards.padding[shard], at, changed)
    else:
        _, tensor, change = _other_tensor(plan, rng, padding.tensor)
        row = _put(shards.padding[shard], at, replace(padding, tensor=tensor))
    shards = replace(shards, padding=_put(shards.padding, shard, row))
    template: Template = replace(plan.templates[index], **{side: shards})
    return Mutant(f"Padding.{field}", _with_template(plan, index, template), f"{side} {shard} {change}")


def _bundle(plan: Plan, rng: random.Random) -> Mutant | None:
    at = rng.randrange(len(plan.bundles))
    bundle: Bundle = plan.bundles[at]
    field = rng.choice(
        ("group", "template", "pp_stage", "src", "dst", "layers", "experts", "src_slot", "dst_slot", "rotation",
         "absent", "twice", "order")
    )  # fmt: skip
    if field == "absent":
        return Mutant("Bundle.absent", replace(plan, bundles=_without(plan.bundles, at)), str(bundle))
    if field == "twice":
        return Mutant("Bundle.twice", replace(plan, bundles=(*plan.bundles[: at + 1], *plan.bundles[at:])), str(bundle))
    if field == "order":
        return Mutant(
            "Bundle.order", replace(plan, bundles=tuple(rng.sample(plan.bundles, len(plan.bundles)))), "shuffled"
        )
    value: Any
    if field == "layers":
        place = rng.randrange(len(bundle.layers))
        value = rng.choice(
            (_without(bundle.layers, place), (*bundle.layers, bundle.layers[place]), tuple(reversed(bundle.layers)))
        )
    elif field == "experts":
        value = _nudge_one(rng, bundle.experts)
        if len(value) != 2:
            return None
    elif field in {"group", "template", "src", "dst"}:
        table: tuple[Any, ...] = getattr(plan, {"group": "groups", "template": "templates"}.get(field, "holdings"))
        value = rng.randrange(-1, len(table) + 1)
    else:
        value = _nudge(rng, getattr(bundle, field))
    changed, change = _changed(rng, bundle, field, value)
    return Mutant(f"Bundle.{field}", replace(plan, bundles=_put(plan.bundles, at, changed)), change)


def _layer(plan: Plan, rng: random.Random) -> Mutant | None:
    at = rng.randrange(len(plan.bundles))
    bundle = plan.bundles[at]
    place = rng.randrange(len(bundle.layers))
    layer: BundleLayer = bundle.layers[place]
    field = rng.choice(("layer", "vp_stage", "src_local", "dst_local"))
    changed, change = _changed(rng, layer, field, _nudge(rng, getattr(layer, field)))
    bundle = replace(bundle, layers=_put(bundle.layers, place, changed))
    return Mutant(f"BundleLayer.{field}", replace(plan, bundles=_put(plan.bundles, at, bundle)), change)


def _holding(plan: Plan, rng: random.Random) -> Mutant | None:
    at = rng.randrange(len(plan.holdings))
    ranks = plan.holdings[at].ranks.copy()
    a, b = ((rng.randrange(ranks.shape[0]), rng.randrange(ranks.shape[1])) for _ in range(2))
    field = rng.choice(("rank", "exchanged", "transposed", "row absent", "column absent", "reshaped"))
    match field:
        case "rank":
            ranks[a] = _nudge(rng, int(ranks[a]))
        case "exchanged":
            ranks[a], ranks[b] = ranks[b], ranks[a]
        case "transposed":
            ranks = ranks.T.copy()
        case "row absent":
            ranks = ranks[:-1].copy()
        case "column absent":
            ranks = ranks[:, :-1].copy()
        case _:
            ranks = ranks.reshape(1, -1).copy()
    if ranks.shape == plan.holdings[at].ranks.shape and (ranks == plan.holdings[at].ranks).all():
        return None
    change = f"{plan.holdings[at].ranks.tolist()} -> {ranks.tolist()}"
    return Mutant(f"Holding.{field}", replace(plan, holdings=_put(plan.holdings, at, Holding(ranks))), change)


def _route(plan: Plan, rng: random.Random) -> Mutant | None:
    """A group loses its route, gets a second one, or is left out of the refit."""
    group = rng.randrange(len(plan.groups))
    kept = tuple(bundle for bundle in plan.bundles if bundle.group != group)
    entry = (UnplannedGroup(group, "a reason"),)
    match rng.randrange(5):
        case 0:
            return Mutant("routes.none", _with_routes(plan, group, kept, (), ()), plan.groups[group].pattern)
        case 1:
            return Mutant("routes.misc too", replace(plan, misc=(*plan.misc, *entry)), plan.groups[group].pattern)
        case 2:
            return Mutant("routes.excluded", _with_routes(plan, group, kept, (), entry), plan.groups[group].pattern)
        case 3:
            return Mutant(
                "routes.excluded too", replace(plan, excluded=(*plan.excluded, *entry)), plan.groups[group].pattern
            )
    stray = (UnplannedGroup(rng.choice((-1, len(plan.groups))), "a reason"),)
    return Mutant("routes.of no group", replace(plan, misc=(*plan.misc, *stray)), str(stray))


def _with_routes(plan: Plan, group: int, bundles: Any, misc: Any, excluded: Any) -> Plan:
    return replace(
        plan,
        bundles=bundles,
        misc=(*(u for u in plan.misc if u.group != group), *misc),
        excluded=(*(u for u in plan.excluded if u.group != group), *excluded),
    )


def _group(plan: Plan, rng: random.Random) -> Mutant | None:
    at = rng.randrange(len(plan.groups))
    group = plan.groups[at]
    field = rng.choice(("pattern", "shape", "view", "layers", "experts", "dtype"))
    value: Any
    if field == "pattern":
        value = rng.choice(plan.groups).pattern
    elif field == "layers":
        value = _nudge_one(rng, group.layers)
    elif field == "experts":
        value = _nudge(rng, group.experts)
    elif field == "dtype":
        value = rng.choice(("float32", "float16", "bfloat16"))
    elif field == "shape":
        value = tuple(rng.sample(group.shape, len(group.shape)))
    else:
        value = tuple(rng.sample(group.view, len(group.view)))
    if value == getattr(group, field):
        return None
    changed, change = _changed(rng, group, field, value)
    if field == "shape":
        changed = replace(changed, view=())
    return Mutant(f"Group.{field}", replace(plan, groups=_put(plan.groups, at, changed)), f"{group.pattern} {change}")


def _pair(plan: Plan, rng: random.Random) -> Mutant | None:
    at = rng.randrange(len(plan.pairs))
    pair = plan.pairs[at]
    field = rng.choice(("weight", "scales", "block", "touched", "exchanged", "absent"))
    if field == "touched":
        flipped = replace(pair, touched=not pair.touched)
        return Mutant("Pair.touched", replace(plan, pairs=_put(plan.pairs, at, flipped)), str(flipped))
    if field == "absent":
        return Mutant("Pair.absent", replace(plan, pairs=_without(plan.pairs, at)), str(pair))
    if field == "exchanged":
        other = rng.randrange(len(plan.pairs))
        changed, change = _changed(rng, pair, "scales", plan.pairs[other].scales)
        pairs = _put(_put(plan.pairs, at, changed), other, replace(plan.pairs[other], scales=pair.scales))
        return Mutant("Pair.exchanged", replace(plan, pairs=pairs), change)
    value: Any = _nudge_one(rng, pair.block) if field == "block" else rng.randrange(-1, len(plan.groups) + 1)
    if field == "block" and len(value) != 2:
        return None
    changed, change = _changed(rng, pair, field, value)
    return Mutant(f"Pair.{field}", replace(plan, pairs=_put(plan.pairs, at, changed)), change)


def _cast(plan: Plan, rng: random.Random) -> Mutant | None:
    at = rng.randrange(len(plan.casts))
    cast = plan.casts[at]
    field = rng.choice(("group", "src", "dst", "absent", "twice"))
    if field == "absent":
        return Mutant("GroupCast.absent", replace(plan, casts=_without(plan.casts, at)), str(cast))
    if field == "twice":
        return Mutant("GroupCast.twice", replace(plan, casts=(*plan.casts, cast)), str(cast))
    dtypes = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float64")
    value = rng.randrange(-1, len(plan.groups) + 1) if field == "group" else rng.choice(dtypes)
    changed, change = _changed(rng, cast, field, value)
    return Mutant(f"GroupCast.{field}", replace(plan, casts=_put(plan.casts, at, changed)), change)


def _mesh(plan: Plan, rng: random.Random) -> Mutant | None:
    side = rng.choice(("train", "gen"))
    mesh = getattr(plan, side)
    axes = [axis for axis in mesh.__dataclass_fields__ if axis != "layers"]
    axis = rng.choice(axes)
    changed, change = _changed(rng, mesh, axis, rng.choice((1, 2, 4, 8)))
    if changed == mesh:
        return None
    return Mutant(f"{side} mesh.{axis}", replace(plan, **{side: changed}), change)
