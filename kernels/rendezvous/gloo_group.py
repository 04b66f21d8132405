"""The CPU messages of a session: all its ranks, connected by gloo.

The process group is built straight from a store. torch's default group is neither needed nor touched. So trainer and
engine can be joined although each has a default group of its own.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, Literal

import torch
from torch.distributed import DistError, DistStoreError, ProcessGroupGloo, Store

from mcore_reshard.kernels.errors import (
    ConnectError,
    DeadlineError,
    PeerLostError,
    SessionError,
    TransferError,
    Waiting,
)

from .exchange import StoreExchange, parse_stored, publish, seat_of
from .polling import CAUSE_S, LOOK_S, NOTICE_S, DeadlineThread
from .store_keys import FailFastStore, StoreKeys

_TAG = 0  # one tag: gloo keeps messages of a pair and tag in order
_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"  # torch reads it
_THREADS = 2  # as torch has for one network
_UNUSED_TAG = 5040  # of the same connections as _TAG: gloo goes by the remainder where it has several networks
_SETTLE_TAG = 10080
_KNOWN = (None, True, False)  # an outcome as ranks tell each other of it, by number


class GlooMessage:
    """A message under way. It alone holds gloo's handle, so that closing the group closes the connection."""

    __slots__ = ("_group", "_waiting", "_work")

    def __init__(self, group: GlooGroup, work: torch.distributed.Work, waiting: Waiting) -> None:
        self._group = group
        self._work: torch.distributed.Work | None = work  # in no local variable: an error's traceback would keep it
        self._waiting = waiting

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the message, by default as long as the group does. A wait that is overdue closes the connection."""
        if self._work is None:
            raise _closed_here(self._waiting)
        timeout_s = self._group.timeout_s if timeout_s is None else timeout_s
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
            if self._work is None:  # the bytes came, but this rank has left meanwhile
                raise _closed_here(self._waiting)
        finally:
            self.drop()

    def drop(self) -> None:
        self._work = None
        self._group._pending.discard(self)


class GlooGroup:
    """All ranks of a session, fully connected. Construction blocks until every rank has connected.

    On a FailFastStore construction ends when any rank has failed. When a rank dies or calls `close`, ranks that wait for
    it get `PeerLostError` at once. gloo listens at the address by which this host reaches the store, and at no other;
    GLOO_SOCKET_IFNAME names another interface.
    """

    def __init__(self, store: StoreKeys, rank: int, names: Sequence[str], *, timeout_s: float) -> None:
        """`names` are the names of all ranks, in group order. Raises `SessionError` naming those that do not come."""
        self.timeout_s = timeout_s
        self.is_broken = False  # a rank was silent in `settle`: gloo closes connections of which it waited too long
        self._pending: set[GlooMessage] = set()
        self._slots: list[torch.Tensor] = []
        # gloo itself would wait for each missing rank in turn.
        exchange = StoreExchange(store, names[rank], names, timeout_s=timeout_s)
        hosts = exchange.gather("here", store.local_host or "", _parse_host)
        self._store = _GlooStore(store, rank, names)  # gloo does not keep alive what is written in Python
        self._group: ProcessGroupGloo | None = _connect(self._store, rank, names, timeout_s, _own_host(hosts, rank))

    def send(self, buffer: torch.Tensor, peer: int, waiting: Waiting) -> GlooMessage:
        return self._start("send", buffer, peer, waiting)

    def recv(self, buffer: torch.Tensor, peer: int, waiting: Waiting) -> GlooMessage:
        return self._start("recv", buffer, peer, waiting)

    def slots(self, count: int, nbytes: int) -> list[torch.Tensor]:
        """Buffers of at least `nbytes`. All executors of this group share them: they run one after another."""
        slot_bytes, slots = (self._slots[0].numel(), len(self._slots)) if self._slots else (0, 0)
        if nbytes > slot_bytes:
            self._slots, slot_bytes = [], nbytes
        missing = max(count, slots) - len(self._slots)
        self._slots += [torch.empty(slot_bytes, dtype=torch.uint8) for _ in range(missing)]
        return self._slots[:count]

    def settle(self, known: bool | None) -> bool | None:
        """The outcome of an attempt, asked of all other ranks that ask too. `known`: None if this rank is in doubt.

        True: a rank knows that all agreed. False: a rank knows of a failure, or all are in doubt. None: some rank is silent,
        or gone. A rank that knows the outcome stays until the others can have heard of it, but not for a whole deadline: they
        may know it as well, and have gone on. They notice up to half a deadline apart that a store is silent.
        """
        limit_s = self.timeout_s if known is None else min(max(CAUSE_S, self.timeout_s / 2), self.timeout_s)
        group, deadline = self._group, time.monotonic() + limit_s
        if group is None:
            return known
        own = torch.tensor([_KNOWN.index(known)], dtype=torch.uint8)
        heard: list[bool | None] = [known]
        silent = False
        answers = []
        for peer in range(group.size()):
            if peer == group.rank():
                continue
            answer = torch.zeros(1, dtype=torch.uint8)
            with suppress(RuntimeError):
                work = group.recv([answer], peer, _SETTLE_TAG)  # type: ignore[attr-defined]
                sent = group.send([own], peer, _SETTLE_TAG)  # type: ignore[attr-defined]
                answers.append((answer, work, sent))  # gloo drops what it has not sent once the handle is gone
                continue
            silent = True
        for answer, work, sent in answers:
            try:
                for each in (work, sent):
                    each.wait(timedelta(seconds=max(0.01, deadline - time.monotonic())))
                heard.append(_KNOWN[int(answer[0])])
            except RuntimeError:
                silent = True
        self.is_broken = silent
        if True in heard:
            return True
        return False if False in heard or not silent else None

    def close(self) -> None:
        """Close all connections; other threads' waits end. May be called twice."""
        for message in tuple(self._pending):
            message.drop()
        group, self._group = self._group, None
        if group is not None:
            _hang_up(group)
        self._slots.clear()

    def _start(self, way: Literal["send", "recv"], buffer: torch.Tensor, peer: int, waiting: Waiting) -> GlooMessage:
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
    """The error of a rank that has itself left: no peer is lost."""
    return TransferError(waiting, f"{waiting.rank_name} has closed its connections")


class _GlooStore(Store):
    """The store as gloo uses it while it connects: each rank's addresses, under keys such as "0/2" for rank 2."""

    def __init__(self, store: StoreKeys, rank: int, names: Sequence[str]) -> None:
        super().__init__()
        self._store, self._rank_name, self._names = store, names[rank], names

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        publish(self._store, key, [value.hex(), zlib.crc32(value)])

    def get(self, key: str) -> bytes:
        name = self._writer(key)
        return parse_stored(key, self._store.get(key, writer=seat_of(name)), _parse_address, written_by=name)

    def wait(self, keys: list[str], timeout: timedelta) -> None:  # type: ignore[override]
        try:
            self._store.wait(keys, timeout)
        except DistStoreError as error:
            late = ", ".join(self._writer(key) for key in keys if not self._store.check([key]))
            raise SessionError(
                f"{self._rank_name}: {late} did not connect by gloo within {timeout.total_seconds():g} s"
            ) from error

    def look(self) -> None:
        """Raise if a member has failed, or is gone."""
        if isinstance(self._store, FailFastStore):
            self._store.raise_if_failed()

    def _writer(self, key: str) -> str:
        rank = key.rpartition("/")[2]
        return self._names[int(rank)] if rank.isdecimal() and int(rank) < len(self._names) else "a rank"


def _parse_address(stored: Any) -> bytes:
    text, crc = stored
    value = bytes.fromhex(text)
    if zlib.crc32(value) != crc:  # gloo would crash the process
        raise ValueError("its CRC-32 is another one")
    return value


def _parse_host(stored: Any) -> str:
    """The address at which a rank reaches the store; "" where it cannot tell."""
    return str(ip_address(str(stored))) if stored else ""


def _own_host(hosts: Sequence[str], rank: int) -> str:
    """The address at which gloo listens; "" for where the host's name points.

    A rank beside its store may reach it by loopback, where ranks of other hosts could not reach the rank.
    """
    is_local = [bool(host) and ip_address(host).is_loopback for host in hosts]
    return "" if is_local[rank] and not all(is_local) else hosts[rank]


def _connect(store: _GlooStore, rank: int, names: Sequence[str], timeout_s: float, host: str) -> ProcessGroupGloo:
    """Connect on a thread: gloo gives each peer its own time, one after another, and hears of no failure meanwhile."""
    connecting = DeadlineThread("gloo").start(lambda: _connect_all(store, rank, len(names), timeout_s, host))
    deadline = time.monotonic() + timeout_s + NOTICE_S
    while not wait([connecting], LOOK_S).done:
        store.look()
        if time.monotonic() > deadline:
            raise ConnectError(f"{names[rank]}: gloo did not connect {len(names)} ranks within {timeout_s:g} s")
    try:
        return connecting.result()
    except (SessionError, DistError):
        raise
    except RuntimeError as error:
        raise ConnectError(f"{names[rank]}: gloo could not connect {len(names)} ranks: {error}") from error


def _connect_all(store: _GlooStore, rank: int, ranks: int, timeout_s: float, host: str) -> ProcessGroupGloo:
    timeout = timedelta(seconds=timeout_s)
    if not host or os.environ.get(_INTERFACE_VARIABLE):
        return ProcessGroupGloo(store, rank, ranks, timeout)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout, options._threads = timeout, _THREADS
    return ProcessGroupGloo(store, rank, ranks, options)


def _hang_up(group: ProcessGroupGloo) -> None:
    """Close the connections under threads that wait on them: gloo has no call for it, but a wait that is overdue does it."""
    for peer in range(group.size()):
        with suppress(RuntimeError):  # overdue, as intended; or this one was closed before
            work = group.recv([torch.empty(1, dtype=torch.uint8)], peer, _UNUSED_TAG)  # type: ignore[attr-defined]
            work.wait(timedelta(milliseconds=1))
