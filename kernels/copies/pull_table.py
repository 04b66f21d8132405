"""From what a rank pulls to one table of copies, between its sources' tensors and its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.errors import BindError
from mcore_reshard.planner.plan.schedule import Schedule, SourceTable, StageSchedule, TransferTable

from .checks import itemsizes
from .copy_table import COPY, expand, strided_copies

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that is read, and the training rank that holds it."""

    rank: int
    tensor: str


@dataclass(frozen=True, slots=True)
class PullTable:
    """Everything that a generation rank pulls, stage by stage in schedule order.

    In `copies` (dtype COPY) base indices below `len(Schedule.tensors)` are the rank's own tensors; the sources follow
    them. The other columns have a row for each copy.
    """

    copies: NDArray[np.void]
    sources: tuple[Source, ...]
    peer: Ints  # training rank
    stage: Ints  # index into Schedule.stages
    transfer_group: Ints
    member: Ints


def pull_table(schedule: Schedule, source_table: SourceTable) -> PullTable:
    """The copies that bring `schedule.stages[i].recvs` from where `source_table.stages[i]` says they lie.

    Raises `BindError` where the two do not describe the same transfers of the same plan.
    """
    if problems := _disagreements(schedule, source_table):
        raise BindError(schedule.name, problems)
    keys = np.concatenate(
        [_source_keys(table, source_table) for table in source_table.stages] or [np.zeros(0, np.int64)]
    )
    held, source_of = np.unique(keys, return_inverse=True)
    sources = tuple(
        Source(rank, source_table.tensors[tensor].name)
        for rank, tensor in (divmod(key, len(source_table.tensors)) for key in held.tolist())
    )
    ends = np.cumsum([len(table) for table in source_table.stages])
    parts = [
        _stage_copies(
            schedule,
            source_table,
            index,
            source_of[end - len(source_table.stages[index]) : end] + len(schedule.tensors),
        )
        for index, end in enumerate(ends.tolist())
    ]
    copies = np.concatenate([copies for copies, _ in parts]) if parts else np.empty(0, COPY)

    def column(name: str) -> Ints:
        columns = [
            getattr(source_table.stages[index], name)[rows].astype(np.int64) for index, (_, rows) in enumerate(parts)
        ]
        return np.concatenate(columns) if columns else np.zeros(0, np.int64)

    stage = np.repeat(np.arange(len(parts)), [len(rows) for _, rows in parts])
    return PullTable(copies, sources, column("peer"), stage, column("transfer_group"), column("member"))


def _source_keys(table: TransferTable, source_table: SourceTable) -> Ints:
    return table.peer * np.int64(len(source_table.tensors)) + table.tensor


def _stage_copies(
    schedule: Schedule, source_table: SourceTable, index: int, source: Ints
) -> tuple[NDArray[np.void], Ints]:
    """(copies of one stage, the transfer each belongs to). `source` is the base index of each transfer's source."""
    recvs, table = schedule.stages[index].recvs, source_table.stages[index]
    itemsize = itemsizes(schedule)[recvs.tensor]
    kinds = np.stack([table.strided_box, recvs.strided_box, itemsize])
    kinds, kind_of = np.unique(kinds, axis=1, return_inverse=True)
    recipes = [_recipe(schedule, source_table, *kind) for kind in kinds.T.tolist()]
    rows, members = expand(kind_of.reshape(-1), np.array([len(recipe) for recipe in recipes], np.int64))
    copies = np.concatenate(recipes)[members] if recipes else np.empty(0, COPY)
    copies["src"], copies["dst"] = source[rows], recvs.tensor[rows]
    copies["src_offset"] += (table.offset * itemsize)[rows]
    copies["dst_offset"] += (recvs.offset * itemsize)[rows]
    return copies, rows


def _recipe(schedule: Schedule, source_table: SourceTable, src: int, dst: int, itemsize: int) -> NDArray[np.void]:
    """The copies of a transfer between two geometries, with offsets from its first element on both sides."""
    extents = schedule.strided_boxes[dst].extents
    src_strides, dst_strides = source_table.strided_boxes[src].strides, schedule.strided_boxes[dst].strides
    return np.array(
        [
            (0, 0, c.src_offset, c.dst_offset, c.extents, c.src_strides, c.dst_strides, c.row_bytes)
            for c in strided_copies(extents, src_strides, dst_strides, itemsize)
        ],
        COPY,
    )


def _disagreements(schedule: Schedule, source_table: SourceTable) -> list[str]:
    if (source_table.rank, source_table.digest) != (schedule.rank, schedule.digest):
        return [
            f"the pulls are those of gen:{source_table.rank} in plan {source_table.digest}, the plan here is {schedule.digest}"
        ]
    if len(source_table.stages) != len(schedule.stages):
        return [f"the pulls have {len(source_table.stages)} stages, the schedule {len(schedule.stages)}"]
    return [
        f"stage {stage.pp_stage}: the pulls are not those of the transfers received"
        for stage, table in zip(schedule.stages, source_table.stages, strict=True)
        if not _same_transfers(schedule, source_table, stage, table)
    ]


def _same_transfers(schedule: Schedule, source_table: SourceTable, stage: StageSchedule, table: TransferTable) -> bool:
    same = all(
        np.array_equal(getattr(stage.recvs, name), getattr(table, name))
        for name in ("peer", "nbytes", "transfer_group", "member")
    )
    if not same:
        return False
    pairs = {*zip(table.strided_box.tolist(), stage.recvs.strided_box.tolist(), strict=True)}
    dtypes = {*zip(table.tensor.tolist(), stage.recvs.tensor.tolist(), strict=True)}
    return all(
        source_table.strided_boxes[src].extents == schedule.strided_boxes[dst].extents for src, dst in pairs
    ) and all(source_table.tensors[src].dtype == schedule.tensors[dst].dtype for src, dst in dtypes)
