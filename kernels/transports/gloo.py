"""Buckets over gloo: real messages between processes on any machine, checked with a CRC-32 each."""

from __future__ import annotations

import struct
import zlib
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import Program
from mcore_reshard.kernels.copies.casts import compute_scales
from mcore_reshard.kernels.copies.cpu import run_copies
from mcore_reshard.kernels.copies.tensors import byte_array
from mcore_reshard.kernels.errors import ChecksumError
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup, GlooMessage

from .pipeline import StageClock, StageReport, Step, group_rank, other_world, steps

DEFAULT_SLOTS = 4
_HEADER = struct.Struct("<IIII")  # CRC-32 of the rest, run, stage index, bucket number; 16 bytes keep parts aligned


class GlooExecutor:
    """Runs a program over a group: packs, sends, receives and unpacks a window of `slots` buckets at a time.

    Packing and unpacking overlap with gloo's own threads. Scratch is `scratch_bytes`, whatever the number of peers.
    """

    name = "gloo"

    def __init__(self, group: GlooGroup, program: Program, *, slots: int = DEFAULT_SLOTS) -> None:
        if slots < 2:
            raise ValueError(f"pipelining needs at least two slots: {slots}")
        self._group = group
        self._program = program
        self._steps = steps(program)
        self._tensors = [byte_array(tensor) for tensor in program.tensors]
        self._slot_bytes = _HEADER.size + max((step.bucket.nbytes for step in self._steps), default=0)
        self._slots = min(slots, len(self._steps))
        group.slots(self._slots, self._slot_bytes)  # reserved: a run allocates nothing
        self._runs = 0

    @property
    def scratch_bytes(self) -> int:
        """What it needs of its group's slots, which executors of one group share."""
        return self._slots * self._slot_bytes

    def run(self) -> tuple[StageReport, ...]:
        """Move every bucket once. Returns when all bytes sent were taken and all bytes received are in place."""
        self._runs += 1
        compute_scales(self._program.casts, self._program.tensors)
        clock = StageClock(len(self._program.stages))
        slots = self._group.slots(self._slots, self._slot_bytes)
        under_way: deque[tuple[Step, torch.Tensor, GlooMessage]] = deque()
        for number, step in enumerate(self._steps):
            if len(under_way) == len(slots):
                self._finish(*under_way.popleft(), clock)
            clock.started(step.stage)
            slot = slots[number % len(slots)]
            under_way.append((step, slot, self._start(step, slot)))
        while under_way:
            self._finish(*under_way.popleft(), clock)
        return clock.reports(self._program)

    def close(self) -> None:
        """Nothing: slots and connections are the group's."""

    def _start(self, step: Step, slot: torch.Tensor) -> GlooMessage:
        schedule = self._program.schedule
        peer = group_rank(schedule, other_world(schedule.world), step.lane.peer)
        message = slot[: _HEADER.size + step.bucket.nbytes]
        if not step.lane.sends:
            return self._group.recv(message, peer, step.waiting)
        self._pack(step, message.numpy())
        return self._group.send(message, peer, step.waiting)

    def _finish(self, step: Step, slot: torch.Tensor, message: GlooMessage, clock: StageClock) -> None:
        message.wait()
        if not step.lane.sends:
            self._unpack(step, slot[: _HEADER.size + step.bucket.nbytes].numpy())
        clock.finished(step.stage)

    def _pack(self, step: Step, message: NDArray[np.uint8]) -> None:
        body = message[_HEADER.size :]
        self._copy(step, body)
        _HEADER.pack_into(message.data, 0, zlib.crc32(body.data), self._runs, step.stage, step.number)

    def _unpack(self, step: Step, message: NDArray[np.uint8]) -> None:
        body = message[_HEADER.size :]
        crc, *place = _HEADER.unpack_from(message.data)
        if (mine := [self._runs, step.stage, step.number]) != place:
            raise ChecksumError(step.waiting, f"(run, stage, bucket) {place} arrived in place of {mine}")
        if (computed := zlib.crc32(body.data)) != crc:
            raise ChecksumError(
                step.waiting, f"bucket {step.number} arrived damaged: CRC-32 {computed:08x}, sent with {crc:08x}"
            )
        self._copy(step, body)

    def _copy(self, step: Step, body: NDArray[np.uint8]) -> None:
        copies = step.lane.copies[step.bucket.first_copy : step.bucket.stop_copy]
        run_copies(copies, [*self._tensors, body], self._program.casts)
