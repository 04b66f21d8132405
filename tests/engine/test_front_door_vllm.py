"""The README's lines, both sides: real Megatron-Core training processes and a whole vLLM with its own workers."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers.front_door import Optimizer, free_address, golden_file, lines_with
from safetensors.torch import load_file

from mcore_reshard.engines.vllm.model import load_weights, local_tensors
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.validation import tiny
from mcore_reshard.validation.engine.slices import GenSizes
from mcore_reshard.validation.engine.vllm_engine import build_engine
from mcore_reshard.validation.processes import run_processes

HERE = Path(__file__).parent
STEPS = 2
TRAIN_S, ENGINE_S = 480, 480  # beside another half of the tests
CPU = {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the test sends a function that saves parameters
}  # fmt: skip


def train_by_readme(rank: int, mesh: TrainMesh, folder: Path, address: str) -> None:
    import torch.distributed as dist

    from mcore_reshard.validation.trainer.build import build_trainer

    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store")), rank=rank, world_size=mesh.world)
    model = build_trainer(folder / "checkpoint", mesh)
    names = {
        "model_chunks": model.model_chunks, "bridge": model.bridge, "hf_config": folder / "checkpoint",
        "optimizer": Optimizer(model, folder, rank), "steps": STEPS,
    }  # fmt: skip
    exec(lines_with("mr.megatron.connect(", address), names)


def loaded_by_vllm(rank: int, folder: Path, golden: Path) -> dict[str, torch.Tensor]:
    """What the loader of a vLLM rank makes of whole tensors, in a process of its own."""
    model = build_engine(folder / "checkpoint", GenSizes(tp=2), rank)
    load_weights(model, load_file(golden).items())
    return {name: tensor.clone() for name, tensor in local_tensors(model).items()}


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra `megatron` beside vLLM")
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("tiny-llama", TrainMesh(tp=2, pp=2)), ("tiny-gemma2", TrainMesh(tp=2))],
)
def test_the_readmes_lines_refit_a_whole_vllm(tmp_path: Path, name: str, mesh: TrainMesh) -> None:
    """Llama is planned by rules, which both sides' loaders confirm; Gemma 2 has none and is planned from traces."""
    from mcore_reshard.validation.trainer.build import prepare

    config, address = load_config(name), free_address()
    tiny.write_checkpoint(config, tmp_path / "checkpoint", 1)
    paths = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]
    command = [sys.executable, str(HERE / "readme_engine.py"), str(tmp_path), address, str(STEPS)]
    engine = subprocess.Popen(command, env={**os.environ, **CPU, "PYTHONPATH": os.pathsep.join(paths)})
    try:
        prepare()
        run_processes(
            mesh.world, partial(train_by_readme, mesh=mesh, folder=tmp_path, address=address), timeout_s=TRAIN_S
        )
        assert engine.wait(ENGINE_S) == 0
    finally:
        engine.kill()
    for step in range(1, STEPS + 1):
        expected = run_processes(2, loaded_by_vllm, (tmp_path, golden_file(tmp_path, step)), timeout_s=ENGINE_S)
        for rank, tensors in enumerate(expected):
            arrived = load_file(tmp_path / f"engine{step}-{rank}.safetensors")
            assert arrived.keys() == tensors.keys()
            assert [name for name, tensor in tensors.items() if not tensor.equal(arrived[name])] == []
