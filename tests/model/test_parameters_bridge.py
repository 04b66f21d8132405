"""Model parameters list what a real Megatron-Core model exports through Megatron-Bridge: names, shapes and dtypes."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.planner.model.configs import builtin_names, load_config
from mcore_reshard.planner.model.families import parameters_from_config

if find_spec("megatron") is None or find_spec("megatron.bridge") is None:
    pytest.skip("needs the extra `megatron`", allow_module_level=True)

TINY = [name for name in builtin_names() if name.startswith("tiny-")]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By config and HF name: [shape, dtype].

    A fresh interpreter makes them: the stand-in for Transformer Engine must be installed before Megatron is imported. One
    serves all configs, since that import takes most of the time.
    """
    folder = tmp_path_factory.mktemp("exports")
    subprocess.run([sys.executable, __file__, str(folder), *TINY], check=True, timeout=300)
    return json.loads((folder / "exports.json").read_text())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TINY)
def test_a_trainer_exports_what_the_model_lists(name: str, exports: dict[str, dict[str, Any]]) -> None:
    model_parameters = parameters_from_config(load_config(name))
    listed = {parameter.name: [list(parameter.group.shape), parameter.group.dtype] for parameter in model_parameters}
    assert exports[name] == listed


def _export(index: int, checkpoint: Path) -> dict[str, Any]:
    import torch

    from mcore_reshard.validation.trainer.build import build_trainer

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=index, world_size=1)
    trainer = build_trainer(checkpoint, TrainMesh())
    return {name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in trainer.export()}


def _main(folder: Path, names: list[str]) -> None:
    from mcore_reshard.validation.processes import run_processes
    from mcore_reshard.validation.tiny import write_checkpoint
    from mcore_reshard.validation.trainer.build import prepare

    prepare()
    exports: dict[str, Any] = {}
    for name in names:
        write_checkpoint(load_config(name), folder / name, version=1)
        (exports[name],) = run_processes(1, _export, (folder / name,), timeout_s=60)
    (folder / "exports.json").write_text(json.dumps(exports))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2:])
