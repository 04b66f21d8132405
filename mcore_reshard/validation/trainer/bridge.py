"""Megatron-Bridge as the yardstick of a refit: which models it lacks, and repairs of its older releases.

A plan needs only rules for where bytes lie; validation needs a live model and Bridge's own export of it. Without
`bridge_limits` an unsupported model fails inside Megatron, far from the cause. Releases since 0.6 have all repairs but
two: the padding of a vocabulary at TP1, and names of a vision tower where no checkpoint shows them (compared with 0.6.2).
Only validation installs repairs: a policy worker runs the Bridge it has.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mcore_reshard.planner.layout.megatron import ExpertsModule
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.planner.model.parameters import LatentAttention, ModelParameters, Role

_QKV_BIASES = {"qwen2", "gpt_oss"}  # families whose providers set add_qkv_bias
_SEQUENTIAL_EXPERTS = {"qwen3_moe", "gpt_oss"}  # families whose mappings know local_experts.N
_YARN_POSITIONS = 4096  # original_max_position_embeddings in Megatron-Core and Bridge, whatever the config says
_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


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


def install_repairs() -> None:
    """Install the repairs that the imported Megatron-Bridge needs. Calling it twice is harmless."""
    import megatron.bridge
    from megatron.bridge.models.conversion import model_bridge, param_mapping

    if getattr(megatron.bridge, "__backported__", False):
        return
    megatron.bridge.__backported__ = True
    _wrap(param_mapping.ColumnParallelMapping, "hf_to_megatron", _pad_vocabulary)
    _wrap(_vision_bridge(), "mapping_registry", _name_vision_tower_as_published)
    if bridge_release() >= (0, 6):
        return
    _wrap(param_mapping.MegatronParamMapping, "scatter_to_tp_ranks", _scatter_contiguous)
    _wrap(param_mapping.MegatronParamMapping, "gather_from_ep_ranks", _gather_numbered_experts)
    _wrap(param_mapping.MegatronParamMapping, "broadcast_from_pp_rank", _broadcast_first_embedding)
    _wrap(model_bridge, "_megatron_local_name_to_global", _number_experts_globally)
    _wrap(model_bridge, "extract_sort_key", _sort_experts_by_number)
    model_bridge.MegatronModelBridge._broadcast_shared_embeddings = _share_embedding


def _wrap(owner: Any, name: str, repair: Callable[..., Any]) -> None:
    """Replace `owner.name` by `repair`, which takes the original before its arguments."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: repair(original, *args, **kwargs))


def _scatter_contiguous(
    scatter: Callable[..., Any], mapping: Any, splits: Sequence[torch.Tensor] | None, *args: Any, **kwargs: Any
) -> Any:
    """Row-parallel cuts are strided, and gloo scatters wrong bytes of strided inputs."""
    return scatter(mapping, [split.contiguous() for split in splits] if splits else splits, *args, **kwargs)


def _pad_vocabulary(convert: Callable[..., Any], mapping: Any, weights: torch.Tensor, module: Any) -> Any:
    """Append zero rows where the checkpoint's vocabulary is smaller than the model's."""
    if mapping.megatron_param in ("embedding.word_embeddings.weight", "output_layer.weight"):
        missing = module.weight.shape[0] * mapping.tp_size - weights.shape[0]
        weights = torch.cat([weights, weights.new_zeros(missing, *weights.shape[1:])])
    return convert(mapping, weights, module)


def _broadcast_first_embedding(
    broadcast: Callable[..., Any], mapping: Any, tensor: torch.Tensor | None, *args: Any, **kwargs: Any
) -> Any:
    """Multi-token prediction over a pipeline: the last stage has the embedding too, and Bridge wants one owner."""
    if mapping.pp_rank and mapping.megatron_param.endswith("embedding.word_embeddings.weight"):
        tensor = None
    return broadcast(mapping, tensor, *args, **kwargs)


def _vision_bridge() -> Any:
    from megatron.bridge.models.gemma_vl.gemma3_vl_bridge import Gemma3VLBridge

    return Gemma3VLBridge


def _name_vision_tower_as_published(registry: Callable[..., Any], bridge: Any) -> Any:
    """Gemma 3: transformers 5 has SigLIP without the level `vision_model`, which checkpoints and engines name."""
    import transformers
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry

    mappings = registry(bridge).get_all_mappings()
    if int(transformers.__version__.split(".")[0]) >= 5:
        for mapping in mappings:
            if mapping.hf_param == "vision_tower.**":
                mapping.hf_param = "vision_tower.vision_model.**"
    return MegatronMappingRegistry(*mappings)


def _number_experts_globally(
    rename: Callable[..., str], models: Any, config: Any, param_name: str, vp_stage: int | None = None
) -> str:
    """SequentialMLP: on the second of two expert-parallel ranks, `local_experts.0` of 8 experts becomes number 4."""
    from megatron.core import parallel_state

    name = rename(models, config, param_name, vp_stage)
    size = parallel_state.get_expert_model_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * ((config.num_moe_experts or 0) // size)
    return _LOCAL_EXPERT.sub(lambda match: f".local_experts.{first + int(match.group(1))}.", name)


def _sort_experts_by_number(sort_key: Callable[[str], Any], param_name: str) -> Any:
    """SequentialMLP: numeric order of experts. In text order, ranks with experts 8.. and 16.. disagree."""
    (layer, number), name = sort_key(param_name)
    match = _LOCAL_EXPERT.search(param_name)
    return [layer, int(match.group(1)) if match else number], name


def _gather_numbered_experts(gather: Callable[..., Any], mapping: Any, *args: Any, **kwargs: Any) -> Any:
    """SequentialMLP: the gather reads an expert's number at the end of its name, so put it there."""
    name = mapping.megatron_param
    match = _LOCAL_EXPERT.search(name)
    mapping.megatron_param = name + match.group(1) if match else name
    try:
        return gather(mapping, *args, **kwargs)
    finally:
        mapping.megatron_param = name


def _share_embedding(_: Any, model_chunks: Any) -> None:
    """Tied embeddings over a pipeline: the last stage's last chunk copies the first stage's first."""
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    chunks = [getattr(chunk, "language_model", chunk) for chunk in unwrap_model(model_chunks)]
    first_stage, last_stage = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    if not getattr(chunks[0], "share_embeddings_and_output_weights", False) or first_stage == last_stage:
        return
    weight = (chunks[0].embedding.word_embeddings if first_stage else chunks[-1].output_layer).weight
    group = parallel_state.get_embedding_group()
    torch.distributed.broadcast(weight.data, torch.distributed.get_process_group_ranks(group)[0], group=group)
