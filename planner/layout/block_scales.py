"""Where the scales of quantized weights lie: derived from the weight's own layout, in units of blocks.

Whatever holds a part of a weight holds the scales of the blocks that this part is made of, so no layout rule is written
twice. A cut through a block, or a fused tensor in which two parameters share one, has no such grid and is refused with
that reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mcore_reshard.planner.model.parameters import ParameterGroup
from mcore_reshard.planner.model.precision import Block, grid_of

from .geometry import LocalTensor, Piece, Region
from .partitions import Misc, Padding, Partition

KV_SCALES = ("k_scale", "v_scale", "q_scale")  # how names of a KV cache's scales end; no plan has them

# (weight, block grid of it, with the dim of stacked experts in front) -> the tensor of its scales
ScalesTensor = Callable[[LocalTensor, tuple[int, ...]], LocalTensor]


def blocks_touched(region: Region, block: Block) -> Region:
    """The blocks that a region of a matrix has elements in, as a region of the block grid."""
    return Region(
        tuple(low // size for low, size in zip(region.start, block, strict=True)),
        tuple(-(-high // size) for high, size in zip(region.stop, block, strict=True)),
    )


def in_dtype(partition: Partition, dtype: str) -> Partition:
    """The same cut, of tensors in another dtype."""
    return Partition(
        tuple(tuple(replace(p, tensor=replace(p.tensor, dtype=dtype)) for p in held) for held in partition.pieces),
        tuple(tuple(replace(p, tensor=replace(p.tensor, dtype=dtype)) for p in held) for held in partition.padding),
    )


def scale_partition(
    group: ParameterGroup, partition: Partition, block: Block, tensor_of: ScalesTensor
) -> Partition | Misc:
    """Where the scales of a weight lie: as its pieces do, in blocks.

    Every piece starts and ends on block edges, or at the end of the parameter, and starts on an edge of its local tensor.
    `tensor_of(weight, grid)` names the tensor of scales; what it has beyond the grid is declared padding.
    """
    whole = Region.whole(group.view)
    pieces, padding = [], []
    for held in partition.pieces:
        row, unfilled = [], []
        for piece in held:
            if reason := _unaligned(piece, whole, block):
                return Misc(reason)
            rows, columns = piece.dims
            grid = grid_of((piece.view[rows], piece.view[columns]), block)
            tensor = tensor_of(piece.tensor, (*piece.view[:-2], *grid))
            origin = list(piece.origin)
            origin[rows] //= block[0]
            origin[columns] //= block[1]
            scales = Piece(blocks_touched(piece.region, block), tensor, tuple(origin), piece.dims, (), piece.slot_dim)
            row.append(scales)
            unfilled += _beyond(scales.local(), grid, tensor)
        pieces.append(tuple(row))
        padding.append(tuple(unfilled))
    return Partition(tuple(pieces), tuple(padding) if any(padding) else ())


def splits_blocks(partition: Partition, block: Block) -> bool:
    """Whether a cut falls inside of blocks."""
    return any(
        piece.region.start[dim] % size or piece.origin[piece.dims[dim]] % size
        for held in partition.pieces
        for piece in held
        for dim, size in enumerate(block)
    )


def touched_scale_partition(partition: Partition, block: Block, tensor_of: ScalesTensor) -> Partition | Misc:
    """The scales of all blocks that each part of a weight touches, for an engine that tells which are of which elements.

    Parts that touch a block all get its scale. They are of equal size and must touch equally many blocks; where they
    follow each other in a tensor, so do their scales.
    """
    extents = {piece.region.extents for held in partition.pieces for piece in held}
    touched = {blocks_touched(piece.region, block).extents for held in partition.pieces for piece in held}
    if len(extents) != 1 or len(touched) != 1:
        return Misc(
            f"parts of {' and '.join(map(str, sorted(extents)))} touch {' or '.join(map(str, sorted(touched)))} blocks of"
            f" {block[0]}x{block[1]}: no layout rule for unequal numbers"
        )
    (part,), (grid,) = extents, touched
    pieces = []
    for held in partition.pieces:
        row = []
        for piece in held:
            view, origin = list(piece.view), list(piece.origin)
            for dim, local in enumerate(piece.dims):
                view[local] = view[local] // part[dim] * grid[dim]
                origin[local] = origin[local] // part[dim] * grid[dim]
            tensor = tensor_of(piece.tensor, tuple(view))
            row.append(
                Piece(blocks_touched(piece.region, block), tensor, tuple(origin), piece.dims, (), piece.slot_dim)
            )
        pieces.append(tuple(row))
    return Partition(tuple(pieces))


def _unaligned(piece: Piece, whole: Region, block: Block) -> str:
    if piece.view != piece.tensor.shape or piece.dims != tuple(range(len(piece.view)))[-2:]:
        return f"no layout rule for the scales of {piece.tensor.name}, which does not keep the matrix as [out, in]"
    for dim, size in enumerate(block):
        low, high, at = piece.region.start[dim], piece.region.stop[dim], piece.origin[piece.dims[dim]]
        if low % size or (high % size and high != whole.stop[dim]) or at % size:
            what = ("rows", "columns")[dim]
            return (
                f"{piece.tensor.name} holds {what} {low}:{high} of {whole.stop[dim]} at {at}, which splits a block of"
                f" {block[0]}x{block[1]}"
            )
    return ""


def _beyond(filled: Region, grid: Block, tensor: LocalTensor) -> list[Padding]:
    """What a padded grid has to the right of and below a filled box that reaches its end: nobody's."""
    if tensor.shape[-2:] == grid:
        return []
    (low, left), (high, right) = filled.start, filled.stop
    rows, columns = tensor.shape
    width = columns if right == grid[1] else right
    boxes = [Region((low, right), (high, width)), Region((high, left), (rows if high == grid[0] else high, width))]
    return [Padding(tensor, box) for box in boxes if box.elements]


def tensor_scale_partition(partition: Partition, tensor_of: ScalesTensor, why_not_fused: str) -> Partition | Misc:
    """One scale for the whole matrix, beside a tensor that holds nothing else."""
    pieces = []
    for held in partition.pieces:
        if len(held) != 1 or held[0].local().extents[-2:] != held[0].view[-2:]:
            names = ", ".join(dict.fromkeys(piece.tensor.name for piece in held))
            return Misc(f"{names} holds other parameters too: {why_not_fused}")
        piece = held[0]
        view = (*piece.view[:-2], 1, 1)
        tensor = tensor_of(piece.tensor, view)
        pieces.append((Piece(Region((0, 0), (1, 1)), tensor, (0,) * len(view), piece.dims, view, piece.slot_dim),))
    return Partition(tuple(pieces))
