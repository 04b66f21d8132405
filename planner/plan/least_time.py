"""The least time of a refit on known hosts, whoever sends what to whom: a bound for all plans, not for one.

It follows from which ranks hold each byte and which want it; paths, turns and hops play no part.

    NIC in    what ranks of a domain want and no trainer there holds enters once, spread over the domain's NICs
    NIC out   what another domain wants leaves its holders once, spread over the NICs of all domains that hold it; and
              it leaves as often as it enters, from engine domains too, spread over all NICs
    GPU       what a rank wants and its GPU does not hold enters by NVLink, and NIC if domains are several; else a copy

Three cases by hand. Hosts of two GPUs, whose NICs carry c bytes per second each; a model of M bytes, 0.6 M in stage 0:

    tp=2 -> tp=1,dp=4         a -> b, c        b and c: M by two NICs, M/2c. a: M/2c. All: 2M by six NICs, M/3c
    tp=2,pp=2 -> tp=4         a, b -> c, d     c and d: half of M, M/4c. a has stage 0: 0.6 M by two NICs, 0.3 M/c
    tp=2 -> tp=2,dp=2 shared  a -> a, b        a: nothing. b: M/2c. a sends M: M/2c
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.layout.geometry import Region
from mcore_reshard.planner.topology.topology import Topology

from .plan import Plan, TransferGroup


@dataclass(frozen=True, slots=True)
class LeastTime:
    """Seconds that links of each kind need at least."""

    nic_in: float
    nic_out: float
    gpu: float

    @property
    def seconds(self) -> float:
        return max(self.nic_in, self.nic_out, self.gpu)


def least_time(plan: Plan, topology: Topology | None = None) -> LeastTime:
    """The bound for a plan's layouts on the hosts of a topology, without misc tensors; None: of the plan's own."""
    topology = topology or plan.topology
    assert topology is not None
    machine, train, gen = topology.machine, topology.gpus("train"), topology.gpus("gen")
    used = np.unique(np.concatenate([train, gen])) // (machine.gpus * machine.hosts_per_domain)
    nics = np.bincount(used) * machine.nic  # bytes per second of each domain
    into, (own, other) = np.zeros(len(nics)), np.zeros((2, len(topology.hosts) * machine.gpus))
    leaving: Counter[bytes] = Counter()  # by the set of domains that hold the bytes
    of_parameter: dict[tuple[object, ...], list[TransferGroup]] = {}
    for transfers in plan.transfer_groups:
        of_parameter.setdefault((transfers.group, transfers.layers, transfers.experts), []).append(transfers)
        pattern = plan.patterns[transfers.pattern]
        held_by = train[plan.rank_grids[transfers.src]][pattern.parts["train"]]
        wanted_by = gen[plan.rank_grids[transfers.dst]][pattern.parts["gen"]]
        is_own = (held_by[:, :, None] == wanted_by[:, None, :]).any(axis=1)
        nbytes = transfers.members * pattern.overlap_bytes[:, None]
        np.add.at(own, wanted_by, nbytes * is_own)
        np.add.at(other, wanted_by, nbytes * ~is_own)
    members: Counter[tuple[tuple[int, int, int], ...]] = Counter()  # of parameters that are cut and placed alike
    for of_one in of_parameter.values():
        members[tuple((each.pattern, each.src, each.dst) for each in of_one)] += of_one[0].members
    for ends, count in members.items():
        held, wanted, sizes = _regions(plan, topology, ends, len(nics))
        into += count * (sizes @ (wanted & ~held))
        for row, moved in zip(held, count * sizes * (wanted & ~held).any(axis=1), strict=True):
            leaving[row.tobytes()] += moved
    sets = np.array([np.frombuffer(row, bool) for row in leaving], bool).reshape(-1, len(nics))
    left, all_senders = np.array([*leaving.values()], np.float64), sets.any(axis=0)
    # What none but some domains hold leaves by their NICs.
    out = [left[~(sets & ~of).any(axis=1)].sum() / max(1, nics[of].sum()) for of in (*sets, all_senders)]
    reach = machine.nvlink + machine.nic * (np.count_nonzero(nics) > 1)
    gpu = max((own / machine.memory).max(), (other / reach).max())
    return LeastTime(float((into / np.maximum(nics, 1)).max()), float(max(*out, into.sum() / nics.sum())), float(gpu))


def _regions(
    plan: Plan, topology: Topology, ends: tuple[tuple[int, int, int], ...], count: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.float64]]:
    """Of each region of a parameter: the domains that hold it, those that want it [regions, domains], and its bytes."""
    train, gen = topology.domains("train"), topology.domains("gen")
    bytes_of: dict[Region, int] = {}
    for pattern, *_ in ends:
        cut = plan.patterns[pattern]
        for overlap, nbytes in zip(cut.overlaps, cut.overlap_bytes.tolist(), strict=True):
            bytes_of.setdefault(overlap.region, nbytes)
    row_of = {region: row for row, region in enumerate(bytes_of)}
    start, stop = (np.array([getattr(each, end) for each in bytes_of], np.int64) for end in ("start", "stop"))
    is_shared = (np.maximum(start, start[:, None]) < np.minimum(stop, stop[:, None])).all(axis=2)
    is_new = ~np.tril(is_shared, -1).any(axis=1)  # those that share elements with one before them count nothing
    held, wanted = np.zeros((2, len(row_of), count), bool)
    for pattern, src, dst in ends:
        cut = plan.patterns[pattern]
        rows = np.array([row_of[overlap.region] for overlap in cut.overlaps])[:, None]
        held[rows, train[plan.rank_grids[src]][cut.parts["train"]]] = True
        wanted[rows, gen[plan.rank_grids[dst]][cut.parts["gen"]]] = True
    return held, wanted, np.array([*bytes_of.values()], np.float64) * is_new
