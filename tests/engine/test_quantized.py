"""Quantized weights and their scales where a plan puts them, against vLLM's own loaders of FP8 checkpoints."""

from __future__ import annotations

from contextlib import nullcontext
from math import prod

import numpy as np
import pytest
import torch
from helpers.plans import REFINED, Case
from helpers.simulate import numbered_tensors

from mcore_reshard.engines.vllm.model import after_direct_writes, kernel_layouts, load_weights, local_tensors
from mcore_reshard.kernels.copies.tensors import dtype_name
from mcore_reshard.planner.layout.mesh import GenMesh, MeshError, TrainMesh
from mcore_reshard.planner.model.families import ConfigError, parameters_from_config
from mcore_reshard.planner.model.parameters import ITEMSIZE
from mcore_reshard.planner.plan.make_plan import make_plan
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.validation.engine.slices import GenSizes
from mcore_reshard.validation.engine.vllm_engine import build_engine

LARGE = (("hidden_size", 256), ("head_dim", 128), ("num_attention_heads", 4), ("num_key_value_heads", 2))
LARGE_MLA = (
    ("hidden_size", 256), ("intermediate_size", 512), ("moe_intermediate_size", 256), ("q_lora_rank", 256),
    ("kv_lora_rank", 128), ("qk_nope_head_dim", 64), ("qk_rope_head_dim", 64), ("v_head_dim", 64),
)  # fmt: skip
KEPT = ("model.layers.1.mlp.down_proj", "model.layers.2.self_attn.o_proj", "lm_head")


def fp8(name: str, gen: str, block: tuple[int, ...] = (8, 8), changes=(), kept=()):
    dtypes = ("bf16" if kept else "fp8", "fp8")  # the trainer holds all in FP8 or nothing
    return Case(f"tiny-{name}", "tp=1", gen, changes=changes, dtypes=dtypes, block=block, kept=kept)


CASES = [
    fp8("llama", "tp=4"),
    fp8("llama", "tp=8", (4, 8), (("num_key_value_heads", 2), ("intermediate_size", 128))),
    fp8("llama", "tp=2,pp=2", (8, 16), kept=KEPT),
    fp8("qwen3", "tp=2", (128, 128), (*LARGE, ("intermediate_size", 512))),
    fp8("qwen3-moe", "tp=2,dp=2"),
    fp8("qwen3-moe", "tp=2,dp=2,ep=4"),
    fp8("qwen3-moe", "tp=2", (128, 128), (*LARGE, ("moe_intermediate_size", 256))),
    fp8("qwen3-moe", "tp=2", kept=tuple(f"model.layers.1.mlp.experts.{e}.up_proj" for e in range(8))),
    fp8("deepseek-v3", "tp=4"),
    fp8("deepseek-v3", "tp=2,ep=2"),
    fp8("deepseek-v3", "tp=2", (128, 128), LARGE_MLA),
]


def checkpoint(plan: Plan, version: int) -> dict[str, torch.Tensor]:
    """An FP8 checkpoint: element i of the model, counted as `simulate.numbered_tensors` does, has the bytes of `number(i)`."""
    tensors, first = {}, 0
    for group in plan.groups:
        for name in group.names():
            ids = np.arange(first, first + prod(group.shape))
            tensors[name] = torch.from_numpy(numbered(ids, group.dtype, version)).view(dtype_of(group.dtype))
            tensors[name] = tensors[name].reshape(group.shape)
            first += ids.size
    return tensors


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def numbered(ids: np.ndarray, dtype: str, version: int) -> np.ndarray:
    """The bytes of elements: byte `version` of their number in FP8, all of it in wider dtypes. uint8 [..., itemsize]."""
    size = ITEMSIZE[dtype]
    shifts = 8 * (np.arange(size) + (version if size == 1 else 0))
    return ((ids.reshape(-1, 1) >> shifts) & 0xFF).astype(np.uint8)


def label(case: Case) -> str:
    sizes = "-".join(f"{name}={size}" for name, size in case.changes)
    return f"{case.config}-{case.gen}-{'x'.join(map(str, case.block))}-{sizes}-{len(case.kept)} kept"


@pytest.mark.parametrize("case", CASES, ids=label)
def test_vllm_loads_pairs_where_the_plan_puts_them(case, config_folder):
    plan = case.plan()
    assert not plan.misc
    sizes = GenSizes(plan.gen.tp, plan.gen.pp, plan.gen.dp, plan.gen.ep)
    wanted = numbered_tensors(plan, "gen")
    for gen_rank in range(plan.gen.world):
        model = build_engine(config_folder(case.hf_config), sizes, gen_rank)
        assert kernel_layouts(model) == {}
        mine = {local: ids for (rank, local), ids in wanted.items() if rank == gen_rank}
        tensors = local_tensors(model)
        assert {local.name: (local.shape, local.dtype) for local in mine} == {
            name: (tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors.items()
        }
        for version in (0, 1, 2):  # together they identify every element, also where one has a single byte
            load_weights(model, checkpoint(plan, version).items())
            for local, ids in mine.items():
                actual = tensors[local.name].contiguous().reshape(-1).view(torch.uint8).numpy()
                actual = actual.reshape(-1, ITEMSIZE[local.dtype])
                filled = ids.reshape(-1) >= 0
                expected = numbered(ids.reshape(-1)[filled], local.dtype, version)
                assert (actual[filled] == expected).all(), (gen_rank, local.name, version)


def test_vllm_quantizes_routers_that_the_config_does_not_name(config_folder):
    config = CASES[4].hf_config
    config["quantization_config"]["modules_to_not_convert"] = []
    model = build_engine(config_folder(config), GenSizes(), 0)
    assert local_tensors(model)["model.layers.0.mlp.gate.weight"].dtype is torch.float8_e4m3fn
    with pytest.raises(MeshError, match=r"would quantize 4 routers, such as model\.layers\.0\.mlp\.gate\.weight"):
        make_plan(parameters_from_config(config), TrainMesh(), GenMesh(), gen_dtype="fp8")


def test_static_activations_are_refused_with_blocks_by_both(config_folder):
    config = CASES[0].hf_config
    config["quantization_config"]["activation_scheme"] = "static"
    with pytest.raises(ValueError, match="block-wise quantization only supports dynamic activation"):
        build_engine(config_folder(config), GenSizes(), 0, device="meta")
    with pytest.raises(ConfigError, match="block-wise quantization only supports dynamic activation"):
        parameters_from_config(config)


PARTS = [
    ("tiny-llama", "model.layers.1.self_attn.q_proj"),
    ("tiny-qwen2", "model.layers.0.mlp.up_proj"),
    ("tiny-qwen3-moe", "model.layers.3.self_attn.v_proj"),
    ("tiny-deepseek-v3", "model.layers.1.self_attn.q_a_proj"),
    ("tiny-deepseek-v3", "model.layers.2.mlp.shared_experts.gate_proj"),
    ("tiny-moonlight", "model.layers.1.self_attn.kv_a_proj_with_mqa"),
    ("tiny-nemotron-h", "backbone.layers.1.mixer.k_proj"),
    ("tiny-gpt-oss", "model.layers.1.self_attn.q_proj"),
]


@pytest.mark.parametrize(("config", "kept"), PARTS)
def test_parts_of_fused_modules_are_refused_where_vllm_refuses_them(config, kept, config_folder):
    case = Case(config, "tp=1", "tp=1", dtypes=("bf16", "fp8"), block=(8, 8), kept=(kept,))
    try:
        build_engine(config_folder(case.hf_config), GenSizes(), 0, device="meta")
    except ValueError as error:
        refused = str(error)
    else:
        refused = ""
    assert bool(refused) is (config != "tiny-moonlight"), "it has no q_a_proj to fuse with"
    if refused:
        assert "some but not all shards" in refused
        with pytest.raises(MeshError, match="only a part of it is in modules_to_not_convert"):
            case.plan()
    else:
        assert case.plan().pairs


def test_vllm_keeps_one_scale_a_tensor(config_folder):
    case = fp8("qwen3-moe", "tp=2", block=())
    model = build_engine(config_folder(case.hf_config), GenSizes(tp=2), 0)
    tensors = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match="Fp8LinearMethod is not known to leave parameters as they were loaded"):
        local_tensors(model)  # once processed they have one scale for all that is fused
    wanted = {local for rank, local in numbered_tensors(case.plan(), "gen") if rank == 0}
    assert {local.name.split(".")[-1] for local in wanted} >= {"weight_scale", "w2_weight_scale"}
    for local in wanted:
        assert (tuple(tensors[local.name].shape), dtype_name(tensors[local.name].dtype)) == (local.shape, local.dtype)


CUT_INSIDE_OF_BLOCKS = [
    ("llama", "tp=4", (8, 32), True),  # o_proj and down_proj
    ("llama", "tp=2", (16, 16), False),  # KV heads
    ("llama", "tp=2", (32, 8), False),  # gate and up
    ("llama", "tp=1", (64, 64), False),
    ("deepseek-v3", "tp=2", (32, 8), True),  # experts
    ("deepseek-v3", "tp=1", (24, 8), True),  # gate and up of an expert share a block
    ("deepseek-v3", "tp=4", (8, 16), True),  # down_proj of both
    ("qwen3-moe", "tp=2", (8, 32), True),  # experts
    ("qwen3-moe", "tp=2,ep=2", (8, 24), True),  # o_proj
    ("nemotron-h", "tp=2", (24, 8), True),  # up_proj, which nothing is fused with
    ("nemotron-h", "tp=2", (8, 24), True),
]


@pytest.mark.parametrize(("name", "gen", "block", "refused"), CUT_INSIDE_OF_BLOCKS)
def test_the_plan_says_where_vllm_refuses_a_cut_inside_of_blocks(name, gen, block, refused, config_folder):
    case = fp8(name, gen, block)
    plan = case.plan()
    sizes = GenSizes(plan.gen.tp, plan.gen.pp, plan.gen.dp, plan.gen.ep)
    assert any("splits a block" in unplanned.reason for unplanned in plan.misc)
    assert any("vLLM refuses to build" in unplanned.reason for unplanned in plan.misc) is refused
    folder = config_folder(case.hf_config)
    with pytest.raises(ValueError, match="not divisible") if refused else nullcontext():
        build_engine(folder, sizes, 0, device="meta")


REFINEMENTS = [
    ("tp=4", (64, 64), REFINED),
    ("tp=2,pp=2", (128, 128), (*LARGE, ("moe_intermediate_size", 384))),
    ("tp=4", (128, 128), (*LARGE, ("moe_intermediate_size", 768))),  # as Qwen3-30B-A3B on four GPUs
]


@pytest.mark.parametrize(("gen", "block", "changes"), REFINEMENTS, ids=["32 of 64", "64 of 128", "30B-A3B"])
def test_scales_of_experts_cut_inside_of_blocks_are_repeated_as_vllm_does(gen, block, changes, config_folder):
    case = fp8("qwen3-moe", gen, block, changes)
    plan = case.plan()
    assert not plan.misc and sum(pair.touched for pair in plan.pairs) == 3
    wanted = numbered_tensors(plan, "gen")
    for gen_rank in range(plan.gen.world):
        model = build_engine(config_folder(case.hf_config), GenSizes(plan.gen.tp, plan.gen.pp), gen_rank)
        mine = {local: ids for (rank, local), ids in wanted.items() if rank == gen_rank}
        tensors = local_tensors(model)
        assert {local.name: local.shape for local in mine} == {n: tuple(t.shape) for n, t in tensors.items()}
        refined = [
            (name, p)
            for name, p in model.named_parameters()
            if name.endswith(("w13_weight_scale_inv", "w2_weight_scale_inv"))
        ]
        load_weights(model, checkpoint(plan, 0).items())
        loaded = {name: parameter.clone() for name, parameter in refined}
        after_direct_writes(model, torch.bfloat16)  # no plan has put scales beside them: they stay
        assert all(torch.equal(parameter, loaded[name]) for name, parameter in refined)
        for _, parameter in refined:
            parameter.data.zero_()
        for local, ids in mine.items():
            written = torch.from_numpy(numbered(ids, local.dtype, 0)).view(dtype_of(local.dtype))
            if local.name.endswith(".blocks"):
                tensors[local.name].copy_(written.reshape(local.shape))
        after_direct_writes(model, torch.bfloat16)
        for name, parameter in refined:
            assert torch.equal(parameter, loaded[name]), (gen_rank, name)
            parameter.data.fill_(0.5)  # as the loader would, under golden: what a plan put beside it earlier is used up
        after_direct_writes(model, torch.bfloat16)
        assert all((parameter == 0.5).all() for _, parameter in refined)


def test_scales_of_weights_that_are_nan_are_repeated_too(config_folder):
    case = fp8("qwen3-moe", *REFINEMENTS[0])
    model = build_engine(config_folder(case.hf_config), GenSizes(case.plan().gen.tp), 0)
    beside = {name: tensor for name, tensor in local_tensors(model).items() if name.endswith(".blocks")}
    for tensor in beside.values():
        tensor.fill_(2.0)
        tensor[1, 0, 0] = float("nan")
    after_direct_writes(model, torch.bfloat16)
    for name in beside:
        parameter = model.get_parameter(name.removesuffix(".blocks"))
        assert (parameter[0] == 2.0).all() and parameter[1].isnan().any() and not parameter[2:].isnan().any()


def test_absorbed_attention_weights_are_derived_from_pairs(config_folder):
    model = build_engine(config_folder(CASES[8].hf_config), GenSizes(tp=4), 0)
    for name, tensor in local_tensors(model).items():
        if ".kv_b_proj." in name:
            tensor.copy_(torch.full_like(tensor, 3.0 if name.endswith("scale_inv") else 0.5, dtype=torch.float32))
    after_direct_writes(model, torch.bfloat16)
    assert (model.get_submodule("model.layers.0.self_attn.mla_attn.mla_attn").W_UV == 1.5).all()
