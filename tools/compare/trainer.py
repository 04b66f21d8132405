"""The training side that all comparisons share: a real Megatron-Core model with the weights of two checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.front_door import free_address

from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.validation import tiny

VERSIONS = (1, 2)
OPTIONS = Options(transport="gloo", timeout_s=120.0)
SENT = {"transport": "gloo", "timeout_s": 120.0}  # the same, as plain data for an engine


@dataclass(frozen=True)
class Size:
    """Fields of an HF config of Qwen3 that replace those of the tiny one."""

    name: str
    fields: dict[str, Any]


TINY = Size("tiny Qwen3", {})
SMALL = Size(
    "Qwen3 in the shapes of the 0.6B model, with 8 layers and a vocabulary of 32,768",
    {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32768,
    },
)
SIZES = {"tiny": TINY, "small": SMALL}


def write_checkpoints(size: Size, folder: Path) -> int:
    """Write the checkpoints of both versions to `folder/1` and `folder/2`; returns the bytes of the weights of one."""
    config = tiny.tiny_config("qwen3", **size.fields)
    for version in VERSIONS:
        tensors = tiny.write_checkpoint(config, folder / str(version), version)
    return sum(tensor.nbytes for tensor in tensors.values())


class Trainer:
    """One training rank. Collective over the training world."""

    def __init__(self, rank: int, mesh: TrainMesh, folder: Path) -> None:
        from mcore_reshard.validation.trainer.build import build_trainer

        os.environ["MEGATRON_CONFIG_LOCK_DIR"] = str(folder / f"locks{rank}")
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "world")), rank=rank, world_size=mesh.world)
        self.rank, self.folder = rank, folder
        self.model = build_trainer(folder / "1", mesh)
        self.copies: dict[int, dict[str, torch.Tensor]] = {}
        for version in VERSIONS:
            self.model.load(folder / str(version))
            self.copies[version] = {name: tensor.detach().clone() for name, tensor in self.model.tensors.items()}

    def set_weights(self, version: int) -> None:
        for name, tensor in self.model.tensors.items():
            tensor.detach().copy_(self.copies[version][name])

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole HF tensors on every rank, one after another, as Megatron-Bridge gives them to frameworks."""
        return self.model.export()

    def store_address(self) -> str:
        """Where the session of ours meets, the same on all ranks."""
        file = self.folder / "store"
        if self.rank == 0:
            file.write_text(free_address())
        dist.barrier()
        return file.read_text()

    def save(self, folder: Path) -> int:
        """Write a checkpoint by Megatron-Bridge; returns the bytes of weights that this rank wrote: rank 0 writes all."""
        folder.mkdir(exist_ok=True)
        if self.rank == 0:
            shutil.copy(self.folder / "1" / "config.json", folder)
        self.model.bridge.save_hf_weights(self.model.model_chunks, folder, show_progress=False)
        return sum(file.stat().st_size for file in folder.glob("*.safetensors")) if self.rank == 0 else 0


def buckets(tensors: Iterator[tuple[str, torch.Tensor]], limit: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Tensors in order, in groups of at most `limit` bytes; a larger tensor is a group of its own."""
    group: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if group and size + tensor.nbytes > limit:
            yield group
            group, size = [], 0
        group.append((name, tensor))
        size += tensor.nbytes
    if group:
        yield group


@contextmanager
def counting(model: Any) -> Iterator[list[int]]:
    """The bytes of every tensor that the model's `load_weights` is handed."""
    load, handed = model.load_weights, list[int]()

    def load_and_count(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                handed.append(tensor.nbytes)
                yield name, tensor

        return load(counted(), *args, **kwargs)

    model.load_weights = load_and_count
    try:
        yield handed
    finally:
        del model.load_weights  # of this object; its class has one
