"""Signals between ranks that exchange bytes on the direct transport: ready, started, done."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.errors import PeerLostError, TransferError, Waiting
from mcore_reshard.kernels.rendezvous.exchange import fetch, publish
from mcore_reshard.kernels.rendezvous.gloo_group import GlooMessage
from mcore_reshard.kernels.rendezvous.store_keys import FailFastStore, StoreKeys
from mcore_reshard.kernels.transports.base import connect_group
from mcore_reshard.kernels.transports.group_ranks import group_names, peer_group_rank
from mcore_reshard.planner.plan.schedule import World

T = TypeVar("T")

_MESSAGE = struct.Struct("<qqq")  # run, signal, until when its sender waits by the host's clock (`time.monotonic_ns`)


class Signal(IntEnum):
    """A message to a peer. Numbers from 0: this round of casts may be read, or has been queued; this wave has been pushed."""

    READY = -1  # a source, and who is written: all that it had queued is done
    STARTED = -2  # a reader: its pull is queued, and the event after it recorded
    DONE = -3  # a reader: all has landed; who pushes: everything is written
    CAST = -4  # a source that casts: all casts are done


class PeerSignals:
    """Signals between this rank and the peers that it exchanges bytes with, and what these publish on the store."""

    def __init__(self, store: StoreKeys, bound: BoundSchedule, timeout_s: float) -> None:
        self._bound = bound
        self.timeout_s = timeout_s
        self.store = store
        self.peers = _waiting_by_peer(bound)
        # A group of its own: a buffer posted in the session's would get the next message of any kind.
        self._group = connect_group(FailFastStore("words", store), bound.schedule, timeout_s)
        self._posted: dict[int, tuple[torch.Tensor, GlooMessage | PeerLostError]] = {}
        # Last signals. Handles are kept until these have come: gloo sends no message whose handle is gone.
        self._unawaited: dict[int, tuple[int, GlooMessage]] = {}  # with the run
        self._listen(self.peers)

    @property
    def rank_name(self) -> str:
        return self._bound.rank_name

    def publish(self, value: Any, *, prefix: str = "") -> None:
        """Tell all peers `value`, as JSON."""
        publish(self.store, prefix + self.rank_name, value)

    def fetch(self, peer: int, parse: Callable[[Any], T], *, prefix: str = "") -> T:
        """The value that a peer publishes."""
        waiting = self.peers[peer]
        return fetch(self.store, prefix + waiting.peer, waiting, parse, timeout_s=self.timeout_s)

    def fetch_from(self, world: World, rank: int, parse: Callable[[Any], T], prefix: str, what: str) -> T:
        """The value that any rank of the session publishes, also one that this rank exchanges no bytes with.

        `what` it is, for an error where it publishes none.
        """
        peer = self._bound.schedule.name_of(world, rank)
        waiting = replace(next(iter(self.peers.values())), peer=peer, parameter=what, sends=False)
        return fetch(self.store, prefix + waiting.peer, waiting, parse, timeout_s=self.timeout_s)

    def tell(self, run: int, signal: int, peers: Collection[int] | None = None) -> None:
        """Send `signal` to `peers`, by default to all."""
        for message in [self._send(run, signal, peer) for peer in (self.peers if peers is None else peers)]:
            message.wait()

    def tell_last(self, run: int, signal: int, peers: Collection[int] | None = None) -> None:
        """Send the last `signal` of a run to `peers`, by default all, and wait for none: who has left by now needs it no more.

        gloo may not notice for long that the receiver of a message has left. Peers post a buffer for it before they begin the next
        run, so it has come by then, or comes at once.
        """
        for peer in self.peers if peers is None else peers:
            with suppress(PeerLostError):
                self._unawaited[peer] = run, self._send(run, signal, peer)

    def _send(self, run: int, signal: int, peer: int) -> GlooMessage:
        until = time.monotonic_ns() + int(1e9 * self.timeout_s)
        content = torch.frombuffer(bytearray(_MESSAGE.pack(run, signal, until)), dtype=torch.uint8)
        return self._group.send(content, peer_group_rank(self._bound.schedule, peer), self.peers[peer])

    def hear(self, run: int, signal: int, peers: Collection[int] | None = None) -> dict[int, float]:
        """Wait until `peers`, by default all, have sent `signal`. Returns for how many seconds each goes on waiting."""
        until: dict[int, int] = {}
        try:
            for peer in self.peers if peers is None else peers:
                *heard, until[peer] = self._take(peer)
                if heard != [run, signal]:
                    raise TransferError(
                        self.peers[peer], f"[run, signal] {heard} came in place of {[run, int(signal)]}"
                    )
        finally:
            self._listen(until)
        return {peer: (moment - time.monotonic_ns()) / 1e9 for peer, moment in until.items()}

    def hear_last(self, run: int, signal: int, peer: int, timeout_s: float) -> None:
        """Wait no longer than that until a peer has sent `signal`, whatever it sends before."""
        deadline, heard = time.monotonic() + timeout_s, [-1, 0]
        while heard != [run, signal]:
            *heard, _ = self._take(peer, max(0.01, deadline - time.monotonic()))
            self._listen([peer])

    def check_here(self, peers: Collection[int]) -> None:
        """Raise `PeerLostError` for a peer that had left when its last signal was taken."""
        for peer in peers:
            if isinstance(lost := self._posted[peer][1], PeerLostError):
                raise lost

    def _take(self, peer: int, timeout_s: float | None = None) -> tuple[int, int, int]:
        """The next message of a peer; the next but one is not awaited before `_listen`."""
        self.check_here([peer])
        buffer, message = self._posted[peer]
        assert isinstance(message, GlooMessage)
        message.wait(timeout_s)
        heard: tuple[int, int, int] = _MESSAGE.unpack(buffer.numpy().tobytes())  # type: ignore[assignment]
        last_run, last = self._unawaited.get(peer, (heard[0], None))
        if last is not None and last_run < heard[0]:  # the peer has begun the next run
            del self._unawaited[peer]
            with suppress(TransferError):  # it has come, or comes now
                last.wait()
        return heard

    def close(self) -> None:
        self._posted.clear()
        self._unawaited.clear()
        self._group.close()

    def _listen(self, peers: Collection[int]) -> None:
        """Post buffers for the next signals of peers: one that is posted late costs the sender a round trip.

        A peer may leave after its last signal: that is an error only once another one is awaited.
        """
        for peer in peers:
            buffer = torch.empty(_MESSAGE.size, dtype=torch.uint8)
            group_rank = peer_group_rank(self._bound.schedule, peer)
            try:
                self._posted[peer] = buffer, self._group.recv(buffer, group_rank, self.peers[peer])
            except PeerLostError as error:
                self._posted[peer] = buffer, error


def _waiting_by_peer(bound: BoundSchedule) -> dict[int, Waiting]:
    """The ranks that this one moves bytes to or from, with the first parameter between them; in rotated order."""
    schedule, names = bound.schedule, group_names(bound.schedule)
    waiting: dict[int, Waiting] = {}
    sends = schedule.world == "train"
    for stage in schedule.stages:
        table = stage.sends if sends else stage.recvs
        peers, first_rows = np.unique(table.peer, return_index=True)
        for peer, row in zip(peers.tolist(), first_rows.tolist(), strict=True):
            name = schedule.parameter_name(int(table.transfer_group[row]), int(table.member[row]))
            peer_name = names[peer_group_rank(schedule, peer)]
            waiting.setdefault(peer, Waiting(bound.rank_name, peer_name, stage.pp_stage, name, sends))
    size = max(schedule.train_ranks, schedule.gen_ranks)
    return dict(sorted(waiting.items(), key=lambda item: (item[0] - schedule.rank) % size))
