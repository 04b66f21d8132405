"""Divide what a replica pulls into waves, each of which it pushes to other replicas while the next one lands.

    pulled    wave 0   wave 1   wave 2
    pushed             wave 0   wave 1   wave 2

Both happen on the replica's own GPU. So each replica has waves of its own, and says no word about them.
"""

from __future__ import annotations

from math import isqrt

import numpy as np

from mcore_reshard.kernels.copies.copy_table import Ints
from mcore_reshard.kernels.copies.peer_table import joined_transfers
from mcore_reshard.planner.plan.schedule import Schedule

MOST_WAVES = 64
# A wave costs some microseconds between two kernels, and the first one lands while nothing is pushed. So the best number goes
# with the square root of the bytes; 61 GB in 64 waves took three H100s 176.7 ms, in 32 178.0, in 16 181.6.
_BYTES = 15_000_000


def waves_for(nbytes: int) -> int:
    """The number of waves of a replica that gets so many bytes, from the trainer and from other replicas."""
    return max(1, min(MOST_WAVES, isqrt(nbytes // _BYTES)))


def landing_waves(plain: Schedule, waves: int) -> Ints:
    """The wave of each transfer that a replica pulls from where it lies, as `joined_transfers` has them; of equal size."""
    landed = joined_transfers(plain.tables)
    middle = np.cumsum(landed.nbytes) - landed.nbytes // 2
    return np.minimum(
        waves * middle // max(1, int(landed.nbytes.sum())), waves - 1
    )  # the last may be of one byte, or none


def pushing_waves(plain: Schedule, landing: Ints, waves: int, cast: Schedule, rounds: Ints, sends: Schedule) -> Ints:
    """The wave of each transfer of `sends`, which all are of `plain`, or of `cast`, which lands afterwards.

    Waves are those of `landing`, `waves` in number, and go on with the `rounds` of what is cast: one of each transfer.
    """
    of_place = dict(zip(_places(plain), landing.tolist(), strict=True))
    of_place.update(zip(_places(cast), (waves + rounds).tolist(), strict=True))
    return np.array([of_place[place] for place in _places(sends)], np.int64)


def _places(schedule: Schedule) -> list[tuple[str, int, int]]:
    """Where each transfer is at this rank: the tensor, its first element, and bytes, since empty ones may be anywhere."""
    table = joined_transfers(schedule.tables)
    names = [local.name for local in schedule.tensors]
    columns = (table.tensor.tolist(), table.offset.tolist(), table.nbytes.tolist())
    return [(names[tensor], offset, nbytes) for tensor, offset, nbytes in zip(*columns, strict=True)]
