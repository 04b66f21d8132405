"""Trainers of tiny models over gloo: run a check on every rank, and compare an export with the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_reshard.planner.layout.mesh import TrainMesh, format_mesh
from mcore_reshard.validation import tiny
from mcore_reshard.validation.processes import run_processes
from mcore_reshard.validation.trainer.build import Trainer, build_trainer

Check = Callable[..., Any]


def run_trainers(
    folder: Path, config: Mapping[str, Any], mesh: TrainMesh, check: Check, *args: Any, **build: Any
) -> list[Any]:
    """What `check(trainer, folder, *args)` returns on each rank; `folder` gets checkpoints `1` and `2` of the config."""
    for version in (1, 2):
        tiny.write_checkpoint(config, folder / str(version), version)
    (folder / "store").unlink(missing_ok=True)
    return run_processes(mesh.world, _rank, (folder, mesh, check, args, build), timeout_s=60)


def _rank(index: int, folder: Path, mesh: TrainMesh, check: Check, args: tuple[Any, ...], build: dict[str, Any]) -> Any:
    store = dist.FileStore(str(folder / "store"), mesh.world)
    dist.init_process_group("gloo", store=store, rank=index, world_size=mesh.world)
    return check(build_trainer(folder / "1", mesh, **build), folder, *args)


def round_trip(trainer: Trainer, folder: Path) -> list[str]:
    """The faults of an export of each checkpoint, and tensors that a load did not replace in place."""
    addresses = {name: tensor.data_ptr() for name, tensor in trainer.tensors.items()}
    wrong = mismatches(trainer, folder / "1")
    trainer.load(folder / "2")
    wrong += mismatches(trainer, folder / "2")
    moved = [name for name, tensor in trainer.tensors.items() if tensor.data_ptr() != addresses[name]]
    return wrong + [f"{name} was not replaced in place" for name in moved]


def mismatches(trainer: Trainer, checkpoint: Path) -> list[str]:
    """The faults of a whole export: the trainer must hold the checkpoint's bytes under the checkpoint's names."""
    from safetensors.torch import load_file

    expected = load_file(checkpoint / "model.safetensors")
    exported = {name: tensor.clone() for name, tensor in trainer.export()}
    wrong = [f"{name} is missing" for name in expected if name not in exported]
    wrong += [f"{name} is no parameter of the checkpoint" for name in exported if name not in expected]
    for name in sorted(exported.keys() & expected.keys()):
        wanted = expected[name]
        if name.endswith(("mixer.A_log", "mixer.D")):
            wanted = wanted.to(torch.bfloat16)  # what Megatron makes of them
        elif name.endswith("linear_attn.norm.weight"):
            wanted = (wanted - 1) + 1  # Megatron's norms are centered on zero, which rounds
        if not same_bytes(exported[name], wanted):
            wrong.append(f"{name}: {exported[name].dtype} {tuple(exported[name].shape)} differs")
    return wrong


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    same_kind = left.dtype == right.dtype and left.shape == right.shape
    return same_kind and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def mesh_label(value: Any) -> str:
    """A short test id: `tp=2,pp=2` without the axes of size one."""
    if not isinstance(value, TrainMesh):
        return str(value)
    return ",".join(axis for axis in format_mesh(value).split(",") if not axis.endswith("=1")) or "one rank"
