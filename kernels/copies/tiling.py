"""Whether a generation rank's copies and its padding fill every element of its tensors once: sums of elements decide.

Every element of a tensor has a weight (see `box_sums`). What is written to a tensor, and its padding, must have the sum of
the whole tensor. An element that is filled twice or never makes another sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.plan.schedule import Schedule

from .box_sums import IN_TENSOR, PRIME, Weights, box_sum, sums_of, times
from .checks import described_tensor, first_parameters
from .places import Boxes, boxes_of_rows

Coverage = NDArray[np.object_]  # by tensor: the sum of the elements touched, a Python int below PRIME
_SHOWN = 5


def coverage(boxes: Sequence[Boxes], tensors: int, owners: Weights | None = None) -> Coverage:
    """What boxes touch of each tensor. With `owners` [boxes], which are weights, their owners tell boxes apart."""
    covered = np.zeros(tensors, object)
    first = 0
    for each in boxes:
        shapes = [box_sum((dim.extent, [(IN_TENSOR, dim.step)]) for dim in shape) for shape in each.shapes]
        weights = times(np.array(shapes or [0], np.uint64)[each.shape], IN_TENSOR.powers(each.offset))
        if owners is not None:
            weights = times(weights, owners[first : first + len(weights)])
        first += len(weights)
        covered = (covered + np.array(sums_of(each.tensor, weights, tensors), object)) % PRIME
    return covered


def tiling_problems(schedule: Schedule) -> list[str]:
    """Tensors of a generation rank that its rows and its padding do not fill exactly once.

    A schedule without a plan may leave elements as they are, and one that is relayed has two hops: nothing is said of
    these.
    """
    if schedule.world != "gen" or schedule.relayed or schedule.view is None or schedule.view.held() is None:
        return []
    rows = [boxes_of_rows(schedule, stage.recvs) for stage in schedule.stages]
    covered = coverage(rows, len(schedule.tensors))
    return untiled(schedule, {local.name: covered[number] for number, local in enumerate(schedule.tensors)})


def untiled(schedule: Schedule, covered: Mapping[str, int]) -> list[str]:
    """Tensors of `schedule` that are not filled exactly once; `covered` has what is written to each, by name."""
    padded = [0] * len(schedule.tensors)
    for tensor, offset, strided_box in schedule.padding:
        dims = zip(strided_box.extents, strided_box.strides, strict=True)
        total = box_sum((extent, [(IN_TENSOR, step)]) for extent, step in dims)
        padded[tensor] += total * pow(IN_TENSOR.value, offset, PRIME)
    wrong = []
    for number, local in enumerate(schedule.tensors):
        whole = box_sum([(prod(local.shape), [(IN_TENSOR, 1)])])
        if (covered.get(local.name, 0) + padded[number] - whole) % PRIME:
            wrong.append(number)
    parameters = first_parameters(schedule) if wrong else {}
    named = [described_tensor(schedule, number, parameters) for number in wrong[:_SHOWN]]
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return [f"not every element is filled exactly once: {', '.join(named)}{more}"] if wrong else []
