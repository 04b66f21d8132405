"""How one process breaks: hooks around what a session calls, and what happens at the hook of the cell's phase.

The product has no hooks. Its methods are wrapped, in this process alone.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.buckets import Bucket
from mcore_reshard.kernels.rendezvous import seal
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup
from mcore_reshard.kernels.rendezvous.rendezvous import Rendezvous
from mcore_reshard.kernels.transports import registry
from mcore_reshard.kernels.transports.base import Executor, StageReport, TransportContext
from mcore_reshard.kernels.transports.gloo import GlooExecutor
from mcore_reshard.kernels.transports.relay import connect_each, connect_relayed
from mcore_reshard.session import attendance, member
from mcore_reshard.session.refitter import Refitter

from .matrix import PREPARING, STORE, Cell

_ESTABLISHED = "01"  # in /proc/net/tcp


class CallbackError(Exception):
    """Of the user's code."""


@dataclass
class Injector:
    """Breaks this process, or the store, when it reaches the cell's phase. Once, and only while it is armed."""

    cell: Cell
    seat: str
    store_port: int
    tell: Callable[..., None]  # the harness; it answers once the store has had its fault
    armed: bool = False
    damages: bool = field(default=False)  # the next message

    def arm(self, phase: str) -> None:
        """Get ready if the cell's fault is due in this part of the session: "preparing", "refit", "recovering", "closing"."""
        part = "preparing" if self.cell.phase in PREPARING else self.cell.phase
        due = part if part in ("preparing", "recovering", "closing") else "refit"
        self.armed = self.seat == self.cell.at and due == phase

    def at(self, phase: str) -> None:
        if not self.armed or phase != self.cell.phase:
            return
        self.armed = False
        fault = self.cell.fault
        self.tell("fault", time.monotonic())
        if self.cell.victim == STORE:
            self.tell("store", fault)
        elif fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.startswith("freeze"):
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.05)  # until the signal has come
        elif fault == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        elif fault == "exception":
            raise CallbackError("the user's code is on fire")
        elif fault == "corruption":
            self.damages = True
        else:
            self._shut("store" in fault, socket.SHUT_WR if "half-closed" in fault else socket.SHUT_RDWR)

    def inside(self, phase: str) -> None:
        """As `at`, where no code of the user runs."""
        if self.cell.fault != "exception":
            self.at(phase)

    def take_damage(self) -> bool:
        damages, self.damages = self.damages, False
        return damages

    def _shut(self, of_store: bool, how: int) -> None:
        for number in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                if not os.readlink(number).startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(number.name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        peer = connection.getpeername()[1]
                        if (peer == self.store_port) == of_store:
                            connection.shutdown(how)


def install(injector: Injector) -> None:
    """Wrap what sessions of this process call."""
    at = injector.inside
    _before(attendance.Attendance, "_say", lambda *_: None, after=lambda *_: at("waiting for the call"))
    _before(Refitter, "_move_bulk", lambda *_: at("before reads"))
    _before(Rendezvous, "decide", lambda *_: at("before the vote"))
    voted = lambda self, phase, *_: at("voted") if phase == "commit" else None  # noqa: E731
    _before(Rendezvous, "_arrive", lambda *_: None, after=voted)
    _before(Rendezvous, "_await_readers", lambda *_: at("outcome read"))
    _before(GlooGroup, "close", lambda *_: at("closing"))
    _wrap_gather(injector)
    _wrap_connect(injector)
    _damage_values(injector)
    _damage_frames(injector)


def _before(owner: Any, name: str, hook: Callable[..., Any], after: Callable[..., Any] = lambda *_: None) -> None:
    call = getattr(owner, name)

    @wraps(call)
    def wrapped(*args: Any, **options: Any) -> Any:
        hook(*args)
        result = call(*args, **options)
        after(*args)
        return result

    setattr(owner, name, wrapped)


def _wrap_gather(injector: Injector) -> None:
    gather = Rendezvous.gather

    def wrapped(self: Rendezvous, phase: str, word: Any, **options: Any) -> Any:
        if phase == "hello":
            injector.at("hello")
        words = gather(self, phase, word, **options)
        if phase == "bulk":
            injector.at("before export")
        return words

    Rendezvous.gather = wrapped  # type: ignore[method-assign]


def _wrap_connect(injector: Injector) -> None:
    connect = member.connect_members

    def wrapped(*args: Any) -> Any:
        injector.at("connecting")
        connection = connect(*args)
        injector.at("recovering")
        return connection

    member.connect_members = wrapped


def _damage_values(injector: Injector) -> None:
    """Of what this rank writes to the store, one byte."""
    for kind in (seal.Sealer, seal._TokenSealer):

        def sealed(self: Any, key: str, sender: str, value: bytes, _seal: Callable[..., bytes] = kind.seal) -> bytes:
            content = _seal(self, key, sender, value)
            if injector.cell.phase in ("hello", "waiting for the call", "before the vote") and injector.take_damage():
                return bytes([content[0] ^ 0x10]) + content[1:]
            return content

        kind.seal = sealed  # type: ignore[method-assign]


def _damage_frames(injector: Injector) -> None:
    """Of the whole tensors that training rank 0 sends, one byte."""
    send = GlooGroup.send

    def damaged(self: GlooGroup, buffer: torch.Tensor, peer: int, waiting: Any) -> Any:
        if injector.cell.phase == "in export" and buffer.numel() > 64 and injector.take_damage():
            buffer = buffer.clone()
            buffer[-1] ^= 0x10
        return send(self, buffer, peer, waiting)

    GlooGroup.send = damaged  # type: ignore[method-assign]


def faulty_transport(injector: Injector, name: str) -> str:
    """Register a transport like `name` that reaches the bulk phases of a cell; its name."""
    if name == "golden":
        return name
    real = registry._transports[name]
    registry.register(replace(real, name=f"{name}-faulty", connect=lambda context: _connect(injector, real, context)))
    return f"{name}-faulty"


def _connect(injector: Injector, real: registry.Transport, context: TransportContext) -> Executor:
    if real.name == "gloo":
        parts = connect_each(partial(_connect_gloo, injector))
        return connect_relayed(parts, parts, context)
    assert real.connect is not None
    return _AroundRuns(real.connect(context), injector)


def _connect_gloo(injector: Injector, context: TransportContext) -> Executor:
    executor = _FaultyGloo(context.group, context.bound, bucket_bytes=context.options.bucket_bytes)
    executor.injector = injector
    return executor


class _FaultyGloo(GlooExecutor):
    """Breaks at its first, middle or last bucket, on either side."""

    injector: Injector

    def _pack(self, bucket: Bucket, message: NDArray[np.uint8]) -> None:
        self._reach(bucket)
        super()._pack(bucket, message)
        if self.injector.take_damage():
            message[-1] ^= 0x10

    def _unpack(self, bucket: Bucket, message: NDArray[np.uint8]) -> None:
        self._reach(bucket)
        if self.injector.take_damage():
            message[-1] ^= 0x10
        super()._unpack(bucket, message)

    def _reach(self, bucket: Bucket) -> None:
        number, last = self._buckets.index(bucket), len(self._buckets) - 1
        for phase, place in (("first bucket", 0), ("middle bucket", last // 2), ("last bucket", last)):
            if number == place:
                self.injector.at(phase)


class _AroundRuns:
    """Breaks before a run or after it: transports of GPUs move a stage by one launch. The middle is 1 ms into the run."""

    def __init__(self, executor: Executor, injector: Injector) -> None:
        self._executor, self._injector = executor, injector

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def run(self) -> tuple[StageReport, ...]:
        from threading import Timer

        self._injector.at("first bucket")
        timer = Timer(0.001, lambda: self._injector.at("middle bucket"))
        timer.start()
        reports = self._executor.run()
        timer.join()
        self._injector.at("last bucket")
        return reports
