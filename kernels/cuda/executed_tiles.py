"""Whether the tables on a device do what their copies say: the last look at them before a byte may move.

A table is read back from the device. Every byte of a tile has a place at the source and one at the destination, both
counted from where its copy begins. Summed copy by copy (see `box_sums`), they must be the places of the copy:

    copy 7     rows 0 to 63, 256 bytes each               sum of 16,384 pairs of places
    its tiles  rows 0 to 31 and rows 32 to 63             the same sum

A tile that is shifted, dropped, doubled, or of another copy changes a sum. Tiles that cast must also use the scales of
the blocks that they lie in. Blocks whose scales are computed must be those of the weight, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.box_sums import IN_MESSAGE, IN_TENSOR, Weights, box_sum, mixed, times, totals
from mcore_reshard.kernels.copies.buckets import Bucket
from mcore_reshard.kernels.copies.casts import CastForm, Casts
from mcore_reshard.kernels.copies.checks import described_tensor
from mcore_reshard.kernels.copies.copy_table import Ints, joined
from mcore_reshard.planner.plan.schedule import Schedule

from .cast_tiles import CAST_KINDS
from .tiles import WIDEST_WORD

_AT_SRC, _AT_DST = IN_TENSOR, IN_MESSAGE  # any two bases
NameOf = Callable[[int], str]  # the parameter of a copy, by its index


class PlacedCopies(NamedTuple):
    """Copies (dtype COPY), and the addresses of the first byte of each on both sides."""

    copies: NDArray[np.void]
    src: Ints
    dst: Ints

    @classmethod
    def of(cls, copies: NDArray[np.void], addresses: Sequence[int] | NDArray[np.uint64]) -> PlacedCopies:
        """`addresses` [bases] is where each base begins. SCRATCH is the last of them."""
        base = np.asarray(addresses, np.uint64).astype(np.int64)
        return cls(copies, *(base[copies[end]] + copies[end + "_offset"] for end in ("src", "dst")))

    @classmethod
    def of_buckets(cls, buckets: Sequence[Bucket], addresses: Sequence[int], places: Sequence[int]) -> PlacedCopies:
        """`addresses` [tensors] is where tensors begin, `places` [buckets] where the buckets do."""
        parts = [cls.of(bucket.copies, [*addresses, place]) for bucket, place in zip(buckets, places, strict=True)]
        none = np.zeros(0, np.int64)
        src, dst = (np.concatenate([none, *(getattr(part, end) for part in parts)]) for end in ("src", "dst"))
        return cls(joined([part.copies for part in parts]), src, dst)

    def only(self, chosen: Ints) -> PlacedCopies:
        return PlacedCopies(self.copies[chosen], self.src[chosen], self.dst[chosen])


def names_of(schedule: Schedule, tensors: NDArray[np.int32]) -> NameOf:
    """Names copies by the tensors of this rank that they read or write; `tensors` [copies]."""
    return lambda copy: described_tensor(schedule, int(tensors[copy]))


def tile_problems(tiles: NDArray[np.void], placed: PlacedCopies, name_of: NameOf) -> list[str]:
    """Copies of which `tiles` (dtype TILE) move other bytes than `placed` says, or move them elsewhere."""
    one = np.ones(len(tiles), np.int64)
    word = tiles["word_bytes"].astype(np.int64)
    is_odd = ~np.isin(word, (1, 2, 4, 8, WIDEST_WORD)) | _is_unaligned(tiles, word, word)
    return _problems(tiles, placed, name_of, is_odd, word, one, one)


def cast_tile_problems(
    tiles: NDArray[np.void],
    placed: PlacedCopies,
    casts: Casts,
    addresses: Sequence[int],
    name_of: NameOf,
) -> list[str]:
    """As `tile_problems`, for tiles that cast (dtype CAST_TILE). `addresses` [tensors] says where the scales lie."""
    box = tiles["box"]
    owner = np.minimum(box["copy"], max(len(placed.copies) - 1, 0)).astype(np.int64)
    src_bytes, dst_bytes = np.ones((2, len(tiles)), np.int64)
    is_odd = np.zeros(len(tiles), bool)
    base_of = placed.copies["src"][owner] if len(placed.copies) else np.zeros(len(tiles), np.int32)
    forms: dict[CastForm, list[int]] = {}
    for base in np.unique(base_of).tolist():
        forms.setdefault(casts[base].form, []).append(base)
    scales = np.zeros(len(addresses), np.int64)
    for index, cast in casts.items():
        if cast.scales is not None:
            scales[index] = int(addresses[cast.scales])
    for form, bases in forms.items():
        chosen = np.flatnonzero(np.isin(base_of, bases))
        src_bytes[chosen], dst_bytes[chosen] = form.src_bytes, form.to_bytes
        of_form = tiles[chosen]
        wide = WIDEST_WORD // max(form.src_bytes, form.to_bytes)
        word = of_form["box"]["word_bytes"].astype(np.int64)
        is_odd[chosen] = (of_form["kind"] != CAST_KINDS[form.src, form.to]) | ~np.isin(word, (1, wide))
        is_odd[chosen] |= _is_unaligned(of_form["box"], word * form.src_bytes, word * form.to_bytes)
        if form.block != (0, 0):
            copy = owner[chosen]
            begins = placed.src[copy] - placed.copies["src_offset"][copy]  # the tensor
            is_odd[chosen] |= _is_misscaled(form, of_form, begins, scales[base_of[chosen]])
    return _problems(box, placed, name_of, is_odd, box["word_bytes"].astype(np.int64), src_bytes, dst_bytes)


def scale_problems(
    blocks: NDArray[np.void], casts: Casts, addresses: Sequence[int], elements: Sequence[int], name_of: NameOf
) -> list[str]:
    """Weights of which `blocks` (dtype BLOCK) do not compute each scale once, or compute it from other elements.

    `addresses` and `elements` [tensors] are those of weights and scales. `name_of` names weights.
    """
    in_blocks = [(index, cast, cast.scales) for index, cast in casts.items() if cast.scales is not None]
    in_blocks.sort(key=lambda each: addresses[each[2]])
    if not in_blocks:
        return []
    weights = np.array([addresses[index] for index, _, _ in in_blocks], np.int64)
    scales = np.array([addresses[number] for _, _, number in in_blocks], np.int64)
    counts = np.array([elements[number] for _, _, number in in_blocks], np.int64)
    facts = [(*cast.form.matrix, *cast.form.block, *cast.form.blocks) for _, cast, _ in in_blocks]
    firsts = np.cumsum(counts) - counts

    scale = blocks["scale"].astype(np.int64)
    owner = np.maximum(np.searchsorted(scales, scale, side="right") - 1, 0)
    number, beside = np.divmod(scale - scales[owner], 4)
    is_foreign = (beside != 0) | (number < 0) | (number >= counts[owner])
    rows, columns, block_rows, block_columns, down, across = np.array(facts, np.int64)[owner].T
    stacked, in_matrix = np.divmod(number, down * across)
    band, block = np.divmod(in_matrix, across)
    first = (stacked * rows + band * block_rows) * columns + block * block_columns
    word = blocks["word_elements"]
    is_wrong = is_foreign | (blocks["src"].astype(np.int64) != weights[owner] + 2 * first)
    is_wrong |= (blocks["stride"] != 2 * columns) & (blocks["rows"] > 1)
    is_wrong |= blocks["rows"] != np.minimum(block_rows, rows - band * block_rows)
    is_wrong |= blocks["columns"] != np.minimum(block_columns, columns - block * block_columns)
    is_wrong |= ~np.isin(word, (1, 8)) | (
        (word == 8) & ((blocks["src"] | blocks["stride"]) % WIDEST_WORD + blocks["columns"] % 8 != 0)
    )
    times_computed = np.bincount((firsts[owner] + number)[~is_foreign], minlength=int(counts.sum()))
    is_odd = np.zeros(len(counts), bool)
    is_odd[owner[is_wrong]] = True
    is_odd[np.repeat(np.arange(len(counts)), counts)[times_computed != 1]] = True
    return _described(is_odd, "weights' scales", lambda row: name_of(in_blocks[row][0]))


def computed_problems(
    bound: BoundSchedule, rounds: Sequence[NDArray[np.void]], computed: Iterable[NDArray[np.void]]
) -> list[str]:
    """As `scale_problems`, of all weights that `rounds` of copies cast; `computed` has the blocks (dtype BLOCK) of each round.

    For tiles without a problem: others may have any number of blocks.
    """
    if not rounds:
        return []
    weights = {*np.unique(np.concatenate([copies["src"] for copies in rounds])).tolist()} & bound.casts.keys()
    addresses, elements = [tensor.data_ptr() for tensor in bound.tensors], [tensor.numel() for tensor in bound.tensors]
    casts = {index: bound.casts[index] for index in sorted(weights)}
    name_of = partial(described_tensor, bound.schedule)
    return scale_problems(np.concatenate([*computed]), casts, addresses, elements, name_of)


def _problems(
    tiles: NDArray[np.void],
    placed: PlacedCopies,
    name_of: NameOf,
    is_odd: NDArray[np.bool_],
    word: Ints,
    src_bytes: Ints,
    dst_bytes: Ints,
) -> list[str]:
    """`tiles` have the fields of TILE. A word is so many elements, an element so many bytes on each side."""
    count = len(placed.copies)
    owner = tiles["copy"].astype(np.int64)
    if (is_foreign := owner >= count).any():
        return [f"the device's table has {int(is_foreign.sum())} tiles of no copy"]
    row_words = tiles["row_words"].astype(np.int64)
    rows, rest = np.divmod(tiles["words"].astype(np.int64), np.maximum(row_words, 1))
    is_odd = is_odd | (rest != 0) | (row_words == 0)
    src, dst = (tiles[end].astype(np.int64) - start[owner] for end, start in (("src", placed.src), ("dst", placed.dst)))
    src_stride, dst_stride = (np.where(rows > 1, tiles[f"{end}_stride"], 0) for end in ("src", "dst"))
    dims = [(rows, src_stride, dst_stride), (row_words * word, src_bytes, dst_bytes)]
    found = totals(owner, times(_box_sums(dims), times(_AT_SRC.powers(src), _AT_DST.powers(dst))), count)
    is_wrong = found != _copy_sums(placed.copies, owner, src_bytes, dst_bytes)
    is_wrong[owner[is_odd]] = True
    return _described(is_wrong, "copies", name_of)


def _copy_sums(copies: NDArray[np.void], owner: Ints, src_bytes: Ints, dst_bytes: Ints) -> Weights:
    """What the tiles of each copy must sum up to. A copy without tiles is of bytes."""
    element = np.ones((2, len(copies)), np.int64)
    element[0, owner], element[1, owner] = src_bytes, dst_bytes
    dims = [(copies["extents"][:, d], copies["src_strides"][:, d], copies["dst_strides"][:, d]) for d in range(3)]
    return _box_sums([*dims, (copies["row_bytes"] // element[1], element[0], element[1])])


def _box_sums(dims: Sequence[tuple[Ints, Ints, Ints]]) -> Weights:
    """The sum of each box as if it began at 0 on both sides; `dims` are columns (extent, step at the source, and at the
    destination)."""
    columns = [column.astype(np.int64) for dim in dims for column in dim]
    _, firsts, kind_of = np.unique(mixed(*columns), return_index=True, return_inverse=True)
    kinds = np.stack(columns, axis=1)[firsts].tolist()
    sums = [
        box_sum((kind[d], [(_AT_SRC, kind[d + 1]), (_AT_DST, kind[d + 2])]) for d in range(0, len(kind), 3))
        for kind in kinds
    ]
    return np.array(sums or [0], np.uint64)[kind_of.reshape(-1)]


def _is_unaligned(tiles: NDArray[np.void], src_word: Ints, dst_word: Ints) -> NDArray[np.bool_]:
    """Whether a GPU could not load or store words of so many bytes there."""
    one_row = tiles["words"] <= tiles["row_words"]
    is_unaligned = np.zeros(len(tiles), bool)
    for end, word in (("src", src_word), ("dst", dst_word)):
        places = tiles[end].astype(np.int64) | np.where(one_row, 0, tiles[f"{end}_stride"])
        is_unaligned |= places % np.maximum(word, 1) != 0
    return is_unaligned


def _is_misscaled(form: CastForm, tiles: NDArray[np.void], begins: Ints, scales: Ints) -> NDArray[np.bool_]:
    """Whether tiles use the scale of another block than that which their elements lie in.

    `begins` and `scales` [tiles] are the addresses of their tensors and of the scales of these.
    """
    box, (height, width), (down, across) = tiles["box"], form.matrix, form.blocks
    block_rows, block_columns = form.block
    number, beside = np.divmod(tiles["scales"].astype(np.int64) - scales, 4)
    stacked, in_matrix = np.divmod(number, down * across)
    band, block = np.divmod(in_matrix, across)
    element, between = np.divmod(box["src"].astype(np.int64) - begins, form.src_bytes)
    row, column = np.divmod(element, width)
    row_words = np.maximum(box["row_words"].astype(np.int64), 1)
    rows, columns = box["words"] // row_words, row_words * box["word_bytes"]
    last_row = (element + (rows - 1) * (box["src_stride"] // form.src_bytes)) // width
    in_block = tiles["first_column"].astype(np.int64)
    return np.asarray(
        (beside != 0)
        | (between != 0)
        | (row // height != stacked)
        | (row % height // block_rows != band)
        | (last_row // height != stacked)
        | (last_row % height // block_rows != band)
        | (column != block * block_columns + in_block)
        | (in_block >= block_columns)
        | (in_block % np.maximum(box["word_bytes"], 1) != 0)
        | (tiles["block_columns"] != block_columns)
        | (column + columns > width),
        bool,
    )


def _described(is_wrong: NDArray[np.bool_], what: str, name_of: NameOf) -> list[str]:
    if not is_wrong.any():
        return []
    first = name_of(int(np.argmax(is_wrong)))
    return [
        f"the device's table is damaged: it differs from {int(is_wrong.sum())} of {len(is_wrong)} {what}, first {first}"
    ]
