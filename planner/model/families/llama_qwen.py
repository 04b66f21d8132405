"""Decoders with grouped-query attention and gated MLPs: Llama, Mistral, Qwen2, Qwen3, and Qwen3-MoE with experts.

Mirrors `modeling_{llama,mistral,qwen2,qwen3,qwen3_moe}.py` of transformers 4.57.
"""

from __future__ import annotations

from mcore_reshard.planner.model.config_reader import ConfigReader, read_attention
from mcore_reshard.planner.model.parameters import ModelParameters, Role

from .blocks import EXPERT, Layers, attention, framed, mlp, read_model


def llama_qwen(reader: ConfigReader) -> ModelParameters:
    """Families differ in their biases, in the norms over each head's q and k, and in their experts.

    llama: `attention_bias` puts a bias on q, k, v and o, `mlp_bias` on the MLP's three matrices.
    mistral: no biases whatever the config says. qwen2: a bias on q, k and v, always, and none on o.
    qwen3, qwen3_moe: `attention_bias` as in llama, and norms over q and k.
    """
    family = reader.family
    is_moe = family == "qwen3_moe"
    bias = family in {"llama", "qwen3", "qwen3_moe"} and reader.flag("attention_bias")
    mlp_bias = family == "llama" and reader.flag("mlp_bias")
    hidden, vocab, count = reader.size("hidden_size"), reader.size("vocab_size"), reader.size("num_hidden_layers")
    # Qwen3's heads are 128 wide whatever hidden / heads is: its config must say so
    heads = read_attention(reader, hidden, derive_head_dim=family != "qwen3", derive_kv_heads=family == "llama")
    experts = reader.size("num_experts") if is_moe else 0
    expert_width = reader.size("moe_intermediate_size") if is_moe else 0
    sparse = _sparse_layers(reader, count) if is_moe else []
    dense = [layer for layer in range(count) if layer not in sparse]
    model = read_model(
        reader,
        hidden,
        vocab,
        layers=count,
        attention=heads,
        intermediate=reader.size("intermediate_size") if dense else 0,
        experts=experts,
        expert_intermediate=expert_width,
    )
    layers, plain, moe = Layers(model, range(count)), Layers(model, dense), Layers(model, sparse)
    groups = (
        *layers.norm("input_layernorm", Role.ATTENTION_NORM),
        *attention(layers, heads, qkv_bias=bias or family == "qwen2", o_bias=bias, qk_norms=family.startswith("qwen3")),
        *plain.norm("post_attention_layernorm", Role.MLP_NORM),
        *mlp(plain, model.architecture.intermediate, bias=Role.UNKNOWN if mlp_bias else None),
        *moe.norm("post_attention_layernorm", Role.MOE_NORM),
        *moe.linear("mlp.gate", Role.ROUTER, experts, hidden),
        *mlp(moe, expert_width, "mlp.experts.{expert}", EXPERT, experts=experts),
    )
    return framed(model, groups)


def _sparse_layers(reader: ConfigReader, count: int) -> list[int]:
    """Layer `i` has experts where `decoder_sparse_step` divides `i + 1`, unless `mlp_only_layers` names it."""
    step = reader.size("decoder_sparse_step", default=1)
    only = reader.items("mlp_only_layers", int) or ()
    beyond = sorted(set(only) - set(range(count)))
    reader.check(not beyond, f"mlp_only_layers names {beyond}, the model has layers 0-{count - 1}", "num_hidden_layers")
    return [layer for layer in range(count) if layer not in only and (layer + 1) % step == 0]
