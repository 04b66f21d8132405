"""Which pairs of ranks can read each other's GPU memory, found out together: both ends of a pair must choose alike.

A generation rank reaches a training rank if both run on one host, it sees the other's GPU (CUDA_VISIBLE_DEVICES may
hide it), the two GPUs can access each other and the training rank's memory can be exported. Pairs named in the
environment variable MCORE_RESHARD_UNREACHABLE of the generation rank, as in `train:0-gen:1,relay:1-gen:0`, are out of
reach whatever the hardware says: that is how several hosts are simulated on one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mcore_reshard.planner.subset import peers_of

from .board import Board
from .errors import TransportUnavailable
from .program import Program

UNREACHABLE_VARIABLE = "MCORE_RESHARD_UNREACHABLE"

Pair = tuple[int, int]  # training rank, generation rank


def host() -> str:
    """What processes of one running host have in common, whatever containers they are in."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def obstacles_by_pair(board: Board, program: Program, direct_obstacle: str | None) -> dict[Pair, str | None]:
    """Why each pair that exchanges bytes cannot share memory; None where it can. All ranks call it and get the same.

    `direct_obstacle` is what keeps this rank from sharing memory with anyone.
    """
    schedule = program.schedule
    seats = board.gather("seat", _seat(program, direct_obstacle))
    mine: dict[str, str | None] = {}
    if schedule.world == "gen":
        here = seats[schedule.train_ranks + schedule.rank]
        declared = _declared()
        for peer in sorted(peers_of(schedule)):
            pair = f"{schedule.name_of('train', peer)}-{schedule.name}"
            why = f"declared in {UNREACHABLE_VARIABLE}" if pair in declared else _obstacle(seats[peer], here)
            mine[str(peer)] = why
    found = board.gather("reach", mine)[schedule.train_ranks :]
    return {(int(peer), rank): why for rank, said in enumerate(found) for peer, why in said.items()}


def _seat(program: Program, obstacle: str | None) -> dict[str, Any]:
    """Where this rank is, and what keeps others from reading it."""
    if obstacle is None and program.schedule.world == "train":
        obstacle = _export_obstacle(program)
    return {"obstacle": obstacle, "host": host(), "gpu": _gpu(program.device)}


def _gpu(device: torch.device | int | None) -> str:
    """What all processes of a host call a GPU; "" for what is in no GPU's memory."""
    if device is None or (isinstance(device, torch.device) and device.type != "cuda"):
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def _export_obstacle(program: Program) -> str | None:
    if not _gpu(program.device):
        return None
    from .ipc import export  # needs CUDA's Python packages

    try:
        export(program.by_name)
    except TransportUnavailable as error:
        return str(error)
    return None


def _obstacle(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    if why := there["obstacle"] or here["obstacle"]:
        return str(why)
    if there["host"] != here["host"]:
        return "on different hosts"
    if there["gpu"] == here["gpu"]:
        return None
    uuids = [_gpu(device) for device in range(torch.cuda.device_count())]
    if there["gpu"] not in uuids:
        return "the reader does not see the other's GPU (CUDA_VISIBLE_DEVICES)"
    if not torch.cuda.can_device_access_peer(uuids.index(here["gpu"]), uuids.index(there["gpu"])):
        return "the two GPUs cannot access each other"
    return None


def _declared() -> set[str]:
    return {pair.strip() for pair in os.environ.get(UNREACHABLE_VARIABLE, "").split(",") if pair.strip()}
