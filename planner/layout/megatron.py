"""Where a Megatron-Core trainer keeps a model: which ranks hold each group, and whether the mesh can hold it at all.

megatron_rules.py says how one parameter is cut. Transformer Engine keeps a quantized parameter as a tensor of its own
class. In a plan its E4M3 data has the parameter's name. Its scales have that name and the attribute's, as in
`linear_fc2.weight._rowwise_scale_inv`.
Source: transformer_engine/pytorch/tensor/{float8_blockwise,mxfp8,float8}_tensor.py; shapes read off real parameters.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.model.parameters import (
    EXPERT_ROLES,
    STACKED_ROLES,
    Attention,
    Mamba,
    ModelParameters,
    ParameterGroup,
    Role,
)
from mcore_reshard.planner.model.precision import MXFP8, Block, Format

from .block_scales import scale_partition, tensor_scale_partition
from .geometry import LocalTensor
from .megatron_rules import RULES, Context, ExpertsModule, MegatronBuild, padded_vocab
from .mesh import LayerPlace, MeshError, TrainMesh
from .partitions import (
    Misc,
    Partition,
    Placed,
    RuledLayout,
    indivisible,
    layers_by_stage,
    unshareable,
)

DEFAULT_BUILD = MegatronBuild()
_ROWWISE = "._rowwise_scale_inv"

__all__ = ["ExpertsModule", "MegatronBuild", "MegatronLayout", "padded_vocab"]


class MegatronLayout(RuledLayout):
    """The training side of a plan: a model, a mesh and how the model was built."""

    name = "megatron"
    title = "Megatron-Core"
    rules = RULES

    def __init__(self, model: ModelParameters, mesh: TrainMesh, build: MegatronBuild = DEFAULT_BUILD) -> None:
        self.context = Context(model.architecture, mesh, build)
        self._dtype = model.dtype

    def violations(self) -> list[str]:
        model, mesh = self.context.architecture, self.context.mesh
        tp, rows = mesh.tp, self.context.padded_vocab
        violations = self._pipeline_violations() + indivisible("{} attention heads", model.attention.heads, "tp", tp)
        if isinstance(attention := model.attention, Attention):
            qkv_rows = (attention.heads + 2 * attention.kv_heads) * attention.head_dim
            shared = unshareable("KV heads", attention.kv_heads, "tp", tp)
            violations += shared or indivisible("linear_qkv's {} rows", qkv_rows, "tp", tp)
        violations += indivisible("MLP width {}", model.intermediate, "tp", tp)
        violations += indivisible("shared expert width {}", model.shared_intermediate, "tp", tp)
        if model.experts:
            violations += indivisible("{} experts", model.experts, "ep", mesh.ep)
            violations += indivisible("expert width {}", model.expert_intermediate, "etp", mesh.etp)
        elif mesh.ep > 1 or mesh.etp > 1:
            violations.append(
                f"ep = {mesh.ep}, etp = {mesh.etp} want a model with experts, {model.family} has none here"
            )
        violations += self._alternation_violations()
        if model.family == "gpt_oss" and mesh.etp > 1:
            violations.append(f"etp = {mesh.etp}: Megatron-Core has experts with biases at etp = 1 only")
        if model.mamba is not None:
            violations += _mamba_violations(model.mamba, mesh)
        if rows % tp or rows < model.vocab:
            violations.append(f"padded vocabulary {rows} must be at least {model.vocab} and divisible by tp = {tp}")
        return [f"training: {violation}" for violation in violations]

    def _alternation_violations(self) -> list[str]:
        """Why gate and up cannot alternate as the build says (TEGroupedMLP._remove_glu_interleaving)."""
        model, mesh, build = self.context.architecture, self.context.mesh, self.context.build
        violations = []
        if model.experts and build.alternating_experts:
            name, rows = "moe_mlp_glu_interleave_size", build.alternating_experts
            violations += indivisible(
                "{} expert rows on each etp rank", model.expert_intermediate // mesh.etp, name, rows
            )
            if build.experts != "grouped":
                violations.append(f"{name} = {rows}: of Megatron-Core's experts TEGroupedMLP alone reads it")
        if build.alternating_shared:
            name, rows = "moe_shared_expert_glu_interleave_size", build.alternating_shared
            shared = model.shared_intermediate // mesh.tp
            violations += indivisible("{} shared expert rows on each tp rank", shared, name, rows)
        return violations

    def _pipeline_violations(self) -> list[str]:
        mesh, violations = self.context.mesh, []
        try:
            counts = mesh.chunk_layers(self.context.architecture.layers)
            if self.context.is_hybrid and (len(set(counts[1:-1])) > 1 or not (counts[0] and counts[-1])):
                violations.append(
                    f"layers {'+'.join(map(str, counts))}: Megatron-Core's hybrid (Mamba) pipelines hold layers on every stage"
                    " and differ only in the first and the last"
                )
        except MeshError as error:
            violations += error.violations
        if self.context.is_hybrid and mesh.vpp > 1:
            violations.append(f"vpp = {mesh.vpp}: Megatron-Core does not interleave hybrid (Mamba) models")
        return violations

    def place(self, group: ParameterGroup) -> Placed:
        # Float16Module casts every parameter to the model's dtype, whatever the checkpoint says.
        return super().place(replace(group, dtype=self._dtype))

    def scales(self, group: ParameterGroup, partition: Partition, form: Format) -> Partition | Misc:
        return megatron_scales(group, partition, form)

    def ranks(self, group: ParameterGroup, pp_stage: int) -> list[tuple[NDArray[np.int32], tuple[int, int]]]:
        """Local experts of expert-parallel rank e are the contiguous block e (megatron.core MoELayer.local_expert_indices)."""
        mesh = self.context.mesh
        if group.role in EXPERT_ROLES:
            local = group.experts // mesh.ep
            return [(ranks, (ep * local, (ep + 1) * local)) for ep, ranks in enumerate(mesh.expert_ranks(pp_stage))]
        if group.role in STACKED_ROLES:
            return [(mesh.expert_ranks(pp_stage).reshape(mesh.ep, -1), (0, 0))]
        return [(mesh.dense_ranks(pp_stage), (0, 0))]

    def stages(self, group: ParameterGroup) -> dict[int, tuple[LayerPlace, ...]]:
        """The group's layers by pipeline stage.

        The embedding sits in the first chunk, the head in the last. So does the final norm, but with multi-token-prediction
        layers it follows the last decoder layer (TransformerBlock.has_final_layernorm_in_this_stage). A tied head on the last
        stage is a copy that Megatron keeps equal to the embedding; it is never the source.
        """
        architecture, mesh = self.context.architecture, self.context.mesh
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


def _mamba_violations(mamba: Mamba, mesh: TrainMesh) -> list[str]:
    """Why Mamba layers cannot be cut: MambaMixer over tp, MambaContextParallel over cp within it."""
    violations = indivisible("{} Mamba heads", mamba.heads, "tp", mesh.tp)
    violations += indivisible("{} Mamba groups", mamba.groups, "tp", mesh.tp)
    if violations or mesh.cp == 1:
        return violations
    violations += indivisible("{} Mamba heads on each tp rank", mamba.heads // mesh.tp, "cp", mesh.cp)
    return violations + unshareable("Mamba groups on each tp rank", mamba.groups // mesh.tp, "cp", mesh.cp)


def megatron_scales(group: ParameterGroup, partition: Partition, form: Format) -> Partition | Misc:
    """Float8BlockwiseQTensor pads the grid's columns to 4, MXFP8Tensor its rows to 128 as well; Float8Tensor has [1]."""

    def single(weight: LocalTensor, _: tuple[int, ...]) -> LocalTensor:
        return LocalTensor(weight.name + "._scale_inv", (1,), "float32")

    def padded(weight: LocalTensor, grid: tuple[int, ...]) -> LocalTensor:
        multiples = (128 if form == MXFP8 else 1, 4)
        rows, columns = (-(-size // to) * to for size, to in zip(grid, multiples, strict=True))
        return LocalTensor(weight.name + _ROWWISE, (rows, columns), form.scales)

    if form.block is not None:
        return scale_partition(group, partition, form.block, padded)
    if len(partition.pieces) > 1:
        return Misc(
            f"each of {len(partition.pieces)} training ranks has one scale of its own, for its part of the matrix"
        )
    return tensor_scale_partition(partition, single, "its one scale serves them all")


def computed_scales(group: ParameterGroup, partition: Partition, block: Block) -> Partition | Misc:
    """The scales that the source of a cast computes: the block grid of its local tensor, unpadded."""
    return scale_partition(
        group, partition, block, lambda weight, grid: LocalTensor(weight.name + _ROWWISE, grid, "float32")
    )
