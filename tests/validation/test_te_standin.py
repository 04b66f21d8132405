"""Quantized parameters of the stand-in for Transformer Engine, and whole pairs out of the scales of elements."""

from __future__ import annotations

import pytest
import torch

from mcore_reshard.kernels.copies.cast_arithmetic import quantized
from mcore_reshard.trainers.megatron.quantized_pairs import pair_of_elements
from mcore_reshard.trainers.quantized_export import Scales
from mcore_reshard.validation.trainer.te_standin_modules import (
    Float8BlockScaling,
    Float8BlockwiseQTensor,
    fp8_model_init,
    parameter,
    use_block,
)

WEIGHT = torch.arange(30, dtype=torch.bfloat16).reshape(5, 6)
PLACEMENT = {"dtype": torch.bfloat16, "device": "cpu"}


def test_a_parameter_has_the_tensors_of_the_real_one() -> None:
    with use_block((2, 4)), fp8_model_init(recipe=Float8BlockScaling()):
        weight = parameter((5, 6), lambda tensor: tensor.copy_(WEIGHT), **PLACEMENT)
    assert isinstance(weight, torch.nn.Parameter) and isinstance(weight.data, Float8BlockwiseQTensor)
    assert (weight.dtype, weight.shape, weight._rowwise_data.dtype) == (torch.bfloat16, (5, 6), torch.uint8)
    assert tuple(weight._rowwise_scale_inv.shape) == (3, 4)  # a grid of 3 by 2, columns padded to 4
    assert weight._rowwise_scale_inv[:, 2:].isnan().all()
    data, scales = quantized(WEIGHT, (2, 4))
    assert torch.equal(weight._rowwise_data, data.view(torch.uint8))
    assert torch.equal(weight._rowwise_scale_inv[:, :2], scales)


def test_writing_in_place_quantizes_in_place() -> None:
    weight = torch.nn.Parameter(Float8BlockwiseQTensor.of(WEIGHT, (8, 8)))
    places = weight._rowwise_data.data_ptr(), weight._rowwise_scale_inv.data_ptr()
    weight.data.copy_(torch.full((5, 6), 7.0))
    assert (weight._rowwise_data.data_ptr(), weight._rowwise_scale_inv.data_ptr()) == places
    assert weight._rowwise_scale_inv[0, 0] == 7.0 / 448
    assert weight.dequantize().unique().tolist() == [7.0]
    with torch.no_grad():
        weight.mul_(0.5)
    assert weight._rowwise_scale_inv[0, 0] == 3.5 / 448


def test_layers_elsewhere_are_not_quantized() -> None:
    assert type(parameter((2, 2), None, **PLACEMENT).data) is torch.Tensor
    with pytest.raises(NotImplementedError, match="quantizes in blocks"), fp8_model_init(recipe=object()):
        pass


class TestPairsOfElements:
    PAIR = Scales("w_scale_inv", (2, 1), (2, 2))
    DATA = torch.tensor([[448.0, 1.0], [2.0, 4.0], [448.0, 8.0]]).to(torch.float8_e4m3fn)

    def test_bytes_stay_where_each_block_has_one_scale(self) -> None:
        scale = torch.tensor([[0.1, 0.1], [0.1, 0.1], [0.3, 0.3]])
        (_, data), (name, scales) = pair_of_elements("w", self.DATA, scale, self.PAIR)
        assert torch.equal(data.view(torch.uint8), self.DATA.view(torch.uint8))
        assert name == "w_scale_inv" and torch.equal(scales, torch.tensor([[0.1], [0.3]]))

    def test_a_block_made_of_two_is_quantized_again(self) -> None:
        scale = torch.tensor([[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]])
        (_, data), (_, scales) = pair_of_elements("w", self.DATA, scale, self.PAIR)
        assert scales.tolist() == [[1.0], [1.0]]
        assert data.float().tolist() == [[448.0, 1.0], [4.0, 8.0], [448.0, 8.0]]

    def test_without_a_pair_they_are_dequantized(self) -> None:
        ((name, values),) = pair_of_elements("w", self.DATA, torch.full((3, 2), 0.5), None)
        assert (name, values.dtype) == ("w", torch.bfloat16)
        assert values.tolist() == [[224.0, 0.5], [1.0, 2.0], [224.0, 4.0]]
