"""`plan.transfers` against bytes that really moved: real processes, real gloo, every element carrying its own address."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from helpers.ranks import run_ranks, values

from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.mesh import parse_gen_mesh, parse_train_mesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.model.families import parameters_from_config
from mcore_reshard.planner.plan.make_plan import make_plan
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint

CASES = [
    ("tiny-qwen3-moe", "tp=2,ep=2,etp=2,dp=2", "tp=2"),
    ("tiny-gpt-oss", "tp=2,ep=2", "tp=2"),
    ("tiny-deepseek-v3", "tp=2,pp=2", "tp=2,ep=2"),
]
SAMPLES = 400
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def plan_of(model, train, gen):
    return make_plan(parameters_from_config(load_config(model)), parse_train_mesh(train), parse_gen_mesh(gen))


def addressed(schedule, digit):
    """Tensors whose elements hold one base-2**15 digit of (rank, tensor, element), which together number all of them."""
    tensors, first = {}, schedule.rank << 26
    for tensor in schedule.tensors:
        count = int(np.prod(tensor.shape))
        numbers = torch.arange(first, first + count)
        first += count
        dtype = _DTYPES[tensor.dtype]
        digits = numbers // (1 << 15 * digit) % (1 << 15)
        integers = digits.to(torch.int16 if dtype.itemsize == 2 else torch.int32)
        tensors[tensor.name] = integers.view(dtype).reshape(tensor.shape)
    return tensors


def starts(schedule):
    """Number of the first element of each tensor, as `addressed` counts."""
    sizes = [int(np.prod(tensor.shape)) for tensor in schedule.tensors]
    firsts = (schedule.rank << 26) + np.cumsum([0, *sizes[:-1]])
    return dict(zip((tensor.name for tensor in schedule.tensors), firsts.tolist(), strict=True))


def moved_addresses(index, store, plan):
    """Two refits, one a digit; generation ranks return the addresses that arrived."""
    train_ranks = plan.train.world
    arrived = {}
    is_train = index < train_ranks
    schedule = schedule_of(plan, "train" if is_train else "gen", index if is_train else index - train_ranks)
    tensors = addressed(schedule, 0) if is_train else {
        t.name: torch.zeros(t.shape, dtype=_DTYPES[t.dtype]) for t in schedule.tensors
    }  # fmt: skip
    kind = TrainEndpoint if is_train else GenerationEndpoint
    by_name = {"export": lambda names: ((n, torch.zeros(1)) for n in names)} if is_train else {"load_weights": list}
    endpoint = kind(schedule, tensors, store=store, options=Options(timeout_s=30), **by_name)
    endpoint.prepare()
    for digit in range(2):
        if is_train:
            for name, tensor in addressed(schedule, digit).items():
                tensors[name].copy_(tensor)
        endpoint.refit(digit)
        if not is_train:
            for name, tensor in tensors.items():
                integers = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).long()
                arrived[name] = arrived.get(name, 0) + integers * (1 << 15 * digit)
    endpoint.close()
    return {name: tensor.numpy() for name, tensor in arrived.items()}


@pytest.mark.parametrize(("model", "train", "gen"), CASES)
def test_every_sampled_element_came_from_where_explain_says(model, train, gen):
    plan = plan_of(model, train, gen)
    world = plan.train.world
    moved = values(run_ranks(world + plan.gen.world, moved_addresses, plan, timeout_s=60))[world:]
    firsts = [starts(schedule_of(plan, "train", rank)) for rank in range(world)]
    pick = random.Random(7)
    for gen_rank, arrived in enumerate(moved):
        for name in pick.choices(sorted(arrived), k=SAMPLES // len(moved)):
            index = tuple(pick.randrange(size) for size in arrived[name].shape)
            (transfer,) = plan.transfers(tensor=name, rank=f"gen:{gen_rank}", element=index)
            assert transfer.src is not None
            expected = firsts[transfer.src.rank][transfer.src.tensor] + transfer.src.offset
            assert int(arrived[name][index]) == expected, (name, index, transfer)
