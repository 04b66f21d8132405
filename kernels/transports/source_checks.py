"""Checksums of what a training rank sends: before a refit reads it, and again once it has read it.

torch counts writes to tensors, but not those through `.data`, to a flat buffer that parameters were pointed into, or of
kernels that are not torch's. These checksums show what such a write changed, whoever wrote it. `copies.strata` says which
tiles of the tensors are checked, and how often a write is missed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

import numpy as np

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.copy_table import Ints
from mcore_reshard.kernels.copies.cpu_tile_sums import CpuTileSums
from mcore_reshard.kernels.copies.strata import TileSums, strata_of
from mcore_reshard.kernels.errors import SessionError, TornWeightsError, TransportUnavailable
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.polling import EventPoller
from mcore_reshard.planner.plan.schedule import Schedule

T = TypeVar("T")


class SourceChecks:
    """The checks of one rank for one schedule, as `Options.source_checks` says. A generation rank checks nothing."""

    def __init__(self, bound: BoundSchedule, options: Options) -> None:
        self._bound = bound
        self._poller = EventPoller(options.timeout_s)
        self._strata = strata_of(bound.schedule, [tensor.data_ptr() for tensor in bound.tensors], options.source_checks)
        self._sums: TileSums | None = self._bind_sums() if len(self._strata.table) else None

    def around(self, run: Callable[[], T]) -> Callable[[], T]:
        """`run`, which reads the weights, between the two passes. It raises `TornWeightsError` if they differ."""
        sums = self._sums
        if sums is None:
            return run

        def checked_run() -> T:
            sums.take(int.from_bytes(os.urandom(8), "little"))
            result = run()
            sums.take_again()
            if not self._poller.until(sums.is_done):
                raise SessionError(
                    f"{self._bound.rank_name}: no checksums of weights within {self._poller.timeout_s:g} s"
                )
            if len(changed := sums.changed()):
                raise TornWeightsError(self._message(changed))
            return result

        return checked_run

    @property
    def tiles(self) -> int:
        """How many tiles are checked."""
        return len(self._strata.table)

    @property
    def table_bytes(self) -> int:
        """Device memory of the strata and the checksums."""
        return getattr(self._sums, "nbytes", 0)

    @cached_property
    def checked_bytes(self) -> int:
        """The bytes that a pass reads, at most."""
        sizes = np.minimum(self._strata.table["nbytes"].astype(np.int64), self._strata.tile_bytes)
        return int(sizes.sum())

    def _bind_sums(self) -> TileSums:
        device = self._bound.device
        assert device is not None, "there are strata, so there are tensors"
        if device.type != "cuda":
            return CpuTileSums(self._strata, self._bound.tensors)
        try:
            from mcore_reshard.kernels.cuda.tile_sums import DeviceTileSums
        except ImportError as error:
            raise TransportUnavailable(
                f"{self._bound.rank_name} cannot check its weights on the GPU: {error}; install cuda-core,"
                " or give source_checks='off'"
            ) from error
        return DeviceTileSums(self._strata, device)

    def _message(self, changed: Ints) -> str:
        tensors = np.unique(self._strata.tensor[changed])
        schedule, first = self._bound.schedule, int(tensors[0])
        others = f" and {len(tensors) - 1} other tensors" if len(tensors) > 1 else ""
        return (
            f"{self._bound.rank_name}: weights were written while they were read: {len(changed)} of"
            f" {len(self._strata.table)} checked tiles changed, in {schedule.tensors[first].name}"
            f" ({_parameter_in(schedule, first)}){others}; change weights only after refit() has returned"
        )


def _parameter_in(schedule: Schedule, tensor: int) -> str:
    """The first parameter that is sent from a tensor, by its HF name."""
    for stage in schedule.stages:
        rows = np.flatnonzero(stage.sends.tensor == tensor)
        if len(rows):
            row = int(rows[0])
            return schedule.parameter_name(int(stage.sends.transfer_group[row]), int(stage.sends.member[row]))
    raise AssertionError("only tensors that are sent are checked")
