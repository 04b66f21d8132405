"""Whether torch has counted writes to a training rank's weights while a refit read them.

torch is asked tensor by tensor: 12,627 tensors take 4 ms, twice in each refit. Where checksums are taken around the read,
the counts need not be, and lengthen nothing:

    read            |--------------------------------------------------|
    checksums      ^                                                    ^
    counts            ^ once it has begun        shortly before its end ^

The checksums find what is written before the first count or after the second: each tensor has a tile among them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule, WriteCounts
from mcore_reshard.kernels.errors import TornWeightsError

_COSTLY = 0.01  # of a refit's time: counts that take less are taken after the read
_ENDS_AT = 0.97  # of the fastest read's time: the second count's end
_MAY_LAST = 0.1  # of the fastest read's time: what follows the second count; else it is taken again


class WriteWatch:
    """The watch of one read. `is_summed`: checksums are taken around it; `fastest_s`: the fastest such read so far, or 0."""

    def __init__(
        self, bound: BoundSchedule, tensors: Sequence[torch.Tensor], *, is_summed: bool, fastest_s: float
    ) -> None:
        self._bound, self._tensors, self._fastest_s = bound, tensors, fastest_s
        self._before = None if is_summed else WriteCounts.of(tensors)
        self._start = time.perf_counter()
        self._due = math.inf  # when to count while bytes still move
        self._looked = -math.inf
        self._error: TornWeightsError | None = None

    def begin(self) -> None:
        """The read has begun."""
        if self._before is not None:
            return
        begin = time.perf_counter()
        self._before = WriteCounts.of(self._tensors)
        count_s = time.perf_counter() - begin
        if count_s > _COSTLY * self._fastest_s > 0:
            self._due = self._start + _ENDS_AT * self._fastest_s - count_s

    def due_in_s(self) -> float:
        """Seconds until `look` is due; infinity if it is not."""
        return max(0.0, self._due - time.perf_counter())

    def look(self) -> None:
        """Count while bytes still move, if that is due. What is found is raised at the end."""
        if time.perf_counter() < self._due:
            return
        self._due, self._looked = math.inf, time.perf_counter()
        self._error = self._found()

    def end(self) -> None:
        """Raises `TornWeightsError` naming what was written since `begin`."""
        if time.perf_counter() - self._looked > _MAY_LAST * self._fastest_s:
            self._error = self._found()
        if self._error is not None:
            raise self._error

    def _found(self) -> TornWeightsError | None:
        assert self._before is not None, "the read has begun"
        try:
            self._bound.check_unwritten(self._before)
        except TornWeightsError as error:
            return error
        return None
