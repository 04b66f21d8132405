"""The view of every traced parameter and tensor in which all copies between them are boxes, and so pieces.

Columns 0, 2 and 4 of a tensor [16, 6] are no box of it, but one of its view [16, 3, 2]: [0:16, 0:3, 0:1].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from .condense import Pieces
from .geometry import LocalTensor, Piece, Region, row_major_strides
from .partitions import Misc
from .strided import NotNestedError, StridedCopy, chain_of, digit_boxes

MOST_PIECES = 256  # of one parameter in one tensor, before a finer view of it is taken

Use = tuple[str, str, LocalTensor, StridedCopy]  # side, pattern of a parameter, tensor, what it has of the parameter


class Views:
    """The view of every parameter and every tensor in which all copies are boxes: their shapes, or a finer factoring.

    A view is finer only where a shape would give more than `MOST_PIECES` pieces, as for rows that alternate.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], uses: Iterable[Use], stacked: set[tuple[str, LocalTensor]]
    ):
        """`shapes` are those of parameters, by pattern; `stacked` are tensors, by side, with experts along their dim 0."""
        self._shapes, self._stacked = shapes, stacked
        self._parameters: dict[str, tuple[int, ...]] = {}  # the radix of each
        self._tensors: dict[tuple[str, LocalTensor], tuple[int, ...]] = {}
        self._dummies: dict[tuple[str, LocalTensor], int] = defaultdict(int)
        self._boxes: dict[Use, tuple[_Box, ...]] = {}
        self.problems: dict[str, Misc] = {}
        uses = [*dict.fromkeys(uses)]
        pending = uses
        while pending:
            finer = {key for use in pending if (key := self._fit(*use)) is not None}
            # All pieces of a parameter or a tensor whose view became finer are cut anew.
            pending = [use for use in uses if use[1] in finer or (use[0], use[2]) in finer]

    def parameter(self, pattern: str) -> tuple[int, ...]:
        """The view of a parameter."""
        shape = self._shapes[pattern]
        return _sizes(self._parameters.get(pattern) or shape_chain(shape), prod(shape))

    def pieces(self, side: str, pattern: str, copies: Pieces) -> tuple[Piece, ...]:
        return tuple(piece for tensor, copy in copies for piece in self._pieces(side, pattern, tensor, copy))

    def _fit(self, side: str, pattern: str, tensor: LocalTensor, copy: StridedCopy) -> object | None:
        """Cut a copy into boxes of both views. Returns what got a finer view: a pattern, or (side, tensor)."""
        if pattern in self.problems:
            return None
        shape = self._shapes[pattern]
        chain = self._parameters.setdefault(pattern, shape_chain(shape))
        local = self._tensors.setdefault((side, tensor), shape_chain(tensor.shape))
        try:
            boxes = _boxes(copy, chain, local, MOST_PIECES)
        except NotNestedError as error:
            plain = copy.coalesced()
            finer = (
                _refined(chain, plain.src_strides, prod(shape)),
                _refined(local, plain.dst_strides, prod(tensor.shape)),
            )
            if finer[0] not in (None, chain):
                self._parameters[pattern] = finer[0]  # type: ignore[assignment]
                return pattern
            if finer[1] not in (None, local):
                self._tensors[side, tensor] = finer[1]  # type: ignore[assignment]
                return (side, tensor)
            self.problems[pattern] = Misc(f"{tensor.name} holds it in too many boxes: {error}")
            return None
        self._boxes[side, pattern, tensor, copy] = boxes
        slots = 1 if (side, tensor) in self._stacked and tensor.shape[0] > 1 else 0
        free = len(local) - slots
        self._dummies[side, tensor] = max(self._dummies[side, tensor], len(chain) - free, 0)
        return None

    def _pieces(self, side: str, pattern: str, tensor: LocalTensor, copy: StridedCopy) -> list[Piece]:
        local, stacked = self._tensors[side, tensor], (side, tensor) in self._stacked
        sizes = _sizes(local, prod(tensor.shape))
        ones = self._dummies[side, tensor] + (1 if stacked and tensor.shape[0] == 1 else 0)
        view = (1,) * ones + sizes
        slot_dim = -1 if not stacked else ones if tensor.shape[0] > 1 else ones - 1
        pieces = []
        for box in self._boxes[side, pattern, tensor, copy]:
            dims = [ones + dim if dim >= 0 else -1 for dim in box.dims]
            free = [dim for dim in range(len(view)) if dim not in dims and dim != slot_dim]
            dims = [dim if dim >= 0 else free.pop(0) for dim in dims]
            region = Region(box.start, tuple(s + n for s, n in zip(box.start, box.extents, strict=True)))
            pieces.append(Piece(region, tensor, (0,) * ones + box.origin, tuple(dims), view, slot_dim))
        return sorted(pieces, key=lambda piece: piece.origin)


@dataclass(frozen=True, slots=True)
class _Box:
    """A piece without its tensor; `dims[d]` is -1 where the box has extent one."""

    start: tuple[int, ...]
    extents: tuple[int, ...]
    origin: tuple[int, ...]
    dims: tuple[int, ...]


def shape_chain(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The radix of a shape: the strides of its dims, without those of size one."""
    size = prod(shape)
    return tuple(dict.fromkeys(stride for stride in row_major_strides(shape) if stride < size)) or (1,)


def _sizes(chain: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The view of a radix: (12, 4, 1) of 48 elements -> (4, 3, 4)."""
    return tuple(before // stride for before, stride in zip((size, *chain), chain, strict=False))


def _refined(chain: tuple[int, ...], strides: Iterable[int], size: int) -> tuple[int, ...] | None:
    """A radix with more strides; None where they do not divide each other."""
    return chain_of([*chain, *strides], size)


def _boxes(copy: StridedCopy, chain: tuple[int, ...], local: tuple[int, ...], most: int) -> tuple[_Box, ...]:
    """A copy as boxes that lie in digits of both radixes. Raises NotNestedError where there are more than `most`."""
    boxes: list[_Box] = []
    for there in digit_boxes(copy, local):
        as_copy = StridedCopy(there.extents, there.src_offset, there.src_strides, _offset(there.start, local), local)
        for here in digit_boxes(as_copy.inverse, chain, merge=False):
            dims = tuple(_dim(n, stride, local) for n, stride in zip(here.extents, here.src_strides, strict=True))
            origin = _digits(here.src_offset, local)
            sizes = _sizes(local, 1 << 62)
            ends = zip(dims, here.extents, strict=True)
            if None in dims or any(dim >= 0 and origin[dim] + n > sizes[dim] for dim, n in ends if dim is not None):
                raise NotNestedError(f"they lie across dims of strides {local}")
            boxes.append(_Box(here.start, here.extents, origin, dims))  # type: ignore[arg-type]
            if len(boxes) > most:
                raise NotNestedError(f"more than {most}")
    return tuple(boxes)


def _dim(extent: int, stride: int, chain: tuple[int, ...]) -> int | None:
    """The digit along which a dim runs: -1 for extent one, None where no digit has the stride."""
    if extent == 1:
        return -1
    return chain.index(stride) if stride in chain else None


def _digits(offset: int, chain: tuple[int, ...]) -> tuple[int, ...]:
    digits = []
    for stride in chain:
        digit, offset = divmod(offset, stride)
        digits.append(digit)
    return tuple(digits)


def _offset(digits: Sequence[int], chain: tuple[int, ...]) -> int:
    return sum(digit * stride for digit, stride in zip(digits, chain, strict=True))
