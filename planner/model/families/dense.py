"""Dense decoders with grouped-query attention and a gated MLP: Llama, Mistral, Qwen2, Qwen3.

Mirrors `modeling_{llama,mistral,qwen2,qwen3}.py` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_reshard.planner.model.config_reader import ConfigReader, read_attention, read_quantization
from mcore_reshard.planner.model.parameters import Architecture, ModelParameters, Role

from .blocks import Layers, attention, embedding, final_norm, lm_head, mlp


def llama(config: Mapping[str, Any]) -> ModelParameters:
    """`attention_bias` puts a bias on q, k, v and o, `mlp_bias` on the MLP's three matrices."""
    reader = ConfigReader(config)
    bias = reader.flag("attention_bias")
    return _dense(reader, "llama", qkv_bias=bias, o_bias=bias, mlp_bias=reader.flag("mlp_bias"))


def mistral(config: Mapping[str, Any]) -> ModelParameters:
    """Llama's layout; no biases whatever the config says."""
    return _dense(ConfigReader(config), "mistral")


def qwen2(config: Mapping[str, Any]) -> ModelParameters:
    """Llama's layout with a bias on q, k and v, always, and none on o."""
    return _dense(ConfigReader(config), "qwen2", qkv_bias=True)


def qwen3(config: Mapping[str, Any]) -> ModelParameters:
    """Llama's layout with norms over each head's q and k, and a head size of its own."""
    reader = ConfigReader(config)
    bias = reader.flag("attention_bias")
    return _dense(reader, "qwen3", qkv_bias=bias, o_bias=bias, qk_norms=True)


def _dense(
    reader: ConfigReader,
    family: str,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norms: bool = False,
) -> ModelParameters:
    hidden, vocab, width = reader.size("hidden_size"), reader.size("vocab_size"), reader.size("intermediate_size")
    count = reader.size("num_hidden_layers")
    # Qwen3's heads are 128 wide whatever hidden / heads is: its config must say so
    numbers = read_attention(reader, hidden, derive_head_dim=family != "qwen3", derive_kv_heads=family == "llama")
    tied, dtype = reader.flag("tie_word_embeddings"), reader.dtype()
    quantization = read_quantization(reader)
    reader.finish()
    layers = Layers(tuple(range(count)), hidden, dtype)
    groups = (
        *embedding("model.embed_tokens.weight", vocab, hidden, dtype),
        *layers.norm("input_layernorm", Role.ATTENTION_NORM),
        *attention(layers, numbers, qkv_bias=qkv_bias, o_bias=o_bias, qk_norms=qk_norms),
        *layers.norm("post_attention_layernorm", Role.MLP_NORM),
        *mlp(layers, width, bias=mlp_bias),
        *final_norm("model.norm.weight", hidden, dtype),
        *lm_head(vocab, hidden, dtype, tied),
    )
    architecture = Architecture(family, hidden, count, vocab, tied, numbers, intermediate=width)
    return ModelParameters(architecture, groups, dtype, quantization)
