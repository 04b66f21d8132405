"""One table of copies for everything that a generation rank pulls, from its sources' tensors into its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.errors import BindError
from mcore_reshard.planner.plan.schedule import Schedule, SourceTable, StageSchedule, TransferTable

from .casts import itemsizes
from .copy_table import distinct, expand_copies, joined, strided_copies

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
    count = len(source_table.tensors)
    keys = [table.peer * np.int64(count) + table.tensor for table in source_table.stages]
    known = np.unique(np.concatenate([np.zeros(0, np.int64), *keys]))
    sources = tuple(Source(key // count, source_table.tensors[key % count].name) for key in known.tolist())
    copies, columns = [], []
    for index, (stage, table) in enumerate(zip(schedule.stages, source_table.stages, strict=True)):
        source = np.searchsorted(known, keys[index]) + len(schedule.tensors)
        transfer, pulled = _stage_copies(schedule, source_table, stage.recvs, table, source)
        copies.append(pulled)
        stage_of = np.full(len(transfer), index)
        columns.append(
            np.stack([table.peer[transfer], stage_of, table.transfer_group[transfer], table.member[transfer]])
        )
    peer, stage_of, transfer_group, member = np.concatenate([np.zeros((4, 0), np.int64), *columns], axis=1)
    return PullTable(joined(copies), sources, peer, stage_of, transfer_group, member)


def _stage_copies(
    schedule: Schedule, source_table: SourceTable, recvs: TransferTable, table: TransferTable, source: Ints
) -> tuple[Ints, NDArray[np.void]]:
    """(the transfer of each copy, the copies) of one stage. `source` is the base index of each transfer's source."""

    def copies_of(src_box: int, dst_box: int, itemsize: int) -> NDArray[np.void]:
        src, dst = source_table.strided_boxes[src_box], schedule.strided_boxes[dst_box]
        return strided_copies(dst.extents, src.strides, dst.strides, itemsize)

    itemsize = itemsizes(schedule)[recvs.tensor]
    kinds, kind_of = distinct(table.strided_box, recvs.strided_box, itemsize)
    transfer, copies = expand_copies(kind_of, [copies_of(*kind) for kind in kinds])
    copies["src"], copies["dst"] = source[transfer], recvs.tensor[transfer]
    copies["src_offset"] += (table.offset * itemsize)[transfer]
    copies["dst_offset"] += (recvs.offset * itemsize)[transfer]
    return transfer, copies


def _disagreements(schedule: Schedule, source_table: SourceTable) -> list[str]:
    if (source_table.rank, source_table.digest) != (schedule.rank, schedule.digest):
        return [
            f"the pulls are those of gen:{source_table.rank} in plan {source_table.digest};"
            f" this is {schedule.name} in plan {schedule.digest}"
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
