"""What a rank holds of a DTensor, against torch's own DTensors and FSDP2 modules in real processes, element by element."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.dtensor_trainer import join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from mcore_reshard.trainers.dtensor.placements import copies_to_local
from mcore_reshard.validation.processes import run_processes

SHAPES = [(8,), (10,), (3,), (1, 5), (7, 6), (4, 9, 3), (13, 2, 5)]


def tagged(shape: tuple[int, ...]) -> torch.Tensor:
    """No two elements agree, and none is 0."""
    return torch.arange(1, 1 + prod(shape), dtype=torch.float32).reshape(shape)


def differs(tensor: DTensor) -> bool:
    """Whether the copies, from what torch gathers, give another local tensor than the rank's own."""
    local, whole = tensor.to_local().detach(), tensor.full_tensor().detach().contiguous()
    made, writes = torch.full_like(local, -1.0), torch.zeros_like(local)
    for copy in copies_to_local(tensor):
        src = whole.as_strided(copy.extents, copy.src_strides, copy.src_offset)
        made.as_strided(copy.extents, copy.dst_strides, copy.dst_offset).copy_(src)
        writes.as_strided(copy.extents, copy.dst_strides, copy.dst_offset).add_(1)
    return not (made.equal(local) and bool((writes == 1).all()))


def one_mesh(rank: int, world: int, folder: Path) -> list[str]:
    join(rank, world, folder)
    mesh = init_device_mesh("cpu", (world,))
    wrong = []
    for shape in SHAPES:
        for placement in (Replicate(), *map(Shard, range(len(shape)))):
            tensor = distribute_tensor(tagged(shape), mesh, [placement])
            assert tensor.full_tensor().equal(tagged(shape))
            if differs(tensor):
                wrong.append(f"{shape} {placement}")
    return wrong


@pytest.mark.parametrize("world", [2, 4])
def test_each_element_over_one_dim(world: int, tmp_path: Path) -> None:
    assert run_processes(world, one_mesh, (world, tmp_path)) == [[]] * world


def pairs(ndim: int) -> Iterator[tuple[Any, Any]]:
    plain = [Replicate(), *map(Shard, range(ndim))]
    yield from product(plain, repeat=2)
    for dim in range(ndim):
        yield _StridedShard(dim, split_factor=2), Shard(dim)
        yield Replicate(), _StridedShard(dim, split_factor=2)  # as transformers cuts [gate; up]
        yield Shard(0), _StridedShard(dim, split_factor=3)


def two_meshes(rank: int, folder: Path) -> list[str]:
    join(rank, 4, folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wrong, compared = [], 0
    for shape in SHAPES:
        for placements in pairs(len(shape)):
            tensor = distribute_tensor(tagged(shape), mesh, placements, src_data_rank=None)
            assert tensor.full_tensor().equal(tagged(shape)), f"{shape} {placements}"
            compared += 1
            if differs(tensor):
                wrong.append(f"{shape} {placements}")
    assert compared > 100
    return wrong


def test_each_element_over_two_dims(tmp_path: Path) -> None:
    assert run_processes(4, two_meshes, (tmp_path,)) == [[]] * 4


class Block(torch.nn.Module):
    """Uneven in every dim."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(7)
        self.up = torch.nn.Linear(7, 9)
        self.down = torch.nn.Linear(9, 7, bias=False)
        self.scale = torch.nn.Parameter(torch.empty(1))
        for number, (_, parameter) in enumerate(self.named_parameters(), 1):
            parameter.data.copy_(tagged(tuple(parameter.shape)) + 1000 * number)


def sharded(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    block = Block()
    if kind == "fsdp":
        return fully_shard(block, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if kind == "fsdp, a group each":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for child in (block.norm, block.up, block.down):
            fully_shard(child, mesh=mesh, reshard_after_forward=False)
        return fully_shard(block, mesh=mesh)
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    if kind == "hsdp":
        return fully_shard(block, mesh=mesh)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(
        block, mesh["inner"], plan if kind == "tp x fsdp" else {"up": RowwiseParallel(), "down": ColwiseParallel()}
    )
    return fully_shard(block, mesh=mesh["outer"])


def in_modules(rank: int, world: int, kind: str, folder: Path) -> list[str]:
    join(rank, world, folder)
    whole, block = dict(Block().named_parameters()), sharded(kind)
    parts = dict(block.named_parameters())
    assert parts.keys() == whole.keys() and any(isinstance(part, DTensor) for part in parts.values())
    wrong = [name for name, part in parts.items() if not part.full_tensor().equal(whole[name])]
    return wrong + [name for name, part in parts.items() if differs(part)]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["fsdp", "fsdp, a group each"])
def test_each_element_of_fsdp2_modules(kind: str, world: int, tmp_path: Path) -> None:
    assert run_processes(world, in_modules, (world, kind, tmp_path)) == [[]] * world


@pytest.mark.parametrize("kind", ["hsdp", "tp x fsdp", "tp the other way x fsdp"])
def test_each_element_of_fsdp2_modules_on_two_dims(kind: str, tmp_path: Path) -> None:
    assert run_processes(4, in_modules, (4, kind, tmp_path)) == [[]] * 4


def refused(rank: int, folder: Path) -> list[str]:
    join(rank, 2, folder)
    mesh = init_device_mesh("cpu", (2,))
    sums = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    uneven = DTensor.from_local(torch.ones(3 - rank, 2), mesh, [Shard(0)], shape=torch.Size([4, 2]), stride=(2, 1))
    said = []
    for tensor in (sums, uneven):
        with pytest.raises(ValueError) as caught:
            copies_to_local(tensor)
            if rank:
                raise ValueError("this rank holds what the placements say")
        said.append(str(caught.value))
    return said


def test_sums_and_other_shapes_are_refused(tmp_path: Path) -> None:
    (sums, uneven), _ = run_processes(2, refused, (tmp_path,))
    assert sums == "P(sum) holds terms of a sum: redistribute it to Shard or Replicate first"
    assert uneven == "(S(0)) of [4, 2] give this rank [2, 2], it holds [3, 2]"
