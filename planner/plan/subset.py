"""A part of a schedule: what one rank exchanges with some of its peers, where others are reached in another way."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from .schedule import Schedule, SourceTable, StageSchedule, TransferTable


def with_peers(schedule: Schedule, peers: Collection[int]) -> Schedule:
    """`schedule` with the transfers to and from `peers` (ranks in the other world) alone, in the same order.

    Both ends of a pair must leave it in or out alike. Tensors, padding and the misc route stay as they are, so do them
    once; so do the stages, where nothing may be left to move.
    """
    chosen = np.array(sorted(peers), np.int64)
    kept = replace(schedule, stages=tuple(_stage(stage, chosen) for stage in schedule.stages))
    return (
        kept
        if schedule.source_table is None
        else replace(kept, source_table=partial(_source_table, schedule.source_table, chosen))
    )


def peers_of(schedule: Schedule) -> frozenset[int]:
    """Ranks in the other world that the rank exchanges bytes with."""
    return frozenset(
        peer
        for stage in schedule.stages
        for table in (stage.sends, stage.recvs)
        for peer in np.unique(table.peer).tolist()
    )


def _stage(stage: StageSchedule, peers: NDArray[np.int64]) -> StageSchedule:
    return StageSchedule(stage.pp_stage, _table(stage.sends, peers), _table(stage.recvs, peers))


def _table(table: TransferTable, peers: NDArray[np.int64]) -> TransferTable:
    kept = np.isin(table.peer, peers)
    return TransferTable(*(getattr(table, column.name)[kept] for column in fields(TransferTable)))


def _source_table(whole: Callable[[], SourceTable], peers: NDArray[np.int64]) -> SourceTable:
    source_table = whole()
    return replace(source_table, stages=tuple(_table(table, peers) for table in source_table.stages))
