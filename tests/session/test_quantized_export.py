"""Whole tensors for a quantized engine: what the misc route and golden carry where the trainer keeps bf16."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from helpers.handmade import allocate
from helpers.plans import Case
from helpers.ranks import run_ranks, values

from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.session.endpoints import Export, GenerationEndpoint, TrainEndpoint
from mcore_reshard.trainers.quantized_export import quantized_export

DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
CUT = Case("tiny-llama", "tp=2", "tp=4", dtypes=("bf16", "fp8"), block=(8, 32))  # down_proj goes to misc


def weights(names: Sequence[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
    assert names is None or not any(name.endswith("scale_inv") for name in names), "no trainer has these"
    held = {NORM: torch.ones(64, dtype=torch.bfloat16), DOWN: torch.zeros(64, 96, dtype=torch.bfloat16)}
    held[DOWN][9, 40], held[DOWN][8, 63] = -7.0, 3.5  # both in block (1, 1)
    yield from ((name, held[name]) for name in (held if names is None else names))


def test_a_pair_on_the_misc_route_is_exported_as_one() -> None:
    plan = CUT.plan()
    assert {DOWN, DOWN + "_scale_inv"} <= set(plan.misc_names)
    found = dict(quantized_export(weights, plan)([DOWN, DOWN + "_scale_inv"]))
    assert list(found) == [DOWN, DOWN + "_scale_inv"]
    data, scales = found.values()
    assert (data.dtype, scales.dtype, scales.shape) == (torch.float8_e4m3fn, torch.float32, (8, 3))
    assert scales[1, 1] == 7.0 / 448 and scales[0, 0] == torch.tensor(1e-4) / 448
    assert (data[9, 40].item(), data[8, 63].item(), data[0, 0].item()) == (-448.0, 224.0, 0.0)


def test_golden_carries_pairs_and_all_else_as_it_is() -> None:
    found = dict(quantized_export(weights, CUT.plan())(None))
    assert list(found) == [NORM, DOWN, DOWN + "_scale_inv"]
    assert found[NORM].dtype is torch.bfloat16


def test_one_scale_of_a_whole_matrix() -> None:
    plan = Case("tiny-llama", "tp=1", "tp=1", dtypes=("bf16", "fp8")).plan()
    data, scale = dict(quantized_export(weights, plan)([DOWN, DOWN + "_scale"])).values()
    assert (tuple(scale.shape), scale.item()) == ((1,), 7.0 / 448)
    assert data[9, 40].item() == -448.0


def test_mxfp8_is_refused() -> None:
    plan = Case("tiny-llama", "tp=2", "tp=2", dtypes=("mxfp8", "mxfp8")).plan()
    with pytest.raises(ValueError, match=r"weight_scale is uint8: nothing computes the scales of MXFP8"):
        quantized_export(weights, plan)


# --- in a session, whose engine would take whatever it is given

SMALL_HEADS = Case("tiny-llama", "tp=1", "tp=1", dtypes=("bf16", "fp8"), block=(16, 16))  # QKV goes to misc


def without_scales(export: Export) -> Export:
    def run(names: Sequence[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, tensor) for name, tensor in export(names) if not name.endswith("_scale_inv"))

    return run


def unquantized(export: Export) -> Export:
    def run(names: Sequence[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in export(names):
            yield name, tensor.bfloat16() if tensor.dtype is torch.float8_e4m3fn else tensor

    return run


def refit(number: int, address: str, case: Case, transport: str, broken: Callable[[Export], Export]) -> list[str]:
    """One refit; on the engine's side, what its loader got."""
    plan, loaded = case.plan(), list[str]()
    schedule = schedule_of(plan, "train" if number == 0 else "gen", 0)
    tensors = allocate(schedule)
    if number == 0:
        export = broken(quantized_export(lambda names: all_weights(case, names), plan))
        endpoint = TrainEndpoint(schedule, tensors, store=address, export=export, options=Options(transport=transport))
    else:
        load = lambda pairs: loaded.extend(name for name, _ in pairs)  # noqa: E731
        endpoint = GenerationEndpoint(
            schedule, tensors, store=address, load_weights=load, options=Options(transport=transport)
        )
    endpoint.prepare()
    endpoint.refit(1)
    endpoint.close()
    return loaded


def all_weights(case: Case, names: Sequence[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
    plan = case.plan()
    scales = {pair.scales for pair in plan.pairs}
    for index, group in enumerate(plan.groups):
        for name in group.names():
            if index not in scales and (names is None or name in names):
                yield name, torch.ones(group.shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("transport", ["gloo", "golden"])
def test_what_the_engine_keeps_quantized_is_loaded_in_pairs(transport: str) -> None:
    plan = SMALL_HEADS.plan()
    _, loaded = values(run_ranks(2, refit, SMALL_HEADS, transport, lambda export: export))
    named = plan.misc_names if transport == "gloo" else (name for group in plan.groups for name in group.names())
    assert sorted(loaded) == sorted(named)


@pytest.mark.parametrize(
    ("transport", "broken", "message"),
    [
        ("golden", unquantized, r"q_proj.weight in bfloat16, the engine keeps it in float8_e4m3fn"),
        ("gloo", unquantized, r"q_proj.weight in bfloat16, the engine keeps it in float8_e4m3fn"),
        ("golden", without_scales, r"weights without scales or the other way round, first model"),
    ],
)
def test_half_a_pair_and_unquantized_weights_are_refused(transport: str, broken: Any, message: str) -> None:
    for outcome in run_ranks(2, refit, SMALL_HEADS, transport, broken):
        assert re.search(message, outcome.error or "")
