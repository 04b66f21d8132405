"""Where a Megatron-Core trainer keeps a model: which ranks hold each group, and whether the mesh can hold it at all.

How one parameter is cut stands in megatron_rules.py, the scales of FP8 parameters in transformer_engine.py.
"""

from __future__ import annotations

from dataclasses import replace

from mcore_reshard.planner.model.parameters import (
    EXPERT_ROLES,
    STACKED_ROLES,
    Attention,
    Mamba,
    ModelParameters,
    ParameterGroup,
    Role,
)
from mcore_reshard.planner.model.precision import Format

from .megatron_build import Context, ExpertsModule, MegatronBuild, padded_vocab
from .megatron_rules import RULES
from .mesh import LayerPlace, MeshError, TrainMesh
from .partitions import Excluded, Layout, Misc, Partition, PartitionOwners, layers_by_stage, ranks_of_parts, whole
from .transformer_engine import te_scales

__all__ = ["ExpertsModule", "MegatronBuild", "MegatronLayout", "padded_vocab"]

_NORM_ROLES = {role for role in Role if role.value.endswith("norm")}


class MegatronLayout(Layout):
    """The training side of a plan: a model, a mesh and how the model was built."""

    name = "megatron"

    def __init__(
        self,
        model: ModelParameters,
        mesh: TrainMesh,
        build: MegatronBuild = MegatronBuild(),  # noqa: B008
    ) -> None:
        self._context = Context(model.architecture, mesh, build)
        self._dtype = model.dtype

    @property
    def _hybrid(self) -> bool:
        """megatron.core.models.mamba.MambaModel: also where the pattern has no Mamba layer."""
        return self._context.architecture.family == "nemotron_h"

    def violations(self) -> list[str]:
        architecture, mesh = self._context.architecture, self._context.mesh
        tp, rows = mesh.tp, self._context.padded_vocab
        violations = self._pipeline_violations() + self._attention_violations()
        violations += _indivisible(f"MLP width {architecture.intermediate}", architecture.intermediate, "tp", tp)
        shared_width = architecture.shared_intermediate
        violations += _indivisible(f"shared expert width {shared_width}", shared_width, "tp", tp)
        if architecture.experts:
            width = architecture.expert_intermediate
            violations += _indivisible(f"{architecture.experts} experts", architecture.experts, "ep", mesh.ep)
            violations += _indivisible(f"expert width {width}", width, "etp", mesh.etp)
        elif mesh.ep > 1 or mesh.etp > 1:
            violations.append(
                f"ep = {mesh.ep}, etp = {mesh.etp} want a model with experts, {architecture.family} has none here"
            )
        if architecture.family == "gpt_oss" and mesh.etp > 1:
            violations.append(f"etp = {mesh.etp}: Megatron-Core has experts with biases at etp = 1 only")
        if architecture.mamba is not None:
            violations += _mamba_violations(architecture.mamba, mesh)
        if rows % tp or rows < architecture.vocab:
            violations.append(
                f"padded vocabulary {rows} must be at least {architecture.vocab} and divisible by tp = {tp}"
            )
        return [f"training: {violation}" for violation in violations]

    def _pipeline_violations(self) -> list[str]:
        violations = []
        try:
            counts = self._context.mesh.chunk_layers(self._context.architecture.layers)
            if self._hybrid and (len(set(counts[1:-1])) > 1 or not (counts[0] and counts[-1])):
                violations.append(
                    f"layers {'+'.join(map(str, counts))}: Megatron-Core's hybrid (Mamba) pipelines hold layers on every stage"
                    " and differ only in the first and the last"
                )
        except MeshError as error:
            violations += error.violations
        if self._hybrid and self._context.mesh.vpp > 1:
            violations.append(
                f"vpp = {self._context.mesh.vpp}: Megatron-Core does not interleave hybrid (Mamba) models"
            )
        return violations

    def _attention_violations(self) -> list[str]:
        attention, tp = self._context.architecture.attention, self._context.mesh.tp
        violations = _indivisible(f"{attention.heads} attention heads", attention.heads, "tp", tp)
        if isinstance(attention, Attention) and attention.kv_heads % tp and tp % attention.kv_heads:
            violations.append(f"{attention.kv_heads} KV heads are neither a multiple nor a divisor of tp = {tp}")
        elif isinstance(attention, Attention):
            rows = (attention.heads + 2 * attention.kv_heads) * attention.head_dim
            violations += _indivisible(f"linear_qkv's {rows} rows", rows, "tp", tp)
        return violations

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
        stages = self._stages(group).items()
        if group.role in EXPERT_ROLES:
            return tuple(owners for stage in stages for owners in self._expert_owners(group, partition, *stage))
        return tuple(self._owners(group, partition, *stage) for stage in stages)

    def scales(self, group: ParameterGroup, partition: Partition, form: Format) -> Partition | Misc:
        return te_scales(group, partition, form)

    def _owners(
        self, group: ParameterGroup, partition: Partition, pp_stage: int, layers: tuple[LayerPlace, ...]
    ) -> PartitionOwners:
        mesh = self._context.mesh
        if group.role in STACKED_ROLES:
            ranks = mesh.expert_ranks(pp_stage).reshape(mesh.ep, -1)
        else:
            ranks = ranks_of_parts(partition, mesh.dense_ranks(pp_stage))
        return PartitionOwners(partition, ranks, pp_stage, layers)

    def _expert_owners(
        self, group: ParameterGroup, partition: Partition, pp_stage: int, layers: tuple[LayerPlace, ...]
    ) -> list[PartitionOwners]:
        """Local experts of expert-parallel rank e are the contiguous block e (megatron.core MoELayer.local_expert_indices)."""
        local = group.experts // self._context.mesh.ep
        return [
            PartitionOwners(partition, ranks, pp_stage, layers, (ep * local, (ep + 1) * local))
            for ep, ranks in enumerate(self._context.mesh.expert_ranks(pp_stage))
        ]

    def _stages(self, group: ParameterGroup) -> dict[int, tuple[LayerPlace, ...]]:
        """The group's layers by pipeline stage.

        The embedding sits in the first chunk, the head in the last. So does the final norm, but with multi-token-prediction
        layers it follows the last decoder layer (TransformerBlock.has_final_layernorm_in_this_stage). A tied head on the last
        stage is a copy that Megatron keeps equal to the embedding; it is never the source.
        """
        architecture, mesh = self._context.architecture, self._context.mesh
        places = mesh.place_layers(architecture.layers)
        if group.layers:
            return layers_by_stage(group.layers, places)
        pp_stage, vp_stage = mesh.pp - 1, mesh.vpp - 1
        if group.role is Role.EMBEDDING:
            pp_stage, vp_stage = 0, 0
        elif group.role is Role.FINAL_NORM and architecture.mtp_layers:
            pp_stage, last = places[-1]
            vp_stage = last.vp_stage
        return {pp_stage: (LayerPlace(-1, vp_stage, -1),)}


def _indivisible(what: str, size: int, axis: str, degree: int) -> list[str]:
    return [f"{what} cannot be divided by {axis} = {degree}"] if size % degree else []


def _mamba_violations(mamba: Mamba, mesh: TrainMesh) -> list[str]:
    """Why Mamba layers cannot be cut: MambaMixer over tp, MambaContextParallel over cp within it."""
    violations = _indivisible(f"{mamba.heads} Mamba heads", mamba.heads, "tp", mesh.tp)
    violations += _indivisible(f"{mamba.groups} Mamba groups", mamba.groups, "tp", mesh.tp)
    if violations or mesh.cp == 1:
        return violations
    heads, groups = mamba.heads // mesh.tp, mamba.groups // mesh.tp
    violations += _indivisible(f"{heads} Mamba heads on each tp rank", heads, "cp", mesh.cp)
    if groups % mesh.cp and mesh.cp % groups:
        violations.append(
            f"{groups} Mamba groups on each tp rank are neither a multiple nor a divisor of cp = {mesh.cp}"
        )
    return violations
