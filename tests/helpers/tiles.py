"""Walk the work list of the GPU's copy kernel on the CPU."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray


def run_tiles(tiles: NDArray[np.void], base: int = 0) -> None:
    """Copy every tile (dtype TILE) as the kernel does. Addresses count from `base`."""
    for tile in tiles:
        row_bytes = int(tile["row_words"]) * int(tile["word_bytes"])
        rows = int(tile["words"]) // int(tile["row_words"])
        assert rows * int(tile["row_words"]) == int(tile["words"])
        for end in ("src", "dst"):
            assert tile[end] % tile["word_bytes"] == 0
            assert rows == 1 or tile[f"{end}_stride"] % int(tile["word_bytes"]) == 0
        for row in range(rows):
            src, dst = (base + int(tile[end]) + row * int(tile[f"{end}_stride"]) for end in ("src", "dst"))
            ctypes.memmove(dst, src, row_bytes)
