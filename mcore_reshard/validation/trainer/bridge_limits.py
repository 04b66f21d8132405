"""Models that can be planned but not validated, because Megatron-Bridge cannot build, load or export them.

A plan needs only rules for where bytes lie; the check needs a live model and Bridge's own export of it. Without this
list such a model fails inside Megatron, far from the cause.
"""

from __future__ import annotations

import importlib.metadata
import re

from mcore_reshard.planner.layout.megatron import ExpertsModule
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.planner.model.parameters import LatentAttention, ModelParameters, Role

_QKV_BIASES = {"qwen2", "gpt_oss"}  # families whose providers set add_qkv_bias
_SEQUENTIAL_EXPERTS = {"qwen3_moe", "gpt_oss"}  # families whose mappings know local_experts.N
_YARN_POSITIONS = 4096  # original_max_position_embeddings in Megatron-Core and Bridge, whatever the config says


def bridge_limits(model_parameters: ModelParameters, train: TrainMesh, experts: ExpertsModule) -> list[str]:
    """Every reason why the installed Megatron-Bridge has no such model on this mesh; empty if it has."""
    architecture, family = model_parameters.architecture, model_parameters.architecture.family
    roles = {group.role for group in model_parameters.groups}
    limits = [f"it has no mapping for {g.name_pattern}" for g in model_parameters.groups if g.role is Role.UNKNOWN]
    if Role.Q_BIAS in roles and family not in _QKV_BIASES:
        limits.append(f"it builds {family} without biases in attention")
    if family == "qwen3_moe" and Role.GATE in roles:
        limits.append("it builds qwen3_moe with experts in every layer: no decoder_sparse_step, no mlp_only_layers")
    if architecture.mtp_layers and not train.chunk_layers(architecture.layers)[-1]:
        limits.append("it builds no multi-token prediction, without which the final norm is not with the last layer")
    if experts == "sequential" and architecture.experts and family not in _SEQUENTIAL_EXPERTS:
        limits.append(f"it has no mapping for SequentialMLP in {family}")
    attention = architecture.attention
    if isinstance(attention, LatentAttention) and not attention.q_lora_rank and bridge_release() >= (0, 6):
        limits.append(
            "it has no mapping for the norm that Megatron-Core 0.19 fuses into linear_q_proj (no q_lora_rank)"
        )
    yarn = isinstance(architecture.attention, LatentAttention) or family == "gpt_oss"
    if yarn and train.cp > 1 and _YARN_POSITIONS % (2 * train.cp):
        limits.append(f"Megatron-Core does not cut YaRN's {_YARN_POSITIONS} positions in 2*cp = {2 * train.cp} parts")
    return limits


def bridge_release() -> tuple[int, ...]:
    """Major and minor version of the installed Megatron-Bridge; empty without one."""
    try:
        version = importlib.metadata.version("megatron-bridge")
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
