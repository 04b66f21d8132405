"""Walk a table of copies on CPU memory: the meaning of the table, and what the gloo executor runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .copies import COPY

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def run_copies(copies: NDArray[np.void], bases: Sequence[NDArray[np.uint8]]) -> None:
    """Perform `copies` (dtype COPY) in order. `bases` are byte arrays [nbytes]; the bucket, if any, comes last."""
    words = _word_bytes(copies).tolist()
    columns = (copies[name].tolist() for name in COPY.names or ())
    for src, dst, src_offset, dst_offset, extents, src_strides, dst_strides, row_bytes, word in zip(
        *columns, words, strict=True
    ):
        shape = (*extents, row_bytes // word)
        dtype = _WORDS[word]
        source = np.ndarray(shape, dtype, bases[src], src_offset, (*src_strides, word))
        target = np.ndarray(shape, dtype, bases[dst], dst_offset, (*dst_strides, word))
        np.copyto(target, source)


def _word_bytes(copies: NDArray[np.void]) -> NDArray[np.int64]:
    """The widest word of 1, 2, 4 or 8 bytes that divides every offset, stride and row of each copy."""
    assert copies.dtype == COPY
    bits = copies["row_bytes"] | copies["src_offset"] | copies["dst_offset"] | 8
    for strides in (copies["src_strides"], copies["dst_strides"]):
        bits = bits | np.bitwise_or.reduce(strides, axis=1)
    word: NDArray[np.int64] = bits & -bits
    return word
