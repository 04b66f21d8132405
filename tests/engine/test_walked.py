"""A walk of a model is kept for as long as the model has the same modules, parameters and quantization methods."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import tiny
from torch.nn import Linear, Parameter, Sequential

from mcore_reshard.engines.vllm.model import local_tensors
from mcore_reshard.engines.vllm.walked import Walked, Walks
from mcore_reshard.validation.engine.slices import GenSizes
from mcore_reshard.validation.engine.vllm_engine import build_engine


def _model() -> Sequential:
    model = Sequential(Sequential(Linear(2, 2), Linear(2, 2, bias=False)), Linear(2, 2))
    model[1].quant_method = object()  # type: ignore[assignment]
    return model


def _grows(model: Sequential) -> None:
    model[0].append(Linear(2, 2))  # type: ignore[operator]


CHANGES: dict[str, Callable[[Sequential], object]] = {
    "a parameter": lambda model: setattr(model[1], "weight", Parameter(torch.zeros(2, 2))),
    "an equal parameter": lambda model: setattr(model[1], "weight", Parameter(model[1].weight.detach())),
    "a parameter more": lambda model: setattr(model[0][1], "bias", Parameter(torch.zeros(2))),
    "a layer": lambda model: model[0].__setitem__(1, Linear(2, 2, bias=False)),
    "a layer more": _grows,
    "a method": lambda model: setattr(model[1], "quant_method", object()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_walked_again(change: str) -> None:
    model, walks = _model(), Walks()
    before = walks.of(model)
    assert before.once(Walked.named_parameters).keys() == dict(model.named_parameters()).keys()
    assert walks.of(model) is before
    CHANGES[change](model)
    after = walks.of(model)
    assert after is not before
    assert [*after.once(Walked.named_parameters).values()] == [*model.parameters()]


def test_what_is_found_is_found_once() -> None:
    model, walks, looked = _model(), Walks(), []

    def find(seen: Walked) -> int:
        looked.append(seen)
        return len(seen.named_modules())

    assert [walks.of(model).once(find) for _ in range(3)] == [5, 5, 5]
    assert len(looked) == 1
    walks.forget()
    assert walks.of(model).once(find) == 5
    assert len(looked) == 2


def test_tensors_of_a_kept_walk_are_where_the_model_has_them_now(
    config_folder: Callable[[dict[str, object]], Path],
) -> None:
    model, walks = build_engine(config_folder(tiny("qwen3-moe")), GenSizes(), 0), Walks()
    before = local_tensors(walks.of(model))
    name = next(iter(before))
    parameter = model.get_parameter(name)
    parameter.data = parameter.data.clone()  # the same parameter, at another address
    kept, fresh = local_tensors(walks.of(model)), local_tensors(model)
    assert kept.keys() == fresh.keys() == before.keys()
    assert [kept[each].data_ptr() for each in kept] == [fresh[each].data_ptr() for each in kept]
    assert kept[name].data_ptr() != before[name].data_ptr()
