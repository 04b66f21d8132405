"""The transport `auto` on GPUs: each pair of ranks by direct where memory is reachable, by nccl elsewhere, in one refit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from mcore_reshard.kernels.copies.read_back import Executed
from mcore_reshard.kernels.cuda.streams import in_callers_context
from mcore_reshard.kernels.errors import TransportUnavailable, first_of
from mcore_reshard.kernels.rendezvous.store_keys import FailFastStore

from .base import Executor, StageReport, Transport, TransportContext, close_all, connect_all, merge_reports
from .peer_access import RankPair, unavailable_reasons_by_pair
from .relay import connect_unrelayed

_SHOWN = 3


def connect_by_pair(context: TransportContext, direct: Transport, nccl: Transport) -> Executor:
    """Connect by `direct`, by `nccl` or by both. Raises `TransportUnavailable` naming pairs that neither reaches.

    A plan that relays does so if all its pairs can share memory; else every byte comes from the trainer.
    """
    assert direct.connect is not None
    unavailable_reasons = unavailable_reasons_by_pair(context, direct.unavailable_reason())
    if not any(unavailable_reasons.values()):
        return direct.connect(replace(context, store=FailFastStore(direct.name, context.store)))
    far = {pair: why for pair, why in unavailable_reasons.items() if why is not None and not pair.relays}
    if far and (unavailable_reason := nccl.unavailable_reason()):
        some = _some({pair.named(context.bound.schedule): why for pair, why in far.items()})
        raise TransportUnavailable(f"{some}, and nccl cannot take their place: {unavailable_reason}")
    near = any(not pair.relays and why is None for pair, why in unavailable_reasons.items())
    kinds = direct if near else None, nccl if far else None
    return connect_unrelayed(lambda straight: _connect_kinds(straight, *kinds, far), context)


def _connect_kinds(
    context: TransportContext, direct: Transport | None, nccl: Transport | None, far: Mapping[RankPair, str]
) -> Executor:
    """Connect one transport or both; all ranks do the same, also those with no peer of one kind."""
    schedule = context.bound.schedule
    ends = [(pair.src, pair.dst) if schedule.world == "train" else (pair.dst, pair.src) for pair in far]
    far_peers = {peer for rank, peer in ends if rank == schedule.rank}
    peers_by_transport = (direct, schedule.peers - far_peers), (nccl, schedule.peers & far_peers)
    parts = connect_all(
        _connect_part(context, transport, peers) for transport, peers in peers_by_transport if transport is not None
    )
    return parts[0] if len(parts) == 1 else MixedExecutor(parts, context.bound.device)


def _connect_part(context: TransportContext, transport: Transport, peers: frozenset[int]) -> Executor:
    """Connect one transport for some of the peers, even if there are none: other ranks wait for this one to connect."""
    assert transport.connect is not None
    bound = context.bound
    if peers != bound.schedule.peers:
        bound = bound.part(bound.schedule.with_peers(peers))
    return transport.connect(replace(context, bound=bound, store=FailFastStore(transport.name, context.store)))


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
