"""vLLM's MXFP8 tensors are those of plans for the same config."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.simulate import numbered_tensors

from mcore_reshard.kernels.copies.tensors import dtype_name
from mcore_reshard.planner.layout.mesh import GenMesh, MeshError, TrainMesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.model.families import parameters_from_config
from mcore_reshard.planner.model.parameters import Role
from mcore_reshard.planner.plan.make_plan import make_plan
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.validation.engine.slices import GenSizes
from mcore_reshard.validation.engine.vllm_engine import build_engine

ROUTERS = ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate")
WIDER = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "intermediate_size": 256}
MLA = {
    **WIDER, "num_key_value_heads": 4, "moe_intermediate_size": 64, "q_lora_rank": 64, "kv_lora_rank": 32,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip


def mxfp8(name: str, *ignored: str, **changes: Any) -> dict[str, Any]:
    stated = {"quant_method": "mxfp8", "ignored_layers": list(ignored)}
    return {**load_config(name), "quantization_config": stated, **changes}


def built(folder: Any, sizes: GenSizes = GenSizes(), gen_rank: int = 0) -> dict[str, torch.Tensor]:  # noqa: B008
    """The parameters of a vLLM rank; its own, but for kernels, which a CPU has none of."""
    import vllm.model_executor.layers.quantization.modelopt as modelopt

    with (
        mock.patch.object(modelopt, "select_linear_kernel", lambda *_, **__: None),
        mock.patch.object(modelopt, "expose_input_quant_key", lambda *_: None),
        mock.patch.object(modelopt, "select_mxfp8_moe_backend", lambda **_: (None, None)),
    ):
        model = build_engine(folder, sizes, gen_rank, device="meta")
    scales = (".q_scale", ".k_scale", ".v_scale", ".prob_scale")  # of the KV cache, no parameters of the model
    return {name: tensor for name, tensor in model.named_parameters() if not name.endswith(scales)}


def planned(config: dict[str, Any], train_dtype: str = "mxfp8", gen: GenMesh = GenMesh()) -> Plan:  # noqa: B008
    return make_plan(parameters_from_config(config), TrainMesh(), gen, train_dtype=train_dtype, gen_dtype="mxfp8")


CASES = {
    "dense": (mxfp8("tiny-qwen3-fp8"), 1),
    "experts": (mxfp8("tiny-qwen3-moe-fp8", *ROUTERS), 1),
    "experts, two ranks": (mxfp8("tiny-qwen3-moe-fp8", *ROUTERS), 2),
    "lm_head kept": (mxfp8("tiny-qwen3-moe-fp8", "lm_head", *ROUTERS), 2),
    "padded vocabulary": (mxfp8("tiny-qwen3-fp8", vocab_size=250), 1),
    "padded vocabulary, lm_head kept": (mxfp8("tiny-qwen3-fp8", "lm_head", vocab_size=250), 2),
    "tied": (mxfp8("tiny-qwen3-fp8", "lm_head", tie_word_embeddings=True), 1),
    "by parts of names": (mxfp8("tiny-qwen3-moe-fp8", "mlp.gate", "head", "layers.1.self_attn"), 1),
    "by patterns": (mxfp8("tiny-qwen3-moe-fp8", "*.gate", "lm_*", "model.layers.1.*.experts"), 1),
    "a router hides the MLP beside it": (mxfp8("tiny-qwen3-fp8", "model.layers.0.mlp.gate"), 1),
    "by the list that it does not read": (
        mxfp8("tiny-qwen3-fp8", quantization_config={"quant_method": "mxfp8", "modules_to_not_convert": ["lm_head"]}),
        1,
    ),
    "latent attention": (mxfp8("tiny-deepseek-v3", **MLA), 2),
    "gpt-oss": (mxfp8("tiny-gpt-oss", intermediate_size=64), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_of_vllm_is_planned_as_it_is(name, config_folder):
    """A trainer in MXFP8 fills what the engine quantizes, one in bf16 what it keeps; the output layer is filled by neither."""
    config, tp = CASES[name]
    plans = [planned(config, train_dtype, GenMesh(tp=tp)) for train_dtype in ("mxfp8", "bf16")]
    tensors = {
        tensor: (tuple(found.shape), dtype_name(found.dtype))
        for tensor, found in built(config_folder(config), GenSizes(tp=tp)).items()
    }
    for unplanned in plans[0].misc:
        group = plans[0].groups[unplanned.group]
        if group.role is Role.LM_HEAD:
            assert "list it in ignored_layers" in unplanned.reason
            rows = -(-group.shape[0] // 64) * 64 // tp
            assert tensors.pop(group.name_pattern) == ((rows, *group.shape[1:]), group.dtype)
    moved = {
        local.name: (local.shape, local.dtype)
        for plan in plans
        for rank, local in numbered_tensors(plan, "gen")
        if rank == 0
    }
    if config["model_type"] == "gpt_oss":  # no layout rule where experts, stacked in one tensor, are in MXFP8
        tensors = {name: found for name, found in tensors.items() if ".experts." not in name}
        moved = {name: found for name, found in moved.items() if ".experts." not in name}
    assert moved == tensors


def test_a_tied_embedding_gets_scales_that_nothing_fills_and_is_refused(config_folder):
    config = mxfp8("tiny-qwen3-fp8", tie_word_embeddings=True)
    tensors = built(config_folder(config))
    assert "lm_head.weight_scale" in tensors and tensors["model.embed_tokens.weight"].dtype is torch.bfloat16
    with pytest.raises(MeshError, match=r"scales that nothing fills: list lm_head in ignored_layers"):
        planned(config)


@pytest.mark.parametrize(
    ("name", "changes", "refused"),
    [
        ("tiny-qwen3-fp8", {"intermediate_size": 80}, True),
        ("tiny-qwen3-fp8", {"intermediate_size": 96}, False),
        ("tiny-qwen3-moe-fp8", {"moe_intermediate_size": 48}, True),
    ],
)
def test_columns_that_vllm_refuses_are_misc_with_that_reason(name, changes, refused, config_folder):
    config = mxfp8(name, "lm_head", *ROUTERS, **changes)
    found = [unplanned.reason for unplanned in planned(config).misc]
    assert any("vLLM refuses to build a layer with" in reason for reason in found) is refused
    with pytest.raises(ValueError, match="divisible by 32") if refused else nullcontext():
        built(config_folder(config))


def test_routers_that_the_config_does_not_name_are_quantized_and_refused(config_folder):
    config = mxfp8("tiny-qwen3-moe-fp8", ROUTERS[0])
    tensors = built(config_folder(config))
    assert tensors[ROUTERS[1] + ".weight"].dtype is torch.float8_e4m3fn
    with pytest.raises(
        MeshError, match=r"1 routers, such as model\.layers\.1\.mlp\.gate\.weight: list them in ignored"
    ):
        planned(config)
