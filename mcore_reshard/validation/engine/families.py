"""One function per model family: fill a rank's `Table` as the vLLM 0.32 model class of that family lays it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .tables import WHOLE, Cut, Part, Shape, Table, Take


def fill_llama(table: Table) -> None:
    """models/llama.py: LlamaForCausalLM."""
    bias = table.config.get("attention_bias", False)
    _refuse_fields(table, "mlp_bias")
    _fill_dense(table, qkv_bias=bias, o_bias=bias)


def fill_qwen2(table: Table) -> None:
    """models/qwen2.py: Qwen2ForCausalLM, which always has QKV biases."""
    _fill_dense(table, qkv_bias=True)


def fill_qwen3(table: Table) -> None:
    """models/qwen3.py: Qwen3ForCausalLM."""
    _refuse_attention_bias(table)
    _fill_dense(table, head_norms=True)


def fill_qwen3_moe(table: Table) -> None:
    """models/qwen3_moe.py: Qwen3MoeForCausalLM. Every stage holds embedding, final norm and lm_head."""
    config = table.config
    _refuse_fields(table, "shared_expert_intermediate_size")
    _refuse_attention_bias(table)
    _add_ends(table, everywhere=True)
    for layer, name in table.each_layer():
        table.attention(f"{name}.self_attn", head_norms=True)
        table.norms(name)
        if layer in (config.get("mlp_only_layers") or ()) or (layer + 1) % config["decoder_sparse_step"]:
            table.mlp(f"{name}.mlp", config["intermediate_size"])
            continue
        table.single(f"{name}.mlp.gate.weight", (config["num_experts"], config["hidden_size"]))
        table.experts(f"{name}.mlp.experts", config["num_experts"])
    _refuse_stage_without_experts(table)


def fill_deepseek_v3(table: Table) -> None:
    """models/deepseek_v2.py: DeepseekV3ForCausalLM, also of Kimi-K2. Multi-token-prediction layers are not loaded."""
    config = table.config
    if config.get("topk_method") != "noaux_tc":
        raise ValueError(f"deepseek_v3 wants topk_method noaux_tc, not {config.get('topk_method')!r}")
    _refuse_tied(table)
    _add_ends(table)
    for layer, name in table.each_layer():
        _add_latent_attention(table, f"{name}.self_attn")
        table.norms(name)
        if layer < config["first_k_dense_replace"] or layer % config.get("moe_layer_freq", 1):
            table.mlp(f"{name}.mlp", config["intermediate_size"])
        else:
            _add_moe(table, f"{name}.mlp", config["moe_intermediate_size"])


def fill_gpt_oss(table: Table) -> None:
    """models/gpt_oss.py: GptOssForCausalLM, unquantized (_load_weights_other). Every stage holds both ends."""
    config, sizes = table.config, table.sizes
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    heads, kv_heads, _ = table.attention_sizes
    _refuse_tied(table)
    if kv_heads % sizes.tp:
        raise ValueError(f"gpt_oss does not repeat KV heads: {kv_heads} cannot be cut by tp = {sizes.tp}")
    ranks = sizes.world if sizes.ep > 1 else sizes.tp * sizes.pp
    if inner % ranks:
        raise ValueError(f"gpt_oss wants intermediate_size {inner} to be a multiple of the engine's {ranks} ranks")
    if experts % sizes.ep:
        raise ValueError(f"gpt_oss cannot spread {experts} experts over ep = {sizes.ep}")
    table.renames = {"model.embedding.": "model.embed_tokens.", ".attn.": ".self_attn."}
    _add_ends(table, everywhere=True, embedding="model.embedding.weight")
    for _, name in table.each_layer():
        table.attention(f"{name}.attn", qkv_bias=True, o_bias=True)
        table.column(f"{name}.attn.sinks", heads)
        table.norms(name)
        table.single(f"{name}.mlp.router.weight", (experts, hidden))
        table.single(f"{name}.mlp.router.bias", (experts,))
        _add_gpt_oss_experts(table, f"{name}.mlp.experts", experts, hidden, inner)


def fill_nemotron_h(table: Table) -> None:
    """models/nemotron_h.py: NemotronHForCausalLM. Every stage holds embedding, final norm and lm_head."""
    config, pattern = table.config, table.config["hybrid_override_pattern"]
    _refuse_fields(table, "moe_latent_size", "mlp_bias", "use_bias", "attention_bias")
    _refuse_tied(table)
    table.renames = {"model.": "backbone.", "embed_tokens": "embeddings"}
    _add_ends(table, everywhere=True, norm="model.norm_f.weight")
    add_mixer: dict[str, Callable[[str], None]] = {
        "M": lambda mixer: _add_mamba(table, mixer),
        "*": table.attention,
        "-": lambda mixer: table.mlp(mixer, config["intermediate_size"], gated=False),
        # The router is fp32 except on Hopper and data-center Blackwell (fused_moe/router/gate_linear.py, GateLinear).
        "E": lambda mixer: _add_moe(
            table, mixer, config["moe_shared_expert_intermediate_size"], gated=False, router_dtype=torch.float32
        ),
    }
    for layer, name in table.each_layer():
        table.single(f"{name}.norm.weight", (config["hidden_size"],))
        add_mixer[pattern[layer]](f"{name}.mixer")
    if "E" in pattern:
        _refuse_stage_without_experts(table)


FAMILIES: dict[str, Callable[[Table], None]] = {
    "llama": fill_llama,
    "qwen2": fill_qwen2,
    "qwen3": fill_qwen3,
    "qwen3_moe": fill_qwen3_moe,
    "deepseek_v3": fill_deepseek_v3,
    "kimi_k2": fill_deepseek_v3,
    "gpt_oss": fill_gpt_oss,
    "nemotron_h": fill_nemotron_h,
}


def _fill_dense(table: Table, **attention: bool) -> None:
    _add_ends(table)
    for _, name in table.each_layer():
        table.attention(f"{name}.self_attn", **attention)
        table.norms(name)
        table.mlp(f"{name}.mlp", table.config["intermediate_size"])


def _add_ends(
    table: Table,
    everywhere: bool = False,
    embedding: str = "model.embed_tokens.weight",
    norm: str = "model.norm.weight",
) -> None:
    """Embedding on the first stage, norm and lm_head on the last; tied: the embedding again instead of lm_head.

    `everywhere`: classes that build all three on every stage.
    """
    tied = table.config["tie_word_embeddings"]
    first, last = (everywhere or layer in table.stage for layer in (0, table.layers - 1))
    table.here = first or (tied and last)
    table.vocabulary(embedding)
    table.here = last
    table.single(norm, (table.config["hidden_size"],))
    if not tied:
        table.vocabulary("lm_head.weight")


def _refuse_fields(table: Table, *names: str) -> None:
    if unsupported := [name for name in names if table.config.get(name)]:
        raise ValueError(f"{table.config['model_type']} with {', '.join(unsupported)} is not supported")


def _refuse_tied(table: Table) -> None:
    if table.config["tie_word_embeddings"]:
        raise ValueError(f"vLLM's {table.config['model_type']} does not tie word embeddings")


def _refuse_stage_without_experts(table: Table) -> None:
    if not any(".routed_experts." in tensor for tensor in table.tensors):
        stage = f"{table.stage.start}:{table.stage.stop}"
        raise ValueError(f"vLLM's {table.config['model_type']} wants experts on every stage; layers {stage} have none")


def _refuse_attention_bias(table: Table) -> None:
    if table.config.get("attention_bias"):
        raise ValueError(f"vLLM's {table.config['model_type']} drops o_proj.bias, which attention_bias brings")


def _add_moe(
    table: Table, name: str, shared_inner: int, gated: bool = True, router_dtype: torch.dtype | None = None
) -> None:
    """Router, its bias in float32, routed experts and, `shared_inner` rows each, shared ones."""
    experts = table.config["n_routed_experts"]
    table.single(f"{name}.gate.weight", (experts, table.config["hidden_size"]), dtype=router_dtype)
    table.single(f"{name}.gate.e_score_correction_bias", (experts,), dtype=torch.float32)
    table.experts(f"{name}.experts", experts, gated)
    if shared := table.config["n_shared_experts"]:
        table.mlp(f"{name}.shared_experts", shared_inner * shared, table.shared_experts_cut, gated)


def _add_latent_attention(table: Table, name: str) -> None:
    """DeepseekV2MLAAttention: the down projections are whole on every rank, the up projections cut by heads."""
    config, tp = table.config, table.sizes.tp
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if heads % tp:
        raise ValueError(f"{heads} heads cannot be cut by tp = {tp}")
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q_lora, kv_lora = config.get("q_lora_rank"), config["kv_lora_rank"]
    kv_a = Part(f"{name}.kv_a_proj_with_mqa.weight", kv_lora + rope)
    if q_lora:
        table.fused(f"{name}.fused_qkv_a_proj.weight", [Part(f"{name}.q_a_proj.weight", q_lora), kv_a], hidden)
        table.single(f"{name}.q_a_layernorm.weight", (q_lora,))
        table.column(f"{name}.q_b_proj.weight", heads * (nope + rope), q_lora)
    else:
        table.fused(kv_a.source, [kv_a], hidden)
        table.column(f"{name}.q_proj.weight", heads * (nope + rope), hidden)
    table.single(f"{name}.kv_a_layernorm.weight", (kv_lora,))
    table.column(f"{name}.kv_b_proj.weight", heads * (nope + value), kv_lora)
    table.row(f"{name}.o_proj.weight", hidden, heads * value)


def _add_gpt_oss_experts(table: Table, name: str, experts: int, hidden: int, inner: int) -> None:
    """HF stacks experts as [E, in, out], gate and up alternating; vLLM keeps them alternating, transposed."""
    local, (ways, which) = table.local_experts(experts), table.experts_cut
    here = slice(local.start, local.stop)
    start, stop = which * inner // ways, (which + 1) * inner // ways

    def down_bias(t: torch.Tensor) -> torch.Tensor:
        return t[here] if which == 0 else torch.zeros_like(t[here])  # the sum over tp must have it once

    def add(tensor: str, source: str, shape: Shape, take: Take) -> None:
        table.single(f"{name}.routed_experts.{tensor}", (experts, *shape), take, f"{name}.{source}")

    gate_up = slice(2 * start, 2 * stop)
    add("w13_weight", "gate_up_proj", (hidden, 2 * inner), lambda t: t[here, :, gate_up].transpose(1, 2))
    add("w13_bias", "gate_up_proj_bias", (2 * inner,), lambda t: t[here, gate_up])
    add("w2_weight", "down_proj", (inner, hidden), lambda t: t[here, start:stop].transpose(1, 2))
    add("w2_bias", "down_proj_bias", (hidden,), down_bias)


def _add_mamba(table: Table, name: str) -> None:
    """layers/mamba/mamba_mixer2.py: MambaMixer2. A single group of B and C is whole on every rank."""
    config, (tp, which) = table.config, table.tp_cut
    heads, groups, state = config["mamba_num_heads"], config["n_groups"], config["ssm_state_size"]
    inner, hidden = heads * config["mamba_head_dim"], config["hidden_size"]
    if heads % tp or (groups % tp and groups != 1):
        raise ValueError(f"{heads} Mamba heads in {groups} groups cannot be cut by tp = {tp}")
    group_cut = WHOLE if groups % tp else table.tp_cut
    x_b_c = [(inner, table.tp_cut), (groups * state, group_cut), (groups * state, group_cut)]

    def add(tensor: str, sections: Sequence[tuple[int, Cut]], *rest: int) -> None:
        table.fused(f"{name}.{tensor}", [Part(f"{name}.{tensor}", *section) for section in sections], *rest)

    add("in_proj.weight", [(inner, table.tp_cut), *x_b_c, (heads, table.tp_cut)], hidden)  # z, x, B, C, dt
    add("conv1d.weight", x_b_c, 1, config["conv_kernel"])
    if config["use_conv_bias"]:
        add("conv1d.bias", x_b_c)
    for vector, size in (("D", heads), ("dt_bias", heads), ("norm.weight", inner)):
        table.column(f"{name}.{vector}", size)
    local = slice(which * heads // tp, (which + 1) * heads // tp)
    table.single(f"{name}.A", (heads,), lambda t: -torch.exp(t[local].float()), f"{name}.A_log", torch.float32)
    table.row(f"{name}.out_proj.weight", hidden, inner)
