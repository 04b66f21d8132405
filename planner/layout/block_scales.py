"""Where the scales of quantized weights lie: derived from the weight's own layout, in units of blocks.

A rank that holds a part of a weight holds the scales of that part's blocks. No rule covers a cut through a block, or a
fused tensor in which two parameters share a block: they go by misc.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from mcore_reshard.planner.model.parameters import ParameterGroup
from mcore_reshard.planner.model.precision import Block, grid_of

from .geometry import LocalTensor, Piece, Region
from .partitions import Misc, Padding, Partition

KV_SCALES = ("k_scale", "v_scale", "q_scale")  # how names of a KV cache's scales end; no plan has them

_Box = TypeVar("_Box", Piece, Padding)

# (weight, block grid of it, with the dim of stacked experts in front) -> the tensor of its scales
ScalesTensor = Callable[[LocalTensor, tuple[int, ...]], LocalTensor]


def blocks_touched(region: Region, block: Block) -> Region:
    """The blocks that a region of a matrix has elements in, as a region of the block grid."""
    return Region(
        tuple(start // size for start, size in zip(region.start, block, strict=True)),
        tuple(-(-stop // size) for stop, size in zip(region.stop, block, strict=True)),
    )


def in_dtype(partition: Partition, dtype: str) -> Partition:
    """The same cut, of tensors in another dtype."""

    def recast(part: tuple[_Box, ...]) -> tuple[_Box, ...]:
        return tuple(replace(box, tensor=replace(box.tensor, dtype=dtype)) for box in part)

    return Partition(tuple(map(recast, partition.pieces)), tuple(map(recast, partition.padding)))


def scale_partition(
    group: ParameterGroup, partition: Partition, block: Block, tensor_of: ScalesTensor
) -> Partition | Misc:
    """Where the scales of a weight lie: as its pieces do, in blocks.

    Every piece must start and end on block edges, or at the end of the parameter, and start on an edge of its local tensor.
    `tensor_of(weight, grid)` names the tensor of scales; its elements beyond the grid are declared padding.
    """
    whole = Region.whole(group.view)
    pieces, padding = [], []
    for part in partition.pieces:
        scales_of_part, padding_of_part = [], []
        for piece in part:
            if reason := _unaligned(piece, whole, block):
                return Misc(reason)
            *lead, row, column = piece.origin
            grid = grid_of((piece.view[-2], piece.view[-1]), block)
            tensor = tensor_of(piece.tensor, (*piece.view[:-2], *grid))
            origin = (*lead, row // block[0], column // block[1])
            scales = Piece(blocks_touched(piece.region, block), tensor, origin, piece.dims, (), piece.slot_dim)
            scales_of_part.append(scales)
            padding_of_part += _beyond(scales.local(), grid, tensor)
        pieces.append(tuple(scales_of_part))
        padding.append(tuple(padding_of_part))
    return Partition(tuple(pieces), tuple(padding) if any(padding) else ())


def splits_blocks(partition: Partition, block: Block) -> bool:
    """Whether a cut falls inside of blocks."""
    return any(
        piece.region.start[dim] % size or piece.origin[piece.dims[dim]] % size
        for part in partition.pieces
        for piece in part
        for dim, size in enumerate(block)
    )


def touched_scale_partition(partition: Partition, block: Block, tensor_of: ScalesTensor) -> Partition | Misc:
    """The scales of all blocks that each part of a weight touches, for an engine that knows which element is in which block.

    Parts must be of equal size and touch equally many blocks. Their scales follow each other as the parts do.
    """
    all_pieces = [piece for part in partition.pieces for piece in part]
    extents = {piece.region.extents for piece in all_pieces}
    grids = {blocks_touched(piece.region, block).extents for piece in all_pieces}
    if len(extents) != 1 or len(grids) != 1:
        return Misc(
            f"parts of {' and '.join(map(str, sorted(extents)))} touch {' or '.join(map(str, sorted(grids)))} blocks of"
            f" {block[0]}x{block[1]}: no layout rule for unequal numbers"
        )
    (extent,), (grid,) = extents, grids

    def scales(piece: Piece) -> Piece:
        view, origin = list(piece.view), list(piece.origin)
        for dim, local_dim in enumerate(piece.dims):
            view[local_dim] = view[local_dim] // extent[dim] * grid[dim]
            origin[local_dim] = origin[local_dim] // extent[dim] * grid[dim]
        tensor = tensor_of(piece.tensor, tuple(view))
        return Piece(blocks_touched(piece.region, block), tensor, tuple(origin), piece.dims, (), piece.slot_dim)

    return Partition(tuple(tuple(map(scales, part)) for part in partition.pieces))


def tensor_scale_partition(partition: Partition, tensor_of: ScalesTensor, why_not_fused: str) -> Partition | Misc:
    """One scale for the whole matrix, beside a tensor that holds nothing else."""
    pieces = []
    for part in partition.pieces:
        if len(part) != 1 or part[0].local().extents[-2:] != part[0].view[-2:]:
            names = ", ".join(dict.fromkeys(piece.tensor.name for piece in part))
            return Misc(f"{names} holds other parameters too: {why_not_fused}")
        piece = part[0]
        view = (*piece.view[:-2], 1, 1)
        tensor = tensor_of(piece.tensor, view)
        pieces.append((Piece(Region((0, 0), (1, 1)), tensor, (0,) * len(view), piece.dims, view, piece.slot_dim),))
    return Partition(tuple(pieces))


def _unaligned(piece: Piece, whole: Region, block: Block) -> str:
    """Why a piece has no grid of whole blocks; empty where it has one."""
    if piece.view != piece.tensor.shape or piece.dims != tuple(range(len(piece.view)))[-2:]:
        return f"no layout rule for the scales of {piece.tensor.name}, which does not keep the matrix as [out, in]"
    for dim, size in enumerate(block):
        start, stop, end = piece.region.start[dim], piece.region.stop[dim], whole.stop[dim]
        local_start = piece.origin[piece.dims[dim]]
        if start % size or (stop % size and stop != end) or local_start % size:
            return (
                f"{piece.tensor.name} holds {('rows', 'columns')[dim]} {start}:{stop} of {end} at {local_start}, which splits"
                f" a block of {block[0]}x{block[1]}"
            )
    return ""


def _beyond(filled: Region, grid: Block, tensor: LocalTensor) -> list[Padding]:
    """The elements of a padded grid to the right of and below a filled box that reaches the grid's end."""
    if tensor.shape[-2:] == grid:
        return []
    (top, left), (bottom, right) = filled.start, filled.stop
    rows, columns = tensor.shape
    width = columns if right == grid[1] else right
    to_the_right = Region((top, right), (bottom, width))
    below = Region((bottom, left), (rows if bottom == grid[0] else bottom, width))
    return [Padding(tensor, box) for box in (to_the_right, below) if box.elements]
