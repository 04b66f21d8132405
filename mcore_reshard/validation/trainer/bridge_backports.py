"""Repairs of Megatron-Bridge: with them its load and export can judge a refit on older releases too.

Releases since 0.6 bring all but the padding of a vocabulary at TP1 (compared with 0.6.2). Only validation installs
these repairs; a policy worker runs the Bridge it has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .bridge_limits import bridge_release

_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def apply() -> None:
    """Install the repairs that the imported Megatron-Bridge needs. Calling it twice is harmless."""
    import megatron.bridge
    from megatron.bridge.models.conversion import model_bridge, param_mapping

    if getattr(megatron.bridge, "__backported__", False):
        return
    megatron.bridge.__backported__ = True
    _wrap(param_mapping.ColumnParallelMapping, "hf_to_megatron", _pad_vocabulary)
    if bridge_release() >= (0, 6):
        return
    _wrap(param_mapping.MegatronParamMapping, "scatter_to_tp_ranks", _scatter_contiguous)
    _wrap(param_mapping.MegatronParamMapping, "gather_from_ep_ranks", _gather_numbered_experts)
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

    chunks = unwrap_model(model_chunks)
    first_stage, last_stage = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    if not chunks[0].share_embeddings_and_output_weights or first_stage == last_stage:
        return
    weight = (chunks[0].embedding.word_embeddings if first_stage else chunks[-1].output_layer).weight
    group = parallel_state.get_embedding_group()
    torch.distributed.broadcast(weight.data, torch.distributed.get_process_group_ranks(group)[0], group=group)
