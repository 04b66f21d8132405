"""Whole tensors for a quantised engine: what the misc route and golden carry where the trainer keeps bf16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from plans import Case

from mcore_reshard.quantised_export import quantised_export

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
    assert {DOWN, DOWN + "_scale_inv"} <= set(plan.misc_names())
    found = dict(quantised_export(weights, plan)([DOWN, DOWN + "_scale_inv"]))
    assert list(found) == [DOWN, DOWN + "_scale_inv"]
    data, scales = found.values()
    assert (data.dtype, scales.dtype, scales.shape) == (torch.float8_e4m3fn, torch.float32, (8, 3))
    assert scales[1, 1] == 7.0 / 448 and scales[0, 0] == torch.tensor(1e-4) / 448
    assert (data[9, 40].item(), data[8, 63].item(), data[0, 0].item()) == (-448.0, 224.0, 0.0)


def test_golden_carries_pairs_and_all_else_as_it_is() -> None:
    found = dict(quantised_export(weights, CUT.plan())(None))
    assert list(found) == [NORM, DOWN, DOWN + "_scale_inv"]
    assert found[NORM].dtype is torch.bfloat16


def test_one_scale_of_a_whole_matrix() -> None:
    plan = Case("tiny-llama", "tp=1", "tp=1", dtypes=("bf16", "fp8")).plan()
    data, scale = dict(quantised_export(weights, plan)([DOWN, DOWN + "_scale"])).values()
    assert (tuple(scale.shape), scale.item()) == ((1,), 7.0 / 448)
    assert data[9, 40].item() == -448.0


def test_mxfp8_is_refused() -> None:
    plan = Case("tiny-llama", "tp=2", "tp=2", dtypes=("mxfp8", "mxfp8")).plan()
    with pytest.raises(ValueError, match=r"weight_scale is uint8: nothing computes the scales of MXFP8"):
        quantised_export(weights, plan)
