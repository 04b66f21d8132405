"""Weights that are cast while nccl gathers them, between real processes."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.casting import (
    expected_bytes,
    rank_schedule,
    stepped,
    train_schedule,
    trainer_tensors,
    transfers_with_casts,
)
from helpers.gpu import device_of, needs_gpus
from helpers.handmade import allocate, raw_bytes, schedule_of
from helpers.ranks import run_ranks, values
from test_nccl import SPAWN_S, TIMEOUT_S, connected, meet

from mcore_reshard.kernels.copies.bind import bind
from mcore_reshard.kernels.transports.nccl.communicator import nccl_unavailable_reason
from mcore_reshard.kernels.transports.nccl.executor import connect_nccl
from mcore_reshard.kernels.transports.nccl.staging import ScratchBudget

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(1),
    pytest.mark.skipif(nccl_unavailable_reason() is not None, reason=str(nccl_unavailable_reason())),
]

BUDGETS = (ScratchBudget(), ScratchBudget(1 << 16, checksums=True))


def refits(number: int, address: str, worlds: tuple[int, int]) -> list[dict[str, bytes]]:
    """Two runs under each budget, with other weights the second time."""
    device = device_of(number)
    found = []
    for seed, budget in enumerate(BUDGETS):
        transfers = transfers_with_casts(np.random.default_rng(seed), worlds)
        train = number < worlds[0]
        schedule = rank_schedule(transfers, number, worlds)
        start = trainer_tensors(schedule, seed) if train else allocate(schedule)
        tensors = {name: tensor.to(device) for name, tensor in start.items()}
        store = connected(address).under(f"budget-{seed}")
        (executor,) = connect_nccl([[bind(schedule, tensors)]], store, timeout_s=TIMEOUT_S, budget=budget)
        executor.run()
        if train:
            for name, tensor in stepped(tensors).items():
                tensors[name].copy_(tensor)
        executor.run()
        meet(store, "done", number, sum(worlds))
        found.append({name: raw_bytes(tensor.cpu()) for name, tensor in tensors.items()})
        executor.close()
    return found


@pytest.mark.parametrize("worlds", [(1, 1), (2, 2)], ids=str)
def test_nccl_casts_what_it_sends(worlds: tuple[int, int]) -> None:
    arrived = values(run_ranks(sum(worlds), refits, worlds, timeout_s=SPAWN_S, method="spawn"))
    for seed in range(len(BUDGETS)):
        transfers = transfers_with_casts(np.random.default_rng(seed), worlds)
        starts = [trainer_tensors(train_schedule(transfers, rank, worlds), seed) for rank in range(worlds[0])]
        sources = [stepped({name: tensor.cuda() for name, tensor in start.items()}) for start in starts]
        for rank in range(worlds[1]):
            gen = schedule_of(transfers, "gen", rank, worlds)
            assert arrived[worlds[0] + rank][seed] == expected_bytes(transfers, gen, sources)
