"""Real plans that cast, through real processes: what arrives is the whole parameter quantized or cast as torch does it.

The oracle knows nothing of ranks or copies: it casts whole parameters of the checkpoint, and asks the plan's pieces only
where each element lies.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from helpers.plans import REFINED, UNQUANTIZED_LAYERS, Case
from helpers.ranks import run_ranks, values
from helpers.simulate import numbered_tensors

from mcore_reshard.kernels.copies.cast_arithmetic import block_scales
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint

CASES = [
    Case("tiny-qwen3-moe", "ep=2,dp=2", "tp=2", dtypes=("bf16", "fp8"), block=(8, 16)),
    Case("tiny-llama", "tp=2,pp=2", "tp=1,dp=3", dtypes=("bf16", "fp8"), block=(8, 8)),  # replicas relay
    Case("tiny-qwen3-moe", "ep=2,etp=2,dp=4", "tp=4", changes=REFINED, dtypes=("bf16", "fp8"), block=(64, 64)),
    Case("tiny-deepseek-v3", "tp=2,ep=2", "tp=2", dtypes=("bf16", "fp8"), block=(8, 8)),
    UNQUANTIZED_LAYERS,
    Case(
        "tiny-qwen3-moe",
        "pp=2,vpp=2,ep=2,dp=2,layers=1+2+1+0",
        "tp=1,dp=3",
        dtypes=("fp8", "fp8"),
        block=(8, 16),
        unquantized=(1, 3),
    ),
    Case("tiny-qwen3-moe", "tp=2,dp=2", "tp=2", dtypes=("fp32", "bf16")),
    Case("tiny-deepseek-v3", "tp=2", "tp=1", dtypes=("bf16", "fp32")),
]


def parameters(plan: Plan, version: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(what trainers hold, what engines should) of every numbered element, the latter's bits as numbers.

    Elements of scales have no value in the trainer.
    """
    first = np.cumsum([0] + [group.count * prod(group.shape) for group in plan.groups]).tolist()
    generator = torch.Generator().manual_seed(version)
    trained = torch.randn(first[-1], generator=generator) * 2.0 ** torch.randint(
        -20, 4, (first[-1],), generator=generator
    )
    cast = {entry.group: entry for entry in plan.casts}
    pairs = {pair.weight: pair for pair in plan.pairs}
    arrived = torch.zeros(first[-1], dtype=torch.int32)
    for index, entry in cast.items():
        trained[first[index] : first[index + 1]] = of = (
            trained[first[index] : first[index + 1]].to(dtype(entry.src)).float()
        )
        group = plan.groups[index]
        whole = of.to(dtype(entry.src)).reshape(group.count, *group.view[-2:] if index in pairs else (-1,))
        if index not in pairs:
            arrived[first[index] : first[index + 1]] = bits(whole.to(dtype(entry.dst)))
            continue
        pair = pairs[index]
        scales = block_scales(whole, pair.block)
        spread = scales.repeat_interleave(pair.block[0], -2).repeat_interleave(pair.block[1], -1)
        data = whole.float() * (1.0 / spread[:, : whole.shape[1], : whole.shape[2]])
        arrived[first[index] : first[index + 1]] = bits(data.to(torch.float8_e4m3fn))
        arrived[first[pair.scales] : first[pair.scales + 1]] = bits(scales)
    return trained, arrived


def dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.contiguous().reshape(-1).view(words[tensor.element_size()]).to(torch.int32)


def plain(plan: Plan) -> set[int]:
    """The groups that nothing casts, and that are no scales of one that is cast."""
    cast = {entry.group for entry in plan.casts}
    return {*range(len(plan.groups))} - cast - {pair.scales for pair in plan.pairs if pair.weight in cast}


def refit(number: int, address: str, case: Case) -> dict[str, int]:
    """Refits twice; on generation ranks, elements by tensor that are not what they should be."""
    plan = case.plan()
    train = number < plan.train.world
    rank = number if train else number - plan.train.world
    schedule = schedule_of(plan, "train" if train else "gen", rank)
    computed = {schedule.tensors[index].name for index in schedule.computed}
    ids = {
        local.name: array for (owner, local), array in numbered_tensors(plan, schedule.world).items() if owner == rank
    }
    tensors = {
        local.name: torch.zeros(local.shape, dtype=dtype(local.dtype))
        for local in schedule.tensors
        if local.name not in computed
    }
    options = Options(timeout_s=30.0)
    endpoint = (TrainEndpoint if train else GenerationEndpoint)(schedule, tensors, store=address, options=options)
    endpoint.prepare()
    first = np.cumsum([0] + [group.count * prod(group.shape) for group in plan.groups])
    as_it_is = np.array([*plain(plan)], np.int64)
    wrong: dict[str, int] = {}
    for version in (1, 2):
        trained, arrived = parameters(plan, version)
        for name, tensor in tensors.items():
            if train:
                tensor.copy_(trained[torch.from_numpy(np.maximum(ids[name], 0))])
            else:
                tensor.view(torch.uint8).fill_(0xEE)
        endpoint.refit(version)
        for name, tensor in () if train else tensors.items():
            number_of = ids[name].reshape(-1)
            group = np.searchsorted(first, number_of, side="right") - 1
            where = torch.from_numpy(np.maximum(number_of, 0))
            untouched = torch.from_numpy(np.isin(group, as_it_is))
            wanted = torch.where(untouched, bits(trained[where].to(tensor.dtype)), arrived[where])
            wanted = torch.where(torch.from_numpy(number_of < 0), 0, wanted)  # declared padding
            if count := int((bits(tensor) != wanted).sum()):
                wrong[name] = count
    endpoint.close()
    return wrong


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_arrives_is_cast_as_the_whole_parameter(case: Case) -> None:
    plan = case.plan()
    assert plan.casts and not plan.misc
    if "fp8" in case.dtypes[:1]:
        assert {layer for cast in plan.casts for layer in plan.groups[cast.group].layers} <= {*case.unquantized}
    ranks: Any = plan.train.world + plan.gen.world
    assert values(run_ranks(ranks, refit, case)) == [{}] * ranks
