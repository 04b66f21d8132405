"""The local tensor of Megatron-Core that holds a parameter, and how it is cut: one function a rule, keyed by role.

Names and row orders are those of megatron-core 0.16 to 0.19 as built by Megatron-Bridge. Every rule names the class that it
mirrors. Parallel degrees come from the mesh, because attributes of parameters are wrong in places. Grouped experts at
ETP = 1 still claim tensor parallelism, and TE's duplicated linears claim a TP dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

from mcore_reshard.planner.model.parameters import EXPERT_ROLES, Architecture, Attention, Mamba, ParameterGroup, Role

from .geometry import LocalTensor, Piece, Region, permuted
from .mesh import TrainMesh
from .partitions import Misc, Partition, RowRange, Rule, gate_up, padded_rows, rows_along, split, split_sections, whole

_LAYER = "vp{vp}.decoder.layers.{layer}."
_EXPERTS = _LAYER + "mlp.experts."

ExpertsModule = Literal["grouped", "sequential", "stacked"]


@dataclass(frozen=True, slots=True)
class MegatronBuild:
    """The choices that, beside the mesh, decide the names and the storage of parameters."""

    # TEGroupedMLP (a tensor per expert), SequentialMLP (a module per expert), or the legacy GroupedMLP (one stacked tensor)
    experts: ExpertsModule = "grouped"
    fused_norms: bool = True  # inside the linear they precede (the Transformer Engine spec), or apart (the local spec)
    padded_vocab: int = 0  # rows of the embedding over all tp ranks; 0: Megatron-Bridge's rule
    # Rows of linear_fc1 after which gate and up take turns (moe_mlp_glu_interleave_size); 0: [gate; up]
    alternating_experts: int = 0
    alternating_shared: int = 0  # the same in shared experts (moe_shared_expert_glu_interleave_size)


@dataclass(frozen=True, slots=True)
class Context:
    """The facts that a layout rule gets beside the group it places."""

    architecture: Architecture
    mesh: TrainMesh
    build: MegatronBuild
    local_experts: int = 0  # on a rank; 0: the group has none

    @property
    def is_hybrid(self) -> bool:
        """megatron.core.models.mamba.MambaModel: also where the pattern has no Mamba layer."""
        return self.architecture.family == "nemotron_h"

    @property
    def padded_vocab(self) -> int:
        return self.build.padded_vocab or padded_vocab(self.architecture.vocab, self.mesh.tp)


def padded_vocab(vocab: int, tp: int) -> int:
    """Vocabulary rows as Megatron-Bridge builds them: unpadded where tp divides, else padded.

    Source: megatron.bridge.utils.vocab_utils.calculate_padded_vocab_size, with the divisor of
    MegatronModelBridge.make_vocab_size_divisible_by (the largest power of two up to 128 that divides the vocabulary).
    """
    if vocab % tp == 0:
        return vocab
    multiple = gcd(vocab, 128) * tp
    return -(-vocab // multiple) * multiple


# --- vocabulary: megatron.core.tensor_parallel.layers.VocabParallelEmbedding, ColumnParallelLinear (output_layer)


def _vocabulary(path: str) -> Rule:
    return lambda context, group: padded_rows(group, path, context.padded_vocab, context.mesh.tp)


def _final_norm(context: Context, group: ParameterGroup) -> Partition:
    return whole(group, f"vp{{vp}}.decoder.{'final_norm' if context.is_hybrid else 'final_layernorm'}.weight")


# --- attention: megatron.core.transformer.attention.SelfAttention


def _fused_qkv(context: Context, group: ParameterGroup) -> Partition:
    """linear_qkv rows are group-major: for each KV group its query heads, then k, then v; tp cuts equal row ranges.

    The cut may fall inside a group when tp exceeds the KV heads. Source: SelfAttention.get_query_key_value_tensors.
    """
    attention = context.architecture.attention
    assert isinstance(attention, Attention)
    dim = attention.head_dim
    query_rows = attention.heads // attention.kv_heads * dim
    fused_rows = query_rows + 2 * dim  # of one KV group
    # rows of one KV group that this parameter has, and where they start among the fused ones
    index = {Role.Q: 0, Role.K: 1, Role.V: 2, Role.Q_BIAS: 0, Role.K_BIAS: 1, Role.V_BIAS: 2}[group.role]
    rows, offset = ((query_rows, 0), (dim, query_rows), (dim, query_rows + dim))[index]
    local_rows = attention.kv_heads * fused_rows // context.mesh.tp
    row_ranges = []
    for tp in range(context.mesh.tp):
        part_start, part_stop = tp * local_rows, (tp + 1) * local_rows
        part = []
        for kv_group in range(part_start // fused_rows, -(-part_stop // fused_rows)):
            fused_start = kv_group * fused_rows + offset
            start, stop = max(fused_start, part_start), min(fused_start + rows, part_stop)
            if start < stop:
                part.append(RowRange(kv_group * rows + start - fused_start, stop - start, start - part_start))
        row_ranges.append(tuple(part))
    leaf = "weight" if len(group.shape) == 2 else "bias"
    return rows_along(group, _LAYER + f"self_attention.linear_qkv.{leaf}", 0, local_rows, row_ranges)


def _norm(fused: str, separate: str) -> Rule:
    """Norms live inside of the linear that they precede (TELayerNormColumnParallelLinear), or in their own module."""

    def rule(context: Context, group: ParameterGroup) -> Partition:
        path = f"{fused}.layer_norm_weight" if context.build.fused_norms else f"{separate}.weight"
        return whole(group, _LAYER + path)

    return rule


def _attention_norm(context: Context, group: ParameterGroup) -> Partition | Misc:
    """In a module of its own for MLA: its down projections have no fused norm."""
    if isinstance(context.architecture.attention, Attention):
        return _norm("self_attention.linear_qkv", "input_layernorm")(context, group)
    return whole(group, _LAYER + "input_layernorm.weight")


# --- MLP: megatron.core.transformer.mlp.MLP


def _gate_up(path: str, alternating: Callable[[MegatronBuild], int] = lambda build: 0) -> Rule:
    """linear_fc1 is [gate_r; up_r] when gated (partition_stride 2), up alone otherwise; shared experts may alternate.

    Source of the alternation: the fused shared experts of megatron-core 0.19, `_make_fused_grouped_swiglu_ops`.
    """

    def rule(context: Context, group: ParameterGroup) -> Partition:
        gated, rows = context.architecture.gated, alternating(context.build)
        return gate_up(group, _LAYER + path, context.mesh.tp, gated, alternating=rows)

    return rule


def _cut(path: str, dim: int) -> Rule:
    """Column (dim 0) or row (dim 1) parallel over tp, in a tensor of its own."""
    return lambda context, group: split(group, _LAYER + path, dim, context.mesh.tp)


def _replicated(path: str) -> Rule:
    return lambda context, group: whole(group, _LAYER + path)


# --- experts: megatron.core.transformer.moe.experts


def _expert(context: Context, group: ParameterGroup) -> Partition:
    """linear_fc1 of one expert is [gate_r; up_r] over etp, or alternates; linear_fc2 is cut along its columns.

    Source of the alternation: TEGroupedMLP._remove_glu_interleaving, which undoes it on a rank's own activations.
    """
    if context.build.experts == "stacked":
        return _grouped_mlp(context, group)
    if group.role is Role.EXPERT_DOWN:
        return split(group, _expert_tensor(context, "linear_fc2.weight"), 1, context.mesh.etp)
    name, gated = _expert_tensor(context, "linear_fc1.weight"), context.architecture.gated
    return gate_up(group, name, context.mesh.etp, gated, alternating=context.build.alternating_experts)


def _expert_tensor(context: Context, leaf: str, slot: str = "{expert}") -> str:
    """TEGroupedMLP numbers the tensors of its linears, SequentialMLP has a module for each expert."""
    return _EXPERTS + (f"{leaf}{slot}" if context.build.experts == "grouped" else f"local_experts.{slot}.{leaf}")


def _grouped_mlp(context: Context, group: ParameterGroup) -> Partition:
    """GroupedMLP.weight1 is declared [H, E * 2 I / etp] but used as (E, H, 2 I / etp): forward() views it so.

    GroupedMLP.weight2 is [E * I / etp, H], used as (E, I / etp, H).
    """
    etp, local = context.mesh.etp, context.local_experts
    cut_dim = 1 if group.role is Role.EXPERT_DOWN else 0
    rows, hidden = group.view[cut_dim] // etp, group.view[1 - cut_dim]
    origin: tuple[int, ...]
    view: tuple[int, ...]
    if group.role is Role.EXPERT_DOWN:
        tensor = LocalTensor(_EXPERTS + "weight2", (local * rows, hidden), group.dtype)
        origin, dims, view = (0, 0, 0), (2, 1), (local, rows, hidden)
    else:
        halves = 2 if context.architecture.gated else 1
        half = halves - 1 if group.role is Role.EXPERT_UP else 0
        tensor = LocalTensor(_EXPERTS + "weight1", (hidden, local * halves * rows), group.dtype)
        origin, dims, view = (0, 0, half, 0), (3, 1), (local, hidden, halves, rows)
    regions = (Region.whole(group.view).within(cut_dim, c * rows, (c + 1) * rows) for c in range(etp))
    return Partition(tuple((Piece(region, tensor, origin, dims, view, 0),) for region in regions))


# For each role its tensor, and the local dim of each global dim. The leading local dim has one expert; no tensor keeps it.
_STACKED: Mapping[Role, tuple[str, tuple[int, ...]]] = {
    Role.STACKED_GATE_UP: ("linear_fc1.weight", (0, 3, 2, 1)),  # (E, H, I, 2) -> (1, 2, I, H) = [2 I, H]
    Role.STACKED_GATE_UP_BIAS: (
        "linear_fc1.bias",
        (0, 2, 1),
    ),  # (E, I, 2) -> (1, 2, I) = [2 I]; blocks: (1, 2 I / b, b)
    Role.STACKED_DOWN: ("linear_fc2.weight", (0, 2, 1)),  # (E, I, H) -> (1, H, I) = [H, I]
    Role.STACKED_DOWN_BIAS: ("linear_fc2.bias", (0, 1)),  # (E, H) -> (1, H) = [H]
}


def _stacked_experts(context: Context, group: ParameterGroup) -> Partition | Misc:
    """gpt-oss keeps all experts of a layer in one HF tensor, transposed and with gate and up alternating.

    TEGroupedMLP holds each expert as [gate; up] rows, or alternating. Source: megatron.bridge GPTOSSMLPGateUpProjMapping
    and GPTOSSMLPDownProjMapping. Megatron refuses expert tensor parallelism for this model (biases in experts).
    """
    if context.build.experts == "stacked":
        return Misc("no layout rule for experts with biases in GroupedMLP")
    leaf, dims = _STACKED[group.role]
    last, local = len(dims) - 1, context.architecture.experts // context.mesh.ep
    parts: list[list[Piece]] = [[] for _ in range(context.mesh.ep)]
    for expert in range(context.architecture.experts):
        ep, slot = divmod(expert, local)
        region = Region.whole(group.view).within(0, expert, expert + 1)
        view, boxes = permuted(region.extents, dims), [region]
        if leaf.startswith("linear_fc1"):
            rows = context.build.alternating_experts or view[2]
            blocks = (region.within(last - 1, at, at + rows) for at in range(0, view[2], rows))
            boxes = [block.within(last, half, half + 1) for block in blocks for half in range(2)]
            view = (1, len(boxes), rows, *view[3:])
        shape = (view[1] * view[2], *view[3:]) if len(boxes) > 1 else view[1:]
        tensor = LocalTensor(_expert_tensor(context, leaf, str(slot)), shape, group.dtype)
        for number, box in enumerate(boxes):
            parts[ep].append(Piece(box, tensor, (0, number, *[0] * (len(view) - 2)), dims, view))
    return Partition(tuple(map(tuple, parts)))


# --- Mamba: megatron.core.ssm.mamba_mixer.MambaMixer


def _mamba_sections(sections_of: Callable[[Mamba], tuple[int, ...]], path: str) -> Rule:
    """Sections (z, x, B, C, dt or x, B, C) are each cut by tp and kept one after another on every rank."""

    def rule(context: Context, group: ParameterGroup) -> Partition:
        assert context.architecture.mamba is not None
        return split_sections(group, _LAYER + path, sections_of(context.architecture.mamba), context.mesh.tp)

    return rule


def _expert_bias(context: Context, group: ParameterGroup) -> Partition:
    """TopKRouter.expert_bias: a persistent buffer, replicated, and kept in fp32."""
    return whole(replace(group, dtype="float32"), _LAYER + "mlp.router.expert_bias")


RULES: Mapping[Role, Rule] = {
    Role.EMBEDDING: _vocabulary("vp{vp}.embedding.word_embeddings.weight"),
    Role.LM_HEAD: _vocabulary("vp{vp}.output_layer.weight"),
    Role.FINAL_NORM: _final_norm,
    Role.ATTENTION_NORM: _attention_norm,
    Role.MLP_NORM: _norm("mlp.linear_fc1", "pre_mlp_layernorm"),
    Role.MOE_NORM: _replicated("pre_mlp_layernorm.weight"),
    Role.MAMBA_NORM: _replicated("mixer.in_proj.layer_norm_weight"),
    **dict.fromkeys((Role.Q, Role.K, Role.V, Role.Q_BIAS, Role.K_BIAS, Role.V_BIAS), _fused_qkv),
    Role.O: _cut("self_attention.linear_proj.weight", 1),
    Role.O_BIAS: _replicated("self_attention.linear_proj.bias"),
    Role.Q_NORM: _replicated("self_attention.q_layernorm.weight"),
    Role.K_NORM: _replicated("self_attention.k_layernorm.weight"),
    Role.SINKS: _cut("self_attention.core_attention.softmax_offset", 0),
    Role.MLA_Q: _cut("self_attention.linear_q_proj.weight", 0),
    Role.MLA_Q_A: _replicated("self_attention.linear_q_down_proj.weight"),
    Role.MLA_Q_A_NORM: _norm("self_attention.linear_q_up_proj", "self_attention.q_layernorm"),
    Role.MLA_Q_B: _cut("self_attention.linear_q_up_proj.weight", 0),
    Role.MLA_KV_A: _replicated("self_attention.linear_kv_down_proj.weight"),
    Role.MLA_KV_A_NORM: _norm("self_attention.linear_kv_up_proj", "self_attention.kv_layernorm"),
    Role.MLA_KV_B: _cut("self_attention.linear_kv_up_proj.weight", 0),
    Role.MLA_O: _cut("self_attention.linear_proj.weight", 1),
    **dict.fromkeys((Role.GATE, Role.UP), _gate_up("mlp.linear_fc1.weight")),
    Role.DOWN: _cut("mlp.linear_fc2.weight", 1),
    Role.ROUTER: _replicated("mlp.router.weight"),
    Role.ROUTER_BIAS: _replicated("mlp.router.bias"),
    Role.EXPERT_BIAS: _expert_bias,
    **dict.fromkeys(EXPERT_ROLES, _expert),
    **dict.fromkeys(
        (Role.SHARED_GATE, Role.SHARED_UP),
        _gate_up("mlp.shared_experts.linear_fc1.weight", lambda build: build.alternating_shared),
    ),
    Role.SHARED_DOWN: _cut("mlp.shared_experts.linear_fc2.weight", 1),
    **dict.fromkeys(_STACKED, _stacked_experts),
    Role.MAMBA_IN: _mamba_sections(lambda mamba: mamba.in_sections, "mixer.in_proj.weight"),
    Role.MAMBA_CONV: _mamba_sections(lambda mamba: mamba.conv_sections, "mixer.conv1d.weight"),
    Role.MAMBA_CONV_BIAS: _mamba_sections(lambda mamba: mamba.conv_sections, "mixer.conv1d.bias"),
    Role.MAMBA_A_LOG: _cut("mixer.A_log", 0),
    Role.MAMBA_D: _cut("mixer.D", 0),
    Role.MAMBA_DT_BIAS: _cut("mixer.dt_bias", 0),
    Role.MAMBA_GATE_NORM: _cut("mixer.norm.weight", 0),
    Role.MAMBA_OUT: _cut("mixer.out_proj.weight", 1),
}
