"""Where the elements that copies touch lie in the parameters: the layout of a rank, read backwards.

A copy knows bytes of a local tensor. The rank's pieces say which region of which parameter lies there. A box of elements
that is contiguous in its tensor may span several dims of the parameter, so it is taken apart first:

    weight [6, 4], this rank has columns 2 and 3 as a tensor [6, 2]
    copy of 12 elements from element 0     ->  6 rows of 2, from element 2 of the weight on, steps 4 and 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.layout.geometry import row_major_strides, unravel
from mcore_reshard.planner.plan.held import HeldPiece
from mcore_reshard.planner.plan.schedule import Schedule, TransferTable

from .box_sums import mixed
from .casts import itemsizes, wire_itemsizes
from .copy_table import OUTER_DIMS, Ints, repeat


class Dim(NamedTuple):
    """One loop of a box."""

    extent: int
    step: int  # elements of the local tensor
    other_step: int  # bytes on the other side of the copy: in a message, or in another tensor


Shape = tuple[Dim, ...]


class Boxes(NamedTuple):
    """Boxes of elements of local tensors, and where they lie on the other side. Every column has a row for each box."""

    tensor: Ints  # index into Schedule.tensors
    offset: Ints  # elements from the start of the tensor
    other: Ints  # bytes from the start of the other side
    shape: Ints  # index into shapes
    shapes: Sequence[Shape]


class Places(NamedTuple):
    """The parameter of each box, and the place of its first element there."""

    held: Ints  # index into the rank's held pieces; -1: no parameter lies there
    layer: Ints
    expert: Ints
    element: Ints  # of the parameter, counted row-major
    in_slot: Ints  # offset of the box less that of its expert's slot: alike for all experts


def boxes_of_rows(schedule: Schedule, table: TransferTable) -> Boxes:
    """The boxes that transfers say, with the local tensor itself on the other side. Empty ones are left out."""
    local = itemsizes(schedule)
    table = table.rows(table.nbytes > 0)
    tensor = table.tensor.astype(np.int64)
    keys, shape = np.unique(table.strided_box * np.int64(16) + local[tensor], return_inverse=True)
    shapes = []
    for key in keys.tolist():
        box, itemsize = schedule.strided_boxes[key // 16], key % 16
        dims = zip(box.extents, box.strides, strict=True)
        shapes.append(tuple(Dim(extent, step, step * itemsize) for extent, step in dims if extent > 1))
    return Boxes(tensor, table.offset, table.offset * local[tensor], shape.reshape(-1), shapes)


def boxes_of_copies(
    schedule: Schedule, copies: NDArray[np.void], here: Literal["src", "dst"]
) -> tuple[Boxes, NDArray[np.bool_]]:
    """The boxes of copies (dtype COPY) at their local end, and which copies are none: not made of whole elements there.

    Copies that cast have elements of another size on the other side, where `row_bytes` counts. Base indices must be those
    of tensors at the local end.
    """
    there = "dst" if here == "src" else "src"
    tensor = copies[here].astype(np.int64)
    size, other_size = itemsizes(schedule)[tensor], wire_itemsizes(schedule)[tensor]
    strides, other_strides = copies[here + "_strides"], copies[there + "_strides"]
    row, left_over = np.divmod(copies["row_bytes"], other_size)
    extents = copies["extents"]
    is_whole = (left_over == 0) & (copies[here + "_offset"] % size == 0) & (copies["row_bytes"] > 0)
    is_whole &= ((strides % size[:, None] == 0) | (extents == 1)).all(axis=1) & (extents > 0).all(axis=1)
    columns = [extents, np.where(extents > 1, strides // size[:, None], 0), np.where(extents > 1, other_strides, 0)]
    keys = np.concatenate([*columns, row[:, None], other_size[:, None]], axis=1)
    _, first, shape = np.unique(mixed(*keys.T), return_index=True, return_inverse=True)
    shapes = []
    for key in keys[first].tolist():
        loops = zip(key[:OUTER_DIMS], key[OUTER_DIMS:], key[2 * OUTER_DIMS :], strict=False)
        dims = [Dim(*loop) for loop in loops] + [Dim(key[-2], 1, key[-1])]
        shapes.append(tuple(dim for dim in dims if dim.extent > 1))
    offset = copies[here + "_offset"] // size
    return Boxes(tensor, offset, copies[there + "_offset"], shape.reshape(-1), shapes), ~is_whole


def find_places(held: Sequence[HeldPiece], tensors: Mapping[str, int], boxes: Boxes) -> Places:
    """The held piece that the first element of each box lies in; `tensors` has the index of each tensor by name."""
    count = len(boxes.tensor)
    places = Places(np.full(count, -1), *(np.zeros(count, np.int64) for _ in range(4)))
    order = np.argsort(boxes.tensor, kind="stable")
    firsts = np.searchsorted(boxes.tensor[order], np.arange(len(tensors) + 1))
    for number, each in enumerate(held):
        known = np.array([tensors.get(name, -1) for name in each.tensors], np.int64)
        entry, box = repeat(np.where(known < 0, 0, firsts[known + 1] - firsts[known]))
        rows = order[firsts[known][entry] + box]
        is_new = places.held[rows] < 0
        _place(each, number, rows[is_new], entry[is_new], boxes, places)
    return places


def region_dims(held: HeldPiece, offset: int, shape: Shape) -> list[Dim] | None:
    """The dims of a box in the parameter: `step` counts its elements. None if the box leaves the piece.

    `offset` is that of the first element, in the slot of the first expert.
    """
    piece = held.piece
    sizes, strides = piece.view, row_major_strides(piece.view)
    box = piece.local(held.slot)
    place = list(unravel(offset, sizes))
    steps = dict(zip(piece.dims, row_major_strides(held.shape), strict=True))  # in the parameter, by local dim
    dims: list[Dim] = []
    loops = list(shape)
    while loops:
        extent, step, other_step = loops.pop()
        if extent == 1:
            continue
        dim = next((d for d, size in enumerate(sizes) if size > 1 and 0 < strides[d] <= step), None)
        if dim is None or step % strides[dim] or dim not in steps:
            return None
        stride = step // strides[dim]
        inside = -(-(sizes[dim] - place[dim]) // stride)  # steps until the dim ends
        if extent > inside:  # contiguous over several dims: this one, and a loop over the next outer one
            if inside < 2 or stride * inside != sizes[dim] or extent % inside:
                return None
            loops.append(Dim(extent // inside, step * inside, other_step * inside))
        taken = min(extent, inside)
        place[dim] += (taken - 1) * stride
        if place[dim] >= box.stop[dim]:
            return None
        dims.append(Dim(taken, stride * steps[dim], other_step))
    return dims


def _place(each: HeldPiece, number: int, rows: Ints, entry: Ints, boxes: Boxes, places: Places) -> None:
    """Enter the boxes among `rows` that begin in this held piece; `entry` is the number of each one's tensor in it."""
    piece, box = each.piece, each.piece.local(each.slot)
    strides = row_major_strides(piece.view)
    offset = boxes.offset[rows]
    inside = (offset >= 0) & (offset < prod(piece.view))
    expert = entry % each.expert_count if len(each.tensors) > len(each.layers) else np.zeros_like(entry)
    element = np.zeros_like(offset)
    steps = dict(zip(piece.dims, zip(piece.region.start, row_major_strides(each.shape), strict=True), strict=True))
    for dim, (size, stride) in enumerate(zip(piece.view, strides, strict=True)):
        place = offset // stride % size - box.start[dim]
        if dim == piece.slot_dim:
            if len(each.tensors) > len(each.layers):
                place = place - expert
            else:
                expert = place
                inside &= (place >= 0) & (place < each.expert_count)
                continue
        inside &= (place >= 0) & (place < box.stop[dim] - box.start[dim])
        if dim in steps:
            start, step = steps[dim]
            element += (start + place) * step
    rows = rows[inside]
    layer = entry // each.expert_count if len(each.tensors) > len(each.layers) else entry
    places.held[rows] = number
    places.layer[rows] = np.array(each.layers, np.int64)[layer[inside]]
    places.expert[rows] = each.experts[0] + expert[inside]
    places.element[rows] = element[inside]
    slot_stride = strides[piece.slot_dim] if piece.slot_dim >= 0 else 0
    places.in_slot[rows] = offset[inside] - expert[inside] * slot_stride
