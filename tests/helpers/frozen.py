"""Plans in which some layers are frozen, and which elements later refits of them bring."""

from __future__ import annotations

import random
from math import prod

import numpy as np
from helpers.simulate import UNTOUCHED, Ids
from numpy.typing import NDArray

from mcore_reshard.planner.plan.frozen import Layers
from mcore_reshard.planner.plan.plan import Plan


def half_of(plan: Plan) -> Layers:
    bulk = sorted({(transfers.group, place.layer) for transfers in plan.transfer_groups for place in transfers.layers})
    return {*random.Random(plan.digest).sample(bulk, len(bulk) // 2)}


def moves(plan: Plan, numbers: Ids) -> NDArray[np.bool_]:
    """Whether a later refit brings the elements of these numbers, as `numbered_tensors` counts them."""
    moved = np.zeros(sum(group.count * prod(group.shape) for group in plan.groups), bool)
    first = 0
    for index, group in enumerate(plan.groups):
        frozen = {layer for entry in plan.frozen if entry.group == index for layer in entry.layers}
        for layer in group.layers or (-1,):
            stop = first + max(1, group.experts) * prod(group.shape)
            moved[first:stop] = layer not in frozen
            first = stop
    return moved[numbers] & (numbers != UNTOUCHED)
