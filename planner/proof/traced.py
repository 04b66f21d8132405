"""The proof of where traced parameters are and go. No rule says where they belong, so ranks and layers are held against
each other: what is read from one place is one parameter, and what arrives on a stage arrives there once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.model.parameters import Role
from mcore_reshard.planner.plan.plan import Plan, TransferGroup

from .report import Violation, distinct, listed, ranks_of


def is_traced(plan: Plan) -> bool:
    """Whether the plan's layouts were read off loaders: then all of its groups were."""
    return any(group.role is Role.TRACED for group in plan.groups)


def check_traced_ranks(plan: Plan) -> Iterator[Violation]:
    yield from _check_stages_of_ranks(plan)
    yield from _check_layers(plan)
    yield from _check_arrivals(plan)


def _check_stages_of_ranks(plan: Plan) -> Iterator[Violation]:
    """Each rank is named once in a grid, and lies on the stage that the grid is of."""
    for world, mesh in (("train", plan.train), ("gen", plan.gen)):

        def use_of(transfers: TransferGroup, is_src: bool = world == "train") -> tuple[int, int]:
            return (transfers.src, transfers.pp_stage) if is_src else (transfers.dst, -1)

        for transfers in distinct(plan, use_of):
            grid, stage = use_of(transfers)
            if message := _grid_fault(world, mesh, plan.rank_grids[grid].ravel().tolist(), stage):
                yield Violation.of_group(plan, transfers, "holders", message)


def _grid_fault(world: str, mesh: TrainMesh | GenMesh, ranks: list[int], stage: int) -> str:
    if outside := [rank for rank in ranks if not 0 <= rank < mesh.world]:
        return f"{world} ranks {listed(outside)} are not among {mesh.world}"
    if len(set(ranks)) < len(ranks):
        return f"{world} ranks {listed(ranks)} are not named once each"
    stages = sorted({mesh.coordinate(rank)["pp"] for rank in ranks})
    expected = stages[:1] if stage < 0 else [stage]
    return "" if stages == expected else f"{world} ranks {listed(ranks)} lie on stages {listed(stages)}"


def _check_layers(plan: Plan) -> Iterator[Violation]:
    """A place in the trainer holds one layer, the same for all parameters of a tensor's name."""
    layer_at: dict[tuple[str, int, int, int], int] = {}
    for transfers in plan.transfer_groups:
        for name in {p.tensor.name for part in plan.patterns[transfers.pattern].src.pieces for p in part}:
            for place in transfers.layers:
                key = (name, transfers.pp_stage, place.vp_stage, place.local)
                if (layer := layer_at.setdefault(key, place.layer)) != place.layer and place.local >= 0:
                    message = f"layers {layer} and {place.layer} are read from index {place.local} of {name}"
                    yield Violation(
                        "places", plan.groups[transfers.group].name_pattern, ranks_of(plan, transfers), message
                    )


def _check_arrivals(plan: Plan) -> Iterator[Violation]:
    """Every bulk parameter arrives on a stage of the engine, and nowhere twice."""
    counts: dict[int, Counter[tuple[int, int]]] = {}
    for transfers in plan.transfer_groups:
        group = plan.groups[transfers.group]
        count = counts.setdefault(transfers.group, Counter())
        stage = plan.gen.coordinate(max(0, int(np.min(plan.rank_grids[transfers.dst]))) % plan.gen.world)["pp"]
        experts = range(*transfers.experts) if group.experts else (0,)
        for place in transfers.layers:
            count.update((stage * (1 << 20) + place.layer + 1, expert) for expert in experts)
    for number, count in counts.items():
        group = plan.groups[number]
        arrived = {(key % (1 << 20) - 1, expert) for key, expert in count}
        wanted = {(layer, expert) for layer in group.layers or (-1,) for expert in range(max(1, group.experts))}
        twice = [key for key, times in count.items() if times > 1]
        if missing := sorted(wanted - arrived):
            name = group.name(*missing[0])
            yield Violation.of_all(plan, name, "arrivals", f"never arrives (and {len(missing) - 1} more)")
        if twice:
            name = group.name(twice[0][0] % (1 << 20) - 1, twice[0][1])
            yield Violation.of_all(plan, name, "arrivals", f"arrives {count[twice[0]]} times on one stage")
