"""Fields of a live TransformerConfig that change what the bytes of a tensor mean, and neither its name nor its shape.

A plan knows the HF config alone. docs/design.md lists these fields; Megatron-Core's others change names or shapes, which
binding checks, or only how the model computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mcore_reshard.planner.model.parameters import Architecture, Attention
from mcore_reshard.trainers.world import gather_from_all

from .model import decoder_of, unwrapped

_QKV = "which rows of linear_qkv are q, k and v"
_LATENT = "which rows of the latent projections belong to which head, and what they are"
_MAMBA = "which rows of in_proj and conv1d are z, x, B, C and dt"
_TIED = "share_embeddings_and_output_weights"  # of the model
_MEANING = {
    "rotary_interleaved": "which rows of q and k rotate together",
    "layernorm_zero_centered_gamma": "whether norms hold their weight or the weight minus 1",
    "normalization": "whether norms have a bias that the engine lacks",
    "attention_output_gate": "whether linear_qkv also holds the rows of a gate",
    _TIED: "whether the output layer is the embedding or a matrix of its own",
    "num_attention_heads": "which rows of the projections belong to which head",
    "num_query_groups": _QKV,
    "kv_channels": _QKV,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), _LATENT),
    **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "mamba_num_groups", "mamba_state_dim"), _MAMBA),
}


def check_config_fields(model_chunks: Sequence[torch.nn.Module], planned: Mapping[str, Any]) -> None:
    """Raise ValueError, on every rank, with every field by which a live model means its bytes otherwise than `planned`.

    `planned` has the values of fields, as `fields_of_rules` and `fields_of_bridge` give them. Collective over the training
    world.
    """
    own = [*_differences(model_chunks, planned), *_undecided(model_chunks)]
    problems = dict.fromkeys(problem for rank in gather_from_all(own) for problem in rank)
    if problems:
        heading = "the live model's config gives its weights another meaning than the plan reads in them:"
        remedy = "build the model from the HF config that the engine has (Megatron-Bridge does), or plan with its own"
        raise ValueError("\n  ".join((heading, *problems, remedy)))


def fields_of_bridge(bridge: Any) -> Mapping[str, Any]:
    """What an AutoBridge's model of its HF config has, in Megatron-Core's names; fields that it leaves open are absent.

    Absent too: a low rank of queries, which names of tensors show, and KV heads that each layer has for itself
    (megatron/core/transformer/heterogeneous/heterogeneous_config.py, get_config_for_layer).
    """
    provider = bridge.to_megatron_provider(load_weights=False)
    in_layers = getattr(provider, "heterogeneous_layers_config_encoded_json", "")
    absent = {"q_lora_rank", *(["num_query_groups"] if in_layers else ())}
    fields = {field: getattr(provider, field, None) for field in _MEANING if field not in absent}
    return {field: value for field, value in fields.items() if value is not None}


def _differences(model_chunks: Sequence[torch.nn.Module], planned: Mapping[str, Any]) -> Iterator[str]:
    """A line for each field that differs from the plan's; older releases of Megatron-Core lack some fields."""
    for model, decoder in ((unwrapped(chunk), decoder_of(chunk)) for chunk in model_chunks):
        tied = planned.get(_TIED)
        if _TIED in planned and bool(live := getattr(model, _TIED, tied)) != bool(tied):
            yield _difference(_TIED, live, tied, "")
        # heterogeneous layers (TransformerBlock.build_layer) have configs of their own
        configs = {id(decoder.config): (decoder.config, "")}
        for layer in decoder.layers:
            configs.setdefault(id(layer.config), (layer.config, f" in layer {layer.layer_number - 1}"))
        for config, where in configs.values():
            for field, value in planned.items():
                live = getattr(config, field, value)
                if field == _TIED or (field == "mamba_num_heads" and live is None):  # derived from the hidden size
                    continue
                if (live or None) != (value or None):
                    yield _difference(field, live, value, where)


def _difference(field: str, live: Any, planned: Any, where: str) -> str:
    return f"{field} is {live}{where}, planned is {planned}: it says {_MEANING[field]}"


def fields_of_rules(architecture: Architecture) -> Mapping[str, Any]:
    """What the layout rules take for granted, in Megatron-Core's names."""
    attention, mamba = architecture.attention, architecture.mamba
    fields: dict[str, Any] = {
        "rotary_interleaved": False,
        "layernorm_zero_centered_gamma": False,
        "normalization": "RMSNorm",
        "attention_output_gate": False,
        _TIED: architecture.tied,
        "num_attention_heads": attention.heads,
    }
    if isinstance(attention, Attention):
        fields |= {"num_query_groups": attention.kv_heads, "kv_channels": attention.head_dim}
    else:
        fields |= {
            "q_lora_rank": attention.q_lora_rank,
            "kv_lora_rank": attention.kv_lora_rank,
            "qk_head_dim": attention.qk_nope_dim,
            "qk_pos_emb_head_dim": attention.qk_rope_dim,
            "v_head_dim": attention.v_dim,
        }
    if mamba is not None:
        fields |= {
            "mamba_num_heads": mamba.heads,
            "mamba_head_dim": mamba.head_dim,
            "mamba_num_groups": mamba.groups,
            "mamba_state_dim": mamba.state,
        }
    return fields


def _undecided(model_chunks: Sequence[torch.nn.Module]) -> Iterator[str]:
    """A line for each field that Megatron-Core's forward and Megatron-Bridge's checkpoints read differently."""
    config = decoder_of(model_chunks[0]).config
    size = getattr(config, "moe_shared_expert_glu_interleave_size", None)
    if (
        size
        and config.moe_shared_expert_intermediate_size
        and not getattr(config, "use_grouped_gemm_for_shared_expert", False)
    ):
        yield (
            f"moe_shared_expert_glu_interleave_size is {size} without use_grouped_gemm_for_shared_expert: Megatron-Core"
            " ignores it, Megatron-Bridge's checkpoints follow it; set both or neither"
        )
    classes = {type(module).__name__ for chunk in model_chunks for module in chunk.modules()}
    if "TEFusedMLPWithGroupedLinear" in classes:
        yield (
            "use_grouped_gemm_for_dense_mlp has gate and up of dense MLPs take turns every 32 rows at tp = 1 alone: no layout"
            " rule; set it to False (Megatron-Bridge: dense_grouped_gemm)"
        )
