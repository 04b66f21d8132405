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

Replicas that pass on have one more, of all engine ranks: those of b and c are in no other together.

Each digit has a stream, and so have replicas that pass on; a single digit has as many as other sessions have. A rank is in
one of the two communicators of a stream, which have no rank in common: both move at the same time, and every NIC sends and
receives. All ranks take the rounds of a stream by window. So the first of them that is not over has all its ranks, and no
order of kernels deadlocks while a GPU has room for a kernel of every stream (see `most_ctas`). Fewer communicators would do,
with half of them for each host (four for six hosts). But then half of the NICs idle: simulated, 16 hosts took 1.9 times as
long. On two streams, in which the communicators of all digits take turns, 16 hosts took 1.3 times as long.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.transports.rounds import choice_of
from mcore_reshard.planner.plan.rails import with_forwarders

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedGpus:
    """Where the ranks of a session are, training ranks first. A function of what all have said, so equal on all of them."""

    cells: tuple[int, ...]  # the host of each, or the GPU: over nccl a trainer sends nothing within its cell
    gpus: tuple[int, ...]  # the GPU of each
    rails: tuple[int, ...]  # the number of that GPU on its host; -1 for a rank without one
    train_ranks: int
    passes_on: bool  # whether replicas pass on over nccl

    @classmethod
    def of(
        cls,
        cells: Iterable[Hashable],
        gpus: Iterable[Hashable],
        rails: Iterable[int],
        train_ranks: int,
        *,
        passes_on: bool,
    ) -> SharedGpus:
        """The record of ranks whose cells and GPUs have these names."""
        return cls(_numbered(cells), _numbered(gpus), tuple(rails), train_ranks, passes_on)

    def members(self, exchanging: Iterable[int]) -> tuple[int, ...]:
        """The group ranks that need communicators if these exchange bytes, ascending: see `with_forwarders`."""
        ranks = np.arange(len(self.gpus))
        places = np.array(self.cells), np.array(self.gpus), np.array(self.rails)
        found = with_forwarders(np.isin(ranks, [*exchanging]), ranks < self.train_ranks, *places, relays=self.passes_on)
        return tuple(np.flatnonzero(found).tolist())

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
    def digits(self) -> int:
        return codes(1 + max(self.cells)).shape[1] // 2

    def streams(self, of_others: int) -> int:
        """How many streams there are, where other sessions have `of_others`."""
        return self._first_of_replicas(of_others) + self.passes_on

    def streams_of(self, communicator: int, of_others: int) -> tuple[int, ...]:
        """The streams of a communicator."""
        if communicator == 2 * self.digits:
            return (self._first_of_replicas(of_others),)
        return tuple(range(of_others)) if self.digits == 1 else (communicator // 2,)

    def stream_of(self, communicator: Any, own: Any, of_others: int) -> Any:
        """The stream of a message; `own` would be its stream in another session. Also of arrays."""
        of_trainer = own if self.digits == 1 else communicator // 2
        return np.where(communicator == 2 * self.digits, self._first_of_replicas(of_others), of_trainer)

    def _first_of_replicas(self, of_others: int) -> int:
        return of_others if self.digits == 1 else self.digits

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


def most_ctas(streams: int) -> int | None:
    """The most CTAs of NCCL's kernel on each of so many streams; None: as many as NCCL takes, at most 32.

    A GPU of 132 multiprocessors then has room for the kernels of all streams of two processes. NCCL has a power of two of
    channels for sends and receives, and rounds up to it (`ncclTopoComputeP2pChannels` of graph/paths.cc, 2.28.9).
    """
    return None if streams <= 2 else 1 << (max(1, 64 // streams).bit_length() - 1)


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
