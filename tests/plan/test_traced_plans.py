"""Plans out of traces written by hand: plain boxes in, transfers, routes and refusals out."""

from __future__ import annotations

import pytest

from mcore_reshard.planner.layout.condense import CondensedTrace, ParameterNames, condense, untraceable
from mcore_reshard.planner.layout.geometry import LocalTensor
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.layout.strided import StridedCopy
from mcore_reshard.planner.layout.traced import TracedLayoutError, read_layouts
from mcore_reshard.planner.layout.traces import HfTensor, RankTrace, TracedTensor
from mcore_reshard.planner.plan.make_plan import plan_traced
from mcore_reshard.planner.plan.plan import Plan

WEIGHT, NORM = "model.layers.{}.up.weight", "model.layers.{}.norm.weight"
CHECKPOINT = {WEIGHT.format(layer): HfTensor((8, 4), "bfloat16") for layer in range(2)} | {
    NORM.format(layer): HfTensor((4,), "bfloat16") for layer in range(2)
}
NAMES = ParameterNames(CHECKPOINT)


def rows(start: int, stop: int, at: int = 0) -> StridedCopy:
    return StridedCopy((stop - start, 4), start * 4, (4, 1), at * 4, (4, 1))


def tensor(name: str, shape: tuple[int, ...], *copies: tuple[str, StridedCopy], computed: str = "") -> TracedTensor:
    parameters = tuple(name for name, _ in copies) if computed else ()
    return TracedTensor(LocalTensor(name, shape, "bfloat16"), () if computed else copies, (), computed, parameters)


def trainer() -> CondensedTrace:
    """A trainer that keeps each layer's norm behind its matrix, in one tensor."""
    whole = StridedCopy((4,), 0, (1,), 32, (1,))
    tensors = [
        tensor(f"vp0.decoder.layers.{n}.up", (9, 4), (WEIGHT.format(n), rows(0, 8)), (NORM.format(n), whole))
        for n in range(2)
    ]
    return condense(RankTrace(tuple(tensors)), NAMES, is_trainer=True)


def engine(rank: int, *, norms: bool = True, computed: str = "") -> CondensedTrace:
    """Rank `rank` of two, with half of the rows and whole norms."""
    tensors = []
    for layer in range(2):
        name = WEIGHT.format(layer)
        tensors.append(tensor(name, (4, 4), (name, rows(rank * 4, rank * 4 + 4)), computed=computed if layer else ""))
        if norms:
            norm = NORM.format(layer)
            tensors.append(tensor(norm, (4,), (norm, StridedCopy((4,), 0, (1,), 0, (1,)))))
    return condense(RankTrace(tuple(tensors)), NAMES, is_trainer=False)


def plan_of(*gen: CondensedTrace) -> Plan:
    layouts = read_layouts("mystery", CHECKPOINT, [trainer()], gen, ([0], [0] * len(gen)), "vllm")
    plan = plan_traced(layouts, TrainMesh(), GenMesh(tp=len(gen)))
    assert plan.prove(), plan.prove().violations
    return plan


def unplanned(plan: Plan) -> dict[str, str]:
    return {name: entry.reason for entry in (*plan.misc, *plan.excluded) for name in plan.groups[entry.group].names()}


def test_boxes_that_meet_are_transfers() -> None:
    plan = plan_of(engine(0), engine(1))
    found = sorted((t.parameter, str(t.region), t.dst.rank) for t in plan.transfers())
    assert found == sorted(
        [
            *((NORM.format(layer), "[0:4]", rank) for layer in range(2) for rank in range(2)),
            *(
                (WEIGHT.format(layer), f"[{4 * rank}:{4 * rank + 4}, 0:4]", rank)
                for layer in range(2)
                for rank in range(2)
            ),
        ]
    )
    assert unplanned(plan) == {}


def test_a_computed_tensor_sends_its_parameter_by_misc() -> None:
    plan = plan_of(engine(0, computed="aten.neg at x.py:1"), engine(1))
    assert unplanned(plan) == {WEIGHT.format(1): "model.layers.{layer}.up.weight: aten.neg at x.py:1"}


def test_what_the_engine_drops_is_excluded() -> None:
    plan = plan_of(engine(0, norms=False), engine(1, norms=False))
    assert {*unplanned(plan)} == {NORM.format(0), NORM.format(1)} and len(plan.excluded) == 1


def test_a_loader_that_cannot_be_traced_takes_the_whole_model_by_misc() -> None:
    lost = untraceable(CHECKPOINT, "load_weights", "it raises")
    plan = plan_of(lost, engine(1))
    assert unplanned(plan).keys() == CHECKPOINT.keys() and plan.bulk_bytes == 0
    assert plan.misc_bytes == 2 * (32 + 4) * 2


def test_an_engine_tensor_that_nothing_fills_is_refused_by_name() -> None:
    bare = condense(RankTrace((tensor("lm_head.bias", (4,)),)), NAMES, is_trainer=False)
    with pytest.raises(TracedLayoutError, match=r"gen:1: lm_head.bias: no Hugging Face tensor fills it"):
        plan_of(engine(0), bare)
