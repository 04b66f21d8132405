"""Carriers: ranks that receive by their NIC what another rank of their NVLink domain wants, and pass it on.

Where an engine has more replicas of some parts in a domain than of others, the NICs of the latter's ranks would be the
busiest. A rack with replica 0 and half of replica 1, of tp=4, each part 12 GB:

    part           0      1      2      3          by NIC of each rank
    held by        a, e   b, f   c      d          a, b, e, f: 6 GB     c, d: 12 GB
    c's turns      c c a c c e     a sixth of what c wants enters at a, a sixth at e
    d's turns      d d b d d f     all: 8 GB

Carriers are ranks of the engine. They follow from what enters by each NIC without them.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .balance import Ints
from .paths import NIC

if TYPE_CHECKING:
    from .plan import Plan

TURNS = 32  # among which a rank's carriers take some
_DISTINCTLY = 1.2  # of what the NICs would bring in evenly: with less, nobody carries
_MOST = 5 << 30  # bytes that a rank carries in a refit, about: three waves of 16 are 1 GiB of memory


@dataclass(frozen=True, slots=True)
class Carried:
    """Who receives, in turn, what a generation rank wants by NIC: itself, and other ranks of its domain."""

    rank: int
    turns: tuple[int, ...]


def carriers_for(plan: Plan) -> tuple[Carried, ...]:
    """The carriers of a balanced plan that has none, by rank. () where they would not help, or replicas relay."""
    if plan.topology is None or not plan.spans_hosts or plan.relay or plan.casts:
        return ()
    sent, received = plan.from_trainer
    into, domains = received[NIC], plan.topology.domains("gen")
    count = np.bincount(domains)
    means = np.bincount(domains, into) / np.maximum(count, 1)
    level = int(max(means.max(), sent[NIC].max()))  # what the busiest NIC has if each domain's share its work
    if into.max() <= _DISTINCTLY * level:
        return ()
    carried = [
        each for domain in np.flatnonzero(count) for each in _shared_out(np.flatnonzero(domains == domain), into, level)
    ]
    return tuple(sorted(carried, key=lambda each: each.rank))


def _shared_out(ranks: Ints, into: Ints, level: int) -> list[Carried]:
    """Who takes turns of whom, so that nobody gets more than about `level` bytes, of the `into` [ranks] of each."""
    level = _level_with_room(into[ranks], level)
    nbytes = [*zip(into[ranks].tolist(), ranks.tolist(), strict=True)]
    room = [(-min(level - into, _MOST), rank) for into, rank in nbytes if into < level]
    heapq.heapify(room)
    carried: list[Carried] = []
    for into, rank in sorted(nbytes, reverse=True):
        moved = min(TURNS - 1, round(TURNS * float(1 - level / into))) if into > level else 0
        takers: list[int] = []
        while len(takers) < moved and room:
            less, taker = heapq.heappop(room)
            takers.append(taker)
            if less + into // TURNS < 0:
                heapq.heappush(room, (less + into // TURNS, taker))
        if takers:
            carried.append(Carried(rank, _spread(rank, takers)))
    return carried


def _level_with_room(nbytes: Ints, level: int) -> int:
    """The least from `level` on at which all that is above it has room below, of which no rank takes more than `_MOST`."""
    most = max(level, int(nbytes.max()))
    while level < most:
        middle = (level + most) // 2
        above, room = np.maximum(nbytes - middle, 0), np.minimum(np.maximum(middle - nbytes, 0), _MOST)
        if above.sum() <= room.sum():
            most = middle
        else:
            level = middle + 1
    return level


def _spread(rank: int, takers: list[int]) -> tuple[int, ...]:
    """TURNS turns, of which the takers have evenly spread ones."""
    taken = {(2 * number + 1) * TURNS // (2 * len(takers)): taker for number, taker in enumerate(sorted(takers))}
    return tuple(taken.get(turn, rank) for turn in range(TURNS))
