"""The nccl transport without a GPU: its own division of scratch and its own rounds, each message over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.cast_arithmetic import compute_scales
from mcore_reshard.kernels.copies.cpu import run_copies
from mcore_reshard.kernels.copies.read_back import Executed
from mcore_reshard.kernels.copies.tensors import byte_array
from mcore_reshard.kernels.errors import Waiting
from mcore_reshard.kernels.rendezvous.exchange import StoreExchange
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup
from mcore_reshard.kernels.rendezvous.store_keys import FailFastStore
from mcore_reshard.kernels.transports.base import (
    Executor,
    StageClock,
    StageReport,
    TransportContext,
    connect_group,
    merge_reports,
)
from mcore_reshard.kernels.transports.group_ranks import group_names
from mcore_reshard.kernels.transports.nccl.communicator import NcclError
from mcore_reshard.kernels.transports.nccl.connection import NcclConnection
from mcore_reshard.kernels.transports.nccl.staging import Round, ScratchBudget, divided_rounds, slot_bytes

own_gpu = ""  # of this process, as it says; "": nobody looks


class RoundsOverGloo:
    """One part: round after round, in the order of windows and streams, which all ranks have in common."""

    def __init__(
        self, name: str, connection: NcclConnection, bounds: Sequence[BoundSchedule], number: int, group: GlooGroup
    ) -> None:
        self.name, self._bounds, self._group = name, bounds, group
        self._ends, self._communicators = connection.ends[number], connection.divisions[number].communicators()
        in_place = [[True] * len(bound.tensors) for bound in bounds]
        self.rounds = divided_rounds(self._ends, connection.divisions[number], in_place=in_place)
        self._slots = {place: np.full(nbytes, 0xEE, np.uint8) for place, nbytes in slot_bytes(self.rounds).items()}
        self.scratch_bytes = sum(slot.size for slot in self._slots.values())
        self.written_bytes = 0

    @property
    def executed(self) -> tuple[Executed, ...]:
        placed = [each for of_round in self.rounds for each in of_round.placed_messages]
        return tuple(
            Executed(bound, buckets=tuple(each.executed for each in placed if each.end == end))
            for end, bound in enumerate(self._bounds)
        )

    def run(self) -> tuple[StageReport, ...]:
        for bound in self._bounds:
            compute_scales(bound.casts, bound.tensors)
        for each in self.rounds:
            self._run(each)
        self.written_bytes = sum(bound.nbytes for bound in self._bounds if bound.schedule.world == "gen")
        ends = zip(self._bounds, self._ends, strict=True)
        return merge_reports([StageClock(bound, end.buckets).reports() for bound, end in ends])

    def close(self) -> None:
        self._group.close()

    def _run(self, each: Round) -> None:
        slot = self._slots.get((each.stream, each.slot), np.zeros(0, np.uint8))
        messages = []
        for placed in each.placed_messages:
            bound = self._bounds[placed.end]
            memory = slot if placed.tensor is None else byte_array(bound.tensors[placed.tensor])
            content = memory[placed.offset :][: placed.message_bytes]
            bases = [*map(byte_array, bound.tensors), content]
            if placed.bucket.sends and placed.tensor is None:
                run_copies(placed.bucket.copies, bases, bound.casts)
            start = self._group.send if placed.bucket.sends else self._group.recv
            peer = self._communicators[each.communicator][placed.member]
            messages.append((placed, bases, start(torch.from_numpy(content), peer, placed.bucket.waiting)))
        for placed, bases, message in messages:
            message.wait()
            if not placed.bucket.sends and placed.tensor is None:
                run_copies(placed.bucket.copies, bases)


def connect_rounds(
    name: str, scratch_bytes: int, context: TransportContext, parts: Sequence[Sequence[BoundSchedule]]
) -> Sequence[Executor]:
    """Connect as `connect_nccl` does, under the name of a stand-in. As NCCL does, refuse GPUs that are there twice."""
    budget = ScratchBudget(scratch_bytes)
    store = FailFastStore("rounds", context.store)
    connection = NcclConnection(parts, store, timeout_s=context.options.timeout_s, budget=budget, shared=context.shared)
    if own_gpu:
        with connection.give_up_on_error():
            _refuse_gpus_twice(connection, context)
    group = connect_group(FailFastStore("group", context.store), parts[0][0].schedule, context.options.timeout_s)
    return [RoundsOverGloo(name, connection, part, number, group) for number, part in enumerate(parts)]


def _refuse_gpus_twice(connection: NcclConnection, context: TransportContext) -> None:
    schedule = context.bound.schedule
    exchange = StoreExchange(
        FailFastStore("gpus", context.store), schedule.name, group_names(schedule), context.options.timeout_s
    )
    gpus = exchange.gather("gpu", own_gpu, str)
    waiting = Waiting(schedule.name, exchange.members[0], None, "all of it", True)
    for members in connection.divisions[0].communicators().values():
        for rank, other in combinations(members, 2):
            if gpus[rank] == gpus[other]:
                raise NcclError(waiting, f"Duplicate GPU detected: rank {rank} and rank {other} both on {gpus[rank]}")
