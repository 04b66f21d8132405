"""Where a vLLM rank keeps each parameter (bf16 forms, vLLM 0.26 to 0.33): one function a rule, keyed by role.

Every rule names the file under vllm/model_executor that it mirrors. Layouts that change after loading (MLA's W_UV and
W_UK_T) are recomputed by the engine adapter, not moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mcore_reshard.planner.model.parameters import (
    Architecture,
    Attention,
    LatentAttention,
    Mamba,
    ModelParameters,
    ParameterGroup,
    Role,
)
from mcore_reshard.planner.model.precision import Format

from .engines import Transposed
from .geometry import LocalTensor, Piece, Region
from .mesh import GenMesh, LayerPlace
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
from .vllm_scales import misquantized, vllm_scales

_VOCAB_PADDING = 64  # layers/vocab_parallel_embedding.py DEFAULT_VOCAB_PADDING_SIZE
_LAYER = "model.layers.{layer}."
_ROUTED = "experts.routed_experts."


@dataclass(frozen=True, slots=True)
class _Context:
    architecture: Architecture
    mesh: GenMesh
    dtype: str

    @property
    def expert_tp(self) -> int:
        """Experts are cut by tp, or kept whole under expert parallelism."""
        return self.mesh.tp if self.mesh.ep == 1 else 1

    @property
    def shared_experts_replicated(self) -> bool:
        """vllm/config/parallel.py use_sequence_parallel_moe: expert parallelism with tp and dp both above 1."""
        return self.mesh.ep > 1 and self.mesh.tp > 1 and self.mesh.dp > 1


Rule = Callable[[_Context, ParameterGroup, int], Partition | Misc]  # the int: local experts of the rank


def _family(context: _Context) -> str:
    return context.architecture.family


def _attention(context: _Context) -> str:
    return _LAYER + {"nemotron_h": "mixer.", "gpt_oss": "attn."}.get(_family(context), "self_attn.")


def _mlp(context: _Context) -> str:
    return _LAYER + ("mixer." if _family(context) == "nemotron_h" else "mlp.")


# --- vocabulary: layers/vocab_parallel_embedding.py


def padded_vocab(vocab: int) -> int:
    return -(-vocab // _VOCAB_PADDING) * _VOCAB_PADDING


def _embedding(context: _Context, group: ParameterGroup, _: int) -> Partition:
    name = "model.embedding.weight" if _family(context) == "gpt_oss" else "model.embed_tokens.weight"
    return padded_rows(group, name, padded_vocab(context.architecture.vocab), context.mesh.tp)


def _lm_head(context: _Context, group: ParameterGroup, _: int) -> Partition:
    return padded_rows(group, "lm_head.weight", padded_vocab(context.architecture.vocab), context.mesh.tp)


def _final_norm(context: _Context, group: ParameterGroup, _: int) -> Partition:
    return whole(group, "model.norm_f.weight" if _family(context) == "nemotron_h" else "model.norm.weight")


def _norm(leaf: str) -> Rule:
    """Replicated; Nemotron-H has one norm a layer, named so (models/nemotron_h.py)."""
    return lambda context, group, _: whole(
        group, _LAYER + ("norm.weight" if _family(context) == "nemotron_h" else f"{leaf}.weight")
    )


# --- attention: layers/linear.py QKVParallelLinear


def _qkv(context: _Context, group: ParameterGroup, _: int) -> Partition:
    """Rows [q_r; k_r; v_r]; with more ranks than KV heads, rank r holds head r // (tp / kv_heads), so neighbors replicate."""
    attention, tp = context.architecture.attention, context.mesh.tp
    assert isinstance(attention, Attention)
    q_rows = attention.heads // tp * attention.head_dim
    kv_rows = max(1, attention.kv_heads // tp) * attention.head_dim
    copies = max(1, tp // attention.kv_heads)
    runs: list[tuple[RowRange, ...]] = []
    for r in range(tp):
        if group.role in {Role.Q, Role.Q_BIAS}:
            runs.append((RowRange(r * q_rows, q_rows, 0),))
        else:
            at = q_rows + (kv_rows if group.role in {Role.V, Role.V_BIAS} else 0)
            runs.append((RowRange(r // copies * kv_rows, kv_rows, at),))
    leaf = "weight" if len(group.shape) == 2 else "bias"
    return runs_along(group, _attention(context) + f"qkv_proj.{leaf}", 0, q_rows + 2 * kv_rows, runs)


def _attention_cut(leaf: str, dim: int) -> Rule:
    return lambda context, group, _: split(group, _attention(context) + leaf, dim, context.mesh.tp)


def _attention_whole(leaf: str) -> Rule:
    return lambda context, group, _: whole(group, _attention(context) + leaf)


# --- latent attention: models/deepseek_v2.py


def _latent_a(context: _Context, group: ParameterGroup, _: int) -> Partition:
    """fused_qkv_a_proj = [q_a; kv_a_with_mqa], replicated (DeepSeekV2FusedQkvAProjLinear, disable_tp)."""
    attention = context.architecture.attention
    assert isinstance(attention, LatentAttention)
    if not attention.q_lora_rank:
        return whole(group, _attention(context) + "kv_a_proj_with_mqa.weight")
    kv_rows = attention.kv_lora_rank + attention.qk_rope_dim
    at = 0 if group.role is Role.MLA_Q_A else attention.q_lora_rank
    run = (RowRange(0, group.view[0], at),)
    return runs_along(group, _attention(context) + "fused_qkv_a_proj.weight", 0, attention.q_lora_rank + kv_rows, [run])


# --- MLP: layers/linear.py MergedColumnParallelLinear


def _gate_up(context: _Context, group: ParameterGroup, _: int) -> Partition:
    if not context.architecture.gated:
        return split(group, _mlp(context) + "up_proj.weight", 0, context.mesh.tp)
    return gate_up(group, _mlp(context) + "gate_up_proj.weight", context.mesh.tp, gated=True)


def _mlp_cut(leaf: str, dim: int) -> Rule:
    return lambda context, group, _: split(group, _mlp(context) + leaf, dim, context.mesh.tp)


def _mlp_whole(leaf: str) -> Rule:
    return lambda context, group, _: whole(group, _mlp(context) + leaf)


def _shared_fc1(context: _Context, group: ParameterGroup, _: int) -> Partition:
    tp = 1 if context.shared_experts_replicated else context.mesh.tp
    gated = context.architecture.gated
    name = _mlp(context) + f"shared_experts.{'gate_up_proj' if gated else 'up_proj'}.weight"
    return gate_up(group, name, tp, gated)


def _shared_fc2(context: _Context, group: ParameterGroup, _: int) -> Partition:
    tp = 1 if context.shared_experts_replicated else context.mesh.tp
    return split(group, _mlp(context) + "shared_experts.down_proj.weight", 1, tp)


# --- experts: layers/fused_moe/layer.py FusedMoE


def _expert_fc1(context: _Context, group: ParameterGroup, local: int) -> Partition:
    """w13 is (E, 2 I / tp, H) = [gate_r; up_r] per expert, or (E, I / tp, H) without a gate."""
    name = _mlp(context) + _ROUTED + "w13_weight"
    return gate_up(group, name, context.expert_tp, context.architecture.gated, local)


def _expert_fc2(context: _Context, group: ParameterGroup, local: int) -> Partition:
    """w2 is (E, H, I / tp)."""
    return split(group, _mlp(context) + _ROUTED + "w2_weight", 1, context.expert_tp, local)


def _stacked(context: _Context, group: ParameterGroup, _: int) -> Partition | Misc:
    """gpt-oss in bf16 (models/gpt_oss.py _load_weights_other): w13 rows keep gate and up alternating, transposed from HF."""
    tp, ep = context.expert_tp, context.mesh.ep
    if group.role is Role.STACKED_DOWN_BIAS and tp > 1:
        return Misc("w2_bias is whole on tensor-parallel rank 0 and zero on the others: not a byte copy")
    local = context.architecture.experts // ep
    partition = []
    for c in range(max(tp, ep)):
        part, first = (c, 0) if ep == 1 else (0, c * local)
        partition.append((_stacked_piece(context, group, part, tp, first, local),))
    return Partition(tuple(partition))


def _stacked_piece(context: _Context, group: ParameterGroup, part: int, tp: int, first: int, local: int) -> Piece:
    mine = Region.whole(group.view).within(0, first, first + local)
    path = _mlp(context) + _ROUTED
    sizes = group.view[1:]
    if group.role is Role.STACKED_GATE_UP:  # (E, H, I, 2) -> (E, I / tp, 2, H) stored as [E, 2 I / tp, H]
        hidden, inner = sizes[0], sizes[1] // tp
        tensor = LocalTensor(path + "w13_weight", (local, 2 * inner, hidden), group.dtype)
        region = mine.within(2, part * inner, (part + 1) * inner)
        return Piece(region, tensor, (0, 0, 0, 0), (0, 3, 1, 2), (local, inner, 2, hidden))
    if group.role is Role.STACKED_GATE_UP_BIAS:  # (E, I, 2) -> [E, 2 I / tp]
        inner = sizes[0] // tp
        tensor = LocalTensor(path + "w13_bias", (local, 2 * inner), group.dtype)
        return Piece(mine.within(1, part * inner, (part + 1) * inner), tensor, (0, 0, 0), (0, 1, 2), (local, inner, 2))
    if group.role is Role.STACKED_DOWN:  # (E, I, H) -> [E, H, I / tp]
        inner, hidden = sizes[0] // tp, sizes[1]
        tensor = LocalTensor(path + "w2_weight", (local, hidden, inner), group.dtype)
        return Piece(mine.within(1, part * inner, (part + 1) * inner), tensor, (0, 0, 0), (0, 2, 1))
    tensor = LocalTensor(path + "w2_bias", (local, *sizes), group.dtype)  # (E, H)
    return Piece(mine, tensor, (0, 0), (0, 1))


# --- Mamba2: layers/mamba/mamba_mixer2.py


def _mamba_rows(sections_of: Callable[[Mamba], tuple[int, ...]], leaf: str) -> Rule:
    """Sections cut by tp one after another; with a single group, B and C are whole on every rank."""

    def rule(context: _Context, group: ParameterGroup, _: int) -> Partition:
        mamba, tp = context.architecture.mamba, context.mesh.tp
        assert mamba is not None
        sections = sections_of(mamba)
        shared = mamba.groups * mamba.state if mamba.groups == 1 and tp > 1 else 0  # rows of B and of C kept whole
        first_shared = len(sections) - (3 if leaf.startswith("in_proj") else 2)
        runs, local_rows = [], 0
        for c in range(tp):
            held, start, at = [], 0, 0
            for index, rows in enumerate(sections):
                is_shared = shared and index in {first_shared, first_shared + 1}
                mine = rows if is_shared else rows // tp
                held.append(RowRange(start if is_shared else start + c * mine, mine, at))
                start, at = start + rows, at + mine
            runs.append(tuple(held))
            local_rows = at
        return runs_along(group, _LAYER + "mixer." + leaf, 0, local_rows, runs)

    return rule


def _mamba_a(context: _Context, group: ParameterGroup, _: int) -> Misc:
    return Misc("vLLM stores A = -exp(A_log): not a byte copy")


def _model_dtype(leaf: str) -> Rule:
    """D and dt_bias are cut by heads and kept in the model's dtype, also where the checkpoint has fp32."""
    return lambda context, group, _: split(replace(group, dtype=context.dtype), _LAYER + leaf, 0, context.mesh.tp)


def _expert_bias(context: _Context, group: ParameterGroup, _: int) -> Partition:
    return whole(replace(group, dtype="float32"), _mlp(context) + "gate.e_score_correction_bias")


def _router(context: _Context, group: ParameterGroup, _: int) -> Partition | Misc:
    """A plain replicated linear; Nemotron-H's GateLinear keeps fp32 where it has no bf16 kernel."""
    if _family(context) == "nemotron_h":
        return Misc("the engine keeps this router in float32 or bfloat16 depending on the device")
    return whole(group, _mlp(context) + ("router.weight" if _family(context) == "gpt_oss" else "gate.weight"))


RULES: Mapping[Role, Rule] = {
    Role.EMBEDDING: _embedding,
    Role.LM_HEAD: _lm_head,
    Role.FINAL_NORM: _final_norm,
    Role.ATTENTION_NORM: _norm("input_layernorm"),
    Role.MLP_NORM: _norm("post_attention_layernorm"),
    Role.MOE_NORM: _norm("post_attention_layernorm"),
    Role.MAMBA_NORM: _norm("norm"),
    Role.Q: _qkv,
    Role.K: _qkv,
    Role.V: _qkv,
    Role.Q_BIAS: _qkv,
    Role.K_BIAS: _qkv,
    Role.V_BIAS: _qkv,
    Role.O: _attention_cut("o_proj.weight", 1),
    Role.O_BIAS: _attention_whole("o_proj.bias"),
    Role.Q_NORM: _attention_whole("q_norm.weight"),
    Role.K_NORM: _attention_whole("k_norm.weight"),
    Role.SINKS: _attention_cut("sinks", 0),
    Role.MLA_Q: _attention_cut("q_proj.weight", 0),
    Role.MLA_Q_A: _latent_a,
    Role.MLA_Q_A_NORM: _attention_whole("q_a_layernorm.weight"),
    Role.MLA_Q_B: _attention_cut("q_b_proj.weight", 0),
    Role.MLA_KV_A: _latent_a,
    Role.MLA_KV_A_NORM: _attention_whole("kv_a_layernorm.weight"),
    Role.MLA_KV_B: _attention_cut("kv_b_proj.weight", 0),
    Role.MLA_O: _attention_cut("o_proj.weight", 1),
    Role.GATE: _gate_up,
    Role.UP: _gate_up,
    Role.DOWN: _mlp_cut("down_proj.weight", 1),
    Role.ROUTER: _router,
    Role.ROUTER_BIAS: _mlp_whole("router.bias"),
    Role.EXPERT_BIAS: _expert_bias,
    Role.EXPERT_GATE: _expert_fc1,
    Role.EXPERT_UP: _expert_fc1,
    Role.EXPERT_DOWN: _expert_fc2,
    Role.SHARED_GATE: _shared_fc1,
    Role.SHARED_UP: _shared_fc1,
    Role.SHARED_DOWN: _shared_fc2,
    Role.STACKED_GATE_UP: _stacked,
    Role.STACKED_GATE_UP_BIAS: _stacked,
    Role.STACKED_DOWN: _stacked,
    Role.STACKED_DOWN_BIAS: _stacked,
    Role.MAMBA_IN: _mamba_rows(lambda mamba: mamba.in_sections, "in_proj.weight"),
    Role.MAMBA_CONV: _mamba_rows(lambda mamba: mamba.conv_sections, "conv1d.weight"),
    Role.MAMBA_CONV_BIAS: _mamba_rows(lambda mamba: mamba.conv_sections, "conv1d.bias"),
    Role.MAMBA_A_LOG: _mamba_a,
    Role.MAMBA_D: _model_dtype("mixer.D"),
    Role.MAMBA_DT_BIAS: _model_dtype("mixer.dt_bias"),
    Role.MAMBA_GATE_NORM: _mlp_cut("norm.weight", 0),
    Role.MAMBA_OUT: _mlp_cut("out_proj.weight", 1),
}

_EXPERT_ROLES = {Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN}
_STACKED_ROLES = {Role.STACKED_GATE_UP, Role.STACKED_GATE_UP_BIAS, Role.STACKED_DOWN, Role.STACKED_DOWN_BIAS}
# Families whose embedding, final norm and head are built and loaded on every pipeline stage.
_ENDS_EVERYWHERE = {"nemotron_h", "gpt_oss", "qwen3_moe"}
_NEVER_TIED = {"deepseek_v3", "kimi_k2", "gpt_oss", "nemotron_h"}  # their lm_head is a tensor of its own
_NO_O_BIAS = {"qwen3", "qwen3_moe"}  # their loaders drop it without a word


class VllmLayout(Layout):
    """The generation side of a plan: a model on a vLLM mesh."""

    name = "vllm"

    def __init__(self, model_parameters: ModelParameters, mesh: GenMesh) -> None:
        self._model_parameters = model_parameters
        self._context = _Context(model_parameters.architecture, mesh, model_parameters.dtype)
        self._roles = {group.role for group in model_parameters.groups}
        self._expert_layers = {
            layer for group in model_parameters.groups if group.role in _EXPERT_ROLES for layer in group.layers
        }

    def violations(self) -> list[str]:
        architecture, mesh = self._context.architecture, self._context.mesh
        attention, tp = architecture.attention, mesh.tp
        sizes = [(f"{attention.heads} attention heads", attention.heads)]
        sizes += [(f"MLP width {architecture.intermediate}", architecture.intermediate)]
        if not self._context.shared_experts_replicated:
            sizes += [(f"shared expert width {architecture.shared_intermediate}", architecture.shared_intermediate)]
        if mesh.ep == 1:
            sizes += [(f"expert width {architecture.expert_intermediate}", architecture.expert_intermediate)]
        sizes += [(f"vocabulary padded to {padded_vocab(architecture.vocab)} rows", padded_vocab(architecture.vocab))]
        mamba = architecture.mamba
        if mamba is not None:
            sizes += [(f"{mamba.heads} Mamba heads", mamba.heads)]
            if mamba.groups > 1:
                sizes += [(f"{mamba.groups} Mamba groups", mamba.groups)]
        found = [f"{what} cannot be divided by tp = {tp}" for what, size in sizes if size % tp]
        if isinstance(attention, Attention) and attention.kv_heads % tp:
            if architecture.family == "gpt_oss":  # models/gpt_oss.py divides its KV heads without replicating them
                found.append(f"{attention.kv_heads} KV heads cannot be divided by tp = {tp}")
            elif tp % attention.kv_heads:
                found.append(f"{attention.kv_heads} KV heads are neither a multiple nor a divisor of tp = {tp}")
        if mesh.ep > 1 and not architecture.experts:
            found.append(f"ep = {mesh.ep} wants a model with experts, {architecture.family} has none here")
        if mesh.ep > architecture.experts > 0:
            found.append(f"ep = {mesh.ep} exceeds the {architecture.experts} experts")
        if architecture.family == "gpt_oss" and architecture.experts % mesh.ep:  # its loader drops those left over
            found.append(f"{architecture.experts} experts cannot be divided by ep = {mesh.ep}")
        if architecture.family == "gpt_oss" and architecture.expert_intermediate % (
            ranks := mesh.world // (1 if mesh.ep > 1 else mesh.dp)
        ):
            found.append(
                f"expert width {architecture.expert_intermediate} cannot be divided by the engine's {ranks} ranks"
            )
        found += self._stages_without_experts()
        if architecture.tied and architecture.family in _NEVER_TIED:
            found.append(f"vLLM's {architecture.family} does not tie word embeddings")
        if Role.O_BIAS in self._roles and architecture.family in _NO_O_BIAS:
            found.append(f"vLLM's {architecture.family} has no o_proj.bias, which attention_bias brings")
        if mesh.pp > architecture.layers:
            found.append(f"pp = {mesh.pp} exceeds the {architecture.layers} layers")
        return [f"generation: {violation}" for violation in found]

    def _stages_without_experts(self) -> list[str]:
        """models/qwen3_moe.py and models/nemotron_h.py look for a mixture of experts on every pipeline stage."""
        architecture, mesh = self._context.architecture, self._context.mesh
        if (
            architecture.family not in {"qwen3_moe", "nemotron_h"}
            or not architecture.experts
            or mesh.pp > architecture.layers
        ):
            return []
        stage_of = mesh.stage_of_layers(architecture.layers)
        missing = sorted(set(range(mesh.pp)) - {stage_of[layer] for layer in self._expert_layers})
        return [
            f"pipeline stage {stage} of pp = {mesh.pp} has no mixture of experts, vLLM wants one on each"
            for stage in missing
        ]

    def place(self, group: ParameterGroup) -> tuple[PartitionOwners, ...] | Misc | Excluded:
        if group.mtp:
            return Excluded("vLLM's main model does not load multi-token-prediction layers")
        if (rule := RULES.get(group.role)) is None:
            return Misc(f"no layout rule for {group.role.value!r} in vLLM")
        if group.role in _EXPERT_ROLES:
            return self._expert_placements(group, rule)
        partition = rule(self._context, group, 0)
        if isinstance(partition, Misc):
            return partition
        return tuple(
            PartitionOwners(partition, self._ranks(group, partition, pp_stage), pp_stage, layers)
            for pp_stage, layers in self._stages(group).items()
        )

    def misquantized(self) -> list[str]:
        return misquantized(self._model_parameters)

    def scales(self, group: ParameterGroup, partition: Partition, form: Format) -> Partition | Misc:
        return vllm_scales(group, partition, form)

    def _ranks(self, group: ParameterGroup, partition: Partition, pp_stage: int):  # type: ignore[no-untyped-def]
        mesh = self._context.mesh
        if group.role in _STACKED_ROLES and mesh.ep > 1:
            return mesh.expert_ranks(pp_stage).reshape(mesh.ep, 1)
        dense = mesh.dense_ranks(pp_stage)
        return dense.reshape(1, -1) if len(partition.pieces) == 1 else dense

    def _expert_placements(self, group: ParameterGroup, rule: Rule) -> tuple[PartitionOwners, ...] | Misc:
        """Linear placement: experts left over go to the first ranks (layers/fused_moe/expert_map_manager.py)."""
        mesh = self._context.mesh
        base, left = divmod(group.experts, mesh.ep)
        partition_of = {local: rule(self._context, group, local) for local in {base, base + bool(left)}}
        owner_sets = []
        for pp_stage, layers in self._stages(group).items():
            ranks = mesh.dense_ranks(pp_stage) if mesh.ep == 1 else mesh.expert_ranks(pp_stage)
            for ep in range(mesh.ep):
                first, local = ep * base + min(ep, left), base + (ep < left)
                partition = partition_of[local]
                if isinstance(partition, Misc):
                    return partition
                held = ranks if mesh.ep == 1 else ranks[ep : ep + 1, None]
                if mesh.ep == 1 and len(partition.pieces) == 1:
                    held = held.reshape(1, -1)
                owner_sets.append(PartitionOwners(partition, held, pp_stage, layers, (first, first + local)))
        return tuple(owner_sets)

    def _stages(self, group: ParameterGroup) -> dict[int, tuple[LayerPlace, ...]]:
        """The group's layers by pipeline stage; names carry the model-wide layer number."""
        architecture, mesh = self._context.architecture, self._context.mesh
        if group.layers:
            stage_of = mesh.stage_of_layers(architecture.layers)
            stages: dict[int, list[LayerPlace]] = {}
            for layer in group.layers:
                stages.setdefault(stage_of[layer], []).append(LayerPlace(layer, stage_of[layer], 0, layer))
            return {stage: tuple(layers) for stage, layers in sorted(stages.items())}
        if architecture.family in _ENDS_EVERYWHERE:
            held = range(mesh.pp)
        elif group.role is Role.EMBEDDING:
            held = range(0, mesh.pp, max(1, mesh.pp - 1)) if architecture.tied else range(1)
        else:
            held = range(mesh.pp - 1, mesh.pp)
        return {stage: (LayerPlace(-1, stage, 0, -1),) for stage in held}


LAYOUT = VllmLayout
# gpt-oss experts are [expert, out, in] where HF has [expert, in, out]; gate and up rows alternate as HF's columns do.
TRANSPOSED: Transposed = {
    (Role.STACKED_GATE_UP, 4): (0, 3, 1, 2),
    (Role.STACKED_GATE_UP_BIAS, 3): (0, 1, 2),
    (Role.STACKED_DOWN, 3): (0, 2, 1),
}
