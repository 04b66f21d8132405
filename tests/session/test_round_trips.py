"""How often a refit waits for the store: each time costs all ranks a round trip over the network."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from helpers.plans import Case
from helpers.ranks import run_ranks, values

from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.store_connection import StoreConnection
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint
from mcore_reshard.session.part import RankOfPlan

CASE = Case("tiny-llama", "tp=1", "tp=1")  # nothing moves by name
OPTIONS = Options(transport="gloo", timeout_s=20.0)


@contextmanager
def counted() -> Iterator[list[str]]:
    """What this process asks a store and waits for, by name."""
    asked: list[str] = []
    ask_all, await_keys = StoreConnection.ask_all, StoreConnection.await_keys

    def note_all(self, requests, *args):  # type: ignore[no-untyped-def]
        asked.append("+".join(header["op"] for header, _ in requests))
        return ask_all(self, requests, *args)

    def note_wait(self, keys, *args):  # type: ignore[no-untyped-def]
        asked.append("wait")
        return await_keys(self, keys, *args)

    StoreConnection.ask_all, StoreConnection.await_keys = note_all, note_wait  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        StoreConnection.ask_all, StoreConnection.await_keys = ask_all, await_keys  # type: ignore[method-assign]


def refits(rank: int, address: str) -> list[str]:
    """What a refit asks, the fewest of three, after one that connects."""
    plan, world = CASE.plan(), "train" if rank == 0 else "gen"
    part = RankOfPlan(plan, world, 0)
    tensors = {each.name: torch.zeros(each.shape, dtype=torch.bfloat16) for each in part.schedule((0,)).tensors}
    kind = TrainEndpoint if rank == 0 else GenerationEndpoint
    endpoint = kind(part, tensors, store=address, options=OPTIONS)
    endpoint.prepare()
    found = []
    for version in (1, 2, 3, 4):
        if rank == 0:
            time.sleep(0.3)  # the engine waits
        with counted() as asked:
            endpoint.refit(version)
        found.append(asked)
    endpoint.close()
    return min(found[1:], key=len)


def test_a_refit_waits_for_the_store_a_few_times() -> None:
    trainer, engine = values(run_ranks(2, refits))
    arrives, agrees, knows = ["add+get"], ["compare_set+add"], ["wait", "add"]
    assert trainer[:2] == ["wait", "compare_set"], "for the engine's word, which that brings; and to call it"
    assert engine[:3] == ["get", "wait", "wait"], "what has begun, that a refit begins, and the call"
    asked = [arrives + agrees, arrives + knows]
    ends = [*asked, *([*each, "wait"] for each in asked)]  # for others to know, unless they do already
    assert trainer[2:] in ends and engine[3:] in ends, (trainer, engine)
