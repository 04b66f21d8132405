"""Content that ranks compute for themselves is that of the whole parameter, also where a piece begins inside a block."""

from __future__ import annotations

import pytest
import synthetic
import torch
from helpers.plans import REFINED, Case

from mcore_reshard.kernels.copies.cast_arithmetic import quantized
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import World

# As deepseek-v2-lite and moonlight, whose experts of width 1,408 are 5.5 blocks of 128 on each of two ranks.
HALF_BLOCKS = (("moe_intermediate_size", 192), ("kv_lora_rank", 64), ("qk_nope_head_dim", 48), ("v_head_dim", 64))
TWO_LAYERS = (("num_hidden_layers", 2),)
CASES = [
    Case(
        "tiny-moonlight",
        "ep=2,dp=2",
        "tp=2",
        changes=(*HALF_BLOCKS, *TWO_LAYERS),
        dtypes=("bf16", "fp8"),
        block=(64, 64),
    ),
    Case(
        "tiny-qwen3-moe", "ep=2,dp=2", "tp=4", changes=(*REFINED, *TWO_LAYERS), dtypes=("bf16", "fp8"), block=(64, 64)
    ),
]


def filled(plan: Plan, world: World, rank: int) -> dict[str, torch.Tensor]:
    tensors = synthetic.allocate(schedule_of(plan, world, rank), torch.device("cpu"))
    synthetic.fill(plan, world, rank, tensors)
    return tensors


def whole_parameters(plan: Plan) -> dict[str, torch.Tensor]:
    """Bits of every bfloat16 parameter, put together from what the training ranks hold."""
    parameters: dict[str, torch.Tensor] = {}
    for rank in range(plan.train.world):
        tensors = filled(plan, "train", rank)
        for local in synthetic.pieces(plan, "train", rank):
            if local.tensor in tensors and tensors[local.tensor].dtype == torch.bfloat16:
                whole = parameters.setdefault(local.parameter, torch.zeros(local.shape, dtype=torch.int16))
                whole[synthetic.slices(local.piece.region)] = synthetic.box(local, tensors)
    return parameters


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_cut_inside_of_blocks_have_the_scales_of_the_whole_parameter(case: Case) -> None:
    plan = case.plan()
    cut = [pair for pair in plan.pairs if pair.touched]
    assert cut, "nothing is cut inside of a block"
    wanted = whole_parameters(plan)
    block = {plan.groups[pair.weight].name_pattern: pair for pair in plan.pairs}
    arrived: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    compared = 0
    for rank in range(plan.gen.world):
        tensors = filled(plan, "gen", rank)
        for local in synthetic.pieces(plan, "gen", rank):
            pattern = plan.groups[local.group].name_pattern
            name = local.parameter.removesuffix("_scale_inv")
            pair = block.get(pattern.removesuffix("_scale_inv"))
            if pair is None:
                continue
            if name not in arrived:
                arrived[name] = quantized(wanted[name].view(torch.bfloat16), pair.block)
            whole = arrived[name][name != local.parameter]
            assert torch.equal(
                synthetic.box(local, tensors), synthetic.bits(whole)[synthetic.slices(local.piece.region)]
            ), local
            compared += 1
    assert compared > 100
