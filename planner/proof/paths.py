"""The proof of paths: every replica gets every overlap once, from a rank that has it by then."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np

from mcore_reshard.planner.plan.paths import Paths
from mcore_reshard.planner.plan.plan import Plan, TransferGroup

from .report import Violation, distinct, listed


def check_paths(plan: Plan) -> Iterator[Violation]:
    """Follow each overlap of every transfer group over its hops. Groups with the same turns are followed once."""

    if plan.topology is not None and _names_other_ranks(plan):
        return  # no path can be followed: `holders` names them
    if message := _carriers_fault(plan):
        yield Violation.of_all(plan, "carriers", "paths", message)

    def use_of(transfers: TransferGroup) -> Hashable:
        paths = plan.paths(transfers)
        if not paths.passes_on:
            return id(paths)
        return id(paths), transfers.members, transfers.first_dst_replica % paths.period

    for transfers in distinct(plan, use_of):
        if message := path_fault(plan.paths(transfers), transfers.members, transfers.first_dst_replica):
            yield Violation.of_group(plan, transfers, "paths", message)


def _names_other_ranks(plan: Plan) -> bool:
    """Whether a transfer group has ranks that are not on the meshes."""
    used = {end for each in plan.transfer_groups for end in ((each.src, plan.train.world), (each.dst, plan.gen.world))}
    return any(((plan.rank_grids[grid] < 0) | (plan.rank_grids[grid] >= world)).any() for grid, world in used)


def _carriers_fault(plan: Plan) -> str:
    """Why ranks cannot receive for others as the plan says; "" if they can, or none do."""
    if not plan.carriers:
        return ""
    if plan.topology is None or plan.relay or plan.casts:
        return "ranks carry for others only where it is known where they are, and nothing is relayed or cast"
    domains = plan.topology.domains("gen")
    carried = [each.rank for each in plan.carriers]
    if len({*carried}) < len(carried):
        return f"ranks {sorted(carried)} have carriers, some of them twice"
    far = [each.rank for each in plan.carriers if (domains[[*each.turns]] != domains[each.rank]).any()]
    return f"carriers of gen {listed(far)} are in other NVLink domains" if far else ""


def path_fault(paths: Paths, members: int, first_dst: int) -> str:
    """The first replica that some member's overlap does not reach once; "" if there is none."""
    member = np.arange(min(members, paths.period) if paths.passes_on else 1)
    replicas = paths.sites.replicas
    receivers = replicas + paths.sites.carriers
    arrivals = np.zeros((len(member), len(paths.dst_parts), receivers), np.int64)
    for hop in [paths.first_hop(0, first_dst, member), *paths.later_hops(first_dst, member)]:
        row, leg = np.nonzero(hop.runs)
        src, dst, overlap = hop.src[row, leg], hop.dst[row, leg], hop.overlap[leg]
        if hop.kind != "train" and (without := np.flatnonzero(arrivals[row, overlap, src] == 0)).size:
            at = int(without[0])
            return f"replica {src[at]} passes on overlap {overlap[at]} of member {row[at]}, which it does not have yet"
        np.add.at(arrivals, (row, overlap, dst), 1)
    if (wrong := np.argwhere(arrivals[..., :replicas] != 1)).size:
        row, overlap, replica = wrong[0].tolist()
        times = arrivals[row, overlap, replica]
        return f"overlap {overlap} of member {row} reaches replica {replica} {times} times, not once"
    return ""
