"""Buckets over gloo: real messages between processes on any machine, checked with a CRC-32 each."""

from __future__ import annotations

import zlib
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.buckets import Bucket, cut_buckets
from mcore_reshard.kernels.copies.cast_arithmetic import compute_scales
from mcore_reshard.kernels.copies.cpu import run_copies
from mcore_reshard.kernels.copies.read_back import Executed
from mcore_reshard.kernels.copies.tensors import byte_array
from mcore_reshard.kernels.errors import ChecksumError
from mcore_reshard.kernels.options import DEFAULT_BUCKET_BYTES
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup, GlooMessage

from .base import StageClock, StageReport
from .group_ranks import peer_group_rank
from .rounds import DEFAULT_SLOTS, HEADER, gloo_window, in_moments


class GlooExecutor:
    """Packs, sends, receives and unpacks a window of `slots` buckets at a time, overlapped with gloo's own threads."""

    name = "gloo"

    def __init__(
        self,
        group: GlooGroup,
        bound: BoundSchedule,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        slots: int = DEFAULT_SLOTS,
    ) -> None:
        if slots < 2:
            raise ValueError(f"pipelining needs at least two slots: {slots}")
        self._group = group
        self._bound = bound
        self._buckets = in_moments(bound.schedule, cut_buckets(bound.schedule, bucket_bytes))
        self._clock = StageClock(bound, self._buckets)
        self._tensors = [byte_array(tensor) for tensor in bound.tensors]
        self._slots, self._slot_bytes = gloo_window(self._buckets, slots)
        self.scratch_bytes = self._slots * self._slot_bytes  # all executors of one group share them
        group.slots(self._slots, self._slot_bytes)  # reserved: a run allocates nothing
        self._runs = 0
        self.written_bytes = 0

    @property
    def executed(self) -> tuple[Executed, ...]:
        return (Executed(self._bound, buckets=self._buckets),)

    def run(self) -> tuple[StageReport, ...]:
        """Move every bucket once. Returns when all bytes sent were taken and all bytes received are in place."""
        self._runs += 1
        self.written_bytes = 0
        compute_scales(self._bound.casts, self._bound.tensors)
        self._clock.reset()
        slots = self._group.slots(self._slots, self._slot_bytes)
        under_way: deque[tuple[Bucket, torch.Tensor, GlooMessage]] = deque()
        for number, bucket in enumerate(self._buckets):
            if len(under_way) == len(slots):
                self._finish(*under_way.popleft())
            self._clock.started(bucket.stage)
            slot = slots[number % len(slots)]
            under_way.append((bucket, slot, self._start(bucket, slot)))
        while under_way:
            self._finish(*under_way.popleft())
        return self._clock.reports()

    def close(self) -> None:
        """Nothing: slots and connections are the group's."""

    def _start(self, bucket: Bucket, slot: torch.Tensor) -> GlooMessage:
        peer = peer_group_rank(self._bound.schedule, bucket.peer)
        message = slot[: HEADER.size + bucket.nbytes]
        if not bucket.sends:
            return self._group.recv(message, peer, bucket.waiting)
        self._pack(bucket, message.numpy())
        return self._group.send(message, peer, bucket.waiting)

    def _finish(self, bucket: Bucket, slot: torch.Tensor, message: GlooMessage) -> None:
        message.wait()
        if not bucket.sends:
            self._unpack(bucket, slot[: HEADER.size + bucket.nbytes].numpy())
        self._clock.finished(bucket.stage)

    def _pack(self, bucket: Bucket, message: NDArray[np.uint8]) -> None:
        body = message[HEADER.size :]
        run_copies(bucket.copies, [*self._tensors, body], self._bound.casts)
        HEADER.pack_into(message.data, 0, zlib.crc32(body.data), self._runs, bucket.stage, bucket.number)

    def _unpack(self, bucket: Bucket, message: NDArray[np.uint8]) -> None:
        body = message[HEADER.size :]
        crc, *place = HEADER.unpack_from(message.data)
        if (expected := [self._runs, bucket.stage, bucket.number]) != place:
            raise ChecksumError(bucket.waiting, f"(run, stage, bucket) {place} arrived in place of {expected}")
        if (computed := zlib.crc32(body.data)) != crc:
            raise ChecksumError(
                bucket.waiting, f"bucket {bucket.number} arrived damaged: CRC-32 {computed:08x}, sent with {crc:08x}"
            )
        self.written_bytes += bucket.nbytes
        run_copies(bucket.copies, [*self._tensors, body], self._bound.casts)
