"""The tensors that the planner writes on a generation rank are exactly those of the engine: names, shapes, dtypes.

The engine's side comes from the oracle of engine slices, which tests/engine compares with real vLLM models, published
ones at full size included. The engine loads misc parameters itself, so they are not listed here.
"""

from __future__ import annotations

import pytest
from helpers.validation_cases import REFINED_COLUMNS, REFINED_EXPERTS, in_blocks

from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.model.configs import builtin_names, load_config
from mcore_reshard.planner.model.families import parameters_from_config
from mcore_reshard.planner.plan.make_plan import make_plan
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.validation.engine.slices import GenSizes, StandInEngine

TINY = [name for name in builtin_names() if name.startswith("tiny-")]
MESHES = (GenMesh(tp=2, pp=2), GenMesh(tp=4), GenMesh(tp=2, dp=2))
UNEVEN = [("tiny-llama", GenMesh(tp=2, pp=2, layers=(1, 3))), ("tiny-qwen3-moe", GenMesh(pp=2, layers=(3, 1)))]
EXPERT_MESHES = (GenMesh(tp=2, ep=2), GenMesh(tp=2, dp=2, ep=4), GenMesh(pp=2, dp=2, ep=2))
PUBLISHED = [
    ("llama-3.1-8b", GenMesh(tp=8)),
    ("qwen3-30b-a3b", GenMesh(tp=4, ep=4)),
    ("nemotron-3-nano-30b-a3b", GenMesh(tp=2, pp=2)),
    ("gpt-oss-120b", GenMesh(tp=8)),
    ("deepseek-v3", GenMesh(tp=32, dp=4)),
]
WITH_EXPERTS = {name for name in TINY if parameters_from_config(load_config(name)).architecture.experts}
CASES = [
    *(
        (name, mesh)
        for name in TINY
        for mesh in MESHES
        if (name, mesh.tp) != ("tiny-deepseek-v3-fp8", 4)  # shared experts cut inside of blocks: vLLM refuses them
    ),
    *((name, mesh) for name in TINY for mesh in EXPERT_MESHES if name in WITH_EXPERTS),
    *UNEVEN,
    *PUBLISHED,
]


REFINED = [(*REFINED_EXPERTS[0], GenMesh(tp=4)), (*REFINED_COLUMNS, GenMesh(tp=2))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "mesh"), CASES, ids=str)
def test_planned_tensors_are_the_engines(name, mesh):
    config = load_config(name)
    dtype = "fp8" if name.endswith("-fp8") else "bf16"
    if dtype == "bf16":  # published checkpoints may be quantized; the engine then holds what an unquantized one gives
        config.pop("quantization_config", None)
    gen_ranks = range(mesh.world) if name in TINY else (0, mesh.world - 1)
    assert_planned_tensors_are_the_engines(config, mesh, dtype, dtype, gen_ranks)


@pytest.mark.parametrize(("block", "changes", "mesh"), REFINED, ids=str)
def test_planned_scales_of_refined_experts_are_the_engines(block, changes, mesh):
    config = in_blocks("qwen3-moe", block, **changes)
    plan = assert_planned_tensors_are_the_engines(config, mesh, "bf16", "fp8", range(mesh.world))
    planned = {tensor.name for rank in range(mesh.world) for tensor in schedule_of(plan, "gen", rank).tensors}
    scales = {
        name.rpartition(".routed_experts.")[2] for name in planned if "routed_experts" in name and "scale" in name
    }
    assert scales == {"w13_weight_scale_inv.blocks", "w2_weight_scale_inv.blocks"}


def assert_planned_tensors_are_the_engines(config, mesh, train_dtype, gen_dtype, gen_ranks):
    plan = make_plan(parameters_from_config(config), TrainMesh(), mesh, train_dtype=train_dtype, gen_dtype=gen_dtype)
    sizes = GenSizes(tp=mesh.tp, pp=mesh.pp, dp=mesh.dp, ep=mesh.ep, layers=mesh.layers)
    for gen_rank in gen_ranks:
        schedule = schedule_of(plan, "gen", gen_rank)
        planned = {tensor.name: (tensor.shape, tensor.dtype) for tensor in schedule.tensors}
        engine = StandInEngine(config, sizes, gen_rank, device="meta")
        held = {tensor: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for tensor, t in engine.tensors.items()}
        by_misc = {tensor for parameter in schedule.misc for tensor in engine.destinations(parameter)}
        assert planned == {tensor: held[tensor] for tensor in held if tensor not in by_misc - planned.keys()}
    return plan
