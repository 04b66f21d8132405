"""The transport `auto` on GPUs: each pair of ranks by direct where memory is reachable, by nccl elsewhere, in one refit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch.distributed import PrefixStore

from mcore_reshard.planner.subset import peers_of, with_peers

from .board import Board
from .errors import TransportUnavailable
from .joined import JoinedExecutor
from .pipeline import Executor, group_names, group_rank
from .program import bind
from .reach import Pair, obstacles_by_pair
from .transport import Link, Transport

_SHOWN = 3


def connect_by_pair(link: Link, direct: Transport, nccl: Transport) -> Executor:
    """Connect by `direct`, by `nccl` or by both, as all ranks find out together.

    Raises `TransportUnavailable` naming pairs that neither reaches.
    """
    schedule = link.program.schedule
    me, names = group_rank(schedule, schedule.world, schedule.rank), group_names(schedule)
    board = Board(PrefixStore("pairs", link.store), me, names, timeout_s=link.timeout_s)
    obstacles = obstacles_by_pair(board, link.program, direct.obstacle())
    far = {pair: why for pair, why in obstacles.items() if why is not None}
    if far and (trouble := nccl.obstacle()):
        raise TransportUnavailable(f"{_some(link, far)}, and nccl cannot take their place: {trouble}")
    if not far:
        return _part(link, direct, peers_of(schedule))
    if len(far) == len(obstacles):
        return _part(link, nccl, peers_of(schedule))
    mine, theirs = (0, 1) if schedule.world == "train" else (1, 0)
    apart = {pair[theirs] for pair in far if pair[mine] == schedule.rank}
    near = peers_of(schedule) - apart
    parts = [_part(link, direct, near)]
    try:
        parts.append(_part(link, nccl, apart))
    except BaseException:
        parts[0].close()
        raise
    return JoinedExecutor(parts, link.program.device)


def _part(link: Link, transport: Transport, peers: frozenset[int] | set[int]) -> Executor:
    """Connect one transport for some of the peers; with none, as the others wait for this rank to come."""
    assert transport.connect is not None
    program = link.program
    if peers != peers_of(program.schedule):
        part = with_peers(program.schedule, peers)
        program = bind(part, program.by_name, bucket_bytes=program.bucket_bytes)
    return transport.connect(replace(link, program=program, store=PrefixStore(transport.name, link.store)))


def _some(link: Link, far: Mapping[Pair, str | None]) -> str:
    schedule = link.program.schedule
    said = [
        f"{schedule.name_of('train', src)} -> {schedule.name_of('gen', dst)}: {why}" for (src, dst), why in far.items()
    ]
    more = f" and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
    pairs = "1 pair" if len(said) == 1 else f"{len(said)} pairs"
    return f"{pairs} of ranks cannot share memory ({'; '.join(said[:_SHOWN])}{more})"
