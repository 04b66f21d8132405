"""What one rank does in a refit: the rows of the plan that name it, as columns.

Both ends of a transfer list it in the same order (stage, transfer group, member, move), so the two sequences between any pair of
ranks agree without a word being exchanged. Extents are in wire order and equal on both ends; strides are each end's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.layout.geometry import LocalTensor

World = Literal["train", "gen"]

__all__ = [
    "Cast",
    "LocalTensor",
    "Relay",
    "Schedule",
    "SourceTable",
    "StageSchedule",
    "StridedBox",
    "TransferTable",
    "World",
]


@dataclass(frozen=True, slots=True)
class StridedBox:
    """How a transfer's elements lie in a local tensor: extents in wire order, element strides of the same dims."""

    extents: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransferTable:
    """Transfers of one rank in one stage and one direction; every column has one entry a transfer."""

    peer: NDArray[np.int32]  # rank in the other world
    tensor: NDArray[np.int32]  # index into Schedule.tensors
    strided_box: NDArray[np.int32]  # index into Schedule.geometries
    offset: NDArray[np.int64]  # elements from the start of the local tensor
    nbytes: NDArray[np.int64]  # bytes on the wire, in the destination's dtype
    transfer_group: NDArray[np.int32]  # index into Plan.transfer groups
    member: NDArray[np.int32]  # index of the parameter in its transfer group

    def __len__(self) -> int:
        return len(self.peer)


@dataclass(frozen=True, slots=True)
class StageSchedule:
    """The transfers that leave the training ranks of one pipeline stage."""

    pp_stage: int
    sends: TransferTable  # empty on a generation rank
    recvs: TransferTable  # empty on a training rank


@dataclass(frozen=True, slots=True)
class Schedule:
    """One rank's view of a plan. `rank` counts within its world."""

    world: World
    rank: int
    digest: str
    train_ranks: int
    gen_ranks: int
    tensors: tuple[LocalTensor, ...]
    strided_boxes: tuple[StridedBox, ...]
    stages: tuple[StageSchedule, ...]
    padding: tuple[
        tuple[int, int, StridedBox], ...
    ]  # (tensor, offset, geometry): to be zeroed once, no parameter fills it
    misc: tuple[str, ...]  # HF names that travel by the misc route
    parameter_name: Callable[[int, int], str]  # (transfer group, member) -> HF name, for messages
    # HF names of all weights that the engine keeps quantized -> those of their scales, and the scales' dtype
    pair_names: Callable[[], Mapping[str, tuple[str, str]]] = dict
    source_table: Callable[[], SourceTable] | None = (
        None  # generation ranks: the other end of `recvs`, for executors that read it
    )
    casts: tuple[Cast, ...] = ()  # training ranks: what changes its dtype before it is sent
    # Training ranks: indices of tensors that the trainer does not have, the scales that casts compute. They are sent as
    # any other tensor.
    computed: tuple[int, ...] = ()
    unrelayed: Callable[[], Schedule] | None = None  # of a relayed plan: the same, but all bytes come from the trainer
    relay: Callable[[], Relay] | None = None  # generation ranks of a relayed plan: what they pass on, and get so
    # Of a relayed plan: its transfers in parts that move one after another, with the tensors of each and its relay. One
    # is passed on while the next one comes from the trainer. () where all is to move at once.
    waves: tuple[Callable[[], Schedule], ...] = ()
    between_replicas: bool = False  # a part of a relay: its 'train' ranks are the generation ranks that pass on

    @property
    def relayed(self) -> bool:
        """Whether generation ranks pass on what they receive."""
        return self.unrelayed is not None

    def name_of(self, world: World, rank: int) -> str:
        """How messages call a rank: 'train:0', 'gen:3'; 'relay:3' is gen:3 where it passes on."""
        return f"{'relay' if self.between_replicas and world == 'train' else world}:{rank}"

    @property
    def name(self) -> str:
        """How messages call this rank."""
        return self.name_of(self.world, self.rank)


@dataclass(frozen=True, slots=True)
class Cast:
    """Everything sent from one live tensor goes in another dtype.

    For float8_e4m3fn every block of the tensor is divided by a scale of its own: that of local element (r, c) of a matrix
    is `scales[r // block[0], c // block[1]]`, with the expert's index in front where the tensor stacks experts.
    """

    tensor: int  # index into Schedule.tensors
    to: str  # dtype on the wire
    scales: int | None = None  # index into Schedule.tensors, one of Schedule.computed
    block: tuple[int, int] = (0, 0)  # rows, columns; of no meaning without scales


@dataclass(frozen=True, slots=True)
class Relay:
    """What a generation rank does after it has received: a refit of its own, among generation ranks.

    Both are schedules in which the generation ranks are the training ranks too.
    """

    sends: Schedule  # world "train": what it passes on
    receives: Schedule  # world "gen": what others pass on to it


@dataclass(frozen=True, slots=True)
class SourceTable:
    """Where the bytes that one generation rank receives lie at their sources, for a receiver that reads them itself.

    `stages[i]` goes row by row with `Schedule.stages[i].recvs`: the same peer, bytes, transfer group and member, but tensor,
    geometry and offset are those of the training rank `peer`. Ranks may have tensors of the same name.
    """

    rank: int  # of the receiver, in the generation world
    digest: str
    tensors: tuple[LocalTensor, ...]
    strided_boxes: tuple[StridedBox, ...]
    stages: tuple[TransferTable, ...]
