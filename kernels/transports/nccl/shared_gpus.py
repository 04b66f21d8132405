"""Communicators where ranks of both sides share GPUs on several hosts: NCCL takes no GPU twice in one communicator.

Each host has a code of binary digits, no two hosts the same. Each digit has two communicators. One has the trainer's ranks
of hosts with a 0 there, and the engine's ranks of hosts with a 1; the other one has the opposite:

    host    code    communicator 0    communicator 1    communicator 2    communicator 3
    a       0 0     trainer           engine            trainer           engine
    b       0 1     engine            trainer           trainer           engine
    c       1 0     trainer           engine            engine            trainer
    d       1 1     engine            trainer           engine            trainer

No GPU is in one of them twice. Two codes differ in a digit. So a training rank of a host and an engine rank of another one
have a communicator in common: from a to b it is 0, from b to a it is 1. If there are several, as 0 and 2 from a to d, a pair
takes one by its turn. A communicator of one side alone is left out. A rank is in one communicator for each digit.

Replicas that pass on to other hosts have one more, of all engine ranks: those of b and c are in no other together.

On each stream all ranks take their rounds by window, and within a window by communicator. So the first round in that order
that is not over has all its ranks, and no order of kernels deadlocks. The two communicators of a digit have no rank in
common: both move at the same time, and every NIC sends and receives. Fewer numbers would do, with half of them for each
host (four for six hosts). But then half of the NICs idle: simulated, 16 hosts took 1.9 times as long.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.transports.rounds import choice_of

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedGpus:
    """Where the ranks of a session are, training ranks first. A function of what all have said, so equal on all of them."""

    cells: tuple[int, ...]  # the host of each, or the GPU: ranks of one cell exchange nothing over nccl
    gpus: tuple[int, ...]  # the GPU of each
    train_ranks: int
    passes_on: bool  # whether replicas pass on to other cells over nccl

    @classmethod
    def of(
        cls, cells: Iterable[Hashable], gpus: Iterable[Hashable], train_ranks: int, *, passes_on: bool
    ) -> SharedGpus:
        """The record of ranks whose cells and GPUs have these names."""
        return cls(_numbered(cells), _numbered(gpus), train_ranks, passes_on)

    def is_needed(self, members: Iterable[int]) -> bool:
        """Whether ranks of both sides share a GPU, among these group ranks."""
        sides = {(self.gpus[rank], rank < self.train_ranks) for rank in members}
        return any((gpu, not trains) in sides for gpu, trains in sides)

    def communicators(self, members: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """The group ranks in each communicator, ascending, if `members` exchange anything."""
        has = codes(1 + max(self.cells))
        found: dict[int, tuple[int, ...]] = {}
        train = [rank for rank in sorted(members) if rank < self.train_ranks]
        gen = [rank for rank in sorted(members) if rank >= self.train_ranks]
        for number in range(has.shape[1]):
            senders = [rank for rank in train if has[self.cells[rank], number]]
            receivers = [rank for rank in gen if not has[self.cells[rank], number]]
            if senders and receivers:
                found[number] = (*senders, *receivers)
        return found | ({has.shape[1]: tuple(gen)} if self.passes_on else {})

    @property
    def count(self) -> int:
        """One more than the largest number of a communicator."""
        return codes(1 + max(self.cells)).shape[1] + self.passes_on

    def communicator_of(self, src: Any, dst: Any, turn: Any) -> Ints:
        """The communicator of messages between group ranks, in arrays. Raises ValueError for two ranks of one cell."""
        src, dst, turn = np.broadcast_arrays(src, dst, turn)
        cells, has = np.array(self.cells), codes(1 + max(self.cells))
        in_common = has[cells[src]] & ~has[cells[dst]]
        counts = in_common.sum(axis=-1)
        between_replicas = src >= self.train_ranks
        if not (counts.astype(bool) | between_replicas).all():
            raise ValueError("two ranks of one host have no communicator in common")
        chosen = choice_of(turn, np.maximum(counts, 1))[..., None]
        number = (in_common & (np.cumsum(in_common, axis=-1) == chosen + 1)).argmax(axis=-1)
        return np.where(between_replicas, has.shape[1], number)


@cache
def codes(hosts: int) -> NDArray[np.bool_]:
    """[hosts, communicators] whether the trainer's ranks of a host are in it, else the engine's are.

    Codes are spread evenly, so that about half of the hosts have each digit.
    """
    digits = max(1, (hosts - 1).bit_length())
    code = (np.arange(hosts) << digits) // hosts
    ones = (code[:, None] >> np.arange(digits) & 1).astype(bool)
    return np.stack([~ones, ones], axis=-1).reshape(hosts, 2 * digits)


def _numbered(names: Iterable[Hashable]) -> tuple[int, ...]:
    """0 for the first name and all that equal it, 1 for the next one, ..."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


def sizes(communicators: Iterable[Sequence[int]], rank: int) -> list[int]:
    """How many ranks there are in each communicator that a group rank is in."""
    return [len(members) for members in communicators if rank in members]
