"""Say where any element of a refit comes from and where it goes.

Answers come from the plan alone: from the patterns, holdings and round robin that `scheduling.schedule_of` expands. An
element is named by its HF parameter, or by a local tensor and the rank that holds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Literal

import numpy as np

from mcore_reshard.planner.layout.block_scales import REPEATED
from mcore_reshard.planner.layout.geometry import LocalTensor, Piece, Region, row_major_strides
from mcore_reshard.planner.layout.partitions import Padding, Partition
from mcore_reshard.planner.model.parameters import ITEMSIZE, ParameterGroup

from .plan import Overlap, Plan, TransferGroup, TransferLayer, TransferPattern
from .schedule import World

Route = Literal["bulk", "misc", "excluded", "padding"]


class ExplainError(LookupError):
    """An element that the plan does not know: no such parameter or tensor, or an index outside of it."""


@dataclass(frozen=True, slots=True)
class Place:
    """One element of a local tensor. `index` and `offset` are in the tensor's own shape; `offset` counts elements."""

    world: World
    rank: int
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    index: tuple[int, ...]
    offset: int

    @property
    def byte_offset(self) -> int:
        return self.offset * ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        return f"{self.world}:{self.rank} {self.tensor}{list(self.index)}"


@dataclass(frozen=True, slots=True)
class Origin:
    """How one element reaches one generation rank.

    Off the bulk route there are no places to name: misc tensors travel whole, and the engine's loader says what lands
    where; excluded ones do not travel. Padding has one place and no parameter. `region` is what travels together with
    the element, in coordinates of the group's `view`.
    """

    parameter: str
    index: tuple[int, ...]  # in the HF parameter's shape
    route: Route
    reason: str = ""
    pp_stage: int | None = None
    region: Region | None = None
    src: Place | None = None
    dst: Place | None = None
    relayed_by: int | None = None  # the generation rank that passes it on, where it does not come straight from `src`


@dataclass(frozen=True, slots=True)
class Element:
    """What a user points at: `name[i,j]`, or a whole tensor where there is no index."""

    name: str
    index: tuple[int, ...] | None = None


def parse_element(text: str) -> Element:
    """`model.norm.weight[5]` -> name and index; the name alone means no index. Raises ExplainError."""
    match = re.fullmatch(r"\s*([^\[\]\s]+)\s*(?:\[([^\[\]]*)\])?\s*", text)
    if match is None:
        raise ExplainError(f"cannot read {text!r}, write NAME[i,j], for example model.norm.weight[5]")
    name, inside = match.groups()
    if inside is None:
        return Element(name)
    try:
        return Element(name, tuple(int(part) for part in inside.split(",")))
    except ValueError as error:
        raise ExplainError(f"cannot read the index [{inside}], write whole numbers, for example {name}[5,3]") from error


# --- from an HF parameter


def explain_parameter(
    plan: Plan,
    name: str,
    index: Sequence[int],
    gen_rank: int | None = None,
    train_rank: int | None = None,
) -> list[Origin]:
    """Every pull of element `index` (HF coordinates) of parameter `name`, by stage and generation rank.

    `gen_rank` and `train_rank` keep only pulls by, or served by, that rank. A misc or excluded parameter gives one
    origin without places. Raises ExplainError for an unknown name or rank, or an index outside of the parameter.
    """
    check_rank(plan, "gen", gen_rank)
    check_rank(plan, "train", train_rank)
    group, layer, expert = find_parameter(plan, name)
    held = plan.groups[group]
    at = _checked_index(name, held.shape, index)
    for route, unplanned in (("misc", plan.misc), ("excluded", plan.excluded)):
        for entry in unplanned:
            if entry.group == group:
                return [Origin(name, at, route, entry.reason)]  # type: ignore[arg-type]
    point = _refactor(at, held.shape, held.view)
    return [
        origin
        for transfers in plan.transfer_groups
        if transfers.group == group and (place := _member(transfers, layer, expert)) is not None
        for origin in _pulls(plan, transfers, *place, name, at, point)
        if (gen_rank is None or origin.dst.rank == gen_rank) and (train_rank is None or origin.src.rank == train_rank)  # type: ignore[union-attr]
    ]


def holders_of(plan: Plan, name: str, index: Sequence[int]) -> list[Place]:
    """Every training rank that holds the element, also those that serve nobody; [] off the bulk route."""
    group, layer, expert = find_parameter(plan, name)
    held = plan.groups[group]
    point = _refactor(_checked_index(name, held.shape, index), held.shape, held.view)
    found: dict[Place, None] = {}
    for transfers in plan.transfer_groups:
        if transfers.group != group or (member := _member(transfers, layer, expert)) is None:
            continue
        at, slot = transfers.layers[member[0]], transfers.src_slot + member[1]
        for part, pieces in enumerate(plan.patterns[transfers.pattern].src.pieces):
            for piece in pieces:
                if _holds(piece.region, point):
                    ranks = plan.rank_grids[transfers.src][part].tolist()
                    found.update((_place("train", rank, piece, at, slot, point), None) for rank in ranks)
    return sorted(found, key=lambda place: (place.rank, place.offset))


def find_parameter(plan: Plan, name: str) -> tuple[int, int | None, int | None]:
    """The group, layer and expert of an HF name. Raises ExplainError with the names that come close."""
    for number, group in enumerate(plan.groups):
        match = _pattern(group.name_pattern).fullmatch(name)
        if match is None:
            continue
        layer, expert = (int(match[field]) if field in match.groupdict() else None for field in ("layer", "expert"))
        if (layer is None or layer in group.layers) and (expert is None or expert < group.experts):
            return number, layer, expert
    raise ExplainError(f"the plan has no parameter {name!r}{_hint(plan, name)}")


def check_rank(plan: Plan, world: World, rank: int | None) -> None:
    """Raises ExplainError for a rank that the plan does not have; None stands for no rank."""
    name, size = ("generation", plan.gen.world) if world == "gen" else ("training", plan.train.world)
    if rank is not None and not 0 <= rank < size:
        raise ExplainError(f"{name} rank {rank} is outside of the {size} ranks of the plan (0 to {size - 1})")


# --- from a local tensor


def explain_engine_tensor(plan: Plan, name: str, index: Sequence[int], gen_rank: int) -> list[Origin]:
    """What lands in element `index` of the engine's tensor `name` on one generation rank: one bulk or padding origin.

    Raises ExplainError where no planned transfer writes that tensor there.
    """
    check_rank(plan, "gen", gen_rank)
    parameters = _parameters_at(plan, "gen", gen_rank, name, index)
    if isinstance(parameters, Place):
        return [Origin("", (), "padding", "no parameter fills it", dst=parameters)]
    return [
        origin
        for parameter, at, offset in parameters
        for origin in explain_parameter(plan, parameter, at, gen_rank=gen_rank)
        if origin.dst is not None and (origin.dst.tensor, origin.dst.offset) == (name, offset)
    ]


def explain_trainer_tensor(plan: Plan, name: str, index: Sequence[int], train_rank: int) -> list[Origin]:
    """Where element `index` of the trainer's tensor `name` goes from one training rank: one origin a generation rank.

    Empty where a replica serves them all. Raises ExplainError where no planned transfer reads that tensor there.
    """
    check_rank(plan, "train", train_rank)
    parameters = _parameters_at(plan, "train", train_rank, name, index)
    if isinstance(parameters, Place):
        return [Origin("", (), "padding", "no parameter fills it", src=parameters)]
    return [
        origin
        for parameter, at, offset in parameters
        for origin in explain_parameter(plan, parameter, at, train_rank=train_rank)
        if origin.src is not None and (origin.src.tensor, origin.src.offset) == (name, offset)
    ]


def local_tensors(plan: Plan, world: World, rank: int) -> dict[str, LocalTensor]:
    """The tensors of one rank that planned transfers read or write, by name."""
    found: dict[str, LocalTensor] = {}
    for transfers, partition, part in _held_by(plan, world, rank):
        patterns = [piece.tensor for piece in partition.pieces[part]] + [
            pad.tensor for pad in _padding(partition, part)
        ]
        for pattern in dict.fromkeys(patterns):
            for layer in transfers.layers:
                for slot in _slots(transfers, world) if "{expert}" in pattern.name else range(1):
                    name = _name(pattern, world, layer, slot)
                    found[name] = LocalTensor(name, pattern.shape, pattern.dtype)
    return found


def _parameters_at(
    plan: Plan, world: World, rank: int, name: str, index: Sequence[int]
) -> Place | list[tuple[str, tuple[int, ...], int]]:
    """(parameter, HF index, offset) of what a local element holds, without repeats; a Place where it is padding."""
    found: dict[tuple[str, tuple[int, ...], int], None] = {}
    padding: Place | None = None
    known = False
    for transfers, partition, part in _held_by(plan, world, rank):
        entries: tuple[Piece | Padding, ...] = (*_padding(partition, part), *partition.pieces[part])
        for entry in entries:
            match = _pattern(entry.tensor.name).fullmatch(name)
            if match is None or not (layers := _layers_at(transfers, world, match)):
                continue
            slots = _slots(transfers, world)
            if "expert" in match.groupdict():
                slots = range(max(slots.start, int(match["expert"])), min(slots.stop, int(match["expert"]) + 1))
            if not slots:
                continue
            known = True
            at = _checked_index(f"{world}:{rank} {name}", entry.tensor.shape, index)
            offset = _ravel(at, entry.tensor.shape)
            if not isinstance(entry, Piece):
                if _holds(entry.box, at):
                    padding = Place(world, rank, name, entry.tensor.shape, entry.tensor.dtype, at, offset)
                continue
            if (hit := _global_point(entry, offset, slots)) is None:
                continue
            point, slot = hit
            group = plan.groups[transfers.group]
            expert = transfers.experts[0] + slot - _slots(transfers, world).start
            for layer in layers:
                found[group.name(layer.layer, expert), _refactor(point, group.view, group.shape), offset] = None
    if not known:
        hint = _tensor_hint(plan, world, rank, name)
        raise ExplainError(f"no planned transfer touches {name!r} on {world}:{rank}{hint}")
    return list(found) if found or padding is None else padding


def _global_point(piece: Piece, offset: int, slots: range) -> tuple[tuple[int, ...], int] | None:
    """The global coordinate stored at an element offset of the piece's tensor, and its slot; None outside the piece."""
    local = _unravel(offset, piece.view)
    slot = slots.start
    if piece.slot_dim >= 0:
        slot = local[piece.slot_dim] - piece.origin[piece.slot_dim]
        if slot not in slots:
            return None
    box = piece.local(slot)
    if not _holds(box, local):
        return None
    return tuple(
        low + local[dim] - box.start[dim] for low, dim in zip(piece.region.start, piece.dims, strict=True)
    ), slot


# --- the plan's records


def _held_by(plan: Plan, world: World, rank: int) -> Iterator[tuple[TransferGroup, Partition, int]]:
    """The transfer groups a rank takes part in, with its end of the cut and the part it holds."""
    part_of: dict[int, int | None] = {}
    for transfers in plan.transfer_groups:
        pattern = plan.patterns[transfers.pattern]
        grid, partition = (transfers.src, pattern.src) if world == "train" else (transfers.dst, pattern.dst)
        if grid not in part_of:
            rows = np.nonzero((plan.rank_grids[grid] == rank).any(axis=1))[0]
            part_of[grid] = int(rows[0]) if len(rows) else None
        if (part := part_of[grid]) is not None:
            yield transfers, partition, part


def _member(transfers: TransferGroup, layer: int | None, expert: int | None) -> tuple[int, int] | None:
    """Positions of a layer and an expert in the transfer group; None where it does not carry them."""
    number = -1 if layer is None else layer
    position = next((i for i, at in enumerate(transfers.layers) if at.layer == number), None)
    if position is None or (expert is not None and not transfers.experts[0] <= expert < transfers.experts[1]):
        return None
    return position, 0 if expert is None else expert - transfers.experts[0]


def _pulls(
    plan: Plan,
    transfers: TransferGroup,
    layer: int,
    expert: int,
    name: str,
    index: tuple[int, ...],
    point: tuple[int, ...],
) -> Iterator[Origin]:
    """One origin for each generation rank that pulls the element; `layer` and `expert` are positions in the transfer group."""
    pattern, at = plan.patterns[transfers.pattern], transfers.layers[layer]
    src_ranks, dst_ranks = plan.rank_grids[transfers.src], plan.rank_grids[transfers.dst]
    member, replicas = layer * transfers.expert_count + expert, np.arange(dst_ranks.shape[1])
    for number, overlap in _overlaps_of(pattern, point):
        src, dst = (
            pattern.src.pieces[overlap.src][overlap.src_piece],
            pattern.dst.pieces[overlap.dst][overlap.dst_piece],
        )
        served_by = plan.served_by(transfers, member, number, replicas)
        pulls = zip(src_ranks[overlap.src, served_by].tolist(), dst_ranks[overlap.dst].tolist(), strict=True)
        landing_rank = int(dst_ranks[overlap.dst, plan.lands_on(transfers, member, number)]) if plan.relay else None
        for train_rank, gen_rank in pulls:
            yield Origin(
                parameter=name,
                index=index,
                route="bulk",
                pp_stage=transfers.pp_stage,
                region=overlap.region,
                src=_place("train", train_rank, src, at, transfers.src_slot + expert, point),
                dst=_place("gen", gen_rank, dst, at, transfers.dst_slot + expert, point),
                relayed_by=None if landing_rank == gen_rank else landing_rank,
            )


def _overlaps_of(pattern: TransferPattern, point: tuple[int, ...]) -> Iterator[tuple[int, Overlap]]:
    return ((number, overlap) for number, overlap in enumerate(pattern.overlaps) if _holds(overlap.region, point))


def _place(world: World, rank: int, piece: Piece, at: TransferLayer, slot: int, point: tuple[int, ...]) -> Place:
    tensor, offset = piece.tensor, piece.offset(point, slot)
    name = _name(tensor, world, at, slot)
    return Place(world, rank, name, tensor.shape, tensor.dtype, _unravel(offset, tensor.shape), offset)


def _name(pattern: LocalTensor, world: World, at: TransferLayer, slot: int) -> str:
    vp, layer = (at.vp_stage, at.src_local) if world == "train" else (0, at.dst_local)
    return pattern.name.format(vp=vp, layer=layer, expert=slot)


def _slots(transfers: TransferGroup, world: World) -> range:
    first = transfers.src_slot if world == "train" else transfers.dst_slot
    return range(first, first + transfers.expert_count)


def _layers_at(transfers: TransferGroup, world: World, match: re.Match[str]) -> list[TransferLayer]:
    """The transfer group's layers whose tensors have the matched name."""
    named = {field: int(value) for field, value in match.groupdict().items()}
    found = []
    for at in transfers.layers:
        vp, layer = (at.vp_stage, at.src_local) if world == "train" else (0, at.dst_local)
        if named.get("vp", vp) == vp and named.get("layer", layer) == layer:
            found.append(at)
    return found


def _padding(partition: Partition, part: int) -> tuple[Padding, ...]:
    return partition.padding[part] if partition.padding else ()


# --- indices


def _holds(region: Region, point: tuple[int, ...]) -> bool:
    return all(low <= at < high for low, at, high in zip(region.start, point, region.stop, strict=True))


def _ravel(index: Sequence[int], shape: tuple[int, ...]) -> int:
    return sum(at * stride for at, stride in zip(index, row_major_strides(shape), strict=True))


def _unravel(offset: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(offset // stride % size for stride, size in zip(row_major_strides(shape), shape, strict=True))


def _refactor(index: tuple[int, ...], shape: tuple[int, ...], view: tuple[int, ...]) -> tuple[int, ...]:
    """The same element in another row-major factoring of the shape."""
    return index if shape == view else _unravel(_ravel(index, shape), view)


def _checked_index(what: str, shape: tuple[int, ...], index: Sequence[int]) -> tuple[int, ...]:
    if len(index) != len(shape) or not all(0 <= at < size for at, size in zip(index, shape, strict=True)):
        last = ",".join(str(size - 1) for size in shape)
        raise ExplainError(
            f"index [{','.join(map(str, index))}] is outside of {what}, which has shape {list(shape)}:"
            f" write [{','.join('0' * len(shape))}] to [{last}]"
        )
    return tuple(index)


# --- names


@lru_cache(maxsize=4096)
def _pattern(name: str) -> re.Pattern[str]:
    """`a.{layer}.b` matches `a.3.b`, with the number as group `layer`."""
    escaped = re.escape(name)
    return re.compile(re.sub(r"\\\{(layer|expert|vp)\\\}", r"(?P<\1>0|[1-9][0-9]*)", escaped))


def _hint(plan: Plan, name: str) -> str:
    """Which layers and experts a right pattern has, or the patterns that come close."""
    for group in plan.groups:
        if _pattern(group.name_pattern).fullmatch(name):
            spans = [f"layers {min(group.layers)} to {max(group.layers)}"] if group.layers else []
            spans += [f"experts 0 to {group.experts - 1}"] if group.experts else []
            return f": {group.name_pattern} has {' and '.join(spans)}"
    generic = re.sub(r"(?<=\.)[0-9]+(?=\.)", "#", name)
    patterns = {re.sub(r"\{\w+\}", "#", group.name_pattern): group for group in plan.groups}
    close = get_close_matches(generic, patterns, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(_example(patterns[found]) for found in close)}?" if close else ""


def _example(group: ParameterGroup) -> str:
    return group.name(group.layers[0] if group.layers else None, 0)


def _tensor_hint(plan: Plan, world: World, rank: int, name: str) -> str:
    known = local_tensors(plan, world, rank)
    if (blocks := name + REPEATED) in known:
        return f": the engine repeats it from {blocks}, which the plan fills"
    close = get_close_matches(name, known, n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    if plan.misc:
        count = sum(1 for _ in plan.misc_names())
        hint += f". The misc route carries {count} parameters, into tensors that no plan names"
    return hint
