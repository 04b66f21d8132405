"""Walk the work lists of the GPU's kernels on the CPU. Addresses count from `base`."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.cast_arithmetic import block_scales, narrowed, scaled_to_e4m3, widened
from mcore_reshard.kernels.cuda.cast_tiles import CAST_KINDS

_KINDS = {kind: pair for pair, kind in CAST_KINDS.items()}
_BITS = {"bfloat16": np.uint16, "float32": np.uint32, "float8_e4m3fn": np.uint8}


def run_tiles(tiles: NDArray[np.void], base: int = 0) -> None:
    """Copy every tile (dtype TILE) as the kernel does."""
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


def run_blocks(blocks: NDArray[np.void], base: int = 0) -> None:
    """Compute the scale of every block (dtype BLOCK)."""
    for block in blocks:
        columns, stride = int(block["columns"]), int(block["stride"])
        begins = [base + int(block["src"]) + row * stride for row in range(int(block["rows"]))]
        values = torch.from_numpy(np.stack([_memory(begin, np.int16, columns) for begin in begins])).view(
            torch.bfloat16
        )
        _memory(base + int(block["scale"]), np.float32, 1)[:] = block_scales(values, tuple(values.shape)).item()


def run_cast_tiles(tiles: NDArray[np.void], base: int = 0) -> None:
    """Cast every tile (dtype CAST_TILE) by the scales that are there."""
    for tile in tiles:
        box, (src, to) = tile["box"], _KINDS[int(tile["kind"])]
        count = int(box["row_words"]) * int(box["word_bytes"])  # elements
        rows, left_over = divmod(int(box["words"]), int(box["row_words"]))
        assert not left_over
        for row in range(rows):
            begins = (base + int(box[end]) + row * int(box[f"{end}_stride"]) for end in ("src", "dst"))
            bits, written = (
                _memory(begin, _BITS[dtype], count) for begin, dtype in zip(begins, (src, to), strict=True)
            )
            if to == "float8_e4m3fn":
                block = (int(tile["first_column"]) + np.arange(count)) // int(tile["block_columns"])
                scales = torch.from_numpy(_memory(base + int(tile["scales"]), np.float32, int(block[-1]) + 1)[block])
                values = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
                written[:] = scaled_to_e4m3(values[None], scales).view(torch.uint8).numpy()[0]
            else:
                written[:] = (narrowed if to == "bfloat16" else widened)(bits)


def _memory(address: int, dtype: type, count: int) -> NDArray[Any]:
    nbytes = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype)
