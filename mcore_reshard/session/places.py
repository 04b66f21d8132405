"""Where the ranks of a session are: each says its host and its GPU in its word, as "9f86d081884c/GPU-5c6e...".

Ranks on several hosts plan for them: nearer sources, and bytes that enter a host once. So do ranks of one host where both
sides share a GPU: what a reader's own GPU holds comes from there. Elsewhere on one host the plan stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

import torch

from mcore_reshard.kernels.host import host
from mcore_reshard.planner.topology.topology import MACHINES, Place, Topology

# Only how much faster NVLink is than a NIC matters to a plan.
_MACHINE = replace(MACHINES["h100-8"], name="as the ranks say")


def own_place(seat: str, device: torch.device | None) -> str:
    """Where this rank is. A rank without a GPU has a place of its own on its host."""
    gpu = seat
    if device is not None and device.type == "cuda":
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    return f"{sha256(host().encode()).hexdigest()[:12]}/{gpu}"


def decide(places: Sequence[str], train_ranks: int) -> bool:
    """Whether places make a plan better, as far as all ranks have said where they are; training ranks come first."""
    hosts = {place.partition("/")[0] for place in places}
    return all(places) and (len(hosts) > 1 or bool({*places[:train_ranks]} & {*places[train_ranks:]}))


def topology_of(places: Sequence[str], train_ranks: int, planned: Topology | None = None) -> Topology | None:
    """The topology of ranks, training ranks first; None where it would `decide` nothing.

    Links are those of the `planned` topology, if the plan was made for one. NVLink ends at hosts: ranks cannot say how far
    it reaches, so the hosts of a rack (gb200-nvl72) count as far from each other.
    """
    if not decide(places, train_ranks):
        return None
    gpus: dict[str, dict[str, int]] = {}  # by host: the number of each GPU
    at: list[Place] = []
    for place in places:
        name, _, gpu = place.partition("/")
        of_host = gpus.setdefault(name, {})
        at.append(Place([*gpus].index(name), of_host.setdefault(gpu, len(of_host))))
    machine = replace(
        _MACHINE if planned is None else planned.machine, gpus=max(map(len, gpus.values())), hosts_per_domain=1
    )
    return Topology(machine, tuple(gpus), tuple(at[:train_ranks]), tuple(at[train_ranks:]))
