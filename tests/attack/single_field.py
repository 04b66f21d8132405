"""Random single-field damage to a good plan: one number, name or entry of one record is other than it was.

`mutants(plan, seed)` yields them without end. The record, the field and the new value are drawn at random. A draw may
change nothing that matters; the simulator decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from mcore_reshard.planner.layout.geometry import LocalTensor, Piece, Region
from mcore_reshard.planner.layout.mesh import LayerPlace
from mcore_reshard.planner.layout.partitions import Padding, Partition
from mcore_reshard.planner.plan.plan import Overlap, Plan, TransferGroup, TransferPattern, UnplannedGroup

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
        _move, _piece, _piece, _piece, _tensor, _padding, _transfers_of, _transfers_of, _layer, _rank_grid, _route, _group, _mesh,
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


def _pick_pattern(plan: Plan, rng: random.Random) -> tuple[int, TransferPattern]:
    index = rng.randrange(len(plan.patterns))
    return index, plan.patterns[index]


def _with_pattern(plan: Plan, index: int, pattern: TransferPattern) -> Plan:
    return replace(plan, patterns=_put(plan.patterns, index, pattern))


def _move(plan: Plan, rng: random.Random) -> Mutant | None:
    index, pattern = _pick_pattern(plan, rng)
    at = rng.randrange(len(pattern.overlaps))
    overlap: Overlap = pattern.overlaps[at]
    field = rng.choice(("src", "src_piece", "dst", "dst_piece", "region", "absent", "twice", "order"))
    if field == "absent":
        overlaps, change = _without(pattern.overlaps, at), str(overlap)
    elif field == "twice":
        overlaps, change = (*pattern.overlaps[: at + 1], *pattern.overlaps[at:]), str(overlap)
    elif field == "order":
        overlaps, change = tuple(rng.sample(pattern.overlaps, len(pattern.overlaps))), "shuffled"
    else:
        old = getattr(overlap, field)
        new = _region(rng, old) if field == "region" else _nudge(rng, old)
        changed, change = _changed(rng, overlap, field, new)
        overlaps = _put(pattern.overlaps, at, changed)
    return Mutant(f"Overlap.{field}", _with_pattern(plan, index, replace(pattern, overlaps=overlaps)), change)


def _pick_piece(pattern: TransferPattern, rng: random.Random) -> tuple[str, int, int, Piece] | None:
    side = rng.choice(("src", "dst"))
    partition: Partition = getattr(pattern, side)
    part = rng.randrange(len(partition.pieces))
    if not partition.pieces[part]:
        return None
    at = rng.randrange(len(partition.pieces[part]))
    return side, part, at, partition.pieces[part][at]


def _with_piece(pattern: TransferPattern, side: str, part: int, at: int, piece: Piece | None) -> TransferPattern:
    partition: Partition = getattr(pattern, side)
    held = partition.pieces[part]
    held = _without(held, at) if piece is None else _put(held, at, piece)
    changed: TransferPattern = replace(pattern, **{side: replace(partition, pieces=_put(partition.pieces, part, held))})
    return changed


def _piece(plan: Plan, rng: random.Random) -> Mutant | None:
    index, pattern = _pick_pattern(plan, rng)
    picked = _pick_piece(pattern, rng)
    if picked is None:
        return None
    side, part, at, piece = picked
    field = rng.choice(("region", "origin", "origin", "dims", "dims", "view", "slot_dim", "absent"))
    if field == "absent":
        return Mutant(
            "Piece.absent", _with_pattern(plan, index, _with_piece(pattern, side, part, at, None)), str(piece)
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
    where = f"{side} {part} {piece.tensor.name} {change}"
    return Mutant(f"Piece.{field}", _with_pattern(plan, index, _with_piece(pattern, side, part, at, changed)), where)


def _other_tensor(plan: Plan, rng: random.Random, tensor: LocalTensor) -> tuple[str, LocalTensor, str]:
    field = rng.choice(("name", "shape", "dtype"))
    value: Any
    if field == "name":
        names = sorted({p.tensor.name for t in plan.patterns for s in (t.src, t.dst) for h in s.pieces for p in h})
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
    index, pattern = _pick_pattern(plan, rng)
    picked = _pick_piece(pattern, rng)
    if picked is None:
        return None
    side, part, at, piece = picked
    field, tensor, change = _other_tensor(plan, rng, piece.tensor)
    changed = replace(piece, tensor=tensor)
    return Mutant(
        f"LocalTensor.{field}",
        _with_pattern(plan, index, _with_piece(pattern, side, part, at, changed)),
        change,
    )


def _padding(plan: Plan, rng: random.Random) -> Mutant | None:
    padded = [
        (index, side, part, at)
        for index, pattern in enumerate(plan.patterns)
        for side in ("src", "dst")
        for part, row in enumerate(getattr(pattern, side).padding)
        for at in range(len(row))
    ]
    if not padded:
        return None
    index, side, part, at = rng.choice(padded)
    partition: Partition = getattr(plan.patterns[index], side)
    padding: Padding = partition.padding[part][at]
    field = rng.choice(("box", "tensor", "absent"))
    if field == "absent":
        row, change = _without(partition.padding[part], at), str(padding)
    elif field == "box":
        changed, change = _changed(rng, padding, "box", _region(rng, padding.box))
        row = _put(partition.padding[part], at, changed)
    else:
        _, tensor, change = _other_tensor(plan, rng, padding.tensor)
        row = _put(partition.padding[part], at, replace(padding, tensor=tensor))
    partition = replace(partition, padding=_put(partition.padding, part, row))
    pattern: TransferPattern = replace(plan.patterns[index], **{side: partition})
    return Mutant(f"Padding.{field}", _with_pattern(plan, index, pattern), f"{side} {part} {change}")


def _transfers_of(plan: Plan, rng: random.Random) -> Mutant | None:
    at = rng.randrange(len(plan.transfer_groups))
    transfers: TransferGroup = plan.transfer_groups[at]
    field = rng.choice(
        ("group", "pattern", "pp_stage", "src", "dst", "layers", "experts", "src_slot", "dst_slot", "first_src_replica",
         "absent", "twice", "order")
    )  # fmt: skip
    if field == "absent":
        return Mutant(
            "TransferGroup.absent",
            replace(plan, transfer_groups=_without(plan.transfer_groups, at)),
            str(transfers),
        )
    if field == "twice":
        return Mutant(
            "TransferGroup.twice",
            replace(plan, transfer_groups=(*plan.transfer_groups[: at + 1], *plan.transfer_groups[at:])),
            str(transfers),
        )
    if field == "order":
        return Mutant(
            "TransferGroup.order",
            replace(plan, transfer_groups=tuple(rng.sample(plan.transfer_groups, len(plan.transfer_groups)))),
            "shuffled",
        )
    value: Any
    if field == "layers":
        place = rng.randrange(len(transfers.layers))
        value = rng.choice(
            (
                _without(transfers.layers, place),
                (*transfers.layers, transfers.layers[place]),
                tuple(reversed(transfers.layers)),
            )
        )
    elif field == "experts":
        value = _nudge_one(rng, transfers.experts)
        if len(value) != 2:
            return None
    elif field in {"group", "pattern", "src", "dst"}:
        table: tuple[Any, ...] = getattr(plan, {"group": "groups", "pattern": "patterns"}.get(field, "rank_grids"))
        value = rng.randrange(-1, len(table) + 1)
    else:
        value = _nudge(rng, getattr(transfers, field))
    changed, change = _changed(rng, transfers, field, value)
    return Mutant(
        f"TransferGroup.{field}", replace(plan, transfer_groups=_put(plan.transfer_groups, at, changed)), change
    )


def _layer(plan: Plan, rng: random.Random) -> Mutant | None:
    at = rng.randrange(len(plan.transfer_groups))
    transfers = plan.transfer_groups[at]
    place = rng.randrange(len(transfers.layers))
    layer: LayerPlace = transfers.layers[place]
    field = rng.choice(("layer", "vp_stage", "local"))
    changed, change = _changed(rng, layer, field, _nudge(rng, getattr(layer, field)))
    transfers = replace(transfers, layers=_put(transfers.layers, place, changed))
    return Mutant(
        f"LayerPlace.{field}", replace(plan, transfer_groups=_put(plan.transfer_groups, at, transfers)), change
    )


def _rank_grid(plan: Plan, rng: random.Random) -> Mutant | None:
    at = rng.randrange(len(plan.rank_grids))
    ranks = plan.rank_grids[at].copy()
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
    if ranks.shape == plan.rank_grids[at].shape and (ranks == plan.rank_grids[at]).all():
        return None
    change = f"{plan.rank_grids[at].tolist()} -> {ranks.tolist()}"
    return Mutant(f"rank_grid.{field}", replace(plan, rank_grids=_put(plan.rank_grids, at, ranks)), change)


def _route(plan: Plan, rng: random.Random) -> Mutant | None:
    """A group loses its route, gets a second one, or is left out of the refit."""
    group = rng.randrange(len(plan.groups))
    kept = tuple(transfers for transfers in plan.transfer_groups if transfers.group != group)
    entry = (UnplannedGroup(group, "a reason"),)
    match rng.randrange(5):
        case 0:
            return Mutant("routes.none", _with_routes(plan, group, kept, (), ()), plan.groups[group].name_pattern)
        case 1:
            return Mutant("routes.misc too", replace(plan, misc=(*plan.misc, *entry)), plan.groups[group].name_pattern)
        case 2:
            return Mutant(
                "routes.excluded", _with_routes(plan, group, kept, (), entry), plan.groups[group].name_pattern
            )
        case 3:
            return Mutant(
                "routes.excluded too", replace(plan, excluded=(*plan.excluded, *entry)), plan.groups[group].name_pattern
            )
    stray = (UnplannedGroup(rng.choice((-1, len(plan.groups))), "a reason"),)
    return Mutant("routes.of no group", replace(plan, misc=(*plan.misc, *stray)), str(stray))


def _with_routes(plan: Plan, group: int, transfer_groups: Any, misc: Any, excluded: Any) -> Plan:
    return replace(
        plan,
        transfer_groups=transfer_groups,
        misc=(*(u for u in plan.misc if u.group != group), *misc),
        excluded=(*(u for u in plan.excluded if u.group != group), *excluded),
    )


def _group(plan: Plan, rng: random.Random) -> Mutant | None:
    at = rng.randrange(len(plan.groups))
    group = plan.groups[at]
    field = rng.choice(("name_pattern", "shape", "view", "layers", "experts", "dtype"))
    value: Any
    if field == "name_pattern":
        value = rng.choice(plan.groups).name_pattern
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
    return Mutant(
        f"Group.{field}", replace(plan, groups=_put(plan.groups, at, changed)), f"{group.name_pattern} {change}"
    )


def _pair(plan: Plan, rng: random.Random) -> Mutant | None:
    at = rng.randrange(len(plan.pairs))
    pair = plan.pairs[at]
    field = rng.choice(("weight", "scales", "block", "touched", "exchanged", "absent"))
    if field == "touched":
        flipped = replace(pair, touched=not pair.touched)
        return Mutant("QuantizedPair.touched", replace(plan, pairs=_put(plan.pairs, at, flipped)), str(flipped))
    if field == "absent":
        return Mutant("QuantizedPair.absent", replace(plan, pairs=_without(plan.pairs, at)), str(pair))
    if field == "exchanged":
        other = rng.randrange(len(plan.pairs))
        changed, change = _changed(rng, pair, "scales", plan.pairs[other].scales)
        pairs = _put(_put(plan.pairs, at, changed), other, replace(plan.pairs[other], scales=pair.scales))
        return Mutant("QuantizedPair.exchanged", replace(plan, pairs=pairs), change)
    value: Any = _nudge_one(rng, pair.block) if field == "block" else rng.randrange(-1, len(plan.groups) + 1)
    if field == "block" and len(value) != 2:
        return None
    changed, change = _changed(rng, pair, field, value)
    return Mutant(f"QuantizedPair.{field}", replace(plan, pairs=_put(plan.pairs, at, changed)), change)


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
