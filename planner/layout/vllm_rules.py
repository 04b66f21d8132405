"""The local tensor of vLLM that holds a parameter, and how it is cut: one function a rule, keyed by role.

These are the bf16 forms of vLLM 0.26 to 0.33; vllm_quantized.py has the scales of quantized ones. Every rule names the file
under vllm/model_executor that it mirrors. MLA derives W_UV and W_UK_T after loading. No plan moves them: the engine adapter
recomputes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product

from mcore_reshard.planner.model.parameters import (
    EXPERT_ROLES,
    Architecture,
    Attention,
    LatentAttention,
    Mamba,
    ParameterGroup,
    Role,
)

from .geometry import LocalTensor, Piece, Region, permuted
from .mesh import GenMesh
from .partitions import Misc, Partition, RowRange, Rule, gate_up, padded_rows, rows_along, split, split_sections, whole

_VOCAB_PADDING = 64  # layers/vocab_parallel_embedding.py DEFAULT_VOCAB_PADDING_SIZE
_LAYER = "model.layers.{layer}."
_ROUTED = "experts.routed_experts."


@dataclass(frozen=True, slots=True)
class Context:
    """The facts that a rule gets beside the group it places."""

    architecture: Architecture
    mesh: GenMesh
    dtype: str
    local_experts: int = 0  # on a rank; 0: the group has none

    @property
    def padded_vocab(self) -> int:
        return -(-self.architecture.vocab // _VOCAB_PADDING) * _VOCAB_PADDING

    @property
    def family(self) -> str:
        return self.architecture.family

    @property
    def expert_tp(self) -> int:
        """Experts are cut by tp, or kept whole under expert parallelism."""
        return self.mesh.tp if self.mesh.ep == 1 else 1

    @property
    def shared_tp(self) -> int:
        """Shared experts are whole where vllm/config/parallel.py use_sequence_parallel_moe: ep with tp and dp above 1."""
        return 1 if self.mesh.ep > 1 and self.mesh.dp > 1 else self.mesh.tp


Module = Callable[[Context], str]  # the path of a module, which families name differently


def _attention(context: Context) -> str:
    return _LAYER + {"nemotron_h": "mixer.", "gpt_oss": "attn."}.get(context.family, "self_attn.")


def _mlp(context: Context) -> str:
    return _LAYER + ("mixer." if context.family == "nemotron_h" else "mlp.")


# --- vocabulary: layers/vocab_parallel_embedding.py


def _vocabulary(context: Context, group: ParameterGroup) -> Partition:
    embedding = "model.embedding.weight" if context.family == "gpt_oss" else "model.embed_tokens.weight"
    name = embedding if group.role is Role.EMBEDDING else "lm_head.weight"
    return padded_rows(group, name, context.padded_vocab, context.mesh.tp)


def _final_norm(context: Context, group: ParameterGroup) -> Partition:
    return whole(group, "model.norm_f.weight" if context.family == "nemotron_h" else "model.norm.weight")


def _norm(leaf: str) -> Rule:
    """Replicated; Nemotron-H has one norm a layer, named so (models/nemotron_h.py)."""
    return lambda context, group: whole(
        group, _LAYER + ("norm.weight" if context.family == "nemotron_h" else f"{leaf}.weight")
    )


# --- attention: layers/linear.py QKVParallelLinear


def _qkv(context: Context, group: ParameterGroup) -> Partition:
    """Rows [q_r; k_r; v_r]; with more ranks than KV heads, rank r holds head r // (tp / kv_heads), so neighbors replicate."""
    attention, tp = context.architecture.attention, context.mesh.tp
    assert isinstance(attention, Attention)
    q_rows = attention.heads // tp * attention.head_dim
    kv_rows = max(1, attention.kv_heads // tp) * attention.head_dim
    copies = max(1, tp // attention.kv_heads)
    if group.role in {Role.Q, Role.Q_BIAS}:
        row_ranges = [(RowRange(r * q_rows, q_rows, 0),) for r in range(tp)]
    else:
        local_start = q_rows + (kv_rows if group.role in {Role.V, Role.V_BIAS} else 0)
        row_ranges = [(RowRange(r // copies * kv_rows, kv_rows, local_start),) for r in range(tp)]
    leaf = "weight" if len(group.shape) == 2 else "bias"
    return rows_along(group, _attention(context) + f"qkv_proj.{leaf}", 0, q_rows + 2 * kv_rows, row_ranges)


def _cut(module: Module, leaf: str, dim: int) -> Rule:
    return lambda context, group: split(group, module(context) + leaf, dim, context.mesh.tp)


def _whole(module: Module, leaf: str) -> Rule:
    return lambda context, group: whole(group, module(context) + leaf)


# --- latent attention: models/deepseek_v2.py


def _latent_a(context: Context, group: ParameterGroup) -> Partition:
    """fused_qkv_a_proj = [q_a; kv_a_with_mqa], replicated (DeepSeekV2FusedQkvAProjLinear, disable_tp)."""
    attention = context.architecture.attention
    assert isinstance(attention, LatentAttention)
    if not attention.q_lora_rank:
        return whole(group, _attention(context) + "kv_a_proj_with_mqa.weight")
    rows = attention.q_lora_rank + attention.kv_lora_rank + attention.qk_rope_dim
    local_start = 0 if group.role is Role.MLA_Q_A else attention.q_lora_rank
    row_ranges = [(RowRange(0, group.view[0], local_start),)]
    return rows_along(group, _attention(context) + "fused_qkv_a_proj.weight", 0, rows, row_ranges)


# --- MLP: layers/linear.py MergedColumnParallelLinear


def _gate_up(context: Context, group: ParameterGroup, module: str = "", tp: int = 0) -> Partition:
    gated = context.architecture.gated
    name = _mlp(context) + module + ("gate_up_proj" if gated else "up_proj") + ".weight"
    return gate_up(group, name, tp or context.mesh.tp, gated)


def _shared(context: Context, group: ParameterGroup) -> Partition:
    if group.role is Role.SHARED_DOWN:
        return split(group, _mlp(context) + "shared_experts.down_proj.weight", 1, context.shared_tp)
    return _gate_up(context, group, "shared_experts.", context.shared_tp)


# --- experts: layers/fused_moe/layer.py FusedMoE


def _expert(context: Context, group: ParameterGroup) -> Partition:
    """w2 is (E, H, I / tp). w13 is (E, 2 I / tp, H) = [gate_r; up_r] per expert, or (E, I / tp, H) without a gate."""
    path, tp, local = _mlp(context) + _ROUTED, context.expert_tp, context.local_experts
    if group.role is Role.EXPERT_DOWN:
        return split(group, path + "w2_weight", 1, tp, local)
    return gate_up(group, path + "w13_weight", tp, context.architecture.gated, local)


# For each role its tensor, the dim that tp cuts, and the local dim of each global dim.
_STACKED: Mapping[Role, tuple[str, int, tuple[int, ...]]] = {
    Role.STACKED_GATE_UP: ("w13_weight", 2, (0, 3, 1, 2)),  # (E, H, I, 2) -> (E, I / tp, 2, H) = [E, 2 I / tp, H]
    Role.STACKED_GATE_UP_BIAS: ("w13_bias", 1, (0, 1, 2)),  # (E, I, 2) -> (E, I / tp, 2) = [E, 2 I / tp]
    Role.STACKED_DOWN: ("w2_weight", 1, (0, 2, 1)),  # (E, I, H) -> [E, H, I / tp]
    Role.STACKED_DOWN_BIAS: ("w2_bias", 1, (0, 1)),  # (E, H) -> [E, H], uncut
}


def _stacked(context: Context, group: ParameterGroup) -> Partition | Misc:
    """gpt-oss in bf16 (models/gpt_oss.py _load_weights_other): w13 rows keep gate and up alternating, transposed from HF.

    Either tp cuts every expert, or ep the experts.
    """
    tp, ep = context.expert_tp, context.mesh.ep
    if group.role is Role.STACKED_DOWN_BIAS and tp > 1:
        return Misc("w2_bias is whole on tensor-parallel rank 0 and zero on the others: not a byte copy")
    leaf, cut_dim, dims = _STACKED[group.role]
    local, inner = context.architecture.experts // ep, group.view[cut_dim] // tp
    pieces = []
    for ep_rank, tp_rank in product(range(ep), range(tp)):
        region = Region.whole(group.view).within(0, ep_rank * local, (ep_rank + 1) * local)
        region = region.within(cut_dim, tp_rank * inner, (tp_rank + 1) * inner)
        view = permuted(region.extents, dims)
        shape = (local, 2 * inner, *view[3:]) if leaf.startswith("w13") else view
        tensor = LocalTensor(_mlp(context) + _ROUTED + leaf, shape, group.dtype)
        pieces.append((Piece(region, tensor, (0,) * len(view), dims, view),))
    return Partition(tuple(pieces))


# --- Mamba2: layers/mamba/mamba_mixer2.py


def _mamba_sections(sections_of: Callable[[Mamba], tuple[int, ...]], leaf: str, groups_start: int) -> Rule:
    """Sections cut by tp one after another; of a single group, B and C (from `groups_start` on) are whole on every rank."""

    def rule(context: Context, group: ParameterGroup) -> Partition:
        mamba, tp = context.architecture.mamba, context.mesh.tp
        assert mamba is not None
        uncut = (groups_start, groups_start + 1) if mamba.groups == 1 else ()
        return split_sections(group, _LAYER + "mixer." + leaf, sections_of(mamba), tp, uncut)

    return rule


def _model_dtype(leaf: str) -> Rule:
    """D and dt_bias are cut by heads and kept in the model's dtype, also where the checkpoint has fp32."""
    return lambda context, group: split(replace(group, dtype=context.dtype), _LAYER + leaf, 0, context.mesh.tp)


def _expert_bias(context: Context, group: ParameterGroup) -> Partition:
    return whole(replace(group, dtype="float32"), _mlp(context) + "gate.e_score_correction_bias")


def _router(context: Context, group: ParameterGroup) -> Partition | Misc:
    """A plain replicated linear; Nemotron-H's GateLinear keeps fp32 where it has no bf16 kernel."""
    if context.family == "nemotron_h":
        return Misc("the engine keeps this router in float32 or bfloat16 depending on the device")
    return whole(group, _mlp(context) + ("router.weight" if context.family == "gpt_oss" else "gate.weight"))


RULES: Mapping[Role, Rule] = {
    **dict.fromkeys((Role.EMBEDDING, Role.LM_HEAD), _vocabulary),
    Role.FINAL_NORM: _final_norm,
    Role.ATTENTION_NORM: _norm("input_layernorm"),
    **dict.fromkeys((Role.MLP_NORM, Role.MOE_NORM), _norm("post_attention_layernorm")),
    Role.MAMBA_NORM: _norm("norm"),
    **dict.fromkeys((Role.Q, Role.K, Role.V, Role.Q_BIAS, Role.K_BIAS, Role.V_BIAS), _qkv),
    Role.O: _cut(_attention, "o_proj.weight", 1),
    Role.O_BIAS: _whole(_attention, "o_proj.bias"),
    Role.Q_NORM: _whole(_attention, "q_norm.weight"),
    Role.K_NORM: _whole(_attention, "k_norm.weight"),
    Role.SINKS: _cut(_attention, "sinks", 0),
    Role.MLA_Q: _cut(_attention, "q_proj.weight", 0),
    **dict.fromkeys((Role.MLA_Q_A, Role.MLA_KV_A), _latent_a),
    Role.MLA_Q_A_NORM: _whole(_attention, "q_a_layernorm.weight"),
    Role.MLA_Q_B: _cut(_attention, "q_b_proj.weight", 0),
    Role.MLA_KV_A_NORM: _whole(_attention, "kv_a_layernorm.weight"),
    Role.MLA_KV_B: _cut(_attention, "kv_b_proj.weight", 0),
    Role.MLA_O: _cut(_attention, "o_proj.weight", 1),
    **dict.fromkeys((Role.GATE, Role.UP), _gate_up),
    Role.DOWN: _cut(_mlp, "down_proj.weight", 1),
    Role.ROUTER: _router,
    Role.ROUTER_BIAS: _whole(_mlp, "router.bias"),
    Role.EXPERT_BIAS: _expert_bias,
    **dict.fromkeys(EXPERT_ROLES, _expert),
    **dict.fromkeys((Role.SHARED_GATE, Role.SHARED_UP, Role.SHARED_DOWN), _shared),
    **dict.fromkeys(_STACKED, _stacked),
    Role.MAMBA_IN: _mamba_sections(lambda mamba: mamba.in_sections, "in_proj.weight", 2),
    Role.MAMBA_CONV: _mamba_sections(lambda mamba: mamba.conv_sections, "conv1d.weight", 1),
    Role.MAMBA_CONV_BIAS: _mamba_sections(lambda mamba: mamba.conv_sections, "conv1d.bias", 1),
    Role.MAMBA_A_LOG: lambda *_: Misc("vLLM stores A = -exp(A_log): not a byte copy"),
    Role.MAMBA_D: _model_dtype("mixer.D"),
    Role.MAMBA_DT_BIAS: _model_dtype("mixer.dt_bias"),
    Role.MAMBA_GATE_NORM: _cut(_mlp, "norm.weight", 0),
    Role.MAMBA_OUT: _cut(_mlp, "out_proj.weight", 1),
}
