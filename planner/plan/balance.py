"""Load balance: which replica of a part serves a pull, so that replicas share the load.

A pull is one overlap on its way to one destination replica. Every member of a transfer group makes the same pulls 0, 1,
2, ... of each source part. All replicas of the part could serve them, and take turns. For member `k`:

    replica = (first + k * stride + pull) % replicas

`stride` is the number of pulls, raised until it is coprime with the number of replicas. Otherwise a pull would visit only
some replicas, and it goes to the same rank for every member. With 2 pulls and 4 replicas, the stride is 3:

    member              0  1  2  3
    pull 0, stride 2    0  2  0  2      half of the replicas
    pull 0, stride 3    0  3  2  1      all of them
    pull 1, stride 3    1  0  3  2

If members do not fill whole turns, some replicas serve more. `first` is chosen so that idle ranks take this surplus. In a
plan that relays, the same round robin over destination replicas says where each overlap lands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .plan import TransferGroup, TransferPattern
    from .schedule import World

Ints = NDArray[np.int64]
Numbers = Ints | int
_FIRSTS_TRIED = 64  # evenly spaced; with more replicas, neighboring ones hardly differ


def stride_of(pulls: Ints, replicas: int) -> Ints:
    """The first numbers, from each number of pulls on, that share no factor with `replicas`: [2, 3], 4 -> [3, 3]."""
    strides = pulls.copy()
    while (shared := np.gcd(strides, replicas) > 1).any():
        strides[shared] += 1
    return strides


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """The turns that the replicas of every part take; each array has one entry an overlap."""

    replicas: int
    pulls: int  # of each overlap by each member
    parts: Ints
    first_pull: Ints  # pulls of the same part by earlier overlaps
    strides: Ints

    @classmethod
    def of(cls, parts: Ints, replicas: int, pulls: int) -> RoundRobin:
        """`parts` is the part of each overlap that takes turns, `pulls` how often a member pulls each overlap."""
        counts = np.bincount(parts)
        return cls(replicas, pulls, parts, _order_within(parts) * pulls, stride_of(counts * pulls, replicas)[parts])

    def replica(self, first: int, member: Numbers, overlap: Numbers, pull: Numbers = 0) -> Ints:
        """Which replica serves a pull of an overlap by a member; arguments broadcast against each other."""
        number = self.first_pull[overlap] + pull
        replica: Ints = (first + member * self.strides[overlap] + number) % self.replicas
        return replica

    def nbytes(self, members: int, overlap_bytes: Ints, parts: int) -> Ints:
        """Bytes that each replica serves to `members` members if `first` is 0, as [parts, replicas]."""
        served = np.zeros((parts, self.replicas), dtype=np.int64)
        member = np.arange(min(self.replicas, members))  # later members repeat these
        repeats = members // len(member) + (member < members % len(member))
        overlap, pull = np.arange(len(self.parts)), np.arange(self.pulls)
        replica = self.replica(0, member[:, None, None], overlap[None, :, None], pull[None, None, :])
        nbytes = np.broadcast_to(repeats[:, None, None] * overlap_bytes[None, :, None], replica.shape)
        np.add.at(served, (np.broadcast_to(self.parts[None, :, None], replica.shape), replica), nbytes)
        return served


def balance(
    transfer_groups: Sequence[TransferGroup], patterns: Sequence[TransferPattern],
    rank_grids: Sequence[NDArray[np.int32]], world: World, ranks: int, *, relay: bool,
) -> list[TransferGroup]:  # fmt: skip
    """The transfer groups, each with the first replica that evens out what the `ranks` ranks of a world send or relay."""
    shares = []
    for transfers in transfer_groups:
        grid = rank_grids[transfers.src if world == "train" else transfers.dst]
        pulls = 1 if relay else rank_grids[transfers.dst].shape[1]
        nbytes = patterns[transfers.pattern].replica_bytes(world, transfers.members, grid.shape[1], pulls)
        shares.append((grid, nbytes, transfers.members))
    firsts = zip(transfer_groups, first_replicas(shares, ranks), strict=True)
    if world == "train":
        return [replace(transfers, first_src_replica=first) for transfers, first in firsts]
    return [replace(transfers, first_dst_replica=first) for transfers, first in firsts]


def first_replicas(shares: Sequence[tuple[NDArray[np.int32], Ints, int]], world: int) -> list[int]:
    """`first` of each round robin, given as (ranks, bytes if first is 0, members), both arrays [parts, replicas].

    The largest choose first: each puts its uneven remainder on the least loaded ranks. If all replicas serve equally
    much, a round robin goes on where the one before it stopped, so that pairs of ranks exchange equally much. Two
    replicas serve the embedding's halves; the same two serve the output layer's halves, the other way round.
    """
    load = np.zeros(world, dtype=np.int64)
    firsts = [0] * len(shares)
    members_before: dict[int, int] = {}  # by id of the array of ranks, which transfer groups share
    for index in sorted(range(len(shares)), key=lambda i: (-int(shares[i][1].sum()), i)):
        ranks, nbytes, members = shares[index]
        if (nbytes != nbytes[:, :1]).any():
            firsts[index] = _least_busy_first(load[ranks], nbytes)
        else:
            firsts[index] = members_before.get(id(ranks), 0) % ranks.shape[1]
            members_before[id(ranks)] = firsts[index] + members
        np.add.at(load, ranks, np.roll(nbytes, firsts[index], axis=1))
    return firsts


def _least_busy_first(load: Ints, nbytes: Ints) -> int:
    """The `first` that leaves the lowest peak on `load` [parts, replicas]; the lowest one of equals."""
    replicas = nbytes.shape[1]
    firsts = np.arange(0, replicas, max(1, replicas // _FIRSTS_TRIED))
    turned = nbytes[:, (np.arange(replicas)[None, :] - firsts[:, None]) % replicas]  # [parts, firsts, replicas]
    peaks = (load[:, None, :] + turned).max(axis=(0, 2))
    return int(firsts[peaks.argmin()])


def _order_within(values: Ints) -> Ints:
    """For each value, how many equal ones come before it: [3, 7, 3] -> [0, 0, 1]."""
    seen: dict[int, int] = {}
    order = []
    for value in values.tolist():
        order.append(seen.get(value, 0))
        seen[value] = order[-1] + 1
    return np.array(order, dtype=np.int64)
