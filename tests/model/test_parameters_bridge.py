"""Model parameters list what a real Megatron-Core model exports through Megatron-Bridge: names, shapes and dtypes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.planner.model.configs import builtin_names, load_config
from mcore_reshard.planner.model.families import parameters_from_config
from mcore_reshard.validation.processes import run_processes
from mcore_reshard.validation.tiny import write_checkpoint

if find_spec("megatron") is None or find_spec("megatron.bridge") is None:
    pytest.skip("needs the extra `megatron`", allow_module_level=True)

from mcore_reshard.validation.trainer.build import build_trainer, prepare

TINY = [name for name in builtin_names() if name.startswith("tiny-")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TINY)
def test_a_trainer_exports_what_the_model_lists(name: str, tmp_path: Path) -> None:
    write_checkpoint(load_config(name), tmp_path, version=1)
    prepare()
    (exported,) = run_processes(1, _export, (tmp_path,), timeout_s=60)
    model_parameters = parameters_from_config(load_config(name))
    assert exported == {
        parameter.name: (parameter.group.shape, parameter.group.dtype) for parameter in model_parameters
    }


def _export(index: int, checkpoint: Path) -> dict[str, Any]:
    """By HF name: (shape, dtype)."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=index, world_size=1)
    trainer = build_trainer(checkpoint, TrainMesh())
    return {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in trainer.export()}
