"""Dense decoders with grouped-query attention and a gated MLP: Llama, Mistral, Qwen2, Qwen3.

Mirrors `modeling_{llama,mistral,qwen2,qwen3}.py` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_reshard.planner.model.config_reader import ConfigReader, read_attention
from mcore_reshard.planner.model.parameters import ModelParameters, Role

from .blocks import attention, mlp, read_frame


def dense(config: Mapping[str, Any]) -> ModelParameters:
    """Families differ in their biases and in the norms over each head's q and k.

    llama: `attention_bias` puts a bias on q, k, v and o, `mlp_bias` on the MLP's three matrices.
    mistral: no biases whatever the config says. qwen2: a bias on q, k and v, always, and none on o.
    qwen3: `attention_bias` as in llama, norms over q and k, and a head size of its own.
    """
    reader = ConfigReader(config)
    family = reader.family
    bias = family in {"llama", "qwen3"} and reader.flag("attention_bias")
    mlp_bias = family == "llama" and reader.flag("mlp_bias")
    hidden, vocab = reader.size("hidden_size"), reader.size("vocab_size")
    width, count = reader.size("intermediate_size"), reader.size("num_hidden_layers")
    # Qwen3's heads are 128 wide whatever hidden / heads is: its config must say so
    heads = read_attention(reader, hidden, derive_head_dim=family != "qwen3", derive_kv_heads=family == "llama")
    frame = read_frame(reader, hidden, vocab)
    layers = frame.layers(range(count))
    groups = (
        *layers.norm("input_layernorm", Role.ATTENTION_NORM),
        *attention(layers, heads, qkv_bias=bias or family == "qwen2", o_bias=bias, qk_norms=family == "qwen3"),
        *layers.norm("post_attention_layernorm", Role.MLP_NORM),
        *mlp(layers, width, bias=mlp_bias),
    )
    return frame.model(groups, layers=count, attention=heads, intermediate=width)
