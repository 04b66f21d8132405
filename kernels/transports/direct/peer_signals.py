"""Signals between ranks that exchange bytes on the direct transport: what is ready, has started and is done."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed import Store

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.errors import TransferError, Waiting
from mcore_reshard.kernels.rendezvous.exchange import fetch
from mcore_reshard.kernels.rendezvous.gloo_group import GlooMessage
from mcore_reshard.kernels.rendezvous.store import FailFastStore
from mcore_reshard.kernels.transports.base import connect_group, other_world, peer_group_rank

T = TypeVar("T")

_MESSAGE = struct.Struct("<qq")  # run, signal


class Signal(IntEnum):
    """What a rank tells a peer. Numbers from 0 mean that this round of casts may be read, or has been queued."""

    READY = -1  # a source: all that it has queued is done
    STARTED = -2  # a reader: its pull is queued, and the event after it recorded
    DONE = -3  # a reader: its pull has ended


class PeerSignals:
    """Signals between this rank and the peers that it exchanges bytes with, and what these publish on the store.

    The group is not the session's: a buffer posted there would get the next message of whatever kind.
    """

    def __init__(self, store: Store, bound: BoundSchedule, timeout_s: float) -> None:
        schedule = self._schedule = bound.schedule
        self.timeout_s = timeout_s
        self._store = store
        self.peers = _waiting_by_peer(bound)
        self._group = connect_group(FailFastStore("words", store), schedule, timeout_s)
        self._posted: dict[int, tuple[torch.Tensor, GlooMessage]] = {}
        self._listen(self.peers)

    def fetch(self, peer: int, parse: Callable[[Any], T], *, prefix: str = "") -> T:
        """What a peer publishes under its own name."""
        waiting = self.peers[peer]
        return fetch(self._store, prefix + waiting.peer, waiting, parse, timeout_s=self.timeout_s)

    def tell(self, run: int, signal: int, peers: Iterable[int] | None = None) -> None:
        """Send `signal` to some peers, by default to all."""
        content = torch.frombuffer(bytearray(_MESSAGE.pack(run, signal)), dtype=torch.uint8)
        messages = [
            self._group.send(content, peer_group_rank(self._schedule, peer), waiting)
            for peer, waiting in self._chosen(peers).items()
        ]
        for message in messages:
            message.wait()

    def hear(self, run: int, signal: int, peers: Iterable[int] | None = None) -> None:
        """Wait until these peers, by default all, have sent `signal`."""
        chosen = self._chosen(peers)
        for peer in chosen:
            buffer, message = self._posted[peer]
            message.wait()
            if (heard := _MESSAGE.unpack(buffer.numpy().tobytes())) != (run, signal):
                expected = (run, int(signal))
                raise TransferError(self.peers[peer], f"(run, signal) {heard} came in place of {expected}")
        self._listen(chosen)

    def close(self) -> None:
        self._posted.clear()
        self._group.close()

    def _chosen(self, peers: Iterable[int] | None) -> dict[int, Waiting]:
        return self.peers if peers is None else {peer: self.peers[peer] for peer in peers}

    def _listen(self, peers: dict[int, Waiting]) -> None:
        """Post buffers for the next signals of peers: one that is posted late costs the sender a round trip."""
        for peer, waiting in peers.items():
            buffer = torch.empty(_MESSAGE.size, dtype=torch.uint8)
            self._posted[peer] = buffer, self._group.recv(buffer, peer_group_rank(self._schedule, peer), waiting)


def _waiting_by_peer(bound: BoundSchedule) -> dict[int, Waiting]:
    """The ranks that this one moves bytes to or from, with the first parameter between them; in rotated order."""
    schedule = bound.schedule
    waiting: dict[int, Waiting] = {}
    sends = schedule.world == "train"
    for stage in schedule.stages:
        table = stage.sends if sends else stage.recvs
        for peer, row in zip(*(column.tolist() for column in np.unique(table.peer, return_index=True)), strict=True):
            name = schedule.parameter_name(int(table.transfer_group[row]), int(table.member[row]))
            other = schedule.name_of(other_world(schedule.world), peer)
            waiting.setdefault(peer, Waiting(bound.rank_name, other, stage.pp_stage, name, sends))
    size = max(schedule.train_ranks, schedule.gen_ranks)
    return dict(sorted(waiting.items(), key=lambda item: (item[0] - schedule.rank) % size))
