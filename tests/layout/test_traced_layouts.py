"""Layouts put together from the traces of all ranks: small ones, made by hand."""

from __future__ import annotations

from math import prod

from mcore_reshard.planner.layout.condense import CondensedTrace, ParameterNames, condense
from mcore_reshard.planner.layout.geometry import LocalTensor
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.layout.strided import StridedCopy
from mcore_reshard.planner.layout.traced import read_layouts
from mcore_reshard.planner.layout.traces import HfTensor, RankTrace, TracedTensor
from mcore_reshard.planner.plan.make_plan import plan_traced
from mcore_reshard.planner.plan.plan import Plan


def whole(tensor: str, name: str, checkpoint: dict[str, HfTensor]) -> TracedTensor:
    """A local tensor that is a whole HF tensor."""
    shape, size = checkpoint[name].shape, prod(checkpoint[name].shape)
    local = LocalTensor(tensor, shape, checkpoint[name].dtype)
    return TracedTensor(local, ((name, StridedCopy((size,), 0, (1,), 0, (1,))),))


def trace_of(tensors: dict[str, str], checkpoint: dict[str, HfTensor], *, is_trainer: bool) -> CondensedTrace:
    """A rank whose tensors are whole HF tensors."""
    traced = tuple(whole(tensor, name, checkpoint) for tensor, name in tensors.items())
    return condense(RankTrace(traced), ParameterNames(checkpoint), is_trainer=is_trainer)


def plan_of(checkpoint: dict[str, HfTensor], stages: list[dict[str, str]], gen: dict[str, str]) -> Plan:
    """A plan from pipeline stages of one rank each to an engine of one rank."""
    train = [trace_of(tensors, checkpoint, is_trainer=True) for tensors in stages]
    engine = trace_of(gen, checkpoint, is_trainer=False)
    layouts = read_layouts("made", checkpoint, train, [engine], (range(len(stages)), [0]), "vllm")
    return plan_traced(layouts, TrainMesh(pp=len(stages)), GenMesh())


def test_layers_of_several_shapes_are_groups_of_their_own() -> None:
    shapes = [(4, 6), (2, 6), (4, 6)]
    checkpoint = {f"layers.{layer}.up.weight": HfTensor(shape, "bfloat16") for layer, shape in enumerate(shapes)}
    plan = plan_of(
        checkpoint, [{f"vp0.decoder.{name}": name for name in checkpoint}], {name: name for name in checkpoint}
    )
    assert [(group.name_pattern, group.shape, group.layers) for group in plan.groups] == [
        ("layers.{layer}.up.weight", (4, 6), (0, 2)),
        ("layers.{layer}.up.weight", (2, 6), (1,)),
    ]
    assert plan.prove().ok and plan.bulk_bytes == 2 * sum(prod(shape) for shape in shapes)


def test_layers_with_other_experts_keep_their_pattern_where_the_shapes_differ_too() -> None:
    checkpoint = {
        f"layers.{layer}.experts.{expert}.up.weight": HfTensor((2 + layer, 6), "bfloat16")
        for layer, experts in enumerate((4, 2))
        for expert in range(experts)
    }
    names = ParameterNames(checkpoint)
    pattern = "layers.{layer}.experts.{expert}.up.weight"
    assert names.experts == {f"{pattern} [2, 6] bfloat16": 4, f"{pattern} [3, 6] bfloat16": 2}
    assert {names.name_pattern(each) for each in names.by_pattern} == {pattern}


def test_a_parameter_of_two_pipeline_stages_comes_from_the_first() -> None:
    checkpoint = {"embed.weight": HfTensor((8, 4), "bfloat16"), "norm.weight": HfTensor((4,), "bfloat16")}
    first = {"vp0.embedding.weight": "embed.weight"}
    plan = plan_of(
        checkpoint, [first, {**first, "vp0.norm.weight": "norm.weight"}], {name: name for name in checkpoint}
    )
    assert plan.prove().ok
    assert plan.send_bytes.tolist() == [64, 8]
