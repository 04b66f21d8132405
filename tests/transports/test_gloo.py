"""Buckets over real processes: every byte arrives, no pattern hangs, and whoever is to blame is named."""

from __future__ import annotations

import os
import re
import time
from threading import Timer
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gloo import NoisyWire, connect
from helpers.handmade import allocate, expected, random_transfers, raw_bytes, schedule_of
from helpers.ranks import run_ranks, store_of, values
from numpy.typing import NDArray
from torch.distributed import is_initialized

from mcore_reshard.kernels.copies.bind import bind
from mcore_reshard.kernels.copies.buckets import Bucket
from mcore_reshard.kernels.errors import SessionError, Waiting
from mcore_reshard.kernels.rendezvous import gloo_group
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup
from mcore_reshard.kernels.rendezvous.store_keys import FailFastStore
from mcore_reshard.kernels.transports.gloo import GlooExecutor

BUCKET_BYTES = 128


def member(group_rank: int, worlds: tuple[int, int]) -> tuple[Any, int]:
    return ("train", group_rank) if group_rank < worlds[0] else ("gen", group_rank - worlds[0])


def transfers_of(seed: int, worlds: tuple[int, int]) -> list[Any]:
    return random_transfers(np.random.default_rng(seed), worlds, parameters=25, stages=3)


def refit_twice(
    rank: int, address: str, worlds: tuple[int, int], seed: int, slots: int, executor: type[GlooExecutor] = GlooExecutor
) -> tuple[dict[str, bytes], int]:
    schedule = schedule_of(transfers_of(seed, worlds), *member(rank, worlds), worlds)
    tensors = allocate(schedule, seed=seed if schedule.world == "train" else None)
    bound = bind(schedule, tensors)
    group = connect(address, rank, sum(worlds))
    running = executor(group, bound, bucket_bytes=BUCKET_BYTES, slots=slots)
    assert running.scratch_bytes <= slots * (BUCKET_BYTES + 16)
    for _ in range(2):
        reports = running.run()
    assert sum(report.nbytes for report in reports) == bound.nbytes
    group.close()
    assert not is_initialized()
    return {name: raw_bytes(tensor) for name, tensor in tensors.items()}, bound.nbytes


@pytest.mark.parametrize(
    ("worlds", "seed", "slots"), [((1, 1), 0, 2), ((2, 2), 1, 2), ((3, 1), 2, 4), ((1, 3), 3, 3), ((4, 3), 4, 2)]
)
def test_random_patterns_arrive_byte_for_byte(worlds: tuple[int, int], seed: int, slots: int) -> None:
    held = values(run_ranks(sum(worlds), refit_twice, worlds, seed, slots))
    transfers = transfers_of(seed, worlds)
    sources = [allocate(schedule_of(transfers, "train", rank, worlds), seed=seed) for rank in range(worlds[0])]
    for rank in range(worlds[1]):
        want = expected(transfers, schedule_of(transfers, "gen", rank, worlds), sources)
        assert held[worlds[0] + rank][0] == {name: raw_bytes(tensor) for name, tensor in want.items()}
    sent, received = sum(n for _, n in held[: worlds[0]]), sum(n for _, n in held[worlds[0] :])
    assert sent == received > 0


def test_executors_of_one_group_share_their_slots() -> None:
    group = GlooGroup.__new__(GlooGroup)  # without its connections
    group._slots = []
    small, large = group.slots(4, 100), group.slots(2, 300)
    assert [slot.numel() for slot in group.slots(4, 100)] == [300] * 4 and len(large) == 2 and len(small) == 4
    assert len({slot.data_ptr() for n in (2, 3, 4) for slot in group.slots(n, 200)}) == 4


class LostBucket(GlooExecutor):
    """Sends its second bucket in the place of its first one."""

    def _pack(self, bucket: Bucket, message: NDArray[np.uint8]) -> None:
        super()._pack(bucket, message)
        message[12:16] = np.frombuffer(np.uint32(bucket.number + 1).tobytes(), np.uint8)


def test_a_damaged_bucket_is_reported_by_its_receiver() -> None:
    sender, receiver = run_ranks(2, refit_twice, (1, 1), 5, 2, NoisyWire)
    assert receiver.kind == "ChecksumError"
    assert receiver.error is not None
    assert re.match(r"stage \d: gen:0 waiting for train:0 to send model\.p", receiver.error)
    assert re.search(r"bucket \d arrived damaged: CRC-32 ", receiver.error)
    assert sender.kind == "PeerLostError"


def test_a_bucket_in_anothers_place_is_reported_by_its_receiver() -> None:
    _, receiver = run_ranks(2, refit_twice, (1, 1), 5, 2, LostBucket)
    assert receiver.kind == "ChecksumError"
    assert "(run, stage, bucket) [1, 0, 1] arrived in place of [1, 0, 0]" in str(receiver.error)


def with_bad_rank(rank: int, address: str, worlds: tuple[int, int], bad: int, how: str, timeout_s: float) -> None:
    schedule = schedule_of(transfers_of(1, worlds), *member(rank, worlds), worlds)
    bound = bind(schedule, allocate(schedule, seed=0))
    group = connect(address, rank, sum(worlds), timeout_s)
    if rank == bad:
        if how == "killed":
            os.kill(os.getpid(), 9)
        time.sleep(2 * timeout_s)
        return
    try:
        GlooExecutor(group, bound, bucket_bytes=BUCKET_BYTES).run()
    finally:
        group.close()


def test_a_killed_peer_is_noticed_at_once_and_named() -> None:
    outcomes = run_ranks(4, with_bad_rank, (2, 2), 1, "killed", 20.0)
    assert outcomes[1].died
    others = [outcomes[rank] for rank in (0, 2, 3)]
    assert {outcome.kind for outcome in others} == {"PeerLostError"}
    assert any("waiting for train:1 to send model.p" in str(outcome.error) for outcome in others)
    assert max(outcome.seconds for outcome in others) < 5


def closed_by_another_thread(rank: int, address: str) -> str:
    """Rank 1 is dead, rank 0 closes its group while a thread of its waits for rank 2, which waits for it."""
    group = connect(address, rank, 3)
    if rank == 1:
        os.kill(os.getpid(), 9)
    peer = 2 - rank
    waiting = Waiting(f"rank {rank}", f"rank {peer}", 0, "model.w", sends=False)
    message = group.recv(torch.empty(8, dtype=torch.uint8), peer, waiting)
    if rank == 0:
        Timer(0.5, group.close).start()
    message.wait()
    return "came"


def test_a_group_closes_under_a_thread_that_waits() -> None:
    outcomes = run_ranks(3, closed_by_another_thread)
    assert outcomes[0].kind == "TransferError" and "rank 0 has closed its connections" in str(outcomes[0].error)
    assert outcomes[2].kind == "PeerLostError"
    assert max(outcome.seconds for outcome in outcomes) < 5


def test_a_silent_peer_is_an_error_at_the_deadline() -> None:
    outcomes = run_ranks(4, with_bad_rank, (2, 2), 1, "silent", 2.0)
    others = [outcomes[rank] for rank in (0, 2, 3)]
    assert {outcome.kind for outcome in others} <= {"DeadlineError", "PeerLostError"}
    assert any(
        "waiting for train:1 to send" in str(outcome.error) and "nothing within 2 s" in str(outcome.error)
        for outcome in others
    )
    assert max(outcome.seconds for outcome in others) < 6


def late_last_rank(rank: int, address: str, late_s: float) -> None:
    if rank == 3:
        time.sleep(late_s)
    store = store_of(address)
    try:
        GlooGroup(FailFastStore("group", store, "failed"), rank, [f"rank {each}" for each in range(4)], timeout_s=2.0)
    except SessionError as error:
        store.set("failed", str(error))  # as a session does
        raise


def test_a_rank_that_comes_too_late_is_named_and_does_not_wait_for_those_that_gave_up() -> None:
    *early, late = run_ranks(4, late_last_rank, 3.0)
    assert {outcome.kind for outcome in (*early, late)} == {"SessionError"}
    assert all("rank 3 did not come within 2 s" in str(outcome.error) for outcome in (*early, late))
    assert late.seconds < 4


def dies_before_it_connects(rank: int, address: str) -> None:
    if rank == 2:
        gloo_group._connect = lambda *_: os._exit(1)  # type: ignore[assignment]
    store = store_of(address)
    GlooGroup(FailFastStore("group", store, "failed"), rank, ["train:0", "gen:0", "gen:1"], timeout_s=2.0)


def test_a_rank_that_does_not_connect_is_called_by_its_name() -> None:
    train, gen, _ = run_ranks(3, dies_before_it_connects)
    assert (train.kind, train.error) == ("SessionError", "train:0: gen:1 did not connect by gloo within 2 s")
    assert (gen.kind, gen.error) == ("SessionError", "gen:0: gen:1 did not connect by gloo within 2 s")


def closed_by_itself(rank: int, address: str) -> None:
    group = connect(address, rank, 2, timeout_s=20.0)
    waiting = Waiting(f"rank {rank}", f"rank {1 - rank}", 0, "model.w", sends=False)
    message = group.recv(torch.empty(8, dtype=torch.uint8), 1 - rank, waiting)
    if rank:
        group.close()
    message.wait()


def test_a_rank_that_closes_its_group_does_not_say_that_it_lost_a_peer() -> None:
    other, itself = run_ranks(2, closed_by_itself)
    assert itself.kind == "TransferError" and "rank 1 has closed its connections" in str(itself.error)
    assert other.kind == "PeerLostError" and other.seconds < 10
