"""From a live trainer to the plan that both worlds run: read the mesh off the model, plan, hand the plan over.

    plan = plan_refit(config, model_chunks, gen=GenMesh(tp=4), model="qwen3-30b-a3b")   # on every training rank
    publish_plan(plan, store="10.0.0.1:29600")                                          # on one of them
    plan = fetch_plan(store="10.0.0.1:29600")                                           # on every generation rank

`connect` calls the first two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, TypeVar

import torch

from mcore_reshard.planner.layout.engines import DEFAULT_ENGINE
from mcore_reshard.planner.layout.megatron import ExpertsModule, MegatronBuild, MegatronLayout
from mcore_reshard.planner.layout.mesh import GenMesh, MeshError, TrainMesh
from mcore_reshard.planner.layout.partitions import Excluded, Misc
from mcore_reshard.planner.model.families import parameters_from_config
from mcore_reshard.planner.model.name_patterns import fill
from mcore_reshard.planner.model.parameters import ModelParameters, Role
from mcore_reshard.planner.model.precision import PRECISION_OF, PRECISIONS, QUANTIZED, UNQUANTIZED
from mcore_reshard.planner.plan.make_plan import make_plan
from mcore_reshard.planner.plan.plan import Plan, Policy
from mcore_reshard.planner.proof.prove import require_proof
from mcore_reshard.trainers.world import gather_from_all, own_rank

from .adapters import MergedAdapters
from .alternation import Alternation, alternation_of
from .config_fields import check_config_fields, fields_of_rules
from .model import decoder_of, local_tensors, precisions_of, rank_coordinate, train_mesh_of

_FORMATS = {*PRECISIONS} - {*UNQUANTIZED}
_Key = TypeVar("_Key", int, str)


def plan_refit(
    config: Mapping[str, Any],
    model_chunks: Sequence[torch.nn.Module],
    gen: GenMesh,
    *,
    model: str = "",
    policy: Policy = "exact",
    engine: str = DEFAULT_ENGINE,
    gen_dtype: str | None = None,
    adapters: MergedAdapters | None = None,
) -> Plan:
    """Plan the refit of a live Megatron-Core model into the mesh of an engine, and prove it.

    `config` is the model's HF config.json; the options are those of `make_plan`. Collective over the training world
    (torch's default group): all ranks get the same plan. Raises ConfigError, MeshError, ProofError, or ValueError for a
    model that no plan describes, such as one with LoRA adapters that are not given, or whose config contradicts the HF
    config.
    """
    model_parameters = parameters_from_config(config)
    train = train_mesh_of(model_chunks)
    refuse_other_rank_orders(train, rank_coordinate(model_chunks))
    tensors = adapters.local_tensors() if adapters is not None else local_tensors(model_chunks)
    refuse_adapters(tensors)
    check_config_fields(model_chunks, fields_of_rules(model_parameters.architecture))
    build = _agree_on_build(tensors, train.tp, alternation_of(decoder_of(model_chunks[0]).config))
    train_dtype = _agree_on_precision(precisions_of(tensors), model_parameters.dtype)
    unquantized: list[int] = []
    if train_dtype in _FORMATS:
        pp_stage = train.coordinate(own_rank())["pp"]
        weights = _linear_weights(model_parameters, train, build, pp_stage)
        unquantized = _find_unquantized_layers(tensors, weights)
    plan = make_plan(
        model_parameters,
        train,
        gen,
        model=model,
        policy=policy,
        engine=engine,
        build=build,
        train_dtype=train_dtype,
        gen_dtype=gen_dtype,
        train_unquantized_layers=unquantized,
    )
    require_proof(plan)
    _refuse_alternating_misc(plan, build)
    return plan


def refuse_other_rank_orders(train: TrainMesh, coordinate: dict[str, int]) -> None:
    """Raise MeshError, on every rank, if one of them is not where RankGenerator's default order puts it.

    Megatron-Bridge's `use_tp_pp_dp_mapping` initializes Megatron with order="tp-cp-ep-pp-dp" (training/initialize.py).
    """
    remedy = "initialize Megatron-Core with order='tp-cp-ep-dp-pp', its default (Megatron-Bridge: use_tp_pp_dp_mapping=False)"
    for global_rank, actual in enumerate(gather_from_all(coordinate)):
        planned = train.coordinate(global_rank)
        if wrong := [axis for axis in actual if actual[axis] != planned[axis]]:
            in_megatron, in_plan = (" ".join(f"{axis}={place[axis]}" for axis in wrong) for place in (actual, planned))
            difference = f"Megatron-Core has rank {global_rank} at {in_megatron}, a plan has it at {in_plan}"
            raise MeshError("no plan fits this order of training ranks", [difference, remedy])


def refuse_adapters(names: Iterable[str]) -> None:
    """Raise ValueError, on every rank, if one holds a module that Megatron-Bridge wrapped (peft/adapter_wrapper.py)."""
    first_wrapped = next((name for name in names if ".to_wrap." in name), "")
    if wrapped := [name for name in gather_from_all(first_wrapped) if name]:
        raise ValueError(
            f"the model has adapters (LoRA), as in {wrapped[0]}: no tensor of the trainer holds the weights that the engine"
            " needs. Connect by mr.megatron.connect, which merges them, or plan with adapters=merged_adapters(bridge,"
            " model_chunks) (trainers/megatron/adapters.py)"
        )


def _agree_on_precision(first_in: dict[str, str], main: str) -> str | None:
    """The `train_dtype` of a world whose ranks hold matrices in these precisions; `main` is the config's dtype.

    `first_in` names one matrix of this rank for each precision. Collective: a pipeline stage may hold no quantized one.
    """
    name_in = _merge_first(first_in)
    formats, dtypes = name_in.keys() & _FORMATS, name_in.keys() - _FORMATS
    known = {main} if formats else {main, *PRECISION_OF}
    if len(formats) > 1 or len(dtypes) > 1 or dtypes - known:
        mixture = ", ".join(f"{name_in[precision]} in {precision}" for precision in sorted(name_in))
        raise ValueError(
            f"training ranks hold matrices in a mixture that no plan describes: {mixture}; hold all of them in bfloat16, in"
            f" float32 or in the config's {main}, or those that are not FP8 in {main}"
        )
    return next(iter(formats), None) or next((PRECISION_OF[dtype] for dtype in dtypes if dtype != main), None)


def _find_unquantized_layers(tensors: Mapping[str, torch.Tensor], weights: Iterable[tuple[int, str]]) -> list[int]:
    """The layers of an FP8 trainer in which no rank holds a quantized linear weight. `weights`: all that may be quantized.

    Collective: a layer may be on several ranks. Raises ValueError for layers that are quantized in part.
    """
    own_plain: dict[int, str] = {}  # by layer: its first weight
    own_quantized: dict[int, str] = {}
    for layer, name in weights:
        if name in tensors:
            own = own_quantized if tensors[name].dtype is torch.float8_e4m3fn else own_plain
            own.setdefault(layer, name)
    plain, quantized = _merge_first(own_plain), _merge_first(own_quantized)
    mixed = [
        f"of layer {layer} {quantized[layer]} is, {plain[layer]} is not" for layer in sorted(plain.keys() & quantized)
    ]
    if mixed:
        raise ValueError(
            f"training ranks keep layers quantized in part: {'; '.join(mixed)}; quantize all linear weights of a layer or"
            " none, as fp8_param and first_last_layers_bf16 do"
        )
    return sorted(plain)


def _merge_first(own: dict[_Key, str]) -> dict[_Key, str]:
    """The dicts of all ranks in one; for a key of several ranks the lowest rank's name counts. Collective."""
    return {key: name for rank in reversed(gather_from_all(own)) for key, name in rank.items()}


def _linear_weights(
    model_parameters: ModelParameters, train: TrainMesh, build: MegatronBuild, pp_stage: int
) -> Iterator[tuple[int, str]]:
    """(layer, tensor) of every weight that fp8_param quantizes on a pipeline stage.

    It skips multi-token-prediction layers, which are in no plan, and GroupedMLP, which Transformer Engine does not build.
    """
    layout = MegatronLayout(model_parameters, train, build)
    for group in model_parameters.groups:
        if group.role not in QUANTIZED or group.mtp or (group.experts and build.experts == "stacked"):
            continue
        placed = layout.place(group)
        for owners in () if isinstance(placed, (Misc, Excluded)) else placed:
            patterns = {piece.tensor.name for part in owners.partition.pieces for piece in part}
            slots = range(max(1, owners.experts[1] - owners.experts[0]))
            for pattern, place, slot in product(sorted(patterns), owners.layers, slots):
                if owners.pp_stage == pp_stage:
                    yield place.layer, fill(pattern, vp=place.vp_stage, layer=place.local, expert=slot)


def _refuse_alternating_misc(plan: Plan, build: MegatronBuild) -> None:
    """Raise ValueError if experts whose gate and up take turns would go by misc: Megatron-Bridge's export is wrong there."""
    roles: set[Role] = set()
    if build.alternating_experts:
        roles |= {Role.EXPERT_GATE, Role.EXPERT_UP, Role.STACKED_GATE_UP, Role.STACKED_GATE_UP_BIAS}
    if build.alternating_shared:
        roles |= {Role.SHARED_GATE, Role.SHARED_UP}
    wrong = [entry for entry in plan.misc if plan.groups[entry.group].role in roles]
    if wrong:
        listed = "\n  ".join(f"{plan.groups[entry.group].name_pattern}: {entry.reason}" for entry in wrong)
        raise ValueError(
            "gate and up of these experts take turns (moe_mlp_glu_interleave_size, moe_shared_expert_glu_interleave_size),"
            " which Megatron-Bridge's export does not undo, and they cannot go by bulk:"
            f"\n  {listed}\nbuild the trainer without these fields, or give the engine the trainer's precision"
        )


def _agree_on_build(tensors: Mapping[str, torch.Tensor], tp: int, alternation: Alternation) -> MegatronBuild:
    """The model's build, read off its tensors and config. Collective: a stage may have no experts, or not the embedding."""
    in_layers = [name for name in tensors if ".decoder.layers." in name]
    # Whether norms live inside the linear that they precede; empty on a rank without layers.
    own_fused = {any(name.endswith(".layer_norm_weight") for name in in_layers)} if in_layers else set()
    embedding = "embedding.word_embeddings.weight"
    own_rows = {tensor.shape[0] for name, tensor in tensors.items() if name.endswith(embedding)}
    evidence = gather_from_all((_experts_modules(tensors), own_fused, own_rows, alternation))
    modules: set[ExpertsModule] = set().union(*(rank[0] for rank in evidence))
    fused: set[bool] = set().union(*(rank[1] for rank in evidence))
    rows: set[int] = set().union(*(rank[2] for rank in evidence))
    alternations = {rank[3] for rank in evidence}
    if len(modules) > 1 or len(fused) > 1 or len(rows) != 1 or len(alternations) > 1:
        raise ValueError(
            f"training ranks built the model differently: experts {modules}, fused norms {fused}, embedding rows {rows},"
            f" interleaved rows of gate and up {sorted(map(tuple, alternations))}; build it from one config on all ranks"
        )
    return MegatronBuild(
        experts=modules.pop() if modules else "grouped",
        fused_norms=fused.pop() if fused else True,
        padded_vocab=rows.pop() * tp,
        alternating_experts=alternation.experts,
        alternating_shared=alternation.shared,
    )


def _experts_modules(names: Iterable[str]) -> set[ExpertsModule]:
    """The storage of local experts: a module each, one tensor for all, or one tensor each; empty without experts."""
    module_of: dict[str, ExpertsModule] = {"local_experts": "sequential", "weight1": "stacked", "linear_fc1": "grouped"}
    leaves = {name.partition(".mlp.experts.")[2].partition(".")[0] for name in names}
    return {module_of[leaf] for leaf in leaves & module_of.keys()}
