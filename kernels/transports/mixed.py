"""The transport `auto` on GPUs: each pair of ranks by direct where memory is reachable, by nccl elsewhere, in one refit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mcore_reshard.kernels.copies.bind import bind
from mcore_reshard.kernels.errors import TransportUnavailable
from mcore_reshard.kernels.rendezvous.board import Board
from mcore_reshard.kernels.rendezvous.shelf import Shelf
from mcore_reshard.planner.plan.subset import peers_of, with_peers

from .base import Link, Transport
from .joined import JoinedExecutor
from .peer_access import Pair, obstacles_by_pair
from .pipeline import Executor, group_names, group_rank
from .relay import unrelayed

_SHOWN = 3


def connect_by_pair(link: Link, direct: Transport, nccl: Transport) -> Executor:
    """Connect by `direct`, by `nccl` or by both, as all ranks find out together.

    A plan that relays does so if all its pairs can share memory; else every byte comes from the trainer. Raises
    `TransportUnavailable` naming pairs that neither reaches.
    """
    assert direct.connect is not None
    obstacles = _obstacles(link, direct.obstacle())
    if not any(obstacles.values()):
        return direct.connect(replace(link, store=Shelf(direct.name, link.store)))
    far = {pair: why for pair, why in obstacles.items() if why is not None and not pair.relays}
    if far and (trouble := nccl.obstacle()):
        raise TransportUnavailable(f"{_some(far)}, and nccl cannot take their place: {trouble}")
    near = any(not pair.relays and why is None for pair, why in obstacles.items())
    return unrelayed(lambda straight: _mixed(straight, direct if near else None, nccl if far else None, far), link)


def _obstacles(link: Link, direct_obstacle: str | None) -> dict[Pair, str | None]:
    """Of every pair that the plan has, relaying or not."""
    schedule = link.program.schedule
    board = Board(
        Shelf("pairs", link.store),
        group_rank(schedule, schedule.world, schedule.rank),
        group_names(schedule),
        timeout_s=link.timeout_s,
    )
    sources: frozenset[int] = frozenset()
    relays: frozenset[int] = frozenset()
    if schedule.world == "gen":
        sources = peers_of(schedule) | (peers_of(schedule.unrelayed()) if schedule.unrelayed else frozenset())
        relays = peers_of(schedule.relay().receives) if schedule.relay else frozenset()
    return obstacles_by_pair(board, link.program, direct_obstacle, sources=sources, relays=relays)


def _mixed(link: Link, direct: Transport | None, nccl: Transport | None, far: Mapping[Pair, str]) -> Executor:
    """Connect one transport or both; all ranks do the same, also those with no peer of one kind."""
    schedule = link.program.schedule
    is_train = schedule.world == "train"
    apart = {
        pair.dst if is_train else pair.src for pair in far if schedule.rank == (pair.src if is_train else pair.dst)
    }
    parts: list[Executor] = []
    try:
        for transport, peers in ((direct, peers_of(schedule) - apart), (nccl, peers_of(schedule) & apart)):
            if transport is not None:
                parts.append(_part(link, transport, peers))
    except BaseException:
        for part in parts:
            part.close()
        raise
    return parts[0] if len(parts) == 1 else JoinedExecutor(parts, link.program.device)


def _part(link: Link, transport: Transport, peers: frozenset[int]) -> Executor:
    """Connect one transport for some of the peers; with none, as the others wait for this rank to come."""
    assert transport.connect is not None
    program = link.program
    if peers != peers_of(program.schedule):
        part = with_peers(program.schedule, peers)
        program = bind(part, program.by_name, bucket_bytes=program.bucket_bytes)
    return transport.connect(replace(link, program=program, store=Shelf(transport.name, link.store)))


def _some(far: Mapping[Pair, str]) -> str:
    said = [f"{pair}: {why}" for pair, why in far.items()]
    pairs = "1 pair" if len(said) == 1 else f"{len(said)} pairs"
    more = f" and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
    return f"{pairs} of ranks cannot share memory ({'; '.join(said[:_SHOWN])}{more})"
