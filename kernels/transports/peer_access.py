"""Find out which pairs of ranks can share GPU memory. All ranks do it together: both ends of a pair must agree.

A generation rank can read a training rank's memory under three conditions:

- both run on one host;
- the training rank's memory can be exported;
- the generation rank can map it, which it tries. The other's GPU may be one that CUDA_VISIBLE_DEVICES hides.

Where replicas pass on, both must be able to export: the one that sends may be read, or write itself.

The generation rank's environment variable MCORE_RESHARD_UNREACHABLE excludes pairs whatever the hardware says, as in
`train:0-gen:1,relay:1-gen:0`. Tests simulate several hosts on one with it. Its pairs need not exchange bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.tensors import gpu_of
from mcore_reshard.kernels.errors import TransportUnavailable
from mcore_reshard.kernels.host import gpu_numbers, host, number_of_gpu
from mcore_reshard.kernels.rendezvous.exchange import StoreExchange
from mcore_reshard.kernels.rendezvous.store_keys import FailFastStore
from mcore_reshard.planner.plan.schedule import Schedule

from .base import TransportContext
from .group_ranks import group_names, group_rank
from .kept import Kept

UNREACHABLE_VARIABLE = "MCORE_RESHARD_UNREACHABLE"
OTHER_HOST, DECLARED = "on different hosts", f"declared in {UNREACHABLE_VARIABLE}"
APART = (OTHER_HOST, DECLARED)  # why two ranks cannot share memory that are on different hosts, or that a test calls so
_PAIR = re.compile("(train|relay):(0|[1-9][0-9]*)-gen:(0|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class RankPair:
    """Two ranks that exchange bytes, or would. In later hops than the first, 0, `src` is a generation rank that relays."""

    src: int
    dst: int
    hop: int

    @property
    def relays(self) -> bool:
        return self.hop > 0

    def named(self, schedule: Schedule) -> str:
        """As in messages and in MCORE_RESHARD_UNREACHABLE, of a schedule between trainer and engine."""
        src = schedule.name_of("gen" if self.relays else "train", self.src).replace("gen:", "relay:")
        return f"{src}-{schedule.name_of('gen', self.dst)}"


@dataclass(frozen=True, slots=True)
class _Seat:
    """Where a rank is, and why others cannot read its memory."""

    unavailable_reason: str | None
    host: str
    gpu: str
    number: int | None  # of the GPU on its host, as in `number_of_gpu`
    export: str  # some of its GPU memory, as `Export.to_json`, for others to try; "" if nobody reads it
    malformed: tuple[str, ...]  # words of its MCORE_RESHARD_UNREACHABLE that are no pairs
    nccl_unavailable_reason: str | None


class Reach(NamedTuple):
    """Which pairs of the plan, of all ranks, relaying or not, can share memory, and where ranks are."""

    reasons: dict[RankPair, str | None]  # why a pair cannot; None: it can
    hosts: tuple[str, ...]  # of each rank, training ranks first
    gpus: tuple[str, ...]  # the same; a rank without a GPU has its own name
    rails: tuple[int, ...]  # the same: the number of each one's GPU on its host; -1: it has none
    nccl_unavailable_reason: str | None  # why some rank cannot use nccl


def reach_of_all(
    context: TransportContext, direct_unavailable_reason: str | None, nccl_unavailable_reason: str | None
) -> Reach:
    """Find out which pairs can share memory.

    All ranks call this together. The reasons say why this rank can share memory with nobody, or use nccl. Raises
    `TransportUnavailable` on all ranks if MCORE_RESHARD_UNREACHABLE of any rank has a word that is no pair.
    """
    bound, timeout_s = context.bound, context.options.timeout_s
    schedule = bound.schedule
    store = FailFastStore("pairs", context.store)
    exchange = StoreExchange(store, bound.rank_name, group_names(schedule), timeout_s)
    kept = context.kept or Kept()
    own_seat = _own_seat(bound, direct_unavailable_reason, nccl_unavailable_reason, kept)
    seats = exchange.gather("seat", astuple(own_seat), _parse_seat)
    if wrong := sorted({word for seat in seats for word in seat.malformed}):
        raise TransportUnavailable(
            f"{UNREACHABLE_VARIABLE} has {', '.join(map(repr, wrong))}: pairs are written train:0-gen:1 or relay:1-gen:0,"
            " with commas between them"
        )
    found: dict[tuple[int, str | None], int] = {}
    for pair in _pairs_to_read(schedule):
        source_seat = seats[group_rank(schedule, "gen" if pair.relays else "train", pair.src)]
        if pair.named(schedule) in _declared():
            reason: str | None = DECLARED
        else:
            reason = (
                source_seat.unavailable_reason
                or (own_seat.unavailable_reason if pair.relays else direct_unavailable_reason)  # replicas write, too
                or _distance(source_seat, own_seat, bound.device)
            )
        found[pair.hop, reason] = found.get((pair.hop, reason), 0) | 1 << pair.src
    # A bit for each source: from 1,024 to 512 ranks there are half a million pairs.
    word = [(hop, reason, f"{sources:x}") for (hop, reason), sources in found.items()]
    ranks = max(schedule.train_ranks, schedule.gen_ranks)
    said = exchange.gather("reach", word, partial(_parse_reach, ranks))
    by_reader = enumerate(said[schedule.train_ranks :])
    reasons = {
        RankPair(src, dst, hop): reason
        for dst, groups in by_reader
        for hop, reason, sources in groups
        for src in sources
    }
    places = zip(seats, group_names(schedule), strict=True)
    gpus = tuple(seat.gpu or name for seat, name in places)
    hosts = tuple(seat.host for seat in seats)
    rails = _rails(seats)
    lacking = (
        f"{name}: {seat.nccl_unavailable_reason}"
        for seat, name in zip(seats, group_names(schedule), strict=True)
        if seat.nccl_unavailable_reason
    )
    return Reach(reasons, hosts, gpus, rails, next(lacking, None))


def _rails(seats: Sequence[_Seat]) -> tuple[int, ...]:
    """The number of each rank's GPU on its host; -1 for a rank without one."""
    numbers = iter(gpu_numbers([(seat.host, seat.gpu, seat.number) for seat in seats if seat.gpu]))
    return tuple(next(numbers) if seat.gpu else -1 for seat in seats)


def _pairs_to_read(schedule: Schedule) -> list[RankPair]:
    """The pairs in which this rank is `dst`, with the trainer in place of relays and with them."""
    if schedule.world == "train":
        return []
    sources, view = schedule.peers, schedule.view
    relays = view.relays() if schedule.relayed and view is not None else ()
    if relays and view is not None:
        sources |= view.unrelayed().peers
    hops = [sources, *(relay.receives.peers for relay in relays)]
    if relays and view is not None and (chain := view.chain()) is not None and chain.among_replicas is not None:
        hops[1] |= chain.among_replicas.receives.peers
    return [RankPair(src, schedule.rank, hop) for hop, of_hop in enumerate(hops) for src in sorted(of_hop)]


def _own_seat(bound: BoundSchedule, reason: str | None, nccl_unavailable_reason: str | None, kept: Kept) -> _Seat:
    schedule, exported = bound.schedule, ""
    if reason is None and gpu_of(bound.device) and (schedule.world == "train" or schedule.relayed):
        try:
            exported = kept.export(bound.by_name).exported.first_tensor().to_json()
        except TransportUnavailable as error:
            reason = str(error)
    malformed = tuple(word for word in _declared() if not _PAIR.fullmatch(word))
    gpu = gpu_of(bound.device)
    number = number_of_gpu(gpu) if gpu else None
    return _Seat(reason, host(), gpu, number, exported, malformed, nccl_unavailable_reason)


def _parse_seat(said: Any) -> _Seat:
    reason, host_name, gpu, number, exported, malformed, nccl_reason = said
    why, nccl_why = (None if each is None else str(each) for each in (reason, nccl_reason))
    number = None if number is None else int(number)
    return _Seat(why, str(host_name), str(gpu), number, str(exported), tuple(map(str, malformed)), nccl_why)


def _parse_reach(ranks: int, said: Any) -> list[tuple[int, str | None, list[int]]]:
    """(hop, why the speaker cannot read the sources there, these) of one rank's word in a session of `ranks`."""
    groups = []
    for hop, why, sources in said:
        if len(sources) > -(-ranks // 4):
            raise ValueError(f"{len(sources)} digits of sources, in a session of {ranks} ranks a side")
        bits = int(sources, 16)
        groups.append((int(hop), None if why is None else str(why), [at for at in range(ranks) if bits >> at & 1]))
    return groups


def _distance(source: _Seat, reader: _Seat, device: torch.device | None) -> str | None:
    """Why two ranks that can both share memory cannot share it with each other."""
    if source.host != reader.host:
        return OTHER_HOST
    gpus = [gpu_of(each) for each in range(torch.cuda.device_count())]
    sees_it = source.gpu in gpus and source.gpu != reader.gpu  # else mapping its memory tells
    if sees_it and not torch.cuda.can_device_access_peer(gpus.index(reader.gpu), gpus.index(source.gpu)):
        return "the two GPUs cannot access each other"
    if not source.export or device is None:
        return None
    from mcore_reshard.kernels.cuda.exported import Export
    from mcore_reshard.kernels.cuda.ipc import Mappings

    exported, mappings = Export.from_json(source.export), Mappings(device)
    try:
        mappings.addresses(exported, exported.tensors, "it")
    except TransportUnavailable as error:
        return f"the reader cannot map its memory: {error}"
    finally:
        mappings.close()
    return None


def _declared() -> set[str]:
    return {pair.strip() for pair in os.environ.get(UNREACHABLE_VARIABLE, "").split(",") if pair.strip()}
