"""Where the ranks of a session are: each says its host and its GPU in its word, as "9f86d081884c/5c6e...#4".

The number behind # is that of the GPU on its host, and so of its rail; ranks of one GPU in two containers may say others.

Ranks on several hosts plan for them: nearer sources, and bytes that enter a host once. So do ranks of one host where both
sides share a GPU: what a reader's own GPU holds comes from there. Elsewhere on one host the plan stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

import torch

from mcore_reshard.kernels.host import gpu_numbers, host, number_of_gpu
from mcore_reshard.planner.topology.topology import MACHINES, Place, Topology

# Only how much faster NVLink is than a NIC matters to a plan.
_MACHINE = replace(MACHINES["h100-8"], name="as the ranks say")


def own_place(seat: str, device: torch.device | None) -> str:
    """Where this rank is. A rank without a GPU has a place of its own on its host."""
    gpu = seat
    if device is not None and device.type == "cuda":
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        number = number_of_gpu(gpu)
        gpu += "" if number is None else f"#{number}"
    return f"{sha256(host().encode()).hexdigest()[:12]}/{gpu}"


def decide(places: Sequence[str], train_ranks: int) -> bool:
    """Whether places make a plan better, as far as all ranks have said where they are; training ranks come first."""
    hosts, gpus = {place.partition("/")[0] for place in places}, [place.partition("#")[0] for place in places]
    return all(places) and (len(hosts) > 1 or not {*gpus[:train_ranks]}.isdisjoint(gpus[train_ranks:]))


def topology_of(places: Sequence[str], train_ranks: int, planned: Topology | None = None) -> Topology | None:
    """The topology of ranks, training ranks first; None where it would `decide` nothing.

    Links are those of the `planned` topology, if the plan was made for one. NVLink ends at hosts: ranks cannot say how far
    it reaches, so the hosts of a rack (gb200-nvl72) count as far from each other.
    """
    if not decide(places, train_ranks):
        return None
    said = [(name, *_parsed(gpu)) for name, _, gpu in (place.partition("/") for place in places)]
    hosts = {name: number for number, name in enumerate(dict.fromkeys(name for name, *_ in said))}
    at = [Place(hosts[name], number) for (name, *_), number in zip(said, gpu_numbers(said), strict=True)]
    machine = _MACHINE if planned is None else planned.machine
    machine = replace(machine, gpus=1 + max(place.gpu for place in at), hosts_per_domain=1)
    return Topology(machine, tuple(hosts), tuple(at[:train_ranks]), tuple(at[train_ranks:]))


def _parsed(gpu: str) -> tuple[str, int | None]:
    """The name of a GPU and its number, of "5c6e...#4" or a name alone."""
    found = re.fullmatch("(.*)#([0-9]{1,3})", gpu)
    return (found[1], int(found[2])) if found else (gpu, None)
