"""Hand-written schedules, for tests of executors: no planner and no layout rules, transfers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
import torch

from mcore_reshard.planner.layout.geometry import row_major_strides
from mcore_reshard.planner.plan.schedule import (
    LocalTensor,
    MemberNames,
    OtherEnd,
    Schedule,
    StageSchedule,
    StridedBox,
    TransferTable,
    World,
)


@dataclass(frozen=True)
class End:
    """One end of a transfer: a box in a local tensor, whose dims are those of the wire in another order."""

    rank: int
    tensor: str
    shape: tuple[int, ...]
    origin: tuple[int, ...]
    dims: tuple[int, ...]  # wire dim d runs along local dim dims[d]

    @property
    def strides(self) -> tuple[int, ...]:
        local = row_major_strides(self.shape)
        return tuple(local[dim] for dim in self.dims)

    @property
    def offset(self) -> int:
        return sum(start * stride for start, stride in zip(self.origin, row_major_strides(self.shape), strict=True))


@dataclass(frozen=True)
class HandTransfer:
    """One transfer as both ends see it."""

    stage: int
    parameter: str
    dtype: str
    extents: tuple[int, ...]
    src: End
    dst: End


def schedule_of(
    transfers: Sequence[HandTransfer],
    world: World,
    rank: int,
    worlds: tuple[int, int],
    *,
    digest: str = "d1",
    misc: tuple[str, ...] = (),
    extra: Sequence[LocalTensor] = (),
    padding: tuple[tuple[int, int, StridedBox], ...] = (),
) -> Schedule:
    """The schedule of one rank of `worlds` = (training ranks, generation ranks)."""
    sends = world == "train"
    names = list(dict.fromkeys(transfer.parameter for transfer in transfers))
    tensors = {local.name: local for local in extra}
    strided_boxes: dict[StridedBox, int] = {}
    rows: dict[int, list[tuple[int, ...]]] = {stage: [] for stage in sorted({transfer.stage for transfer in transfers})}
    for transfer in transfers:
        own, other = (transfer.src, transfer.dst) if sends else (transfer.dst, transfer.src)
        if own.rank != rank:
            continue
        tensors.setdefault(own.tensor, LocalTensor(own.tensor, own.shape, transfer.dtype))
        strided_box = strided_boxes.setdefault(StridedBox(transfer.extents, own.strides), len(strided_boxes))
        nbytes = prod(transfer.extents) * getattr(torch, transfer.dtype).itemsize
        tensor = list(tensors).index(own.tensor)
        rows[transfer.stage].append(
            (other.rank, tensor, strided_box, own.offset, nbytes, names.index(transfer.parameter), 0, 0)
        )
    return Schedule(
        world=world,
        rank=rank,
        digest=digest,
        train_ranks=worlds[0],
        gen_ranks=worlds[1],
        tensors=tuple(tensors.values()),
        strided_boxes=tuple(strided_boxes),
        stages=tuple(
            StageSchedule(stage, table(own_rows if sends else ()), table(() if sends else own_rows))
            for stage, own_rows in rows.items()
        ),
        padding=padding,
        misc=misc,
        names={number: MemberNames(name) for number, name in enumerate(names)},
    )


def other_end_of(transfers: Sequence[HandTransfer], rank: int, world: World = "gen", *, digest: str = "d1") -> OtherEnd:
    """The other ends of all that a rank receives, or sends, in the order of its schedule."""
    names = list(dict.fromkeys(transfer.parameter for transfer in transfers))
    tensors: dict[LocalTensor, int] = {}
    boxes: dict[StridedBox, int] = {}
    rows: dict[int, list[tuple[int, ...]]] = {stage: [] for stage in sorted({transfer.stage for transfer in transfers})}
    for transfer in transfers:
        own, other = (transfer.src, transfer.dst) if world == "train" else (transfer.dst, transfer.src)
        if own.rank == rank:
            tensor = tensors.setdefault(LocalTensor(other.tensor, other.shape, transfer.dtype), len(tensors))
            box = boxes.setdefault(StridedBox(transfer.extents, other.strides), len(boxes))
            nbytes = prod(transfer.extents) * getattr(torch, transfer.dtype).itemsize
            parameter = names.index(transfer.parameter)
            rows[transfer.stage].append((other.rank, tensor, box, other.offset, nbytes, parameter, 0, 0))
    return OtherEnd(rank, digest, tuple(tensors), tuple(boxes), tuple(map(table, rows.values())))


def table(rows: Sequence[tuple[int, ...]]) -> TransferTable:
    columns = list(zip(*rows, strict=True)) or [()] * 8
    dtypes = (np.int32, np.int32, np.int32, np.int64, np.int64, np.int32, np.int32, np.int32)
    return TransferTable(*(np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True)))


def allocate(schedule: Schedule, *, seed: int | None = None) -> dict[str, torch.Tensor]:
    """The rank's tensors: random bytes from `seed`, or all bytes 0xEE, so that what is not written shows."""
    generator = None if seed is None else torch.Generator().manual_seed(seed * 1000 + schedule.rank)
    tensors: dict[str, torch.Tensor] = {}
    for local in schedule.tensors:
        dtype = getattr(torch, local.dtype)
        nbytes = prod(local.shape) * dtype.itemsize
        if generator is None:
            raw = torch.full((nbytes,), 0xEE, dtype=torch.uint8)
        else:
            raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        tensors[local.name] = raw.view(dtype).reshape(local.shape)
    return tensors


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def expected(
    transfers: Sequence[HandTransfer], gen: Schedule, sources: Sequence[dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """The tensors of one generation rank after the transfers, copied element by element in plain Python."""
    tensors = allocate(gen)
    for transfer in transfers:
        if transfer.dst.rank != gen.rank:
            continue
        itemsize = getattr(torch, transfer.dtype).itemsize
        src = sources[transfer.src.rank][transfer.src.tensor].reshape(-1).view(torch.uint8)
        dst = tensors[transfer.dst.tensor].reshape(-1).view(torch.uint8)
        for index in product(*map(range, transfer.extents)):
            read, write = (
                itemsize * (end.offset + sum(i * stride for i, stride in zip(index, end.strides, strict=True)))
                for end in (transfer.src, transfer.dst)
            )
            dst[write : write + itemsize] = src[read : read + itemsize]
    return tensors


def random_transfers(
    rng: np.random.Generator, worlds: tuple[int, int], *, parameters: int = 12, stages: int = 2, largest: int = 7
) -> list[HandTransfer]:
    """Parameters of random shapes, each cut into random blocks that go from random ranks to random ranks."""
    transfers: list[HandTransfer] = []
    for number in range(parameters):
        dims = int(rng.integers(1, 5))
        shape = tuple(int(n) for n in rng.integers(1, largest + 1, dims))
        dtype = str(rng.choice(["bfloat16", "float32", "float8_e4m3fn"]))
        stage = int(rng.integers(stages))
        for dst_rank in rng.permutation(worlds[1])[: int(rng.integers(1, worlds[1] + 1))].tolist():
            cut_at = int(rng.integers(0, shape[0] + 1))
            dst_dims = tuple(int(d) for d in rng.permutation(dims))
            for start, stop in ((0, cut_at), (cut_at, shape[0])):
                extents = (stop - start, *shape[1:])
                src_rank = int(rng.integers(worlds[0]))
                src = _end(rng, src_rank, f"src{len(transfers)}", extents, (0,) * dims, extents)
                dst = _end(
                    rng, dst_rank, f"dst{number}", shape, (start, *(0,) * (dims - 1)), extents, dims=dst_dims, margin=1
                )
                transfers.append(HandTransfer(stage, f"model.p{number}", dtype, extents, src, dst))
    return transfers


def _end(
    rng: np.random.Generator,
    rank: int,
    tensor: str,
    shape: tuple[int, ...],
    start: tuple[int, ...],
    extents: tuple[int, ...],
    *,
    dims: tuple[int, ...] | None = None,
    margin: int | None = None,
) -> End:
    """`shape` in wire order, stored with its dims permuted and a margin of unrelated elements around it."""
    order = dims if dims is not None else tuple(int(d) for d in rng.permutation(len(shape)))
    room = int(rng.integers(0, 3)) if margin is None else margin
    local_shape, origin = [0] * len(shape), [0] * len(shape)
    for wire, local in enumerate(order):
        local_shape[local] = shape[wire] + 2 * room
        origin[local] = start[wire] + room
    return End(rank, tensor, tuple(local_shape), tuple(origin), order)
