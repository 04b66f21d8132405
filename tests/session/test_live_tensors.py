"""A live model between refits: what a session reads off it, and that whatever was replaced in it is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.handmade import schedule_of
from helpers.quantized_standin import QuantizedStandIn

from mcore_reshard.kernels.copies.bind import BoundSchedule, bind
from mcore_reshard.kernels.copies.tensors import dtype_name
from mcore_reshard.kernels.errors import StaleTensorError, TornWeightsError
from mcore_reshard.planner.plan.schedule import LocalTensor
from mcore_reshard.trainers.megatron.model import local_tensors

FC1, BIAS = "vp0.layers.0.fc1.weight", "vp0.layers.1.router.expert_bias"
QUANTIZED = "vp0.layers.1.weight"
SCALES = QUANTIZED + "._rowwise_scale_inv"


def linear() -> torch.nn.Linear:
    return torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)


def quantized() -> torch.Tensor:
    data = torch.zeros(8, 8, dtype=torch.uint8)
    return QuantizedStandIn((8, 8), _rowwise_data=data, _rowwise_scale_inv=torch.ones(1, 1))


class Model(torch.nn.Module):
    """Two layers in a list: one of two linears, one of a quantized parameter and a module with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        first, second = torch.nn.Module(), torch.nn.Module()
        first.fc1, first.fc2 = linear(), linear()
        second._parameters["weight"] = quantized()  # type: ignore[assignment]
        second.router = torch.nn.Module()
        second.router.register_buffer("expert_bias", torch.zeros(4))
        self.layers = torch.nn.ModuleList([first, second])


def bind_model(model: Model) -> BoundSchedule:
    held = local_tensors([model])
    every = [LocalTensor(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in held.items()]
    return bind(schedule_of([], "train", 0, (1, 1), extra=every), held)


def set_parameter(model: Model) -> None:
    model.layers[0].fc1._parameters["weight"] = linear().weight


def set_data(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Model], None]:
    def replace(model: Model) -> None:
        weight = model.layers[0].fc1.weight
        weight.data = change(weight.data)

    return replace


def resize(model: Model) -> None:
    model.layers[0].fc1.weight.untyped_storage().resize_(0)


def transpose_in_place(model: Model) -> None:
    model.layers[0].fc1.weight.requires_grad_(False).t_()


def to_meta(model: Model) -> None:
    model.layers[0].fc1.to("meta")


def swap_linear(model: Model) -> None:
    model.layers[0].fc1 = linear()


def swap_layer(model: Model) -> None:
    layer = torch.nn.Module()
    layer.fc1, layer.fc2 = linear(), model.layers[0].fc2
    model.layers[0] = layer


def swap_list(model: Model) -> None:
    other = Model()
    other.layers[0].fc2, other.layers[1] = model.layers[0].fc2, model.layers[1]
    model.layers = other.layers


def exchange(model: Model) -> None:
    first = model.layers[0]
    first.fc1, first.fc2 = first.fc2, first.fc1


def remove_parameter(model: Model) -> None:
    del model.layers[0].fc1._parameters["weight"]


def without_parameter(model: Model) -> None:
    model.layers[0].fc1.weight = None


def remove_module(model: Model) -> None:
    del model.layers[0].fc1


def rename_module(model: Model) -> None:
    model.layers[0].fc3 = model.layers[0]._modules.pop("fc1")


def set_buffer(model: Model) -> None:
    model.layers[1].router.expert_bias = torch.zeros(4)


def set_attribute(attribute: str) -> Callable[[Model], None]:
    def replace(model: Model) -> None:
        weight = model.layers[1]._parameters["weight"]
        setattr(weight, attribute, getattr(weight, attribute).clone())

    return replace


def set_data_of_attribute(attribute: str) -> Callable[[Model], None]:
    def replace(model: Model) -> None:
        held = getattr(model.layers[1]._parameters["weight"], attribute)
        held.data = held.data.clone()

    return replace


def set_quantized_parameter(model: Model) -> None:
    model.layers[1]._parameters["weight"] = quantized()


def set_unquantized_parameter(model: Model) -> None:
    model.layers[1]._parameters["weight"] = torch.nn.Parameter(torch.zeros(8, 8))


REPLACED = [
    (set_parameter, [f"{FC1}: address"]),
    (set_data(torch.clone), [f"{FC1}: address"]),
    (set_data(lambda data: data.view(torch.float16)), [f"{FC1}: dtype bfloat16 -> float16"]),
    (set_data(lambda data: data.view(2, 8)), [f"{FC1}: shape (4, 4) -> (2, 8), strides (4, 1) -> (8, 1)"]),
    (set_data(lambda data: data[:2]), [f"{FC1}: shape (4, 4) -> (2, 4)"]),
    (set_data(torch.t), [f"{FC1}: strides (4, 1) -> (1, 4)"]),
    (to_meta, [f"{FC1}: address"]),
    (transpose_in_place, [f"{FC1}: strides (4, 1) -> (1, 4)"]),
    (resize, [f"{FC1}: address"]),
    (swap_linear, [f"{FC1}: address"]),
    (swap_layer, [f"{FC1}: address"]),
    (swap_list, [f"{FC1}: address"]),
    (exchange, [f"{FC1}: address", f"{FC1.replace('fc1', 'fc2')}: address"]),
    (remove_parameter, [f"{FC1}: it is gone"]),
    (without_parameter, [f"{FC1}: it is gone"]),
    (remove_module, [f"{FC1}: it is gone"]),
    (rename_module, [f"{FC1}: it is gone"]),
    (set_buffer, [f"{BIAS}: address"]),
    (set_attribute("_rowwise_data"), [f"{QUANTIZED}: address"]),
    (set_attribute("_rowwise_scale_inv"), [f"{SCALES}: address"]),
    (set_data_of_attribute("_rowwise_data"), [f"{QUANTIZED}: address"]),
    (set_data_of_attribute("_rowwise_scale_inv"), [f"{SCALES}: address"]),
    (set_quantized_parameter, [f"{QUANTIZED}: address", f"{SCALES}: address"]),
    (set_unquantized_parameter, [f"{QUANTIZED}: address", f"{SCALES}: it is gone"]),
]


@pytest.mark.parametrize(
    ("replace", "found"), REPLACED, ids=[f"{n}-{way.__name__}" for n, (way, _) in enumerate(REPLACED)]
)
def test_what_was_replaced_since_it_was_bound_is_noticed(replace: Callable[[Model], None], found: list[str]) -> None:
    model = Model()
    bound = bind_model(model)
    bound.check_fresh(local_tensors([model]))
    replace(model)
    with pytest.raises(StaleTensorError) as error:
        bound.check_fresh(local_tensors([model]))
    first, *lines, remedy = str(error.value).splitlines()
    assert first == f"train:0: {len(found)} bound tensors changed since prepare():"
    assert remedy.strip() == "keep weights where they were bound, or close this rank and connect it again"
    assert [line.strip()[: len(start)] for line, start in zip(lines, found, strict=True)] == found


def held_by_attribute(model: Model, attribute: str) -> torch.Tensor:
    return getattr(model.layers[1]._parameters["weight"], attribute)


WRITTEN: dict[str, Callable[[Model], torch.Tensor]] = {
    FC1: lambda model: model.layers[0].fc1.weight,
    BIAS: lambda model: model.layers[1].router.expert_bias,
    QUANTIZED: lambda model: held_by_attribute(model, "_rowwise_data"),
    SCALES: lambda model: held_by_attribute(model, "_rowwise_scale_inv"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_weights_that_are_written_in_place_stay_bound_and_are_counted(name: str) -> None:
    model = Model()
    bound = bind_model(model)
    before = bound.check_fresh(local_tensors([model]))
    bound.check_unwritten(before)
    with torch.no_grad():
        WRITTEN[name](model).add_(1)
    bound.check_fresh(local_tensors([model]))
    assert torch.equal(bound.by_name[name].float(), local_tensors([model])[name].float())
    with pytest.raises(TornWeightsError, match=f"1 tensors were written while they were read: {name}; "):
        bound.check_unwritten(before)


def test_bound_parameters_are_written_without_a_gradient() -> None:
    model = Model()
    bound = bind_model(model)
    bound.by_name[FC1].fill_(3)
    assert model.layers[0].fc1.weight.eq(3).all()


def test_a_tied_parameter_is_there_by_each_of_its_names() -> None:
    model = Model()
    model.layers[0].fc2.weight = model.layers[0].fc1.weight
    held = local_tensors([model])
    assert held[FC1] is held[FC1.replace("fc1", "fc2")]


def test_names_are_those_of_the_earliest_release() -> None:
    model, mixer = torch.nn.Module(), torch.nn.Module()
    mixer.conv1d_weight = torch.nn.Parameter(torch.zeros(1))
    mixer.register_buffer("conv1d_bias", torch.zeros(1))
    model.mixer = torch.nn.Module()
    model.mixer.mixer = mixer
    model.mixer.mixer.norm = torch.nn.Module()
    model.mixer.mixer.norm.conv1d_weight = torch.nn.Parameter(torch.zeros(1))
    names = ["conv1d.weight", "conv1d.bias", "norm.conv1d_weight"]
    assert list(local_tensors([model])) == [f"vp0.mixer.mixer.{name}" for name in names]


def test_writes_to_the_buffer_that_a_tensor_is_a_view_of_are_counted() -> None:
    buffer = torch.zeros(32)
    held = {"view": buffer[4:20], "other": torch.zeros(4)}
    every = [LocalTensor(name, tuple(tensor.shape), "float32") for name, tensor in held.items()]
    bound = bind(schedule_of([], "train", 0, (1, 1), extra=every), held)
    before = bound.check_fresh(held)
    bound.check_unwritten(before)
    buffer[0] = 1  # outside of the view: torch counts for all that lies in the buffer
    with pytest.raises(TornWeightsError, match="1 tensors were written while they were read: view;"):
        bound.check_unwritten(before)


@pytest.mark.parametrize("replace", [set_data(torch.clone), resize])
def test_a_tensor_that_lies_elsewhere_is_noticed_without_walking_the_model(replace: Callable[[Model], None]) -> None:
    model = Model()
    bound = bind_model(model)
    last = bound.check_fresh(local_tensors([model])).tensors
    bound.check_in_place(last)
    replace(model)
    with pytest.raises(StaleTensorError, match=f"{FC1}: address"):
        bound.check_in_place(last)
