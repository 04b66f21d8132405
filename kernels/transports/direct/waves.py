"""Divide what goes along a chain of replicas into waves: each is passed on while the next one lands.

    train:0 -> gen:0    wave 0   wave 1   wave 2
    gen:0 -> gen:1               wave 0   wave 1   wave 2

The first replica says how many waves there are. It and its trainers cut them alike. All others pass the same waves on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import isqrt
from typing import Any

import numpy as np

from mcore_reshard.kernels.copies.copy_table import Ints
from mcore_reshard.kernels.copies.peer_table import joined_transfers
from mcore_reshard.kernels.cuda.engine_rows import ALL_ROWS, ENGINE_STREAMS
from mcore_reshard.planner.plan.schedule import Schedule

MOST_WAVES = 256
# Each wave takes some time of its own, and each replica begins a wave after the one before it. So the best number goes with the
# square root of the bytes.
_BYTES = 1_650_000


def waves_for(nbytes: int) -> int:
    """The number of waves of a replica that gets so many bytes."""
    return max(1, min(MOST_WAVES, isqrt(nbytes // _BYTES)))


def push_turns(rank: int, far: Sequence[int]) -> dict[int, int]:
    """In which turn of a wave a rank pushes to each of the `far` ones. Ranks that push to the same begin with another one each."""
    return {peer: (number - rank) % len(far) for number, peer in enumerate(sorted(far))}


def push_share(waves: int, of_one: float) -> tuple[float, int]:
    """(the copy engine's share of what is pushed in so many waves, its streams).

    One wave is like a pull, of which it takes `of_one`. Of several streams it would take one to its end before it goes on with
    others, so several waves go over a single one.
    """
    return (of_one, ENGINE_STREAMS) if waves == 1 else (ALL_ROWS, 1)


def waves_of(parts: Sequence[Schedule], counts: Mapping[int, int]) -> list[Ints]:
    """The wave of each transfer of the parts, as `joined_transfers` has them: with each peer so many, of equal size.

    The first part goes first. Both ends of a pair cut it alike.
    """
    tables = [joined_transfers(part.tables) for part in parts]
    peer = np.concatenate([table.peer for table in tables])
    nbytes = np.concatenate([table.nbytes for table in tables])
    wave = np.zeros(len(peer), np.int64)
    for rank, count in counts.items():
        rows = np.flatnonzero(peer == rank)
        middle = np.cumsum(nbytes[rows]) - nbytes[rows] // 2
        wave[rows] = np.minimum(
            count * middle // max(1, int(nbytes[rows].sum())), count - 1
        )  # the last may be of one byte, or none
    return np.split(wave, np.cumsum([len(table) for table in tables])[:-1])


def passing_waves(parts: Sequence[Schedule], waves: Sequence[Ints], sends: Schedule) -> Ints:
    """The wave of each transfer of `sends`: that in which the same bytes land here, as transfers of the parts."""
    of_place: dict[tuple[str, int, int], int] = {}
    for part, wave in zip(parts, waves, strict=True):
        of_place.update(zip(_places(part), wave.tolist(), strict=True))
    return np.array([of_place[place] for place in _places(sends)], np.int64)


def _places(schedule: Schedule) -> list[tuple[str, int, int]]:
    """Where each transfer is at this rank: the tensor, its first element, and bytes, since empty ones may be anywhere."""
    table = joined_transfers(schedule.tables)
    names = [local.name for local in schedule.tensors]
    columns = (table.tensor.tolist(), table.offset.tolist(), table.nbytes.tolist())
    return [(names[tensor], offset, nbytes) for tensor, offset, nbytes in zip(*columns, strict=True)]


def told_waves(wave: Ints) -> list[list[int]]:
    """The waves of transfers as one rank tells another: [0, 0, 1] -> [[0, 2], [1, 1]]."""
    return [[number, len([*equal])] for number, equal in groupby(wave.tolist())]


def parse_waves(said: Any, transfers: int, count: int) -> Ints:
    """What `told_waves` says of so many transfers. ValueError where it is not of all, or of waves that are not below `count`."""
    wave, times = np.array(said, np.int64).reshape(-1, 2).T
    if times.sum() != transfers or (times < 1).any() or ((wave < 0) | (wave >= count)).any():
        raise ValueError(f"waves of {times.sum()} transfers from {min(wave, default=0)} on, not {count} of {transfers}")
    return np.asarray(wave.repeat(times), np.int64)
