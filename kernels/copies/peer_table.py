"""One table of copies between a rank's own tensors and those of its peers, which the rank runs alone.

a pull    from the tensors of training ranks, or of other replicas, into the own ones
a push    from the own tensors into those of generation ranks; a training rank casts on the way
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.errors import BindError
from mcore_reshard.planner.plan.schedule import OtherEnd, Schedule, TransferTable

from .casts import CastKinds, box_copies, itemsizes, wire_dtypes, wire_itemsizes
from .copy_table import End, Ints, distinct, expand_copies, repeat


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


def peer_table(schedule: Schedule) -> PeerTable:
    """The copies that bring everything that `schedule` sends, or receives, to or from where its view says it lies.

    A training rank casts what its schedule says. Raises `BindError` where the two do not describe the same transfers of the
    same plan.
    """
    assert schedule.view is not None, "this schedule does not say where its bytes lie at their other ends"
    other_end = schedule.view.other_end()
    if problems := _disagreements(schedule, other_end):
        raise BindError(schedule.name, problems)
    here, there = joined_transfers(schedule.tables), joined_transfers(other_end.stages)
    stage, _ = repeat(np.array([len(table) for table in other_end.stages], np.int64))
    pushes, casts = schedule.world == "train", CastKinds.of(schedule)
    itemsize, wire_itemsize = itemsizes(schedule)[here.tensor], wire_itemsizes(schedule)[here.tensor]
    place = here.offset % casts.period[here.tensor]

    def copies_of(own_box: int, other_box: int, itemsize: int, form: int, place: int) -> NDArray[np.void]:
        own, other = schedule.strided_boxes[own_box], other_end.strided_boxes[other_box]
        sides = (own.strides, other.strides) if pushes else (other.strides, own.strides)
        return box_copies(own.extents, *sides, itemsize, casts.forms[form], place)

    kinds, kind_of = distinct(here.strided_box, there.strided_box, itemsize, casts.form_of[here.tensor], place)
    transfer, copies = expand_copies(kind_of, [copies_of(*kind) for kind in kinds])
    count = len(other_end.tensors)
    keys, key_of = np.unique(there.peer * np.int64(count) + there.tensor, return_inverse=True)
    own_side: End = "src" if pushes else "dst"
    other_side: End = "dst" if pushes else "src"
    copies[own_side], copies[other_side] = here.tensor[transfer], len(schedule.tensors) + key_of[transfer]
    copies[f"{own_side}_offset"] += (here.offset * itemsize)[transfer]
    copies[f"{other_side}_offset"] += (there.offset * wire_itemsize)[transfer]
    theirs = tuple(PeerTensor(key // count, other_end.tensors[key % count].name) for key in keys.tolist())
    group, member = here.transfer_group[transfer], here.member[transfer]
    number = numbers_by_peer(here.peer)[transfer]
    return PeerTable(own_side, copies, theirs, here.peer[transfer], stage[transfer], group, member, number, transfer)


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
            f"the other ends are those of rank {other_end.rank} in plan {other_end.digest};"
            f" this is {schedule.name}, rank {schedule.rank} in plan {schedule.digest}"
        ]
    if len(other_end.stages) != len(schedule.stages):
        return [f"the other ends have {len(other_end.stages)} stages, the schedule {len(schedule.stages)}"]
    return [
        f"stage {stage.pp_stage}: the other ends are not those of the transfers {'sent' if table is stage.sends else 'received'}"
        for stage, table, there in zip(schedule.stages, schedule.tables, other_end.stages, strict=True)
        if not _same_transfers(schedule, other_end, table, there)
    ]


def _same_transfers(schedule: Schedule, other_end: OtherEnd, here: TransferTable, there: TransferTable) -> bool:
    columns = ("peer", "nbytes", "transfer_group", "member")
    if not all(np.array_equal(getattr(here, name), getattr(there, name)) for name in columns):
        return False
    boxes = {*zip(here.strided_box.tolist(), there.strided_box.tolist(), strict=True)}
    tensors = {*zip(here.tensor.tolist(), there.tensor.tolist(), strict=True)}
    wire = wire_dtypes(schedule)
    return all(
        schedule.strided_boxes[own].extents == other_end.strided_boxes[other].extents for own, other in boxes
    ) and all(wire[own] == other_end.tensors[other].dtype for own, other in tensors)
