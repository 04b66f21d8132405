"""Bytes over time: how much of each stage, or of each route, is under way in each of many equal steps of a refit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.simulate.simulation import Messages

STEPS = 240
_RESIDUE = 1e-6  # of the highest rate: what rounding leaves where nothing moves


def rates(messages: Messages, row: NDArray[np.integer], rows: int, seconds: float) -> NDArray[np.float64]:
    """Bytes per second, [rows, STEPS], of the messages of each row; `row` has one entry a message.

    A message's bytes are spread evenly over the time that it takes.
    """
    edges = np.linspace(0.0, seconds, STEPS + 1)
    shown = np.zeros((rows, STEPS))
    if not seconds:
        return shown
    for number in np.unique(row).tolist():
        chosen = row == number
        start = messages.start_s[chosen]
        end = np.maximum(messages.end_s[chosen], start + seconds / STEPS / 1000)
        arrived = np.zeros(STEPS + 1)
        speed = messages.nbytes[chosen] / (end - start)
        for times, sign in ((start, 1.0), (end, -1.0)):
            order = np.argsort(times)
            before = np.searchsorted(times[order], edges)
            speeds, products = (np.concatenate([[0.0], np.cumsum(x[order])]) for x in (speed, speed * times))
            arrived += sign * (speeds[before] * edges - products[before])
        shown[number] = np.maximum(np.diff(arrived), 0.0) / (seconds / STEPS)
    shown[shown < _RESIDUE * shown.max()] = 0.0
    return shown
