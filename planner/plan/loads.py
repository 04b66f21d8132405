"""Bytes on every link of every rank: its own GPU's memory, NVLink, and its NIC (see `paths`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .balance import Ints
from .paths import LINKS, NIC
from .rails import with_forwarders

if TYPE_CHECKING:
    from .plan import Plan
    from .schedule import World


@dataclass(frozen=True, slots=True)
class Loads:
    """Bytes of one refit, by link in the order of `LINKS`; without a topology all are the NIC's."""

    sent: Ints  # [links, training ranks]
    received: Ints  # [links, generation ranks]: from the trainer and from other replicas
    passed_on: Ints  # [links, generation ranks]


def from_trainer_of(plan: Plan) -> tuple[Ints, Ints]:
    """[links, training ranks] the bytes that each sends in one refit; [links, generation ranks] those that each gets."""
    sent, received = (np.zeros((len(LINKS), world), np.int64) for world in (plan.train.world, plan.gen.world))
    for alike in plan.alike:
        paths = alike.paths
        of_waves = alike.members, plan.balanced_waves, alike.lags[0]  # known since they were balanced
        src, dst, first_src, first_dst = np.array(
            [(each.src, each.dst, each.first_src_replica, each.first_dst_replica) for each in alike.transfer_groups]
        ).T
        for load, turns, grids, firsts, moved in (
            (sent, paths.pulls, src, first_src, paths.pulled_bytes(*of_waves)),
            (received, paths.landings, dst, first_dst, paths.landed_bytes(*of_waves)),
        ):
            grid_of = plan.receivers if load is received else plan.rank_grids.__getitem__
            ranks = np.stack([turns.ranks(grid_of(grid)) for grid in grids.tolist()])
            _add(load, turns.links[turns.row_of], ranks, moved.sum(axis=0)[turns.moved_from(firsts[:, None])])
    return sent, received


def carried_of(plan: Plan) -> Ints:
    """[waves, generation ranks] the bytes that each carries for others."""
    carried = np.zeros((plan.balanced_waves, plan.gen.world), np.int64)
    for alike in plan.alike:
        landings, paths = alike.paths.landings, alike.paths
        carries = np.flatnonzero(landings.replicas >= paths.sites.replicas)
        for transfers, lag in zip(alike.transfer_groups, alike.lags, strict=True) if len(carries) else ():
            moved = paths.landed_bytes(alike.members, plan.balanced_waves, lag)
            from_first = landings.moved_from(transfers.first_dst_replica)
            ranks = landings.ranks(plan.receivers(transfers.dst))
            np.add.at(carried.T, ranks[carries], moved[:, from_first[carries]].T)
    return carried


def loads_of(plan: Plan) -> Loads:
    """The loads of a plan, from its turns alone."""
    sent, from_trainer = plan.from_trainer
    received, passed_on = from_trainer.copy(), np.zeros_like(from_trainer)
    for alike in plan.alike:
        paths = alike.paths
        if not paths.passes_on:
            continue
        dst, first_dst = np.array([(each.dst, each.first_dst_replica) for each in alike.transfer_groups]).T
        for first in np.unique(first_dst % paths.period).tolist():
            passed = paths.passed_bytes(alike.members, first)
            grids = dst[first_dst % paths.period == first].tolist()
            links, ranks = np.arange(len(LINKS))[:, None, None], np.stack([plan.receivers(grid) for grid in grids])
            _add(passed_on, links, ranks[:, None], passed[0])
            _add(received, links, ranks[:, None], passed[1])
    return Loads(sent, received, passed_on)


def _add(load: Ints, links: Ints, ranks: NDArray[np.int32], nbytes: Ints) -> None:
    """Add to `load` [links, ranks]; the others broadcast against each other."""
    where, added = np.broadcast_arrays(links * load.shape[1] + ranks, nbytes)
    np.add.at(load.reshape(-1), where.reshape(-1), added.reshape(-1))


def busy_seconds(plan: Plan, rails: RailBytes | None = None) -> list[float]:
    """For how long the busiest GPU of each link is busy, in the order of `LINKS`. The plan must have a topology.

    Bytes leave by the NIC of the sender's GPU; with `rails`, by those on the receivers' rails where that is faster.
    """
    assert plan.topology is not None
    loads, topology, machine = plan.loads, plan.topology, plan.topology.machine
    train, gen = topology.gpus("train"), topology.gpus("gen")
    leaving, entering = np.zeros((2, len(LINKS), len(topology.hosts) * machine.gpus), np.int64)
    for link in LINKS:
        np.add.at(leaving[link], train, loads.sent[link])
        np.add.at(leaving[link], gen, loads.passed_on[link])
        np.add.at(entering[link], gen, loads.received[link])
    if rails is not None and rails.left.max(initial=0) < leaving[NIC].max(initial=0):
        leaving[NIC] = rails.left.reshape(-1)
    busiest = np.maximum(leaving, entering).max(axis=1, initial=0)
    return [float(nbytes / speed) for nbytes, speed in zip(busiest, machine.speeds, strict=True)]


@dataclass(frozen=True, slots=True)
class RailBytes:
    """Bytes of one refit that go by NIC, and those of them that leave and enter by NICs of one number."""

    nbytes: int
    on_rail: int
    left: Ints  # [hosts, NICs] by each NIC, if all leave by that on the receiver's rail, as nccl sends them


def rail_bytes(plan: Plan) -> RailBytes:
    """What a plan sends by NIC. It must have a topology. Unlike `loads`, this expands all transfers."""
    topology = plan.topology
    assert topology is not None
    sides: tuple[World, World] = ("train", "gen")
    rails, hosts = ({world: of(world) for world in sides} for of in (topology.rails, topology.host_of))
    nics = topology.machine.gpus
    # By side and host, the NIC of the sender's GPU, and the receiver's; and who sends or receives.
    moved = np.zeros((len(sides), len(topology.hosts), nics, nics), np.int64)
    members = {world: np.zeros(len(rails[world]), bool) for world in sides}
    for transfers in plan.transfer_groups:
        paths, pattern = plan.paths(transfers), plan.patterns[transfers.pattern]
        src, dst = plan.rank_grids[transfers.src], plan.receivers(transfers.dst)
        member = np.arange(transfers.members)
        hops = [plan.first_hop(transfers, member)]
        hops += paths.later_hops(transfers.first_dst_replica, member) if paths.relays else []
        for hop in hops:
            ends = pattern.parts["gen"][hop.overlap]
            side = sides[hop.kind != "train"]
            sender = dst[ends, hop.src] if side == "gen" else src[pattern.parts["train"][hop.overlap], hop.src]
            sender, receiver = np.broadcast_arrays(sender, dst[ends, hop.dst])
            nbytes = np.broadcast_to((hop.runs & (hop.link == NIC)) * pattern.overlap_bytes[hop.overlap], sender.shape)
            sender, receiver, nbytes = (each[nbytes > 0] for each in (sender, receiver, nbytes))
            members[side][sender] = members["gen"][receiver] = True
            place = hosts[side][sender], rails[side][sender], rails["gen"][receiver]
            np.add.at(moved[sides.index(side)], place, nbytes)
    is_there = np.zeros(moved.shape[:3], bool)
    host, rail, is_member = (np.concatenate([of[world] for world in sides]) for of in (hosts, rails, members))
    trains = np.arange(len(host)) < plan.train.world
    there = with_forwarders(is_member, trains, host, host * nics + rail, rail, relays="relay" in plan.later_hops)
    for number, of_side in enumerate((there & trains, there & ~trains)):
        is_there[number, host[of_side], rail[of_side]] = True
    if not is_there.all(axis=0).any():  # else a communicator has ranks of one side on a host
        is_there[:] = is_there.any(axis=0)
    by_receiver = np.where(is_there[:, :, None], moved, 0)
    left = by_receiver.sum(axis=(0, 2)) + (moved - by_receiver).sum(axis=(0, 3))
    return RailBytes(int(moved.sum()), int(np.trace(moved, axis1=2, axis2=3).sum()), left)


def pair_bytes(plan: Plan) -> Ints:
    """[training ranks, generation ranks] the bytes that each training rank gives to each generation rank.

    Like `rail_bytes`, this expands all transfers.
    """
    given = np.zeros((plan.train.world, plan.gen.world), np.int64)
    for transfers in plan.transfer_groups:
        pattern = plan.patterns[transfers.pattern]
        hop = plan.first_hop(transfers, np.arange(transfers.members))
        src = plan.rank_grids[transfers.src][pattern.parts["train"][hop.overlap], hop.src]
        dst = plan.receivers(transfers.dst)[pattern.parts["gen"][hop.overlap], hop.dst]
        np.add.at(given, np.broadcast_arrays(src, dst), hop.runs * pattern.overlap_bytes[hop.overlap])
    return given


def busiest_link(plan: Plan) -> float:
    """Seconds for which the busiest link is busy; without a topology its bytes."""
    if plan.topology is not None:
        return max(busy_seconds(plan))
    loads = plan.loads
    return float(max(load.sum(axis=0).max(initial=0) for load in (loads.sent, loads.received, loads.passed_on)))
