"""DeepSeek-V3 and models of its layout (Kimi-K2, Moonlight): latent attention, experts after some dense layers, and
multi-token-prediction layers.

Mirrors transformers' `modeling_deepseek_v3.py`, which leaves multi-token prediction out; those names are the published
checkpoint's: `model.layers.61.{embed_tokens,enorm,hnorm,eh_proj,shared_head.norm,shared_head.head}` beside a whole
decoder layer (README_WEIGHTS.md of the DeepSeek-V3 repository; `deepseek_mtp.py` of vLLM).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_reshard.planner.model.config_reader import ConfigReader
from mcore_reshard.planner.model.parameters import LatentAttention, ModelParameters, ParameterGroup, Role

from .blocks import Layers, experts, latent_attention, mlp, read_frame, shared_experts


def deepseek_v3(config: Mapping[str, Any]) -> ModelParameters:
    """DeepSeek-V3, and Kimi-K2 under a name of its own.

    `q_lora_rank` null: queries are projected directly. `num_nextn_predict_layers` (none where absent) adds layers after
    the last decoder layer, all with experts.
    """
    reader = ConfigReader(config)
    hidden, vocab = reader.size("hidden_size"), reader.size("vocab_size")
    width, count = reader.size("intermediate_size"), reader.size("num_hidden_layers")
    dense = reader.size("first_k_dense_replace", minimum=0)
    problem = f"first_k_dense_replace {dense} exceeds num_hidden_layers {count}"
    reader.check(dense <= count, problem, "first_k_dense_replace", "num_hidden_layers")
    frequency = reader.size("moe_layer_freq", default=1)
    reader.check(frequency == 1, f"moe_layer_freq is {frequency}; only 1 is known (transformers ignores others)")
    mtp = reader.size("num_nextn_predict_layers", minimum=0, default=0)
    decoder = _read_decoder(reader)
    frame = read_frame(reader, hidden, vocab)
    layers, plain = frame.layers(range(count)), frame.layers(range(dense))
    groups = (
        *layers.norm("input_layernorm", Role.ATTENTION_NORM),
        *latent_attention(layers, decoder.attention, decoder.bias),
        *plain.norm("post_attention_layernorm", Role.MLP_NORM),
        *mlp(plain, width),
        *_mixture(frame.layers(range(dense, count)), decoder),
    )
    return frame.model(
        groups,
        mtp=_multi_token(frame.layers(range(count, count + mtp), mtp=True), decoder, vocab),
        layers=count,
        attention=decoder.attention,
        intermediate=width,
        experts=decoder.experts,
        expert_intermediate=decoder.expert_width,
        shared_intermediate=decoder.shared_width,
        mtp_layers=mtp,
    )


@dataclass(frozen=True, slots=True)
class _Decoder:
    """What every decoder layer is made of."""

    attention: LatentAttention
    bias: bool
    experts: int
    expert_width: int
    shared_width: int


def _read_decoder(reader: ConfigReader) -> _Decoder:
    heads = reader.size("num_attention_heads")
    kv_heads = reader.size("num_key_value_heads", default=heads)
    problem = (
        f"num_key_value_heads {kv_heads} is not num_attention_heads {heads}: latent attention has one k and v a head"
    )
    reader.check(heads == kv_heads, problem, "num_attention_heads", "num_key_value_heads")
    attention = LatentAttention(
        heads=heads,
        q_lora_rank=reader.optional_size("q_lora_rank"),
        kv_lora_rank=reader.size("kv_lora_rank"),
        qk_nope_dim=reader.size("qk_nope_head_dim"),
        qk_rope_dim=reader.size("qk_rope_head_dim"),
        v_dim=reader.size("v_head_dim"),
    )
    experts, expert_width = reader.size("n_routed_experts"), reader.size("moe_intermediate_size")
    shared_width = expert_width * reader.size("n_shared_experts", minimum=0)
    return _Decoder(attention, reader.flag("attention_bias"), experts, expert_width, shared_width)


def _mixture(layers: Layers, decoder: _Decoder) -> Iterator[ParameterGroup]:
    """The second half of a layer with experts. The checkpoint keeps the router's bias in fp32."""
    yield from layers.norm("post_attention_layernorm", Role.MOE_NORM)
    yield from layers.linear("mlp.gate", Role.ROUTER, decoder.experts, layers.hidden)
    yield from layers.group("mlp.gate.e_score_correction_bias", Role.EXPERT_BIAS, decoder.experts, dtype="float32")
    yield from experts(layers, decoder.experts, decoder.expert_width)
    yield from shared_experts(layers, decoder.shared_width)


def _multi_token(layers: Layers, decoder: _Decoder, vocab: int) -> Iterator[ParameterGroup]:
    """Multi-token-prediction layers: two norms and a projection into a whole decoder layer. The checkpoint repeats the
    embedding and the output layer in each."""
    yield from layers.group("embed_tokens.weight", Role.MTP_EMBEDDING, vocab, layers.hidden)
    yield from layers.norm("enorm", Role.MTP_EMBED_NORM)
    yield from layers.norm("hnorm", Role.MTP_HIDDEN_NORM)
    yield from layers.linear("eh_proj", Role.MTP_PROJ, layers.hidden, 2 * layers.hidden)
    yield from layers.norm("input_layernorm", Role.ATTENTION_NORM)
    yield from latent_attention(layers, decoder.attention, decoder.bias)
    yield from _mixture(layers, decoder)
    yield from layers.norm("shared_head.norm", Role.MTP_FINAL_NORM)
    yield from layers.group("shared_head.head.weight", Role.MTP_HEAD, vocab, layers.hidden)
