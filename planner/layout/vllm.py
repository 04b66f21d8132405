"""vLLM as the engine: which ranks hold each group, whether the mesh can hold the model, and what else a plan asks of it.

How one parameter is cut stands in vllm_rules.py, where scales lie in vllm_scales.py, and which matrices are quantized in
vllm_quantized.py. Files named here are under vllm/model_executor of vLLM 0.32.
"""

from __future__ import annotations

from mcore_reshard.planner.model.parameters import (
    EXPERT_ROLES,
    STACKED_ROLES,
    Attention,
    ModelParameters,
    ParameterGroup,
    Role,
)
from mcore_reshard.planner.model.precision import Format

from .engines import Engine
from .mesh import GenMesh, LayerPlace, MeshError
from .partitions import Excluded, Layout, Misc, Partition, PartitionOwners, layers_by_stage, ranks_of_parts
from .vllm_quantized import misquantized, quantizes
from .vllm_rules import RULES, Context, Rule, padded_vocab
from .vllm_scales import CHECKPOINT_BLOCKS, notes, vllm_scales

# Families whose embedding, final norm and head are built and loaded on every pipeline stage.
_ENDS_EVERYWHERE = {"nemotron_h", "gpt_oss", "qwen3_moe"}
_NEVER_TIED = {"deepseek_v3", "kimi_k2", "gpt_oss", "nemotron_h"}  # their lm_head is a tensor of its own
_NO_O_BIAS = {"qwen3", "qwen3_moe"}  # their loaders drop it without a word


class VllmLayout(Layout):
    """The generation side of a plan: a model on a vLLM mesh."""

    name = "vllm"

    def __init__(self, model: ModelParameters, mesh: GenMesh) -> None:
        self._context = Context(model.architecture, mesh, model.dtype)
        self._groups = model.groups

    def violations(self) -> list[str]:
        architecture, mesh = self._context.architecture, self._context.mesh
        family, experts = architecture.family, architecture.experts
        violations = [f"{what} cannot be divided by tp = {mesh.tp}" for what, size in self._sizes() if size % mesh.tp]
        violations += self._kv_head_violations()
        if mesh.ep > 1 and not experts:
            violations.append(f"ep = {mesh.ep} wants a model with experts, {family} has none here")
        if mesh.ep > experts > 0:
            violations.append(f"ep = {mesh.ep} exceeds the {experts} experts")
        if family == "gpt_oss":
            if experts % mesh.ep:  # its loader drops those left over
                violations.append(f"{experts} experts cannot be divided by ep = {mesh.ep}")
            width, ranks = architecture.expert_intermediate, mesh.world // (1 if mesh.ep > 1 else mesh.dp)
            if width % ranks:
                violations.append(f"expert width {width} cannot be divided by the engine's {ranks} ranks")
        violations += self._stage_violations()
        if architecture.tied and family in _NEVER_TIED:
            violations.append(f"vLLM's {family} does not tie word embeddings")
        if family in _NO_O_BIAS and any(group.role is Role.O_BIAS for group in self._groups):
            violations.append(f"vLLM's {family} has no o_proj.bias, which attention_bias brings")
        return [f"generation: {violation}" for violation in violations]

    def _sizes(self) -> list[tuple[str, int]]:
        """What vLLM cuts by tp, and in how many rows, heads or groups."""
        architecture, mamba = self._context.architecture, self._context.architecture.mamba
        heads, rows = architecture.attention.heads, padded_vocab(architecture.vocab)
        sizes = [
            (f"{heads} attention heads", heads),
            (f"MLP width {architecture.intermediate}", architecture.intermediate),
            (f"vocabulary padded to {rows} rows", rows),
        ]
        if self._context.shared_tp > 1:
            sizes.append((f"shared expert width {architecture.shared_intermediate}", architecture.shared_intermediate))
        if self._context.mesh.ep == 1:
            sizes.append((f"expert width {architecture.expert_intermediate}", architecture.expert_intermediate))
        if mamba is not None:
            sizes.append((f"{mamba.heads} Mamba heads", mamba.heads))
            if mamba.groups > 1:
                sizes.append((f"{mamba.groups} Mamba groups", mamba.groups))
        return sizes

    def _kv_head_violations(self) -> list[str]:
        architecture, tp = self._context.architecture, self._context.mesh.tp
        attention = architecture.attention
        if not isinstance(attention, Attention) or attention.kv_heads % tp == 0:
            return []
        if architecture.family == "gpt_oss":  # models/gpt_oss.py divides its KV heads without replicating them
            return [f"{attention.kv_heads} KV heads cannot be divided by tp = {tp}"]
        if tp % attention.kv_heads == 0:
            return []
        return [f"{attention.kv_heads} KV heads are neither a multiple nor a divisor of tp = {tp}"]

    def _stage_violations(self) -> list[str]:
        """Stages that vLLM cannot build, for want of layers or of experts.

        models/qwen3_moe.py and models/nemotron_h.py look for a mixture of experts on every pipeline stage.
        """
        architecture, mesh = self._context.architecture, self._context.mesh
        try:
            stage_of = mesh.stage_of_layers(architecture.layers)
        except MeshError as error:
            return list(error.violations)
        if architecture.family not in {"qwen3_moe", "nemotron_h"} or not architecture.experts:
            return []
        with_experts = {
            stage_of[layer] for group in self._groups if group.role in EXPERT_ROLES for layer in group.layers
        }
        return [
            f"pipeline stage {stage} of pp = {mesh.pp} has no mixture of experts, vLLM wants one on each"
            for stage in sorted(set(range(mesh.pp)) - with_experts)
        ]

    def place(self, group: ParameterGroup) -> tuple[PartitionOwners, ...] | Misc | Excluded:
        if group.mtp:
            return Excluded("vLLM's main model does not load multi-token-prediction layers")
        if (rule := RULES.get(group.role)) is None:
            return Misc(f"no layout rule for {group.role.value!r} in vLLM")
        if group.role in EXPERT_ROLES:
            return self._expert_owners(group, rule)
        partition = rule(self._context, group, 0)
        if isinstance(partition, Misc):
            return partition
        return tuple(
            self._owners(group, partition, pp_stage, layers) for pp_stage, layers in self._stages(group).items()
        )

    def scales(self, group: ParameterGroup, partition: Partition, form: Format) -> Partition | Misc:
        return vllm_scales(group, partition, form)

    def _owners(
        self, group: ParameterGroup, partition: Partition, pp_stage: int, layers: tuple[LayerPlace, ...]
    ) -> PartitionOwners:
        mesh = self._context.mesh
        if group.role in STACKED_ROLES and mesh.ep > 1:
            ranks = mesh.expert_ranks(pp_stage).reshape(mesh.ep, 1)
        else:
            ranks = ranks_of_parts(partition, mesh.dense_ranks(pp_stage))
        return PartitionOwners(partition, ranks, pp_stage, layers)

    def _expert_owners(self, group: ParameterGroup, rule: Rule) -> tuple[PartitionOwners, ...] | Misc:
        """Linear placement: experts left over go to the first ranks (layers/fused_moe/expert_map_manager.py)."""
        mesh = self._context.mesh
        base, left_over = divmod(group.experts, mesh.ep)
        partition_of = {local: rule(self._context, group, local) for local in {base, base + bool(left_over)}}
        owners = []
        for pp_stage, layers in self._stages(group).items():
            for ep in range(mesh.ep):
                first, local = ep * base + min(ep, left_over), base + (ep < left_over)
                partition = partition_of[local]
                if isinstance(partition, Misc):
                    return partition
                if mesh.ep == 1:
                    ranks = ranks_of_parts(partition, mesh.dense_ranks(pp_stage))
                else:
                    ranks = mesh.expert_ranks(pp_stage)[ep : ep + 1, None]
                owners.append(PartitionOwners(partition, ranks, pp_stage, layers, (first, first + local)))
        return tuple(owners)

    def _stages(self, group: ParameterGroup) -> dict[int, tuple[LayerPlace, ...]]:
        """The group's layers by pipeline stage; vLLM's names carry the model-wide layer number."""
        architecture, mesh = self._context.architecture, self._context.mesh
        if group.layers:
            stage_of = mesh.stage_of_layers(architecture.layers)
            places = [(stage, LayerPlace(layer, 0, layer)) for layer, stage in enumerate(stage_of)]
            return layers_by_stage(group.layers, places)
        if architecture.family in _ENDS_EVERYWHERE:
            stages = set(range(mesh.pp))
        elif group.role is Role.EMBEDDING:
            stages = {0, mesh.pp - 1} if architecture.tied else {0}
        else:
            stages = {mesh.pp - 1}
        return {stage: (LayerPlace(-1, 0, -1),) for stage in sorted(stages)}


ENGINE = Engine(
    name="vllm",
    layout=VllmLayout,
    quantizes=quantizes,
    misquantized=misquantized,
    notes=notes,
    repeated_suffix=CHECKPOINT_BLOCKS,
    # gpt-oss experts are [expert, out, in] where HF has [expert, in, out]; gate and up rows alternate as HF's columns do.
    transposed={
        (Role.STACKED_GATE_UP, 4): (0, 3, 1, 2),
        (Role.STACKED_GATE_UP_BIAS, 3): (0, 1, 2),
        (Role.STACKED_DOWN, 3): (0, 2, 1),
    },
)
