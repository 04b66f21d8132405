"""Where everything goes: one `Transfer` for each region, source rank and destination rank of a refit.

    plan.transfers("model.layers.0.*")                                     # parameters, by a shell pattern
    plan.transfers(rank="gen:3")                                           # what one rank receives
    plan.transfers("model.norm.weight", element=(5,))                      # one element of a parameter
    plan.transfers(tensor="lm_head.weight", rank="gen:3", element=(72, 0)) # one element of a local tensor

Only the requested transfers are expanded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import translate
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.layout.engines import engine_named
from mcore_reshard.planner.layout.geometry import LocalTensor, Piece, Region, ravel, unravel
from mcore_reshard.planner.model.parameters import ITEMSIZE, ParameterGroup

from .schedule import World

if TYPE_CHECKING:
    from .plan import Plan, RankInGroup, TransferGroup, UnplannedGroup

Route = Literal["bulk", "misc", "excluded", "padding"]
Seat = tuple[World, int]  # a rank of one world
Index = tuple[int, ...]


class UnknownElementError(LookupError):
    """The plan has no such parameter, tensor or rank, or the index is outside of it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the first element of a region, or the one element asked for, lies in a local tensor of one rank."""

    world: World
    rank: int
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    offset: int  # in elements, from the start of the tensor
    strides: tuple[int, ...]  # in elements, of each dim of the parameter's view

    @property
    def index(self) -> Index:
        return unravel(self.offset, self.shape)

    @property
    def byte_offset(self) -> int:
        return self.offset * ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        return f"{self.world}:{self.rank} {self.tensor}{list(self.index)}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One region of one parameter, from one training rank to one generation rank.

    Off the bulk route there are no places: misc tensors travel whole, excluded ones do not travel. Padding has one
    place and no parameter.
    """

    parameter: str  # HF name
    route: Route
    reason: str = ""  # for a route other than bulk
    view: tuple[int, ...] = ()  # the parameter's shape as `region` sees it
    region: Region | None = None
    nbytes: int = 0  # on the wire; of a misc or excluded parameter, all of it
    pp_stage: int | None = None  # of the trainer
    src: Place | None = None
    dst: Place | None = None
    relayed_by: int | None = (
        None  # the generation rank that `dst` gets it from; None where it comes straight from `src`
    )
    element: tuple[int, ...] | None = None  # the element asked for, in the HF parameter's shape


def transfers_of(
    plan: Plan, parameter: str | None, tensor: str | None, rank: str | None, element: Sequence[int] | None
) -> Iterator[Transfer]:
    """The transfers that move a parameter or a tensor's content, in the plan's order; all of them if nothing is named.

    `parameter` is an HF name, or a shell pattern of such names. `tensor` is the name of a local tensor of `rank`, which
    is written "train:0". `element` is an index in the shape of either. Raises UnknownElementError at once, before the
    first transfer is taken.
    """
    for name, value in (("parameter", parameter), ("tensor", tensor), ("rank", rank)):
        if not isinstance(value, str | None):
            raise UnknownElementError(f"{name}={value!r} is no text: write parameter='model.norm.weight', rank='gen:3'")
    if element is not None and (isinstance(element, str) or not all(type(n) is int for n in element)):
        raise UnknownElementError(f"element={element!r} is no index: write whole numbers, as in element=(5, 3)")
    seat = None if rank is None else parse_rank(plan, rank)
    if tensor is not None:
        if seat is None or parameter is not None:
            raise UnknownElementError(f"{tensor} is another tensor on every rank: name one rank, and no parameter")
        return _of_tensor(plan, tensor, seat, element)
    if parameter is None or set("*?[") & set(parameter):
        return _of_glob(plan, parameter, seat, element)
    return _of_parameter(plan, parameter, seat, element)


def parse_rank(plan: Plan, text: str) -> Seat:
    """ "gen:3" -> ("gen", 3). Raises UnknownElementError for anything that is no rank of the plan."""
    match = re.fullmatch(r"(train|gen):([0-9]+)", text)
    if match is None:
        raise UnknownElementError(f"cannot read the rank {text!r}, write train:0 or gen:3")
    world: World = "train" if match[1] == "train" else "gen"
    size = plan.train.world if world == "train" else plan.gen.world
    if int(match[2]) >= size:
        raise UnknownElementError(f"{text} is outside of the {size} {world} ranks of the plan (0 to {size - 1})")
    return world, int(match[2])


def find_parameter(plan: Plan, name: str) -> tuple[int, int | None, int | None]:
    """The group, layer and expert of an HF name. Raises UnknownElementError with the names that come close."""
    for number, group in enumerate(plan.groups):
        match = _regex(group.name_pattern).fullmatch(name)
        if match is None:
            continue
        layer, expert = (int(match[field]) if field in match.groupdict() else None for field in ("layer", "expert"))
        if (layer is None or layer in group.layers) and (expert is None or expert < group.experts):
            return number, layer, expert
    raise UnknownElementError(f"the plan has no parameter {name!r}{_parameter_hint(plan, name)}")


def holders_of(plan: Plan, name: str, element: Sequence[int]) -> list[Place]:
    """Every training rank that holds an element of a parameter, also those that serve nobody; [] off the bulk route."""
    number, layer, expert = find_parameter(plan, name)
    point = _point(plan.groups[number], name, element)
    places: set[Place] = set()
    for transfers in plan.transfer_groups:
        if transfers.group != number or (member := transfers.member(layer, expert)) is None:
            continue
        for ranks, pieces in zip(
            plan.rank_grids[transfers.src], plan.patterns[transfers.pattern].src.pieces, strict=True
        ):
            for piece in pieces:
                if piece.region.holds(point):
                    places |= {_place("train", rank, piece, transfers, member, point) for rank in ranks.tolist()}
    return sorted(places, key=lambda place: (place.rank, place.offset, place.tensor))


def local_tensors(plan: Plan, world: World, rank: int) -> dict[str, LocalTensor]:
    """The tensors of one rank that planned transfers read or write, by name."""
    tensors: dict[str, LocalTensor] = {}
    for place in plan.groups_of(world, rank):
        pieces, padding = place.partition.pieces[place.part], place.partition.padding_of(place.part)
        for pattern in dict.fromkeys([*(piece.tensor for piece in pieces), *(box.tensor for box in padding)]):
            for name in place.transfers.tensor_names(pattern, world):
                tensors[name] = LocalTensor(name, pattern.shape, pattern.dtype)
    return tensors


def _of_parameter(plan: Plan, name: str, seat: Seat | None, element: Sequence[int] | None) -> Iterator[Transfer]:
    number, layer, expert = find_parameter(plan, name)
    point = None if element is None else _point(plan.groups[number], name, element)

    def members_of(transfers: TransferGroup) -> Sequence[int]:
        member = transfers.member(layer, expert) if transfers.group == number else None
        return () if member is None else (member,)

    return _of_members(plan, members_of, lambda group: [name] if group == number else [], seat, point)


def _of_glob(plan: Plan, glob: str | None, seat: Seat | None, element: Sequence[int] | None) -> Iterator[Transfer]:
    matches = re.compile(translate(glob or "*")).match
    if element is not None:
        raise UnknownElementError(f"element {list(element)} of which parameter? Name one in place of {glob!r}")
    if not any(matches(name) for group in plan.groups for name in group.names()):
        raise UnknownElementError(f"no parameter of the plan matches {glob!r}; `show PLAN` lists them")

    def members_of(transfers: TransferGroup) -> Sequence[int]:
        names = plan.names_of(transfers)
        return [member for member in range(transfers.members) if glob is None or matches(names.name(member))]

    return _of_members(plan, members_of, lambda group: filter(matches, plan.groups[group].names()), seat, None)


def _of_members(
    plan: Plan,
    members_of: Callable[[TransferGroup], Sequence[int]],
    names_of: Callable[[int], Iterable[str]],  # of a group off the bulk route
    seat: Seat | None,
    point: Index | None,
) -> Iterator[Transfer]:
    unplanned: list[tuple[Route, UnplannedGroup]] = [("misc", entry) for entry in plan.misc]
    unplanned += [("excluded", entry) for entry in plan.excluded]
    for route, entry in unplanned if seat is None else ():
        group = plan.groups[entry.group]
        element = None if point is None else _element(group, point)
        for name in names_of(entry.group):
            yield Transfer(name, route, entry.reason, group.view, None, group.nbytes, element=element)
    uses: Iterable[tuple[int, Sequence[int] | None]] = ((index, None) for index in range(len(plan.transfer_groups)))
    if seat is not None:
        uses = ((place.index, place.overlaps.tolist()) for place in plan.groups_of(*seat))
    for index, overlaps in uses:
        if members := members_of(plan.transfer_groups[index]):
            yield from _of_overlaps(plan, index, members, overlaps, seat, point)


def _of_overlaps(
    plan: Plan,
    index: int,
    members: Sequence[int],
    numbers: Sequence[int] | None,
    seat: Seat | None,
    point: Index | None,
) -> Iterator[Transfer]:
    """Transfers to every destination replica, of some members and overlaps (by number; None: all) of a transfer group."""
    transfers = plan.transfer_groups[index]
    pattern, group = plan.patterns[transfers.pattern], plan.groups[transfers.group]
    numbers = range(len(pattern.overlaps)) if numbers is None else numbers
    overlaps = [number for number in numbers if point is None or pattern.overlaps[number].region.holds(point)]
    if not overlaps:
        return
    src_ranks, dst_ranks = plan.rank_grids[transfers.src], plan.receivers(transfers.dst)
    replicas = plan.dst_replicas(transfers)
    served_by, passed_on_by = _sources_of(plan, transfers, np.array(members), overlaps)  # [members, overlaps, replicas]
    src_part, dst_part = (pattern.parts[world][overlaps][:, None] for world in ("train", "gen"))  # type: ignore[index]
    src = src_ranks[src_part, served_by]
    dst = np.broadcast_to(dst_ranks[dst_part, np.arange(replicas)], src.shape)
    landing = np.where(passed_on_by < 0, -1, dst_ranks[dst_part, passed_on_by])
    chosen = np.ones(src.shape, bool) if seat is None else (src if seat[0] == "train" else dst) == seat[1]
    element, names = None if point is None else _element(group, point), plan.names_of(transfers)
    for i, j, r in np.argwhere(chosen).tolist():
        chosen_overlap = pattern.overlaps[overlaps[j]]
        src_piece, dst_piece = pattern.ends(chosen_overlap)
        first = chosen_overlap.region.start if point is None else point
        yield Transfer(
            parameter=names.name(members[i]),
            route="bulk",
            view=group.view,
            region=chosen_overlap.region,
            nbytes=int(pattern.overlap_bytes[overlaps[j]]),
            pp_stage=transfers.pp_stage,
            src=_place("train", int(src[i, j, r]), src_piece, transfers, members[i], first),
            dst=_place("gen", int(dst[i, j, r]), dst_piece, transfers, members[i], first),
            relayed_by=None if landing[i, j, r] < 0 else int(landing[i, j, r]),
            element=element,
        )


def _sources_of(
    plan: Plan, transfers: TransferGroup, member: NDArray[np.int64], overlaps: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each member, overlap and destination replica: the source replica, and the replica that passes it on, or -1."""
    paths, pattern = plan.paths(transfers), plan.patterns[transfers.pattern]
    only = np.isin(np.arange(len(pattern.overlaps)), overlaps)
    receivers = plan.receivers(transfers.dst).shape[1]
    served_by = np.zeros((len(member), len(overlaps), receivers), np.int64)
    passed_on_by = np.full_like(served_by, -1)
    column = np.zeros(len(pattern.overlaps), np.int64)
    column[overlaps] = np.arange(len(overlaps))
    first = plan.first_hop(transfers, member, only)
    served_by[np.arange(len(member))[:, None], column[first.overlap], first.dst] = first.src
    for hop in paths.later_hops(transfers.first_dst_replica, member, only):
        row, leg = np.nonzero(hop.runs)
        src, dst, at = hop.src[row, leg], hop.dst[row, leg], column[hop.overlap[leg]]
        served_by[row, at, dst] = served_by[row, at, src]
        passed_on_by[row, at, dst] = src
    replicas = plan.dst_replicas(transfers)
    return served_by[..., :replicas], passed_on_by[..., :replicas]


def _place(world: World, rank: int, piece: Piece, transfers: TransferGroup, member: int, point: Index) -> Place:
    tensor, offset = piece.tensor, piece.offset(point, transfers.slot(world, member))
    name = transfers.tensor_name(tensor, world, member)
    return Place(world, rank, name, tensor.shape, tensor.dtype, offset, piece.strides)


def _of_tensor(plan: Plan, name: str, seat: Seat, element: Sequence[int] | None) -> Iterator[Transfer]:
    """Transfers of one of a rank's tensors; an element that is padding gives one transfer with one place."""
    (world, rank), rank_name = seat, f"{seat[0]}:{seat[1]}"
    pieces: list[tuple[RankInGroup, int, list[int]]] = []
    tensor: LocalTensor | None = None
    padding: list[Region] = []
    for place in plan.groups_of(world, rank):
        for number, piece in enumerate(place.partition.pieces[place.part]):
            if members := _members_in(place.transfers, piece.tensor, world, name):
                tensor = piece.tensor
                pieces.append((place, number, members))
        for entry in place.partition.padding_of(place.part):
            if _members_in(place.transfers, entry.tensor, world, name):
                tensor = entry.tensor
                padding.append(entry.box)
    if tensor is None:
        hint = _tensor_hint(plan, world, rank, name)
        raise UnknownElementError(f"no planned transfer touches {name!r} on {rank_name}{hint}")
    offset = None if element is None else _checked_offset(f"{rank_name} {name}", tensor.shape, element)
    if offset is not None and any(box.holds(unravel(offset, tensor.shape)) for box in padding):
        padded = Place(world, rank, name, tensor.shape, tensor.dtype, offset, ())
        src, dst = (padded, None) if world == "train" else (None, padded)
        return iter([Transfer("", "padding", "no parameter fills it", src=src, dst=dst)])
    return _of_pieces(plan, pieces, seat, offset)


def _of_pieces(
    plan: Plan, pieces: Sequence[tuple[RankInGroup, int, list[int]]], seat: Seat, offset: int | None
) -> Iterator[Transfer]:
    """Transfers of some of a rank's pieces (by number, with the members that lie in the tensor)."""
    for place, number, members in pieces:
        piece = place.partition.pieces[place.part][number]
        ends = [(o.src, o.src_piece) if seat[0] == "train" else (o.dst, o.dst_piece) for o in place.pattern.overlaps]
        overlaps = [i for i, end in enumerate(ends) if end == (place.part, number)]
        if offset is None:
            yield from _of_overlaps(plan, place.index, members, overlaps, seat, None)
            continue
        for member in members:
            point = piece.coordinate(offset, place.transfers.slot(seat[0], member))
            if point is not None:
                yield from _of_overlaps(plan, place.index, [member], overlaps, seat, point)


def _members_in(transfers: TransferGroup, tensor: LocalTensor, world: World, name: str) -> list[int]:
    if _regex(tensor.name).fullmatch(name) is None:
        return []
    names = transfers.tensor_names(tensor, world)
    step = transfers.members // len(names)
    return [member for member in range(transfers.members) if names[member // step] == name]


def _point(group: ParameterGroup, name: str, element: Sequence[int]) -> Index:
    """An index of the HF parameter, in coordinates of the group's view."""
    offset = _checked_offset(name, group.shape, element)
    return tuple(element) if group.shape == group.view else unravel(offset, group.view)


def _element(group: ParameterGroup, point: Index) -> Index:
    return point if group.shape == group.view else unravel(ravel(point, group.view), group.shape)


def _checked_offset(what: str, shape: Index, index: Sequence[int]) -> int:
    if len(index) != len(shape) or not all(0 <= number < size for number, size in zip(index, shape, strict=True)):
        last = ",".join(str(size - 1) for size in shape)
        raise UnknownElementError(
            f"index [{','.join(map(str, index))}] is outside of {what}, which has shape {list(shape)}:"
            f" write [{','.join('0' * len(shape))}] to [{last}]"
        )
    return ravel(tuple(index), shape)


@lru_cache(maxsize=4096)
def _regex(name: str) -> re.Pattern[str]:
    """`a.{layer}.b` matches `a.3.b`, with the number as group `layer`."""
    return re.compile(re.sub(r"\\\{(layer|expert|vp)\\\}", r"(?P<\1>0|[1-9][0-9]*)", re.escape(name)))


def _parameter_hint(plan: Plan, name: str) -> str:
    """The layers and experts of the matching pattern, or the patterns that come close."""
    for group in plan.groups:
        if _regex(group.name_pattern).fullmatch(name):
            spans = [f"layers {min(group.layers)} to {max(group.layers)}"] if group.layers else []
            spans += [f"experts 0 to {group.experts - 1}"] if group.experts else []
            return f": {group.name_pattern} has {' and '.join(spans)}"
    generic = re.sub(r"(?<=\.)[0-9]+(?=\.)", "#", name)
    examples = {re.sub(r"\{\w+\}", "#", group.name_pattern): next(group.names()) for group in plan.groups}
    close = get_close_matches(generic, examples, n=3, cutoff=0.6)
    return _did_you_mean(examples[each] for each in close) or "; `show PLAN --parameter '*'` lists them"


def _tensor_hint(plan: Plan, world: World, rank: int, name: str) -> str:
    known = local_tensors(plan, world, rank)
    suffix = engine_named(plan.engine).repeated_suffix if world == "gen" else ""
    if suffix and name + suffix in known:
        return f": the engine repeats it from {name}{suffix}, which the plan fills"
    hint = _did_you_mean(get_close_matches(name, known, n=3, cutoff=0.6))
    if plan.misc:
        count = len(plan.misc_names)
        hint += f". The misc route carries {count} parameters, into tensors that no plan names"
    return hint


def _did_you_mean(names: Iterable[str]) -> str:
    listed = " or ".join(names)
    return f"; did you mean {listed}?" if listed else ""
