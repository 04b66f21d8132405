"""Weights without a model: tensors as a plan describes them, with content that every rank can compute for itself.

The bits of an element depend on its parameter and its position there alone. So a generation rank can check its tensors
without having seen the source. Where a plan casts, the check casts for itself, with the reference arithmetic. It reads
the pieces of the layouts, not the transfers: it judges the result.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch

from mcore_reshard.kernels.copies.cast_arithmetic import block_scales, quantized
from mcore_reshard.planner.layout.block_scales import blocks_touched
from mcore_reshard.planner.layout.geometry import Piece, Region, row_major_strides
from mcore_reshard.planner.layout.mesh import LayerPlace
from mcore_reshard.planner.model.precision import Block
from mcore_reshard.planner.plan.plan import Plan, TransferGroup
from mcore_reshard.planner.plan.schedule import Schedule, World

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = (-1640531535, -1028477379)  # odd 32-bit constants: of the golden ratio, and of xxHash
POISON = 0xFF  # NaN in every floating-point dtype


@dataclass(frozen=True, slots=True)
class LocalPiece:
    """A piece of one parameter in a tensor of one rank."""

    parameter: str
    group: int  # index into Plan.groups
    shape: tuple[int, ...]  # of the whole parameter
    tensor: str
    piece: Piece
    slot: int


def allocate(schedule: Schedule, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of a schedule, poisoned; not those that executors compute, nor those that hold what a rank carries."""
    tensors, not_live = {}, {*schedule.computed, *schedule.carried}
    for local in (local for index, local in enumerate(schedule.tensors) if index not in not_live):
        dtype = getattr(torch, local.dtype)
        raw = torch.full((prod(local.shape) * dtype.itemsize,), POISON, dtype=torch.uint8, device=device)
        tensors[local.name] = raw.view(dtype).reshape(local.shape)
    return tensors


def fill(plan: Plan, world: World, rank: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give every piece that the rank holds its content."""
    for local in pieces(plan, world, rank):
        if local.tensor in tensors:
            box(local, tensors).copy_(_expected_bits(plan, world, local, tensors[local.tensor]))


def wrong_elements(plan: Plan, world: World, rank: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """How many elements of each parameter are not what they should be; {} where all are right."""
    counts: dict[str, torch.Tensor] = {}
    for local in pieces(plan, world, rank):
        wrong = (box(local, tensors) != _expected_bits(plan, world, local, tensors[local.tensor])).sum()
        counts[local.parameter] = counts.get(local.parameter, torch.zeros_like(wrong)) + wrong
    return {name: int(count) for name, count in counts.items() if count}


def pieces(plan: Plan, world: World, rank: int) -> Iterator[LocalPiece]:
    """Every piece of every parameter that `rank` of `world` holds."""
    seen: set[tuple[str, str, Piece, int]] = set()
    for index, transfers in enumerate(plan.transfer_groups):
        pattern = plan.patterns[transfers.pattern]
        grid, partition = (transfers.src, pattern.src) if world == "train" else (transfers.dst, pattern.dst)
        for part, holders in enumerate(plan.rank_grids[grid].tolist()):
            if rank not in holders:
                continue
            for member in range(transfers.members):
                layer, number = divmod(member, transfers.expert_count)
                place, slot = _place(transfers, transfers.layers[layer], world, number)
                for piece in partition.pieces[part]:
                    local = LocalPiece(
                        plan.parameter_name(index, member),
                        transfers.group,
                        plan.groups[transfers.group].view,
                        piece.tensor.name.format(**place),
                        piece,
                        slot,
                    )
                    if (key := (local.parameter, local.tensor, piece, slot)) not in seen:
                        seen.add(key)
                        yield local


def _place(transfers: TransferGroup, place: LayerPlace, world: World, number: int) -> tuple[dict[str, int], int]:
    if world == "train":
        slot = transfers.src_slot + number
        return {"vp": place.vp_stage, "layer": place.local, "expert": slot}, slot
    slot = transfers.dst_slot + number
    return {"vp": 0, "layer": place.layer, "expert": slot}, slot


def box(local: LocalPiece, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The piece's elements in the local tensor as integers, with the dims of the parameter."""
    flat = bits(tensors[local.tensor]).reshape(-1)
    region = local.piece.region
    return flat.as_strided(
        region.extents, local.piece.strides, flat.storage_offset() + local.piece.offset(region.start, local.slot)
    )


def _expected_bits(plan: Plan, world: World, local: LocalPiece, tensor: torch.Tensor) -> torch.Tensor:
    """The content of a piece, as integers, after the cast that the plan has for it."""
    region, device = local.piece.region, tensor.device
    casts = {cast.group: cast for cast in plan.casts} if world == "gen" else {}
    scaled = {pair.scales: pair for pair in plan.pairs if pair.weight in casts}
    if (pair := scaled.get(local.group)) is not None:  # the scales of a weight that was cast
        weight = plan.groups[pair.weight]
        suffix = plan.groups[pair.scales].name_pattern.removeprefix(weight.name_pattern)
        covered = _covered(region, pair.block, weight.view)
        values = _content(local.parameter.removesuffix(suffix), weight.view, covered, torch.bfloat16, device)
        return bits(block_scales(values, pair.block))
    cast = casts.get(local.group)
    if cast is None:
        return bits(_content(local.parameter, local.shape, region, tensor.dtype, device))
    block = next((pair.block for pair in plan.pairs if pair.weight == local.group), None)
    if block is None:
        return bits(_content(local.parameter, local.shape, region, getattr(torch, cast.src), device).to(tensor.dtype))
    # A scale is that of a whole block of the parameter, also where the piece has only a part of the block.
    covered = _covered(blocks_touched(region, block), block, local.shape)
    data, _ = quantized(_content(local.parameter, local.shape, covered, torch.bfloat16, device), block)
    top, left = (start - outer for start, outer in zip(region.start, covered.start, strict=True))
    rows, columns = region.extents
    return bits(data)[top : top + rows, left : left + columns]


def _covered(blocks: Region, block: Block, shape: tuple[int, ...]) -> Region:
    """The elements of a region of the block grid: blocks [1, 3) of 128 in a matrix of 300 rows are rows [128, 300)."""
    start = tuple(number * size for number, size in zip(blocks.start, block, strict=True))
    stop = tuple(number * size for number, size in zip(blocks.stop, block, strict=True))
    return Region(start, tuple(map(min, stop, shape)))


def _content(
    name: str, shape: tuple[int, ...], region: Region, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A region of a parameter. Floating-point numbers of two and four bytes are finite, so that casts mean something."""
    number = torch.tensor(zlib.crc32(name.encode()), device=device).to(torch.int32)
    for dim, stride in enumerate(row_major_strides(shape)):
        position = torch.arange(region.start[dim], region.stop[dim], device=device) * stride
        number = number.unsqueeze(-1) + position.to(torch.int32)  # modulo 2**32, as all that follows
    number *= _MIX[0]
    number ^= number >> 15
    number *= _MIX[1]
    itemsize = dtype.itemsize
    content = (number >> max(0, 32 - 8 * itemsize)).to(_INTEGERS[itemsize])
    if itemsize in {2, 4}:
        content &= ~(1 << (8 * itemsize - 2))  # the exponent's highest bit: below 2
    return content.view(dtype)


def slices(region: Region) -> tuple[slice, ...]:
    """The region as an index of a tensor of the whole parameter."""
    return tuple(map(slice, region.start, region.stop))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_INTEGERS[tensor.element_size()])
