"""A refit of one engine rank without a network: every bucket is packed at its source and unpacked, in one process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.buckets import cut_buckets
from mcore_reshard.kernels.copies.cast_arithmetic import compute_scales
from mcore_reshard.kernels.copies.cpu import run_copies
from mcore_reshard.kernels.copies.tensors import byte_array


def deliver(
    trainers: Sequence[BoundSchedule],
    engine: BoundSchedule,
    bucket_bytes: int = 1 << 20,
    segment_bytes: int | None = None,
) -> None:
    """Deliver all buckets of the engine rank. Both ends must agree on every bucket; bytes that no copy writes are poison."""
    rank = engine.schedule.rank
    sent = {
        (source, bucket.stage, bucket.number): bucket
        for source, trainer in enumerate(trainers)
        for bucket in cut_buckets(trainer.schedule, bucket_bytes, segment_bytes)
        if bucket.peer == rank
    }
    for trainer in trainers:
        compute_scales(trainer.casts, trainer.tensors)
    *sources, target = ([*map(byte_array, bound.tensors)] for bound in (*trainers, engine))
    for wanted in cut_buckets(engine.schedule, bucket_bytes, segment_bytes):
        bucket, trainer = sent.pop((wanted.peer, wanted.stage, wanted.number)), trainers[wanted.peer]
        assert bucket.sends and not wanted.sends
        assert 0 < bucket.nbytes == wanted.nbytes <= bucket_bytes
        assert bucket.waiting.parameter == wanted.waiting.parameter
        scratch = np.full(bucket.nbytes, 0xAA, np.uint8)
        run_copies(bucket.copies, [*sources[wanted.peer], scratch], trainer.casts)
        run_copies(wanted.copies, [*target, scratch])
    assert not sent
