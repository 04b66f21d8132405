"""The work lists of the kernels that cast: tiles of casts, and blocks whose scales are computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.casts import CastForm, Casts
from mcore_reshard.kernels.copies.copy_table import COPY, Ints
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


def split_casts(copies: NDArray[np.void], casts: Casts) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """(plain copies, copies that cast)."""
    cast = np.isin(copies["src"], [*casts])
    return copies[~cast], copies[cast]


def cut_gather(
    copies: NDArray[np.void], addresses: NDArray[np.uint64], casts: Casts, tile_bytes: int
) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """The tiles (dtype TILE) of the copies (dtype COPY) that do not cast, and those (dtype CAST_TILE) of the others."""
    plain, cast = split_casts(copies, casts)
    return cut_tiles(plain, addresses, tile_bytes), cut_cast_tiles(cast, addresses, casts, tile_bytes)


def cut_cast_tiles(
    copies: NDArray[np.void], addresses: NDArray[np.uint64], casts: Casts, tile_bytes: int
) -> NDArray[np.void]:
    """The tiles (dtype CAST_TILE) of `copies` (dtype COPY) that all cast, each at most `tile_bytes` at the source.

    `addresses` [bases] is where each base begins.
    """
    assert copies.dtype == COPY
    check_tile_bytes(tile_bytes)
    scales = np.zeros(len(addresses), np.uint64)  # where those of each base begin
    bases: dict[CastForm, list[int]] = {}
    for base in np.unique(copies["src"]).tolist():
        cast = casts[base]
        bases.setdefault(cast.form, []).append(base)
        if cast.scales is not None:
            scales[base] = addresses[cast.scales]
    all_boxes = Boxes.of(copies, addresses)
    tables = [np.empty(0, CAST_TILE)]
    for form, of_form in bases.items():
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
            table["scales"] = scales[source] + (4 * scale).astype(np.uint64)
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
