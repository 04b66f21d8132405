"""Each part of a schedule is cut into buckets once, whatever transport moves it; binding cuts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from helpers.casting import train_schedule, transfers_with_casts
from helpers.gloo import connecting
from helpers.handmade import allocate
from helpers.plans import Case

from mcore_reshard.kernels.copies import buckets
from mcore_reshard.kernels.copies.bind import BoundSchedule, bind
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.exchange import StoreExchange
from mcore_reshard.kernels.rendezvous.seal import Sealer
from mcore_reshard.kernels.rendezvous.store import SessionStore
from mcore_reshard.kernels.transports import mixed, relay
from mcore_reshard.kernels.transports.base import Transport, TransportContext
from mcore_reshard.kernels.transports.direct.staging import divide_slots, parted
from mcore_reshard.kernels.transports.gloo import GlooExecutor
from mcore_reshard.kernels.transports.nccl.connection import NcclConnection
from mcore_reshard.kernels.transports.nccl.staging import ScratchBudget, divide, pair_count
from mcore_reshard.kernels.transports.peer_access import RankPair
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.schedule import Schedule

MOE = Case("tiny-qwen3-moe", "ep=2,dp=2", "tp=2")
RELAYED = Case("tiny-qwen3-moe", "tp=1", "dp=3")


class NoGroup:
    """Connections to nobody."""

    def slots(self, count: int, nbytes: int) -> list[torch.Tensor]:
        return []

    def close(self) -> None:
        pass


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Schedule]]:
    """The schedules that have been cut into buckets."""
    schedules: list[Schedule] = []

    class Recorded(buckets._Cutter):
        def __init__(self, schedule: Schedule, *sizes: int) -> None:
            schedules.append(schedule)
            super().__init__(schedule, *sizes)

    monkeypatch.setattr(buckets, "_Cutter", Recorded)
    yield schedules


def context_of(bound: BoundSchedule) -> TransportContext:
    return TransportContext(unconnected(), NoGroup(), bound, Options(timeout_s=5.0))  # type: ignore[arg-type]


def unconnected() -> SessionStore:
    return SessionStore("127.0.0.1:1", "nowhere", 5.0, Sealer())


def bound_rank(case: Case, world: Any, rank: int) -> BoundSchedule:
    schedule = schedule_of(case.plan(), world, rank)
    return bind(schedule, allocate(schedule))


def moved(schedules: list[Schedule]) -> int:
    tables = (table for each in schedules for stage in each.stages for table in (stage.sends, stage.recvs))
    return sum(int(table.nbytes.sum()) for table in tables)


def test_gloo_cuts_once(cut: list[Schedule]) -> None:
    bound = bound_rank(MOE, "train", 1)
    assert cut == []
    connecting(GlooExecutor)(context_of(bound))
    assert cut == [bound.schedule]


def test_nccl_cuts_once_to_the_size_that_all_ranks_agree_on(
    cut: list[Schedule], monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = ScratchBudget(1 << 16)
    division = divide(budget, [pair_count(schedule_of(MOE.plan(), "gen", 0))])
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(StoreExchange, "gather", lambda _, topic, said, parse: [said])  # all ranks say the same
    bound = bound_rank(MOE, "gen", 0)
    connection = NcclConnection([[bound]], unconnected(), timeout_s=5.0, budget=budget)
    sizes = [bucket.nbytes for bucket in connection.ends[0][0].buckets]
    assert cut == [bound.schedule]
    assert 0 < max(sizes) <= division.bucket_bytes < 1 << 16


def test_direct_cuts_what_it_casts_once_for_all_readers(cut: list[Schedule]) -> None:
    schedule = train_schedule(transfers_with_casts(np.random.default_rng(0), (1, 3)), 0, (1, 3))
    _, cast = parted(schedule)
    divide_slots(cast, 1 << 20, dict.fromkeys(cast.peers, 0))
    assert len(cut) == 1 and moved(cut) == moved([cast]) > 0


@pytest.mark.parametrize("world", ["train", "gen"])
def test_a_relay_cuts_each_wave_of_each_hop_once(
    cut: list[Schedule], monkeypatch: pytest.MonkeyPatch, world: str
) -> None:
    monkeypatch.setattr(relay, "connect_group", lambda *_, **__: NoGroup())
    bound = bound_rank(RELAYED, world, 0)
    parts = relay.connect_each(connecting(GlooExecutor))
    relay.connect_relayed(parts, parts, context_of(bound))
    assert bound.schedule.view is not None
    waves = bound.schedule.view.waves()
    first = [each for each in cut if not each.between_replicas]
    second = [each for each in cut if each.between_replicas]
    assert len(first) == len(waves) > 1
    assert moved(first) == moved([bound.schedule])
    if world == "train":
        assert second == []
    else:
        relays = [wave.view.relays()[0] for wave in waves if wave.view is not None]
        hops = [each for relay in relays for each in (relay.sends, relay.receives)]
        assert len(second) == len(hops) and moved(second) == moved(hops)


def test_auto_cuts_what_goes_by_each_transport_once(cut: list[Schedule]) -> None:
    bound = bound_rank(MOE, "gen", 1)
    by_gloo = mixed.Way(
        Transport("gloo", frozenset({"cpu"}), "", lambda: None, connecting(GlooExecutor)),
        relay.connect_each(connecting(GlooExecutor)),
    )
    ways = [(by_gloo, False), (by_gloo, True)]
    mixed._connect_parts(ways, {RankPair(0, 1, 0): "far"}, False, context_of(bound), [[bound]])
    near, far = cut
    assert {*near.stages[0].recvs.peer.tolist()}.isdisjoint(far.stages[0].recvs.peer.tolist())
    assert moved(cut) == moved([bound.schedule]) and moved([far]) > 0
