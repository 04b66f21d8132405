"""Weights that no refit can read are refused by name: of real Megatron-FSDP, of torch's FSDP2, and offloaded ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.trainers import run_trainers
from torch.distributed import DeviceMesh

import mcore_reshard as mr
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.trainers.megatron import whole_weights
from mcore_reshard.trainers.megatron.whole_weights import unreadable_weights
from mcore_reshard.validation.trainer.build import Trainer, prepare
from mcore_reshard.validation.trainer.te_standin import cpu_as_device

if find_spec("megatron") is None or find_spec("megatron.bridge") is None:
    pytest.skip("needs the extra `megatron`", allow_module_level=True)

CONFIG = "tiny-qwen3"
MESH = TrainMesh(dp=2)
Wrap = Callable[[torch.nn.Module], torch.nn.Module]


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    prepare()


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """Megatron's wrappers build on a CPU: their meshes are of CPUs, and nothing waits for a GPU."""
    built = DeviceMesh.__init__

    def of_cpus(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        built(self, "cpu", *args, **kwargs)

    with ExitStack() as patches:
        patches.enter_context(cpu_as_device())
        patches.enter_context(mock.patch.object(DeviceMesh, "__init__", of_cpus))
        for name in ("Stream", "current_stream", "synchronize", "empty_cache"):
            patches.enter_context(mock.patch(f"torch.cuda.{name}"))
        yield


def megatron_fsdp(model: torch.nn.Module) -> torch.nn.Module:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
    )
    with mock.patch("torch.cuda.current_device", lambda: 0):  # it makes the name of a GPU of it
        return FullyShardedDataParallel(model.config, config, model, device=torch.device("cpu"))


def torch_fsdp(model: torch.nn.Module) -> torch.nn.Module:
    from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel

    return TorchFullyShardedDataParallel(model.config, DistributedDataParallelConfig(), model)


def ddp(model: torch.nn.Module) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return DistributedDataParallel(model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)


def offloaded_ddp(model: torch.nn.Module) -> torch.nn.Module:
    """As verl offloads: it copies Megatron's flat buffers to the CPU, and gives their memory back."""
    wrapped = ddp(model)
    for buffer in wrapped.buffers:
        buffer.param_data.storage().resize_(0)
    return wrapped


def found_in(trainer: Trainer, folder: Path, wrap: Wrap) -> tuple[list[str], str]:
    """What is wrong with a wrapped model, and what `connect` says of it, which must not wait for anybody."""
    with on_the_cpu():
        wrapped = wrap(trainer.model_chunks[0])
    problems = unreadable_weights([wrapped])
    if not problems:
        return [], ""
    try:
        mr.megatron.connect(wrapped, None, load_config(CONFIG), gen="tp=1", store="127.0.0.1:1", connect_timeout_s=1.0)
    except mr.RefitError as error:
        return problems, str(error)
    return problems, "connected"


@pytest.mark.parametrize(
    ("wrap", "named", "remedy"),
    [
        (megatron_fsdp, "the model is sharded by Megatron-FSDP (use_megatron_fsdp)", "DistributedDataParallel instead"),
        (torch_fsdp, "the model is sharded by torch's FSDP2 (use_torch_fsdp2)", "DistributedDataParallel instead"),
        (offloaded_ddp, "other parameters are offloaded, without memory", "load them before connect()"),
    ],
)
def test_what_no_refit_can_read_is_refused_on_every_rank(wrap: Wrap, named: str, remedy: str, tmp_path: Path) -> None:
    for problems, said in run_trainers(tmp_path, load_config(CONFIG), MESH, found_in, wrap):
        assert len(problems) == 1 and named in problems[0] and remedy in problems[0]
        assert said == f"connect() cannot use its arguments:\n  {problems[0]}"


def test_the_flat_buffers_of_megatrons_ddp_are_no_reason(tmp_path: Path) -> None:
    assert run_trainers(tmp_path, load_config(CONFIG), MESH, found_in, ddp) == [([], "")] * 2


def test_sharded_parameters_are_seen_without_a_wrapper(tmp_path: Path) -> None:
    inner = partial(found_inside, wrap=torch_fsdp)
    for problems in run_trainers(tmp_path, load_config(CONFIG), MESH, inner):
        assert "DTensors, parts of weights" in problems[0] and "mr.dtensor.connect" in problems[0]


def found_inside(trainer: Trainer, folder: Path, wrap: Wrap) -> list[str]:
    with on_the_cpu():
        wrapped: Any = wrap(trainer.model_chunks[0])
    return unreadable_weights([wrapped.module])


# --- where parameters lie ------------------------------------------------------------------------------------------


def two_linears() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))


def test_a_whole_model_on_one_device_is_fine() -> None:
    assert unreadable_weights([two_linears(), two_linears()]) == []


def test_a_parameter_that_is_elsewhere_is_named_with_its_chunk() -> None:
    model = two_linears()
    model[1] = model[1].to("meta")  # no memory, on another device than the rest
    (problem, elsewhere) = unreadable_weights([two_linears(), model])
    assert problem.startswith("vp1.1.weight is offloaded, without memory")
    assert elsewhere.startswith("vp0.0.weight and 2 other parameters are offloaded to the CPU: load them")


def test_a_model_on_the_cpu_whose_ranks_talk_over_nccl_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_weights.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(whole_weights.dist, "get_backend", lambda: "nccl")
    (problem,) = unreadable_weights([two_linears()])
    assert "vp0.0.weight and 1 other parameter are offloaded to the CPU" in problem
    monkeypatch.setattr(whole_weights.dist, "get_backend", lambda: "gloo")
    assert unreadable_weights([two_linears()]) == []
