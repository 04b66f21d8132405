"""The waves of replicas that push: nothing is pushed before it has landed, and waves are of about equal size."""

from __future__ import annotations

from dataclasses import fields
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.plans import Case
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.buckets import cut_buckets
from mcore_reshard.kernels.copies.peer_table import joined_transfers, peer_table
from mcore_reshard.kernels.transports.direct.staging import parted, rounds_of
from mcore_reshard.kernels.transports.direct.waves import MOST_WAVES, landing_waves, pushing_waves, waves_for
from mcore_reshard.kernels.transports.rounds import in_rounds
from mcore_reshard.planner.plan.make_schedule import relays_of, schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import Schedule, TransferTable

ONE_TO_THREE = Case("tiny-qwen3", "tp=1", "dp=3")
TWO_TO_FOUR = Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=2,dp=2")
ALL_CAST = Case("tiny-qwen3-moe-fp8", "tp=1", "dp=2", dtypes=("bf16", "fp8"), block=(128, 128))
SOME_CAST = Case(
    "tiny-qwen3", "tp=2", "tp=1,dp=4", dtypes=("bf16", "fp8"), block=(8, 8), kept=("model.layers.1.mlp.down_proj",)
)
WAVES, BUCKET_BYTES = 7, 4096

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


def pushed_and_landed(plan: Plan, rank: int, waves: int) -> tuple[Ints, Ints]:
    """(the wave of each transfer that a replica pushes, the wave after which all of its bytes have landed there)."""
    plain, cast = parted(schedule_of(plan, "gen", rank))
    sends, landing = relays_of(plan, rank)[0].sends, landing_waves(plain, waves)
    buckets = {peer: cut_buckets(cast.with_peers({peer}), BUCKET_BYTES) for peer in sorted(cast.peers)}
    rounds = in_rounds(buckets)
    assert plain.view is not None
    pulls, pushes = peer_table(plain), peer_table(sends)
    never = waves + len(rounds)
    landed = {local.name: np.full(8 * prod(local.shape), never) for local in sends.tensors}  # of each byte: the wave
    of_waves = landing[pulls.transfer].tolist(), touched(plain, pulls.copies, "dst")
    of_rounds = [
        (waves + number, rows)
        for number, together in enumerate(rounds)
        for bucket in together
        for rows in touched(cast, bucket.copies, "dst")
    ]
    for wave, rows in [*zip(*of_waves, strict=True), *of_rounds]:
        for tensor, start, end in rows:
            landed[tensor][start:end] = wave
    pushing = pushing_waves(plain, landing, waves, cast, rounds_of(cast, buckets), sends)
    last = np.zeros_like(pushing)
    for transfer, rows in zip(pushes.transfer.tolist(), touched(sends, pushes.copies, "src"), strict=True):
        last[transfer] = max(last[transfer], *(landed[tensor][start:end].max() for tensor, start, end in rows))
    return pushing, last


@pytest.mark.parametrize("case", [ONE_TO_THREE, TWO_TO_FOUR, ALL_CAST, SOME_CAST], ids=str)
def test_everything_is_pushed_as_soon_as_it_has_landed_and_not_before(case: Case) -> None:
    plan = case.plan()
    for rank in range(plan.gen.world):
        pushing, landed = pushed_and_landed(plan, rank, WAVES)
        assert len(pushing) and np.array_equal(pushing, landed)
        assert len(np.unique(pushing)) > 1


def test_some_are_cast_by_two_trainers() -> None:
    cast = parted(schedule_of(SOME_CAST.plan(), "gen", 0))[1]
    assert len(cast.peers) == 2


@pytest.mark.parametrize("waves", [1, 3])
@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_tiny_transfer_at_the_end_is_of_the_last_wave(last: int, waves: int) -> None:
    nbytes = np.array([4, 4, 4, last])
    columns = {column.name: np.zeros(4, np.int64) for column in fields(TransferTable)} | {"nbytes": nbytes}
    plain: Any = SimpleNamespace(tables=[TransferTable(**columns)])
    assert landing_waves(plain, waves)[-1] == waves - 1


def test_waves_are_of_about_equal_size() -> None:
    plan = Case("qwen3-30b-a3b", "tp=1", "dp=3").plan()
    plain, cast = parted(schedule_of(plan, "gen", 1))
    sends = relays_of(plan, 1)[0].sends
    landing = landing_waves(plain, 32)
    pushing = pushing_waves(plain, landing, 32, cast, np.zeros(0, np.int64), sends)
    for transfers, wave in zip((plain, sends), (landing, pushing), strict=True):
        nbytes = np.bincount(wave, joined_transfers(transfers.tables).nbytes, minlength=32)
        assert (abs(nbytes - nbytes.mean()) < 0.02 * nbytes.mean()).all()


@pytest.mark.parametrize(
    ("nbytes", "waves"), [(0, 1), (15_000_000, 1), (600_000_000, 6), (61_000_000_000, 63), (1 << 40, MOST_WAVES)]
)
def test_the_number_of_waves_goes_with_the_root_of_the_bytes(nbytes: int, waves: int) -> None:
    assert waves_for(nbytes) == waves
