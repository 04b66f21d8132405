"""The modules of the stand-in for Transformer Engine: the parameters of the real ones, and no forward.

Names, shapes, dtypes and tensor-parallel attributes are those of Transformer Engine 2.11, and of mamba_ssm's gated norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from mcore_reshard.validation.trainer import te_standin_fp8

TRANSFORMER_ENGINE = ("Linear", "LayerNormLinear", "GroupedLinear", "LayerNorm", "RMSNorm", "DotProductAttention")


class _ParameterOwner(torch.nn.Module):
    """What Megatron's wrappers call on any Transformer Engine module besides its parameters."""

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
        **ignored: Any,
    ) -> None:
        super().__init__()
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self.tp_size, self.tp_group, self.parallel_mode = tp_size, tp_group, parallel_mode
        self.sequence_parallel, self.use_bias = sequence_parallel, bias
        self._factory_kwargs: dict[str, Any] = {"dtype": params_dtype or torch.get_default_dtype(), "device": device}
        self._init_method = init_method
        self._add_weights()

    def _add_weights(self) -> None:
        self._add_weight("weight", "bias")

    def _add_weight(self, weight_name: str, bias_name: str) -> None:
        shape = (self.out_features, self.in_features)
        weight = te_standin_fp8.parameter(shape, self._init_method, **self._factory_kwargs)
        self.register_parameter(weight_name, weight)
        _mark_tensor_parallel(weight, 1 if self.parallel_mode == "row" else 0)
        if not self.use_bias:
            setattr(self, bias_name, torch.Tensor())  # the real one leaves an empty tensor that is no parameter
            return
        bias = torch.nn.Parameter(torch.zeros(self.out_features, **self._factory_kwargs))
        self.register_parameter(bias_name, bias)
        if self.parallel_mode == "column":
            _mark_tensor_parallel(bias, 0)
        elif self.parallel_mode == "row":
            _set(bias, sequence_parallel=self.sequence_parallel)


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
        self._norm = (in_features, normalization, 0.0 if zero_centered_gamma else 1.0)
        super().__init__(in_features, out_features, **linear)

    def _add_weights(self) -> None:
        size, normalization, fill = self._norm
        self.layer_norm_weight = torch.nn.Parameter(torch.full((size,), fill, **self._factory_kwargs))
        _set(self.layer_norm_weight, sequence_parallel=self.sequence_parallel)
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(size, **self._factory_kwargs))
            _set(self.layer_norm_bias, sequence_parallel=self.sequence_parallel)
        super()._add_weights()


class GroupedLinear(Linear):
    """One `weight{i}` and optional `bias{i}` for each of `num_gemms` experts."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **linear: Any) -> None:
        self._num_gemms = num_gemms
        super().__init__(in_features, out_features, **linear)
        self.num_gemms = num_gemms

    def _add_weights(self) -> None:
        for expert in range(self._num_gemms):
            self._add_weight(f"weight{expert}", f"bias{expert}")


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
            for parameter in self.parameters(recurse=False):
                _set(parameter, sequence_parallel=sequence_parallel)


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


def _set(parameter: torch.nn.Parameter, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(parameter, name, value)


def _mark_tensor_parallel(parameter: torch.nn.Parameter, dim: int) -> None:
    _set(parameter, tensor_model_parallel=True, partition_dim=dim, partition_stride=1)
