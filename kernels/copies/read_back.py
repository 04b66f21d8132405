"""Read the tables of an executor back: which element of which parameter is at which place of a message.

A row that is exchanged, shifted, dropped, doubled, strided otherwise or sent elsewhere changes the sums of its own end
(see `box_sums`). Where a rank pulls or pushes, the tensor of its peer takes the place of the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.model.name_patterns import fill
from mcore_reshard.planner.model.parameters import ITEMSIZE
from mcore_reshard.planner.plan.held import Held, NamedCast
from mcore_reshard.planner.plan.schedule import Schedule

from .bind import BoundSchedule
from .box_sums import IN_MESSAGE, IN_PARAMETER, Base, Weights, box_sum, mixed, number_of, times
from .buckets import Bucket
from .casts import bound_casts, copies_across_bands, wire_dtypes
from .copy_table import SCRATCH, End, Ints, joined
from .peer_table import PeerTable, numbers_by_peer
from .places import Boxes, Dim, Places, boxes_of_copies, boxes_of_rows, find_places, region_dims
from .tiling import Coverage, coverage

_DTYPES = {dtype: number for number, dtype in enumerate(ITEMSIZE)}
_SHOWN = 5  # problems of one kind that are listed


@dataclass(frozen=True, slots=True)
class Executed:
    """The host's copy of the tables that one executor runs, or the rows that others read or write."""

    bound: BoundSchedule
    buckets: tuple[Bucket, ...] = ()
    reaches: PeerTable | None = None  # what this rank reads or writes at its peers
    exposed: Schedule | None = None  # the part that peers read or write where it lies
    wave: int = 0  # of a relay
    device_problems: tuple[str, ...] = ()  # of the tables on a device, when they were read back from there


@dataclass(frozen=True, slots=True)
class Entries:
    """Sums of boxes: between which ranks, in which stage, of which parameter. Every column has a row for each box."""

    schedule: Schedule
    names: Mapping[int, str] | None  # name patterns of groups; None: no plan is behind the schedule
    peer: Ints
    stage: Ints  # index into Schedule.stages
    parameter: Ints  # [boxes, 3]: group, layer, expert; without a plan (transfer group, member, 0)
    weights: Weights

    def name(self, parameter: Sequence[int]) -> str:
        group, layer, expert = parameter
        if self.names is None:
            return self.schedule.parameter_name(group, layer)
        return fill(self.names[group], layer=layer, expert=expert)


class TableReader:
    """Reads the tables of one executor back. `problems` are signs of damage that this rank can see alone."""

    def __init__(self, executed: Executed, program: int, held: Held | None) -> None:
        self._executed, self._held, self._schedule = executed, held, executed.bound.schedule
        self._place = executed.wave, program
        self._tensors = {local.name: number for number, local in enumerate(self._schedule.tensors)}
        self._wire = _wire_dtypes(self._schedule)
        self.problems: list[str] = []
        self.entries: list[Entries] = []
        self.covered = self._read()  # of each tensor, what is written to it

    def _read(self) -> Coverage:
        executed, schedule = self._executed, self._schedule
        self.problems += [*_misplaced(executed.bound), *_foreign_casts(executed.bound, self._held)]
        self.problems += executed.device_problems
        written: list[Boxes | None] = []
        if executed.buckets:
            written.append(self._read_buckets(executed.buckets))
        if executed.reaches is not None:
            written.append(self._read_reaches(executed.reaches))
        if executed.exposed is not None:
            written += self._read_rows(executed.exposed)
        if schedule.world == "train":
            written = []
        return coverage([boxes for boxes in written if boxes is not None], len(schedule.tensors))

    def _read_buckets(self, buckets: Sequence[Bucket]) -> Boxes | None:
        copies = joined([bucket.copies for bucket in buckets])
        bucket = np.repeat(np.arange(len(buckets)), [len(each.copies) for each in buckets])
        here: End = "src" if buckets[0].sends else "dst"

        def name_of(row: int) -> str:
            return buckets[int(bucket[row])].waiting.parameter

        self._check_blocks(copies, here, name_of)
        facts = np.array([(each.peer, each.stage, each.number) for each in buckets], np.int64)[bucket]
        peer, stage, number = facts.T
        boxes = self._boxes(copies, here, copies["dst" if here == "src" else "src"] != SCRATCH, name_of)
        if boxes is not None:
            nothing = np.zeros((len(peer), 2), np.int64)
            self._enter(boxes, peer, stage, mixed(stage, number, *self._full_place(len(peer))), nothing)
            if self._held is None:
                self._compare_with_rows(boxes, peer, stage)
        return boxes

    def _read_reaches(self, table: PeerTable) -> Boxes | None:
        copies, schedule = table.copies, self._schedule
        theirs = copies[table.there].astype(np.int64) - len(schedule.tensors)
        ranks = np.array([each.rank for each in table.theirs], np.int64)
        is_foreign = (theirs < 0) | (theirs >= len(ranks))
        is_foreign[~is_foreign] = ranks[theirs[~is_foreign]] != table.peer[~is_foreign]
        claimed = np.stack([table.transfer_group, table.member], axis=1).astype(np.int64)

        def name_of(row: int) -> str:
            return schedule.parameter_name(*claimed[row].tolist())

        self._check_blocks(copies, table.here, name_of)
        boxes = self._boxes(copies, table.here, is_foreign, name_of)
        if boxes is not None:
            keys = np.array([number_of(each.tensor) for each in table.theirs], np.uint64)[theirs]
            other = times(mixed(table.stage, table.number, *claimed.T, *self._full_place(len(copies))), keys)
            self._enter(boxes, table.peer.astype(np.int64), table.stage, other, claimed)
        return boxes

    def _check_blocks(self, copies: NDArray[np.void], here: End, name_of: Callable[[int], str]) -> None:
        is_across = copies_across_bands(copies, self._executed.bound.casts if here == "src" else {})
        if is_across.any():
            self._report(is_across, "copies take scales of other blocks", name_of)

    def _read_rows(self, schedule: Schedule) -> list[Boxes]:
        """The part that peers read or write where it lies, in the order of its transfers."""
        numbers = numbers_by_peer(np.concatenate([np.zeros(0, np.int32), *(table.peer for table in schedule.tables)]))
        firsts = np.cumsum([0, *map(len, schedule.tables)])
        names = np.array([number_of(local.name) for local in schedule.tensors], np.uint64)
        read = []
        for stage, table in enumerate(schedule.tables):
            number = numbers[firsts[stage] :][: len(table)][table.nbytes > 0]
            table = table.rows(table.nbytes > 0)
            boxes, stages = boxes_of_rows(schedule, table), np.full(len(table), stage)
            claimed = np.stack([table.transfer_group, table.member], axis=1).astype(np.int64)
            other = mixed(stages, number, *claimed.T, *self._full_place(len(table)))
            self._enter(boxes, table.peer.astype(np.int64), stages, times(other, names[boxes.tensor]), claimed)
            read.append(boxes)
        return read

    def _full_place(self, count: int) -> tuple[Ints, Ints]:
        wave, program = self._place
        return np.full(count, wave), np.full(count, program)

    def _boxes(
        self, copies: NDArray[np.void], here: End, is_foreign: NDArray[np.bool_], name_of: Callable[[int], str]
    ) -> Boxes | None:
        """The boxes of copies at this rank; None, and a problem, where they can be none of its schedule's."""
        is_foreign = is_foreign | (copies[here] < 0) | (copies[here] >= len(self._tensors))
        if is_foreign.any():
            self._report(is_foreign, "copies are from or to another place", name_of)
            return None
        boxes, is_broken = boxes_of_copies(self._schedule, copies, here)
        if is_broken.any():
            self._report(is_broken, "copies are not of whole elements", name_of)
            return None
        return boxes

    def _enter(self, boxes: Boxes, peer: Ints, stage: Ints, other: Weights, claimed: Ints) -> None:
        """Enter the sums of boxes; `other` [boxes] is the weight of their messages, `claimed` of no use with a plan."""
        if self._held is None:
            shapes = [box_sum(_on_other_side(shape)) for shape in boxes.shapes]
            sums = np.array(shapes or [0], np.uint64)[boxes.shape]
            parameter = np.concatenate([claimed, np.zeros((len(claimed), 1), np.int64)], axis=1)
            weights = mixed(self._wire[boxes.tensor], *parameter.T)
        else:
            places = find_places(self._held.pieces, self._tensors, boxes)
            sums = self._sums_in_parameters(self._held, boxes, places)
            groups = np.array([each.group for each in self._held.pieces] or [-1], np.int64)[places.held]
            parameter = np.stack([groups, places.layer, places.expert], axis=1)
            weights = times(mixed(self._wire[boxes.tensor], *parameter.T), IN_PARAMETER.powers(places.element))
        weights = times(times(weights, sums), times(other, IN_MESSAGE.powers(boxes.other)))
        names = None if self._held is None else self._held.names
        self.entries.append(Entries(self._schedule, names, peer, np.asarray(stage, np.int64), parameter, weights))

    def _sums_in_parameters(self, held: Held, boxes: Boxes, places: Places) -> Weights:
        """The sum of each box as if its first element had weight 1. Problems: boxes that are not in one piece."""

        def where(row: int) -> str:
            local = self._schedule.tensors[int(boxes.tensor[row])]
            return f"element {int(boxes.offset[row])} of {local.name} {local.shape}"

        kinds = np.unique(mixed(places.held, places.in_slot, boxes.shape), return_index=True, return_inverse=True)
        dims: list[list[Dim] | None] = [
            region_dims(held.pieces[number], in_slot, boxes.shapes[shape]) if number >= 0 else None
            for number, in_slot, shape in zip(
                *(column[kinds[1]].tolist() for column in (places.held, places.in_slot, boxes.shape)), strict=True
            )
        ]
        leaves = np.array([each is None for each in dims], bool)[kinds[2].reshape(-1)]
        if leaves.any():
            self._report(leaves, "copies are not of one part of a parameter that the rank holds", where)
        of_kinds = [0 if each is None else box_sum(_in_parameter(each)) for each in dims]
        return np.array(of_kinds or [0], np.uint64)[kinds[2].reshape(-1)]

    def _report(self, is_wrong: NDArray[np.bool_], what: str, name_of: Callable[[int], str]) -> None:
        first = name_of(int(np.argmax(is_wrong)))
        self.problems.append(f"{int(is_wrong.sum())} of {len(is_wrong)} {what}, first {first}")

    def _compare_with_rows(self, boxes: Boxes, peer: Ints, stage: Ints) -> None:
        """Without a plan: in each tensor, for each peer and stage, the copies touch the elements that the rows say."""
        schedule = self._schedule
        rows = [table.rows(table.nbytes > 0) for table in schedule.tables]
        stages = np.repeat(np.arange(len(rows)), [len(table) for table in rows])
        peers = np.concatenate([np.zeros(0, np.int64), *(table.peer for table in rows)])
        count = len(schedule.tensors)
        of_rows = coverage([boxes_of_rows(schedule, table) for table in rows], count, mixed(stages, peers))
        of_copies = coverage([boxes], count, mixed(stage, peer))
        for tensor in np.flatnonzero(of_rows != of_copies)[:_SHOWN].tolist():
            self.problems.append(f"the copies of {schedule.tensors[tensor].name} are not those of its transfers")


def _on_other_side(shape: Sequence[Dim]) -> Iterator[tuple[int, list[tuple[Base, int]]]]:
    return ((dim.extent, [(IN_MESSAGE, dim.other_step)]) for dim in shape)


def _in_parameter(dims: Iterable[Dim]) -> Iterator[tuple[int, list[tuple[Base, int]]]]:
    return ((dim.extent, [(IN_PARAMETER, dim.step), (IN_MESSAGE, dim.other_step)]) for dim in dims)


def _wire_dtypes(schedule: Schedule) -> Ints:
    """The number of the dtype in which elements of each tensor travel."""
    return np.array([_DTYPES[dtype] for dtype in wire_dtypes(schedule)], np.int64)


def _misplaced(bound: BoundSchedule) -> Iterator[str]:
    """Tensors bound where another one's bytes lie. A buffer in place of a tensor is none of the model's."""
    owners = {known.address: name for name, known in bound.fingerprints.items()}
    for local, tensor in zip(bound.schedule.tensors, bound.tensors, strict=True):
        owner = owners.get(tensor.data_ptr(), local.name)
        if owner != local.name and tensor.numel() and bound.fingerprints[owner].shape.numel():
            yield f"{local.name} is bound to another tensor"


def _foreign_casts(bound: BoundSchedule, held: Held | None) -> Iterator[str]:
    """Casts that are not those of the plan: to another dtype, in other blocks, with scales of another tensor."""
    schedule = bound.schedule
    if dict(bound.casts) != dict(bound_casts(schedule)):
        yield "the casts that are bound are not those of the schedule"
    if held is None or schedule.world != "train":
        return
    casts = {cast.tensor: cast for cast in schedule.casts}
    for index in np.unique(
        np.concatenate([np.zeros(0, np.int64), *(each.tensor for each in schedule.tables)])
    ).tolist():
        name, cast = schedule.tensors[index].name, casts.get(index)
        planned = held.casts.get(name)
        scales = None if cast is None or cast.scales is None else schedule.tensors[cast.scales].name
        found = None if cast is None else NamedCast(cast.to, scales, cast.block)
        if found != planned:
            yield f"{name} is cast as {found}, the plan says {planned}"
