"""A small transformers model of a tagged checkpoint, sharded as DTensor trainers do it, in real gloo processes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

KINDS = ("fsdp", "hsdp", "tp x fsdp", "replicated")
_TP = {"q_proj": ColwiseParallel, "k_proj": ColwiseParallel, "v_proj": ColwiseParallel, "o_proj": RowwiseParallel,
       "gate_proj": ColwiseParallel, "up_proj": ColwiseParallel, "down_proj": RowwiseParallel}  # fmt: skip


def of_transformers_5() -> bool:
    return int(version("transformers").partition(".")[0]) >= 5


def join(rank: int, world: int, folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store")), rank=rank, world_size=world)


def load(folder: Path, dtype: torch.dtype = torch.bfloat16, **given: Any) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=dtype, **given).train()


def load_cut(folder: Path, **sizes: int) -> Any:
    """As transformers 5 cuts it: `tp_size`, `ep_size`, `fsdp_size`."""
    from transformers.distributed import DistributedConfig

    os.environ |= {
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
    }
    return load(folder, distributed_config=DistributedConfig(**sizes))


def shard(model: Any, kind: str, **options: Any) -> Any:
    """`kind` is one of KINDS; the last two dims of 4 ranks are 2 x 2. Each layer is a group of its own, as is the rest."""
    world = dist.get_world_size()
    if kind == "replicated":
        return model
    mesh = (
        init_device_mesh("cpu", (world,))
        if kind == "fsdp"
        else init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    )
    if kind == "tp x fsdp":
        parallelize_module(model, mesh["b"], {name: _TP[name.rpartition(".")[2]]() for name in _linears(model)})
        mesh = mesh["a"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _linears(model: Any) -> list[str]:
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return [name for name, _ in named if name.rpartition(".")[2] in _TP and not re.search(r"\.experts\.\d", name)]


@torch.no_grad()
def refill(model: Any, whole: Mapping[str, torch.Tensor]) -> None:
    """Put these whole tensors into a sharded model, by the names of its modules; torch cuts them."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, DTensor):
            own = distribute_tensor(
                whole[name].to(tensor.dtype), tensor.device_mesh, tensor.placements, src_data_rank=None
            )
            tensor.to_local().copy_(own.to_local())
        else:
            tensor.copy_(whole[name])
