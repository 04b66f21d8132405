"""One table of copies between a rank's own tensors and those of its peers, which the rank runs alone.

a pull    from the tensors of training ranks, or of other replicas, into the own ones
a push    from the own tensors into the same ones of other replicas
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.errors import BindError
from mcore_reshard.planner.plan.schedule import OtherEnd, Schedule, TransferTable

from .casts import itemsizes
from .copy_table import End, Ints, distinct, expand_copies, repeat, strided_copies


class PeerTensor(NamedTuple):
    """A tensor of a peer."""

    rank: int
    tensor: str


@dataclass(frozen=True, slots=True)
class PeerTable:
    """Everything that a rank pulls, or pushes, stage by stage in schedule order.

    In `copies` (dtype COPY) base indices below `len(Schedule.tensors)` are the rank's own tensors; those of peers follow
    them. The other columns have a row for each copy.
    """

    here: End  # the rank's own end: "dst" of pulls, "src" of pushes
    copies: NDArray[np.void]
    theirs: tuple[PeerTensor, ...]
    peer: NDArray[np.int32]  # rank in the other world
    stage: Ints  # index into Schedule.stages
    transfer_group: NDArray[np.int32]
    member: NDArray[np.int32]
    number: Ints  # of the transfer among those with its peer
    transfer: Ints  # the same among all: its row in `joined_transfers`

    @property
    def there(self) -> End:
        return "src" if self.here == "dst" else "dst"


def pull_table(schedule: Schedule, other_end: OtherEnd) -> PeerTable:
    """The copies that bring `schedule.stages[i].recvs` from where `other_end.stages[i]` says they lie.

    Raises `BindError` where the two do not describe the same transfers of the same plan.
    """
    if problems := _disagreements(schedule, other_end):
        raise BindError(schedule.name, problems)
    recvs, pulls = joined_transfers([stage.recvs for stage in schedule.stages]), joined_transfers(other_end.stages)
    stage, _ = repeat(np.array([len(table) for table in other_end.stages], np.int64))
    itemsize = itemsizes(schedule)[recvs.tensor]

    def copies_of(src_box: int, dst_box: int, itemsize: int) -> NDArray[np.void]:
        src, dst = other_end.strided_boxes[src_box], schedule.strided_boxes[dst_box]
        return strided_copies(dst.extents, src.strides, dst.strides, itemsize)

    kinds, kind_of = distinct(pulls.strided_box, recvs.strided_box, itemsize)
    transfer, copies = expand_copies(kind_of, [copies_of(*kind) for kind in kinds])
    count = len(other_end.tensors)
    keys, source = np.unique(pulls.peer * np.int64(count) + pulls.tensor, return_inverse=True)
    copies["src"], copies["dst"] = len(schedule.tensors) + source[transfer], recvs.tensor[transfer]
    copies["src_offset"] += (pulls.offset * itemsize)[transfer]
    copies["dst_offset"] += (recvs.offset * itemsize)[transfer]
    theirs = tuple(PeerTensor(key // count, other_end.tensors[key % count].name) for key in keys.tolist())
    group, member = pulls.transfer_group[transfer], pulls.member[transfer]
    number = numbers_by_peer(pulls.peer)[transfer]
    return PeerTable("dst", copies, theirs, pulls.peer[transfer], stage[transfer], group, member, number, transfer)


def push_table(schedule: Schedule) -> PeerTable:
    """The copies that bring `schedule.stages[i].sends` to other replicas, which have the same tensors."""
    sends = schedule.tables
    elsewhere = OtherEnd(schedule.rank, schedule.digest, schedule.tensors, schedule.strided_boxes, tuple(sends))
    stages = tuple(replace(stage, sends=stage.recvs, recvs=stage.sends) for stage in schedule.stages)
    pulls = pull_table(replace(schedule, stages=stages), elsewhere)
    copies = pulls.copies.copy()
    for column in ("", "_offset", "_strides"):
        copies[f"src{column}"], copies[f"dst{column}"] = pulls.copies[f"dst{column}"], pulls.copies[f"src{column}"]
    return replace(pulls, here="src", copies=copies)


def numbers_by_peer(peer: NDArray[np.int32]) -> Ints:
    """The number of each transfer among those of its peer: [4, 7, 4] -> [0, 0, 1]."""
    order = np.argsort(peer, kind="stable")
    counts = np.unique(peer, return_counts=True)[1]
    numbers = np.empty(len(peer), np.int64)
    numbers[order] = repeat(counts)[1]
    return numbers


def joined_transfers(tables: Sequence[TransferTable]) -> TransferTable:
    """The transfers of all stages, in order."""
    none = np.empty(0, np.int32)  # there may be no tables
    columns = ([none, *(getattr(table, column.name) for table in tables)] for column in fields(TransferTable))
    return TransferTable(*map(np.concatenate, columns))


def _disagreements(schedule: Schedule, other_end: OtherEnd) -> list[str]:
    if (other_end.rank, other_end.digest) != (schedule.rank, schedule.digest):
        return [
            f"the pulls are those of rank {other_end.rank} of the engine in plan {other_end.digest};"
            f" this is {schedule.name}, rank {schedule.rank} of the engine in plan {schedule.digest}"
        ]
    if len(other_end.stages) != len(schedule.stages):
        return [f"the pulls have {len(other_end.stages)} stages, the schedule {len(schedule.stages)}"]
    return [
        f"stage {stage.pp_stage}: the pulls are not those of the transfers received"
        for stage, pulls in zip(schedule.stages, other_end.stages, strict=True)
        if not _same_transfers(schedule, other_end, stage.recvs, pulls)
    ]


def _same_transfers(schedule: Schedule, other_end: OtherEnd, recvs: TransferTable, pulls: TransferTable) -> bool:
    columns = ("peer", "nbytes", "transfer_group", "member")
    if not all(np.array_equal(getattr(recvs, name), getattr(pulls, name)) for name in columns):
        return False
    boxes = {*zip(pulls.strided_box.tolist(), recvs.strided_box.tolist(), strict=True)}
    tensors = {*zip(pulls.tensor.tolist(), recvs.tensor.tolist(), strict=True)}
    return all(
        other_end.strided_boxes[src].extents == schedule.strided_boxes[dst].extents for src, dst in boxes
    ) and all(other_end.tensors[src].dtype == schedule.tensors[dst].dtype for src, dst in tensors)
