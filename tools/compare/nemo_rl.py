"""NeMo-RL's `xferdtensor_golden` beside our `xferdtensor`: every weight of the model, one call each, between two meshes.

Golden is NeMo-RL's reference, and all of its `xferdtensor` that runs on a CPU: every rank gets every whole tensor.
MCORE_RESHARD_NEMO_RL: a checkout of NVIDIA-NeMo/RL. Stand-in: the process group, which moves by NCCL, is one of gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from test_xferdtensor import CHECKOUT, Mesh, ProcessGroup, Ref, part, theirs
from torch.distributed.tensor import Replicate, Shard

from mcore_reshard.integrations.xferdtensor import xferdtensor
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.validation.engine.slices import GenSizes, poison

from .measure import Part
from .trainer import VERSIONS

PACKAGES = ("torch",)
PATHS = {"golden": "`xferdtensor_golden` of 7ea279ab", "ours": "ours, `integrations.xferdtensor`"}


def prepare() -> None:
    if not (CHECKOUT / "nemo_rl").is_dir():
        raise ImportError("set MCORE_RESHARD_NEMO_RL to a checkout of NVIDIA-NeMo/RL")
    theirs("xferdtensor")


def engine_processes(sizes: GenSizes) -> int:
    return sizes.tp


def train_part(rank: int, folder: Path, mesh: TrainMesh, sizes: GenSizes) -> Part:
    return _part(rank, folder, mesh.tp, sizes.tp)


def engine_part(rank: int, folder: Path, mesh: TrainMesh, sizes: GenSizes) -> Part:
    return _part(mesh.tp + rank, folder, mesh.tp, sizes.tp)


def _part(rank: int, folder: Path, train: int, gen: int) -> Part:
    """One rank of the world of both meshes, training ranks first."""
    store = dist.FileStore(str(folder / "both"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=train + gen)
    sides = (tuple(range(train)), (train,)), (tuple(range(train, train + gen)), (gen,))
    trains = rank < train
    copies, shapes = {}, {}
    for version in VERSIONS:
        whole = load_file(folder / str(version) / "model.safetensors")
        shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
        copies[version] = {
            name: part(tensor, sides[0 if trains else 1], _placements(name), rank) for name, tensor in whole.items()
        }
        del whole
    held = {name: torch.zeros_like(tensor) for name, tensor in copies[1].items()}

    def set_weights(version: int) -> None:
        for name, tensor in held.items():
            tensor.copy_(copies[version][name]) if trains else poison(tensor)

    def differences(version: int) -> list[str]:
        return [
            name for name, tensor in held.items()
            if not tensor.view(torch.uint8).equal(copies[version][name].view(torch.uint8))
        ]  # fmt: skip

    def move(call: Callable[..., Any], group: ProcessGroup) -> None:
        for name, tensor in held.items():
            ref, placements = Ref(tensor, shapes[name]), _placements(name)
            call(
                ref if trains else None, Mesh(*sides[0]), placements, None if trains else ref, Mesh(*sides[1]),
                placements, group,
            )  # fmt: skip

    runs = {
        "golden": partial(move, theirs("xferdtensor").xferdtensor_golden, ProcessGroup(rank, store)),
        "ours": partial(move, xferdtensor, ProcessGroup(rank, store)),
    }
    return Part(set_up=dict.fromkeys(runs, lambda: None), run=runs, set_weights=set_weights, differences=differences)


def _placements(name: str) -> tuple[Any, ...]:
    """As Megatron-Core and vLLM cut by tensor parallelism."""
    if "norm" in name:
        return (Replicate(),)
    return (Shard(1 if ".o_proj." in name or ".down_proj." in name else 0),)
