"""Where replicas pass bytes on, and by what, if it is known where ranks are."""

from __future__ import annotations

import numpy as np

from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.topology.topology import Topology, World

from .nccl.shared_gpus import SharedGpus


def passes_on(plan: Plan, topology: Topology, transport: str) -> bool:
    """Whether replicas pass bytes on over this transport: not over nccl, which `auto` takes between domains alone."""
    if transport != "auto" or not plan.later_hops:
        return transport != "nccl"
    between, within = _same_domains(plan, topology)
    return within <= {True} and len(between) <= 1


def joins(plan: Plan, topology: Topology, transport: str) -> bool:
    """Whether they pass on to other domains by nccl, in the rounds of what comes from the trainer."""
    return transport == "auto" and "relay" in plan.later_hops and _same_domains(plan, topology) == ({False}, {True})


def shared_gpus(plan: Plan, topology: Topology, transport: str) -> SharedGpus:
    """Where ranks are, for communicators of `auto`: it takes nccl between domains alone."""
    worlds: tuple[World, World] = ("train", "gen")
    domains, gpus = (
        [each for world in worlds for each in of_world(world).tolist()]
        for of_world in (topology.domains, topology.gpus)
    )
    return SharedGpus.of(domains, gpus, len(topology.train), passes_on=joins(plan, topology, transport))


def _same_domains(plan: Plan, topology: Topology) -> tuple[set[bool], set[bool]]:
    """Whether replicas are in one domain that pass on to each other: between the plan's domains, and within them.

    A plan that knows no domains passes on between any two replicas.
    """
    domains = topology.domains("gen")
    cells = np.arange(len(domains)) if plan.topology is None else plan.topology.domains("gen")
    between, within = set[bool](), {True}
    for number in {transfers.dst for transfers in plan.transfer_groups}:
        grid = plan.rank_grids[number]
        is_near = domains[grid][:, :, None] == domains[grid][:, None, :]
        is_in_cell = cells[grid][:, :, None] == cells[grid][:, None, :]
        between |= {*is_near[~is_in_cell].tolist()} if plan.relay else set()
        within |= {*is_near[is_in_cell].tolist()}
    return between, within
