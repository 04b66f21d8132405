"""The ranks of a session listen on the network of their store alone: on loopback, nobody else can reach them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gloo import connect
from helpers.handmade import allocate, random_transfers, schedule_of
from helpers.listening import is_loopback, listening_at
from helpers.ranks import run_ranks, store_process, values

from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.gloo_group import _own_host
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint


def refit(rank: int, address: str) -> set[str]:
    """Where this process listens after a refit, its connections still open."""
    transfers = random_transfers(np.random.default_rng(7), (1, 1), parameters=3, stages=1)
    schedule = schedule_of(transfers, ("train", "gen")[rank], 0, (1, 1))  # type: ignore[arg-type]
    tensors = allocate(schedule, seed=1 if rank == 0 else None)
    kind: Any = (TrainEndpoint, GenerationEndpoint)[rank]
    endpoint = kind(schedule, tensors, store=address, options=Options(timeout_s=20.0, session="listening"))
    try:
        endpoint.prepare()
        endpoint.refit(1)
        return listening_at(os.getpid())
    finally:
        endpoint.close()


def test_with_a_store_on_loopback_nothing_of_the_session_listens_elsewhere() -> None:
    for addresses in values(run_ranks(2, refit)):
        assert addresses and all(map(is_loopback, addresses)), addresses
    with store_process() as store:
        assert listening_at(store.pid) == {"127.0.0.1"}


def test_where_a_process_listens_is_seen() -> None:
    assert listening_at(os.getpid()) == set()
    with socket.create_server(("0.0.0.0", 0)), socket.create_server(("::1", 0), family=socket.AF_INET6):
        assert listening_at(os.getpid()) == {"0.0.0.0", "::1"}
        assert not is_loopback("0.0.0.0") and is_loopback("::1") and is_loopback("::ffff:127.0.0.1")


def by_name(rank: int, address: str, interface: str) -> set[str]:
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    group = connect(address, rank, 2)
    try:
        return listening_at(os.getpid())
    finally:
        group.close()


def test_an_interface_that_is_named_is_taken() -> None:
    assert all(map(is_loopback, set.union(*values(run_ranks(2, by_name, "lo")))))
    routes = Path("/proc/net/route").read_text().splitlines()[1:]
    for interface in {route.split()[0] for route in routes} - {"lo"}:
        assert not any(map(is_loopback, set.union(*values(run_ranks(2, by_name, interface)))))


@pytest.mark.parametrize(
    ("hosts", "listens"),
    [
        (["127.0.0.1", "127.0.0.1"], "127.0.0.1"),
        (["::1", "::1"], "::1"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.1"),
        (["127.0.0.1", "10.0.0.2"], ""),  # where its name points: others must reach it
        (["10.0.0.1", "127.0.0.1"], "10.0.0.1"),
        (["127.0.0.1", ""], ""),
        (["", "10.0.0.2"], ""),
    ],
)
def test_a_rank_beside_its_store_can_be_reached_from_other_hosts(hosts: list[str], listens: str) -> None:
    assert _own_host(hosts, 0) == listens
