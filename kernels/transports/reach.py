"""Where replicas pass bytes on, if it is known where ranks are."""

from __future__ import annotations

import numpy as np

from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.topology.topology import Topology


def passes_on(plan: Plan, topology: Topology, transport: str) -> bool:
    """Whether replicas pass bytes on over this transport: not over nccl, which `auto` takes between domains."""
    domains = np.concatenate([topology.domains("train"), topology.domains("gen")])
    is_within_domains = "relay" not in plan.later_hops or bool((domains == domains[0]).all())
    return transport in ("gloo", "direct") or (transport == "auto" and is_within_domains)
