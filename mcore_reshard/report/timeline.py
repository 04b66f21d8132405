"""Bytes over time: how much of each stage, or of each route, moves in each of many equal steps of a refit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.simulate.simulation import Flow

STEPS = 240
_RESIDUE = 1e-6  # of the highest rate: what rounding leaves where nothing moves


def rates(flow: Flow, row: NDArray[np.integer], rows: int) -> NDArray[np.float64]:
    """Bytes per second, [rows, STEPS], of the kinds of each row; `row` has one entry a kind."""
    edges, step_s = np.linspace(0.0, flow.moments_s[-1], STEPS + 1, retstep=True)
    shown = np.zeros((rows, STEPS))
    if not step_s:
        return shown
    for kind, number in enumerate(row.tolist()):
        shown[number] += np.diff(np.interp(edges, flow.moments_s, flow.moved[:, kind])) / step_s
    shown[shown < _RESIDUE * shown.max()] = 0.0
    return shown
