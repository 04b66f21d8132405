"""Buckets over gloo: real messages between processes on any machine, checked with a CRC-32 each."""

from __future__ import annotations

import struct
import zlib
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.casts import compute_scales
from mcore_reshard.kernels.copies.cpu import run_copies
from mcore_reshard.kernels.copies.tensors import byte_array
from mcore_reshard.kernels.errors import ChecksumError
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup, GlooMessage

from .pipeline import BucketMessage, StageClock, StageReport, bucket_messages, group_rank, other_world

DEFAULT_SLOTS = 4
_HEADER = struct.Struct("<IIII")  # CRC-32 of the rest, run, stage index, bucket number; 16 bytes keep parts aligned


class GlooExecutor:
    """Runs a program over a group: packs, sends, receives and unpacks a window of `slots` buckets at a time.

    Packing and unpacking overlap with gloo's own threads. Scratch is `scratch_bytes`, whatever the number of peers.
    """

    name = "gloo"

    def __init__(self, group: GlooGroup, bound: BoundSchedule, *, slots: int = DEFAULT_SLOTS) -> None:
        if slots < 2:
            raise ValueError(f"pipelining needs at least two slots: {slots}")
        self._group = group
        self._bound = bound
        self._bucket_messages = bucket_messages(bound)
        self._tensors = [byte_array(tensor) for tensor in bound.tensors]
        self._slot_bytes = _HEADER.size + max(
            (bucket_message.bucket.nbytes for bucket_message in self._bucket_messages), default=0
        )
        self._slots = min(slots, len(self._bucket_messages))
        group.slots(self._slots, self._slot_bytes)  # reserved: a run allocates nothing
        self._runs = 0

    @property
    def scratch_bytes(self) -> int:
        """What it needs of its group's slots, which executors of one group share."""
        return self._slots * self._slot_bytes

    def run(self) -> tuple[StageReport, ...]:
        """Move every bucket once. Returns when all bytes sent were taken and all bytes received are in place."""
        self._runs += 1
        compute_scales(self._bound.casts, self._bound.tensors)
        clock = StageClock(len(self._bound.stages))
        slots = self._group.slots(self._slots, self._slot_bytes)
        under_way: deque[tuple[BucketMessage, torch.Tensor, GlooMessage]] = deque()
        for number, bucket_message in enumerate(self._bucket_messages):
            if len(under_way) == len(slots):
                self._finish(*under_way.popleft(), clock)
            clock.started(bucket_message.stage)
            slot = slots[number % len(slots)]
            under_way.append((bucket_message, slot, self._start(bucket_message, slot)))
        while under_way:
            self._finish(*under_way.popleft(), clock)
        return clock.reports(self._bound)

    def close(self) -> None:
        """Nothing: slots and connections are the group's."""

    def _start(self, bucket_message: BucketMessage, slot: torch.Tensor) -> GlooMessage:
        schedule = self._bound.schedule
        peer = group_rank(schedule, other_world(schedule.world), bucket_message.peer_copies.peer)
        message = slot[: _HEADER.size + bucket_message.bucket.nbytes]
        if not bucket_message.peer_copies.sends:
            return self._group.recv(message, peer, bucket_message.waiting)
        self._pack(bucket_message, message.numpy())
        return self._group.send(message, peer, bucket_message.waiting)

    def _finish(
        self, bucket_message: BucketMessage, slot: torch.Tensor, message: GlooMessage, clock: StageClock
    ) -> None:
        message.wait()
        if not bucket_message.peer_copies.sends:
            self._unpack(bucket_message, slot[: _HEADER.size + bucket_message.bucket.nbytes].numpy())
        clock.finished(bucket_message.stage)

    def _pack(self, bucket_message: BucketMessage, message: NDArray[np.uint8]) -> None:
        body = message[_HEADER.size :]
        self._copy(bucket_message, body)
        _HEADER.pack_into(
            message.data, 0, zlib.crc32(body.data), self._runs, bucket_message.stage, bucket_message.number
        )

    def _unpack(self, bucket_message: BucketMessage, message: NDArray[np.uint8]) -> None:
        body = message[_HEADER.size :]
        crc, *place = _HEADER.unpack_from(message.data)
        if (mine := [self._runs, bucket_message.stage, bucket_message.number]) != place:
            raise ChecksumError(bucket_message.waiting, f"(run, stage, bucket) {place} arrived in place of {mine}")
        if (computed := zlib.crc32(body.data)) != crc:
            raise ChecksumError(
                bucket_message.waiting,
                f"bucket {bucket_message.number} arrived damaged: CRC-32 {computed:08x}, sent with {crc:08x}",
            )
        self._copy(bucket_message, body)

    def _copy(self, bucket_message: BucketMessage, body: NDArray[np.uint8]) -> None:
        copies = bucket_message.peer_copies.copies[bucket_message.bucket.first_copy : bucket_message.bucket.stop_copy]
        run_copies(copies, [*self._tensors, body], self._bound.casts)
