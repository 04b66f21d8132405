"""Ranks join NCCL's communicators and connect in them, here without NCCL: who joins which, and whom each one connects to."""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import synthetic
import torch
from helpers.nccl_parts import far_parts
from helpers.plans import Case
from helpers.ranks import run_ranks, store_of, values
from test_shared_gpus import APART, MORE_HOSTS, TWO_HOSTS, gpus_of

from mcore_reshard.kernels.copies.bind import bind
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.transports import registry
from mcore_reshard.kernels.transports.nccl import connection, executor
from mcore_reshard.kernels.transports.nccl.communicator import Payload
from mcore_reshard.kernels.transports.nccl.connection import NcclConnection
from mcore_reshard.kernels.transports.nccl.staging import ScratchBudget
from mcore_reshard.kernels.transports.reach import shared_gpus
from mcore_reshard.planner.plan.make_schedule import schedule_of

Joined = dict[tuple[int, int], tuple[str, int, int, list[tuple[int, bool]]]]


class Communicator:
    """Says what it has been told."""

    def __init__(self, unique_id: bytes, member: int, members: int, waiting: Any, *, most_ctas: int | None) -> None:
        self.said = unique_id.hex(), member, members
        self.most_ctas = most_ctas
        self.connects: list[tuple[int, bool]] = []

    def is_idle(self, waits: Any) -> bool:
        return True

    def start(self, payloads: Iterable[Payload], stream: Any, waiting: Any) -> None:
        self.connects += [(payload.member, payload.sends) for payload in payloads]


class Stream:
    def __init__(self, priority: int = 0) -> None:
        pass

    def record_event(self) -> Any:
        return SimpleNamespace(query=lambda: True)


def join(number: int, address: str, case: Case) -> tuple[Joined, list[str]]:
    """Connect rank `number`: of (stream, communicator), its id, the rank's number in it, its size, and whom it connects to."""
    plan = case.plan()
    assert plan.topology is not None
    train = number < plan.train.world
    schedule = schedule_of(plan, "train" if train else "gen", number if train else number - plan.train.world)
    bound = bind(schedule, synthetic.allocate(schedule, torch.device("cpu")))
    store = store_of(address).under("nccl")
    shared = shared_gpus(plan, plan.topology, "auto")
    connection.NcclCommunicator, connection.new_unique_id = Communicator, lambda: os.urandom(128)  # type: ignore[assignment, misc]
    torch.cuda.Stream = Stream  # type: ignore[assignment, misc]  # of this process alone
    found = NcclConnection(
        far_parts(plan, bound), store, timeout_s=30.0, budget=ScratchBudget(192 << 10), shared=shared
    )
    if found.is_member:
        found._connect()
    told = {
        (stream, each): (*link.communicators[each].said, link.communicators[each].connects)  # type: ignore[attr-defined]
        for stream, link in found.links.items()
        for each in link.communicators
    }
    return told, [key for key in ("id/0", "id/1") if store.check([key])]


class Refused:
    """A connection on which no part can be prepared: its device is none of CUDA's."""

    device, closed, is_member = torch.device("cpu"), True, True

    def __init__(self, parts: Any, store: Any, **settings: Any) -> None:
        self.ends, self.divisions = [[SimpleNamespace(buckets=(1,))] for _ in parts], [None] * len(parts)
        self._exchange = SimpleNamespace(give_up=lambda: None)

    give_up_on_error = NcclConnection.give_up_on_error


def test_a_connection_that_failed_keeps_no_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds the connection, and the weights: they would stay until Python's collector comes."""
    made: list[Any] = []

    def refused(*args: Any, **settings: Any) -> Any:
        made.append(Refused(*args, **settings))
        return made[0]

    monkeypatch.setattr(executor, "NcclConnection", refused)
    monkeypatch.setattr(executor.NcclExecutor, "__init__", lambda self, *_: None)
    with pytest.raises(ValueError, match="cuda"):
        executor.connect_nccl([[], []], None, timeout_s=1.0)  # type: ignore[arg-type]
    assert made[0].executors == ()


def joined_by_all(case: Case) -> list[tuple[Joined, list[str]]]:
    plan = case.plan()
    return values(run_ranks(plan.train.world + plan.gen.world, join, case, timeout_s=60.0))


def check(told: list[Joined], gpus: list[int]) -> dict[tuple[int, int], dict[int, int]]:
    """The group rank of each member of each communicator. Both ends connect to each other, and no GPU is there twice."""
    ids = {(place, each[0]) for of_rank in told for place, each in of_rank.items()}
    assert len(ids) == len({name for _, name in ids}) == len({place for place, _ in ids})
    ranks: dict[tuple[int, int], dict[int, int]] = {}
    ends: dict[bool, set[tuple[tuple[int, int], int, int]]] = {True: set(), False: set()}
    for rank, of_rank in enumerate(told):
        for place, (_, member, size, connects) in of_rank.items():
            assert ranks.setdefault(place, {}).setdefault(member, rank) == rank and member < size
            for peer, sends in connects:
                ends[sends].add((place, *((member, peer) if sends else (peer, member))))
    assert ends[True] == ends[False] != set()
    for place, members in ranks.items():
        (size,) = {of_rank[place][2] for of_rank in told if place in of_rank}
        assert sorted(members) == [*range(size)]
        assert len({gpus[rank] for rank in members.values()}) == size
    return ranks


@pytest.mark.parametrize("case", [*TWO_HOSTS, MORE_HOSTS[0], MORE_HOSTS[3]], ids=str)
def test_ranks_that_share_gpus_join_several_communicators(case: Case) -> None:
    told = [joined for joined, _ in joined_by_all(case)]
    ranks = check(told, gpus_of(case.plan()))
    plan = case.plan()
    shared = shared_gpus(plan, plan.topology, "auto")  # type: ignore[arg-type]
    assert {stream for stream, _ in ranks} == {*range(shared.streams(2))} and len({number for _, number in ranks}) > 1
    assert all(stream in shared.streams_of(number, 2) for stream, number in ranks)
    for of_rank in told:  # a rank is in one communicator of a stream
        assert len({stream for stream, _ in of_rank}) == len(of_rank)


@pytest.mark.parametrize("case", [case for case, _ in APART], ids=str)
def test_other_ranks_join_one_communicator_of_each_stream_under_the_same_key(case: Case) -> None:
    told = joined_by_all(case)
    ranks = check([joined for joined, _ in told], [*range(len(told))])
    assert [*ranks] == [(0, 0), (1, 0)]
    assert ["id/0", "id/1"] in [keys for _, keys in told]


def test_a_rank_beside_those_that_send_joins_and_connects_to_nobody() -> None:
    """gen:1 is on GPU 3 of the trainer's host; gen:3, on GPU 3 of another one, gets bytes by its NIC. GPU 2 has no such peer."""
    hosts = "train=a*2,gen=a*2@2+b*1+b*1@3"
    told = [
        joined for joined, _ in joined_by_all(Case("tiny-llama", "tp=2", "tp=2,dp=2", machine="h200-8", hosts=hosts))
    ]
    check(told, [*range(len(told))])
    assert [len(of_rank) for of_rank in told] == [2, 2, 0, 2, 2, 2]
    assert [connects for *_, connects in told[3].values()] == [[], []]


def test_a_rank_beside_those_that_send_is_on_its_gpu_although_its_parts_have_no_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Waves have only the tensors of what they move: a rank that exchanges nothing has none in any."""
    told: dict[str, Any] = {}
    monkeypatch.setattr(registry, "connect_nccl", lambda parts, store, **settings: told.update(settings))
    gpu = torch.device("cuda", 3)
    context = SimpleNamespace(options=Options(), store=None, shared=None, bound=SimpleNamespace(device=gpu))
    registry._connect_nccl(context, [[]])  # type: ignore[arg-type]
    assert told["device"] == gpu
    part = SimpleNamespace(schedule=schedule_of(Case("tiny-llama", "tp=2", "tp=2").plan(), "train", 0))
    part.rank_name, part.device = "train:0", None
    monkeypatch.setattr(NcclConnection, "_divide", lambda *_: [])
    found = NcclConnection([[part]], None, timeout_s=1.0, budget=ScratchBudget(), device=gpu)  # type: ignore[arg-type, list-item]
    assert found.device == gpu
