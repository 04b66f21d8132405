"""The transport `auto` on GPUs: each pair of ranks by direct where memory is reachable, by nccl elsewhere, in one refit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.read_back import Executed
from mcore_reshard.kernels.cuda.streams import in_callers_context
from mcore_reshard.kernels.errors import TransportUnavailable, first_of
from mcore_reshard.kernels.rendezvous.store_keys import FailFastStore

from .base import Executor, StageReport, Transport, TransportContext, close_all, merge_reports
from .nccl.shared_gpus import SharedGpus
from .peer_access import APART, RankPair, Reach, reach_of_all
from .relay import ConnectParts, connect_relayed, connect_unrelayed

_SHOWN = 3


class Way(NamedTuple):
    """A transport, and how the parts of a plan are connected by it."""

    transport: Transport
    connect: ConnectParts


def connect_by_pair(context: TransportContext, direct: Way, nccl: Way) -> Executor:
    """Connect by `direct`, by `nccl` or by both. Raises `TransportUnavailable` naming pairs that neither reaches.

    Replicas pass on by `direct`, what came to them by either. The first hop among them goes by `nccl` if it is between
    hosts. Where other replicas that pass on cannot share memory, all hops go by `nccl`; without it, every byte comes from
    the trainer.
    """
    reach = reach_of_all(context, direct.transport.unavailable_reason(), nccl.transport.unavailable_reason())
    reasons = reach.reasons
    joined = _joined_hops(reasons)
    if joined is None and reach.nccl_unavailable_reason is None:
        joined = len(context.bound.schedule.later_hops)
    far = {pair: why for pair, why in reasons.items() if why is not None and pair.hop <= (joined or 0)}
    if far and reach.nccl_unavailable_reason:
        some = _some({pair.named(context.bound.schedule): why for pair, why in far.items()})
        raise TransportUnavailable(f"{some}, and nccl cannot take their place: {reach.nccl_unavailable_reason}")
    if not far and joined == 0 and direct.transport.connect is not None:
        return direct.transport.connect(replace(context, store=FailFastStore(direct.transport.name, context.store)))
    context = replace(context, shared=_shared_gpus(reach, far, context.bound.schedule.train_ranks, joins=bool(joined)))
    near = not far or any(not pair.hop and why is None for pair, why in reasons.items())
    ways = [(way, is_far) for way, is_far, is_used in ((direct, False, near), (nccl, True, bool(far))) if is_used]
    trainer = partial(_connect_parts, ways, far, joined or 0)
    if joined is None:
        return connect_unrelayed(trainer, context)
    return connect_relayed(trainer, direct.connect, context, joined=joined)


def _joined_hops(reasons: Mapping[RankPair, str | None]) -> int | None:
    """How many hops among replicas go by nccl: none, or the first, if it is between hosts. None: memory does not reach."""
    between = [why for pair, why in reasons.items() if pair.hop == 1]
    joined = int(bool(between) and all(why in APART for why in between))
    return joined if all(why is None for pair, why in reasons.items() if pair.hop > joined) else None


def _shared_gpus(reach: Reach, far: Iterable[RankPair], train_ranks: int, *, joins: bool) -> SharedGpus | None:
    """Where ranks are, if no far pair is on one GPU: NCCL refuses those. Cells are hosts if no far pair is on one host."""
    pairs = [(pair.src, train_ranks + pair.dst) for pair in far if not pair.hop]
    gpus = [*zip(reach.hosts, reach.gpus, strict=True)]
    for cells in (reach.hosts, gpus):
        if all(cells[src] != cells[dst] for src, dst in pairs):
            return SharedGpus.of(cells, gpus, reach.rails, train_ranks, passes_on=joins)
    return None


def _connect_parts(
    ways: Sequence[tuple[Way, bool]],
    far: Mapping[RankPair, str],
    joined: int,
    context: TransportContext,
    parts: Sequence[Sequence[BoundSchedule]],
) -> Sequence[Executor]:
    """Connect parts by each way, which is for far pairs or for near ones; all ranks do, also without a peer of a kind.

    Hops that are `joined` are far, and have as many parts of their own at the end.
    """
    connected: list[Sequence[Executor]] = []
    try:
        for way, is_far in ways:
            own = replace(context, store=FailFastStore(way.transport.name, context.store))
            of_way = [[_with_peers(first, far, is_far), *(later if is_far else ())] for first, *later in parts]
            connected.append(way.connect(own, of_way if is_far else of_way[: len(parts) - joined]))
    except BaseException:
        close_all([executor for of_way in connected for executor in of_way])
        raise
    executors = [[executor for executor in of_part if executor] for of_part in zip_longest(*connected)]
    return [of_part[0] if len(of_part) == 1 else MixedExecutor(of_part, context.bound.device) for of_part in executors]


def _with_peers(bound: BoundSchedule, far: Mapping[RankPair, str], is_far: bool) -> BoundSchedule:
    """What a rank exchanges with those that are far from it, or with the others."""
    schedule = bound.schedule
    pairs = [pair for pair in far if not pair.hop]
    ends = [(pair.src, pair.dst) if schedule.world == "train" else (pair.dst, pair.src) for pair in pairs]
    far_peers = {peer for rank, peer in ends if rank == schedule.rank}
    peers = schedule.peers & far_peers if is_far else schedule.peers - far_peers
    return bound if peers == schedule.peers else bound.part(schedule.with_peers(peers))


def _some(far: Mapping[str, str]) -> str:
    reasons = [f"{pair}: {why}" for pair, why in far.items()]
    pairs = "1 pair" if len(reasons) == 1 else f"{len(reasons)} pairs"
    more = f" and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
    return f"{pairs} of ranks cannot share memory ({'; '.join(reasons[:_SHOWN])}{more})"


class MixedExecutor:
    """Runs executors of disjoint pairs, which share no group, side by side on the caller's stream of `device`."""

    def __init__(self, parts: Sequence[Executor], device: torch.device | None) -> None:
        self._parts = parts
        self.scratch_bytes = sum(part.scratch_bytes for part in parts)
        self.name = "+".join(dict.fromkeys(part.name for part in parts))
        self._device = device
        self._threads = ThreadPoolExecutor(max(1, len(parts) - 1), thread_name_prefix="refit")

    @property
    def written_bytes(self) -> int:
        return sum(part.written_bytes for part in self._parts)

    @property
    def executed(self) -> tuple[Executed, ...]:
        return tuple(table for part in self._parts for table in part.executed)

    def run(self) -> tuple[StageReport, ...]:
        """Move every byte once, by all transports. Raises the first failure, once all parts have ended."""
        failures: list[BaseException] = []
        first, *others = (partial(_run, part, failures) for part in self._parts)
        running = [self._threads.submit(in_callers_context(other, self._device)) for other in others]
        reports = [first(), *(other.result() for other in running)]
        if failures:
            raise first_of(failures)
        return merge_reports(reports)

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        close_all(self._parts)


def _run(part: Executor, failures: list[BaseException]) -> tuple[StageReport, ...]:
    """Run a part. Its failure goes to `failures`, which holds those of all parts in the order they came."""
    try:
        return part.run()
    except BaseException as error:
        failures.append(error)
        return ()
