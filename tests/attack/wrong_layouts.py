"""Random layout rules gone wrong: one parameter's cut on one side is another one, and the whole plan follows it.

Unlike single-field damage these plans agree with themselves: moves are those that the wrong cut asks for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod

from attack.mutants.edits import overlaps_between
from attack.single_field import Mutant
from mcore_reshard.planner.layout.geometry import LocalTensor, Piece, Region
from mcore_reshard.planner.layout.partitions import Partition
from mcore_reshard.planner.plan.plan import Plan, TransferPattern

Pieces = tuple[tuple[Piece, ...], ...]


def wrong_layouts(plan: Plan, seed: int) -> Iterator[Mutant]:
    """Plans by wrong rules, without end. Draws that change nothing, or that no record can hold, are drawn again."""
    rng = random.Random(seed)
    changes: tuple[Callable[[Pieces, random.Random], Pieces | None], ...] = (
        _partition_exchanged, _partition_rotated, _partition_reversed, _all_alike, _pieces_exchanged, _rows_rotated, _transposed,
        _split_unevenly, _strided, _other_dim, _refactored,
    )  # fmt: skip
    while True:
        index = rng.randrange(len(plan.patterns))
        pattern = plan.patterns[index]
        source = bool(rng.randrange(2))
        partition = pattern.src if source else pattern.dst
        change = rng.choice((*changes, _padding_moved))
        try:
            if change is _padding_moved:
                wrong = _padding_moved(partition)
            else:
                pieces = change(partition.pieces, rng)  # type: ignore[operator]
                wrong = None if pieces is None else replace(partition, pieces=pieces)
        except ValueError:
            continue
        if wrong is None or wrong == partition:
            continue
        src, dst = (wrong, pattern.dst) if source else (pattern.src, wrong)
        patterns = (
            *plan.patterns[:index],
            TransferPattern(src, dst, overlaps_between(src, dst)),
            *plan.patterns[index + 1 :],
        )
        names = sorted({piece.tensor.name for held in partition.pieces for piece in held})
        side = "source" if source else "destination"
        yield Mutant(
            change.__name__.strip("_"),
            replace(plan, patterns=patterns),
            f"{side} of {', '.join(names)}",
        )


def _two(rng: random.Random, items: Sequence[object]) -> tuple[int, int] | None:
    if len(items) < 2:
        return None
    a, b = rng.sample(range(len(items)), 2)
    return a, b


def _partition_exchanged(partition: Pieces, rng: random.Random) -> Pieces | None:
    """Two ranks hold each other's share."""
    if (pair := _two(rng, partition)) is None:
        return None
    mine = list(partition)
    mine[pair[0]], mine[pair[1]] = mine[pair[1]], mine[pair[0]]
    return tuple(mine)


def _partition_rotated(partition: Pieces, rng: random.Random) -> Pieces:
    """Ranks are counted from another one."""
    by = rng.randrange(len(partition))
    return partition[by:] + partition[:by]


def _partition_reversed(partition: Pieces, rng: random.Random) -> Pieces:
    """Ranks are counted backwards."""
    return partition[::-1]


def _all_alike(partition: Pieces, rng: random.Random) -> Pieces:
    """Every rank holds what one of them holds."""
    return (rng.choice(partition),) * len(partition)


def _pieces_exchanged(partition: Pieces, rng: random.Random) -> Pieces | None:
    """Two pieces of a share lie in each other's place, on every rank."""
    if (pair := _two(rng, max(partition, key=len))) is None:
        return None
    a, b = pair

    def exchanged(held: tuple[Piece, ...]) -> tuple[Piece, ...]:
        if max(a, b) >= len(held) or held[a].region.extents != held[b].region.extents:
            return held
        mine = list(held)
        mine[a], mine[b] = replace(held[a], region=held[b].region), replace(held[b], region=held[a].region)
        return tuple(mine)

    return tuple(map(exchanged, partition))


def _rows_rotated(partition: Pieces, rng: random.Random) -> Pieces | None:
    """A piece's first rows lie behind its others, on every rank."""

    def rotated(piece: Piece) -> list[Piece]:
        low, high = piece.region.start[0], piece.region.stop[0]
        if high - low < 2:
            return [piece]
        cut, at, dim = (low + high) // 2, piece.origin[piece.dims[0]], piece.dims[0]
        first, second = piece.region.within(0, low, cut), piece.region.within(0, cut, high)
        behind = (*piece.origin[:dim], at + high - cut, *piece.origin[dim + 1 :])
        return [replace(piece, region=second), replace(piece, region=first, origin=behind)]

    return tuple(tuple(part for piece in held for part in rotated(piece)) for held in partition)


def _transposed(partition: Pieces, rng: random.Random) -> Pieces:
    """Two dims of the parameter run along each other's local dim, wherever that fits."""
    dims = next(piece.dims for held in partition for piece in held)
    if len(dims) < 2:
        raise ValueError("nothing to transpose")
    order = rng.sample(range(len(dims)), len(dims))
    return tuple(
        tuple(replace(piece, dims=tuple(piece.dims[d] for d in order), origin=piece.origin) for piece in held)
        for held in partition
    )


def _split_unevenly(partition: Pieces, rng: random.Random) -> Pieces | None:
    """The boundary between the first two ranks lies elsewhere, in tensors that are larger and smaller for it."""
    if len(partition) < 2 or any(len(held) != 1 for held in partition[:2]):
        return None
    (a,), (b,) = partition[:2]
    dim = next((d for d in range(len(a.region.start)) if a.region.stop[d] == b.region.start[d]), None)
    if dim is None or a.region.extents[dim] < 2:
        return None
    cut = a.region.stop[dim] - 1
    first, second = (
        replace(a, region=a.region.within(dim, a.region.start[dim], cut)),
        replace(b, region=b.region.within(dim, cut, b.region.stop[dim]), origin=_moved(b, dim, -1)),
    )
    return ((first,), (second,), *partition[2:])


def _moved(piece: Piece, dim: int, by: int) -> tuple[int, ...]:
    local = piece.dims[dim]
    return (*piece.origin[:local], max(0, piece.origin[local] + by), *piece.origin[local + 1 :])


def _strided(partition: Pieces, rng: random.Random) -> Pieces | None:
    """Rows are dealt out in turn, row r to rank r mod n."""
    if len(partition) < 2 or any(len(held) != 1 for held in partition):
        return None
    total = max(held[0].region.stop[0] for held in partition)
    rows = partition[0][0].region.extents[0]
    if rows * len(partition) != total or rows > 32:
        return None
    dealt = []
    for rank, (piece,) in enumerate(partition):
        dealt.append(
            tuple(
                replace(
                    piece,
                    region=piece.region.within(0, row * len(partition) + rank, row * len(partition) + rank + 1),
                    origin=_moved(piece, 0, row),
                )
                for row in range(rows)
            )
        )
    return tuple(dealt)


def _other_dim(partition: Pieces, rng: random.Random) -> Pieces | None:
    """Columns are cut where rows should be, or the other way round, in tensors of the shape that asks for."""
    if len(partition) < 2 or any(len(held) != 1 or held[0].view != held[0].tensor.shape for held in partition):
        return None
    piece = partition[0][0]
    shape = tuple(max(held[0].region.stop[d] for held in partition) for d in range(len(piece.region.start)))
    cut = [d for d in range(len(shape)) if piece.region.extents[d] != shape[d]]
    if len(shape) != 2 or len(cut) != 1 or shape[1 - cut[0]] % len(partition) or len(piece.view) != 2:
        return None
    other, part = 1 - cut[0], shape[1 - cut[0]] // len(partition)
    local = Region.whole(shape).within(other, 0, part).extents
    tensor = LocalTensor(piece.tensor.name, local, piece.tensor.dtype)
    return tuple(
        (replace(piece, region=Region.whole(shape).within(other, c * part, (c + 1) * part), tensor=tensor, view=local,
                 origin=(0, 0)),)
        for c in range(len(partition))
    )  # fmt: skip


def _refactored(partition: Pieces, rng: random.Random) -> Pieces | None:
    """The tensor is filled as if its dims were nested the other way round, its shape as declared."""
    piece = next(piece for held in partition for piece in held)
    if len(piece.view) < 2:
        return None
    view = tuple(rng.sample(piece.view, len(piece.view)))
    order = [piece.view.index(size) for size in view]
    if len(set(order)) != len(order):
        return None
    place = {old: new for new, old in enumerate(order)}

    def nested(p: Piece) -> Piece:
        if prod(p.view) != prod(view) or sorted(p.view) != sorted(view):
            raise ValueError("another view")
        return replace(p, view=view, origin=tuple(p.origin[d] for d in order), dims=tuple(place[d] for d in p.dims),
                       slot_dim=place.get(p.slot_dim, -1))  # fmt: skip

    return tuple(tuple(map(nested, held)) for held in partition)


def _padding_moved(partition: Partition) -> Partition | None:
    """Padding comes first in every padded tensor."""
    if not any(partition.padding):
        return None
    pieces, padding = [], []
    for held, padded in zip(partition.pieces, partition.padding, strict=True):
        rows = sum(box.box.extents[0] for box in padded)
        pieces.append(tuple(replace(piece, origin=_moved(piece, 0, rows)) for piece in held))
        padding.append(tuple(replace(box, box=box.box.within(0, 0, box.box.extents[0])) for box in padded))
    return Partition(tuple(pieces), tuple(padding))
