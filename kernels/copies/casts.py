"""Casts of a schedule: which tensors change their dtype when they are sent, and where the scales of blocks lie.

A cast belongs to a tensor; a table of copies does not mention it. A copy from a tensor with a cast *is* a cast. Its
source strides count bytes of the tensor; its row and its destination strides count bytes on the wire. In a cast to block
FP8 each copy stays within one row of blocks of one matrix. So one row of scales serves all of it:

    weight [5, 4], blocks of 2 x 2      scales [3, 2]      copies of rows 1 to 4, all columns
    row 0  . . . .                       s0 s1
    row 1  a a a a                                          row 1       with s0 s1
    row 2  b b b b                       s2 s3
    row 3  b b b b                                          rows 2, 3   with s2 s3
    row 4  c c c c                       s4 s5              row 4       with s4 s5
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.model.parameters import ITEMSIZE
from mcore_reshard.planner.model.precision import CASTS, FP8, grid_of
from mcore_reshard.planner.plan.schedule import Cast, Schedule, StridedBox

from .copy_table import COPY, Ints, distinct, strided_copies


@dataclass(frozen=True, slots=True)
class CastForm:
    """The form that casts of one kind share: dtypes and blocks."""

    src: str
    to: str
    matrix: tuple[int, int] = (0, 0)  # rows, columns of the tensor's last two dims; with scales only
    block: tuple[int, int] = (0, 0)

    @property
    def src_bytes(self) -> int:
        return ITEMSIZE[self.src]

    @property
    def to_bytes(self) -> int:
        return ITEMSIZE[self.to]

    @property
    def blocks(self) -> tuple[int, int]:
        """Rows and columns of a matrix's scales."""
        return grid_of(self.matrix, self.block)

    def scale_of(self, elements: Ints) -> tuple[Ints, Ints]:
        """Elements of a tensor, counted row-major -> (index of their scale, column within its block)."""
        rows, columns = self.matrix
        row, column = np.divmod(elements, columns)
        stacked, row = np.divmod(row, rows)
        down, across = self.blocks
        return (stacked * down + row // self.block[0]) * across + column // self.block[1], column % self.block[1]


@dataclass(frozen=True, slots=True)
class TensorCast:
    form: CastForm
    scales: int | None  # index of the tensor of scales


Casts = Mapping[int, TensorCast]  # by index of the source tensor


def bound_casts(schedule: Schedule) -> Casts:
    """The casts of all tensors that the rank sends from. The schedule has no `cast_problems`."""
    sent = {tensor for stage in schedule.stages for tensor in np.unique(stage.sends.tensor).tolist()}
    return {cast.tensor: _tensor_cast(schedule, cast) for cast in schedule.casts if cast.tensor in sent}


def itemsizes(schedule: Schedule) -> Ints:
    """Bytes of an element of each of the schedule's tensors."""
    return np.array([ITEMSIZE[local.dtype] for local in schedule.tensors], np.int64)


def wire_itemsizes(schedule: Schedule) -> Ints:
    """Bytes on the wire of an element of each of the schedule's tensors."""
    return np.array([ITEMSIZE[dtype] for dtype in wire_dtypes(schedule)], np.int64)


def wire_dtypes(schedule: Schedule) -> list[str]:
    """The dtype in which elements of each of the schedule's tensors travel."""
    dtypes = [local.dtype for local in schedule.tensors]
    for cast in schedule.casts:
        dtypes[cast.tensor] = cast.to
    return dtypes


@dataclass(frozen=True, slots=True)
class CastKinds:
    """What distinguishes the casts of a schedule's tensors: transfers of one kind need the same copies."""

    forms: tuple[CastForm | None, ...]  # None, then those of the casts
    form_of: Ints  # [tensors] index into forms
    period: Ints  # [tensors] elements after which places in blocks repeat; 1 where nothing is cast

    @classmethod
    def of(cls, schedule: Schedule) -> CastKinds:
        casts = bound_casts(schedule)
        forms = (None, *{cast.form: None for cast in casts.values()})
        form_of, period = np.zeros(len(schedule.tensors), np.int64), np.ones(len(schedule.tensors), np.int64)
        for tensor, cast in casts.items():
            form_of[tensor] = forms.index(cast.form)
            period[tensor] = max(1, prod(cast.form.matrix))
        return cls(forms, form_of, period)


def box_copies(
    extents: tuple[int, ...],
    src_strides: tuple[int, ...],
    dst_strides: tuple[int, ...],
    itemsize: int,
    form: CastForm | None = None,
    place: int = 0,
) -> NDArray[np.void]:
    """The copies (dtype COPY) of a box that starts `place` elements into a tensor, and is cast there if it has a form.

    `itemsize` is of the source. Strides are in elements, offsets in bytes from the box's first element on each side.
    """
    if form is None:
        return strided_copies(extents, src_strides, dst_strides, itemsize)
    if form.block == (0, 0):
        return strided_copies(extents, src_strides, dst_strides, form.to_bytes, src_itemsize=itemsize)
    return band_copies(form, place, extents, src_strides, dst_strides)


def band_copies(
    form: CastForm, place: int, extents: tuple[int, ...], strides: tuple[int, ...], dst_strides: tuple[int, ...]
) -> NDArray[np.void]:
    """The copies (dtype COPY) of a box that starts `place` elements into a matrix, each within one row of blocks.

    Offsets count from the box's start. `extents` and element `strides` are those of a `StridedBox` in which
    `cast_problems` finds nothing; rows that are contiguous there are so at the destination.
    """
    dims, columns = _rows_of(extents, strides, dst_strides)
    height, width = form.matrix
    first_row = place // width
    rows, to = np.array([first_row], np.int64), np.zeros(1, np.int64)
    for extent, stride, dst_stride in dims:
        rows = (rows[:, None] + np.arange(extent) * (stride // width)).reshape(-1)
        to = (to[:, None] + np.arange(extent) * dst_stride).reshape(-1)
    step = dims[-1][2] if dims else 0  # from row to row at the destination
    bands = rows // height * form.blocks[0] + rows % height // form.block[0]
    starts = np.flatnonzero(np.append(True, (np.diff(rows) != 1) | (np.diff(bands) != 0) | (np.diff(to) != step)))
    src_row = width * form.src_bytes
    copies = np.zeros(len(starts), COPY)
    copies["src_offset"] = (rows[starts] - first_row) * src_row
    copies["dst_offset"] = to[starts] * form.to_bytes
    copies["extents"] = 1
    copies["extents"][:, -1] = np.diff(np.append(starts, len(rows)))
    copies["src_strides"][:, -1] = src_row
    copies["dst_strides"][:, -1] = step * form.to_bytes
    copies["row_bytes"] = columns * form.to_bytes
    return copies


def copies_across_bands(copies: NDArray[np.void], casts: Casts) -> NDArray[np.bool_]:
    """Which copies (dtype COPY) need scales of more than one row of blocks. An executor would take those of the first."""
    across = np.zeros(len(copies), bool)
    forms: dict[CastForm, list[int]] = {}
    for index, cast in casts.items():
        if cast.scales is not None:
            forms.setdefault(cast.form, []).append(index)
    for form, tensors in forms.items():
        chosen = np.flatnonzero(np.isin(copies["src"], tensors))
        of_form, (height, width) = copies[chosen], form.matrix
        element, between = np.divmod(of_form["src_offset"], form.src_bytes)
        rows, step = of_form["extents"][:, -1], np.where(of_form["extents"] > 1, of_form["src_strides"], 0)[:, -1]
        first, last = element // width, (element + (rows - 1) * (step // form.src_bytes)) // width
        bands = [row // height * form.blocks[0] + row % height // form.block[0] for row in (first, last)]
        across[chosen] = (
            (between != 0)
            | (step % (width * form.src_bytes) != 0)
            | (bands[0] != bands[1])
            | (of_form["extents"][:, :-1] != 1).any(axis=1)
            | (element % width + of_form["row_bytes"] // form.to_bytes > width)
        )
    return across


def _rows_of(extents: tuple[int, ...], *strides: tuple[int, ...]) -> tuple[list[tuple[int, ...]], int]:
    """((extent, stride on each side) of the dims outside of a box's rows, elements of a row, contiguous on each side)."""
    dims = [dim for dim in zip(extents, *strides, strict=True) if dim[0] > 1]
    return (dims[:-1], dims[-1][0]) if dims and {*dims[-1][1:]} == {1} else (dims, 1)


def cast_problems(schedule: Schedule) -> list[str]:
    """Unknown casts, scales that do not fit their casts, and transfers that a block cast cannot address."""
    problems: list[str] = []
    computed, seen = {*schedule.computed}, set[int]()
    claimed: dict[int, str] = {}  # tensor of scales -> the weight they are of
    in_blocks: list[Cast] = []
    for cast in schedule.casts:
        if not 0 <= cast.tensor < len(schedule.tensors):
            problems.append(f"a cast of tensor {cast.tensor}, there are {len(schedule.tensors)}")
            continue
        name = schedule.tensors[cast.tensor].name
        of_cast = [*_cast_problems(schedule, cast, computed)]
        if cast.tensor in seen:
            of_cast.append("two casts")
        seen.add(cast.tensor)
        if cast.scales is not None:
            if cast.scales in claimed:
                of_cast.append(f"its scales are those of {claimed[cast.scales]} too")
            claimed[cast.scales] = name
        problems += [f"cast of {name} to {cast.to}: {problem}" for problem in of_cast]
        if not of_cast and cast.scales is not None:
            in_blocks.append(cast)
    problems += _block_problems(schedule, in_blocks)
    problems += [f"{schedule.tensors[index].name}: scales of no cast" for index in sorted(computed - claimed.keys())]
    return problems


def _tensor_cast(schedule: Schedule, cast: Cast) -> TensorCast:
    local = schedule.tensors[cast.tensor]
    if cast.scales is None:
        return TensorCast(CastForm(local.dtype, cast.to), None)
    rows, columns = local.shape[-2:]
    return TensorCast(CastForm(local.dtype, cast.to, (rows, columns), cast.block), cast.scales)


def _cast_problems(schedule: Schedule, cast: Cast, computed: set[int]) -> Iterator[str]:
    local = schedule.tensors[cast.tensor]
    if schedule.world != "train":
        yield "only training ranks cast"
    if cast.tensor in computed:
        yield "a cast of computed scales"
    if (local.dtype, cast.to) not in CASTS:
        known = ", ".join(f"{src} to {to}" for src, to in CASTS)
        yield f"no cast from {local.dtype} is known (there are {known})"
        return
    if (cast.scales is not None) != (cast.to == FP8):
        yield "scales are for casts to float8_e4m3fn, and needed there"
    if cast.scales is None:
        return
    if len(local.shape) < 2 or min(cast.block) < 1:
        yield f"shape {local.shape} in blocks of {cast.block}: there are no such blocks"
        return
    if cast.scales not in computed:
        yield "its scales are not among the tensors that are computed"
        return
    *stacked, rows, columns = local.shape
    shape = (*stacked, *grid_of((rows, columns), cast.block))
    scales = schedule.tensors[cast.scales]
    if (scales.shape, scales.dtype) != (shape, "float32"):
        yield f"scales {scales.name} are {scales.dtype} {scales.shape}, blocks need float32 {shape}"


def _block_problems(schedule: Schedule, casts: Sequence[Cast]) -> list[str]:
    """For every tensor, the first transfer whose rows are neither rows of the matrix that is cast nor parts of its rows."""
    of_tensor = {cast.tensor: cast for cast in casts}
    width = np.zeros(len(schedule.tensors), np.int64)  # 0: not cast in blocks
    for tensor in of_tensor:
        width[tensor] = schedule.tensors[tensor].shape[-1]
    problems: dict[int, str] = {}
    for stage in schedule.stages:
        table = stage.sends.rows(width[stage.sends.tensor] > 0)
        columns = width[table.tensor]
        kinds, kind_of = distinct(table.strided_box, table.offset % columns, columns)
        wrong = [not _is_addressable(schedule.strided_boxes[kind[0]], *kind[1:]) for kind in kinds]
        for row in np.flatnonzero(np.array(wrong, bool)[kind_of]).tolist():
            tensor, (strided_box, first, _) = int(table.tensor[row]), kinds[kind_of[row]]
            local = schedule.tensors[tensor]
            name = schedule.parameter_name(int(table.transfer_group[row]), int(table.member[row]))
            problems.setdefault(
                tensor,
                f"stage {stage.pp_stage}: {name} leaves {local.name} {local.shape} cast in blocks"
                f" of {of_tensor[tensor].block}, but {schedule.strided_boxes[strided_box]} from column {first} is not made"
                " of its rows",
            )
    return [*problems.values()]


def _is_addressable(strided_box: StridedBox, first: int, columns: int) -> bool:
    dims, row = _rows_of(strided_box.extents, strided_box.strides)
    return 0 in strided_box.extents or (first + row <= columns and all(stride % columns == 0 for _, stride in dims))
