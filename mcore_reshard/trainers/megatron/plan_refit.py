"""From a live trainer to the plan that both worlds run: read the mesh off the model, plan, hand the plan over.

plan = plan_refit(config, model_chunks, gen=GenMesh(tp=4), model="qwen3-30b-a3b")   # on every training rank
publish_plan(plan, store="10.0.0.1:29600")                                        # on one of them
plan = fetch_plan(store="10.0.0.1:29600")                                         # on every generation rank
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, TypeVar

import torch

from mcore_reshard.planner.layout.megatron import ExpertsModule, MegatronBuild, MegatronLayout
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.layout.partitions import Excluded, Misc
from mcore_reshard.planner.model.families import parameters_from_config
from mcore_reshard.planner.model.parameters import ModelParameters
from mcore_reshard.planner.model.precision import PRECISION_OF, PRECISIONS, QUANTIZED, UNQUANTIZED
from mcore_reshard.planner.plan.make_plan import make_plan
from mcore_reshard.planner.plan.plan import Plan, Policy
from mcore_reshard.planner.proof.prove import ProofError, prove

from .model import local_tensors, precisions_of, train_mesh_of

_T = TypeVar("_T")

_FUSED_NORM = ".layer_norm_weight"
_EMBEDDING = "embedding.word_embeddings.weight"
_FORMATS = {*PRECISIONS} - {*UNQUANTIZED}


def plan_refit(
    config: Mapping[str, Any],
    model_chunks: Sequence[torch.nn.Module],
    gen: GenMesh,
    *,
    model: str = "",
    policy: Policy = "exact",
    gen_dtype: str | None = None,
) -> Plan:
    """Plan the refit of a live Megatron-Core model into a vLLM mesh, and prove it.

    `config` is the model's HF config.json. `gen_dtype` is what the engine holds, as in `planner.precision.precision_of`;
    what the trainer holds is read off its parameters, layer by layer. Collective over the training world (torch's default
    group): every rank must call it and all get the same plan. Raises ConfigError, MeshError, ProofError, or ValueError for a
    model that no plan describes.
    """
    model_parameters = parameters_from_config(config)
    train = TrainMesh(**dict(train_mesh_of(model_chunks)))
    tensors = local_tensors(model_chunks)
    build = _build_of(tensors, train.tp)
    train_dtype = _agreed_precision(precisions_of(tensors), model_parameters.dtype)
    unquantized: list[int] = []
    if train_dtype in _FORMATS:
        pp_stage = train.coordinate(torch.distributed.get_rank())["pp"] if torch.distributed.is_initialized() else 0
        weights = _linear_weights(model_parameters, train, build, pp_stage)
        unquantized = _unquantized_layers(tensors, weights)
    plan = make_plan(
        model_parameters,
        train,
        gen,
        model=model,
        policy=policy,
        build=build,
        train_dtype=train_dtype,
        gen_dtype=gen_dtype,
        train_unquantized_layers=unquantized,
    )
    proof = prove(plan)
    if not proof.ok:
        raise ProofError(proof)
    return plan


def _agreed_precision(mine: dict[str, str], main: str) -> str | None:
    """The `train_dtype` of a world whose ranks hold matrices in `mine`; `main` is the config's dtype.

    Ranks tell each other, since a stage may hold no quantized parameters.
    """
    held = {precision: name for rank in reversed(_told(mine)) for precision, name in rank.items()}
    formats, dtypes = held.keys() & _FORMATS, held.keys() - _FORMATS
    known = {main} if formats else {main, *PRECISION_OF}
    if len(formats) > 1 or len(dtypes) > 1 or dtypes - known:
        found = ", ".join(f"{held[precision]} in {precision}" for precision in sorted(held))
        raise ValueError(
            f"no plan can say what training ranks hold their matrices in: {found}; they may all be in bfloat16,"
            f" in float32 or in the config's {main}, which FP8 parameters leave the others in"
        )
    return next(iter(formats), None) or next((PRECISION_OF[dtype] for dtype in dtypes if dtype != main), None)


def _unquantized_layers(tensors: Mapping[str, torch.Tensor], weights: Iterable[tuple[int, str]]) -> list[int]:
    """The layers of an FP8 trainer of which no rank holds a quantized linear weight, though some hold others.

    `weights` are (layer, name) of what this rank may hold. Ranks tell each other, since a layer may be on several. Raises
    ValueError for layers of which only a part is quantized.
    """
    mine: dict[int, dict[bool, str]] = {}  # by layer, the first weight that is quantized and the first that is not
    for layer, name in weights:
        if name in tensors:
            mine.setdefault(layer, {}).setdefault(tensors[name].dtype is torch.float8_e4m3fn, name)
    held: dict[int, dict[bool, str]] = {}
    for rank in _told(mine):
        for layer, names in rank.items():
            held[layer] = names | held.get(layer, {})
    parts = [
        f"of layer {layer} {names[True]} is, {names[False]} is not"
        for layer, names in sorted(held.items())
        if len(names) == 2
    ]
    if parts:
        raise ValueError(
            f"no plan can say what training ranks keep quantized: {'; '.join(parts)}; it must be all linear weights of a"
            " layer or none, as fp8_param and first_last_layers_bf16 leave them"
        )
    return sorted(layer for layer, names in held.items() if True not in names)


def _linear_weights(
    model_parameters: ModelParameters, train: TrainMesh, build: MegatronBuild, pp_stage: int
) -> Iterator[tuple[int, str]]:
    """(layer, tensor) of what fp8_param quantizes on a pipeline stage.

    Multi-token-prediction layers are in no plan, and GroupedMLP is not Transformer Engine's: nothing quantizes it.
    """
    layout = MegatronLayout(model_parameters, train, build)
    for group in model_parameters.groups:
        if group.role not in QUANTIZED or group.mtp or (group.experts and build.experts == "stacked"):
            continue
        placed = layout.place(group)
        for owners in () if isinstance(placed, (Misc, Excluded)) else placed:
            patterns = {piece.tensor.name for held in owners.partition.pieces for piece in held}
            slots = range(max(1, owners.experts[1] - owners.experts[0]))
            for pattern, place, slot in product(sorted(patterns), owners.layers, slots):
                if place.pp_stage == pp_stage:
                    yield place.layer, pattern.format(vp=place.vp_stage, layer=place.local, expert=slot)


def _told(mine: _T) -> list[_T]:
    """What every training rank says, in their order."""
    if not torch.distributed.is_initialized():
        return [mine]
    told: list[_T] = [mine] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, mine)
    return told


def _build_of(tensors: Mapping[str, torch.Tensor], tp: int) -> MegatronBuild:
    """How the model was built, put together from what every training rank holds.

    A rank may hold none of what tells (a stage without experts, or without the embedding), so ranks tell each other.
    """
    rows = {tensor.shape[0] for name, tensor in tensors.items() if name.endswith(_EMBEDDING)}
    mine: dict[str, Any] = {"experts": _experts_of(tensors), "fused": _fused_norms_of(tensors), "rows": sorted(rows)}
    told = _told(mine)
    experts: set[ExpertsModule] = {kind for rank in told for kind in rank["experts"]}
    fused = {answer for rank in told for answer in rank["fused"]}
    rows = {count for rank in told for count in rank["rows"]}
    if len(experts) > 1 or len(fused) > 1 or len(rows) != 1:
        raise ValueError(
            f"training ranks built the model differently: experts {experts}, fused norms {fused}, embedding rows {rows}"
        )
    return MegatronBuild(
        experts=experts.pop() if experts else "grouped",
        fused_norms=fused.pop() if fused else True,
        padded_vocab=rows.pop() * tp,
    )


def _experts_of(names: Iterable[str]) -> list[ExpertsModule]:
    """How local experts are kept: modules of their own, one tensor for all, or one tensor each; nothing without experts."""
    kinds: dict[ExpertsModule, bool] = {"sequential": False, "stacked": False, "grouped": False}
    for name in names:
        _, found, leaf = name.partition(".mlp.experts.")
        if found:
            kinds["sequential"] |= leaf.startswith("local_experts.")
            kinds["stacked"] |= leaf in {"weight1", "weight2"}
            kinds["grouped"] |= leaf.startswith(("linear_fc1.weight", "linear_fc2.weight"))
    return [kind for kind, present in kinds.items() if present]


def _fused_norms_of(names: Iterable[str]) -> list[bool]:
    """Whether norms live inside the linear they precede; nothing on a rank without layers."""
    held = [name for name in names if ".decoder.layers." in name]
    return [any(name.endswith(_FUSED_NORM) for name in held)] if held else []
