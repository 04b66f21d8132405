"""The reference arithmetic of casts: literal numbers, and agreement with torch's own casts."""

from __future__ import annotations

import numpy as np
import torch

from mcore_reshard.kernels.copies.cast_arithmetic import block_scales, narrowed, scaled_to_e4m3, widened


def test_scales_of_blocks() -> None:
    weight = torch.zeros(3, 5, dtype=torch.bfloat16)
    weight[0, 1] = -896.0
    weight[1, 3] = 1.0
    weight[2, 4] = 2e-5  # below the floor of 1e-4
    scales = block_scales(weight, (2, 2))
    assert scales.dtype == torch.float32
    floor = float(np.float32(1e-4) / np.float32(448))
    assert scales.tolist() == [[2.0, float(np.float32(1) / np.float32(448)), floor], [floor, floor, floor]]


def test_scales_of_stacked_experts() -> None:
    weight = torch.randn(3, 130, 257).bfloat16()
    scales = block_scales(weight, (128, 128))
    assert scales.shape == (3, 2, 3)
    for expert in range(3):
        assert torch.equal(scales[expert], block_scales(weight[expert], (128, 128)))


def test_quantized_values() -> None:
    values = torch.tensor([[1.0, -448.0, 17.0, 19.0, 0.0, -0.0]]).bfloat16()
    data = scaled_to_e4m3(values, torch.ones(6))
    assert data.float().tolist() == [[1.0, -448.0, 16.0, 20.0, 0.0, -0.0]]  # 17 and 19 are ties between 16, 18, 20
    assert data.view(torch.uint8).tolist() == [[0x38, 0xFE, 0x58, 0x5A, 0x00, 0x80]]


def every_bfloat16() -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def test_bfloat16_widens_as_torch_does() -> None:
    bits = every_bfloat16()
    torch_bits = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().view(torch.int32)
    np.testing.assert_array_equal(widened(bits).view(np.int32), torch_bits.numpy())


def test_float32_narrows_as_torch_does() -> None:
    """Every upper half of a float32 with the lower halves at which rounding changes."""
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = (every_bfloat16().astype(np.uint32)[:, None] << 16 | lower).reshape(-1)
    found = narrowed(bits)
    wanted = torch.from_numpy(bits.view(np.float32)).bfloat16()
    is_nan = np.isnan(bits.view(np.float32))
    np.testing.assert_array_equal(found[~is_nan], wanted.view(torch.int16).numpy().view(np.uint16)[~is_nan])
    assert torch.from_numpy(found[is_nan].view(np.int16)).view(torch.bfloat16).isnan().all()
    np.testing.assert_array_equal(found[is_nan] >> 15, (bits[is_nan] >> 31).astype(np.uint16))


def test_a_bfloat16_survives_both_ways() -> None:
    bits = every_bfloat16()
    is_nan = (bits & 0x7FFF) > 0x7F80
    np.testing.assert_array_equal(narrowed(widened(bits))[~is_nan], bits[~is_nan])
