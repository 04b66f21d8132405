"""Contiguous copies between two GPUs by a copy engine: one call of the driver queues hundreds of them.

A copy engine takes no multiprocessor, and more of a link than a kernel does, if copies are large. So the direct transport
lets both work at the same time (see transports/direct/pull.py). Rows go over several streams: the next ones begin while one
ends. Rows of a turn all end before those of the next turn begin.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import cycle, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.copy_table import repeat

from .engine_rows import Rows
from .tiles import TILE

_MOST_BYTES = 1 << 30  # of a row that is read back: a TILE counts words in 32 bits
_ROWS_AT_ONCE = 1024  # of calls of all streams: other threads of the process queue their own work between two calls
_STREAM_ORDER, _OVERLAPS_COMPUTE = 1, 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes of cuda.h. The driver finds out by itself where device memory lies."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_location", ctypes.c_int * 2),
        ("dst_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class EngineCopies:
    """Rows that a copy engine copies, any number of times, over so many `streams`; `device` runs the calls."""

    def __init__(self, rows: Rows, device: torch.device, streams: int) -> None:
        self._device = device
        self._rows, self._turns = _in_calls(rows, streams)
        self._attributes = _Attributes(_STREAM_ORDER, (0, 0), (0, 0), _OVERLAPS_COMPUTE)
        self._first = ctypes.c_size_t(0)  # the row that the attributes begin with, of each call

    def read_back(self) -> NDArray[np.void]:
        """What the next launch copies, as tiles of bytes (dtype TILE): one for each part, or more where it is large."""
        rows = self._rows
        is_last = np.diff(rows.row, append=-1) != 0
        ends = np.where(is_last, rows.nbytes[rows.row].astype(np.int64), np.roll(rows.offset, -1))
        part, number = repeat(-(-(ends - rows.offset) // _MOST_BYTES))
        begin = rows.offset[part] + number * _MOST_BYTES
        tiles = np.zeros(len(part), TILE)
        tiles["src"], tiles["dst"] = (each[rows.row[part]] + begin.astype(np.uint64) for each in (rows.src, rows.dst))
        tiles["words"] = tiles["row_words"] = np.minimum(ends[part] - begin, _MOST_BYTES)
        tiles["copy"], tiles["word_bytes"] = rows.copy[part], 1
        return tiles

    def launch(self, streams: Sequence[torch.cuda.Stream]) -> None:
        """Queue all rows on `streams`, which no other thread uses. The driver takes about a microsecond for each row."""
        call = _batch_call()
        assert call is not None, "look at `is_available` first"
        with torch.cuda.device(self._device):
            for number, calls in enumerate(self._turns):
                if number:
                    _join(streams)
                for rows, stream in zip(calls, cycle(streams), strict=False):
                    src, dst, nbytes = (each[rows] for each in self._rows[:3])
                    error = call(
                        dst.ctypes.data, src.ctypes.data, nbytes.ctypes.data, len(src),
                        ctypes.byref(self._attributes), ctypes.byref(self._first), 1, stream.cuda_stream,
                    )  # fmt: skip
                    if error:
                        raise RuntimeError(f"cuMemcpyBatchAsync failed with CUDA error {error}")


def _in_calls(rows: Rows, streams: int) -> tuple[Rows, list[list[slice]]]:
    """(the rows in the order in which calls take them, the calls of each turn): streams take calls of like rows in turn."""
    order, turns = [np.zeros(0, np.int64)], []
    for number in range(1 + int(rows.turn.max(initial=-1))):
        of_turn = np.flatnonzero(rows.turn == number)
        count = -(-len(of_turn) // _ROWS_AT_ONCE) * streams
        parts = [of_turn[part::count] for part in range(count)]
        ends = (sum(map(len, order)) + np.cumsum([0, *map(len, parts)])).tolist()
        order += parts
        turns.append([slice(begin, end) for begin, end in pairwise(ends) if begin < end])
    taken = np.concatenate(order)
    place = np.argsort(taken)  # of each row, among those that are taken
    src, dst, nbytes = (column[taken] for column in rows[:3])
    return Rows(src, dst, nbytes, rows.turn[taken], place[rows.row], rows.offset, rows.copy), turns


def _join(streams: Sequence[torch.cuda.Stream]) -> None:
    """What is queued on `streams` later waits for all that is queued on them now."""
    events = [stream.record_event() for stream in streams]
    for stream in streams:
        for event in events:
            stream.wait_event(event)


def is_available() -> bool:
    """Whether the driver has the call: from CUDA 13 on."""
    return _batch_call() is not None


@cache
def _batch_call() -> Any:
    try:
        call = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync_v2
    except (OSError, AttributeError):
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    call.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size, pointer]
    return call
