"""Weights that are cast on the direct transport, between real processes: pushed, or in rounds through slots.

Readers who sum what they read pull it out of slots.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.casting import expected_bytes, stepped, train_schedule, trainer_tensors, transfers_with_casts
from helpers.gpu import needs_gpus
from helpers.handmade import End, HandTransfer, allocate, other_end_of, raw_bytes, schedule_of
from helpers.ranks import run_ranks, values
from test_direct import SPAWN_S, Rank, run_twice, stress
from test_staging import gen_schedule

from mcore_reshard.kernels.copies.cast_arithmetic import block_scales
from mcore_reshard.planner.plan.schedule import Cast, LocalTensor, OtherEndView, Schedule

pytestmark = [pytest.mark.gpu, needs_gpus(1)]
pytest.importorskip("mcore_reshard.kernels.transports.direct.executor", reason="needs cuda-core", exc_type=ImportError)


def of(number: int, worlds: tuple[int, int], seed: int) -> Schedule:
    transfers = transfers_with_casts(np.random.default_rng(seed), worlds)
    return (
        train_schedule(transfers, number, worlds)
        if number < worlds[0]
        else gen_schedule(transfers, number - worlds[0], worlds)
    )


def refit_twice(
    number: int, address: str, worlds: tuple[int, int], seed: int, gpus: int, scratch_bytes: int
) -> dict[str, bytes]:
    """Weights change between the refits; slots are far smaller than what goes through them. With odd seeds there are slots."""
    schedule = of(number, worlds, seed)
    train = schedule.world == "train"
    tensors = trainer_tensors(schedule, seed) if train else allocate(schedule)
    rank = Rank(
        number, address, worlds, schedule, tensors, gpus, scratch_bytes=scratch_bytes, checksums=seed % 2 == 1
    )  # fmt: skip
    assert 0 < rank.executor.scratch_bytes <= scratch_bytes if train and seed % 2 else rank.executor.scratch_bytes == 0
    for turn in range(2):
        reports = rank.executor.run()
        if train and not turn:
            for name, tensor in stepped(rank.tensors).items():
                rank.tensors[name].copy_(tensor)
    assert [report.pp_stage for report in reports] == [stage.pp_stage for stage in schedule.stages]
    arrived = {name: raw_bytes(tensor.cpu()) for name, tensor in rank.tensors.items()}
    rank.executor.close()
    return arrived


def check(worlds: tuple[int, int], seed: int, gpus: int, scratch_bytes: int) -> None:
    arrived = values(
        run_ranks(sum(worlds), refit_twice, worlds, seed, gpus, scratch_bytes, timeout_s=SPAWN_S, method="spawn")
    )
    transfers = transfers_with_casts(np.random.default_rng(seed), worlds)
    starts = [trainer_tensors(train_schedule(transfers, rank, worlds), seed) for rank in range(worlds[0])]
    sources = [stepped({name: tensor.cuda() for name, tensor in start.items()}) for start in starts]  # and scales there
    for rank in range(worlds[1]):
        gen = schedule_of(transfers, "gen", rank, worlds)
        assert arrived[worlds[0] + rank] == expected_bytes(transfers, gen, sources)


@pytest.mark.parametrize(
    ("worlds", "seed", "scratch_bytes"),
    [((1, 1), 0, 32 << 10), ((2, 2), 1, 64 << 10), ((3, 1), 2, 1 << 20), ((1, 3), 3, 50_000)],
)
def test_random_patterns_on_one_gpu(worlds: tuple[int, int], seed: int, scratch_bytes: int) -> None:
    check(worlds, seed, 1, scratch_bytes)


@pytest.mark.parametrize(("gpus", "worlds"), [
    pytest.param(2, (2, 2), marks=needs_gpus(2)),
    pytest.param(4, (4, 4), marks=needs_gpus(4)),
])  # fmt: skip
@pytest.mark.parametrize("seed", [7, 8])
def test_random_patterns_over_nvlink(gpus: int, worlds: tuple[int, int], seed: int) -> None:
    check(worlds, seed, gpus, 64 << 10)


ROWS, COLUMNS = 8192, 4096


def one_large_weight(number: int, worlds: tuple[int, int]) -> Schedule:
    """Every training rank's weight goes to every generation rank, which has one for each, cast."""
    scales = (ROWS // 128, COLUMNS // 128)
    transfers = []
    for src in range(worlds[0]):
        for dst in range(worlds[1]):
            for name, dtype, shape in (("w", "float8_e4m3fn", (ROWS, COLUMNS)), ("s", "float32", scales)):
                ends = End(src, name, shape, (0, 0), (0, 1)), End(dst, f"{name}{src}", shape, (0, 0), (0, 1))
                transfers.append(HandTransfer(0, f"{name}{src}", dtype, shape, *ends))
    if number < worlds[0]:
        schedule = schedule_of(transfers, "train", number, worlds)
        weight, scale = LocalTensor("w", (ROWS, COLUMNS), "bfloat16"), LocalTensor("s", scales, "float32")
        view = OtherEndView(other_end_of(transfers, number, "train"))
        return replace(
            schedule,
            tensors=(weight, scale),
            casts=(Cast(0, "float8_e4m3fn", 1, (128, 128)),),
            computed=(1,),
            view=view,
        )
    rank = number - worlds[0]
    table = other_end_of(transfers, rank)
    tensors = tuple(replace(local, dtype="bfloat16") if local.name == "w" else local for local in table.tensors)
    return replace(
        schedule_of(transfers, "gen", rank, worlds),
        view=OtherEndView(replace(table, tensors=tensors, computed=frozenset(range(1, 2 * worlds[0], 2)))),
    )


def overwrite_at_once(number: int, address: str, worlds: tuple[int, int], gpus: int, checksums: bool) -> int:
    schedule = one_large_weight(number, worlds)
    start = {} if schedule.world == "train" else allocate(schedule)
    if schedule.world == "train":
        start["w"] = torch.full((ROWS, COLUMNS), float("nan"), dtype=torch.bfloat16)
    rank = Rank(number, address, worlds, schedule, start, gpus, scratch_bytes=4 << 20, checksums=checksums)

    def count_wrong(version: int) -> int:
        block = torch.full((128, 128), float(version), dtype=torch.bfloat16, device="cuda")
        scale = block_scales(block, (128, 128))[0, 0]
        scales = [rank.tensors[f"s{src}"] != scale for src in range(worlds[0])]
        weights = [rank.tensors[f"w{src}"].view(torch.uint8) != 0x7E for src in range(worlds[0])]
        return sum(int(differs.sum()) for differs in (*scales, *weights))

    return stress(rank, schedule.world, 6, count_wrong)


@pytest.mark.parametrize(("gpus", "worlds"), [
    (1, (1, 1)),
    (1, (2, 2)),
    pytest.param(2, (2, 2), marks=needs_gpus(2)),
])  # fmt: skip
@pytest.mark.parametrize("checksums", [False, True])
def test_a_trainer_may_overwrite_as_soon_as_run_returns(gpus: int, worlds: tuple[int, int], checksums: bool) -> None:
    outcomes = run_ranks(sum(worlds), overwrite_at_once, worlds, gpus, checksums, timeout_s=SPAWN_S, method="spawn")
    assert sum(values(outcomes)) == 0


def misbehave(number: int, address: str, worlds: tuple[int, int], unavailable_reason: str, checksums: bool) -> Any:
    schedule = one_large_weight(number, worlds)
    start = {local.name: torch.zeros(local.shape, dtype=getattr(torch, local.dtype)) for local in schedule.tensors}
    rank = Rank(number, address, worlds, schedule, start, 1, timeout_s=6.0, scratch_bytes=4 << 20, checksums=checksums)
    if unavailable_reason == "dead reader" and number == 2:
        os._exit(1)
    if unavailable_reason == "silent trainer" and number == 0:
        time.sleep(11)
        return
    try:
        rank.executor.run()
    finally:
        rank.executor.close()


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("unavailable_reason", ["dead reader", "silent trainer"])
def test_peers_that_fail_are_named(unavailable_reason: str, checksums: bool) -> None:
    outcomes = run_ranks(4, misbehave, (2, 2), unavailable_reason, checksums, timeout_s=SPAWN_S, method="spawn")
    bad = 2 if unavailable_reason == "dead reader" else 0
    errors = [outcome for number, outcome in enumerate(outcomes) if number != bad]
    assert {outcome.kind for outcome in errors} <= {"PeerLostError", "DeadlineError"}
    name = "gen:0" if unavailable_reason == "dead reader" else "train:0"
    assert any(name in str(outcome.error) for outcome in errors)


def die_while_casting(number: int, address: str, worlds: tuple[int, int], checksums: bool) -> None:
    schedule = one_large_weight(number, worlds)
    start = {local.name: torch.zeros(local.shape, dtype=getattr(torch, local.dtype)) for local in schedule.tensors}
    rank = Rank(number, address, worlds, schedule, start, 1, timeout_s=SPAWN_S / 2, checksums=checksums)
    run_twice(rank, dies=number == 0)


@pytest.mark.parametrize("checksums", [False, True])
def test_a_trainer_that_dies_while_it_casts_is_named_and_leaves_nobody_waiting(checksums: bool) -> None:
    dead, reader = run_ranks(2, die_while_casting, (1, 1), checksums, timeout_s=SPAWN_S, method="spawn")
    assert dead.died
    assert reader.kind == "PeerLostError", reader
    assert reader.error is not None and "gen:0 waiting for train:0 to send" in reader.error
    assert reader.seconds < SPAWN_S / 2


def die_while_written(number: int, address: str, worlds: tuple[int, int]) -> None:
    from mcore_reshard.kernels.transports.direct.pushes import Target

    def admit_and_die(self: Any, run: int) -> None:
        self._signals.tell(run, -1)
        os.kill(os.getpid(), signal.SIGKILL)

    schedule = one_large_weight(number, worlds)
    start = {local.name: torch.zeros(local.shape, dtype=getattr(torch, local.dtype)) for local in schedule.tensors}
    rank = Rank(number, address, worlds, schedule, start, 1, timeout_s=SPAWN_S / 2)
    if number == 1:
        Target.admit = admit_and_die  # type: ignore[method-assign]
    try:
        rank.executor.run()
    finally:
        rank.executor.close()
        torch.cuda.synchronize()  # the GPU is none the worse


def test_a_reader_that_dies_while_it_is_written_is_named() -> None:
    trainer, dead = run_ranks(2, die_while_written, (1, 1), timeout_s=SPAWN_S, method="spawn")
    assert dead.died
    assert trainer.kind == "PeerLostError" and "gen:0" in str(trainer.error), trainer
    assert trainer.seconds < SPAWN_S / 2


def test_too_little_scratch_is_said_to_readers() -> None:
    outcomes = run_ranks(2, starved, (1, 1), timeout_s=SPAWN_S, method="spawn")
    assert [outcome.kind for outcome in outcomes] == ["SessionError", "SessionError"]
    assert "train:0: 8 bytes of scratch are too few for 2 buckets (1 peer, 2 slots): give at least 32" in str(
        outcomes[1].error
    )


def starved(number: int, address: str, worlds: tuple[int, int]) -> None:
    schedule = one_large_weight(number, worlds)
    start = {local.name: torch.zeros(local.shape, dtype=getattr(torch, local.dtype)) for local in schedule.tensors}
    Rank(number, address, worlds, schedule, start, 1, timeout_s=10.0, scratch_bytes=8, checksums=True)
