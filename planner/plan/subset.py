"""A part of a schedule: what one rank exchanges with some of its peers, where others are reached in another way."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from .schedule import Schedule


def with_peers(schedule: Schedule, peers: Collection[int]) -> Schedule:
    """`schedule` with the transfers to and from `peers` (ranks in the other world) alone, in the same order.

    Both ends of a pair of ranks must leave it in or out alike.
    """
    chosen = np.array(sorted(peers), np.int64)
    tables = [stage.sends if schedule.world == "train" else stage.recvs for stage in schedule.stages]
    return schedule.with_rows([np.isin(table.peer, chosen) for table in tables])


def peers_of(schedule: Schedule) -> frozenset[int]:
    """Ranks in the other world that the rank exchanges bytes with."""
    return frozenset(
        peer
        for stage in schedule.stages
        for table in (stage.sends, stage.recvs)
        for peer in np.unique(table.peer).tolist()
    )
