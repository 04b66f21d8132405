"""Megatron's DDP keeps parameters in flat buffers, and its distributed optimizer writes these: refits notice that."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers.handmade import End, HandTransfer, schedule_of
from helpers.trainers import run_trainers

from mcore_reshard.kernels.copies.bind import bind
from mcore_reshard.kernels.copies.tensors import dtype_name
from mcore_reshard.kernels.errors import TornWeightsError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.transports.source_checks import SourceChecks
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.validation.trainer.build import Trainer, prepare
from mcore_reshard.validation.trainer.te_standin import cpu_as_device

if find_spec("megatron") is None or find_spec("megatron.bridge") is None:
    pytest.skip("needs the extra `megatron`", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    prepare()


def steps_in_flat_buffers(trainer: Trainer, folder: Path) -> tuple[int, int, list[str]]:
    """What a step of Megatron's distributed optimizer does to its DDP's buffer, seen by torch and by the checks."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    (model,) = trainer.model_chunks
    with cpu_as_device():
        config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        ddp = DistributedDataParallel(model.config, config, model)
    tensors = dict(trainer.tensors)
    parameters = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.nn.Parameter)}
    transfers = [
        HandTransfer(
            0,
            f"hf.{name}",
            dtype_name(tensor.dtype),
            tuple(tensor.shape),
            *(End(0, name, tuple(tensor.shape), (0,) * tensor.ndim, tuple(range(tensor.ndim))) for _ in range(2)),
        )
        for name, tensor in parameters.items()
    ]
    bound = bind(schedule_of(transfers, "train", 0, (1, 1)), parameters)
    buffers = [*ddp.buffers, *ddp.expert_parallel_buffers]
    inside = sum(
        any(
            buffer.param_data.data_ptr() <= tensor.data_ptr() < buffer.param_data.data_ptr() + buffer.param_data.nbytes
            for buffer in buffers
        )
        for tensor in parameters.values()
    )

    def step() -> None:
        for buffer in buffers:
            for bucket in buffer.buckets:  # as DistributedOptimizer._copy_main_params_to_model_params does
                bucket.param_data.view(-1).data.copy_(bucket.param_data.float() * 0.5)

    writes, found = bound.check_fresh(parameters), []
    for checks in ("sampled", "full", "off"):
        try:
            SourceChecks(bound, Options(source_checks=checks)).around(step)()
        except TornWeightsError as error:
            found.append(str(error))
    bound.check_unwritten(writes)  # torch counts none of it
    return len(parameters), inside, found


def test_a_step_in_megatrons_flat_buffers_is_found(tmp_path: Path) -> None:
    ((count, inside, found),) = run_trainers(
        tmp_path, load_config("tiny-qwen3-moe"), TrainMesh(), steps_in_flat_buffers
    )
    assert inside == count > 10
    assert len(found) == 2 and all(f"and {count - 1} other tensors" in message for message in found)
