"""Bytes of a model on each GPU of a mesh: from the layouts alone, without a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.layout.geometry import Piece
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.planner.layout.partitions import Layout
from mcore_reshard.planner.model.parameters import (
    EXPERT_ROLES,
    ITEMSIZE,
    STACKED_ROLES,
    ModelParameters,
)

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes that a trainer keeps for each parameter: on each of its replicas, and divided among them.

    Megatron's distributed optimizer divides Adam's two moments and the main copy of weights over data parallel ranks.
    Source: Megatron-LM, docs/source/api-guide/dist_optimizer.md (6 + 12/d bytes for bf16 with fp32 gradients).
    """

    replicated: int
    divided: int


STATE_BYTES = {"bfloat16": StateBytes(2 + 4, 12), "float32": StateBytes(4 + 4, 8)}


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Where a layout keeps parameters of one group, and how much, padding left out."""

    is_expert: bool
    ranks: Ints  # [parts, replicas]
    elements: Ints  # [parts]
    nbytes: Ints  # [parts] in the dtypes of the layout's tensors


def placed(layout: Layout, model: ModelParameters, ranks: int) -> list[Placed]:
    """Where a model's parameters are on a mesh of so many ranks.

    What no rule places counts whole, on every rank. Layers of multi-token prediction are left out: refits leave them too.
    """
    found: list[Placed] = []
    for group in model.groups:
        if group.mtp:
            continue
        is_expert = group.role in EXPERT_ROLES | STACKED_ROLES
        owners_of_group = layout.place(group)
        if not isinstance(owners_of_group, tuple):
            whole = np.array([group.count * prod(group.shape)], np.int64)
            everywhere = np.arange(ranks).reshape(1, -1)
            found.append(Placed(is_expert, everywhere, whole, whole * ITEMSIZE[group.dtype]))
            continue
        for owners in owners_of_group:
            members = len(owners.layers) * max(1, owners.experts[1] - owners.experts[0])
            sizes = np.array([_part_sizes(pieces) for pieces in owners.partition.pieces], np.int64).reshape(-1, 2)
            elements, nbytes = (sizes * members).T
            found.append(Placed(is_expert, owners.ranks.astype(np.int64), elements, nbytes))
    return found


def _part_sizes(pieces: Sequence[Piece]) -> tuple[int, int]:
    """(elements, bytes) of one parameter's part."""
    sizes = [(piece.region.elements, ITEMSIZE[piece.tensor.dtype]) for piece in pieces]
    return sum(elements for elements, _ in sizes), sum(elements * itemsize for elements, itemsize in sizes)


def trainer_bytes(parts: Sequence[Placed], dtype: str, mesh: TrainMesh) -> Ints:
    """[ranks] weights, gradients and optimizer states of each training rank whose weights have this main dtype."""
    state = STATE_BYTES.get(dtype, STATE_BYTES["bfloat16"])
    held = np.zeros(mesh.world, np.float64)
    for part in parts:
        replicas = mesh.edp if part.is_expert else mesh.dp * mesh.cp
        np.add.at(held, part.ranks, part.elements[:, None] * (state.replicated + state.divided / replicas))
    return held.astype(np.int64)


def send_shares(parts: Sequence[Placed], ranks: int) -> NDArray[np.float64]:
    """[ranks] bytes that each training rank sends if every byte leaves once, and replicas share the work evenly."""
    shares = np.zeros(ranks, np.float64)
    for part in parts:
        np.add.at(shares, part.ranks, part.nbytes[:, None] / part.ranks.shape[1])
    return shares


def engine_bytes(parts: Sequence[Placed], ranks: int) -> Ints:
    """[ranks] weights of each generation rank, in the dtypes that the engine holds."""
    held = np.zeros(ranks, np.int64)
    for part in parts:
        np.add.at(held, part.ranks, part.nbytes[:, None])
    return held
