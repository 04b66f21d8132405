"""The proof of the shared records of a plan: references, routes, cuts and their overlaps."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from itertools import pairwise
from math import prod

from mcore_reshard.planner.layout.engines import Transposed, UnknownEngineError, engine_named
from mcore_reshard.planner.layout.geometry import Piece, Region
from mcore_reshard.planner.layout.partitions import Partition
from mcore_reshard.planner.model.name_patterns import places_in, require_tensor_pattern
from mcore_reshard.planner.model.parameters import ITEMSIZE, ParameterGroup, Role
from mcore_reshard.planner.plan.plan import GroupCast, Plan, TransferGroup, TransferPattern

from .quantized import check_pair_references
from .report import Violation, distinct, ranks_of
from .storage import MEGATRON, sections_fault, shared_name_fault, storage_fault
from .tiling import tiling_fault


def _sides(pattern: TransferPattern) -> tuple[tuple[Partition, bool], ...]:
    """Both partitions, and whether they are the source's."""
    return (pattern.src, True), (pattern.dst, False)


def _ends(part: int, is_src: bool) -> tuple[int | None, int | None]:
    """(source part, destination part) of a fault at one end."""
    return (part, None) if is_src else (None, part)


def check_references(plan: Plan) -> Iterator[Violation]:
    """Indices, names of layers and experts, and pieces are such that everything else can be evaluated."""
    try:
        engine_named(plan.engine)
    except UnknownEngineError as error:
        yield Violation.of_all(plan, "all parameters", "references", str(error))
    checked: set[tuple[int, int, int]] = set()
    for index, transfers in enumerate(plan.transfer_groups):
        if message := _dangling(plan, transfers):
            yield Violation.of_all(plan, f"transfer group {index}", "references", message)
            continue
        group = plan.groups[transfers.group]
        messages = [*_member_faults(transfers, group)]
        key = (transfers.pattern, len(plan.rank_grids[transfers.src]), len(plan.rank_grids[transfers.dst]))
        if key not in checked:
            messages += _part_faults(plan, transfers)
            checked.add(key)
        for message in messages:
            yield Violation("references", group.name_pattern, ranks_of(plan, transfers), message)
    for entry in (*plan.misc, *plan.excluded):
        if not 0 <= entry.group < len(plan.groups):
            message = f"group {entry.group} does not exist, the plan has {len(plan.groups)}"
            yield Violation.of_all(plan, f"group {entry.group}", "references", message)
    yield from check_pair_references(plan)
    yield from _check_frozen_references(plan)


def _check_frozen_references(plan: Plan) -> Iterator[Violation]:
    """Frozen layers are those of groups that travel, each once; a weight is frozen with its scales."""
    travels = {transfers.group for transfers in plan.transfer_groups} | {entry.group for entry in plan.misc}
    frozen: dict[int, tuple[int, ...]] = {}
    for entry in plan.frozen:
        layers = plan.groups[entry.group].layers or (-1,) if entry.group in travels else ()
        if entry.group in frozen or len(set(entry.layers)) < len(entry.layers) or not set(entry.layers) <= set(layers):
            message = f"layers {list(entry.layers)} are frozen, they are not layers of {list(layers)}, once each"
            yield Violation.of_all(plan, f"group {entry.group}", "references", message)
        frozen[entry.group] = entry.layers
    for pair in plan.pairs:
        if frozen.get(pair.weight) != frozen.get(pair.scales):
            message = f"weights {frozen.get(pair.weight, ())} and scales {frozen.get(pair.scales, ())} are frozen"
            yield Violation.of_all(plan, f"pair {pair.weight}, {pair.scales}", "references", message)


def _dangling(plan: Plan, transfers: TransferGroup) -> str:
    for what, number, size in (
        ("group", transfers.group, len(plan.groups)),
        ("pattern", transfers.pattern, len(plan.patterns)),
        ("source rank grid", transfers.src, len(plan.rank_grids)),
        ("destination rank grid", transfers.dst, len(plan.rank_grids)),
    ):
        if not 0 <= number < size:
            return f"{what} {number} does not exist, the plan has {size}"
    for what, grid in (("source", transfers.src), ("destination", transfers.dst)):
        ranks = plan.rank_grids[grid]
        if ranks.ndim != 2 or not ranks.size:
            return f"{what} ranks of shape {ranks.shape} are not [parts, replicas]"
    return ""


def _member_faults(transfers: TransferGroup, group: ParameterGroup) -> Iterator[str]:
    layers = [place.layer for place in transfers.layers]
    if not layers or len(set(layers)) != len(layers) or not set(layers) <= set(group.layers or (-1,)):
        yield f"layers {layers} are not layers of {group.layers or 'no layer'}, once each"
    start, stop = transfers.experts
    if not (0 <= start < stop <= group.experts if group.experts else (start, stop) == (0, 0)):
        yield f"experts [{start}, {stop}) are not among {group.experts}"


def _part_faults(plan: Plan, transfers: TransferGroup) -> Iterator[str]:
    pattern = plan.patterns[transfers.pattern]
    for side, partition, grid in (("source", pattern.src, transfers.src), ("destination", pattern.dst, transfers.dst)):
        rows = len(plan.rank_grids[grid])
        if len(partition.pieces) != rows:
            yield f"{side} has {len(partition.pieces)} parts for {rows} rows of ranks"
        if partition.padding and len(partition.padding) != len(partition.pieces):
            yield f"{side} has {len(partition.pieces)} parts, and padding for {len(partition.padding)}"
    for number, overlap in enumerate(pattern.overlaps):
        ends = ((pattern.src, overlap.src, overlap.src_piece), (pattern.dst, overlap.dst, overlap.dst_piece))
        if any(not 0 <= c < len(s.pieces) or not 0 <= p < len(s.pieces[c]) for s, c, p in ends):
            yield f"overlap {number} names a piece that does not exist"


def check_pieces(plan: Plan) -> Iterator[Violation]:
    """Pieces lie inside of their parameter and of their tensor, and so does padding; dtypes are known."""
    for transfers, pattern, _, _ in _first_uses(plan):
        whole = Region.whole(plan.groups[transfers.group].view)
        for partition, is_src in _sides(pattern):
            for part, message in _placing_faults(partition, whole):
                yield Violation.of_group(plan, transfers, "bounds", message, *_ends(part, is_src))


def _placing_faults(partition: Partition, whole: Region) -> Iterator[tuple[int, str]]:
    for part, pieces in enumerate(partition.pieces):
        yield from ((part, message) for piece in pieces if (message := _piece_fault(piece, whole)))
        for entry in partition.padding_of(part):
            shape = entry.tensor.shape
            fits = len(entry.box.start) == len(shape) and min(shape, default=1) > 0
            if not fits or not Region.whole(shape).contains(entry.box):
                yield part, f"padding {entry.box} is outside of {entry.tensor.name} {shape}"


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


def check_groups(plan: Plan) -> Iterator[Violation]:
    """Every parameter is listed once and has exactly one route; only prediction layers may be left out."""
    routes: dict[int, list[str]] = defaultdict(list)
    for bulk in {transfers.group for transfers in plan.transfer_groups}:
        routes[bulk].append("bulk")
    for name, unplanned in (("misc", plan.misc), ("excluded", plan.excluded)):
        for entry in unplanned:
            routes[entry.group].append(name)
            if not entry.reason:
                yield _group_violation(plan, entry.group, f"{name} without a reason")
            group = plan.groups[entry.group]
            if name == "excluded" and not group.mtp and group.role is not Role.TRACED:
                message = f"left out ({entry.reason}), but only multi-token prediction may be"
                yield _group_violation(plan, entry.group, message)
    listed: dict[str, set[int]] = defaultdict(set)
    for index, group in enumerate(plan.groups):
        if len(routes[index]) != 1:
            by = " and ".join(sorted(routes[index])) or "by no route"
            yield _group_violation(plan, index, f"travels {by}; every parameter has exactly one route")
        layers = set(group.layers or (-1,))
        if len(layers) < len(group.layers) or layers & listed[group.name_pattern]:
            yield _group_violation(plan, index, "the plan lists the same parameter twice")
        listed[group.name_pattern] |= layers


def _group_violation(plan: Plan, group: int, message: str) -> Violation:
    return Violation.of_all(plan, plan.groups[group].name_pattern, "groups", message)


def check_patterns(plan: Plan) -> Iterator[Violation]:
    """Cuts tile the parameter, overlaps tile the destination, and both lie in storage as declared."""
    serves: dict[tuple[bool, str], set[Role]] = defaultdict(set)
    transposed = engine_named(plan.engine).transposed
    for transfers, pattern, cast, is_scales in _first_uses(plan):
        group = plan.groups[transfers.group]
        whole = Region.whole(group.view)
        if message := tiling_fault(whole, [piece.region for pieces in pattern.src.pieces for piece in pieces]):
            message = f"source parts do not tile the parameter {whole}: {message}"
            yield Violation.of_group(plan, transfers, "source", message)
        regions = [*dict.fromkeys(piece.region for pieces in pattern.dst.pieces for piece in pieces)]
        message = "" if is_scales else tiling_fault(whole, regions)  # the proof of pairs knows who wants which scales
        if message:
            message = f"destination parts do not tile the parameter {whole}: {message}"
            yield Violation.of_group(plan, transfers, "consumed", message)
        for partition, is_src in _sides(pattern):
            for name in {piece.tensor.name for pieces in partition.pieces for piece in pieces}:
                before = shared_name_fault(serves[is_src, name])
                serves[is_src, name].add(group.role)
                if not before and (message := shared_name_fault(serves[is_src, name])):
                    yield Violation.of_group(plan, transfers, "names", f"{name} {message}")
            declared = MEGATRON if is_src else transposed
            for rule, part, message in _partition_faults(partition, group, is_src, None if is_scales else declared):
                yield Violation.of_group(plan, transfers, rule, message, *_ends(part, is_src))
        for rule, src_part, dst_part, message in _overlap_faults(pattern, cast):
            yield Violation.of_group(plan, transfers, rule, message, src_part, dst_part)


def _first_uses(plan: Plan) -> Iterator[tuple[TransferGroup, TransferPattern, GroupCast | None, bool]]:
    """Each pattern with the first transfer group of each way of using it, the group's cast, and whether it has scales."""
    casts, scales = {cast.group: cast for cast in plan.casts}, {pair.scales for pair in plan.pairs}

    def use_of(transfers: TransferGroup) -> Hashable:
        group, cast = plan.groups[transfers.group], casts.get(transfers.group)
        return (transfers.pattern, group.view, group.role, bool(group.layers), bool(group.experts),
                cast and (cast.src, cast.dst), transfers.group in scales)  # fmt: skip

    for transfers in distinct(plan, use_of):
        yield transfers, plan.patterns[transfers.pattern], casts.get(transfers.group), transfers.group in scales


def _overlap_faults(pattern: TransferPattern, cast: GroupCast | None) -> Iterator[tuple[str, int | None, int, str]]:
    """(rule, source part, destination part, message): overlaps tile the destination, from parts that hold them, in its dtype."""
    arriving: dict[tuple[int, int], list[Region]] = defaultdict(list)
    for overlap in pattern.overlaps:
        src_piece, dst_piece = pattern.ends(overlap)
        source, src, dst = src_piece.region, src_piece.tensor, dst_piece.tensor
        if len(overlap.region.start) != len(source.start) or not source.contains(overlap.region):
            yield "cover", overlap.src, overlap.dst, f"{overlap.region} is sent by a part that holds {source}"
        if not overlap.region.elements:
            yield "cover", overlap.src, overlap.dst, f"{overlap.region} is empty"
        if src.dtype != dst.dtype if cast is None else (src.dtype, dst.dtype) != (cast.src, cast.dst):
            declared = f"the cast declared is from {cast.src} to {cast.dst}" if cast else "no cast is declared"
            message = f"{src.name} is {src.dtype}, {dst.name} is {dst.dtype}, and {declared}"
            yield "bytes", overlap.src, overlap.dst, message
        arriving[overlap.dst, overlap.dst_piece].append(overlap.region)
    for part, pieces in enumerate(pattern.dst.pieces):
        for number, piece in enumerate(pieces):
            if message := tiling_fault(piece.region, arriving[part, number]):
                yield "cover", None, part, f"{piece.region} is not written exactly once: {message}"


def _name_faults(pieces: tuple[Piece, ...], group: ParameterGroup, is_src: bool) -> Iterator[str]:
    """A tensor's name varies with what it belongs to: chunk (in the trainer), layer and, unless stacked, expert."""
    for name, stacked in dict.fromkeys((piece.tensor.name, piece.slot_dim >= 0) for piece in pieces):
        try:
            require_tensor_pattern(name)
        except ValueError as error:
            yield f"no pattern: {error}"
            continue
        fields = places_in(name)
        numbered = {"vp": is_src, "layer": bool(group.layers), "expert": group.experts and not stacked}
        required = {field for field, varies in numbered.items() if varies}
        if stacked and not group.experts:
            yield f"{name} stacks experts, {group.name_pattern} has none"
        if fields != required:
            yield f"{name} varies with {sorted(fields) or 'nothing'}, must vary with {sorted(required) or 'nothing'}"


def _partition_faults(
    partition: Partition, group: ParameterGroup, is_src: bool, transposed: Transposed | None
) -> Iterator[tuple[str, int, str]]:
    """(rule, part, message): parts have the same tensors, ascend, have equally many replicas, and only the last are padded.

    `transposed` is None for scales, whose tensors may be padded on every rank.
    """
    filled = [(part, pieces) for part, pieces in enumerate(partition.pieces) if pieces]
    tensors = {piece.tensor.name: piece.tensor for _, pieces in filled for piece in pieces}
    if sections := sections_fault(partition.pieces, group.role, is_src):
        yield "order", *sections
    for part, pieces in filled:
        yield from (("names", part, message) for message in _name_faults(pieces, group, is_src))
        if group.role is not Role.TRACED and (message := _experts_fault(pieces)):
            yield "order", part, message
        messages = (storage_fault(piece, group.role, transposed) for piece in pieces if transposed is not None)
        yield from (("storage", part, message) for message in messages if message)
    if group.role is Role.TRACED:  # parts may be uneven, and have their tensors in any order
        return
    for (before, earlier), (part, pieces) in pairwise(filled):
        if {piece.tensor for piece in pieces} != {piece.tensor for piece in earlier}:
            message = f"parts {before} and {part} lie in different tensors: {_tensors(earlier)} and {_tensors(pieces)}"
            yield "names", part, message
        matched = len(earlier) == len(pieces)
        for first, second in zip(earlier, pieces, strict=True) if matched else [(earlier[0], pieces[0])]:
            if first.region.start > second.region.start:
                yield "order", part, f"part {part} holds {second.region}, part {before} before it {first.region}"
    for part, padding in enumerate(partition.padding):
        for entry in padding:
            if tensors.setdefault(entry.tensor.name, entry.tensor) != entry.tensor:
                yield "names", part, f"padding is of {entry.tensor}, pieces are of {tensors[entry.tensor.name]}"
        if padding and transposed is not None and any(partition.pieces[part + 1 :]):
            yield "order", part, f"part {part} is padded, but later parts still hold parts of the parameter"
    copies = Counter(pieces[0].region for _, pieces in filled)
    if len(set(copies.values())) > 1:
        uneven = ", ".join(f"{region} by {count}" for region, count in list(copies.items())[:4])
        yield "order", 0, f"regions are held by unequal numbers of parts: {uneven}"


def _experts_fault(pieces: tuple[Piece, ...]) -> str:
    """If one parameter holds all experts, each with its own tensor: experts must ascend with the tensors' numbers."""
    starts = {piece.tensor.name: piece.region.start[0] for piece in pieces}
    if len(starts) == 1:
        return ""
    for piece in pieces:
        if piece.region.start[0] != starts[piece.tensor.name]:
            return f"{piece.tensor.name} holds parts of experts {piece.region.start[0]} and {starts[piece.tensor.name]}"
    by_number = sorted(starts, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])
    for numbered, named in zip(by_number, sorted(starts, key=starts.__getitem__), strict=True):
        if numbered != named:
            return f"experts of {numbered} and {named} lie in each other's place"
    return ""


def _tensors(pieces: tuple[Piece, ...]) -> str:
    return ", ".join(sorted({f"{p.tensor.name} {p.tensor.shape} {p.tensor.dtype}" for p in pieces}))
