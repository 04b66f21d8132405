"""Simulate a refit: the executors' rounds, on the links of a topology.

plan = mr.load_plan("plan.json")
topology = parse_topology("h200-8", plan.train.world, plan.gen.world)
print(simulate(plan, topology).seconds)
"""

from __future__ import annotations

import numpy as np

from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.transports.reach import shared_gpus
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.topology.topology import Topology

from .critical_path import critical_path
from .events import run_script
from .flows import Floats, Ints
from .script import Script, script_of
from .simulation import LINKS, Flow, Link, Messages, Simulation

TRANSPORTS = ("auto", "direct", "nccl", "gloo")
_EXACT_MESSAGES = 20_000  # up to so many, every end of a message is an event of its own
_STEPS = 2000  # of a larger refit, if its time is the bound
_OWN_GPU, _NVLINK, _NIC = range(3)
# Of what NVLink carries one way, where a GPU sends and receives. One that reads another reaches 393 GB/s by a copy engine, 373
# by a kernel. Two that read each other reach 388 and 337 (docs/performance.md, "The links"): colocated ranks use both.
_BOTH_WAYS = 0.9


def simulate(
    plan: Plan,
    topology: Topology,
    transport: str = "auto",
    *,
    options: Options = Options(),  # noqa: B008
    round_s: float = 0.0,
    pxn: bool = True,
) -> Simulation:
    """Simulate one refit of a plan. `auto` is direct within an NVLink domain and nccl elsewhere.

    `round_s` is what every round costs beside its bytes. `pxn`: whether nccl sends to other hosts by the NIC on the
    receiver's rail, as it does unless NCCL_P2P_PXN_LEVEL is 0. Raises ValueError for a topology with other ranks than the
    plan's, if `direct` would have to leave a domain, or if `nccl` would have ranks of both sides on a GPU.
    """
    ranks = len(topology.train), len(topology.gen)
    if ranks != (plan.train.world, plan.gen.world):
        raise ValueError(
            f"the topology has {ranks[0]} and {ranks[1]} ranks, the plan {plan.train.world} and {plan.gen.world}"
        )
    script = script_of(plan, topology, transport, options)
    gpus = np.concatenate([topology.gpus("train"), topology.gpus("gen")])
    src_gpu, dst_gpu = gpus[script.buckets.src], gpus[script.buckets.dst]
    gpus_of_domain = topology.machine.gpus * topology.machine.hosts_per_domain
    route = np.where(src_gpu // gpus_of_domain == dst_gpu // gpus_of_domain, _NVLINK, _NIC)
    route[src_gpu == dst_gpu] = _OWN_GPU
    if transport == "direct" and (route == _NIC).any():
        raise ValueError(
            f"direct reaches GPUs of one NVLink domain: {int((route == _NIC).sum())} messages would leave it; auto takes nccl"
            " for these"
        )
    if transport == "nccl" and (twice := {*topology.train} & {*topology.gen}):
        raise ValueError(
            f"nccl takes no GPU twice, and ranks of both sides share {len(twice)} of them: auto takes direct within a GPU"
        )
    leaving_gpu = src_gpu
    if pxn and transport != "gloo":
        leaving_gpu = _forwarded(plan, topology, transport, script, gpus, route)
    first, second, bandwidth = _links(topology, route, leaving_gpu, dst_gpu)
    carried = _carried(script, first, second, len(bandwidth))
    bound_s = float((carried / bandwidth).max(initial=0.0))
    step_s = bound_s / _STEPS if len(script.buckets) > _EXACT_MESSAGES else 0.0
    columns = np.stack([route, script.buckets.hop, script.buckets.stage])
    of_kind, kinds = np.unique(columns, axis=1, return_inverse=True)
    outcome = run_script(
        script, first, second, bandwidth, step_s=step_s, round_s=round_s, kinds=kinds.reshape(-1).astype(np.int64)
    )
    names = (*(f"train:{rank}" for rank in range(ranks[0])), *(f"gen:{rank}" for rank in range(ranks[1])))
    order = np.argsort(outcome.start_s, kind="stable")
    buckets = script.buckets.rows(order)
    messages = Messages(
        outcome.start_s[order],
        outcome.end_s[order],
        buckets.src.astype(np.int32),
        buckets.dst.astype(np.int32),
        src_gpu[order].astype(np.int32),
        dst_gpu[order].astype(np.int32),
        route[order].astype(np.int8),
        buckets.stage.astype(np.int32),
        buckets.hop.astype(np.int8),
        buckets.nbytes,
    )
    return Simulation(
        transport=transport,
        topology=topology,
        ranks=names,
        rank_gpus=gpus,
        messages=messages,
        flow=Flow(
            outcome.moments_s,
            outcome.moved,
            of_kind[0].astype(np.int8),
            of_kind[1].astype(np.int8),
            of_kind[2].astype(np.int32),
        ),
        links=_busiest_first(topology, gpus, names, carried, bandwidth),
        domains=_domain_bounds(topology, carried),
        critical_path=critical_path(script, outcome, route, names),
        merged=script.merged,
    )


def _forwarded(plan: Plan, topology: Topology, transport: str, script: Script, gpus: Ints, route: Ints) -> Ints:
    """The GPU by whose NIC each message leaves: for other hosts, nccl takes the one on the receiver's rail (PXN).

    It does so where a rank of the communicator is on that GPU, and where a NIC and its GPU share a PCIe switch: on these
    machines. Where ranks of both sides share GPUs, a communicator has those of one side on each host (see `shared_gpus`).
    The source is `ncclTopoGetNetDev` of graph/search.cc, 2.28.9, with NCCL_P2P_PXN_LEVEL=2, the default.
    """
    src, dst, of_host, train = script.buckets.src, script.buckets.dst, topology.machine.gpus, len(topology.train)
    over_nccl = np.flatnonzero(route == _NIC) if transport == "auto" else slice(None)
    members = np.unique(np.concatenate([src[over_nccl], dst[over_nccl]]))
    shared = shared_gpus(plan, topology, transport)
    if transport == "auto":
        members = np.array(shared.members(members), np.int64)
    sides = [members, members]
    if shared.is_needed(members.tolist()):
        sides = [members[members < train], members[members >= train]]
    on_rail = gpus[src] // of_host * of_host + gpus[dst] % of_host
    is_there = np.where(src < train, *(np.isin(on_rail, gpus[side]) for side in sides))
    return np.where((route == _NIC) & is_there, on_rail, gpus[src])


def _links(topology: Topology, route: Ints, src_gpu: Ints, dst_gpu: Ints) -> tuple[Ints, Ints, Floats]:
    """The two links of each message, and the bandwidth of all: kind by kind in the order of LINKS, then one without a limit."""
    machine, gpus = topology.machine, len(topology.hosts) * topology.machine.gpus
    by_kind = [machine.memory, machine.nvlink, machine.nvlink, machine.nic, machine.nic]
    bandwidth = np.append(np.repeat(by_kind, gpus), np.inf)
    on_nvlink = route == _NVLINK
    both_ways = np.intersect1d(src_gpu[on_nvlink], dst_gpu[on_nvlink])
    for kind in (1, 2):
        bandwidth[kind * gpus + both_ways] *= _BOTH_WAYS
    out = np.array([0, 1, 3])[route] * gpus + src_gpu
    into = np.where(route == _OWN_GPU, len(LINKS) * gpus, np.array([0, 2, 4])[route] * gpus + dst_gpu)
    return out, into, bandwidth


def _carried(script: Script, first: Ints, second: Ints, links: int) -> Ints:
    carried = np.zeros(links, np.int64)
    for ends in (first, second):
        np.add.at(carried, ends, script.buckets.nbytes)
    return carried


def _busiest_first(
    topology: Topology, gpus: Ints, names: tuple[str, ...], carried: Ints, bandwidth: Floats
) -> tuple[Link, ...]:
    count = len(topology.hosts) * topology.machine.gpus
    seconds = (carried / bandwidth)[:-1]
    on_gpu: dict[int, list[str]] = {}
    for gpu, name in zip(gpus.tolist(), names, strict=True):
        on_gpu.setdefault(gpu, []).append(name)
    used = [link for link in np.argsort(-seconds, kind="stable").tolist() if carried[link]]
    return tuple(
        Link(
            LINKS[link // count],
            link % count,
            topology.hosts[link % count // topology.machine.gpus],
            tuple(on_gpu[link % count]),
            int(carried[link]),
            float(seconds[link]),
        )
        for link in used
    )


def _domain_bounds(topology: Topology, carried: Ints) -> dict[str, float]:
    """Seconds that the NICs of each domain need together, out or in, if they share the bytes evenly."""
    machine, gpus = topology.machine, len(topology.hosts) * topology.machine.gpus
    per_domain = machine.gpus * machine.hosts_per_domain
    bounds: dict[str, float] = {}
    for first in range(0, gpus, per_domain):
        nics = min(per_domain, gpus - first)
        most = max(int(carried[kind * gpus + first :][:nics].sum()) for kind in (3, 4))
        hosts = topology.hosts[first // machine.gpus : (first + nics) // machine.gpus]
        name = hosts[0] if len(hosts) == 1 else f"{hosts[0]} to {hosts[-1]}"
        bounds[name] = most / (nics * machine.nic)
    return bounds
