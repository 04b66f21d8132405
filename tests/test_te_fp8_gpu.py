"""Real Transformer Engine parameters in block FP8: what is read off them, and a GEMM with what an engine would hold."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from gpu import needs_gpus

from mcore_reshard.kernels.precision import over_elements
from mcore_reshard.megatron import local_tensors

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(1),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]

BLOCK = (128, 128)
ROWS, COLUMNS, TOKENS = 384, 512, 256
# Activations are rounded to E4M3, weights are exact: an element is off by at most half a step, 2**-4 of its value.
RELATIVE_ERROR = 2.0**-4


@pytest.fixture(scope="module")
def recipe():
    from transformer_engine.common.recipe import Float8BlockScaling

    return Float8BlockScaling()


@pytest.fixture(scope="module")
def layer(recipe):
    import transformer_engine.pytorch as te

    torch.manual_seed(1)
    with te.fp8_model_init(enabled=True, recipe=recipe):
        return te.Linear(COLUMNS, ROWS, bias=False, params_dtype=torch.bfloat16, device="cuda")


def dequantised(layer):
    """The weight as an engine has it: E4M3 data and the grid of scales without its padding."""
    tensors = local_tensors([layer])
    data, scales = tensors["vp0.weight"], tensors["vp0.weight._rowwise_scale_inv"]
    assert (data.dtype, tuple(data.shape)) == (torch.float8_e4m3fn, (ROWS, COLUMNS))
    grid = scales[:, : COLUMNS // BLOCK[1]].contiguous()
    assert (grid.dtype, tuple(grid.shape)) == (torch.float32, (ROWS // BLOCK[0], COLUMNS // BLOCK[1]))
    return data.float() * over_elements(grid, BLOCK, data.shape)


def test_data_and_scales_are_the_weight_exactly(layer):
    assert torch.equal(dequantised(layer), layer.weight.dequantize(dtype=torch.float32))


def test_a_gemm_with_them_is_transformer_engines_within_the_rounding_of_activations(layer, recipe):
    import transformer_engine.pytorch as te

    inputs = torch.randn(TOKENS, COLUMNS, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        source = layer(inputs).float()
    wanted = inputs.float() @ dequantised(layer).T
    assert ((source - wanted).norm() / wanted.norm()).item() < RELATIVE_ERROR


@pytest.mark.parametrize("train_dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "deepseek-v3"])
@pytest.mark.parametrize("transport", ["direct", pytest.param("nccl", marks=needs_gpus(2))])
def test_refit_from_real_parameters_equals_golden(transport, family, train_dtype):
    command = [
        sys.executable,
        "-m",
        "mcore_reshard",
        "validate",
        f"tiny-{family}-fp8",
        "--train",
        "tp=1",
        "--gen",
        "tp=1",
    ]
    command += [
        "--train-dtype",
        train_dtype,
        "--gen-dtype",
        "fp8",
        "--transport",
        transport,
        "--engine",
        "slices",
        "--json",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    report = json.loads(ran.stdout)
    assert report["ok"] and "stand-in" not in report["source"]
