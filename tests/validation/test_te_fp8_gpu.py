"""Real Transformer Engine parameters in block FP8: what is read off them, and a GEMM with what an engine would hold."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import synthetic
import torch
from helpers.gpu import device_of, has_transformer_engine, needs_gpus
from helpers.handmade import End, HandTransfer, other_end_of, schedule_of
from helpers.ranks import run_ranks, values

from mcore_reshard.kernels.copies.cast_arithmetic import over_elements
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.plan.schedule import OtherEndView
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint
from mcore_reshard.trainers.megatron.model import local_tensors

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(1),
    pytest.mark.skipif(not has_transformer_engine(), reason="needs Transformer Engine"),
]

BLOCK = (128, 128)
ROWS, COLUMNS, TOKENS = 384, 640, 256
GRID = (ROWS // BLOCK[0], COLUMNS // BLOCK[1])
PADDED = (GRID[0], -(-GRID[1] // 4) * 4)  # of Transformer Engine's scales
# Activations are rounded to E4M3, weights are exact: an element is off by at most half a step, 2**-4 of its value.
RELATIVE_ERROR = 2.0**-4


def transfers() -> list[HandTransfer]:
    """A weight and its scales, as a trainer of one rank has them, to an engine of one rank."""

    def transfer(name: str, dtype: str, extents: tuple[int, int], held: tuple[int, int]) -> HandTransfer:
        src = End(0, f"vp0.{name}", held, (0, 0), (0, 1))
        return HandTransfer(0, name, dtype, extents, src, End(0, name, extents, (0, 0), (0, 1)))

    return [
        transfer("weight", "float8_e4m3fn", (ROWS, COLUMNS), (ROWS, COLUMNS)),
        transfer("weight._rowwise_scale_inv", "float32", GRID, PADDED),
    ]


def refit_a_layer(number: int, address: str, transport: str) -> tuple[np.ndarray, np.ndarray]:
    """The trainer: its weight dequantized by Transformer Engine, and what its own GEMM makes of the inputs. The engine:
    the weight dequantized from the bytes that arrived, and what a GEMM with that makes of the inputs."""
    device_of(number)
    torch.manual_seed(1)
    inputs = torch.randn(TOKENS, COLUMNS, dtype=torch.bfloat16).cuda()
    if number == 0:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import Float8BlockScaling

        with te.fp8_model_init(enabled=True, recipe=Float8BlockScaling()):
            layer = te.Linear(COLUMNS, ROWS, bias=False, params_dtype=torch.bfloat16, device="cuda")
        endpoint = TrainEndpoint(
            schedule_of(transfers(), "train", 0, (1, 1)),
            lambda: local_tensors([layer]),
            store=address,
            options=Options(transport=transport, timeout_s=60.0),
        )
        with torch.no_grad(), te.fp8_autocast(enabled=True, fp8_recipe=Float8BlockScaling()):
            product = layer(inputs)
        weight = layer.weight.dequantize(dtype=torch.float32)
    else:
        schedule = replace(schedule_of(transfers(), "gen", 0, (1, 1)), view=OtherEndView(other_end_of(transfers(), 0)))
        tensors = synthetic.allocate(schedule, torch.device("cuda"))
        endpoint = GenerationEndpoint(
            schedule, tensors, store=address, options=Options(transport=transport, timeout_s=60.0)
        )
    endpoint.prepare()
    endpoint.refit(1)
    endpoint.close()
    if number == 1:
        scales = over_elements(tensors["weight._rowwise_scale_inv"], BLOCK, (ROWS, COLUMNS))
        weight = tensors["weight"].float() * scales
        product = inputs.float() @ weight.T
    return weight.cpu().numpy(), product.float().cpu().numpy()


@pytest.mark.parametrize("transport", ["direct", "nccl"])
def test_a_gemm_with_what_arrived_is_the_trainers_within_the_rounding_of_activations(transport):
    (weight, source), (arrived, product) = values(
        run_ranks(2, refit_a_layer, transport, timeout_s=120.0, method="spawn")
    )
    assert np.array_equal(arrived, weight)
    error = np.linalg.norm(source - product) / np.linalg.norm(product)
    print(f"relative error of the GEMM over {transport}: {error:.4f}")
    assert 0 < error < RELATIVE_ERROR


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
