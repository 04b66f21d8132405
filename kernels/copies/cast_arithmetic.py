"""The arithmetic of casts on the way, in torch and numpy. The CUDA kernels agree with it bit for bit.

A refit leaves the bytes that a fresh start of the engine leaves. So block FP8 follows vLLM, which quantizes BF16 weights
when it loads them. Source: vLLM 0.32, `per_block_cast_to_fp8` of utils/deep_gemm.py with `use_ue8m0=False`, as called by
layers/quantization/online/fp8.py.

    scale = max(amax, 1e-4) / 448        float32, one for each block
    data  = e4m3(value * (1 / scale))    the reciprocal and the product are rounded to float32

torch divides by 448 on a CPU; on CUDA, compiled or not, it multiplies by the float32 nearest to 1/448. So scales equal
those of an engine on the same kind of device. On the other kind the last bit may differ. An engine that compiles for CUDA
takes an approximate reciprocal: 310 of 16,777,216 random values (torch 2.11) then round the other way.

Transformer Engine (2.11, quantize_transpose_square_blockwise.cu) is close but not equal. Its data are e4m3(value *
(448 / amax)), and it stores the reciprocal of that factor as the scale. By default it rounds the factor down to a power
of two. Its amax has no floor: a block of zeros gets scale 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .casts import Casts

AMAX_FLOOR = 1e-4
E4M3_LARGEST = 448.0


def block_scales(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Scales of a weight [..., M, K] on any device: float32 [..., ceil(M / block[0]), ceil(K / block[1])]."""
    *stacked, rows, columns = weight.shape
    down, across = -(-rows // block[0]), -(-columns // block[1])
    padded = torch.nn.functional.pad(weight, (0, across * block[1] - columns, 0, down * block[0] - rows))
    blocks = padded.reshape(*stacked, down, block[0], across, block[1])
    return blocks.abs().amax((-3, -1)).float().clamp(AMAX_FLOOR) / E4M3_LARGEST


def compute_scales(casts: Casts, tensors: tuple[torch.Tensor, ...]) -> None:
    """Compute the scales of all casts from the weights as they are now."""
    for index, cast in casts.items():
        if cast.scales is not None:
            tensors[cast.scales].copy_(block_scales(tensors[index].detach(), cast.form.block))


def scaled_to_e4m3(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bfloat16 [rows, columns] and the scale of each column, float32 [columns] -> float8_e4m3fn [rows, columns]."""
    return (values.float() * (1.0 / scales)).to(torch.float8_e4m3fn)


def quantized(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A whole bfloat16 weight [M, K] -> (float8_e4m3fn [M, K], float32 scales of its blocks)."""
    scales = block_scales(weight, block)
    data = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for number, band_scales in enumerate(scales):
        band = slice(number * block[0], (number + 1) * block[0])
        data[band] = scaled_to_e4m3(weight[band], band_scales.repeat_interleave(block[1])[: weight.shape[1]])
    return data, scales


def over_elements(scales: torch.Tensor, block: tuple[int, int], shape: Sequence[int]) -> torch.Tensor:
    """Scales of blocks -> the scale of every element of a matrix of `shape`, which may end within the last blocks."""
    rows = torch.arange(shape[0], device=scales.device) // block[0]
    columns = torch.arange(shape[1], device=scales.device) // block[1]
    return scales[rows[:, None], columns]


def narrowed(bits: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """Bits of float32 -> bits of bfloat16, to nearest with ties to even. A NaN keeps its sign and becomes quiet."""
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16
    is_nan = bits & 0x7FFFFFFF > 0x7F800000
    return np.where(is_nan, bits >> 16 | 0x40, rounded).astype(np.uint16)


def widened(bits: NDArray[np.uint16]) -> NDArray[np.uint32]:
    """Bits of bfloat16 -> bits of float32, exactly."""
    wide: NDArray[np.uint32] = np.left_shift(bits.astype(np.uint32), np.uint32(16))
    return wide
