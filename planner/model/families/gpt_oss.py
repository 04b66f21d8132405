"""gpt-oss: attention with sinks and biases everywhere, and all experts of a layer in one tensor.

Mirrors `modeling_gpt_oss.py` of transformers 4.57 and lists the bf16 form, which Megatron-Bridge exports too. The
published checkpoints hold the experts as MXFP4 blocks and scales instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mcore_reshard.planner.model.config_reader import ConfigReader, read_attention
from mcore_reshard.planner.model.parameters import ModelParameters, ParameterGroup, Role

from .blocks import Layers, attention, read_frame


def gpt_oss(config: Mapping[str, Any]) -> ModelParameters:
    """Every layer has experts; q, k, v and o have biases whatever `attention_bias` says, as in transformers."""
    reader = ConfigReader(config)
    hidden, vocab, count = reader.size("hidden_size"), reader.size("vocab_size"), reader.size("num_hidden_layers")
    heads = read_attention(reader, hidden, derive_head_dim=False)
    experts, width = reader.size("num_local_experts"), reader.size("intermediate_size")
    frame = read_frame(reader, hidden, vocab)
    layers = frame.layers(range(count))
    groups = (
        *layers.norm("input_layernorm", Role.ATTENTION_NORM),
        *attention(layers, heads, qkv_bias=True, o_bias=True),
        *layers.group("self_attn.sinks", Role.SINKS, heads.heads),
        *layers.norm("post_attention_layernorm", Role.MOE_NORM),
        *layers.linear("mlp.router", Role.ROUTER, experts, hidden, Role.ROUTER_BIAS),
        *_stacked_experts(layers, experts, width),
    )
    return frame.model(groups, layers=count, attention=heads, experts=experts, expert_intermediate=width)


def _stacked_experts(layers: Layers, count: int, width: int) -> Iterator[ParameterGroup]:
    """Stored `[experts, in, out]`, the transpose of a linear layer's; gate and up alternate along the last dim."""
    hidden = layers.hidden
    yield from layers.group(
        "mlp.experts.gate_up_proj", Role.STACKED_GATE_UP, count, hidden, 2 * width, view=(count, hidden, width, 2)
    )
    yield from layers.group(
        "mlp.experts.gate_up_proj_bias", Role.STACKED_GATE_UP_BIAS, count, 2 * width, view=(count, width, 2)
    )
    yield from layers.group("mlp.experts.down_proj", Role.STACKED_DOWN, count, width, hidden)
    yield from layers.group("mlp.experts.down_proj_bias", Role.STACKED_DOWN_BIAS, count, hidden)
