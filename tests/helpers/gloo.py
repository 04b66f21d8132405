"""Gloo for the processes of a test: connect their group, build executors on it, damage a message."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.buckets import Bucket
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup
from mcore_reshard.kernels.rendezvous.store import connect_store
from mcore_reshard.kernels.transports.base import Executor, TransportContext
from mcore_reshard.kernels.transports.gloo import GlooExecutor


def connect(
    address: str, rank: int, size: int, timeout_s: float = 20.0, kind: type[GlooGroup] = GlooGroup
) -> GlooGroup:
    """The group of all ranks, once every one of them has it."""
    store = connect_store(address, Options(timeout_s=timeout_s))
    group = kind(store, rank, [f"rank {each}" for each in range(size)], timeout_s=timeout_s)
    store.set(f"up/{rank}", "")
    store.wait([f"up/{other}" for other in range(size)])
    return group


def connecting(kind: Callable[..., GlooExecutor]) -> Callable[[TransportContext], Executor]:
    """How a transport connects that runs `kind` in place of the gloo transport's executor."""
    return lambda context: kind(context.group, context.bound, bucket_bytes=context.options.bucket_bytes)


class NoisyWire(GlooExecutor):
    """Damages one byte of the third bucket, after its checksum was taken."""

    def _pack(self, bucket: Bucket, message: NDArray[np.uint8]) -> None:
        super()._pack(bucket, message)
        if self._buckets.index(bucket) == 2:
            message[-1] ^= 0x10
