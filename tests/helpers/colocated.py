"""Ranks that share GPUs on several hosts, without either: each process says where it is, and NCCL's stand-in looks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from helpers import nccl_over_gloo

from mcore_reshard.kernels.transports import peer_access, registry
from mcore_reshard.kernels.transports.mixed import Way, connect_by_pair
from mcore_reshard.planner.topology.topology import Topology
from mcore_reshard.session import member, places


def places_of(topology: Topology) -> list[tuple[str, str, int]]:
    """(host, GPU, its number there) of each rank, training ranks first."""
    ranks = (*topology.train, *topology.gen)
    return [(topology.hosts[place.host], f"{topology.hosts[place.host]}/GPU-{place.gpu}", place.gpu) for place in ranks]


def be_at(host: str, gpu: str, gpu_number: int = 0) -> None:
    """Say so in all that this process says from now on, of the rank that it has."""
    said = peer_access._own_seat

    def own_seat(*args: Any) -> Any:
        return replace(said(*args), host=host, gpu=gpu, number=gpu_number)

    peer_access._own_seat = own_seat
    places.host = lambda: host
    member.own_place = lambda *_: f"{host}/{gpu}#{gpu_number}"
    nccl_over_gloo.own_gpu = gpu


def take_for_auto(near: Way, far: Way) -> None:
    """Make `auto` of this process one for the CPU, with these in the places of direct and nccl."""
    registry._transports["auto"] = replace(
        registry._transports["auto"],
        devices=frozenset({"cpu"}),
        unavailable_reason=lambda: None,
        connect=partial(_connect, near, far),
    )
    assert not torch.cuda.is_available()


def _connect(near: Way, far: Way, context: Any) -> Any:
    return connect_by_pair(context, near, far)
