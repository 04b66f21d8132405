"""The proof of where parameters are and go: holders on both meshes, layers in the pipelines, arrivals, stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.layout.mesh import GenMesh, LayerPlace, MeshError, TrainMesh
from mcore_reshard.planner.model.parameters import STACKED_ROLES, ParameterGroup, Role
from mcore_reshard.planner.plan.plan import Plan, TransferGroup

from .report import Violation, distinct, listed, ranks_of
from .traced import check_traced_ranks, is_traced

_TrainPlaces = tuple[tuple[int, LayerPlace], ...]  # (pp_stage, place) by decoder layer
_GenStages = tuple[int, ...]  # by decoder layer


def check_ranks(plan: Plan) -> Iterator[Violation]:
    if is_traced(plan):
        yield from check_traced_ranks(plan)
        yield from _check_stages(plan)
        return
    layers = 1 + max((layer for group in plan.groups if not group.mtp for layer in group.layers), default=-1)
    try:
        train_places, gen_stages = plan.train.place_layers(layers), plan.gen.stage_of_layers(layers)
    except MeshError as error:
        last = next((group.name(layers - 1, 0) for group in plan.groups if layers - 1 in group.layers), "no layer")
        yield Violation.of_all(plan, last, "places", str(error))
        return
    misplaced = list(_check_places(plan, train_places, gen_stages))
    yield from misplaced
    yield from _check_holders(plan, gen_stages)
    if not misplaced:  # arrivals are counted per stage
        yield from _check_arrivals(plan, gen_stages)
    yield from _check_stages(plan)


def _check_places(plan: Plan, train_places: _TrainPlaces, gen_stages: _GenStages) -> Iterator[Violation]:
    """Layers are read and written where the pipelines keep them, all other parameters at the pipeline's ends."""
    has_mtp = any(group.mtp for group in plan.groups)

    def use_of(transfers: TransferGroup) -> Hashable:
        group = plan.groups[transfers.group]
        return transfers.pp_stage, transfers.layers, bool(group.layers) or group.role

    for transfers in distinct(plan, use_of):
        group = plan.groups[transfers.group]
        for place in transfers.layers:
            if message := _place_fault(plan.train, train_places, transfers.pp_stage, place, group.role, has_mtp):
                name = group.name(place.layer, transfers.experts[0])
                yield Violation("places", name, ranks_of(plan, transfers), message)
        layers = [place.layer for place in transfers.layers]
        if len({gen_stages[layer] for layer in layers if layer >= 0}) > 1:
            message = f"layers {listed(layers)} are on different stages of the engine"
            yield Violation.of_group(plan, transfers, "places", message)


def _place_fault(
    mesh: TrainMesh, train_places: _TrainPlaces, pp_stage: int, place: LayerPlace, role: Role, has_mtp: bool
) -> str:
    vp_stage, layer = place.vp_stage, place.layer
    if layer >= len(train_places):
        return f"layer {layer} is not among the {len(train_places)} of the pipeline"
    if layer >= 0:
        stage, kept = train_places[layer]
        if (pp_stage, place) == (stage, kept):
            return ""
        return (
            f"layer {layer} is read from stage {pp_stage} chunk {vp_stage} index {place.local}, the pipeline"
            f" keeps it on stage {stage} chunk {kept.vp_stage} index {kept.local}"
        )
    stage, chunk = mesh.pp - 1, mesh.vpp - 1
    if role is Role.EMBEDDING:
        stage, chunk = 0, 0
    elif role is Role.FINAL_NORM and has_mtp:  # follows the last decoder layer, prediction layers come after it
        stage, chunk = train_places[-1][0], train_places[-1][1].vp_stage
    if (pp_stage, vp_stage) == (stage, chunk):
        return ""
    return f"it is read from stage {pp_stage} chunk {vp_stage}, the pipeline keeps it on stage {stage} chunk {chunk}"


def _check_holders(plan: Plan, gen_stages: _GenStages) -> Iterator[Violation]:
    """The ranks named are those that hold the parts on the mesh, for the right stage and experts."""

    def use_of(transfers: TransferGroup, *end: int) -> Hashable:
        group = plan.groups[transfers.group]
        return end, transfers.experts, group.experts, group.role in STACKED_ROLES

    for transfers in distinct(plan, lambda group: use_of(group, group.src, group.pp_stage, group.src_slot)):
        if message := _source_fault(plan, transfers, plan.groups[transfers.group]):
            yield Violation.of_group(plan, transfers, "holders", message)
    for transfers in distinct(plan, lambda group: use_of(group, group.dst, group.layers[0].layer, group.dst_slot)):
        if message := _destination_fault(plan, gen_stages, transfers, plan.groups[transfers.group]):
            yield Violation.of_group(plan, transfers, "holders", message)


def _source_fault(plan: Plan, transfers: TransferGroup, group: ParameterGroup) -> str:
    mesh, ranks, stage = plan.train, plan.rank_grids[transfers.src], transfers.pp_stage
    if not 0 <= stage < mesh.pp:
        return f"stage {stage} is not among the {mesh.pp} of the mesh"
    if group.role in STACKED_ROLES:
        return _same_holders("train", mesh.expert_ranks(stage).reshape(mesh.ep, -1), ranks)
    if not group.experts:
        dense = mesh.dense_ranks(stage)
        return _same_holders("train", dense.reshape(1, -1) if len(ranks) == 1 else dense, ranks)
    if group.experts % mesh.ep:
        return f"{group.experts} experts do not divide over ep = {mesh.ep}"
    local = group.experts // mesh.ep
    ep = transfers.experts[0] // local
    if transfers.experts[1] > (ep + 1) * local or transfers.src_slot != transfers.experts[0] - ep * local:
        return _slot_fault("training", transfers, transfers.src_slot)
    return _same_holders("train", mesh.expert_ranks(stage)[ep], ranks)


def _destination_fault(plan: Plan, gen_stages: _GenStages, transfers: TransferGroup, group: ParameterGroup) -> str:
    mesh, ranks, layer = plan.gen, plan.rank_grids[transfers.dst], transfers.layers[0].layer
    stage = _gen_stage(mesh, ranks) if layer < 0 else gen_stages[min(layer, len(gen_stages) - 1)]
    dense, along_experts = mesh.dense_ranks(stage), mesh.expert_ranks(stage)
    if group.role in STACKED_ROLES and mesh.ep > 1:
        return _same_holders("gen", along_experts.reshape(mesh.ep, 1), ranks)
    if not group.experts or mesh.ep == 1:
        if group.experts and transfers.dst_slot != transfers.experts[0]:
            return _slot_fault("generation", transfers, transfers.dst_slot)
        return _same_holders("gen", dense.reshape(1, -1) if len(ranks) == 1 else dense, ranks)
    base, left = divmod(group.experts, mesh.ep)
    firsts = [ep * base + min(ep, left) for ep in range(mesh.ep + 1)]
    ep = next(e for e in range(mesh.ep) if transfers.experts[0] < firsts[e + 1])
    if transfers.experts[1] > firsts[ep + 1] or transfers.dst_slot != transfers.experts[0] - firsts[ep]:
        return _slot_fault("generation", transfers, transfers.dst_slot)
    return _same_holders("gen", along_experts[ep].reshape(1, 1), ranks)


def _gen_stage(mesh: GenMesh, ranks: NDArray[np.int32]) -> int:
    """The pipeline stage of the first rank; the last stage for ranks outside of the mesh."""
    return min(mesh.coordinate(max(0, int(ranks[0, 0])))["pp"], mesh.pp - 1)


def _slot_fault(side: str, transfers: TransferGroup, slot: int) -> str:
    first, stop = transfers.experts
    return f"experts {first} to {stop - 1} do not start at slot {slot} of one {side} rank"


def _same_holders(world: str, expected: NDArray[np.int32], ranks: NDArray[np.int32]) -> str:
    """Replicas may be named in any order."""
    if ranks.shape == expected.shape and (np.sort(ranks, axis=1) == np.sort(expected, axis=1)).all():
        return ""
    return f"{world} ranks {_by_part(ranks)} hold the parts on paper, {_by_part(expected)} on the mesh"


def _by_part(ranks: NDArray[np.int32]) -> str:
    shown = [listed(row) for row in ranks[:8].tolist()]
    return "[" + " | ".join(shown) + (f" | ... {len(ranks)} parts" if len(ranks) > 8 else "") + "]"


def _check_arrivals(plan: Plan, gen_stages: _GenStages) -> Iterator[Violation]:
    """Every bulk parameter arrives once on each stage that it is meant for."""
    rows = [{layer: row for row, layer in enumerate(group.layers or (-1,))} for group in plan.groups]  # by layer
    # How often each (layer, expert) of a group arrives on a stage.
    counts: dict[tuple[int, int], NDArray[np.int8]] = {}
    for transfers in plan.transfer_groups:
        number, (first, _) = transfers.group, transfers.experts
        key = number, _gen_stage(plan.gen, plan.rank_grids[transfers.dst])
        if key not in counts:
            listed_layers = max(1, len(plan.groups[number].layers))  # more than rows where one is listed twice
            counts[key] = np.zeros((listed_layers, max(1, plan.groups[number].experts)), dtype=np.int8)
        layers = [rows[number][place.layer] for place in transfers.layers]
        counts[key][layers, first : first + transfers.expert_count] += 1
    stages_of = _stages_of_ends(plan, {key for key in counts if not plan.groups[key[0]].layers})
    for number in sorted({group for group, _ in counts}):
        group = plan.groups[number]
        for stage in range(plan.gen.pp):
            on_stage = [gen_stages[layer] == stage for layer in group.layers] or [stage in stages_of[number]]
            count = counts.get((number, stage), np.zeros((len(on_stage), max(1, group.experts)), np.int8))
            wrong = np.argwhere(count != np.array(on_stage)[:, None])
            if not len(wrong):
                continue
            row, expert = wrong[0].tolist()
            name, times = group.name(group.layers[row] if group.layers else None, expert), int(count[row, expert])
            unexpected = {0: "never arrives", 1: "arrives, though it lives on another stage"}
            how = unexpected.get(times, f"arrives {times} times")
            more = f" (and {len(wrong) - 1} more of {group.name_pattern})" if len(wrong) > 1 else ""
            ranks = f"train {listed(range(plan.train.world))} -> gen {listed(plan.gen.dense_ranks(stage).ravel())}"
            yield Violation("arrivals", name, ranks, f"{how} on stage {stage} of the engine{more}")


def _stages_of_ends(plan: Plan, arrivals: set[tuple[int, int]]) -> dict[int, set[int]]:
    """The engine stages that must get each parameter outside of the layers.

    Some engines keep the embedding on the first stage and the rest on the last; an embedding that is the head too is on
    both. Other engines keep all on every stage. So if any parameter arrives elsewhere, all must arrive everywhere.
    """
    last = plan.gen.pp - 1
    tied = all(group.role is not Role.LM_HEAD for group in plan.groups)
    ends: dict[int, set[int]] = defaultdict(set)
    for number, _ in arrivals:
        ends[number] = ({0, last} if tied else {0}) if plan.groups[number].role is Role.EMBEDDING else {last}
    if any(stage not in ends[number] for number, stage in arrivals):
        return {number: set(range(plan.gen.pp)) for number in ends}
    return ends


def _check_stages(plan: Plan) -> Iterator[Violation]:
    """Transfer groups leave in stage order, from training ranks to generation ranks only: no stage waits for a later one."""
    last = 0
    for transfers in plan.transfer_groups:
        if transfers.pp_stage < last:
            message = f"stage {transfers.pp_stage} follows stage {last}; stages run in order"
            yield Violation.of_group(plan, transfers, "stages", message)
        last = max(last, transfers.pp_stage)
