"""NeMo-RL's `xferdtensor`, one tensor from one mesh to another, over a plan of ours: CPU tensors, by gloo.

    import nemo_rl.weight_sync.xferdtensor as theirs

    theirs.xferdtensor = mcore_reshard.integrations.xferdtensor.xferdtensor      # in every worker

    8 rows, (Shard(0),) over ranks 0 1   ->   (Replicate(), Shard(0)) over ranks 2 3 / 4 5
    rank 0 sends rows 0:4 to 2 and 4, rank 1 sends rows 4:8 to 3 and 5

It cuts as DTensor does, and as NeMo-RL's Python version: in parts of the ceiling. NeMo-RL's golden version cuts uneven
dims in another way (10 rows over 4 ranks: 3, 3, 2, 2 in place of 3, 3, 3, 1). Source of the signature: NeMo-RL of August
2026, weight_sync/xferdtensor.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from itertools import product
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from mcore_reshard.kernels.copies.bind import bind
from mcore_reshard.kernels.errors import RefitError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.exchange import StoreExchange
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup
from mcore_reshard.kernels.rendezvous.store import SessionStore, connect_store
from mcore_reshard.kernels.rendezvous.store_keys import StoreKeys
from mcore_reshard.kernels.transports.gloo import GlooExecutor
from mcore_reshard.kernels.transports.group_ranks import group_names, group_rank
from mcore_reshard.planner.layout.geometry import LocalTensor, Piece, Region
from mcore_reshard.planner.layout.mesh import GenMesh, LayerPlace, TrainMesh
from mcore_reshard.planner.layout.partitions import Misc, Partition, PartitionOwners
from mcore_reshard.planner.layout.traced import TracedLayout, TracedLayouts
from mcore_reshard.planner.model.parameters import (
    ITEMSIZE,
    Architecture,
    Attention,
    ModelParameters,
    ParameterGroup,
    Role,
)
from mcore_reshard.planner.plan.make_plan import plan_traced
from mcore_reshard.planner.plan.make_schedule import RankView
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import Schedule, World
from mcore_reshard.planner.proof.prove import require_proof
from mcore_reshard.session.store_server import ServedStore, serve_store
from mcore_reshard.trainers.dtensor.placements import ranges_held

_NAME = "tensor"
_SRC_NAME = "vp{vp}.tensor"  # a trainer's tensors are of model chunks
_NOWHERE = LayerPlace(-1, 0, -1)
_STORE_KEY = "mcore_reshard/xferdtensor"
_OPTIONS = Options(session="xferdtensor")


@dataclass(frozen=True)
class _Side:
    """The ranks of a mesh, row by row, and how the tensor is placed on them."""

    ranks: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[Any, ...]


def xferdtensor(
    src_tensor: Any,
    src_mesh: Any,
    src_placement: Sequence[Any],
    dst_tensor: Any,
    dst_mesh: Any,
    dst_placement: Sequence[Any],
    process_group: Any,
    stream: Any = None,
) -> None:
    """Fill `dst_tensor._local_tensor` of every destination rank with its part of the source ranks' tensor.

    Every rank of `process_group` must call it, in the same order. Its `rank`, `tcp_store` and `master_address` are used;
    rank 0 serves a store there in its first call. Tensors are NeMo-RL's `DTensorRef`s: `shape` is the whole tensor's,
    `_local_tensor` the rank's part. A tensor of the rank's mesh is needed; the other one may be None. Meshes have `mesh`,
    the ranks in the process group. Placements are torch's Shard, Replicate and _StridedShard.

    Raises RefitError, listing all that cannot be served, before a byte moves; then as transports do.
    """
    problems: list[str] = []
    sides = (
        _read_side("src", src_mesh, src_placement, problems),
        _read_side("dst", dst_mesh, dst_placement, problems),
    )
    rank, tensors = int(process_group.rank), (src_tensor, dst_tensor)
    problems += _problems(rank, tensors, sides, stream)
    if problems:
        raise RefitError("\n  ".join(("xferdtensor() cannot serve this call:", *problems)))
    links = _links_of(process_group)
    worlds: tuple[World, World] = ("train", "gen")
    for world, tensor, side in zip(worlds, tensors, sides, strict=True):
        if rank in side.ranks and tensor is not None and prod(tensor.shape):
            plan = _plan(tuple(tensor.shape), str(tensor._local_tensor.dtype).removeprefix("torch."), *sides)
            schedule = RankView(plan, world, side.ranks.index(rank)).unrelayed()
            _move(schedule, tensor._local_tensor, links.between(sides[0].ranks, sides[1].ranks))


def _read_side(name: str, mesh: Any, placements: Sequence[Any], problems: list[str]) -> _Side:
    """One side of the call; of no ranks where something is wrong with it, which is added to `problems`."""
    grid = getattr(mesh, "mesh", getattr(mesh, "_mesh", None))
    if grid is None:
        problems.append(f"{name}_mesh is a {type(mesh).__name__} without `mesh`, the tensor of its ranks")
        return _Side((), (), ())
    side = _Side(tuple(int(rank) for rank in grid.flatten().tolist()), tuple(grid.shape), tuple(placements))
    if len(set(side.ranks)) < len(side.ranks):
        problems.append(f"{name}_mesh names a rank twice: {side.ranks}")
    elif len(placements) != grid.ndim:
        problems.append(f"{name}_placement has {len(placements)} entries, its mesh {grid.ndim} dims")
    else:
        return side
    return _Side((), (), ())


def _problems(rank: int, tensors: Sequence[Any], sides: Sequence[_Side], stream: Any) -> list[str]:
    """What else in the arguments of one rank cannot be served."""
    problems = []
    if both := sorted(set(sides[0].ranks) & set(sides[1].ranks)):
        problems.append(f"ranks {both} are in both meshes: trainer and engine must be different processes")
    if stream is not None:
        problems.append("a CUDA stream: tensors of the CPU have none; refit GPUs by integrations.nemo_rl.RefitEngine")
    shapes = {tuple(tensor.shape) for tensor in tensors if tensor is not None}
    if len(shapes) > 1:
        problems.append(f"the tensors differ in shape: {' and '.join(str(list(shape)) for shape in sorted(shapes))}")
    for name, tensor, side in zip(("src", "dst"), tensors, sides, strict=True):
        if rank not in side.ranks:
            continue
        if tensor is None:
            problems.append(f"{name}_tensor is None on rank {rank} of {name}_mesh")
            continue
        local: torch.Tensor = tensor._local_tensor
        if local.device.type != "cpu":
            problems.append(f"{name}_tensor is on {local.device}; refit GPUs by integrations.nemo_rl.RefitEngine")
        if (dtype := str(local.dtype).removeprefix("torch.")) not in ITEMSIZE:
            problems.append(f"{name}_tensor is {dtype}, known: {', '.join(ITEMSIZE)}")
        if len(tensor.shape) == 0:
            problems.append(f"{name}_tensor has no dims")
        try:
            coordinate = np.unravel_index(side.ranks.index(rank), side.mesh_shape)
            held = ranges_held(tensor.shape, side.placements, side.mesh_shape, [*map(int, coordinate)])
        except ValueError as error:
            problems.append(f"{name}_placement: {error}")
            continue
        expected = [sum(stop - start for start, stop in ranges) for ranges in held]
        if expected != [*local.shape] and not 0 == prod(expected) == local.numel():
            problems.append(f"{name}_tensor: its placement gives this rank {expected}, it holds {[*local.shape]}")
    return problems


# --- the plan ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)  # NeMo-RL calls for every parameter, and those of one shape share a plan
def _plan(shape: tuple[int, ...], dtype: str, src: _Side, dst: _Side) -> Plan:
    """The proven plan of one tensor. Source and destination ranks are numbered by their places in the meshes."""
    group = ParameterGroup(_NAME, Role.TRACED, shape, "uint8" if ITEMSIZE[dtype] == 1 else dtype)
    model = ModelParameters(Architecture("", 0, 0, 0, False, Attention(0, 0, 0)), (group,), group.dtype)
    train, gen = (
        TracedLayout(name, name, {(_NAME, ()): (_owners(group, side, local),)}, lambda *_: Misc("no scales"))
        for name, side, local in (("megatron", src, _SRC_NAME), ("vllm", dst, _NAME))
    )
    traced = TracedLayouts(model, train, gen, dtypes=(group.dtype, group.dtype), notes=())
    plan = plan_traced(traced, TrainMesh(dp=len(src.ranks)), GenMesh(dp=len(dst.ranks)))
    require_proof(plan)
    return plan


def _owners(group: ParameterGroup, side: _Side, name: str) -> PartitionOwners:
    """The distinct parts of the tensor, and which ranks hold each; a rank that holds nothing is in no part."""
    ranks_of: dict[tuple[Piece, ...], list[int]] = {}
    for rank, coordinate in enumerate(np.ndindex(*side.mesh_shape)):
        if pieces := _pieces(group, name, ranges_held(group.shape, side.placements, side.mesh_shape, coordinate)):
            ranks_of.setdefault(pieces, []).append(rank)
    ranks = np.array([*ranks_of.values()], dtype=np.int32)
    return PartitionOwners(Partition(tuple(ranks_of)), ranks, 0, (_NOWHERE,))


def _pieces(group: ParameterGroup, name: str, held: Sequence[Sequence[tuple[int, int]]]) -> tuple[Piece, ...]:
    """One piece for each combination of ranges; the local tensor is contiguous."""
    shape = tuple(sum(stop - start for start, stop in ranges) for ranges in held)
    local, dims = LocalTensor(name, shape, group.dtype), tuple(range(len(shape)))
    placed = []
    for ranges in held:
        stops = np.cumsum([stop - start for start, stop in ranges]).tolist()
        placed.append([(*pair, end - (pair[1] - pair[0])) for pair, end in zip(ranges, stops, strict=True)])
    boxes = (box for box in product(*placed) if all(start < stop for start, stop, _ in box))
    return tuple(
        Piece(Region(tuple(b[0] for b in box), tuple(b[1] for b in box)), local, tuple(b[2] for b in box), dims)
        for box in boxes
    )


# --- moving ------------------------------------------------------------------------------------------------------------


@dataclass
class _Pair:
    """The connections of the ranks of two meshes."""

    store: StoreKeys
    group: GlooGroup | None = None
    agreed: list[str] = field(default_factory=list)  # digests of plans that all ranks have


@dataclass
class _Links:
    """What a process group keeps from call to call."""

    store: SessionStore
    served: ServedStore | None  # by rank 0; it ends with the process
    pairs: dict[tuple[tuple[int, ...], tuple[int, ...]], _Pair] = field(default_factory=dict)

    def between(self, src: tuple[int, ...], dst: tuple[int, ...]) -> _Pair:
        if (src, dst) not in self.pairs:
            key = sha256(repr((src, dst)).encode()).hexdigest()[:16]
            self.pairs[src, dst] = _Pair(self.store.under(key))
        return self.pairs[src, dst]


_links: WeakKeyDictionary[Any, _Links] = WeakKeyDictionary()


def _links_of(process_group: Any) -> _Links:
    if process_group not in _links:
        served = None
        if int(process_group.rank) == 0:
            served = serve_store(host=process_group.master_address)
            process_group.tcp_store.set(_STORE_KEY, served.address)
        address = process_group.tcp_store.get(_STORE_KEY).decode()
        _links[process_group] = _Links(connect_store(address, _OPTIONS), served)
    return _links[process_group]


def _move(schedule: Schedule, local: torch.Tensor, pair: _Pair) -> None:
    """Run one rank's schedule on its part of the tensor; a strided part passes through a contiguous one."""
    contiguous = local.detach().contiguous()
    tensor = contiguous.view(torch.uint8) if contiguous.itemsize == 1 else contiguous
    bound = bind(schedule, {local_tensor.name: tensor for local_tensor in schedule.tensors})
    _agree_on_plan(schedule, pair)
    if pair.group is None:
        rank = group_rank(schedule, schedule.world, schedule.rank)
        pair.group = GlooGroup(pair.store, rank, group_names(schedule), timeout_s=_OPTIONS.timeout_s)
    GlooExecutor(pair.group, bound).run()
    if schedule.world == "gen" and contiguous.data_ptr() != local.data_ptr():
        local.detach().copy_(contiguous)


def _agree_on_plan(schedule: Schedule, pair: _Pair) -> None:
    """Raise RefitError unless all ranks of both meshes have this plan; asked once for each plan."""
    if schedule.digest in pair.agreed:
        return
    names = group_names(schedule)
    exchange = StoreExchange(pair.store.under(f"plan{len(pair.agreed)}"), schedule.name, names, _OPTIONS.timeout_s)
    digests = exchange.gather("digest", schedule.digest, str)
    if others := [name for name, digest in zip(names, digests, strict=True) if digest != schedule.digest]:
        raise RefitError(
            f"{schedule.name}: {', '.join(others)} called xferdtensor() with another shape, dtype, mesh or placement"
        )
    pair.agreed.append(schedule.digest)
