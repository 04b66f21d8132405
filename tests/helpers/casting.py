"""Hand-written schedules that cast weights on the way, the trainer's tensors for them, and the expected bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from helpers.handmade import End, HandTransfer, allocate, other_end_of, random_transfers, raw_bytes, schedule_of
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.cast_arithmetic import block_scales
from mcore_reshard.kernels.cuda.cast_tiles import scale_blocks
from mcore_reshard.planner.plan.schedule import Cast, LocalTensor, OtherEnd, OtherEndView, Schedule

E4M3 = "float8_e4m3fn"


@dataclass(frozen=True)
class Weight:
    """A tensor that every training rank casts. Transfers from it have the dtype of the wire."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    to: str
    block: tuple[int, int] = (0, 0)

    @property
    def scales(self) -> str:
        return f"{self.name}.scales"

    @property
    def scales_shape(self) -> tuple[int, ...]:
        *stacked, rows, columns = self.shape
        return (*stacked, -(-rows // self.block[0]), -(-columns // self.block[1]))


WEIGHTS = (
    Weight("square", (384, 256), "bfloat16", E4M3, (128, 128)),
    Weight("ragged", (200, 136), "bfloat16", E4M3, (128, 128)),
    Weight("odd", (131, 333), "bfloat16", E4M3, (128, 128)),
    Weight("experts", (3, 160, 200), "bfloat16", E4M3, (64, 64)),
    Weight("small blocks", (24, 40), "bfloat16", E4M3, (4, 8)),
    Weight("odd blocks", (30, 40), "bfloat16", E4M3, (7, 5)),
    Weight("master", (37, 24), "float32", "bfloat16"),
    Weight("bias", (91,), "bfloat16", "float32"),
)


def transfers_with_casts(rng: np.random.Generator, worlds: tuple[int, int]) -> list[HandTransfer]:
    """Every weight goes in random parts to random ranks, block scales with their blocks, between other parameters."""
    transfers = random_transfers(rng, worlds, parameters=8, stages=2)
    for weight in WEIGHTS:
        for dst_rank in rng.permutation(worlds[1])[: int(rng.integers(1, worlds[1] + 1))].tolist():
            transfers += _parts(rng, weight, worlds, dst_rank)
    return transfers


def scale_blocks_of(bound: BoundSchedule) -> NDArray[np.void]:
    """The blocks (dtype BLOCK) whose scales a refit computes."""
    return scale_blocks(bound.casts, *places_of(bound))


def places_of(bound: BoundSchedule) -> tuple[list[int], list[int]]:
    """(address, number of elements) of each tensor, as two lists."""
    return [tensor.data_ptr() for tensor in bound.tensors], [tensor.numel() for tensor in bound.tensors]


def _parts(rng: np.random.Generator, weight: Weight, worlds: tuple[int, int], dst_rank: int) -> list[HandTransfer]:
    """The weight for one rank, in two parts along a random dim, each from a random rank."""
    dim, stage = int(rng.integers(len(weight.shape))), int(rng.integers(2))
    step = (1,) * (len(weight.shape) - 2) + weight.block if weight.block != (0, 0) else (1,) * len(weight.shape)
    cut = step[dim] * int(rng.integers(0, -(-weight.shape[dim] // step[dim]) + 1))
    transfers = []
    for start, stop in ((0, min(cut, weight.shape[dim])), (min(cut, weight.shape[dim]), weight.shape[dim])):
        if start == stop:
            continue
        src = int(rng.integers(worlds[0]))
        transfers.append(_transfer(stage, weight.name, weight.to, weight.shape, (dim, start, stop), src, dst_rank))
        if weight.block != (0, 0):
            part = (dim, -(-start // step[dim]), -(-stop // step[dim]))
            transfers.append(_transfer(stage, weight.scales, "float32", weight.scales_shape, part, src, dst_rank))
    return transfers


def _transfer(
    stage: int, name: str, dtype: str, shape: tuple[int, ...], part: tuple[int, int, int], src: int, dst: int
) -> HandTransfer:
    dim, start, stop = part
    extents = (*shape[:dim], stop - start, *shape[dim + 1 :])
    origin = (0,) * dim + (start,) + (0,) * (len(shape) - dim - 1)
    dims = tuple(range(len(shape)))
    wider, inside = (*shape[:-1], shape[-1] + 3), (*origin[:-1], origin[-1] + 1)  # a margin at the destination
    return HandTransfer(
        stage, name, dtype, extents, End(src, name, shape, origin, dims), End(dst, f"{name}.dst", wider, inside, dims)
    )


def with_casts(schedule: Schedule, weights: Sequence[Weight] = WEIGHTS) -> Schedule:
    """The training rank's schedule with the dtypes that its weights have before the cast, and the casts."""
    assert schedule.world == "train"
    tensors = _with_stored_dtypes(schedule.tensors, weights)
    index = {local.name: number for number, local in enumerate(tensors)}
    casts, computed = [], []
    for weight in weights:
        if weight.name not in index:
            continue
        scales = None
        if weight.block != (0, 0):
            scales = index[weight.scales]
            computed.append(scales)
        casts.append(Cast(index[weight.name], weight.to, scales, weight.block))
    return replace(schedule, tensors=tensors, casts=tuple(casts), computed=tuple(computed))


def pulls_with_casts(transfers: Sequence[HandTransfer], rank: int, weights: Sequence[Weight] = WEIGHTS) -> OtherEnd:
    """The other ends of all that a generation rank receives, with the dtypes that weights have before the cast."""
    pulls = other_end_of(transfers, rank)
    scales = {weight.scales for weight in weights if weight.block != (0, 0)}
    parameters = [*dict.fromkeys(transfer.parameter for transfer in transfers)]
    computed = {parameters.index(transfer.parameter) for transfer in transfers if transfer.src.tensor in scales}
    return replace(pulls, tensors=_with_stored_dtypes(pulls.tensors, weights), computed=frozenset(computed))


def _with_stored_dtypes(tensors: Sequence[LocalTensor], weights: Sequence[Weight]) -> tuple[LocalTensor, ...]:
    dtypes = {weight.name: weight.dtype for weight in weights}
    return tuple(replace(local, dtype=dtypes.get(local.name, local.dtype)) for local in tensors)


def train_schedule(transfers: Sequence[HandTransfer], rank: int, worlds: tuple[int, int]) -> Schedule:
    schedule = with_casts(schedule_of(transfers, "train", rank, worlds))
    return replace(schedule, view=OtherEndView(other_end_of(transfers, rank, "train")))


def rank_schedule(transfers: Sequence[HandTransfer], number: int, worlds: tuple[int, int]) -> Schedule:
    """The schedule of rank `number` of the group, training ranks first."""
    if number < worlds[0]:
        return train_schedule(transfers, number, worlds)
    return schedule_of(transfers, "gen", number - worlds[0], worlds)


def trainer_tensors(schedule: Schedule, seed: int) -> dict[str, torch.Tensor]:
    """The tensors of one training rank: finite random numbers of many magnitudes, zeros and denormals."""
    generator = torch.Generator().manual_seed(seed * 1000 + schedule.rank)
    tensors: dict[str, torch.Tensor] = {}
    for number, local in enumerate(schedule.tensors):
        if number not in schedule.computed:
            values = torch.randn(local.shape, generator=generator)
            values *= 2.0 ** torch.randint(-30, 12, local.shape, generator=generator)
            if local.dtype == E4M3:  # devices differ in values that are too large for it
                values.clamp_(-400.0, 400.0)
            tensors[local.name] = values.to(getattr(torch, local.dtype))
    return tensors


def stepped(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights after the trainer's next step."""
    return {name: (tensor.float() * -0.7).to(tensor.dtype) for name, tensor in tensors.items()}


def on_the_wire(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors after a cast of each whole weight: the reference, in plain torch."""
    arriving = dict(tensors)
    for weight in WEIGHTS:
        if weight.name in tensors:
            arriving[weight.name] = tensors[weight.name].to(getattr(torch, weight.to))
        if weight.name in tensors and weight.block != (0, 0):
            scales = arriving[weight.scales] = block_scales(tensors[weight.name], weight.block)
            spread = scales.repeat_interleave(weight.block[0], -2).repeat_interleave(weight.block[1], -1)
            spread = spread[..., : weight.shape[-2], : weight.shape[-1]]
            arriving[weight.name] = (tensors[weight.name].float() * (1.0 / spread)).to(torch.float8_e4m3fn)
    return arriving


def expected_bytes(
    transfers: Sequence[HandTransfer], gen: Schedule, sources: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, bytes]:
    """The bytes of one generation rank's tensors after a refit from `sources`, the tensors of the training ranks."""
    cast = [on_the_wire(source) for source in sources]
    tensors = allocate(gen)
    for transfer in transfers:
        if transfer.dst.rank == gen.rank:
            box(tensors[transfer.dst.tensor], transfer.extents, transfer.dst).copy_(
                box(cast[transfer.src.rank][transfer.src.tensor], transfer.extents, transfer.src)
            )
    return {name: raw_bytes(tensor) for name, tensor in tensors.items()}


def box(tensor: torch.Tensor, extents: tuple[int, ...], end: End) -> torch.Tensor:
    """The elements of a transfer at one of its ends, as integers so that every bit counts."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.view(words[tensor.element_size()]).as_strided(extents, end.strides, end.offset)
