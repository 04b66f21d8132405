"""An engine upgrade that moves a layout is found before a byte moves: the loader's trace no longer agrees with the rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.validation_cases import REFINED_EXPERTS, in_blocks

import mcore_reshard as mr
from mcore_reshard.kernels.errors import LayoutError
from mcore_reshard.planner.layout.traces import RankTrace
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.plan.trace_check import checkpoint_of
from mcore_reshard.session.trace_exchange import require_planned_layout
from mcore_reshard.validation.engine.slices import GenSizes, poison
from mcore_reshard.validation.engine.vllm_engine import build_engine


@pytest.fixture
def check(config_folder: Callable[[dict[str, Any]], Path]) -> Callable[[str], None]:
    """Holds the loader of a model's rank 1 of 2 against its plan, as a worker does when it connects."""

    def check(name: str) -> None:
        from mcore_reshard.engines.vllm.trace import trace_loading

        config = load_config(name)
        plan = mr.plan(config, "tp=2", "tp=2")
        model = build_engine(config_folder(config), GenSizes(tp=2), 1, device="meta")
        require_planned_layout(plan, "gen", 1, trace_loading(model, checkpoint_of(plan)), "vLLM")

    return check


@pytest.mark.parametrize(
    "name", ["tiny-llama", "tiny-qwen3-moe", "tiny-deepseek-v3", "tiny-gpt-oss", "tiny-nemotron-h"]
)
def test_the_loader_that_is_installed_agrees_with_the_rules(name: str, check: Callable[[str], None]) -> None:
    check(name)


def replace_after_loading(model: torch.nn.Module) -> int:
    """What vLLM ends with after it has loaded block-FP8 layers, on any kernels; returns how many parameters it replaced."""
    from vllm.model_executor.utils import replace_parameter

    replaced = 0
    for layer in model.modules():
        of_layer = dict(layer.named_parameters(recurse=False))
        if any(parameter.dtype is torch.float8_e4m3fn for parameter in of_layer.values()):
            for name, parameter in of_layer.items():
                replace_parameter(layer, name, parameter.data)
                replaced += 1
    return replaced


def test_a_live_model_in_block_fp8_is_traced(config_folder: Callable[[dict[str, Any]], Path]) -> None:
    """vLLM's own loaders refuse the plain parameters that it puts in the place of theirs."""
    from mcore_reshard.engines.vllm.trace import trace_loading

    config = load_config("tiny-qwen3-moe-fp8")
    plan = mr.plan(config, "tp=2", "tp=2", train_dtype="bf16", gen_dtype="fp8")
    model = build_engine(config_folder(config), GenSizes(tp=2), 1, device="meta")
    assert replace_after_loading(model) == 2 * 4 + 2 * 4  # of each layer, two linear weights and two of experts; scales
    live = {name: (type(parameter), dict(vars(parameter))) for name, parameter in model.named_parameters()}
    require_planned_layout(plan, "gen", 1, trace_loading(model, checkpoint_of(plan)), "vLLM")
    assert live == {name: (type(parameter), vars(parameter)) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("rank", [0, 3])
def test_experts_whose_scales_vllm_repeats_agree_with_the_rules(
    config_folder: Callable[[dict[str, Any]], Path], rank: int
) -> None:
    """As those of Qwen3-30B-A3B in FP8 at tp = 4: a rank's 192 rows are no whole blocks."""
    from mcore_reshard.engines.vllm.trace import trace_loading

    config = in_blocks("qwen3-moe", REFINED_EXPERTS[0][0], **REFINED_EXPERTS[0][1])
    plan = mr.plan(config, "tp=1", "tp=4", train_dtype="bf16", gen_dtype="fp8")
    model = build_engine(config_folder(config), GenSizes(tp=4), rank, device="meta")
    checkpoint = checkpoint_of(plan)
    trace = trace_loading(model, checkpoint)
    require_planned_layout(plan, "gen", rank, trace, "vLLM")
    experts = "model.layers.0.mlp.experts.routed_experts.w2_weight_scale_inv"
    (scales,) = (tensor for tensor in trace.tensors if tensor.tensor.name == experts)
    other = {name: name.replace("down_proj", "up_proj") for name in scales.names}
    moved = replace(
        scales,
        copies=tuple((other[name], copy) for name, copy in scales.copies),
        parameters=tuple(other[name] for name in scales.parameters),
    )
    wrong = RankTrace(tuple(moved if tensor is scales else tensor for tensor in trace.tensors))
    with pytest.raises(LayoutError, match=rf"{experts}.blocks: the plan fills it with .*down_proj.* with .*up_proj"):
        require_planned_layout(plan, "gen", rank, wrong, "vLLM")


def test_a_live_model_in_block_fp8_loads_again(config_folder: Callable[[dict[str, Any]], Path]) -> None:
    """Golden and the misc route feed whole tensors to a live engine's own loader."""
    from mcore_reshard.engines.vllm.model import load_weights

    config = load_config("tiny-qwen3-moe-fp8")
    plan = mr.plan(config, "tp=2", "tp=2", train_dtype="bf16", gen_dtype="fp8")
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(tensor.shape).to(getattr(torch, tensor.dtype)) for name, tensor in checkpoint_of(plan).items()
    }
    model = build_engine(config_folder(config), GenSizes(tp=2), 1)
    load_weights(model, tensors.items())
    loaded = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    replace_after_loading(model)
    for parameter in model.parameters():
        poison(parameter.data)
    with pytest.raises(AttributeError, match="load_qkv_weight"), torch.no_grad():
        model.load_weights(iter(tensors.items()))  # type: ignore[operator]
    load_weights(model, tensors.items())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.reshape(-1).view(torch.uint8), loaded[name].reshape(-1).view(torch.uint8)), name


def test_k_and_v_in_each_others_place(check: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.linear import QKVParallelLinear

    offset_of = QKVParallelLinear._get_shard_offset_mapping
    other = {"q": "q", "k": "v", "v": "k", "total": "total"}
    monkeypatch.setattr(QKVParallelLinear, "_get_shard_offset_mapping", lambda self, part: offset_of(self, other[part]))
    with pytest.raises(LayoutError) as raised:
        check("tiny-llama")
    said = str(raised.value)
    assert "gen:1: vLLM keeps 8 tensors otherwise than the plan's rules" in said  # k and v of each of four layers
    assert "model.layers.0.self_attn.qkv_proj.weight: of model.layers.0.self_attn.k_proj.weight the plan has" in said
    assert "[16:32, 0:64] at [32:48, 0:64], the loader puts [16:32, 0:64] at [48:64, 0:64]" in said


def test_a_norm_that_becomes_arithmetic(check: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models import utils

    load = utils.default_weight_loader

    def plus_one(parameter: Any, loaded: Any, *args: Any) -> None:
        load(parameter, loaded + 1 if loaded.dim() == 1 else loaded, *args)

    monkeypatch.setattr(utils, "default_weight_loader", plus_one)
    with pytest.raises(LayoutError, match=r"norm.weight, the loader computes it \(aten.add.Tensor at .*test_altered"):
        check("tiny-llama")


def test_experts_in_each_others_place(check: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    local_id = RoutedExperts._map_global_expert_id_to_local_expert_id
    monkeypatch.setattr(
        RoutedExperts, "_map_global_expert_id_to_local_expert_id", lambda self, expert: local_id(self, expert ^ 1)
    )
    with pytest.raises(LayoutError, match=r"w13_weight: of model.layers.0.mlp.experts.0.gate_proj.weight the plan has"):
        check("tiny-qwen3-moe")
