"""The memory of carriers: what a rank receives for others lies in a few waves' places, which take turns.

    wave of the refit       0   1   2   3   4   5
    place of its tensors    0   1   2   0   1   2        wave 3 lands once wave 0 has been passed on

Without waves everything has a place of its own.
"""

from __future__ import annotations

from math import prod

import numpy as np

from mcore_reshard.planner.model.parameters import ITEMSIZE
from mcore_reshard.planner.plan.schedule import Schedule

PLACES = 3  # one that lands, one that is passed on, and one between
_ALIGNMENT = 256  # bytes


def carried_places(schedule: Schedule) -> tuple[dict[int, int], int]:
    """Where each carried tensor begins, in bytes by its index; and the bytes of all places."""
    wave_of: dict[int, int] = {}
    for table in schedule.tables:
        chosen = np.isin(table.tensor, [*schedule.carried])
        wave_of.update(zip(table.tensor[chosen].tolist(), table.wave[chosen].tolist(), strict=True))
    used: dict[int, int] = {}  # bytes of each wave
    begins: dict[int, int] = {}
    for index in sorted(schedule.carried):
        local = schedule.tensors[index]
        begins[index] = used.get(wave_of[index], 0)
        nbytes = prod(local.shape) * ITEMSIZE[local.dtype]
        used[wave_of[index]] = begins[index] + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    place = max(used.values(), default=0)
    begins = {index: wave_of[index] % PLACES * place + begin for index, begin in begins.items()}
    return begins, place * min(PLACES, 1 + max(used, default=-1))
