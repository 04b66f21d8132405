"""gpt-oss: attention with sinks and biases everywhere, and all experts of a layer in one tensor.

Mirrors `modeling_gpt_oss.py` of transformers 4.57 and lists the bf16 form, which Megatron-Bridge exports too. The
published checkpoints hold the experts as MXFP4 blocks and scales instead.
"""

from __future__ import annotations

from mcore_reshard.planner.model.config_reader import ConfigReader, read_attention
from mcore_reshard.planner.model.parameters import ModelParameters, Role

from .blocks import Layers, attention, framed, read_model


def gpt_oss(reader: ConfigReader) -> ModelParameters:
    """Every layer has experts; q, k, v and o have biases whatever `attention_bias` says, as in transformers.

    Experts are stored `[experts, in, out]`, the transpose of a linear layer's; gate and up alternate along the last dim.
    """
    hidden, vocab, count = reader.size("hidden_size"), reader.size("vocab_size"), reader.size("num_hidden_layers")
    heads = read_attention(reader, hidden, derive_head_dim=False)
    experts, width = reader.size("num_local_experts"), reader.size("intermediate_size")
    model = read_model(reader, hidden, vocab, layers=count, attention=heads, experts=experts, expert_intermediate=width)
    layers = Layers(model, range(count))
    gate_up, gate_up_bias = (experts, hidden, width, 2), (experts, width, 2)
    groups = (
        *layers.norm("input_layernorm", Role.ATTENTION_NORM),
        *attention(layers, heads, qkv_bias=True, o_bias=True),
        *layers.group("self_attn.sinks", Role.SINKS, heads.heads),
        *layers.norm("post_attention_layernorm", Role.MOE_NORM),
        *layers.linear("mlp.router", Role.ROUTER, experts, hidden, Role.ROUTER_BIAS),
        *layers.group("mlp.experts.gate_up_proj", Role.STACKED_GATE_UP, experts, hidden, 2 * width, view=gate_up),
        *layers.group(
            "mlp.experts.gate_up_proj_bias", Role.STACKED_GATE_UP_BIAS, experts, 2 * width, view=gate_up_bias
        ),
        *layers.group("mlp.experts.down_proj", Role.STACKED_DOWN, experts, width, hidden),
        *layers.group("mlp.experts.down_proj_bias", Role.STACKED_DOWN_BIAS, experts, hidden),
    )
    return framed(model, groups)
