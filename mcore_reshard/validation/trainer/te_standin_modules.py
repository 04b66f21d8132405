"""The stand-in for Transformer Engine: modules with the parameters of the real ones and no forward, and FP8 weights.

Names, shapes, dtypes and tensor-parallel attributes are those of Transformer Engine 2.11, and of mamba_ssm's gated norm.
Megatron decides which layers it builds under `fp8_model_init`. Their weights are kept as a `Float8BlockwiseQTensor` with
the attributes of the real one, filled by the reference quantizer. The real one has blocks of 128 x 128 alone;
`use_block` makes smaller ones for tiny models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch
from torch.utils._pytree import tree_map

from mcore_reshard.kernels.copies.cast_arithmetic import over_elements, quantized
from mcore_reshard.planner.model.precision import Block

TRANSFORMER_ENGINE = ("Linear", "LayerNormLinear", "GroupedLinear", "LayerNorm", "RMSNorm", "DotProductAttention")

_COLUMNS_TO = 4  # the grid of scales has its columns padded to a multiple

_state = SimpleNamespace(block=(128, 128), quantizes=False)  # `quantizes` inside of fp8_model_init


class _ParameterOwner(torch.nn.Module):
    """The methods that Megatron's wrappers call on any Transformer Engine module."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8_initialized = False
        self.save_original_input = False  # Megatron sets it where it builds for FP8
        self.tp_group: Any = None

    def set_tensor_parallel_group(self, group: Any) -> None:
        self.tp_group = group

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("the stand-in for Transformer Engine holds parameters and cannot run forward")


class Linear(_ParameterOwner):
    """`weight` [out, in] and optional `bias` [out], cut over `tp_size` on the side that `parallel_mode` names."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Callable[[torch.Tensor], object] | None = None,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
        numbers: Iterable[int | str] = ("",),
        **ignored: Any,
    ) -> None:
        super().__init__()
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self.tp_size, self.tp_group, self.parallel_mode = tp_size, tp_group, parallel_mode
        self.sequence_parallel, self.use_bias = sequence_parallel, bias
        self._factory_kwargs: dict[str, Any] = {"dtype": params_dtype or torch.get_default_dtype(), "device": device}
        for number in numbers:
            weight = parameter((self.out_features, self.in_features), init_method, **self._factory_kwargs)
            self.register_parameter(f"weight{number}", weight)
            _mark_tensor_parallel(weight, 1 if parallel_mode == "row" else 0)
            if bias:
                self.register_parameter(f"bias{number}", self._bias())
            else:
                setattr(self, f"bias{number}", torch.Tensor())  # the real one leaves an empty tensor, no parameter

    def _bias(self) -> torch.nn.Parameter:
        bias = torch.nn.Parameter(torch.zeros(self.out_features, **self._factory_kwargs))
        if self.parallel_mode == "column":
            _mark_tensor_parallel(bias, 0)
        elif self.parallel_mode == "row":
            vars(bias).update(sequence_parallel=self.sequence_parallel)
        return bias


class LayerNormLinear(Linear):
    """A `Linear` that also owns the norm before it: `layer_norm_weight` [in] and, for LayerNorm, its bias."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        **linear: Any,
    ) -> None:
        super().__init__(in_features, out_features, **linear)
        fills = {"layer_norm_weight": 0.0 if zero_centered_gamma else 1.0}
        if normalization == "LayerNorm":
            fills["layer_norm_bias"] = 0.0
        for name, fill in fills.items():
            norm = torch.nn.Parameter(torch.full((in_features,), fill, **self._factory_kwargs))
            vars(norm).update(sequence_parallel=self.sequence_parallel)
            self.register_parameter(name, norm)


class GroupedLinear(Linear):
    """One `weight{i}` and optional `bias{i}` for each of `num_gemms` experts."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **linear: Any) -> None:
        super().__init__(in_features, out_features, numbers=range(num_gemms), **linear)
        self.num_gemms = num_gemms


class RMSNorm(_ParameterOwner):
    """`weight` [hidden]."""

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | None = None,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cuda",
        **ignored: Any,
    ) -> None:
        super().__init__()
        size = hidden_size if hidden_size is not None else normalized_shape
        assert size is not None, "a norm needs its size"
        factory_kwargs: dict[str, Any] = {"dtype": params_dtype or dtype or torch.get_default_dtype(), "device": device}
        self.weight = torch.nn.Parameter(torch.full((size,), 0.0 if zero_centered_gamma else 1.0, **factory_kwargs))
        if isinstance(self, LayerNorm):
            self.bias = torch.nn.Parameter(torch.zeros(size, **factory_kwargs))
        if sequence_parallel is not None:
            for owned in self.parameters(recurse=False):
                vars(owned).update(sequence_parallel=sequence_parallel)


class LayerNorm(RMSNorm):
    """`weight` and `bias` [hidden]."""


class DotProductAttention(_ParameterOwner):
    """Owns nothing, or with learnable sinks `softmax_offset`: float32 [heads / tp]."""

    def __init__(
        self, num_attention_heads: int, tp_size: int = 1, softmax_type: str = "vanilla", **ignored: Any
    ) -> None:
        super().__init__()
        if softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.zeros(num_attention_heads // tp_size, dtype=torch.float32))


class GatedRMSNorm(RMSNorm):
    """mamba_ssm's `RMSNorm` with a gate: `weight` [hidden], no bias."""

    bias = None


def _mark_tensor_parallel(parameter: torch.nn.Parameter, dim: int) -> None:
    vars(parameter).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=1)


class QuantizedTensor(torch.Tensor):
    """The type by which Megatron and Megatron-Bridge know a tensor that they must dequantize."""


class Float8BlockwiseQTensor(QuantizedTensor):
    """A matrix [M, K] that readers and writers see in bfloat16, kept as E4M3 data and scales of its blocks.

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
