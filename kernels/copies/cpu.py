"""Perform a table of copies on CPU memory. This defines what a table means, and gloo packs its buckets with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .cast_arithmetic import narrowed, scaled_to_e4m3, widened
from .casts import CastForm, Casts
from .copy_table import COPY

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_NO_CASTS: Casts = {}


def run_copies(copies: NDArray[np.void], bases: Sequence[NDArray[np.uint8]], casts: Casts = _NO_CASTS) -> None:
    """Perform `copies` (dtype COPY) in order. `bases` are byte arrays [nbytes]; the bucket, if any, comes last.

    Copies from a base with a cast are casts; the scales of blocks are read from their base.
    """
    words = _word_bytes(copies).tolist()
    columns = (copies[name].tolist() for name in COPY.names or ())
    for src, dst, src_offset, dst_offset, extents, src_strides, dst_strides, row_bytes, word in zip(
        *columns, words, strict=True
    ):
        cast = casts.get(src)
        src_bytes, dst_bytes = (cast.form.src_bytes, cast.form.to_bytes) if cast else (word, word)
        shape = (*extents, row_bytes // dst_bytes)
        source = _elements(bases[src], src_offset, shape, src_strides, src_bytes)
        if cast:
            scales = None if cast.scales is None else bases[cast.scales].view(np.float32)
            source = _cast(cast.form, source, src_offset, scales)
        np.copyto(_elements(bases[dst], dst_offset, shape, dst_strides, dst_bytes), source)


def _elements(
    base: NDArray[np.uint8], offset: int, shape: Sequence[int], strides: Sequence[int], itemsize: int
) -> NDArray[np.unsignedinteger]:
    """`shape` elements from `offset` bytes on, as unsigned numbers; the last dim is contiguous."""
    return np.ndarray(tuple(shape), _WORDS[itemsize], base, offset, (*strides, itemsize))


def _cast(
    form: CastForm, source: NDArray[np.unsignedinteger], src_offset: int, scales: NDArray[np.float32] | None
) -> NDArray[np.unsignedinteger]:
    """The bits of the source's elements in the dtype of the wire."""
    if scales is None:
        return narrowed(source) if form.to == "bfloat16" else widened(source)
    _, _, rows, columns = source.shape  # a copy with scales is a box of rows: one row of blocks
    scale, in_block = (int(n[0]) for n in form.scale_of(np.array([src_offset // form.src_bytes])))
    of_column = torch.from_numpy(scales[scale + (in_block + np.arange(columns)) // form.block[1]])
    values = torch.from_numpy(source.reshape(rows, columns).view(np.int16)).view(torch.bfloat16)
    quantized: NDArray[np.uint8] = scaled_to_e4m3(values, of_column).view(torch.uint8).numpy()
    return quantized.reshape(source.shape)


def _word_bytes(copies: NDArray[np.void]) -> NDArray[np.int64]:
    """The widest word of 1, 2, 4 or 8 bytes that divides every offset, stride and row of each copy."""
    assert copies.dtype == COPY
    bits = copies["row_bytes"] | copies["src_offset"] | copies["dst_offset"] | 8
    for strides in (copies["src_strides"], copies["dst_strides"]):
        bits = bits | np.bitwise_or.reduce(strides, axis=1)
    word: NDArray[np.int64] = bits & -bits
    return word
