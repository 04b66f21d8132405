"""The CPU messages of a session: all its ranks, connected by gloo.

The process group is built straight from a store. torch's default group is neither needed nor touched, so a trainer and
an engine that each have a default group of their own can be joined.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Literal

import torch
from torch.distributed import ProcessGroupGloo, Store

from mcore_reshard.kernels.errors import DeadlineError, PeerLostError, SessionError, TransferError, Waiting

from .exchange import StoreExchange

_TAG = 0  # one tag: gloo keeps messages of a pair and tag in order
_UNUSED_TAG = 5040  # of the same connections as _TAG: gloo goes by the remainder where it has several networks


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
        exchange = StoreExchange(store, rank, names, timeout_s=timeout_s)
        exchange.gather("here", "")  # gloo itself would wait for each missing rank in turn, and name none
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
    return TransferError(waiting, f"{waiting.rank_name} has closed its connections")


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
