"""Where Megatron-Core keeps each parameter: one function a rule, keyed by role.

Names and row orders are those of megatron-core 0.16 to 0.19 as built by Megatron-Bridge; every rule names the class it
mirrors. Parallel degrees come from the mesh, never from parameter attributes, which are wrong in places (grouped experts
at ETP = 1 still claim tensor parallelism; TE's duplicated linears claim a TP dim).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from mcore_reshard.planner.model.parameters import Attention, Mamba, ModelParameters, ParameterGroup, Role
from mcore_reshard.planner.model.precision import Format

from .geometry import LocalTensor, Piece, Region
from .megatron_build import Context, ExpertsModule, MegatronBuild, padded_vocab
from .mesh import LayerPlace, MeshError, TrainMesh
from .partitions import (
    Excluded,
    Layout,
    Misc,
    Partition,
    PartitionOwners,
    RowRange,
    gate_up,
    padded_rows,
    runs_along,
    split,
    whole,
)
from .transformer_engine import te_scales

__all__ = ["ExpertsModule", "MegatronBuild", "MegatronLayout", "padded_vocab"]

_LAYER = "vp{vp}.decoder.layers.{layer}."
_EXPERTS = _LAYER + "mlp.experts."

Rule = Callable[[Context, ParameterGroup], Partition | Misc]


# --- vocabulary: megatron.core.tensor_parallel.layers.VocabParallelEmbedding, ColumnParallelLinear (output_layer)


def _embedding(context: Context, group: ParameterGroup) -> Partition:
    return padded_rows(group, "vp{vp}.embedding.word_embeddings.weight", context.padded_vocab, context.mesh.tp)


def _lm_head(context: Context, group: ParameterGroup) -> Partition:
    return padded_rows(group, "vp{vp}.output_layer.weight", context.padded_vocab, context.mesh.tp)


# --- attention: megatron.core.transformer.attention.SelfAttention


def _fused_qkv(context: Context, group: ParameterGroup) -> Partition:
    """linear_qkv rows are group-major: for each KV group its query heads, then k, then v; tp cuts equal row ranges.

    The cut may fall inside a group when tp exceeds the KV heads. Source: SelfAttention.get_query_key_value_tensors.
    """
    attention = context.architecture.attention
    assert isinstance(attention, Attention)
    dim = attention.head_dim
    queries = attention.heads // attention.kv_heads
    group_rows = (queries + 2) * dim
    part = {Role.Q: 0, Role.K: 1, Role.V: 2, Role.Q_BIAS: 0, Role.K_BIAS: 1, Role.V_BIAS: 2}[group.role]
    rows, at = ((queries * dim, 0), (dim, queries * dim), (dim, (queries + 1) * dim))[part]
    local_rows = attention.kv_heads * group_rows // context.mesh.tp
    runs = []
    for tp in range(context.mesh.tp):
        low, high = tp * local_rows, (tp + 1) * local_rows
        held = []
        for kv_group in range(low // group_rows, -(-high // group_rows)):
            start = kv_group * group_rows + at
            first, last = max(start, low), min(start + rows, high)
            if first < last:
                held.append(RowRange(kv_group * rows + first - start, last - first, first - low))
        runs.append(tuple(held))
    leaf = "weight" if len(group.shape) == 2 else "bias"
    return runs_along(group, _LAYER + f"self_attention.linear_qkv.{leaf}", 0, local_rows, runs)


def _attention_norm(context: Context, group: ParameterGroup) -> Partition:
    """Fused in TELayerNormColumnParallelLinear, except for MLA, whose down projections have none."""
    fused = context.build.fused_norms and isinstance(context.architecture.attention, Attention)
    return whole(group, _LAYER + ("self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"))


def _mlp_norm(context: Context, group: ParameterGroup) -> Partition:
    fused = context.build.fused_norms
    return whole(group, _LAYER + ("mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight"))


def _mla_norm(linear: str, separate: str) -> Rule:
    """megatron.core.transformer.multi_latent_attention.MLASelfAttention: the norm of the latent, before its up projection."""

    def rule(context: Context, group: ParameterGroup) -> Partition:
        leaf = f"{linear}.layer_norm_weight" if context.build.fused_norms else f"{separate}.weight"
        return whole(group, _LAYER + "self_attention." + leaf)

    return rule


# --- MLP: megatron.core.transformer.mlp.MLP


def _gate_up(path: str) -> Rule:
    """linear_fc1 is [gate_r; up_r] when gated (partition_stride 2), up alone otherwise."""
    return lambda context, group: gate_up(group, _LAYER + path, context.mesh.tp, context.architecture.gated)


def _cut(path: str, dim: int) -> Rule:
    """Column (dim 0) or row (dim 1) parallel over tp, in a tensor of its own."""
    return lambda context, group: split(group, _LAYER + path, dim, context.mesh.tp)


def _replicated(path: str) -> Rule:
    return lambda context, group: whole(group, _LAYER + path)


# --- experts: megatron.core.transformer.moe.experts


def _expert_fc1(context: Context, group: ParameterGroup) -> Partition:
    etp, gated = context.mesh.etp, context.architecture.gated
    if context.build.experts == "stacked":
        return _stacked_fc1(context, group)
    leaf = (
        "linear_fc1.weight{expert}"
        if context.build.experts == "grouped"
        else "local_experts.{expert}.linear_fc1.weight"
    )
    return gate_up(group, _EXPERTS + leaf, etp, gated)


def _expert_fc2(context: Context, group: ParameterGroup) -> Partition:
    etp = context.mesh.etp
    if context.build.experts == "stacked":
        return _stacked_fc2(context, group)
    leaf = (
        "linear_fc2.weight{expert}"
        if context.build.experts == "grouped"
        else "local_experts.{expert}.linear_fc2.weight"
    )
    return split(group, _EXPERTS + leaf, 1, etp)


def _stacked_fc1(context: Context, group: ParameterGroup) -> Partition:
    """GroupedMLP.weight1 is declared [H, E * 2 I / etp] but used as (E, H, 2 I / etp): forward() views it so."""
    etp, local = context.mesh.etp, context.architecture.experts // context.mesh.ep
    rows, hidden = group.view[0] // etp, group.view[1]
    halves = 2 if context.architecture.gated else 1
    half = 1 if context.architecture.gated and group.role is Role.EXPERT_UP else 0
    tensor = LocalTensor(_EXPERTS + "weight1", (hidden, local * halves * rows), group.dtype)
    pieces = tuple(
        (Piece(Region((c * rows, 0), ((c + 1) * rows, hidden)), tensor, (0, 0, half, 0), (3, 1),
               (local, hidden, halves, rows), 0),)
        for c in range(etp)
    )  # fmt: skip
    return Partition(pieces)


def _stacked_fc2(context: Context, group: ParameterGroup) -> Partition:
    """GroupedMLP.weight2 is [E * I / etp, H], used as (E, I / etp, H)."""
    etp, local = context.mesh.etp, context.architecture.experts // context.mesh.ep
    hidden, rows = group.view[0], group.view[1] // etp
    tensor = LocalTensor(_EXPERTS + "weight2", (local * rows, hidden), group.dtype)
    pieces = tuple(
        (Piece(Region((0, c * rows), (hidden, (c + 1) * rows)), tensor, (0, 0, 0), (2, 1), (local, rows, hidden), 0),)
        for c in range(etp)
    )
    return Partition(pieces)


def _experts_of_one_tensor(context: Context, group: ParameterGroup) -> Partition | Misc:
    """gpt-oss keeps all experts of a layer in one HF tensor, transposed and with gate and up alternating.

    TEGroupedMLP holds each expert as [gate; up] rows. Source: megatron.bridge GPTOSSMLPGateUpProjMapping and
    GPTOSSMLPDownProjMapping. Megatron refuses expert tensor parallelism for this model (biases in experts).
    """
    if context.build.experts == "stacked":
        return Misc("no layout rule for experts with biases in GroupedMLP")
    local = context.architecture.experts // context.mesh.ep
    return Partition(
        tuple(
            tuple(piece for j in range(local) for piece in _expert_pieces(context, group, ep * local + j, j))
            for ep in range(context.mesh.ep)
        )
    )


def _expert_pieces(context: Context, group: ParameterGroup, expert: int, slot: int) -> list[Piece]:
    linear = "linear_fc1" if group.role in {Role.STACKED_GATE_UP, Role.STACKED_GATE_UP_BIAS} else "linear_fc2"
    kind = "bias" if group.role in {Role.STACKED_GATE_UP_BIAS, Role.STACKED_DOWN_BIAS} else "weight"
    leaf = f"{linear}.{kind}{slot}" if context.build.experts == "grouped" else f"local_experts.{slot}.{linear}.{kind}"
    mine = Region.whole(group.view).within(0, expert, expert + 1)
    sizes = group.view[1:]

    def piece(
        region: Region, shape: tuple[int, ...], view: tuple[int, ...], at: tuple[int, ...], dims: tuple[int, ...]
    ) -> Piece:
        tensor = LocalTensor(_EXPERTS + leaf, shape, group.dtype)
        return Piece(region, tensor, at, dims, view)

    if group.role is Role.STACKED_GATE_UP:  # (E, H, I, 2) -> [2 I, H] = (1, 2, I, H)
        hidden, inner, _ = sizes
        return [
            piece(
                mine.within(3, half, half + 1),
                (2 * inner, hidden),
                (1, 2, inner, hidden),
                (0, half, 0, 0),
                (0, 3, 2, 1),
            )
            for half in range(2)
        ]
    if group.role is Role.STACKED_GATE_UP_BIAS:  # (E, I, 2) -> [2 I] = (1, 2, I)
        inner = sizes[0]
        return [
            piece(mine.within(2, half, half + 1), (2 * inner,), (1, 2, inner), (0, half, 0), (0, 2, 1))
            for half in range(2)
        ]
    if group.role is Role.STACKED_DOWN:  # (E, I, H) -> [H, I] = (1, H, I)
        inner, hidden = sizes
        return [piece(mine, (hidden, inner), (1, hidden, inner), (0, 0, 0), (0, 2, 1))]
    return [piece(mine, sizes, (1, *sizes), (0, 0), (0, 1))]  # (E, H) -> [H]


# --- Mamba: megatron.core.ssm.mamba_mixer.MambaMixer


def _mamba_rows(sections_of: Callable[[Mamba], tuple[int, ...]], path: str) -> Rule:
    """Sections (z, x, B, C, dt or x, B, C) are each cut by tp and kept one after another on every rank."""

    def rule(context: Context, group: ParameterGroup) -> Partition:
        tp, mamba = context.mesh.tp, context.architecture.mamba
        assert mamba is not None
        sections = sections_of(mamba)
        runs = []
        for c in range(tp):
            held, start, at = [], 0, 0
            for rows in sections:
                held.append(RowRange(start + c * (rows // tp), rows // tp, at))
                start, at = start + rows, at + rows // tp
            runs.append(tuple(held))
        return runs_along(group, _LAYER + path, 0, sum(sections) // tp, runs)

    return rule


def _expert_bias(context: Context, group: ParameterGroup) -> Partition:
    """TopKRouter.expert_bias: a persistent buffer, replicated, and kept in fp32."""
    return whole(replace(group, dtype="float32"), _LAYER + "mlp.router.expert_bias")


RULES: Mapping[Role, Rule] = {
    Role.EMBEDDING: _embedding,
    Role.LM_HEAD: _lm_head,
    Role.ATTENTION_NORM: _attention_norm,
    Role.MLP_NORM: _mlp_norm,
    Role.MOE_NORM: _replicated("pre_mlp_layernorm.weight"),
    Role.MAMBA_NORM: _replicated("mixer.in_proj.layer_norm_weight"),
    Role.Q: _fused_qkv,
    Role.K: _fused_qkv,
    Role.V: _fused_qkv,
    Role.Q_BIAS: _fused_qkv,
    Role.K_BIAS: _fused_qkv,
    Role.V_BIAS: _fused_qkv,
    Role.O: _cut("self_attention.linear_proj.weight", 1),
    Role.O_BIAS: _replicated("self_attention.linear_proj.bias"),
    Role.Q_NORM: _replicated("self_attention.q_layernorm.weight"),
    Role.K_NORM: _replicated("self_attention.k_layernorm.weight"),
    Role.SINKS: _cut("self_attention.core_attention.softmax_offset", 0),
    Role.MLA_Q: _cut("self_attention.linear_q_proj.weight", 0),
    Role.MLA_Q_A: _replicated("self_attention.linear_q_down_proj.weight"),
    Role.MLA_Q_A_NORM: _mla_norm("linear_q_up_proj", "q_layernorm"),
    Role.MLA_Q_B: _cut("self_attention.linear_q_up_proj.weight", 0),
    Role.MLA_KV_A: _replicated("self_attention.linear_kv_down_proj.weight"),
    Role.MLA_KV_A_NORM: _mla_norm("linear_kv_up_proj", "kv_layernorm"),
    Role.MLA_KV_B: _cut("self_attention.linear_kv_up_proj.weight", 0),
    Role.MLA_O: _cut("self_attention.linear_proj.weight", 1),
    Role.GATE: _gate_up("mlp.linear_fc1.weight"),
    Role.UP: _gate_up("mlp.linear_fc1.weight"),
    Role.DOWN: _cut("mlp.linear_fc2.weight", 1),
    Role.ROUTER: _replicated("mlp.router.weight"),
    Role.ROUTER_BIAS: _replicated("mlp.router.bias"),
    Role.EXPERT_BIAS: _expert_bias,
    Role.EXPERT_GATE: _expert_fc1,
    Role.EXPERT_UP: _expert_fc1,
    Role.EXPERT_DOWN: _expert_fc2,
    Role.SHARED_GATE: _gate_up("mlp.shared_experts.linear_fc1.weight"),
    Role.SHARED_UP: _gate_up("mlp.shared_experts.linear_fc1.weight"),
    Role.SHARED_DOWN: _cut("mlp.shared_experts.linear_fc2.weight", 1),
    Role.STACKED_GATE_UP: _experts_of_one_tensor,
    Role.STACKED_GATE_UP_BIAS: _experts_of_one_tensor,
    Role.STACKED_DOWN: _experts_of_one_tensor,
    Role.STACKED_DOWN_BIAS: _experts_of_one_tensor,
    Role.MAMBA_IN: _mamba_rows(lambda mamba: mamba.in_sections, "mixer.in_proj.weight"),
    Role.MAMBA_CONV: _mamba_rows(lambda mamba: mamba.conv_sections, "mixer.conv1d.weight"),
    Role.MAMBA_CONV_BIAS: _mamba_rows(lambda mamba: mamba.conv_sections, "mixer.conv1d.bias"),
    Role.MAMBA_A_LOG: _cut("mixer.A_log", 0),
    Role.MAMBA_D: _cut("mixer.D", 0),
    Role.MAMBA_DT_BIAS: _cut("mixer.dt_bias", 0),
    Role.MAMBA_GATE_NORM: _cut("mixer.norm.weight", 0),
    Role.MAMBA_OUT: _cut("mixer.out_proj.weight", 1),
}

_EXPERT_ROLES = {Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN}
_STACKED_ROLES = {Role.STACKED_GATE_UP, Role.STACKED_GATE_UP_BIAS, Role.STACKED_DOWN, Role.STACKED_DOWN_BIAS}
_NORM_ROLES = {role for role in Role if role.value.endswith("norm")}


class MegatronLayout(Layout):
    """The training side of a plan: a model, a mesh and how the model was built."""

    name = "megatron"

    def __init__(
        self,
        model_parameters: ModelParameters,
        mesh: TrainMesh,
        build: MegatronBuild = MegatronBuild(),  # noqa: B008
    ) -> None:
        self._context = Context(model_parameters.architecture, mesh, build)
        self._dtype = model_parameters.dtype

    @property
    def _hybrid(self) -> bool:
        """megatron.core.models.mamba.MambaModel: also where the pattern has no Mamba layer."""
        return self._context.architecture.family == "nemotron_h"

    def violations(self) -> list[str]:
        architecture, mesh = self._context.architecture, self._context.mesh
        found = []
        try:
            counts = mesh.chunk_layers(architecture.layers)
            if self._hybrid and (len(set(counts[1:-1])) > 1 or not (counts[0] and counts[-1])):
                found.append(
                    f"layers {'+'.join(map(str, counts))}: Megatron-Core's hybrid (Mamba) pipelines hold layers on every stage"
                    " and differ only in the first and the last"
                )
        except MeshError as error:
            found += error.violations
        attention, tp = architecture.attention, mesh.tp
        found += _indivisible(f"{attention.heads} attention heads", attention.heads, "tp", tp)
        if isinstance(attention, Attention) and attention.kv_heads % tp and tp % attention.kv_heads:
            found.append(f"{attention.kv_heads} KV heads are neither a multiple nor a divisor of tp = {tp}")
        elif isinstance(attention, Attention):
            rows = (attention.heads + 2 * attention.kv_heads) * attention.head_dim
            found += _indivisible(f"linear_qkv's {rows} rows", rows, "tp", tp)
        found += _indivisible(f"MLP width {architecture.intermediate}", architecture.intermediate, "tp", tp)
        found += _indivisible(
            f"shared expert width {architecture.shared_intermediate}", architecture.shared_intermediate, "tp", tp
        )
        if architecture.experts:
            found += _indivisible(f"{architecture.experts} experts", architecture.experts, "ep", mesh.ep)
            width = architecture.expert_intermediate
            found += _indivisible(f"expert width {width}", width, "etp", mesh.etp)
        elif mesh.ep > 1 or mesh.etp > 1:
            found.append(
                f"ep = {mesh.ep}, etp = {mesh.etp} want a model with experts, {architecture.family} has none here"
            )
        if architecture.family == "gpt_oss" and mesh.etp > 1:
            found.append(f"etp = {mesh.etp}: Megatron-Core has experts with biases at etp = 1 only")
        if self._hybrid and mesh.vpp > 1:
            found.append(f"vpp = {mesh.vpp}: Megatron-Core does not interleave hybrid (Mamba) models")
        if architecture.mamba is not None:
            found += _mamba_misfits(architecture.mamba, mesh)
        if self._context.padded_vocab % tp or self._context.padded_vocab < architecture.vocab:
            found.append(
                f"padded vocabulary {self._context.padded_vocab} must be at least {architecture.vocab} and divisible by"
                f" tp = {tp}"
            )
        return [f"training: {violation}" for violation in found]

    def place(self, group: ParameterGroup) -> tuple[PartitionOwners, ...] | Misc | Excluded:
        # Float16Module casts every parameter to the model's dtype, whatever the checkpoint says.
        group = replace(group, dtype=self._dtype)
        if group.role is Role.FINAL_NORM:
            leaf = "final_norm" if self._hybrid else "final_layernorm"
            partition: Partition | Misc = whole(group, f"vp{{vp}}.decoder.{leaf}.weight")
        elif (rule := RULES.get(group.role)) is None:
            return Misc(f"no layout rule for {group.role.value!r} in Megatron-Core")
        else:
            partition = rule(self._context, group)
        if isinstance(partition, Misc):
            return partition
        if self._context.architecture.zero_centered_norms and group.role in _NORM_ROLES:
            return Misc("zero-centered norm: the trainer holds w - 1, which is not a byte copy")
        return (
            self._expert_placements(group, partition)
            if group.role in _EXPERT_ROLES
            else self._placements(group, partition)
        )

    def misquantized(self) -> list[str]:
        return []

    def scales(self, group: ParameterGroup, partition: Partition, form: Format) -> Partition | Misc:
        return te_scales(group, partition, form)

    def _placements(self, group: ParameterGroup, partition: Partition) -> tuple[PartitionOwners, ...]:
        mesh = self._context.mesh
        owner_sets = []
        for pp_stage, layers in self._stages(group).items():
            if group.role in _STACKED_ROLES:
                ranks = mesh.expert_ranks(pp_stage).reshape(mesh.ep, -1)
            elif len(partition.pieces) == 1:
                ranks = mesh.dense_ranks(pp_stage).reshape(1, -1)
            else:
                ranks = mesh.dense_ranks(pp_stage)
            owner_sets.append(PartitionOwners(partition, ranks, pp_stage, layers))
        return tuple(owner_sets)

    def _expert_placements(self, group: ParameterGroup, partition: Partition) -> tuple[PartitionOwners, ...]:
        """Local experts of expert-parallel rank e are the contiguous block e (megatron.core MoELayer.local_expert_indices)."""
        mesh = self._context.mesh
        local = group.experts // mesh.ep
        return tuple(
            PartitionOwners(partition, ranks, pp_stage, layers, (ep * local, (ep + 1) * local))
            for pp_stage, layers in self._stages(group).items()
            for ep, ranks in enumerate(mesh.expert_ranks(pp_stage))
        )

    def _stages(self, group: ParameterGroup) -> dict[int, tuple[LayerPlace, ...]]:
        """The group's layers by pipeline stage.

        The embedding sits in the first chunk, the head in the last, the final norm in the last chunk too, or with the
        last decoder layer when there are multi-token-prediction layers (TransformerBlock.has_final_layernorm_in_this_stage).
        A tied head on the last stage is a copy that Megatron keeps equal to the embedding; it is never the source.
        """
        architecture, mesh = self._context.architecture, self._context.mesh
        places = mesh.place_layers(architecture.layers)
        if group.layers:
            stages: dict[int, list[LayerPlace]] = {}
            for layer in group.layers:
                stages.setdefault(places[layer].pp_stage, []).append(places[layer])
            return {stage: tuple(layers) for stage, layers in sorted(stages.items())}
        if group.role is Role.EMBEDDING:
            return {0: (LayerPlace(-1, 0, 0, -1),)}
        if group.role is Role.FINAL_NORM and architecture.mtp_layers:
            return {places[-1].pp_stage: (LayerPlace(-1, places[-1].pp_stage, places[-1].vp_stage, -1),)}
        return {mesh.pp - 1: (LayerPlace(-1, mesh.pp - 1, mesh.vpp - 1, -1),)}


def _indivisible(what: str, size: int, axis: str, degree: int) -> list[str]:
    return [f"{what} cannot be divided by {axis} = {degree}"] if size % degree else []


def _mamba_misfits(mamba: Mamba, mesh: TrainMesh) -> list[str]:
    """Why Mamba layers cannot be cut: MambaMixer over tp, MambaContextParallel over cp within it."""
    found = _indivisible(f"{mamba.heads} Mamba heads", mamba.heads, "tp", mesh.tp)
    found += _indivisible(f"{mamba.groups} Mamba groups", mamba.groups, "tp", mesh.tp)
    if found or mesh.cp == 1:
        return found
    heads, groups = mamba.heads // mesh.tp, mamba.groups // mesh.tp
    found += _indivisible(f"{heads} Mamba heads on each tp rank", heads, "cp", mesh.cp)
    if groups % mesh.cp and mesh.cp % groups:
        found.append(f"{groups} Mamba groups on each tp rank are neither a multiple nor a divisor of cp = {mesh.cp}")
    return found
