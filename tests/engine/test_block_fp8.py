"""Block FP8 as vLLM's own quantizer computes it on this device, bit for bit."""

from __future__ import annotations

import pytest
import torch

from mcore_reshard.kernels.copies.cast_arithmetic import block_scales, scaled_to_e4m3

deep_gemm = pytest.importorskip("vllm.utils.deep_gemm")

LARGEST = torch.finfo(torch.bfloat16).max
SMALLEST = torch.finfo(torch.bfloat16).smallest_normal / 128  # a denormal


def random_matrix(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    values = torch.randn(rows, columns, generator=generator)
    return (values * 2.0 ** torch.randint(-40, 20, (rows, columns), generator=generator)).bfloat16()


def every_finite_value() -> torch.Tensor:
    """Every finite bfloat16 once, each magnitude's neighbors in blocks of their own."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    bits = bits[bits & 0x7FFF < 0x7F80].to(torch.int16)
    return bits.view(torch.bfloat16).reshape(510, 128)


MATRICES = {
    "random": random_matrix(384, 512),
    "like weights": (random_matrix(1, 1) * 0 + torch.randn(512, 384) * 0.02).bfloat16(),
    "ragged": random_matrix(200, 136),
    "odd": random_matrix(131, 333),
    "small": random_matrix(5, 3),
    "zero": torch.zeros(128, 256, dtype=torch.bfloat16),
    "denormal": torch.full((130, 130), SMALLEST, dtype=torch.bfloat16),
    "around the floor": torch.linspace(0.9e-4, 1.1e-4, 256 * 128).reshape(256, 128).bfloat16(),
    "largest": torch.full((128, 128), -LARGEST, dtype=torch.bfloat16),
    "every finite value": every_finite_value(),
}


def quantized(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    scales = block_scales(weight, block)
    rows = [
        scaled_to_e4m3(row[None], scales[number // block[0]].repeat_interleave(block[1])[: weight.shape[1]])
        for number, row in enumerate(weight)
    ]
    return torch.cat([row.view(torch.uint8) for row in rows]), scales


@pytest.mark.parametrize("block", [(128, 128), (64, 64), (32, 32)], ids=str)
@pytest.mark.parametrize("name", MATRICES)
def test_data_and_scales_are_those_of_vllm(name: str, block: tuple[int, int]) -> None:
    data, scales = deep_gemm.per_block_cast_to_fp8(MATRICES[name], list(block), use_ue8m0=False)
    ours, our_scales = quantized(MATRICES[name], block)
    assert torch.equal(our_scales.view(torch.int32), scales.view(torch.int32))
    assert torch.equal(ours, data.view(torch.uint8))
