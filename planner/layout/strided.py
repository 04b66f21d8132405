"""Strided copies between linear memories: how a trace says which elements lie where, and the algebra to compose them.

    rows 4:8 of a [16, 6] tensor, columns 0:3, in the first half of the columns of a [4, 6] tensor
    StridedCopy(extents=(4, 3), src_offset=24, src_strides=(6, 1), dst_offset=0, dst_strides=(6, 1))

Everything is exact and in boxes; no element is ever listed. Boxes over different shapes of one memory are compared in the
digits of a mixed radix: for strides 12, 6 and 1 an offset has the digits (offset // 12, offset % 12 // 6, offset % 6).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

_MOST_BOXES = 1 << 14  # of one memory in the digits of another; more are no layout


class NotNestedError(ValueError):
    """Strides of two boxes do not divide each other, and the boxes are too large to be taken apart."""


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """A box of elements from one linear memory to another. Offsets and strides count elements.

    Element (x0, x1, ...) goes from `src_offset + sum(x * src_strides)` to `dst_offset + sum(x * dst_strides)`.
    """

    extents: tuple[int, ...]
    src_offset: int
    src_strides: tuple[int, ...]
    dst_offset: int
    dst_strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.extents)

    @property
    def inverse(self) -> StridedCopy:
        return StridedCopy(self.extents, self.dst_offset, self.dst_strides, self.src_offset, self.src_strides)

    @property
    def dst_span(self) -> tuple[int, int]:
        """The first element written, and the one after the last."""
        last = self.dst_offset
        for extent, stride in zip(self.extents, self.dst_strides, strict=True):
            last += (extent - 1) * stride
        return self.dst_offset, last + 1

    def coalesced(self) -> StridedCopy:
        """The same copy with as few dims as possible, by falling stride at the destination, then at the source."""
        if len(self.extents) == 1 and self.extents[0] != 1:
            return self
        dims: list[tuple[int, int, int]] = []
        triples = zip(self.extents, self.src_strides, self.dst_strides, strict=True)
        for extent, src, dst in sorted((d for d in triples if d[0] != 1), key=lambda d: (-d[2], -d[1])):
            if dims and (dims[-1][1], dims[-1][2]) == (extent * src, extent * dst):
                extent *= dims.pop()[0]
            dims.append((extent, src, dst))
        columns = tuple(zip(*dims, strict=True)) or ((), (), ())
        return StridedCopy(columns[0], self.src_offset, columns[1], self.dst_offset, columns[2])


def chain_of(strides: Iterable[int], size: int) -> tuple[int, ...] | None:
    """The radix of a memory of `size` elements that has all `strides`: falling, each a multiple of the next, ending in 1.

    None where two strides do not divide each other.
    """
    chain = sorted({stride for stride in strides if 0 < stride < size} | {1}, reverse=True)
    return tuple(chain) if all(large % small == 0 for large, small in pairwise(chain)) else None


@dataclass(frozen=True, slots=True)
class DigitBox:
    """A part of a copy whose destination is a box in the digits of a radix.

    `start[d]` and `extents[d]` say which values digit `d` takes; `src_strides[d]` is the stride at the source along it.
    """

    start: tuple[int, ...]
    extents: tuple[int, ...]
    src_offset: int
    src_strides: tuple[int, ...]


def digit_boxes(copy: StridedCopy, chain: Sequence[int], *, merge: bool = True) -> list[DigitBox]:
    """The destination of a copy as boxes in the digits of `chain`. Dims that stride over digits are taken apart.

    `merge` joins dims that are contiguous on both sides first, which gives fewer boxes. Raises NotNestedError where that
    makes too many boxes, or where elements share a place.
    """
    copy = copy.coalesced() if merge else copy
    dims = sorted(zip(copy.dst_strides, copy.extents, copy.src_strides, strict=True), reverse=True)
    made = [0]
    return [
        DigitBox(
            tuple(offset // stride % _modulus(chain, d) for d, stride in enumerate(chain)),
            tuple(along.get(d, (1, 0))[0] for d in range(len(chain))),
            src_offset,
            tuple(along.get(d, (1, 0))[1] for d in range(len(chain))),
        )
        for offset, src_offset in _starts([dim for dim in dims if dim[0] not in chain], copy, chain)
        for offset, src_offset, along in _split([d for d in dims if d[0] in chain], offset, src_offset, chain, made)
    ]


def _modulus(chain: Sequence[int], digit: int) -> int:
    return chain[digit - 1] // chain[digit] if digit else 1 << 62


_Dims = list[tuple[int, int, int]]  # (destination stride, extent, source stride), the smallest stride last
_Digits = dict[int, tuple[int, int]]  # digit -> (extent, source stride)


def _starts(dims: _Dims, copy: StridedCopy, chain: Sequence[int]) -> list[tuple[int, int]]:
    """Where a copy begins on both sides for each index along dims whose strides are no digits: they may move any digit."""
    starts = [(copy.dst_offset, copy.src_offset)]
    for stride, extent, src in dims:
        if extent == 1:
            continue
        if extent * len(starts) > _MOST_BOXES or stride == 0:
            raise NotNestedError(f"{extent} elements of stride {stride} in a memory of strides {tuple(chain)}")
        starts = [(dst + index * stride, start + index * src) for dst, start in starts for index in range(extent)]
    return starts


def _split(
    dims: _Dims, offset: int, src_offset: int, chain: Sequence[int], made: list[int]
) -> Iterator[tuple[int, int, _Digits]]:
    """Walk the dims from the innermost out; a dim that overflows its digit is parted into a head, whole digits and a tail."""
    if not dims:
        made[0] += 1
        if made[0] > _MOST_BOXES:
            raise NotNestedError(f"a box falls into more than {_MOST_BOXES} boxes of strides {tuple(chain)}")
        yield offset, src_offset, {}
        return
    stride, extent, src = dims[-1]
    outer = dims[:-1]
    if extent == 1:
        yield from _split(outer, offset, src_offset, chain, made)
        return
    digit = chain.index(stride)
    size = _modulus(chain, digit)
    first = offset // stride % size
    if first + extent <= size:
        for start, src_start, along in _split(outer, offset, src_offset, chain, made):
            if digit in along:
                raise NotNestedError(f"two dims of stride {stride} overlap")
            yield start, src_start, {**along, digit: (extent, src)}
        return
    index = 0
    if first:
        index = size - first
        yield from _split([*outer, (stride, index, src)], offset, src_offset, chain, made)
    if whole := (extent - index) // size:
        # The digit is full: its values are one dim, the carry into the next digit another.
        carry = (stride * size, whole, src * size)
        position = offset + index * stride, src_offset + index * src
        for start, src_start, along in _split(sorted([*outer, carry], reverse=True), *position, chain, made):
            if digit in along:
                raise NotNestedError(f"two dims of stride {stride} overlap")
            yield start, src_start, {**along, digit: (size, src)}
        index += whole * size
    if rest := extent - index:
        position = offset + index * stride, src_offset + index * src
        yield from _split([*outer, (stride, rest, src)], *position, chain, made)


def common_chain(*copies: StridedCopy) -> tuple[int, ...]:
    """A radix for the destinations of copies into one memory. Where strides do not nest, the smaller ones are left out."""
    strides = {stride for copy in copies for stride in copy.coalesced().dst_strides if stride > 0} | {1}
    chain: list[int] = []
    for stride in sorted(strides, reverse=True):
        if all(other % stride == 0 for other in chain):
            chain.append(stride)
    return tuple(chain)


def box_copy(box: DigitBox, chain: Sequence[int]) -> StridedCopy:
    """The copy that a box stands for."""
    offset = sum(start * stride for start, stride in zip(box.start, chain, strict=True))
    return StridedCopy(box.extents, box.src_offset, box.src_strides, offset, tuple(chain)).coalesced()


def compose(first: StridedCopy, then: StridedCopy) -> list[StridedCopy]:
    """Copies from the source of `first` to the destination of `then`, for what passes through the memory between.

    `then` may read an element twice (stride 0). Raises NotNestedError.
    """
    low, high = first.dst_span
    reading, repeats = _without_repeats(then.inverse)
    start, stop = reading.dst_span
    if stop <= low or high <= start:
        return []
    chain = common_chain(first, reading)
    written, read = digit_boxes(first, chain), digit_boxes(reading, chain)
    composed = []
    for one in written:
        for other in read:
            if (common := _common(one, other)) is not None:
                begin, extents = common
                src = one.src_offset + _inside(begin, one)
                dst = other.src_offset + _inside(begin, other)
                copy = StridedCopy(
                    (*(n for n, _ in repeats), *extents),
                    src,
                    (*(0 for _ in repeats), *one.src_strides),
                    dst,
                    (*(s for _, s in repeats), *other.src_strides),
                )
                composed.append(copy.coalesced())
    return composed


def _without_repeats(reading: StridedCopy) -> tuple[StridedCopy, list[tuple[int, int]]]:
    """The inverse of a copy without the dims along which it reads the same elements again, and (extent, stride) of these."""
    dims = [*zip(reading.extents, reading.src_strides, reading.dst_strides, strict=True)]
    repeats = [(extent, src) for extent, src, dst in dims if not dst and extent > 1]
    columns = tuple(zip(*(dim for dim in dims if dim[2]), strict=True)) or ((), (), ())
    return StridedCopy(columns[0], reading.src_offset, columns[1], reading.dst_offset, columns[2]), repeats


def _common(one: DigitBox, other: DigitBox) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    begin = tuple(map(max, one.start, other.start))
    extents = tuple(
        min(a + n, b + m) - at
        for a, n, b, m, at in zip(one.start, one.extents, other.start, other.extents, begin, strict=True)
    )
    return None if any(extent <= 0 for extent in extents) else (begin, extents)


def _inside(begin: Sequence[int], box: DigitBox) -> int:
    return sum((at - start) * stride for at, start, stride in zip(begin, box.start, box.src_strides, strict=True))


def unread(then: StridedCopy, first: StridedCopy) -> list[StridedCopy]:
    """What is left of a copy once all that it reads out of the destination of `first` is left out."""
    reading, repeats = _without_repeats(then.inverse)
    extents, strides = (tuple(dim[i] for dim in repeats) for i in (0, 1))
    still = (0,) * len(repeats)
    return [
        StridedCopy(
            (*extents, *left.extents),
            left.dst_offset,
            (*still, *left.dst_strides),
            left.src_offset,
            (*strides, *left.src_strides),
        )
        for left in subtract(reading, first)
    ]


def subtract(copy: StridedCopy, taken: StridedCopy) -> list[StridedCopy]:
    """What is left of a copy once the destination of `taken` is left out. Raises NotNestedError."""
    low, high = taken.dst_span
    start, stop = copy.dst_span
    if stop <= low or high <= start:
        return [copy]
    chain = common_chain(copy, taken)
    left = digit_boxes(copy, chain)
    for other in digit_boxes(taken, chain):
        left = [part for box in left for part in _without(box, other)]
    return [box_copy(box, chain) for box in left]


def _without(box: DigitBox, other: DigitBox) -> Iterator[DigitBox]:
    """The boxes that remain of `box` outside of `other`: in each digit what lies before and behind the common part."""
    if (common := _common(box, other)) is None:
        yield box
        return
    begin, extents = common
    current = box
    for digit, (at, extent) in enumerate(zip(begin, extents, strict=True)):
        start, size = current.start[digit], current.extents[digit]
        for first, count in ((start, at - start), (at + extent, start + size - at - extent)):
            if count:
                yield _narrowed(current, digit, first, count)
        current = _narrowed(current, digit, at, extent)


def _narrowed(box: DigitBox, digit: int, first: int, count: int) -> DigitBox:
    return DigitBox(
        (*box.start[:digit], first, *box.start[digit + 1 :]),
        (*box.extents[:digit], count, *box.extents[digit + 1 :]),
        box.src_offset + (first - box.start[digit]) * box.src_strides[digit],
        box.src_strides,
    )
