"""Layers that a backend lays out anew after loading, where no trace says how: loaded beside, and laid out in each refit.

    a refit writes      weight, weight_scale_inv as loaders leave them, in tensors beside the layer
    lay_out             clones of these  ->  the backend's own process_weights_after_loading  ->  what kernels read

It costs memory for the second copy, and on each refit the backend's time and clones of one layer. The backend runs on a
stand-in for the layer. Results are copied into the live tensors, so addresses stay, and CUDA graphs stay valid. vLLM reloads
a layer in the same way: model_loader/reload/layerwise.py, _layerwise_process and _copy_and_restore_kernel_tensors, 0.26 and 0.32.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from .created import BESIDE, as_created, recorded_parameters
from .walked import Modules

# Backends whose process_weights_after_loading computes anew from the parameters alone, and keeps nothing else of them.
# Block FP8, kernels/linear/scaled_mm/{deep_gemm,flashinfer,marlin}.py:
_DEEP_GEMM_KERNELS = {"DeepGemmFp8BlockScaledMMKernel", "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"}
_FP8_KERNELS = _DEEP_GEMM_KERNELS | {"MarlinFP8ScaledMMLinearKernel"}
# Block FP8, layers/fused_moe/oracle/fp8.py, convert_to_fp8_moe_kernel_format:
_DEEP_GEMM_BACKENDS = {"DEEPGEMM", "BATCHED_DEEPGEMM"}
_FP8_MOE_BACKENDS = _DEEP_GEMM_BACKENDS | {"MARLIN", "FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM"}
# Unquantized, layers/fused_moe/oracle/unquantized.py, convert_to_unquantized_kernel_format:
_MOE_BACKENDS = {"FLASHINFER_TRTLLM"}


def is_redone(method: Any) -> bool:
    """Whether a layer's quantization method is one whose rearrangement can run again."""
    kind = type(method).__name__
    if kind == "Fp8LinearMethod":
        return bool(method.block_quant) and type(method.fp8_linear).__name__ in _FP8_KERNELS
    if kind == "Fp8MoEMethod":
        return bool(method.block_quant) and method.fp8_backend.name in _FP8_MOE_BACKENDS
    return kind == "UnquantizedFusedMoEMethod" and method.unquantized_backend.name in _MOE_BACKENDS


def keep_beside(layer: Any) -> str:
    """Put tensors of zeros beside the layer, for refits to write; returns why it cannot be laid out anew, else "".

    The backend runs once on zeros. It must make tensors of the names, shapes and dtypes that kernels read now. Nothing
    that is live is written. The first call that returns "" makes the tensors, and others leave them.
    """
    if BESIDE in layer.__dict__:
        return ""
    recorded, live = recorded_parameters(layer), layer._parameters
    alone = _left_alone(layer.quant_method)
    if not recorded:
        return "vLLM has not recorded the parameters that the layer was created with"
    beside = {}
    for name, first in recorded.items():
        parameter = live.get(name)
        if parameter is None:
            return f"{name} is gone"
        if name not in alone or parameter.shape != first.shape or parameter.dtype != first.dtype:
            beside[name] = as_created(first, layer, parameter.device)
    try:
        problems = _problems(layer, _laid_out(layer, beside), beside)
    except Exception as error:  # whatever vLLM's code raises
        return f"{type(error).__name__}: {error}"
    if not problems:
        layer.__dict__[BESIDE] = beside
    return "; ".join(problems)


def forget(model: Modules) -> None:
    """Drop the tensors beside all layers. No refit may be writing them."""
    for _, layer in _layers(model):
        del layer.__dict__[BESIDE]


def beside_of(model: Modules) -> dict[str, torch.nn.Parameter]:
    """The tensors beside all layers, by the names of the parameters whose place they take in a refit."""
    return {
        f"{path}.{name}": parameter
        for path, layer in _layers(model)
        for name, parameter in layer.__dict__[BESIDE].items()
    }


def lay_out(model: Modules) -> None:
    """Put what refits wrote beside layers where kernels read it, laid out as their backends do. Takes vLLM's kernels.

    Raises RuntimeError, naming the layer, where that would change a tensor's shape or dtype; that layer stays as it is.
    """
    for path, layer in _layers(model):
        if problems := _lay_out(layer):
            raise RuntimeError(f"{path} cannot be laid out anew as its kernels read it: {'; '.join(problems)}")


def _lay_out(layer: Any) -> list[str]:
    """Lay out one layer, and free what that took; returns why it stays as it is."""
    beside = layer.__dict__[BESIDE]
    made = _laid_out(layer, beside)
    if problems := _problems(layer, made, beside):
        return problems
    with torch.no_grad():
        for name, tensor in _tensors_of(layer).items():
            if not _is_same(tensor, made[name]):
                tensor.data.copy_(made[name])
    return []


def _layers(model: Modules) -> Iterator[tuple[str, Any]]:
    return ((path, layer) for path, layer in model.named_modules() if BESIDE in layer.__dict__)


def _left_alone(method: Any) -> set[str]:
    """Weights that the backend hands on as they were loaded: DeepGEMM's, unless it rounds scales to powers of two.

    These it quantizes anew (layers/quantization/utils/fp8_utils.py, deepgemm_post_process_fp8_weight_block).
    """
    if type(method).__name__ == "Fp8LinearMethod":
        kernel = getattr(method.fp8_linear, "fallback", method.fp8_linear)
        return {"weight"} if getattr(kernel, "use_deep_gemm_e8m0", True) is False else set()
    if type(method).__name__ == "Fp8MoEMethod" and method.fp8_backend.name in _DEEP_GEMM_BACKENDS:
        from vllm.model_executor.layers.quantization.utils import fp8_utils

        return set() if fp8_utils.is_deep_gemm_e8m0_used() else {"w13_weight", "w2_weight"}
    return set()


def _laid_out(layer: Any, beside: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Every tensor of a stand-in for the layer after its backend has laid out clones of what is beside the layer."""
    from vllm.model_executor.layers.quantization import fp8

    stand_in = _copy_of(layer)
    stand_in.__dict__.pop("_already_called_process_weights_after_loading", None)
    stand_in.__dict__.pop(BESIDE, None)
    for name in ("quant_method", "moe_config"):
        if hasattr(layer, name):
            setattr(stand_in, name, _copy_of(getattr(layer, name)))
    if getattr(stand_in.quant_method, "fp8_linear", None) is not None:
        stand_in.quant_method.fp8_linear = _copy_of(stand_in.quant_method.fp8_linear)
    stand_in._parameters.update({name: _clone_of(parameter) for name, parameter in beside.items()})
    device = next(iter(beside.values())).device
    # The live layer's kernel stays; it holds the live tensors.
    with torch.no_grad(), device, mock.patch.object(fp8, "make_fp8_moe_kernel", lambda *_, **__: None):
        stand_in.quant_method.process_weights_after_loading(stand_in)
    return _tensors_of(stand_in)


def _problems(layer: Any, made: dict[str, torch.Tensor], beside: dict[str, torch.nn.Parameter]) -> list[str]:
    """Why tensors that a backend has made cannot take the place of those that kernels read."""
    live, problems = _tensors_of(layer), []
    for name in sorted(live.keys() | made.keys()):
        old, new = live.get(name), made.get(name)
        if old is None or new is None:
            problems.append(f"{name} is not made" if new is None else f"{name} is made, and kernels read none")
        elif name in layer._parameters and name not in beside and not _is_same(old, new):
            problems.append(f"{name} is made of what vLLM has not recorded, so its loaded layout is unknown")
        elif (old.shape, old.dtype) != (new.shape, new.dtype):
            problems.append(f"{name} is made as {_form(new)}, kernels read {_form(old)}")
    return problems


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same bytes in the same order."""
    where = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in (one, other)]
    return one is other or (where[0] == where[1] and one.numel() > 0)


def _tensors_of(layer: Any) -> dict[str, torch.Tensor]:
    """All that kernels may read of a layer: parameters, buffers, and tensors in plain attributes."""
    held = layer.__dict__ | layer._buffers | layer._parameters
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def _copy_of(value: Any) -> Any:
    """A shallow copy; a module's has parameters, buffers and submodules that can be replaced without changing the module."""
    if not isinstance(value, torch.nn.Module):
        return copy.copy(value)
    twin = object.__new__(type(value))
    kinds = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
    twin.__dict__.update(value.__dict__ | {kind: copy.copy(value.__dict__[kind]) for kind in kinds})
    return twin


def _clone_of(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    clone = torch.Tensor._make_subclass(type(parameter), parameter.detach().clone(), False)
    clone.__dict__.update(parameter.__dict__)
    return clone
