"""Backends that lay block-FP8 weights out anew after loading, on a CPU: vLLM's own code, with stand-ins for four kernels' calls.

- DeepGEMM: vLLM rounds scales to powers of two and quantizes anew; the library's `transform_sf_into_required_layout` is a
  stand-in that repeats scales by rows, column by column.
- Marlin: vLLM packs, pads and permutes; `gptq_marlin_repack` is a stand-in that reorders elements into its shape.
- FlashInfer's CUTLASS experts: all of it is vLLM's code.
- FlashInfer's TRT-LLM experts: the library's order of rows is a stand-in, which reverses them.

No kernel is built, and no forward runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch

BACKENDS = {  # the kernel of linear layers, and the backend of experts
    "deepgemm": ("DeepGemmFp8BlockScaledMMKernel", "DEEPGEMM"),
    "deepgemm without E8M0": ("DeepGemmFp8BlockScaledMMKernel", "DEEPGEMM"),
    "flashinfer": ("FlashInferFp8DeepGEMMDynamicBlockScaledKernel", "FLASHINFER_CUTLASS"),
    "trtllm": ("DeepGemmFp8BlockScaledMMKernel", "FLASHINFER_TRTLLM"),
    "marlin": ("MarlinFP8ScaledMMLinearKernel", "MARLIN"),
}


@contextmanager
def with_backend(name: str) -> Iterator[None]:
    """What the backend calls of libraries that no CPU has."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    from vllm.utils import deep_gemm

    flashinfer = ModuleType("flashinfer.utils")
    flashinfer.get_shuffle_matrix_a_row_indices = lambda matrix, _: torch.arange(len(matrix)).flip(0)  # type: ignore[attr-defined]
    modules = {"flashinfer": ModuleType("flashinfer"), "flashinfer.utils": flashinfer}
    with ExitStack() as stack:
        for owner, attribute, value in (
            (deep_gemm, "_lazy_init", lambda: None),
            (deep_gemm, "_transform_sf_into_required_layout_impl", _by_rows),
            (fp8_utils, "is_deep_gemm_e8m0_used", lambda: _uses_e8m0(name)),
            (_custom_ops, "gptq_marlin_repack", _repacked),
        ):
            stack.enter_context(mock.patch.object(owner, attribute, value))
        if name == "trtllm":
            stack.enter_context(mock.patch.dict(sys.modules, modules))
        yield


def finish_loading(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """What vLLM does once a model is loaded, its own code, under `with_backend`. No kernel is built."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8

    kernel, backend = BACKENDS[name]
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if type(method).__name__ == "Fp8LinearMethod":
            method.fp8_linear = _kernel_of(getattr(linear, kernel), name)
            method.use_marlin, method.use_deep_gemm = name == "marlin", name != "marlin"
        elif type(method).__name__ == "Fp8MoEMethod":
            method.fp8_backend, method.experts_cls = Fp8MoeBackend[backend], object
        else:
            continue
        with torch.no_grad(), mock.patch.object(fp8, "make_fp8_moe_kernel", lambda **_: mock.Mock()):
            method.process_weights_after_loading(layer)
    return model


def _kernel_of(kind: Any, name: str) -> Any:
    kernel = kind.__new__(kind)
    if name == "marlin":
        kernel.marlin_input_dtype, kernel.block_quant, kernel.size_k_first = None, True, False
        return kernel
    if hasattr(kind, "fallback_type"):
        kernel.fallback = _kernel_of(kind.fallback_type, name)
    else:
        kernel.is_deep_gemm_supported, kernel.use_deep_gemm_e8m0 = True, _uses_e8m0(name)
    return kernel


def _uses_e8m0(name: str) -> bool:
    return name != "deepgemm without E8M0"


def _by_rows(sf: torch.Tensor, mn: int, recipe: tuple[int, int, int], **_: Any) -> torch.Tensor:
    """Scales [..., rows of blocks, columns] -> [..., rows, columns], stored column by column."""
    rows = sf.repeat_interleave(recipe[1], dim=-2)[..., :mn, :]
    return rows.transpose(-1, -2).contiguous().transpose(-1, -2)


def _repacked(b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, **_: Any) -> torch.Tensor:
    """int32 [k / 4, n] -> int32 [k / 16, 4 n], as Marlin's shape is."""
    assert num_bits == 8
    return b_q_weight.view(size_k // 16, 4, size_n).transpose(1, 2).reshape(size_k // 16, 4 * size_n)
