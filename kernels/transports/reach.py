"""By what replicas pass bytes on, if it is known where ranks are."""

from __future__ import annotations

import numpy as np

from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.topology.topology import Topology, World

from .nccl.shared_gpus import SharedGpus


def joined_hops(plan: Plan, topology: Topology, transport: str) -> int:
    """In how many later hops, from the first, replicas pass on by nccl, in the rounds of what comes from the trainer.

    Over `auto` none, or the one between domains; or all, where replicas pass on to others both near and far in one hop.
    """
    hops = len(plan.later_hops)
    if transport != "auto" or not hops:
        return hops if transport == "nccl" else 0
    between, within = _same_domains(plan, topology)
    if within == {True} and between <= {True}:
        return 0
    return 1 if (between, within) == ({False}, {True}) else hops


def shared_gpus(plan: Plan, topology: Topology, transport: str) -> SharedGpus:
    """Where ranks are, for communicators of `auto`: it takes nccl between domains alone."""
    worlds: tuple[World, World] = ("train", "gen")
    domains, gpus, rails = (
        [each for world in worlds for each in of_world(world).tolist()]
        for of_world in (topology.domains, topology.gpus, topology.rails)
    )
    passes_on = joined_hops(plan, topology, transport) > 0
    return SharedGpus.of(domains, gpus, rails, len(topology.train), passes_on=passes_on)


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
        between |= {*is_near[~is_in_cell].tolist()} if "relay" in plan.later_hops else set()
        within |= {*is_near[is_in_cell].tolist()}
    return between, within
