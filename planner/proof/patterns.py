"""The proof of what is said once and shared: references, routes, cuts and the moves between them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from math import prod
from string import Formatter
from typing import NamedTuple

from mcore_reshard.planner.layout.engines import Transposed, UnknownEngineError, engine_named
from mcore_reshard.planner.layout.geometry import Piece, Region
from mcore_reshard.planner.layout.partitions import Shards
from mcore_reshard.planner.model.parameters import ITEMSIZE, ParameterGroup, Role
from mcore_reshard.planner.plan.plan import Bundle, GroupCast, Plan, Template

from .quantized import check_pair_references
from .report import Violation, all_ranks, bundle_name, bundle_ranks
from .storage import MEGATRON, sections_fault, shared_name_fault, storage_fault
from .tiling import tiling_fault


class Fault(NamedTuple):
    """A violation of a template, before it is said for which parameter; shards are None where all are meant."""

    rule: str
    src_shard: int | None
    dst_shard: int | None
    message: str


def _ends(shard: int, is_src: bool) -> tuple[int | None, int | None]:
    """(source shard, destination shard) of what concerns one end."""
    return (shard, None) if is_src else (None, shard)


# --- references


def check_references(plan: Plan) -> Iterator[Violation]:
    """Indices, names of layers and experts, and pieces are such that everything else can be evaluated."""
    try:
        engine_named(plan.engine)
    except UnknownEngineError as error:
        yield Violation("references", "all parameters", all_ranks(plan), str(error))
    checked: set[tuple[int, int, int]] = set()
    for index, bundle in enumerate(plan.bundles):
        if message := _dangling(plan, bundle):
            yield Violation("references", f"bundle {index}", all_ranks(plan), message)
            continue
        group = plan.groups[bundle.group]
        messages = [*_member_faults(bundle, group)]
        key = (bundle.template, len(plan.holdings[bundle.src].ranks), len(plan.holdings[bundle.dst].ranks))
        if key not in checked:
            messages += _shard_faults(plan, bundle)
            checked.add(key)
        for message in messages:
            yield Violation("references", group.pattern, bundle_ranks(plan, bundle), message)
    for entry in (*plan.misc, *plan.excluded):
        if not 0 <= entry.group < len(plan.groups):
            message = f"group {entry.group} does not exist, the plan has {len(plan.groups)}"
            yield Violation("references", f"group {entry.group}", all_ranks(plan), message)
    yield from check_pair_references(plan)


def _dangling(plan: Plan, bundle: Bundle) -> str:
    for what, number, size in (
        ("group", bundle.group, len(plan.groups)),
        ("template", bundle.template, len(plan.templates)),
        ("source holding", bundle.src, len(plan.holdings)),
        ("destination holding", bundle.dst, len(plan.holdings)),
    ):
        if not 0 <= number < size:
            return f"{what} {number} does not exist, the plan has {size}"
    for what, holding in (("source", bundle.src), ("destination", bundle.dst)):
        ranks = plan.holdings[holding].ranks
        if ranks.ndim != 2 or not ranks.size:
            return f"{what} ranks of shape {ranks.shape} are not [shards, replicas]"
    return ""


def _member_faults(bundle: Bundle, group: ParameterGroup) -> Iterator[str]:
    layers = [at.layer for at in bundle.layers]
    if not layers or len(set(layers)) != len(layers) or not set(layers) <= set(group.layers or (-1,)):
        yield f"layers {layers} are not layers of {group.layers or 'no layer'}, once each"
    low, high = bundle.experts
    if not (0 <= low < high <= group.experts if group.experts else (low, high) == (0, 0)):
        yield f"experts [{low}, {high}) are not among {group.experts}"


def _shard_faults(plan: Plan, bundle: Bundle) -> Iterator[str]:
    template = plan.templates[bundle.template]
    for side, shards, holding in (("source", template.src, bundle.src), ("destination", template.dst, bundle.dst)):
        rows = len(plan.holdings[holding].ranks)
        if len(shards.pieces) != rows:
            yield f"{side} has {len(shards.pieces)} shards for {rows} rows of ranks"
        if shards.padding and len(shards.padding) != len(shards.pieces):
            yield f"{side} has {len(shards.pieces)} shards, and padding for {len(shards.padding)}"
    for number, move in enumerate(template.moves):
        ends = ((template.src, move.src, move.src_piece), (template.dst, move.dst, move.dst_piece))
        if any(not 0 <= c < len(s.pieces) or not 0 <= p < len(s.pieces[c]) for s, c, p in ends):
            yield f"move {number} names a piece that does not exist"


# --- pieces


def check_pieces(plan: Plan) -> Iterator[Violation]:
    """Pieces lie inside of their parameter and of their tensor, and so does padding; dtypes are known."""
    for index, bundle in _first_uses(plan):
        template, view = plan.templates[index], plan.groups[bundle.group].view
        for shards, is_src in ((template.src, True), (template.dst, False)):
            for shard, message in _placing_faults(shards, Region.whole(view)):
                where = bundle_ranks(plan, bundle, *_ends(shard, is_src))
                yield Violation("bounds", bundle_name(plan, bundle), where, message)


def _placing_faults(shards: Shards, whole: Region) -> Iterator[tuple[int, str]]:
    for shard, pieces in enumerate(shards.pieces):
        for piece in pieces:
            if message := _piece_fault(piece, whole):
                yield shard, message
    for shard, padding in enumerate(shards.padding):
        for entry in padding:
            shape = entry.tensor.shape
            fits = len(entry.box.start) == len(shape) and min(shape, default=1) > 0
            if not fits or not Region.whole(shape).contains(entry.box):
                yield shard, f"padding {entry.box} is outside of {entry.tensor.name} {shape}"


def _piece_fault(piece: Piece, whole: Region) -> str:
    tensor, view = piece.tensor, piece.view
    if tensor.dtype not in ITEMSIZE:
        return f"{tensor.name} has the unknown dtype {tensor.dtype!r}"
    if len(piece.region.start) != len(whole.start) or not whole.contains(piece.region):
        return f"region {piece.region} of {tensor.name} is outside of the parameter {whole}"
    if not piece.region.elements:
        return f"region {piece.region} of {tensor.name} is empty"
    if min(view + tensor.shape, default=1) < 1 or prod(view) != prod(tensor.shape):
        return f"view {view} of {tensor.name} does not factor its shape {tensor.shape}"
    if len(set(piece.dims)) != len(piece.dims) or not all(0 <= dim < len(view) for dim in piece.dims):
        return f"dims {piece.dims} of {tensor.name} do not fit its view {view}"
    if not -1 <= piece.slot_dim < len(view) or piece.slot_dim in piece.dims:
        return f"experts follow each other along dim {piece.slot_dim} of {tensor.name} {view}, which is not their own"
    if min(piece.origin, default=0) < 0 or not Region.whole(view).contains(piece.local()):
        return f"origin {piece.origin} puts {piece.region.extents} outside of {tensor.name} {view}"
    return ""


# --- routes


def check_groups(plan: Plan) -> Iterator[Violation]:
    """Every parameter is listed once and has exactly one route; only prediction layers may be left out."""
    routes: dict[int, Counter[str]] = defaultdict(Counter)
    for bulk in {bundle.group for bundle in plan.bundles}:
        routes[bulk]["bulk"] = 1
    for name, unplanned in (("misc", plan.misc), ("excluded", plan.excluded)):
        for entry in unplanned:
            routes[entry.group][name] += 1
            if not entry.reason:
                yield _group_violation(plan, entry.group, f"{name} without a reason")
    for entry in plan.excluded:
        if not plan.groups[entry.group].mtp:
            message = f"left out ({entry.reason}), but only multi-token prediction may be"
            yield _group_violation(plan, entry.group, message)
    listed: dict[str, set[int]] = defaultdict(set)
    for index, group in enumerate(plan.groups):
        if routes[index].total() != 1:
            found = " and ".join(sorted(routes[index].elements())) or "by no route"
            yield _group_violation(plan, index, f"travels {found}; every parameter has exactly one route")
        layers = set(group.layers or (-1,))
        if len(layers) < len(group.layers) or layers & listed[group.pattern]:
            yield _group_violation(plan, index, "the plan lists the same parameter twice")
        listed[group.pattern] |= layers


def _group_violation(plan: Plan, group: int, message: str) -> Violation:
    return Violation("groups", plan.groups[group].pattern, all_ranks(plan), message)


# --- templates


def check_templates(plan: Plan) -> Iterator[Violation]:
    """Cuts tile the parameter, moves tile the destination, and both lie in storage as declared."""
    serves: dict[tuple[bool, str], set[Role]] = defaultdict(set)
    casts, scales = {cast.group: cast for cast in plan.casts}, {pair.scales for pair in plan.pairs}
    transposed = engine_named(plan.engine).transposed
    for index, bundle in _first_uses(plan):
        group = plan.groups[bundle.group]
        for is_src, shards in ((True, plan.templates[index].src), (False, plan.templates[index].dst)):
            for name in {piece.tensor.name for pieces in shards.pieces for piece in pieces}:
                before = shared_name_fault(serves[is_src, name])
                serves[is_src, name].add(group.role)
                if not before and (message := shared_name_fault(serves[is_src, name])):
                    where = bundle_ranks(plan, bundle)
                    yield Violation("names", bundle_name(plan, bundle), where, f"{name} {message}")
        faults = [*_move_faults(plan.templates[index], casts.get(bundle.group))]
        if bundle.group not in scales:  # those lie as their weights do, which is checked of pairs
            faults += _storage_faults(plan.templates[index], group, transposed)
        for fault in (*_template_faults(plan.templates[index], group, bundle.group in scales), *faults):
            where = bundle_ranks(plan, bundle, fault.src_shard, fault.dst_shard)
            yield Violation(fault.rule, bundle_name(plan, bundle), where, fault.message)


def _first_uses(plan: Plan) -> Iterator[tuple[int, Bundle]]:
    """Each template with the first bundle of each way of using it (shape, role, in layers or not, experts or not, cast)."""
    seen: set[object] = set()
    casts, scales = {cast.group: cast for cast in plan.casts}, {pair.scales for pair in plan.pairs}
    for bundle in plan.bundles:
        group, cast = plan.groups[bundle.group], casts.get(bundle.group)
        use = (bundle.template, group.view, group.role, bool(group.layers), bool(group.experts),
               cast and (cast.src, cast.dst), bundle.group in scales)  # fmt: skip
        if use not in seen:
            seen.add(use)
            yield bundle.template, bundle


def _template_faults(template: Template, group: ParameterGroup, is_scales: bool) -> Iterator[Fault]:
    whole = Region.whole(group.view)
    if message := tiling_fault(whole, [piece.region for pieces in template.src.pieces for piece in pieces]):
        yield Fault("source", None, None, f"source shards do not tile the parameter {whole}: {message}")
    wanted = list({piece.region: None for pieces in template.dst.pieces for piece in pieces})
    if not is_scales and (message := tiling_fault(whole, wanted)):  # of scales the proof of pairs knows who wants which
        yield Fault("consumed", None, None, f"destination shards do not tile the parameter {whole}: {message}")
    for shards, is_src in ((template.src, True), (template.dst, False)):
        for shard, pieces in enumerate(shards.pieces):
            for message in _name_faults(pieces, group, is_src):
                yield Fault("names", *_ends(shard, is_src), message)
        if sections := sections_fault(shards.pieces, group.role, is_src):
            shard, message = sections
            yield Fault("order", *_ends(shard, is_src), message)
        for shard, rule, message in _shards_faults(shards, is_scales):
            yield Fault(rule, *_ends(shard, is_src), message)


def _storage_faults(template: Template, group: ParameterGroup, engine: Transposed) -> Iterator[Fault]:
    for shards, is_src in ((template.src, True), (template.dst, False)):
        for shard, pieces in enumerate(shards.pieces):
            for piece in pieces:
                if message := storage_fault(piece, group.role, MEGATRON if is_src else engine):
                    yield Fault("storage", *_ends(shard, is_src), message)


def _move_faults(template: Template, cast: GroupCast | None) -> Iterator[Fault]:
    arriving: dict[tuple[int, int], list[Region]] = defaultdict(list)
    for move in template.moves:
        held = template.src.pieces[move.src][move.src_piece].region
        src = template.src.pieces[move.src][move.src_piece].tensor
        dst = template.dst.pieces[move.dst][move.dst_piece].tensor
        if len(move.region.start) != len(held.start) or not held.contains(move.region):
            yield Fault("cover", move.src, move.dst, f"{move.region} is sent by a shard that holds {held}")
        if not move.region.elements:
            yield Fault("cover", move.src, move.dst, f"{move.region} is empty")
        if src.dtype != dst.dtype if cast is None else (src.dtype, dst.dtype) != (cast.src, cast.dst):
            declared = f"the cast declared is from {cast.src} to {cast.dst}" if cast else "no cast is declared"
            message = f"{src.name} is {src.dtype}, {dst.name} is {dst.dtype}, and {declared}"
            yield Fault("bytes", move.src, move.dst, message)
        arriving[move.dst, move.dst_piece].append(move.region)
    for shard, pieces in enumerate(template.dst.pieces):
        for number, piece in enumerate(pieces):
            if message := tiling_fault(piece.region, arriving[shard, number]):
                yield Fault("cover", None, shard, f"{piece.region} is not written exactly once: {message}")


def _name_faults(pieces: tuple[Piece, ...], group: ParameterGroup, is_src: bool) -> Iterator[str]:
    """A tensor's name varies with what it belongs to: chunk (in the trainer), layer and, unless stacked, expert."""
    for name, stacked in dict.fromkeys((piece.tensor.name, piece.slot_dim >= 0) for piece in pieces):
        try:
            fields = {field for _, field, _, _ in Formatter().parse(name) if field is not None}
        except ValueError as error:
            yield f"{name!r} is no pattern: {error}"
            continue
        wanted = {"vp"} if is_src else set()
        if group.layers:
            wanted.add("layer")
        if group.experts and not stacked:
            wanted.add("expert")
        if stacked and not group.experts:
            yield f"{name} stacks experts, {group.pattern} has none"
        if fields != wanted:
            yield f"{name} varies with {sorted(fields) or 'nothing'}, must vary with {sorted(wanted) or 'nothing'}"


def _shards_faults(shards: Shards, padded_each: bool) -> Iterator[tuple[int, str, str]]:
    """(shard, rule, message): shards have the same tensors, ascend, are replicated alike, and only the last are padded.

    `padded_each`: tensors of scales may be padded on every rank.
    """
    filled = [(shard, pieces) for shard, pieces in enumerate(shards.pieces) if pieces]
    tensors = {piece.tensor.name: piece.tensor for _, pieces in filled for piece in pieces}
    for (before, held), (shard, pieces) in pairwise(filled):
        if {piece.tensor for piece in pieces} != {piece.tensor for piece in held}:
            message = f"shards {before} and {shard} lie in different tensors: {_tensors(held)} and {_tensors(pieces)}"
            yield shard, "names", message
        matched = len(held) == len(pieces)
        for low, high in zip(held, pieces, strict=True) if matched else [(held[0], pieces[0])]:
            if low.region.start > high.region.start:
                yield shard, "order", f"shard {shard} holds {high.region}, shard {before} before it {low.region}"
    for shard, pieces in filled:
        if message := _experts_fault(pieces):
            yield shard, "order", message
    for shard, padding in enumerate(shards.padding):
        for entry in padding:
            if tensors.setdefault(entry.tensor.name, entry.tensor) != entry.tensor:
                yield shard, "names", f"padding is of {entry.tensor}, pieces are of {tensors[entry.tensor.name]}"
        if padding and not padded_each and any(shards.pieces[shard + 1 :]):
            yield shard, "order", f"shard {shard} is padded, but later shards still hold parts of the parameter"
    copies = Counter(pieces[0].region for _, pieces in filled)
    if len(set(copies.values())) > 1:
        uneven = ", ".join(f"{region} by {count}" for region, count in list(copies.items())[:4])
        yield 0, "order", f"regions are held by unequal numbers of shards: {uneven}"


def _experts_fault(pieces: tuple[Piece, ...]) -> str:
    """Where one parameter holds all experts, each with a tensor of its own: experts ascend with the tensors' numbers."""
    held = {piece.tensor.name: piece.region for piece in pieces}
    if len(held) == 1:
        return ""
    for piece in pieces:
        if piece.region.start[0] != held[piece.tensor.name].start[0]:
            return f"{piece.tensor.name} holds parts of experts {piece.region.start[0]} and {held[piece.tensor.name].start[0]}"
    numbered = sorted(held, key=lambda name: [int(part) if part.isdigit() else 0 for part in re.split(r"(\d+)", name)])
    by_expert = sorted(held, key=lambda name: held[name].start[0])
    wrong = next((names for names in zip(numbered, by_expert, strict=True) if names[0] != names[1]), None)
    return f"experts of {wrong[0]} and {wrong[1]} lie in each other's place" if wrong else ""


def _tensors(pieces: tuple[Piece, ...]) -> str:
    return ", ".join(sorted({f"{p.tensor.name} {p.tensor.shape} {p.tensor.dtype}" for p in pieces}))
