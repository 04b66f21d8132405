"""A plan for ranks whose places are known: nearer sources, and bytes that enter a host once.

    plan = located(plan, parse_topology("h200-8", plan.train.world, plan.gen.world))

Groups, routes and parts stay as they are. Turns change, who passes on, and how finely overlaps are cut.
"""

from __future__ import annotations

from dataclasses import replace

from mcore_reshard.planner.topology.topology import Topology

from .bounds import require_bounded
from .make_plan import balance_plan
from .plan import Plan


def located(plan: Plan, topology: Topology | None) -> Plan:
    """The plan for a topology; None: for ranks of which nobody knows where they are.

    Pure, so that every rank makes the same plan. Not proven yet: `require_proof` does that. Raises ValueError for a
    topology that has not the plan's ranks.
    """
    if topology == plan.topology:
        return plan
    blank = replace(plan, topology=topology, transfer_groups=(), carriers=())
    require_bounded(blank)
    scales = {pair.scales for pair in plan.pairs}
    kept = {i: transfers for i, transfers in enumerate(plan.transfer_groups) if transfers.group not in scales}
    scale_patterns = {
        (transfers.group, transfers.pattern): plan.scale_patterns[index]
        for index, transfers in kept.items()
        if index in plan.scale_patterns
    }
    return balance_plan(blank, [*kept.values()], scale_patterns)
