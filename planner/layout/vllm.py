"""vLLM as the engine: which ranks hold each group, whether the mesh can hold the model, and what else a plan asks of it.

vllm_rules.py says how one parameter is cut. vllm_quantized.py says which matrices are quantized, and where their scales
lie. Files named here are under vllm/model_executor of vLLM 0.32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
from .partitions import (
    Excluded,
    Misc,
    Partition,
    Placed,
    RuledLayout,
    indivisible,
    layers_by_stage,
    unshareable,
)
from .vllm_quantized import CHECKPOINT_BLOCKS, misquantized, notes, quantizes, vllm_scales
from .vllm_rules import RULES, Context

# Families whose embedding, final norm and head are built and loaded on every pipeline stage.
_ENDS_EVERYWHERE = {"nemotron_h", "gpt_oss", "qwen3_moe"}
_NEVER_TIED = {"deepseek_v3", "kimi_k2", "gpt_oss", "nemotron_h"}  # their lm_head is a tensor of its own
_NO_O_BIAS = {"qwen3", "qwen3_moe"}  # their loaders drop it without a word


class VllmLayout(RuledLayout):
    """The generation side of a plan: a model on a vLLM mesh."""

    name = "vllm"
    title = "vLLM"
    rules = RULES

    def __init__(self, model: ModelParameters, mesh: GenMesh) -> None:
        self.context = Context(model.architecture, mesh, model.dtype)
        self._groups = model.groups

    def violations(self) -> list[str]:
        model, mesh = self.context.architecture, self.context.mesh
        violations = self._cut_violations()
        if mesh.ep > 1 and not model.experts:
            violations.append(f"ep = {mesh.ep} wants a model with experts, {model.family} has none here")
        if mesh.ep > model.experts > 0:
            violations.append(f"ep = {mesh.ep} exceeds the {model.experts} experts")
        if model.family == "gpt_oss":
            violations += indivisible("{} experts", model.experts, "ep", mesh.ep)  # its loader drops those left over
            width, ranks = model.expert_intermediate, mesh.world // (1 if mesh.ep > 1 else mesh.dp)
            if width % ranks:
                violations.append(f"expert width {width} cannot be divided by the engine's {ranks} ranks")
        violations += self._stage_violations()
        if model.tied and model.family in _NEVER_TIED:
            violations.append(f"vLLM's {model.family} does not tie word embeddings")
        if model.family in _NO_O_BIAS and any(group.role is Role.O_BIAS for group in self._groups):
            violations.append(f"vLLM's {model.family} has no o_proj.bias, which attention_bias brings")
        return [f"generation: {violation}" for violation in violations]

    def _cut_violations(self) -> list[str]:
        """Sizes that tp does not divide."""
        model, tp = self.context.architecture, self.context.mesh.tp
        attention, mamba = model.attention, model.mamba
        sizes = [
            ("{} attention heads", attention.heads),
            ("MLP width {}", model.intermediate),
            ("vocabulary padded to {} rows", self.context.padded_vocab),
        ]
        if self.context.shared_tp > 1:
            sizes.append(("shared expert width {}", model.shared_intermediate))
        if self.context.mesh.ep == 1:
            sizes.append(("expert width {}", model.expert_intermediate))
        if mamba is not None:
            sizes += [("{} Mamba heads", mamba.heads)] + [("{} Mamba groups", mamba.groups)] * (mamba.groups > 1)
        violations = [violation for what, size in sizes for violation in indivisible(what, size, "tp", tp)]
        if not isinstance(attention, Attention):
            return violations
        if model.family == "gpt_oss":  # models/gpt_oss.py divides its KV heads without replicating them
            return violations + indivisible("{} KV heads", attention.kv_heads, "tp", tp)
        return violations + unshareable("KV heads", attention.kv_heads, "tp", tp)

    def _stage_violations(self) -> list[str]:
        """Stages without layers, or without the experts that models/{qwen3_moe,nemotron_h}.py look for on each."""
        architecture, mesh = self.context.architecture, self.context.mesh
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

    def place(self, group: ParameterGroup) -> Placed:
        if group.mtp:
            return Excluded("vLLM's main model does not load multi-token-prediction layers")
        return super().place(group)

    def scales(self, group: ParameterGroup, partition: Partition, form: Format) -> Partition | Misc:
        return vllm_scales(group, partition, form)

    def ranks(self, group: ParameterGroup, pp_stage: int) -> list[tuple[NDArray[np.int32], tuple[int, int]]]:
        """Linear placement: experts left over go to the first ranks (layers/fused_moe/expert_map_manager.py)."""
        mesh = self.context.mesh
        if mesh.ep > 1 and group.role in STACKED_ROLES:
            return [(mesh.expert_ranks(pp_stage).reshape(mesh.ep, 1), (0, 0))]
        if mesh.ep == 1 or group.role not in EXPERT_ROLES:
            return [(mesh.dense_ranks(pp_stage), (0, group.experts))]
        base, left_over = divmod(group.experts, mesh.ep)
        starts = [ep * base + min(ep, left_over) for ep in range(mesh.ep + 1)]
        return [
            (ranks[None, None], (starts[ep], starts[ep + 1])) for ep, ranks in enumerate(mesh.expert_ranks(pp_stage))
        ]

    def stages(self, group: ParameterGroup) -> dict[int, tuple[LayerPlace, ...]]:
        """The group's layers by pipeline stage; vLLM's names carry the model-wide layer number."""
        architecture, mesh = self.context.architecture, self.context.mesh
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
    scales=vllm_scales,
    notes=notes,
    repeated_suffix=CHECKPOINT_BLOCKS,
    # gpt-oss experts are [expert, out, in] where HF has [expert, in, out]; gate and up rows alternate as HF's columns do.
    transposed={
        (Role.STACKED_GATE_UP, 4): (0, 3, 1, 2),
        (Role.STACKED_GATE_UP_BIAS, 3): (0, 1, 2),
        (Role.STACKED_DOWN, 3): (0, 2, 1),
    },
)
