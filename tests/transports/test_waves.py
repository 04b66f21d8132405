"""The waves of replicas that push: nothing is pushed before it has landed, and waves are of about equal size."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.plans import Case
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.peer_table import joined_transfers, pull_table, push_table
from mcore_reshard.kernels.transports.direct.staging import parted
from mcore_reshard.kernels.transports.direct.waves import MOST_WAVES, waves_for, waves_of
from mcore_reshard.planner.plan.make_schedule import relays_of, schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import Schedule

ONE_TO_THREE = Case("tiny-qwen3", "tp=1", "dp=3")
TWO_TO_FOUR = Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=2,dp=2")
SOME_CAST = Case("tiny-qwen3-moe-fp8", "tp=1", "dp=2", dtypes=("bf16", "fp8"), block=(128, 128))
WAVES = 7

Ints = NDArray[np.int64]
Bytes = tuple[str, int, int]  # tensor, first byte, end


def touched(schedule: Schedule, copies: NDArray[np.void], here: str) -> list[list[Bytes]]:
    """The bytes of the rank's own tensors that each copy reads or writes, row by row."""
    found = []
    for copy in copies:
        rows = [
            int(copy[f"{here}_offset"] + np.dot(place, copy[f"{here}_strides"]))
            for place in np.ndindex(*copy["extents"])
        ]
        tensor, nbytes = schedule.tensors[copy[here]].name, int(copy["row_bytes"])
        found.append([(tensor, row, row + nbytes) for row in rows])
    return found


def early(plan: Plan, rank: int, waves: int, delay: int = 0) -> list[Bytes]:
    """What a replica would push before it has landed there; `delay` makes it land so many waves later."""
    plain, cast = parted(schedule_of(plan, "gen", rank))
    sends = relays_of(plan, rank)[0].sends
    landing, pushing = waves_of(plain, cast, sends, waves)
    assert plain.view is not None
    pulls, pushes = pull_table(plain, plain.view.source_table()), push_table(sends)
    landed: dict[str, Ints] = {}  # by tensor, of each byte: the wave; never: waves
    sizes = {local.name: 64 * int(np.prod(local.shape, dtype=np.int64)) for local in sends.tensors}
    for wave, rows in zip((landing[pulls.transfer] + delay).tolist(), touched(plain, pulls.copies, "dst"), strict=True):
        for tensor, start, end in rows:
            landed.setdefault(tensor, np.full(sizes[tensor], waves))[start:end] = wave
    names = {cast.tensors[number].name for table in cast.tables for number in table.tensor.tolist()}
    return [
        (tensor, start, end)
        for wave, rows in zip(pushing[pushes.transfer].tolist(), touched(sends, pushes.copies, "src"), strict=True)
        for tensor, start, end in rows
        if tensor not in names and (landed[tensor][start:end] > wave).any()
    ]


@pytest.mark.parametrize("case", [ONE_TO_THREE, TWO_TO_FOUR, SOME_CAST], ids=str)
def test_nothing_is_pushed_before_it_has_landed(case: Case) -> None:
    plan = case.plan()
    for rank in range(plan.gen.world):
        assert early(plan, rank, WAVES) == []


def test_the_check_sees_what_is_pushed_too_early() -> None:
    assert early(ONE_TO_THREE.plan(), 1, WAVES, delay=1)


def test_waves_are_of_about_equal_size() -> None:
    plan = Case("qwen3-30b-a3b", "tp=1", "dp=3").plan()
    plain, cast = parted(schedule_of(plan, "gen", 1))
    sends = relays_of(plan, 1)[0].sends
    for transfers, wave in zip((plain, sends), waves_of(plain, cast, sends, 32), strict=True):
        nbytes = np.bincount(wave, joined_transfers(transfers.tables).nbytes, minlength=32)
        assert (abs(nbytes - nbytes.mean()) < 0.02 * nbytes.mean()).all()


@pytest.mark.parametrize(
    ("nbytes", "waves"), [(0, 1), (15_000_000, 1), (600_000_000, 6), (61_000_000_000, 63), (1 << 40, MOST_WAVES)]
)
def test_the_number_of_waves_goes_with_the_root_of_the_bytes(nbytes: int, waves: int) -> None:
    assert waves_for(nbytes) == waves
