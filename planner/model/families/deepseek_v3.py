"""DeepSeek-V3 and models of its layout (Kimi-K2, Moonlight): latent attention, experts after some dense layers, and
multi-token-prediction layers.

Mirrors transformers' `modeling_deepseek_v3.py`, which leaves multi-token prediction out. The names of its parameters are
the published checkpoint's: `model.layers.61.{embed_tokens,enorm,hnorm,eh_proj,shared_head.norm,shared_head.head}` beside a whole
decoder layer (README_WEIGHTS.md of the DeepSeek-V3 repository; `deepseek_mtp.py` of vLLM).
"""

from __future__ import annotations

from collections.abc import Iterator

from mcore_reshard.planner.model.config_reader import ConfigReader
from mcore_reshard.planner.model.parameters import LatentAttention, ModelParameters, ParameterGroup, Role

from .blocks import EXPERT, SHARED, Layers, framed, latent_attention, mlp, read_model


def deepseek_v3(reader: ConfigReader) -> ModelParameters:
    """DeepSeek-V3, and Kimi-K2 under a name of its own.

    `q_lora_rank` null: queries are projected directly. `num_nextn_predict_layers` (none where absent) adds layers after
    the last decoder layer, all with experts.
    """
    hidden, vocab = reader.size("hidden_size"), reader.size("vocab_size")
    width, count = reader.size("intermediate_size"), reader.size("num_hidden_layers")
    dense = reader.size("first_k_dense_replace", minimum=0)
    problem = f"first_k_dense_replace {dense} exceeds num_hidden_layers {count}"
    reader.check(dense <= count, problem, "first_k_dense_replace", "num_hidden_layers")
    frequency = reader.size("moe_layer_freq", default=1)
    reader.check(frequency == 1, f"moe_layer_freq is {frequency}; only 1 is known (transformers ignores others)")
    mtp = reader.size("num_nextn_predict_layers", minimum=0, default=0)
    heads = _read_attention(reader)
    experts, expert_width = reader.size("n_routed_experts"), reader.size("moe_intermediate_size")
    shared_width = expert_width * reader.size("n_shared_experts", minimum=0)
    bias = reader.flag("attention_bias")
    model = read_model(
        reader,
        hidden,
        vocab,
        layers=count,
        attention=heads,
        intermediate=width,
        experts=experts,
        expert_intermediate=expert_width,
        shared_intermediate=shared_width,
        mtp_layers=mtp,
    )
    layers, plain, moe = Layers(model, range(count)), Layers(model, range(dense)), Layers(model, range(dense, count))
    after = Layers(model, range(count, count + mtp), mtp=True)
    groups = (
        *layers.norm("input_layernorm", Role.ATTENTION_NORM),
        *latent_attention(layers, heads, bias),
        *plain.norm("post_attention_layernorm", Role.MLP_NORM),
        *mlp(plain, width),
        *_mixture(moe),
    )
    # The checkpoint repeats the embedding and the output layer in each multi-token-prediction layer.
    multi_token = (
        *after.group("embed_tokens.weight", Role.MTP_EMBEDDING, vocab, hidden),
        *after.norm("enorm", Role.MTP_EMBED_NORM),
        *after.norm("hnorm", Role.MTP_HIDDEN_NORM),
        *after.linear("eh_proj", Role.MTP_PROJ, hidden, 2 * hidden),
        *after.norm("input_layernorm", Role.ATTENTION_NORM),
        *latent_attention(after, heads, bias),
        *_mixture(after),
        *after.norm("shared_head.norm", Role.MTP_FINAL_NORM),
        *after.group("shared_head.head.weight", Role.MTP_HEAD, vocab, hidden),
    )
    return framed(model, groups, mtp=multi_token)


def _read_attention(reader: ConfigReader) -> LatentAttention:
    heads = reader.size("num_attention_heads")
    kv_heads = reader.size("num_key_value_heads", default=heads)
    problem = (
        f"num_key_value_heads {kv_heads} is not num_attention_heads {heads}: latent attention has one k and v a head"
    )
    reader.check(heads == kv_heads, problem, "num_attention_heads", "num_key_value_heads")
    return LatentAttention(
        heads=heads,
        q_lora_rank=reader.optional_size("q_lora_rank"),
        kv_lora_rank=reader.size("kv_lora_rank"),
        qk_nope_dim=reader.size("qk_nope_head_dim"),
        qk_rope_dim=reader.size("qk_rope_head_dim"),
        v_dim=reader.size("v_head_dim"),
    )


def _mixture(layers: Layers) -> Iterator[ParameterGroup]:
    """The second half of a layer with experts. The checkpoint keeps the router's bias in fp32."""
    sizes = layers.model.architecture
    yield from layers.norm("post_attention_layernorm", Role.MOE_NORM)
    yield from layers.linear("mlp.gate", Role.ROUTER, sizes.experts, sizes.hidden)
    yield from layers.group("mlp.gate.e_score_correction_bias", Role.EXPERT_BIAS, sizes.experts, dtype="float32")
    yield from mlp(layers, sizes.expert_intermediate, "mlp.experts.{expert}", EXPERT, experts=sizes.experts)
    if sizes.shared_intermediate:
        yield from mlp(layers, sizes.shared_intermediate, "mlp.shared_experts", SHARED)
