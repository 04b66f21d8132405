"""One rank's transfers in a refit: the rows of the plan that name it, as columns.

Both ends list transfers in the same order (stage, transfer group, member, overlap), so that the sequences of a pair of
ranks agree. Extents are in wire order and equal on both ends; strides are each end's own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.layout.geometry import LocalTensor as LocalTensor
from mcore_reshard.planner.model.name_patterns import fill
from mcore_reshard.planner.model.parameters import ParameterGroup

from .paths import HopKind

if TYPE_CHECKING:
    from .held import Held

World = Literal["train", "gen"]
CARRIED = "carried:"  # begins the names of tensors that no model has, in which ranks hold what they carry for others


def is_carried(name: str) -> bool:
    """Whether a tensor of this name holds what a rank carries for others."""
    return name.startswith(CARRIED)


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
    strided_box: NDArray[np.int32]  # index into Schedule.strided_boxes
    offset: NDArray[np.int64]  # elements from the start of the local tensor
    nbytes: NDArray[np.int64]  # bytes on the wire, in the destination's dtype
    transfer_group: NDArray[np.int32]  # index into Plan.transfer_groups
    member: NDArray[np.int32]  # index of the parameter in its transfer group
    wave: NDArray[np.int32]  # of a relay, through all its hops

    def __len__(self) -> int:
        return len(self.peer)

    def rows(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> TransferTable:
        """The chosen transfers alone, by a mask or by their numbers."""
        return TransferTable(*(getattr(self, column.name)[chosen] for column in fields(TransferTable)))


@dataclass(frozen=True, slots=True)
class StageSchedule:
    """The transfers that leave the training ranks of one pipeline stage."""

    pp_stage: int
    sends: TransferTable  # empty on a generation rank
    recvs: TransferTable  # empty on a training rank


@dataclass(frozen=True, slots=True)
class MemberNames:
    """The HF names of a transfer group's parameters, for messages."""

    pattern: str  # with {layer} and {expert}
    layers: tuple[int, ...] = (-1,)
    first_expert: int = 0
    expert_count: int = 1

    def __len__(self) -> int:
        return len(self.layers) * self.expert_count

    def name(self, member: int) -> str:
        position, expert = divmod(member, self.expert_count)
        return fill(self.pattern, layer=self.layers[position], expert=self.first_expert + expert)


@dataclass(frozen=True)
class Schedule:
    """One rank's part in a plan, as plain data; `view` computes facts that only some executors need."""

    world: World
    rank: int  # within its world
    digest: str
    train_ranks: int
    gen_ranks: int
    tensors: tuple[LocalTensor, ...]
    strided_boxes: tuple[StridedBox, ...]
    stages: tuple[StageSchedule, ...]
    # (tensor, offset, strided box) of elements that no parameter fills, to be zeroed once
    padding: tuple[tuple[int, int, StridedBox], ...]
    misc: tuple[str, ...]  # HF names that travel by the misc route
    names: Mapping[int, MemberNames]  # by transfer group
    pairs: tuple[tuple[ParameterGroup, ParameterGroup], ...] = ()  # quantized weights, their scales; of the whole plan
    casts: tuple[Cast, ...] = ()  # training ranks: tensors that are sent in another dtype
    computed: tuple[int, ...] = ()  # training ranks: tensors that the trainer does not have, the scales of casts
    later_hops: tuple[HopKind, ...] = ()  # in which generation ranks pass on what they receive
    hop: int = 0  # the number of such a hop, from 1: its 'train' ranks are the generation ranks that pass on
    view: View | None = None
    later: Schedule | None = None  # of refits after an engine's first, if the trainer leaves parameters frozen
    gen_seats: tuple[int, ...] = ()  # the number by which messages name each generation rank; (): its own
    relay_seats: tuple[int, ...] = ()  # between replicas: the same of the ranks that pass on

    def parameter_name(self, transfer_group: int, member: int) -> str:
        return self.names[transfer_group].name(member)

    def pair_names(self) -> dict[str, tuple[str, str]]:
        """Every weight that the engine keeps quantized -> the name of its scales, and their dtype."""
        return {
            weight: (beside, scales.dtype)
            for weights, scales in self.pairs
            for weight, beside in zip(weights.names(), scales.names(), strict=True)
        }

    def with_rows(self, masks: Sequence[NDArray[np.bool_] | NDArray[np.int64]]) -> Schedule:
        """The schedule with only the chosen transfers of each stage, by masks or numbers. Both ends must choose the same."""
        chosen = [(stage, table.rows(mask)) for stage, table, mask in zip(self.stages, self.tables, masks, strict=True)]
        stages = tuple(
            replace(stage, sends=table) if self.world == "train" else replace(stage, recvs=table)
            for stage, table in chosen
        )
        return replace(self, stages=stages, view=None if self.view is None else self.view.with_rows(masks))

    def with_peers(self, peers: Collection[int]) -> Schedule:
        """The schedule with only the transfers to and from `peers`, ranks in the other world. Both ends must agree on pairs."""
        return self.with_rows([np.isin(table.peer, sorted(peers)) for table in self.tables])

    @cached_property
    def carried(self) -> frozenset[int]:
        """Indices of the tensors in which the rank holds what it carries for others, each in its wave."""
        return frozenset(index for index, local in enumerate(self.tensors) if is_carried(local.name))

    @property
    def relayed(self) -> bool:
        """Whether generation ranks pass on what they receive here."""
        return bool(self.later_hops) and not self.hop

    @property
    def between_replicas(self) -> bool:
        return self.hop > 0

    @property
    def hop_kind(self) -> HopKind:
        return self.later_hops[self.hop - 1] if self.hop else "train"

    @property
    def peers(self) -> frozenset[int]:
        """Ranks in the other world that the rank exchanges bytes with."""
        return frozenset(peer for table in self.tables for peer in np.unique(table.peer).tolist())

    @property
    def tables(self) -> list[TransferTable]:
        return [stage.sends if self.world == "train" else stage.recvs for stage in self.stages]

    def name_of(self, world: World, rank: int) -> str:
        """A rank's name in messages: 'train:0', 'gen:3'; 'relay:3' is gen:3 as it passes on. IndexError: no rank of the plan."""
        seats = self.gen_seats if world == "gen" else self.relay_seats
        prefix = "relay" if self.between_replicas and world == "train" else world
        return f"{prefix}:{seats[rank] if seats else rank}"

    @property
    def name(self) -> str:
        return self.name_of(self.world, self.rank)


@dataclass(frozen=True, slots=True)
class Cast:
    """Everything sent from one live tensor goes in another dtype.

    For float8_e4m3fn, local element (r, c) of a matrix is divided by `scales[r // block[0], c // block[1]]`. Where the
    tensor stacks experts, the expert's index comes first.
    """

    tensor: int  # index into Schedule.tensors
    to: str  # dtype on the wire
    scales: int | None = None  # index into Schedule.tensors, one of Schedule.computed
    block: tuple[int, int] = (0, 0)  # rows, columns; of no meaning without scales


@dataclass(frozen=True, slots=True)
class Relay:
    """A refit among generation ranks, after they have received; they are its training ranks too."""

    sends: Schedule  # world "train": to other replicas
    receives: Schedule  # world "gen": from other replicas


@dataclass(frozen=True, slots=True)
class Chain:
    """A rank's part in a refit where each replica of the engine gets everything from the one before it.

    train:0 -> gen:0 -> gen:1 -> gen:2
    """

    from_trainer: Schedule  # to the first replica
    among_replicas: Relay | None  # from the replica before, to the one behind; None: a training rank


@dataclass(frozen=True, slots=True)
class OtherEnd:
    """Where the bytes that one rank sends or receives lie at their other ends, for a rank that writes or reads them there.

    `stages[i]` goes row by row with `Schedule.tables[i]`, but tensor, strided box and offset are those of the rank
    `peer`. Ranks may have tensors of the same name.
    """

    rank: int  # of whom the schedule is, in its world
    digest: str
    tensors: tuple[LocalTensor, ...]
    strided_boxes: tuple[StridedBox, ...]
    stages: tuple[TransferTable, ...]
    computed: frozenset[int] = frozenset()  # transfer groups of what training ranks compute, the scales of casts

    def with_rows(self, masks: Sequence[NDArray[np.bool_] | NDArray[np.int64]]) -> OtherEnd:
        return replace(self, stages=tuple(table.rows(mask) for table, mask in zip(self.stages, masks, strict=True)))


class View:
    """Facts that some executors need beside a schedule, computed on demand."""

    def other_end(self) -> OtherEnd:
        """The other end of what the schedule sends or receives."""
        raise NotImplementedError

    def with_rows(self, masks: Sequence[NDArray[np.bool_] | NDArray[np.int64]]) -> View:
        raise NotImplementedError

    def held(self) -> Held | None:
        """Where the rank's own tensors hold which part of which parameter; None if no plan says so."""
        return None

    def relays(self) -> tuple[Relay, ...]:
        """The later hops of a generation rank, in order; () where nothing is passed on."""
        return ()

    def unrelayed(self) -> Schedule:
        """The schedule if all bytes came from the trainer."""
        raise NotImplementedError("nothing is passed on here")

    def chain(self) -> Chain | None:
        """The same refit along a chain of replicas; None where they do not all hold the same parts, or nothing is passed on."""
        return None

    def waves(self) -> tuple[Schedule, ...]:
        """A relayed schedule in parts, each passed on while the next comes from the trainer; () for all at once."""
        return ()


@dataclass(frozen=True, slots=True)
class OtherEndView(View):
    """A view that has its other end, and what the rank holds if a plan says so."""

    table: OtherEnd
    of_rank: View | None = None

    def other_end(self) -> OtherEnd:
        return self.table

    def with_rows(self, masks: Sequence[NDArray[np.bool_] | NDArray[np.int64]]) -> OtherEndView:
        return replace(self, table=self.table.with_rows(masks))

    def held(self) -> Held | None:
        return None if self.of_rank is None else self.of_rank.held()
