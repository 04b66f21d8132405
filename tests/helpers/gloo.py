"""A group of gloo connections among the processes of a test."""

from __future__ import annotations

from torch.distributed import TCPStore

from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup


def connect(
    address: str, rank: int, size: int, timeout_s: float = 20.0, kind: type[GlooGroup] = GlooGroup
) -> GlooGroup:
    """The group of all ranks, once every one of them has it."""
    host, port = address.split(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    group = kind(store, rank, [f"rank {each}" for each in range(size)], timeout_s=timeout_s)
    store.set(f"up/{rank}", "")
    store.wait([f"up/{other}" for other in range(size)])
    return group
