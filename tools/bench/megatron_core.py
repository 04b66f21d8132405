"""Megatron-Core's own resharding, `swap_model_weights` over NCCL, between real Megatron models on both sides.

The receiver must be a Megatron model too, so this ends where an engine's layout begins. Dense models are measured, in
the local spec (no Transformer Engine). Gated experts whose expert tensor parallelism changes come out wrong in 0.19.2.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import synthetic
import torch
import torch.distributed as dist

from mcore_reshard.planner.layout.megatron import MegatronBuild
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.trainers.megatron.model import local_tensors

from .isend_irecv import join_world
from .methods import Options, Prepared, Unavailable
from .ranks import Rank, differing

_LOCAL_SPEC = MegatronBuild(fused_norms=False)


def swap_weights(rank: Rank, options: Options) -> Prepared:
    case, gen = rank.case, rank.plan.gen
    if any(group.experts for group in rank.plan.groups):
        raise Unavailable("it moves experts between Megatron models of one expert tensor parallelism, not EP to TP")
    if gen.pp > 1 or rank.plan.train.pp > 1 or rank.plan.train.cp > 1:
        raise Unavailable("measured between tensor- and data-parallel meshes only")
    start = time.perf_counter()
    prepare_swap, swap = _resharding()
    join_world(rank, connected=False)  # of Megatron's many groups two are used
    trains = rank.world == "train"
    plan = case.plan(build=_LOCAL_SPEC, train=None if trains else f"tp={gen.tp},dp={gen.dp}")
    model = _model(rank, plan)
    tensors = local_tensors([model])
    wanted: Mapping[str, torch.Tensor] = {}
    with torch.no_grad():
        if trains:
            synthetic.fill(plan, "train", rank.rank, tensors)
        else:
            wanted = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
            synthetic.fill(plan, "train", rank.rank, wanted)
            for tensor in tensors.values():
                tensor.view(torch.uint8).fill_(synthetic.POISON)
    rank.settle(release=True)
    building_s = time.perf_counter() - start
    ends = (model, None) if trains else (None, model)

    prepare_swap(*ends)
    return Prepared(
        lambda: swap(*ends, "nccl"),
        dist.destroy_process_group,
        nbytes=0 if trains else sum(tensor.nbytes for tensor in tensors.values()),
        wrong=lambda: sum(differing(tensors[name], right) for name, right in wanted.items()),
        weight_bytes=sum(tensor.nbytes for copy in (tensors, wanted) for tensor in copy.values()),
        building_s=building_s,
    )


def _resharding() -> tuple[Any, Any]:
    try:
        from megatron.core.resharding.refit import prepare_swap_model_weights, swap_model_weights
    except ImportError as error:
        raise Unavailable(f"no megatron.core.resharding as in 0.19.2: {error}") from error
    return prepare_swap_model_weights, swap_model_weights


def _model(rank: Rank, plan: Plan) -> torch.nn.Module:
    """A dense GPTModel of the case on this rank's side, in the local spec, uninitialized."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = load_config(rank.case.model)
    tp = plan.train.tp
    layers = rank.case.layers or config["num_hidden_layers"]
    qk_norm = config["model_type"].startswith("qwen3")
    sizes = TransformerConfig(
        num_layers=layers,
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config.get("head_dim"),
        ffn_hidden_size=config["intermediate_size"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        qk_layernorm=qk_norm,
        perform_initialization=False,
        use_cpu_initialization=not rank.on_cuda,
        params_dtype=torch.bfloat16,
        bf16=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        tensor_model_parallel_size=tp,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm")
    model = GPTModel(
        sizes,
        spec,
        vocab_size=config["vocab_size"],
        max_sequence_length=32,
        share_embeddings_and_output_weights=bool(config.get("tie_word_embeddings")),
        position_embedding_type="rope",
        pg_collection=_groups(rank, tp),
    )
    return model.to(rank.device, torch.bfloat16)  # norms of the local spec begin on the CPU, in fp32


def _groups(rank: Rank, tp: int) -> Any:
    """Process groups of this rank's side: tensor parallel within it, every other axis of one rank or of its replicas."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    own_groups: dict[str, dist.ProcessGroup] = {}
    train = rank.case.train_ranks
    sides = (range(train), rank.plan.train.tp), (range(train, rank.ranks), rank.plan.gen.tp)
    for side, degree in sides:
        for first in side[::degree]:
            _join(own_groups, "tp", list(range(first, first + degree)), rank.number)
        for first in side[:degree]:
            _join(own_groups, "dp", list(side[first - side[0] :: degree]), rank.number)
    for number in range(rank.ranks):
        _join(own_groups, "alone", [number], rank.number)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)  # for what asks globals
    groups = ProcessGroupCollection.use_mpu_process_groups()
    for name in ("pp", "cp", "ep", "expt_tp", "expt_dp", "tp_ep", "tp_ep_pp", "embd", "pos_embd"):
        setattr(groups, name, own_groups["alone"])
    for name in ("tp", "tp_cp", "mp"):
        setattr(groups, name, own_groups["tp"])
    for name in ("dp", "dp_cp"):
        setattr(groups, name, own_groups["dp"])
    return groups


def _join(own_groups: dict[str, dist.ProcessGroup], name: str, ranks: list[int], own_rank: int) -> None:
    group = dist.new_group(ranks)  # every rank takes part in making every group
    if own_rank in ranks:
        own_groups[name] = group
