"""Plans out of traces written by hand: plain boxes in, transfers, routes and refusals out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_reshard.planner.layout.condense import CondensedTrace, ParameterNames, condense, untraceable
from mcore_reshard.planner.layout.geometry import LocalTensor
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.layout.strided import StridedCopy
from mcore_reshard.planner.layout.traced import TracedLayoutError, TracedLayouts, read_layouts
from mcore_reshard.planner.layout.traces import HfTensor, RankTrace, TracedTensor
from mcore_reshard.planner.model.precision import BLOCK_FP8, FP8, PrecisionError
from mcore_reshard.planner.plan.make_plan import plan_traced
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.trace_check import trace_faults

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


# --- float8 engines, and casts

BLOCK = replace(BLOCK_FP8, block=(2, 2))
SCALES = WEIGHT + "_scale_inv"


def fp8_engine(rank: int, *, plain_layer: int = -1, scales_at: dict[str, int] | None = None) -> RankTrace:
    """Rank `rank` of two in FP8 blocks of 2 x 2. With `scales_at`, also the loader's place of scales, rows on by so many."""
    tensors = []
    for layer in range(2):
        name, norm, form = WEIGHT.format(layer), NORM.format(layer), FP8 if layer != plain_layer else "bfloat16"
        half = tensor(name, (4, 4), (name, rows(rank * 4, rank * 4 + 4)))
        tensors.append(replace(half, tensor=replace(half.tensor, dtype=form)))
        tensors.append(tensor(norm, (4,), (norm, StridedCopy((4,), 0, (1,), 0, (1,)))))
        if form == FP8:
            scales = name + "_scale_inv"
            grid = TracedTensor(LocalTensor(scales, (2, 2), "float32"))
            if scales_at is not None:
                first = rank * 2 + scales_at.get(scales, 0)
                grid = replace(grid, copies=((scales, StridedCopy((2, 2), first * 2, (2, 1), 0, (2, 1))),))
            tensors.append(grid)
    return RankTrace(tuple(tensors))


def fp8_trainer(dtype: str) -> CondensedTrace:
    tensors = [
        part
        for n in range(2)
        for part in (
            TracedTensor(
                LocalTensor(f"vp0.decoder.layers.{n}.up.weight", (8, 4), dtype), ((WEIGHT.format(n), rows(0, 8)),)
            ),
            tensor(f"vp0.decoder.layers.{n}.norm", (4,), (NORM.format(n), StridedCopy((4,), 0, (1,), 0, (1,)))),
        )
    ]
    return condense(RankTrace(tuple(tensors)), NAMES, is_trainer=True)


def layouts_of(gen: list[RankTrace], train: CondensedTrace) -> TracedLayouts:
    traces = [condense(trace, NAMES, is_trainer=False) for trace in gen]
    return read_layouts("mystery", CHECKPOINT, [train], traces, ([0], [0] * len(gen)), "vllm")


def fp8_plan(gen: list[RankTrace], dtype: str = "bfloat16") -> Plan:
    plan = plan_traced(layouts_of(gen, fp8_trainer(dtype)), TrainMesh(), GenMesh(tp=len(gen)), form=BLOCK)
    assert plan.prove(), plan.prove().violations
    return plan


@pytest.mark.parametrize(("dtype", "casts"), [("bfloat16", [("bfloat16", FP8)]), (FP8, [])])
def test_matrices_that_the_engine_keeps_in_fp8_travel_with_their_scales(dtype: str, casts: list[object]) -> None:
    plan = fp8_plan([fp8_engine(0), fp8_engine(1)], dtype)
    (pair,) = plan.pairs
    weight, scales = plan.groups[pair.weight], plan.groups[pair.scales]
    assert (weight.name_pattern, weight.dtype, pair.block) == ("model.layers.{layer}.up.weight", FP8, (2, 2))
    assert (scales.name_pattern, scales.shape) == ("model.layers.{layer}.up.weight_scale_inv", (4, 2))
    assert [(cast.src, cast.dst) for cast in plan.casts] == casts and unplanned(plan) == {}
    assert {(str(t.region), t.dst.rank) for t in plan.transfers(parameter=SCALES.format(1))} == {
        ("[0:2, 0:2]", 0),
        ("[2:4, 0:2]", 1),
    }


def test_layers_that_the_engine_leaves_unquantized_are_a_group_of_their_own() -> None:
    plan = fp8_plan([fp8_engine(0, plain_layer=0), fp8_engine(1, plain_layer=0)])
    found = {group.layers: group.dtype for group in plan.groups if group.name_pattern.endswith("up.weight")}
    assert found == {(0,): "bfloat16", (1,): FP8}
    assert [plan.groups[pair.scales].layers for pair in plan.pairs] == [(1,)]


def test_an_fp8_trainer_does_not_send_to_an_unquantized_layer() -> None:
    plan = fp8_plan([fp8_engine(0, plain_layer=0), fp8_engine(1, plain_layer=0)], FP8)
    assert unplanned(plan) == {
        WEIGHT.format(0): "trainer holds block FP8, engine bfloat16: nothing dequantizes on the way"
    }


def test_a_part_that_splits_a_block_goes_by_misc_with_its_scales() -> None:
    layouts = layouts_of([fp8_engine(0), fp8_engine(1)], fp8_trainer("bfloat16"))
    plan = plan_traced(layouts, TrainMesh(), GenMesh(tp=2), form=replace(BLOCK, block=(8, 4)))
    assert plan.prove() and set(unplanned(plan)) == {name.format(n) for name in (WEIGHT, SCALES) for n in range(2)}
    assert "rows 0:4 of 8 at 0, which splits a block of 8x4" in unplanned(plan)[SCALES.format(0)]


def test_a_format_must_be_what_the_engine_has() -> None:
    quantized, plain = layouts_of([fp8_engine(0)], fp8_trainer("bfloat16")), layouts_of([], fp8_trainer("bfloat16"))
    with pytest.raises(PrecisionError, match=r"vllm keeps 1 groups of weights in float8_e4m3fn, such as model\.layers"):
        plan_traced(quantized, TrainMesh(), GenMesh())
    with pytest.raises(
        PrecisionError, match="vllm keeps no weight in float8_e4m3fn: give its config a quantization_conf"
    ):
        plan_traced(plain, TrainMesh(), GenMesh(), form=BLOCK)


def test_other_tensors_beside_quantized_ones_must_be_filled() -> None:
    static = TracedTensor(LocalTensor("model.layers.0.up.input_scale", (1,), "float32"))
    engine = replace(fp8_engine(0), tensors=(*fp8_engine(0).tensors, static))
    with pytest.raises(TracedLayoutError, match=r"gen:0: model\.layers\.0\.up\.input_scale: no Hugging Face tensor"):
        layouts_of([engine], fp8_trainer("bfloat16"))


@pytest.mark.parametrize(
    ("moved", "expected"),
    [
        ({}, []),
        ({SCALES.format(0): -1}, [SCALES.format(0)]),
        ({SCALES.format(0): 1, SCALES.format(1): -1}, [SCALES.format(0), SCALES.format(1)]),
    ],
)
def test_scales_that_a_loader_puts_elsewhere_are_found(moved: dict[str, int], expected: list[str]) -> None:
    plan = fp8_plan([fp8_engine(0), fp8_engine(1)])
    faults = trace_faults(plan, "gen", 1, fp8_engine(1, scales_at=moved))
    assert [fault.partition(":")[0] for fault in faults] == expected


def test_exchanged_scales_are_found() -> None:
    plan, names = fp8_plan([fp8_engine(0), fp8_engine(1)]), [SCALES.format(0), SCALES.format(1)]
    exchange = dict(zip(names, reversed(names), strict=True))
    loaded = [
        replace(traced, copies=tuple((exchange.get(name, name), copy) for name, copy in traced.copies))
        for traced in fp8_engine(0, scales_at={}).tensors
    ]
    faults = trace_faults(plan, "gen", 0, RankTrace(tuple(loaded)))
    assert len(faults) == 4 and all("weight_scale_inv" in fault for fault in faults)


@pytest.mark.parametrize(
    ("train", "gen", "cast"),
    [
        ("bfloat16", "float32", True),
        ("float32", "bfloat16", True),
        ("float16", "bfloat16", False),
    ],
)
def test_one_group_of_another_dtype_is_cast_on_the_way_as_the_loader_would(train: str, gen: str, cast: bool) -> None:
    def held_in(dtype: str, trace: RankTrace) -> RankTrace:
        norms = [name.tensor.name.endswith("norm") or "norm." in name.tensor.name for name in trace.tensors]
        return RankTrace(
            tuple(
                replace(traced, tensor=replace(traced.tensor, dtype=dtype)) if is_norm else traced
                for traced, is_norm in zip(trace.tensors, norms, strict=True)
            )
        )

    whole = StridedCopy((4,), 0, (1,), 0, (1,))
    source = [tensor(f"vp0.decoder.layers.{n}.norm", (4,), (NORM.format(n), whole)) for n in range(2)]
    source += [tensor(f"vp0.decoder.layers.{n}.up", (8, 4), (WEIGHT.format(n), rows(0, 8))) for n in range(2)]
    arrives = [tensor(NORM.format(n), (4,), (NORM.format(n), whole)) for n in range(2)]
    arrives += [tensor(WEIGHT.format(n), (8, 4), (WEIGHT.format(n), rows(0, 8))) for n in range(2)]
    trainer_trace = condense(held_in(train, RankTrace(tuple(source))), NAMES, is_trainer=True)
    plan = plan_traced(
        layouts_of([held_in(gen, RankTrace(tuple(arrives)))], trainer_trace), TrainMesh(), GenMesh(), form=None
    )
    assert plan.prove()
    assert [(each.src, each.dst) for each in plan.casts] == ([(train, gen)] if cast else [])
    reason = f"trainer holds {train}, engine {gen}: no cast is declared"
    assert unplanned(plan) == ({} if cast else {NORM.format(n): reason for n in range(2)})
