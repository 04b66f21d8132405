"""The proof of paths: every replica gets every overlap once, from a rank that has it by then."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np

from mcore_reshard.planner.plan.paths import Paths
from mcore_reshard.planner.plan.plan import Plan, TransferGroup

from .report import Violation, distinct


def check_paths(plan: Plan) -> Iterator[Violation]:
    """Follow each overlap of every transfer group over its hops. Groups with the same turns are followed once."""

    def use_of(transfers: TransferGroup) -> Hashable:
        paths = plan.paths(transfers)
        if not paths.passes_on:
            return id(paths)
        return id(paths), transfers.members, transfers.first_dst_replica % paths.period

    for transfers in distinct(plan, use_of):
        if message := path_fault(plan.paths(transfers), transfers.members, transfers.first_dst_replica):
            yield Violation.of_group(plan, transfers, "paths", message)


def path_fault(paths: Paths, members: int, first_dst: int) -> str:
    """The first replica that some member's overlap does not reach once; "" if there is none."""
    member = np.arange(min(members, paths.period) if paths.passes_on else 1)
    replicas = paths.sites.dst_gpus.shape[1]
    arrivals = np.zeros((len(member), len(paths.dst_parts), replicas), np.int64)
    for hop in [paths.first_hop(0, first_dst, member), *paths.later_hops(first_dst, member)]:
        row, leg = np.nonzero(hop.runs)
        src, dst, overlap = hop.src[row, leg], hop.dst[row, leg], hop.overlap[leg]
        if hop.kind != "train" and (without := np.flatnonzero(arrivals[row, overlap, src] == 0)).size:
            at = int(without[0])
            return f"replica {src[at]} passes on overlap {overlap[at]} of member {row[at]}, which it does not have yet"
        np.add.at(arrivals, (row, overlap, dst), 1)
    if (wrong := np.argwhere(arrivals != 1)).size:
        row, overlap, replica = wrong[0].tolist()
        times = arrivals[row, overlap, replica]
        return f"overlap {overlap} of member {row} reaches replica {replica} {times} times, not once"
    return ""
