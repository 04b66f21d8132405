"""The work lists of the kernels that cast: tiles of casts, and blocks whose scales are computed.

A block of a weight is read once where one copy casts all of it: its scale is computed, and its elements are cast with it
(`cut_whole_blocks`). Where copies cast parts of a block, a kernel computes its scale first. What is cast again has its scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.casts import CastForm, Casts
from mcore_reshard.kernels.copies.copy_table import COPY, Ints, repeat
from mcore_reshard.planner.model.precision import FP8

from .tiles import INNER_LOOP, ROW, TILE, WIDEST_WORD, Boxes, check_tile_bytes, cut_tiles

CAST_KINDS = {("bfloat16", FP8): 0, ("float32", "bfloat16"): 1, ("bfloat16", "float32"): 2}

CAST_TILE = np.dtype(  # the struct CastTile of cast_kernel.cu, 64 bytes
    [
        ("box", TILE),  # word_bytes: elements of a word
        ("scales", np.uint64),  # address of the scale of the first column
        ("first_column", np.uint32),  # within its block
        ("block_columns", np.uint16),
        ("kind", np.uint16),
    ]
)
BLOCK = np.dtype(  # the struct Block of cast_kernel.cu, 32 bytes
    [
        ("src", np.uint64),
        ("scale", np.uint64),
        ("stride", np.uint32),  # bytes from row to row
        ("rows", np.uint32),
        ("columns", np.uint32),
        ("word_elements", np.uint32),
    ]
)
_WIDE = 8  # elements of a wide word of a cast from bfloat16
MOST_ELEMENTS = 128 * 128  # of a block that a CTA reads once: 256 threads with 8 words each


class GatherTables(NamedTuple):
    """The tables of a gather, in the order in which they are walked."""

    scales: NDArray[np.void]  # dtype BLOCK: whose scales it computes, beside those of `blocks`
    blocks: NDArray[np.void]  # dtype CAST_TILE: of whole blocks, whose scales are computed
    cast: NDArray[np.void]  # dtype CAST_TILE
    plain: NDArray[np.void]  # dtype TILE; they may copy the scales


def split_casts(copies: NDArray[np.void], casts: Casts) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """(plain copies, copies that cast)."""
    cast = np.isin(copies["src"], [*casts])
    return copies[~cast], copies[cast]


def cut_gather(copies: NDArray[np.void], addresses: NDArray[np.uint64], casts: Casts, tile_bytes: int) -> GatherTables:
    """The tables of `copies` (dtype COPY), some of which cast by scales that are there.

    Tiles name the copy among the plain ones, or among the casts.
    """
    plain, cast = split_casts(copies, casts)
    tiles, plain_tiles = cut_cast_tiles(cast, addresses, casts, tile_bytes), cut_tiles(plain, addresses, tile_bytes)
    return GatherTables(np.empty(0, BLOCK), np.empty(0, CAST_TILE), tiles, plain_tiles)


def cut_rounds(
    rounds: Sequence[NDArray[np.void]],
    addresses: NDArray[np.uint64],
    casts: Casts,
    tile_bytes: int,
    elements: Sequence[int],
) -> list[GatherTables]:
    """The tables of `rounds` of copies, which run one after the other and compute each scale of what they cast once.

    That is in the round that casts the block whole. Scales of other blocks are computed in the first round that casts anything
    of their weight; so are those that would come too late: as they are sent before, or as parts of the weight, or what is cast
    twice, may need them. No scales may be sent before that round. `elements` [tensors] are as for `scale_blocks`, the rest as
    for `cut_gather`.
    """
    if not rounds:
        return []
    plain, cast = zip(*(split_casts(copies, casts) for copies in rounds), strict=True)
    copies = np.concatenate(cast)
    begin = np.cumsum([0, *map(len, cast)])
    round_of = np.repeat(np.arange(len(cast)), np.diff(begin))
    weights, first = np.unique(copies["src"], return_index=True)
    computed = {index: casts[index] for index in weights.tolist()}
    whole, is_left = cut_whole_blocks(copies, addresses, computed, tile_bytes)

    # A weight with copies that are left out may need any of its scales from its first round on. Others need those they send.
    first_round = round_of[first]
    of_copy = first_round[np.searchsorted(weights, copies["src"])]
    is_left |= np.isin(copies["src"], copies["src"][is_left]) & (round_of > of_copy)
    blocks, tile = _owned_blocks(whole)
    copy = whole["box"]["copy"][tile]
    is_left[copy[_first_sent(blocks["scale"], plain, addresses, computed) < round_of[copy]]] = True

    whole = whole[~is_left[whole["box"]["copy"]]]
    left = np.flatnonzero(is_left)
    parts = cut_cast_tiles(copies[left], addresses, casts, tile_bytes)
    parts["box"]["copy"] = left[parts["box"]["copy"]]
    scales = scale_blocks(computed, addresses.tolist(), elements)
    scales = scales[~_are_among(scales["scale"], blocks["scale"][~is_left[copy]])]
    first_scales = _first_scales(computed, addresses)[weights]
    by_place = np.argsort(first_scales)
    owner = by_place[np.searchsorted(first_scales, scales["scale"], side="right", sorter=by_place) - 1]

    tables = [_by_round(scales, first_round[owner], len(rounds))]
    for tiles in (whole, parts):
        of_tile = round_of[tiles["box"]["copy"]]
        tiles["box"]["copy"] -= begin[of_tile].astype(np.uint32)
        tables.append(_by_round(tiles, of_tile, len(rounds)))
    tables.append([cut_tiles(of_round, addresses, tile_bytes) for of_round in plain])
    return [GatherTables(*of_round) for of_round in zip(*tables, strict=True)]


def _by_round(table: NDArray[np.void], round_of: Ints, rounds: int) -> list[NDArray[np.void]]:
    """The rows of each round, in their order."""
    order = np.argsort(round_of, kind="stable")
    ends = np.searchsorted(round_of[order], np.arange(rounds), side="right")
    return np.split(table[order], ends[:-1])


def _first_sent(
    scales: NDArray[np.uint64], rounds: Sequence[NDArray[np.void]], addresses: NDArray[np.uint64], casts: Casts
) -> Ints:
    """[scales] the first round whose plain copies send each, which is at that address: the last one if no earlier does."""
    tensors = [cast.scales for cast in casts.values() if cast.scales is not None]
    sent, sent_in = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for number, copies in enumerate(rounds[:-1]):
        of_scales = copies[np.isin(copies["src"], tensors)]
        extents = np.column_stack([of_scales["extents"], of_scales["row_bytes"] // 4])
        strides = np.column_stack([of_scales["src_strides"], np.full(len(of_scales), 4)])
        owner, element = repeat(extents.prod(axis=1))
        offset = of_scales["src_offset"][owner].copy()
        for dim in reversed(range(extents.shape[1])):
            element, index = np.divmod(element, extents[owner, dim])
            offset += index * strides[owner, dim]
        sent.append(addresses[of_scales["src"][owner]] + offset.astype(np.uint64))
        sent_in.append(np.full(len(owner), number))
    places, at = np.unique(np.concatenate(sent), return_index=True)
    if not len(places):
        return np.full(len(scales), len(rounds) - 1)
    found = np.minimum(np.searchsorted(places, scales), len(places) - 1)
    return np.where(places[found] == scales, np.concatenate(sent_in)[at[found]], len(rounds) - 1)


def cut_whole_blocks(
    copies: NDArray[np.void], addresses: NDArray[np.uint64], casts: Casts, tile_bytes: int
) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
    """(tiles (dtype CAST_TILE) of whole blocks, [copies] which copies they leave out).

    A tile has the rows of one row of blocks, and one or more blocks beside each other, at most `tile_bytes` where one block
    fits. Every block occurs once. Left out are copies of parts of blocks, of blocks that are too large for a CTA or not
    aligned for wide words, and of blocks of an earlier copy.
    """
    is_left = np.ones(len(copies), bool)
    first_scales = _first_scales(casts, addresses)
    tables = [np.empty(0, CAST_TILE)]
    for form, of_form in _by_form(copies, casts).items():
        if form.block == (0, 0) or form.block[0] * form.block[1] > MOST_ELEMENTS or form.block[1] % _WIDE:
            continue
        chosen = np.flatnonzero(np.isin(copies["src"], of_form))
        boxes = Boxes.of(copies[chosen], addresses)
        (height, width), (block_rows, block_columns) = form.matrix, form.block
        element = copies["src_offset"][chosen] // form.src_bytes
        scale, first_column = form.scale_of(element)
        row, column = element // width % height, element % width
        rows, columns = boxes.extents[:, INNER_LOOP], boxes.extents[:, ROW] // form.to_bytes
        count = -(-columns // block_columns)
        scales = first_scales[copies["src"][chosen]].astype(np.int64) + 4 * scale
        is_whole = (boxes.extents[:, :INNER_LOOP] == 1).all(axis=1) & (row % block_rows == 0) & (first_column == 0)
        is_whole &= rows == np.minimum(block_rows, height - row)
        is_whole &= (rows == 1) | (boxes.src_strides[:, INNER_LOOP] == width * form.src_bytes)
        is_whole &= (columns % block_columns == 0) | (column + columns == width)
        is_whole &= _word_elements(form, boxes, first_column) == _WIDE
        is_whole[is_whole] = _are_first(scales[is_whole], count[is_whole])
        is_left[chosen[is_whole]] = False
        most = max(1, tile_bytes // (block_rows * block_columns * form.src_bytes))
        tiles = -(-count // most)
        step = -(-count // tiles)
        owner, number = repeat(np.where(is_whole, -(-count // step), 0))
        first = number * step[owner] * block_columns
        table = np.zeros(len(owner), CAST_TILE)
        box = table["box"]
        box["src"], box["dst"] = boxes.src[owner] + first * form.src_bytes, boxes.dst[owner] + first * form.to_bytes
        for end, strides in (("src", boxes.src_strides), ("dst", boxes.dst_strides)):
            box[f"{end}_stride"] = strides[owner, INNER_LOOP]
        box["row_words"] = np.minimum(step[owner] * block_columns, columns[owner] - first) // _WIDE
        box["words"], box["word_bytes"], box["copy"] = box["row_words"] * rows[owner], _WIDE, chosen[owner]
        table["scales"] = scales[owner] + 4 * number * step[owner]
        table["block_columns"], table["kind"] = block_columns, CAST_KINDS[form.src, form.to]
        tables.append(table)
    return np.concatenate(tables), is_left


def blocks_of(tiles: NDArray[np.void]) -> NDArray[np.void]:
    """The blocks (dtype BLOCK) of tiles of whole blocks."""
    return _owned_blocks(tiles)[0]


def _owned_blocks(tiles: NDArray[np.void]) -> tuple[NDArray[np.void], Ints]:
    """(the blocks of tiles of whole blocks, the tile of each)."""
    box = tiles["box"]
    row_words, wide = np.maximum(box["row_words"].astype(np.int64), 1), np.maximum(tiles["block_columns"] // _WIDE, 1)
    owner, number = repeat(-(-row_words // wide))
    first = number * wide[owner]
    blocks = np.zeros(len(owner), BLOCK)
    blocks["src"] = box["src"][owner] + (first * WIDEST_WORD).astype(np.uint64)
    blocks["scale"] = tiles["scales"][owner] + (4 * number).astype(np.uint64)
    blocks["stride"], blocks["rows"] = box["src_stride"][owner], (box["words"] // row_words)[owner]
    blocks["columns"] = _WIDE * np.minimum(wide[owner], row_words[owner] - first)
    blocks["word_elements"] = _WIDE
    return blocks, owner


def _are_among(values: NDArray[np.uint64], others: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """As `np.isin`, which is several times as slow for a million addresses."""
    if not len(others):
        return np.zeros(len(values), bool)
    others = np.sort(others)
    return np.asarray(others[np.minimum(np.searchsorted(others, values), len(others) - 1)] == values)


def _are_first(scales: Ints, count: Ints) -> NDArray[np.bool_]:
    """[copies] of whose blocks no earlier copy has one; `count` blocks of each have scales from the address `scales` on."""
    owner, number = repeat(count)
    _, firsts = np.unique(scales[owner] + 4 * number, return_index=True)
    again = np.ones(len(owner), bool)
    again[firsts] = False
    return np.bincount(owner, again, len(count)) == 0


def _first_scales(casts: Casts, addresses: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """[bases] where the scales of each base begin; 0 where it has none."""
    scales = np.zeros(len(addresses), np.uint64)
    for base, cast in casts.items():
        if cast.scales is not None:
            scales[base] = addresses[cast.scales]
    return scales


def _by_form(copies: NDArray[np.void], casts: Casts) -> dict[CastForm, list[int]]:
    """The bases that are cast, by the form of their casts."""
    bases: dict[CastForm, list[int]] = {}
    for base in np.unique(copies["src"]).tolist():
        if base in casts:
            bases.setdefault(casts[base].form, []).append(base)
    return bases


def cut_cast_tiles(
    copies: NDArray[np.void], addresses: NDArray[np.uint64], casts: Casts, tile_bytes: int
) -> NDArray[np.void]:
    """The tiles (dtype CAST_TILE) of `copies` (dtype COPY) that all cast, each at most `tile_bytes` at the source.

    `addresses` [bases] is where each base begins.
    """
    assert copies.dtype == COPY
    check_tile_bytes(tile_bytes)
    first_scales = _first_scales(casts, addresses)
    all_boxes = Boxes.of(copies, addresses)
    tables = [np.empty(0, CAST_TILE)]
    for form, of_form in _by_form(copies, casts).items():
        chosen = np.isin(copies["src"], of_form)
        boxes = Boxes(*(column[chosen] for column in all_boxes))
        boxes.extents[:, ROW] //= form.to_bytes
        boxes.src_strides[:, ROW], boxes.dst_strides[:, ROW] = form.src_bytes, form.to_bytes
        boxes = boxes.cut(tile_bytes // max(form.src_bytes, form.to_bytes))
        table = np.zeros(len(boxes.copy), CAST_TILE)
        first_column = np.zeros(len(table), np.int64)
        if form.block != (0, 0):
            source = copies["src"][boxes.copy]
            elements = (boxes.src - addresses.astype(np.int64)[source]) // form.src_bytes
            scale, first_column = form.scale_of(elements)
            table["scales"] = first_scales[source] + (4 * scale).astype(np.uint64)
            table["first_column"], table["block_columns"] = first_column, form.block[1]
        table["kind"] = CAST_KINDS[form.src, form.to]
        table["box"] = boxes.tiles(_word_elements(form, boxes, first_column))
        tables.append(table)
    return np.concatenate(tables)


def _word_elements(form: CastForm, boxes: Boxes, first_column: Ints) -> Ints:
    """Elements of a word: wide where both sides, rows and blocks are aligned for it, else 1."""
    wide = WIDEST_WORD // max(form.src_bytes, form.to_bytes)
    unaligned = (boxes.src | boxes.src_strides[:, INNER_LOOP]) % (wide * form.src_bytes)
    unaligned |= (boxes.dst | boxes.dst_strides[:, INNER_LOOP]) % (wide * form.to_bytes)
    unaligned |= (boxes.extents[:, ROW] | first_column | form.block[1]) % wide
    return np.where(unaligned == 0, wide, 1)


def scale_blocks(casts: Casts, addresses: Sequence[int], elements: Sequence[int]) -> NDArray[np.void]:
    """The blocks (dtype BLOCK) of all weights whose casts have scales, form by form and tensor by tensor.

    `addresses` and `elements` have an entry for each tensor of the rank.
    """
    alike: dict[tuple[CastForm, int], list[tuple[int, int]]] = {}  # addresses of weights and scales, by form and count
    for index, cast in casts.items():
        if cast.scales is not None:
            alike.setdefault((cast.form, elements[cast.scales]), []).append((addresses[index], addresses[cast.scales]))
    tables = [np.empty(0, BLOCK)]
    for (form, count), pairs in alike.items():
        begins = np.array(pairs, np.uint64)
        (rows, columns), (block_rows, block_columns) = form.matrix, form.block
        down, across = form.blocks
        stacked, band, block = np.indices((count // (down * across), down, across)).reshape(3, -1)  # block: in its band
        first = (stacked * rows + band * block_rows) * columns + block * block_columns
        table = np.zeros((len(pairs), count), BLOCK)
        table["src"] = begins[:, :1] + (first * form.src_bytes).astype(np.uint64)
        table["scale"] = begins[:, 1:] + 4 * np.arange(count, dtype=np.uint64)
        table["stride"] = columns * form.src_bytes
        table["rows"] = np.minimum(block_rows, rows - band * block_rows)
        table["columns"] = np.minimum(block_columns, columns - block * block_columns)
        wide = (table["src"] % 16 == 0) & (columns % 8 == 0) & (table["columns"] % 8 == 0)
        table["word_elements"] = np.where(wide, 8, 1)
        tables.append(table.reshape(-1))
    return np.concatenate(tables)
