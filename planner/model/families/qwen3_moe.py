"""Qwen3-MoE: Qwen3's attention, and a mixture of gated experts in the layers that are not dense.

Mirrors `Qwen3MoeDecoderLayer` and `Qwen3MoeSparseMoeBlock` of transformers 4.57.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_reshard.planner.model.config_reader import ConfigReader, read_attention
from mcore_reshard.planner.model.parameters import ModelParameters, Role

from .blocks import attention, experts, mlp, read_frame


def qwen3_moe(config: Mapping[str, Any]) -> ModelParameters:
    """Layer `i` has experts where `decoder_sparse_step` divides `i + 1`, unless `mlp_only_layers` names it."""
    reader = ConfigReader(config)
    hidden, vocab, count = reader.size("hidden_size"), reader.size("vocab_size"), reader.size("num_hidden_layers")
    heads = read_attention(reader, hidden)
    expert_count, expert_width = reader.size("num_experts"), reader.size("moe_intermediate_size")
    sparse, dense = _layer_kinds(reader, count)
    width = reader.size("intermediate_size") if dense else 0
    bias = reader.flag("attention_bias")
    frame = read_frame(reader, hidden, vocab)
    layers, moe, plain = frame.layers(range(count)), frame.layers(sparse), frame.layers(dense)
    groups = (
        *layers.norm("input_layernorm", Role.ATTENTION_NORM),
        *attention(layers, heads, qkv_bias=bias, o_bias=bias, qk_norms=True),
        *plain.norm("post_attention_layernorm", Role.MLP_NORM),
        *mlp(plain, width),
        *moe.norm("post_attention_layernorm", Role.MOE_NORM),
        *moe.linear("mlp.gate", Role.ROUTER, expert_count, hidden),
        *experts(moe, expert_count, expert_width),
    )
    return frame.model(
        groups,
        layers=count,
        attention=heads,
        intermediate=width,
        experts=expert_count,
        expert_intermediate=expert_width,
    )


def _layer_kinds(reader: ConfigReader, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layers with experts, and layers without."""
    step = reader.size("decoder_sparse_step", default=1)
    only = reader.items("mlp_only_layers", int) or ()
    beyond = sorted(set(only) - set(range(count)))
    reader.check(not beyond, f"mlp_only_layers names {beyond}, the model has layers 0-{count - 1}", "num_hidden_layers")
    sparse = tuple(layer for layer in range(count) if layer not in only and (layer + 1) % step == 0)
    return sparse, tuple(layer for layer in range(count) if layer not in sparse)
