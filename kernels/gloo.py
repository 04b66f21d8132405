"""Buckets over gloo: real messages between processes on any machine, checked with a CRC-32 each.

The process group is built straight from a store. torch's default group is neither needed nor touched, so a trainer and
an engine that each have a default group of their own can be joined.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import ProcessGroupGloo, Store

from .board import Board
from .casts import compute_scales
from .errors import ChecksumError, DeadlineError, PeerLostError, SessionError, TransferError, Waiting
from .interpreter import run_copies
from .pipeline import StageClock, StageReport, Step, group_rank, other_world, steps
from .program import Program
from .tensors import byte_array

DEFAULT_SLOTS = 4
_TAG = 0  # one tag: gloo keeps messages of a pair and tag in order
_UNUSED_TAG = 5040  # of the same connections as _TAG: gloo goes by the remainder where it has several networks
_HEADER = struct.Struct("<IIII")  # CRC-32 of the rest, run, stage index, bucket number; 16 bytes keep parts aligned


class GlooMessage:
    """A message under way; gloo's handle lives here alone, so that closing the group really closes it.

    Nor in a local variable: an error's traceback would keep it.
    """

    __slots__ = ("_group", "_waiting", "_work")

    def __init__(self, group: GlooGroup, work: torch.distributed.Work, waiting: Waiting) -> None:
        self._group = group
        self._work: torch.distributed.Work | None = work
        self._waiting = waiting

    def wait(self) -> None:
        if self._work is None:
            raise _closed_here(self._waiting)
        timeout_s = self._group.timeout_s
        start = time.monotonic()
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if self._work is None:
                raise _closed_here(self._waiting) from error
            if time.monotonic() - start >= timeout_s:
                raise DeadlineError(self._waiting, f"nothing within {timeout_s:g} s") from error
            raise PeerLostError(self._waiting, "the connection was closed") from error
        else:
            if self._work is None:  # it came, but who has left wants no bytes any more
                raise _closed_here(self._waiting)
        finally:
            self.drop()

    def drop(self) -> None:
        self._work = None
        self._group.forget(self)


class GlooGroup:
    """All ranks of a session, fully connected. Construction blocks until every rank has connected.

    On a session's shelf it ends at once when any rank has failed, up to the moment when all have come. Then gloo itself
    connects, which nothing can interrupt: what a rank that fails or dies in there costs the others is `timeout_s`.

    A connection closes when its process dies or calls `close`; whoever waits on it then gets `PeerLostError` at once.
    So one failure runs through everyone who waits, directly or indirectly. gloo listens where the host's name points;
    GLOO_SOCKET_IFNAME names another interface.
    """

    def __init__(self, store: Store, rank: int, names: Sequence[str], *, timeout_s: float) -> None:
        """`names` are all ranks in group order, as messages call them. Raises `SessionError` naming those that do not come."""
        self.timeout_s = timeout_s
        self._pending: set[GlooMessage] = set()
        self._slots: list[torch.Tensor] = []
        self._group: ProcessGroupGloo | None
        board = Board(store, rank, names, timeout_s=timeout_s)
        board.gather("here", "")  # gloo itself would wait for each missing rank in turn, and name none
        self._group = _connected(store, rank, len(names), timeout_s)
        self._store = store  # gloo keeps it, but not alive where it is written in Python

    def send(self, buffer: torch.Tensor, peer: int, waiting: Waiting) -> GlooMessage:
        return self._started("send", buffer, peer, waiting)

    def recv(self, buffer: torch.Tensor, peer: int, waiting: Waiting) -> GlooMessage:
        return self._started("recv", buffer, peer, waiting)

    def forget(self, message: GlooMessage) -> None:
        self._pending.discard(message)

    def slots(self, count: int, nbytes: int) -> list[torch.Tensor]:
        """Buffers of at least `nbytes`, the same ones for all executors of this group: they run one after another."""
        held = len(self._slots)
        if held and nbytes > self._slots[0].numel():
            self._slots.clear()
        size = self._slots[0].numel() if self._slots else nbytes
        missing = max(count, held) - len(self._slots)
        self._slots += [torch.empty(size, dtype=torch.uint8) for _ in range(missing)]
        return self._slots[:count]

    def close(self) -> None:
        """Close all connections, also with messages under way: other threads' waits for them end. May be called twice."""
        for message in tuple(self._pending):
            message.drop()
        group, self._group = self._group, None
        if group is not None:
            _hang_up(group)
        self._slots.clear()

    def _started(self, way: Literal["send", "recv"], buffer: torch.Tensor, peer: int, waiting: Waiting) -> GlooMessage:
        if self._group is None:
            raise _closed_here(waiting)
        try:
            work = getattr(self._group, way)([buffer], peer, _TAG)
        except RuntimeError as error:
            raise PeerLostError(waiting, "the connection was closed") from error
        message = GlooMessage(self, work, waiting)
        self._pending.add(message)
        return message


def _closed_here(waiting: Waiting) -> TransferError:
    """No peer is lost: the rank itself has left, and says so at once."""
    return TransferError(waiting, f"{waiting.rank} has closed its connections")


def _connected(store: Store, rank: int, size: int, timeout_s: float) -> ProcessGroupGloo:
    try:
        return ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise SessionError(f"gloo could not connect {size} ranks within {timeout_s:g} s: {error}") from error


def _hang_up(group: ProcessGroupGloo) -> None:
    """Close the connections under those who wait on them. gloo has no call for it, but does it where a wait is overdue."""
    for peer in range(group.size()):
        with suppress(RuntimeError):  # overdue; or this one was closed before, which closes no other
            work = group.recv([torch.empty(1, dtype=torch.uint8)], peer, _UNUSED_TAG)  # type: ignore[attr-defined]
            work.wait(timedelta(milliseconds=1))


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
