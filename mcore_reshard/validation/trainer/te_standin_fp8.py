"""Quantized parameters of the stand-in for Transformer Engine: what `fp8_param` with block scaling leaves on a rank.

Megatron itself decides which layers are built under `fp8_model_init`; the stand-in's linear layers then keep their
weights as a `Float8BlockwiseQTensor` with the attributes of the real one, filled by the reference quantizer. The real
one has blocks of 128 x 128 alone; `use_block` makes smaller ones for tiny models.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_map

from mcore_reshard.kernels.copies.cast_arithmetic import over_elements, quantized
from mcore_reshard.planner.model.precision import Block

_COLUMNS_TO = 4  # the grid of scales has its columns padded to a multiple


_state = SimpleNamespace(block=(128, 128), quantizes=False)  # `quantizes` inside of fp8_model_init


class QuantizedTensor(torch.Tensor):
    """What Megatron and Megatron-Bridge ask a tensor to be, before they dequantize it."""


class Float8BlockwiseQTensor(QuantizedTensor):
    """A matrix [M, K] in bfloat16 to whoever reads or writes it, kept as E4M3 data and scales of its blocks.

    `_rowwise_data` uint8 [M, K]; `_rowwise_scale_inv` float32 [ceil(M / block), ceil(K / block) up to a multiple of 4].
    Writing in place quantizes in place: the two tensors stay where they are.
    """

    _rowwise_data: torch.Tensor
    _rowwise_scale_inv: torch.Tensor
    block: Block

    @staticmethod
    def __new__(cls, data: torch.Tensor, scales: torch.Tensor, block: Block) -> Float8BlockwiseQTensor:
        made: Float8BlockwiseQTensor = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=torch.bfloat16, device=data.device
        )
        made._rowwise_data, made._rowwise_scale_inv, made.block = data, scales, block
        return made

    def __init__(self, *_: Any) -> None: ...

    @classmethod
    def of(cls, weight: torch.Tensor, block: Block) -> Float8BlockwiseQTensor:
        """A weight [M, K], quantized."""
        down, across = -(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1])
        padded = -(-across // _COLUMNS_TO) * _COLUMNS_TO
        # NaN in the padding, so that a copy of it shows
        scales = torch.full((down, padded), float("nan"), dtype=torch.float32, device=weight.device)
        made = cls(torch.empty(weight.shape, dtype=torch.uint8, device=weight.device), scales, block)
        made.quantize_(weight)
        return made

    def quantize_(self, weight: torch.Tensor) -> None:
        """Take other values, in place."""
        data, scales = quantized(weight.to(torch.bfloat16), self.block)
        self._rowwise_data.copy_(data.view(torch.uint8))
        self._rowwise_scale_inv[:, : scales.shape[1]].copy_(scales)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:  # type: ignore[override]
        scales = over_elements(self._rowwise_scale_inv, self.block, self._rowwise_data.shape)
        return (self._rowwise_data.view(torch.float8_e4m3fn).float() * scales).to(dtype or self.dtype)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Float8BlockwiseQTensor({tuple(self.shape)}, blocks of {self.block})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._rowwise_data, args[0]._rowwise_scale_inv, args[0].block)
        values, named = tree_map(_value, args), tree_map(_value, kwargs or {})
        result = func(*values, **named)
        if func._schema.is_mutable and isinstance(args[0], cls):
            args[0].quantize_(values[0])
            return args[0]
        return result


def _value(argument: Any) -> Any:
    return argument.dequantize() if isinstance(argument, Float8BlockwiseQTensor) else argument


def use_block(block: Block) -> AbstractContextManager[object]:
    """Quantize in blocks of this size the layers that are built in here."""
    return mock.patch.object(_state, "block", block)


def fp8_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> AbstractContextManager[object]:
    """Layers made in here keep their weights quantized. Raises NotImplementedError for another recipe than block scaling."""
    if enabled and not isinstance(recipe, Float8BlockScaling):
        raise NotImplementedError(f"the stand-in for Transformer Engine quantizes in blocks, not with {recipe}")
    return mock.patch.object(_state, "quantizes", enabled)


class Float8BlockScaling(SimpleNamespace):
    """The recipe: E4M3 and 128 x 128 blocks of weights. Its arguments are kept and not read."""


def parameter(
    shape: tuple[int, int], init: Callable[[torch.Tensor], object] | None, **factory_kwargs: Any
) -> torch.nn.Parameter:
    """The weight of a linear layer, initialized and then quantized where `fp8_model_init` asks for it."""
    weight = torch.zeros(shape, **factory_kwargs)
    with torch.no_grad():
        if init is not None:
            init(weight)
        return torch.nn.Parameter(Float8BlockwiseQTensor.of(weight, _state.block) if _state.quantizes else weight)
