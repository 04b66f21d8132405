"""What a copy engine is told: rows turn after turn, over several streams."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.copy_table import COPY
from mcore_reshard.kernels.cuda import copy_engine, engine_rows
from mcore_reshard.kernels.cuda.engine_rows import Rows, divided

MIB = 1 << 20


def contiguous(sizes: list[int], sources: list[int]) -> NDArray[np.void]:
    """Copies of these bytes, one behind the other at their sources and at base 9."""
    copies = np.zeros(len(sizes), COPY)
    copies["extents"], copies["row_bytes"], copies["src"], copies["dst"] = 1, sizes, sources, 9
    for source in {*sources}:
        of_source = np.flatnonzero(copies["src"] == source)
        copies["src_offset"][of_source] = np.cumsum(copies["row_bytes"][of_source]) - copies["row_bytes"][of_source]
    copies["dst_offset"] = np.cumsum(sizes) - sizes
    return copies


def test_each_turn_has_its_share_of_its_own_bytes() -> None:
    """Else an engine would be done with one GPU before the others are with theirs."""
    copies = contiguous([20 * MIB] * 10 + [2 * MIB] * 100 + [MIB // 2] * 8, [0] * 10 + [1] * 100 + [2] * 8)
    turn = np.array([1] * 10 + [0] * 100 + [-1] * 8)
    copies["dst_offset"] += np.arange(len(copies))  # none touch
    _, rows = divided(copies, np.zeros(10, np.uint64), 1 << 17, turn, 0.8, streams=4)
    assert (np.diff(rows.turn) >= 0).all()
    for number in range(2):
        share = rows.nbytes[rows.turn == number].sum() / copies["row_bytes"][turn == number].sum()
        assert 0.7 <= share <= 0.8


def test_rows_of_two_turns_are_never_joined() -> None:
    copies = contiguous([2 * MIB] * 4, [0] * 4)
    turn = np.array([0, 0, 1, 1])
    _, rows = divided(copies, np.zeros(10, np.uint64), 1 << 17, turn, 1.1, streams=4)
    assert rows.nbytes.tolist() == [4 * MIB, 4 * MIB] and rows.turn.tolist() == [0, 1]


class Stream:
    """A stream that knows what has been done before anything that is queued on it now."""

    def __init__(self, number: int) -> None:
        self.cuda_stream, self.before = number, frozenset[int]()

    def record_event(self) -> frozenset[int]:
        return self.before

    def wait_event(self, event: frozenset[int]) -> None:
        self.before |= event


@pytest.mark.parametrize("over", [1, 4])
@pytest.mark.parametrize("counts", [[1], [3, 2], [2000, 1, 700], [0, 5], [4096]])
def test_a_turn_begins_when_the_one_before_has_ended(
    counts: list[int], over: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: pytest.MonkeyPatch.context())
    streams = [Stream(number) for number in range(over)]
    calls: list[tuple[int, NDArray[np.uint64], frozenset[int]]] = []

    def call(dst: int, src: int, nbytes: int, count: int, *others: Any) -> int:
        stream = next(each for each in streams if each.cuda_stream == others[-1])
        told = [np.array((ctypes.c_uint64 * count).from_address(each)) for each in (dst, src, nbytes)]
        assert (told[0] == told[1] + 1).all() and (told[2] == told[1] + 2).all(), "columns of one row each"
        assert 0 < count <= 1024 / over
        calls.append((stream.cuda_stream, told[1], stream.before))
        stream.before |= {*told[1].tolist()}
        return 0

    monkeypatch.setattr(copy_engine, "_batch_call", lambda: call)
    turn = np.repeat(np.arange(len(counts)), counts)
    rows = len(turn)
    src = np.random.default_rng(0).permutation(rows).astype(np.uint64)
    given = Rows(
        src, src + np.uint64(1), src + np.uint64(2), turn, np.arange(rows), np.zeros(rows, int), np.arange(rows)
    )
    engine = copy_engine.EngineCopies(given, torch.device("cuda", 0), over)
    engine.launch(streams)  # type: ignore[arg-type]
    assert sorted(np.concatenate([told for _, told, _ in calls]).tolist()) == [*range(rows)]
    turn_of = dict(zip(src.tolist(), turn.tolist(), strict=True))
    for _, told, before in calls:
        (number,) = {turn_of[row] for row in told.tolist()}
        earlier = {row for row, of_row in turn_of.items() if of_row < number}
        assert earlier <= before, "all of the turns before"
    per_stream = [sum(len(told) for stream, told, _ in calls if stream == each.cuda_stream) for each in streams]
    assert max(per_stream) - min(per_stream) <= 2 * len(counts)
    read_back = engine.read_back()
    assert {*zip(read_back["src"].tolist(), read_back["dst"].tolist(), strict=True)} == {
        (row, row + 1) for row in range(rows)
    }


def test_short_rows_are_left_to_the_kernel() -> None:
    copies = contiguous([MIB // 2 - 16, MIB // 2], [0, 1])
    _, rows = divided(copies, np.zeros(10, np.uint64), 1 << 17, np.zeros(2, np.int64), 2.0, streams=4)
    assert rows.copy.tolist() == [1] and engine_rows.LEAST_BYTES == MIB // 2
