"""One function per model family: fill a rank's `Table` as the vLLM 0.32 model class of that family lays it out."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .tables import (
    Config,
    Part,
    Shape,
    Table,
    Take,
    Target,
    attention_sizes,
    rows_of,
)


def fill_llama(table: Table, config: Config) -> None:
    """models/llama.py: LlamaForCausalLM."""
    bias = config.get("attention_bias", False)
    if config.get("mlp_bias"):
        raise ValueError("llama with mlp_bias is not supported")
    _fill_dense(table, config, qkv_bias=bias, o_bias=bias)


def fill_qwen2(table: Table, config: Config) -> None:
    """models/qwen2.py: Qwen2ForCausalLM, which always has QKV biases."""
    _fill_dense(table, config, qkv_bias=True)


def fill_qwen3(table: Table, config: Config) -> None:
    """models/qwen3.py: Qwen3ForCausalLM."""
    _refuse_attention_bias(config)
    _fill_dense(table, config, head_norms=True)


def fill_qwen3_moe(table: Table, config: Config) -> None:
    """models/qwen3_moe.py: Qwen3MoeForCausalLM. Every stage holds embedding, final norm and lm_head."""
    if config.get("shared_expert_intermediate_size"):
        raise ValueError("qwen3_moe with a shared expert is not supported")
    _refuse_attention_bias(config)
    _ends(table, config, everywhere=True)
    hidden, experts = config["hidden_size"], config["num_experts"]
    dense = config.get("mlp_only_layers") or []
    for layer in range(config["num_hidden_layers"]):
        held, name = layer in table.stage, f"model.layers.{layer}"
        _attention_layer(table, held, name, config, head_norms=True)
        if layer in dense or (layer + 1) % config["decoder_sparse_step"]:
            table.gated_mlp(held, f"{name}.mlp", config["intermediate_size"], hidden)
            continue
        table.whole(held, f"{name}.mlp.gate.weight", f"{name}.mlp.gate.weight", (experts, hidden))
        _routed_experts(table, held, f"{name}.mlp", experts, config["moe_intermediate_size"], hidden)
    _refuse_stage_without_experts(table, config)


def fill_deepseek_v3(table: Table, config: Config) -> None:
    """models/deepseek_v2.py: DeepseekV3ForCausalLM, also of Kimi-K2. Multi-token-prediction layers are not loaded."""
    if config.get("topk_method") != "noaux_tc":
        raise ValueError(f"deepseek_v3 wants topk_method noaux_tc, not {config.get('topk_method')!r}")
    _refuse_tied(config)
    _ends(table, config)
    hidden, experts = config["hidden_size"], config["n_routed_experts"]
    for layer in range(config["num_hidden_layers"]):
        held, name = layer in table.stage, f"model.layers.{layer}"
        _latent_attention(table, held, f"{name}.self_attn", config)
        _norms(table, held, name, hidden)
        if layer < config["first_k_dense_replace"] or layer % config.get("moe_layer_freq", 1):
            table.gated_mlp(held, f"{name}.mlp", config["intermediate_size"], hidden)
            continue
        gate, bias = f"{name}.mlp.gate.weight", f"{name}.mlp.gate.e_score_correction_bias"
        table.whole(held, gate, gate, (experts, hidden))
        table.whole(held, bias, bias, (experts,), torch.float32)
        _routed_experts(table, held, f"{name}.mlp", experts, config["moe_intermediate_size"], hidden)
        if config["n_shared_experts"]:
            inner = config["moe_intermediate_size"] * config["n_shared_experts"]
            table.gated_mlp(held, f"{name}.mlp.shared_experts", inner, hidden, tp=table.shared_experts_cut)


def fill_gpt_oss(table: Table, config: Config) -> None:
    """models/gpt_oss.py: GptOssForCausalLM, unquantized (_load_weights_other). Every stage holds both ends."""
    hidden, (heads, kv_heads, _) = config["hidden_size"], attention_sizes(config)
    _refuse_tied(config)
    if kv_heads % table.sizes.tp:
        raise ValueError(f"gpt_oss does not repeat KV heads: {kv_heads} cannot be cut by tp = {table.sizes.tp}")
    inner, ranks = config["intermediate_size"], table.sizes.engine_ranks
    if inner % ranks:
        raise ValueError(f"gpt_oss wants intermediate_size {inner} to be a multiple of the engine's {ranks} ranks")
    if config["num_local_experts"] % table.sizes.ep:
        raise ValueError(f"gpt_oss cannot spread {config['num_local_experts']} experts over ep = {table.sizes.ep}")
    table.vocabulary(True, "model.embedding.weight", "model.embed_tokens.weight", config["vocab_size"], hidden)
    table.whole(True, "model.norm.weight", "model.norm.weight", (hidden,))
    table.vocabulary(True, "lm_head.weight", "lm_head.weight", config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        held, name = layer in table.stage, f"model.layers.{layer}"
        table.attention(held, f"{name}.attn", f"{name}.self_attn", config, qkv_bias=True, o_bias=True)
        table.column(held, f"{name}.attn.sinks", [f"{name}.self_attn.sinks"], heads)
        _norms(table, held, name, hidden)
        router = f"{name}.mlp.router"
        table.whole(held, f"{router}.weight", f"{router}.weight", (config["num_local_experts"], hidden))
        table.whole(held, f"{router}.bias", f"{router}.bias", (config["num_local_experts"],))
        _gpt_oss_experts(table, held, f"{name}.mlp.experts", config)


def fill_nemotron_h(table: Table, config: Config) -> None:
    """models/nemotron_h.py: NemotronHForCausalLM. Every stage holds embedding, final norm and lm_head."""
    unsupported = [key for key in ("moe_latent_size", "mlp_bias", "use_bias", "attention_bias") if config.get(key)]
    if unsupported:
        raise ValueError(f"nemotron_h with {', '.join(unsupported)} is not supported")
    _refuse_tied(config)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    table.vocabulary(True, "model.embed_tokens.weight", "backbone.embeddings.weight", vocab, hidden)
    table.whole(True, "model.norm_f.weight", "backbone.norm_f.weight", (hidden,))
    table.vocabulary(True, "lm_head.weight", "lm_head.weight", vocab, hidden)
    fill_mixer = {"M": _mamba, "*": _nemotron_attention, "-": _nemotron_mlp, "E": _nemotron_moe}
    for layer, letter in enumerate(config["hybrid_override_pattern"]):
        held, tensor, source = layer in table.stage, f"model.layers.{layer}", f"backbone.layers.{layer}"
        table.whole(held, f"{tensor}.norm.weight", f"{source}.norm.weight", (hidden,))
        fill_mixer[letter](table, held, f"{tensor}.mixer", f"{source}.mixer", config)
    if "E" in config["hybrid_override_pattern"]:
        _refuse_stage_without_experts(table, config)


FAMILIES: dict[str, Callable[[Table, Config], None]] = {
    "llama": fill_llama,
    "qwen2": fill_qwen2,
    "qwen3": fill_qwen3,
    "qwen3_moe": fill_qwen3_moe,
    "deepseek_v3": fill_deepseek_v3,
    "kimi_k2": fill_deepseek_v3,
    "gpt_oss": fill_gpt_oss,
    "nemotron_h": fill_nemotron_h,
}


def _fill_dense(
    table: Table, config: Config, qkv_bias: bool = False, o_bias: bool = False, head_norms: bool = False
) -> None:
    _ends(table, config)
    for layer in range(config["num_hidden_layers"]):
        held, name = layer in table.stage, f"model.layers.{layer}"
        _attention_layer(table, held, name, config, qkv_bias, o_bias, head_norms)
        table.gated_mlp(held, f"{name}.mlp", config["intermediate_size"], config["hidden_size"])


def _ends(table: Table, config: Config, everywhere: bool = False) -> None:
    """Embedding on the first stage, norm and lm_head on the last; tied: the embedding again instead of lm_head.

    `everywhere`: classes that build all three on every stage.
    """
    vocab, hidden, tied = config["vocab_size"], config["hidden_size"], config["tie_word_embeddings"]
    first, last = table.first or everywhere, table.last or everywhere
    embedding = "model.embed_tokens.weight"
    table.vocabulary(first or (tied and last), embedding, embedding, vocab, hidden)
    table.whole(last, "model.norm.weight", "model.norm.weight", (hidden,))
    if not tied:
        table.vocabulary(last, "lm_head.weight", "lm_head.weight", vocab, hidden)


def _refuse_tied(config: Config) -> None:
    if config["tie_word_embeddings"]:
        raise ValueError(f"vLLM's {config['model_type']} does not tie word embeddings")


def _refuse_stage_without_experts(table: Table, config: Config) -> None:
    if not any(".routed_experts." in tensor for tensor in table.tensors):
        stage = f"{table.stage.start}:{table.stage.stop}"
        raise ValueError(f"vLLM's {config['model_type']} wants experts on every stage; layers {stage} have none")


def _refuse_attention_bias(config: Config) -> None:
    if config.get("attention_bias"):
        raise ValueError(f"vLLM's {config['model_type']} drops o_proj.bias, which attention_bias brings")


def _norms(table: Table, held: bool, name: str, hidden: int) -> None:
    for norm in ("input_layernorm", "post_attention_layernorm"):
        table.whole(held, f"{name}.{norm}.weight", f"{name}.{norm}.weight", (hidden,))


def _attention_layer(
    table: Table,
    held: bool,
    name: str,
    config: Config,
    qkv_bias: bool = False,
    o_bias: bool = False,
    head_norms: bool = False,
) -> None:
    attention = f"{name}.self_attn"
    table.attention(held, attention, attention, config, qkv_bias, o_bias)
    for norm in ("q_norm", "k_norm") if head_norms else ():
        table.whole(held, f"{attention}.{norm}.weight", f"{attention}.{norm}.weight", (attention_sizes(config)[2],))
    _norms(table, held, name, config["hidden_size"])


def _routed_experts(table: Table, held: bool, name: str, experts: int, inner: int, hidden: int) -> None:
    table.experts(held, f"{name}.experts.routed_experts", f"{name}.experts", experts, inner, hidden, gated=True)


def _latent_attention(table: Table, held: bool, name: str, config: Config) -> None:
    """DeepseekV2MLAAttention: the down projections are whole on every rank, the up projections cut by heads."""
    hidden, heads, tp = config["hidden_size"], config["num_attention_heads"], table.sizes.tp
    if heads % tp:
        raise ValueError(f"{heads} heads cannot be cut by tp = {tp}")
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q_lora, kv_lora = config.get("q_lora_rank"), config["kv_lora_rank"]
    kv_a = Part(f"{name}.kv_a_proj_with_mqa.weight", kv_lora + rope)
    if q_lora:
        q_a = Part(f"{name}.q_a_proj.weight", q_lora)
        table.fused(held, f"{name}.fused_qkv_a_proj.weight", [q_a, kv_a], hidden)
        table.whole(held, f"{name}.q_a_layernorm.weight", f"{name}.q_a_layernorm.weight", (q_lora,))
        query, query_in = f"{name}.q_b_proj.weight", q_lora
    else:
        table.fused(held, kv_a.source, [kv_a], hidden)
        query, query_in = f"{name}.q_proj.weight", hidden
    table.column(held, query, [query], heads * (nope + rope), query_in)
    table.whole(held, f"{name}.kv_a_layernorm.weight", f"{name}.kv_a_layernorm.weight", (kv_lora,))
    key_value = f"{name}.kv_b_proj.weight"
    table.column(held, key_value, [key_value], heads * (nope + value), kv_lora)
    table.row(held, f"{name}.o_proj.weight", f"{name}.o_proj.weight", hidden, heads * value)


def _gpt_oss_experts(table: Table, held: bool, name: str, config: Config) -> None:
    """HF stacks experts as [E, in, out], gate and up alternating; vLLM keeps them alternating, transposed."""
    count, hidden, inner = config["num_local_experts"], config["hidden_size"], config["intermediate_size"]
    local = table.local_experts(count)
    ways, which = table.experts_cut
    low, high = which * inner // ways, (which + 1) * inner // ways
    here = slice(local.start, local.stop)

    def stacked(kind: str, hf_name: str, hf_shape: Shape, shape: Shape, take: Take) -> None:
        targets = table.source(f"{name}.{hf_name}", (count, *hf_shape))
        if held:
            table.tensors[f"{name}.routed_experts.{kind}"] = ((len(local), *shape), table.dtype)
            targets.append(Target(f"{name}.routed_experts.{kind}", (), take))

    def gate_up(t: torch.Tensor) -> torch.Tensor:
        return t[here, :, 2 * low : 2 * high].transpose(1, 2)

    def gate_up_bias(t: torch.Tensor) -> torch.Tensor:
        return t[here, 2 * low : 2 * high]

    def down(t: torch.Tensor) -> torch.Tensor:
        return t[here, low:high].transpose(1, 2)

    def down_bias(t: torch.Tensor) -> torch.Tensor:
        return t[here] if which == 0 else torch.zeros_like(t[here])  # the sum over tp must have it once

    width = high - low
    stacked("w13_weight", "gate_up_proj", (hidden, 2 * inner), (2 * width, hidden), gate_up)
    stacked("w13_bias", "gate_up_proj_bias", (2 * inner,), (2 * width,), gate_up_bias)
    stacked("w2_weight", "down_proj", (inner, hidden), (hidden, width), down)
    stacked("w2_bias", "down_proj_bias", (hidden,), (hidden,), down_bias)


def _mamba(table: Table, held: bool, tensor: str, source: str, config: Config) -> None:
    """layers/mamba/mamba_mixer2.py: MambaMixer2. A single group of B and C is whole on every rank."""
    tp, which, hidden = table.sizes.tp, table.tp_index, config["hidden_size"]
    heads, groups, state = config["mamba_num_heads"], config["n_groups"], config["ssm_state_size"]
    inner = heads * config["mamba_head_dim"]
    if heads % tp or (groups % tp and groups != 1):
        raise ValueError(f"{heads} Mamba heads in {groups} groups cannot be cut by tp = {tp}")
    group_cut = (tp, which) if groups % tp == 0 else (1, 0)
    conv = [("x", inner, tp, which), ("B", groups * state, *group_cut), ("C", groups * state, *group_cut)]
    projected = [("z", inner, tp, which), *conv, ("dt", heads, tp, which)]
    _sections(table, held, f"{tensor}.in_proj.weight", f"{source}.in_proj.weight", projected, hidden)
    _sections(table, held, f"{tensor}.conv1d.weight", f"{source}.conv1d.weight", conv, 1, config["conv_kernel"])
    if config["use_conv_bias"]:
        _sections(table, held, f"{tensor}.conv1d.bias", f"{source}.conv1d.bias", conv)
    for name in ("D", "dt_bias"):
        table.column(held, f"{tensor}.{name}", [f"{source}.{name}"], heads)
    targets = table.source(f"{source}.A_log", (heads,))
    if held:
        cut = slice(which * heads // tp, (which + 1) * heads // tp)
        table.tensors[f"{tensor}.A"] = ((heads // tp,), torch.float32)
        targets.append(Target(f"{tensor}.A", (), lambda t: -torch.exp(t[cut].float())))
    table.column(held, f"{tensor}.norm.weight", [f"{source}.norm.weight"], inner)
    table.row(held, f"{tensor}.out_proj.weight", f"{source}.out_proj.weight", hidden, inner)


def _sections(
    table: Table, held: bool, tensor: str, source: str, sections: list[tuple[str, int, int, int]], *rest: int
) -> None:
    """One HF tensor whose row sections (name, rows, ways, which) are each cut on their own."""
    targets = table.source(source, (sum(rows for _, rows, _, _ in sections), *rest))
    row = hf_row = 0
    for _, rows, ways, which in sections:
        height = rows // ways
        start = hf_row + which * height
        if held:
            targets.append(Target(tensor, (slice(row, row + height),), rows_of(start, start + height)))
        row, hf_row = row + height, hf_row + rows
    if held:
        table.tensors[tensor] = ((row, *rest), table.dtype)


def _nemotron_attention(table: Table, held: bool, tensor: str, source: str, config: Config) -> None:
    table.attention(held, tensor, source, config)


def _nemotron_mlp(
    table: Table, held: bool, tensor: str, source: str, config: Config, inner: int | None = None, tp: bool = True
) -> None:
    inner, hidden = inner or config["intermediate_size"], config["hidden_size"]
    table.column(held, f"{tensor}.up_proj.weight", [f"{source}.up_proj.weight"], inner, hidden, tp=tp)
    table.row(held, f"{tensor}.down_proj.weight", f"{source}.down_proj.weight", hidden, inner, tp=tp)


def _nemotron_moe(table: Table, held: bool, tensor: str, source: str, config: Config) -> None:
    """The router is fp32 except on Hopper and data-centre Blackwell (fused_moe/router/gate_linear.py, GateLinear)."""
    experts, hidden = config["n_routed_experts"], config["hidden_size"]
    gate, bias = "gate.weight", "gate.e_score_correction_bias"
    table.whole(held, f"{tensor}.{gate}", f"{source}.{gate}", (experts, hidden), torch.float32)
    table.whole(held, f"{tensor}.{bias}", f"{source}.{bias}", (experts,), torch.float32)
    routed = f"{tensor}.experts.routed_experts"
    table.experts(held, routed, f"{source}.experts", experts, config["moe_intermediate_size"], hidden, gated=False)
    if config["n_shared_experts"]:
        inner = config["moe_shared_expert_intermediate_size"] * config["n_shared_experts"]
        shared = (f"{tensor}.shared_experts", f"{source}.shared_experts")
        _nemotron_mlp(table, held, *shared, config, inner, tp=table.shared_experts_cut)
