"""The transport `auto` on GPUs: each pair of ranks by direct where memory is reachable, by nccl elsewhere, in one refit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch

from mcore_reshard.kernels.cuda.streams import in_callers_context
from mcore_reshard.kernels.errors import TransportUnavailable, first_of
from mcore_reshard.kernels.rendezvous.exchange import StoreExchange
from mcore_reshard.kernels.rendezvous.store import FailFastStore
from mcore_reshard.planner.plan.subset import peers_of, with_peers

from .base import Executor, StageReport, Transport, TransportContext, group_names, merged_reports
from .peer_access import RankPair, unavailable_reasons_by_pair
from .relay import unrelayed

_SHOWN = 3


def connect_by_pair(context: TransportContext, direct: Transport, nccl: Transport) -> Executor:
    """Connect by `direct`, by `nccl` or by both: all ranks find out together which pairs can share memory.

    A plan that relays does so if all its pairs can; else every byte comes from the trainer. Raises `TransportUnavailable`
    naming pairs that neither transport reaches.
    """
    assert direct.connect is not None
    unavailable_reasons = _unavailable_reasons(context, direct.unavailable_reason())
    if not any(unavailable_reasons.values()):
        return direct.connect(replace(context, store=FailFastStore(direct.name, context.store)))
    far = {pair: why for pair, why in unavailable_reasons.items() if why is not None and not pair.relays}
    if far and (unavailable_reason := nccl.unavailable_reason()):
        raise TransportUnavailable(f"{_some(far)}, and nccl cannot take their place: {unavailable_reason}")
    near = any(not pair.relays and why is None for pair, why in unavailable_reasons.items())
    return unrelayed(lambda straight: _mixed(straight, direct if near else None, nccl if far else None, far), context)


def _unavailable_reasons(
    context: TransportContext, direct_unavailable_reason: str | None
) -> dict[RankPair, str | None]:
    """Why each pair of the plan, relaying or not, cannot share memory; None where it can."""
    schedule = context.bound.schedule
    exchange = StoreExchange(
        FailFastStore("pairs", context.store),
        context.bound.rank_name,
        group_names(schedule),
        timeout_s=context.options.timeout_s,
    )
    sources: frozenset[int] = frozenset()
    relays: frozenset[int] = frozenset()
    if schedule.world == "gen":
        sources = peers_of(schedule)
        if schedule.relayed and schedule.view is not None:
            sources |= peers_of(schedule.view.unrelayed())
            relays = peers_of(schedule.view.relay().receives)
    return unavailable_reasons_by_pair(
        exchange, context.bound, direct_unavailable_reason, sources=sources, relays=relays
    )


def _mixed(
    context: TransportContext, direct: Transport | None, nccl: Transport | None, far: Mapping[RankPair, str]
) -> Executor:
    """Connect one transport or both; all ranks do the same, also those with no peer of one kind."""
    schedule = context.bound.schedule
    is_train = schedule.world == "train"
    far_peers = {
        pair.dst if is_train else pair.src for pair in far if schedule.rank == (pair.src if is_train else pair.dst)
    }
    parts: list[Executor] = []
    try:
        for transport, peers in ((direct, peers_of(schedule) - far_peers), (nccl, peers_of(schedule) & far_peers)):
            if transport is not None:
                parts.append(_part(context, transport, peers))
    except BaseException:
        for part in parts:
            part.close()
        raise
    return parts[0] if len(parts) == 1 else MixedExecutor(parts, context.bound.device)


def _part(context: TransportContext, transport: Transport, peers: frozenset[int]) -> Executor:
    """Connect one transport for some of the peers. With none too: other ranks wait for this one to connect."""
    assert transport.connect is not None
    bound = context.bound
    if peers != peers_of(bound.schedule):
        bound = bound.part(with_peers(bound.schedule, peers))
    return transport.connect(replace(context, bound=bound, store=FailFastStore(transport.name, context.store)))


def _some(far: Mapping[RankPair, str]) -> str:
    reasons = [f"{pair}: {why}" for pair, why in far.items()]
    pairs = "1 pair" if len(reasons) == 1 else f"{len(reasons)} pairs"
    more = f" and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
    return f"{pairs} of ranks cannot share memory ({'; '.join(reasons[:_SHOWN])}{more})"


class MixedExecutor:
    """Runs executors of disjoint pairs side by side, the first in the caller's thread. They must share no group.

    Every part starts after the work queued on the caller's current stream of `device`, where the tensors lie.
    """

    def __init__(self, parts: Sequence[Executor], device: torch.device | None) -> None:
        self._parts = tuple(parts)
        self.name = "+".join(dict.fromkeys(part.name for part in parts))
        self._device = device
        self._threads = ThreadPoolExecutor(max(1, len(self._parts) - 1), thread_name_prefix="refit")

    @property
    def scratch_bytes(self) -> int:
        return sum(part.scratch_bytes for part in self._parts)

    def run(self) -> tuple[StageReport, ...]:
        """Move every byte once, by all transports. Raises the first failure, once all parts have ended."""
        failures: list[BaseException] = []
        others = [
            self._threads.submit(in_callers_context(partial(_reports, part, failures), self._device))
            for part in self._parts[1:]
        ]
        reports = [_reports(part, failures) for part in self._parts[:1]]
        reports += [other.result() for other in others]
        if failures:
            raise first_of(failures)
        return merged_reports(reports)

    def close(self) -> None:
        """Close all parts. May be called twice."""
        with ExitStack() as closing:
            closing.callback(self._threads.shutdown, wait=False)
            for part in self._parts:
                closing.callback(part.close)


def _reports(part: Executor, failures: list[BaseException]) -> tuple[StageReport, ...]:
    """Run a part. Its failure goes to `failures`, which holds those of all parts in the order they came."""
    try:
        return part.run()
    except BaseException as error:
        failures.append(error)
        return ()
