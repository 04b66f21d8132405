"""Repairs of Megatron-Bridge, so that its load and export can be the yardstick of a refit also on older releases.

All but the padding of a vocabulary at TP1 are what newer releases do themselves (compared with 0.6.2), and are left
out there. They belong to validation and to nothing else: a policy worker runs the Bridge it has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .bridge_limits import bridge_release

FIXED_IN = (0, 6)

_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def apply() -> None:
    """Install the repairs that the imported Megatron-Bridge needs. Calling it twice is harmless."""
    import megatron.bridge
    from megatron.bridge.models.conversion import model_bridge, param_mapping

    if getattr(megatron.bridge, "__backported__", False):
        return
    megatron.bridge.__backported__ = True
    column = param_mapping.ColumnParallelMapping
    column.hf_to_megatron = _padding_load(column.hf_to_megatron)
    if bridge_release() >= FIXED_IN:
        return
    mapping = param_mapping.MegatronParamMapping
    mapping.scatter_to_tp_ranks = _contiguous_scatter(mapping.scatter_to_tp_ranks)
    mapping.gather_from_ep_ranks = _numbered_gather(mapping.gather_from_ep_ranks)
    model_bridge._megatron_local_name_to_global = _global_expert_name(model_bridge._megatron_local_name_to_global)
    model_bridge.extract_sort_key = _expert_sort_key(model_bridge.extract_sort_key)
    model_bridge.MegatronModelBridge._broadcast_shared_embeddings = _share_embedding


def _contiguous_scatter(scatter: Callable[..., Any]) -> Callable[..., Any]:
    """gloo's scatter sends wrong bytes for strided inputs, which row-parallel cuts are."""

    def repaired(self: Any, splits: Sequence[torch.Tensor] | None, *args: Any, **kwargs: Any) -> Any:
        return scatter(self, [split.contiguous() for split in splits] if splits else splits, *args, **kwargs)

    return repaired


def _padding_load(convert: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpoint's vocabulary may be smaller than the model's: the rest is zero rows."""

    def repaired(self: Any, weights: torch.Tensor, module: Any) -> Any:
        if self.megatron_param in ("embedding.word_embeddings.weight", "output_layer.weight"):
            missing = module.weight.shape[0] * self.tp_size - weights.shape[0]
            weights = torch.cat([weights, weights.new_zeros(missing, *weights.shape[1:])])
        return convert(self, weights, module)

    return repaired


def _global_expert_name(rename: Callable[..., str]) -> Callable[..., str]:
    """SequentialMLP: `local_experts.0` of the second expert-parallel rank is not expert 0."""

    def repaired(models: Any, config: Any, param_name: str, vp_stage: int | None = None) -> str:
        from megatron.core import parallel_state

        name = rename(models, config, param_name, vp_stage)
        size = parallel_state.get_expert_model_parallel_world_size()
        first = parallel_state.get_expert_model_parallel_rank() * ((config.num_moe_experts or 0) // size)
        return _LOCAL_EXPERT.sub(lambda match: f".local_experts.{first + int(match.group(1))}.", name)

    return repaired


def _expert_sort_key(sort_key: Callable[[str], Any]) -> Callable[[str], Any]:
    """SequentialMLP: experts in numeric order, or ranks with experts 8.. and 16.. would disagree about it."""

    def repaired(param_name: str) -> Any:
        (layer, number), name = sort_key(param_name)
        match = _LOCAL_EXPERT.search(param_name)
        return [layer, int(match.group(1)) if match else number], name

    return repaired


def _numbered_gather(gather: Callable[..., Any]) -> Callable[..., Any]:
    """SequentialMLP: the expert's number is not where the gather reads it, at the end of the name."""

    def repaired(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = self.megatron_param
        match = _LOCAL_EXPERT.search(name)
        self.megatron_param = name + match.group(1) if match else name
        try:
            return gather(self, *args, **kwargs)
        finally:
            self.megatron_param = name

    return repaired


def _share_embedding(self: Any, model_chunks: Any) -> None:
    """Tied embeddings over a pipeline: the last stage's last chunk copies the first stage's first."""
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    chunks = unwrap_model(model_chunks)
    first_stage, last_stage = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    if not chunks[0].share_embeddings_and_output_weights or first_stage == last_stage:
        return
    weight = (chunks[0].embedding.word_embeddings if first_stage else chunks[-1].output_layer).weight
    group = parallel_state.get_embedding_group()
    torch.distributed.broadcast(weight.data, torch.distributed.get_process_group_ranks(group)[0], group=group)
