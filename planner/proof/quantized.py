"""The proof of precision: quantized weights travel with their own scales, and dtypes change only where declared."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace
from operator import attrgetter

from mcore_reshard.planner.layout.block_scales import blocks_touched
from mcore_reshard.planner.layout.geometry import Piece
from mcore_reshard.planner.model.parameters import ITEMSIZE, ParameterGroup, Role
from mcore_reshard.planner.model.precision import CASTS, FP8, grid_of
from mcore_reshard.planner.plan.plan import Plan, QuantizedPair, TransferGroup, TransferPattern

from .report import Violation, distinct, name_of

_SCALES = {"float32", "uint8"}


def check_pair_references(plan: Plan) -> Iterator[Violation]:
    """Pairs and casts name groups that exist, with blocks that a matrix can have."""
    for pair in plan.pairs:
        if message := _pair_dangles(plan, pair):
            yield Violation.of_all(plan, f"pair {pair.weight}, {pair.scales}", "references", message)
    for cast in plan.casts:
        if not 0 <= cast.group < len(plan.groups) or not {cast.src, cast.dst} <= ITEMSIZE.keys():
            message = f"group {cast.group} of {len(plan.groups)} is cast from {cast.src} to {cast.dst}"
            yield Violation.of_all(plan, f"cast of group {cast.group}", "references", message)


def _pair_dangles(plan: Plan, pair: QuantizedPair) -> str:
    if not all(0 <= group < len(plan.groups) for group in (pair.weight, pair.scales)):
        return f"groups {pair.weight} and {pair.scales} are not both among the plan's {len(plan.groups)}"
    if pair.weight == pair.scales or min(pair.block) < 1:
        return f"blocks of {pair.block} of group {pair.weight} with scales in {pair.scales}"
    if len(plan.groups[pair.weight].view) != 2 or len(plan.groups[pair.scales].view) != 2:
        return "weight and scales are not both matrices"
    return ""


def check_pairs(plan: Plan) -> Iterator[Violation]:
    """Weight and scales have one route, the same transfer groups, and cuts and overlaps that agree block by block."""
    transfer_groups: dict[int, list[TransferGroup]] = defaultdict(list)
    for transfers in plan.transfer_groups:
        transfer_groups[transfers.group].append(transfers)
    yield from _membership(plan)
    yield from _blocks(plan, transfer_groups.keys())
    unplanned = [Counter(u.group for u in routes) for routes in (plan.misc, plan.excluded)]
    casts = {cast.group for cast in plan.casts}
    checked: dict[tuple[int, int, tuple[int, int], bool, str], str] = {}
    for pair in plan.pairs:
        weight, scales = plan.groups[pair.weight], plan.groups[pair.scales]
        message = _group_fault(weight, scales, pair)
        if not message and any(routes[pair.weight] != routes[pair.scales] for routes in unplanned):
            message = f"{weight.name_pattern} travels by another route"
        if message:
            yield Violation.of_all(plan, scales.name_pattern, "pairs", message)
            continue
        beside = {_place(transfers): transfers for transfers in transfer_groups[pair.scales]}
        for transfers in transfer_groups[pair.weight]:
            scale_transfers = beside.pop(_place(transfers), None)
            if scale_transfers is None:
                message = "its scales do not travel with it: none of their transfer groups has its members, ranks and replica order"
                yield Violation.of_group(plan, transfers, "pairs", message)
                continue
            is_cast = pair.weight in casts
            key = (transfers.pattern, scale_transfers.pattern, pair.block, is_cast, scales.dtype)
            if key not in checked:
                patterns = plan.patterns[transfers.pattern], plan.patterns[scale_transfers.pattern]
                checked[key] = _pattern_fault(*patterns, pair, weight, scales, is_cast)
            if checked[key]:
                yield Violation.of_group(plan, scale_transfers, "pairs", checked[key])
        message = "scales are sent, but no transfer group of their weight has their members, ranks and replica order"
        yield from (Violation.of_group(plan, transfers, "pairs", message) for transfers in beside.values())


def _membership(plan: Plan) -> Iterator[Violation]:
    """A group is in one pair at most, and every group that arrives in FP8 is the weight of a pair."""
    for group, count in Counter(group for pair in plan.pairs for group in (pair.weight, pair.scales)).items():
        if count > 1:
            yield Violation.of_all(plan, plan.groups[group].name_pattern, "pairs", f"it is in {count} pairs")
    weights = {pair.weight for pair in plan.pairs}
    for transfers in distinct(plan, attrgetter("group", "pattern")):
        arriving = {piece.tensor.dtype for pieces in plan.patterns[transfers.pattern].dst.pieces for piece in pieces}
        if transfers.group not in weights and FP8 in arriving:
            yield Violation.of_group(plan, transfers, "pairs", f"{FP8} arrives, and no scales are paired with it")


def _blocks(plan: Plan, bulk: Collection[int]) -> Iterator[Violation]:
    """Blocks have one size, unless every matrix is a block of its own."""
    in_blocks = [p for p in plan.pairs if p.weight in bulk and p.block != plan.groups[p.weight].view]
    for pair in in_blocks:
        if pair.block != in_blocks[0].block:
            first = plan.groups[in_blocks[0].weight].name_pattern
            message = f"blocks of {pair.block}, while {first} has {in_blocks[0].block}"
            yield Violation.of_all(plan, plan.groups[pair.scales].name_pattern, "pairs", message)


def _group_fault(weight: ParameterGroup, scales: ParameterGroup, pair: QuantizedPair) -> str:
    grid = grid_of((weight.view[0], weight.view[1]), pair.block)
    if scales.view != grid:
        return (
            f"{scales.view} scales for {weight.name_pattern} {weight.view} in blocks of {pair.block}, which are {grid}"
        )
    for what in ("role", "layers", "experts", "mtp"):
        if getattr(weight, what) != getattr(scales, what):
            return f"paired with {weight.name_pattern}, of which it does not have the {what}"
    if weight.dtype != FP8 or scales.dtype not in _SCALES:
        return f"{scales.dtype} scales for {weight.name_pattern} in {weight.dtype}"
    return ""


def _place(transfers: TransferGroup) -> TransferGroup:
    """The fields that a weight's transfer group shares with that of its scales: all but group and pattern."""
    return replace(transfers, group=0, pattern=0)


def _pattern_fault(weight: TransferPattern, scales: TransferPattern, pair: QuantizedPair, group: ParameterGroup,
                    scales_group: ParameterGroup, is_cast: bool) -> str:  # fmt: skip
    """Why two patterns do not agree block by block ("" when they do)."""
    for data, grid, is_src in ((weight.src, scales.src, True), (weight.dst, scales.dst, False)):
        if len(data.pieces) != len(grid.pieces):
            return f"{len(data.pieces)} parts of the weight, {len(grid.pieces)} of its scales"
        for part, (pieces, beside) in enumerate(zip(data.pieces, grid.pieces, strict=True)):
            if len(pieces) != len(beside):
                return f"part {part} has {len(pieces)} pieces of the weight and {len(beside)} of its scales"
            for piece, scale in zip(pieces, beside, strict=True):
                message = _piece_fault(piece, scale, pair, group, is_src)
                if scale.tensor.dtype != scales_group.dtype:
                    message = f"{scale.tensor.name} is {scale.tensor.dtype}, scales are {scales_group.dtype}"
                message = message or (_computed_fault(piece, scale, pair.block) if is_src and is_cast else "")
                if message:
                    return f"part {part}: {message}"
    if len(weight.overlaps) != len(scales.overlaps):
        return f"{len(weight.overlaps)} overlaps of the weight, {len(scales.overlaps)} of its scales"
    for overlap, scaled in zip(weight.overlaps, scales.overlaps, strict=True):
        if scaled != replace(overlap, region=blocks_touched(overlap.region, pair.block)):
            return (
                f"weights {overlap.region} go from part {overlap.src} to {overlap.dst} with scales {scaled.region} from"
                f" {scaled.src} to {scaled.dst}"
            )
    return ""


def _piece_fault(piece: Piece, scale: Piece, pair: QuantizedPair, group: ParameterGroup, is_src: bool) -> str:
    """Every local block of the weight is a block of the parameter, or a part of one, whose scale lies in its place.

    At the source, blocks are whole: a scale of a part of a block is not the parameter's. With `pair.touched`, every
    destination rank gets the scales of all blocks that it has a part of. They then lie one after another, as the parts do.
    """
    block = pair.block
    named = f"{scale.tensor.name} {scale.region} for {piece.tensor.name} {piece.region}"
    if not scale.tensor.name.startswith(piece.tensor.name):
        return f"{scale.tensor.dtype} {named} are not its scales"
    if scale.region != blocks_touched(piece.region, block):
        return f"{named} are not the scales of its blocks"
    if (scale.dims, scale.slot_dim) != (piece.dims, piece.slot_dim) or len(scale.view) != len(piece.view):
        return f"{named} do not lie as the weight does"
    one_each = scale.view[-2:] == (1, 1) and scale.tensor.shape in {scale.view[:-2] or (1,), scale.view[:-1]}
    if scale.view != scale.tensor.shape and not one_each:
        return f"{scale.tensor.name} {scale.tensor.shape} is viewed as {scale.view}"
    if any(own for dim, own in enumerate(scale.origin) if dim not in scale.dims and own != piece.origin[dim]):
        return f"{named} are those of another expert"
    for dim, size in enumerate(block):
        local, start, stop = piece.dims[dim], piece.region.start[dim], piece.region.stop[dim]
        if pair.touched and not is_src:
            if piece.origin[local] * scale.region.extents[dim] != scale.origin[local] * piece.region.extents[dim]:
                return f"{named} lie at {scale.origin}, the weight at {piece.origin}"
            continue
        if piece.origin[local] != scale.origin[local] * size:
            return f"{named} lie at {scale.origin}, the weight at {piece.origin}"
        inside = not is_src and stop - 1 - start // size * size < size  # all of one block
        if start % size and not inside:
            return f"{piece.tensor.name} {piece.region} starts inside of a block of {block}"
        if is_src and stop % size and stop != group.view[dim]:
            return f"{piece.tensor.name} {piece.region} ends inside of a block of {block}"
    return ""


def _computed_fault(piece: Piece, scale: Piece, block: tuple[int, int]) -> str:
    """The scales that a cast computes are the bare block grid of the tensor it reads."""
    rows, columns = piece.tensor.shape[-2:]
    grid = (*piece.tensor.shape[:-2], *grid_of((rows, columns), block))
    if (scale.tensor.shape, scale.tensor.dtype) == (grid, "float32"):
        return ""
    return f"{scale.tensor} is to be computed from {piece.tensor.name}, whose blocks are {grid} of float32"


def check_casts(plan: Plan) -> Iterator[Violation]:
    """Declared casts are known ones, of bulk groups, and one tensor is sent in one dtype."""
    weights = {pair.weight for pair in plan.pairs}
    counts, casts = Counter(cast.group for cast in plan.casts), {cast.group: cast for cast in plan.casts}
    sent_as: dict[tuple[object, ...], tuple[str, str]] = {}  # trainer's tensor -> dtype on the wire, parameter
    bulk = {transfers.group for transfers in plan.transfer_groups}
    for cast in plan.casts:
        group = plan.groups[cast.group]
        for wrong, message in (
            (counts[cast.group] > 1 or cast.group not in bulk, "cast once, and on the bulk route only"),
            ((cast.src, cast.dst) not in CASTS, f"nothing casts {cast.src} to {cast.dst}"),
            (group.role is Role.EXPERT_BIAS, "the router's bias is kept bit for bit, it decides who serves"),
            ((cast.dst == FP8) != (cast.group in weights), "a cast to FP8 fills the scales of a pair, no other does"),
        ):
            if wrong:
                yield Violation.of_all(plan, group.name_pattern, "casts", message)
    for transfers in distinct(plan, attrgetter("group", "pattern", "pp_stage", "layers")):
        wire = casts[transfers.group].dst if transfers.group in casts else "it is"
        for name in {piece.tensor.name for pieces in plan.patterns[transfers.pattern].src.pieces for piece in pieces}:
            for layer in transfers.layers:
                place = (name, transfers.pp_stage, layer.vp_stage, layer.local)
                known, parameter = sent_as.setdefault(place, (wire, name_of(plan, transfers)))
                if known != wire:
                    message = f"{name} is sent as {wire}, and as {known} for {parameter}"
                    yield Violation.of_group(plan, transfers, "casts", message)
