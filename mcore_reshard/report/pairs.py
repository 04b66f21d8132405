"""Who sends how much to whom: bytes of every pair of ranks, and of blocks of ranks where there are many."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.plan import loads
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.simulate.traffic import traffic_of

Ints = NDArray[np.int64]

CELLS = 128  # most rows and most columns of a heat map


@dataclass(frozen=True, slots=True, eq=False)
class PairBytes:
    """Bytes of one refit by sender and receiver."""

    from_trainer: Ints  # [training ranks, generation ranks]
    passed_on: Ints | None  # [generation ranks, generation ranks]; None: nobody passes anything on


def pair_bytes(plan: Plan) -> PairBytes:
    """The bytes of every pair of a plan."""
    train, gen = plan.train.world, plan.gen.world
    later = np.zeros((gen, gen), np.int64)
    for traffic in traffic_of(plan)[1:] if plan.later_hops else ():
        if len(traffic.src):
            np.add.at(later, (traffic.src - train, traffic.dst - train), traffic.pair_bytes)
    return PairBytes(loads.pair_bytes(plan), later if later.any() else None)


def block_size(ranks: int, host: int) -> int:
    """Ranks in a row of a heat map: 1 while they all fit, then a host's, then two hosts', four, ..."""
    size = 1 if ranks <= CELLS else host
    while -(-ranks // size) > CELLS:
        size *= 2
    return size


def in_blocks(matrix: Ints, rows: int, columns: int) -> Ints:
    """Sums over blocks of `rows` x `columns` ranks; the last block of each side may be smaller."""
    summed = np.add.reduceat(matrix, np.arange(0, matrix.shape[0], rows), axis=0)
    return np.asarray(np.add.reduceat(summed, np.arange(0, matrix.shape[1], columns), axis=1), np.int64)
