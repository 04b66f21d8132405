"""PeerSignals between ranks that exchange bytes on the direct transport, and what they publish of themselves."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from datetime import timedelta

import numpy as np
import torch
from torch.distributed import DistStoreError, Store

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.errors import DeadlineError, TransferError, Waiting
from mcore_reshard.kernels.rendezvous.fail_fast_store import FailFastStore
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup, GlooMessage
from mcore_reshard.kernels.transports.base import group_names, group_rank, other_world
from mcore_reshard.planner.plan.schedule import TransferTable, World

_WORD = struct.Struct("<qq")  # the run it belongs to, and the word


class PeerSignals:
    """What is said between this rank and the peers that it exchanges bytes with.

    The group is not the session's: a buffer posted there would get the next message of whatever kind.
    """

    def __init__(self, store: Store, bound: BoundSchedule, timeout_s: float) -> None:
        schedule = bound.schedule
        self.timeout_s = timeout_s
        self._schedule = schedule
        self._other: World = other_world(schedule.world)
        self.peers = _waiting_by_peer(bound)
        self._group = GlooGroup(
            FailFastStore("words", store),
            group_rank(schedule, schedule.world, schedule.rank),
            group_names(schedule),
            timeout_s=timeout_s,
        )
        self._posted: dict[int, tuple[torch.Tensor, GlooMessage]] = {}
        self._listen(self.peers)

    def tell(self, run: int, word: int, peers: Iterable[int] | None = None) -> None:
        """Say `word` to some peers, by default to all."""
        content = _WORD.pack(run, word)
        messages = [
            self._group.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), self._address(peer), waiting)
            for peer, waiting in self._of(peers).items()
        ]
        for message in messages:
            message.wait()

    def hear(self, run: int, word: int, peers: Iterable[int] | None = None) -> None:
        """Wait until these peers, by default all, have said `word`."""
        of = self._of(peers)
        for peer in of:
            buffer, message = self._posted[peer]
            message.wait()
            if (heard := _WORD.unpack(buffer.numpy().tobytes())) != (run, word):
                raise TransferError(self.peers[peer], f"(run, word) {heard} came in place of {(run, word)}")
        self._listen(of)

    def _of(self, peers: Iterable[int] | None) -> dict[int, Waiting]:
        return self.peers if peers is None else {peer: self.peers[peer] for peer in peers}

    def _listen(self, peers: dict[int, Waiting]) -> None:
        """Post buffers for the next words of peers: one that is posted late costs the sender a round trip."""
        for peer, waiting in peers.items():
            buffer = torch.empty(_WORD.size, dtype=torch.uint8)
            self._posted[peer] = buffer, self._group.recv(buffer, self._address(peer), waiting)

    def close(self) -> None:
        self._posted.clear()
        self._group.close()

    def _address(self, peer: int) -> int:
        return group_rank(self._schedule, self._other, peer)


def fetch(store: Store, rank: str, waiting: Waiting, timeout_s: float, *, what: str = "") -> str:
    """What `rank` published of itself, or of `what` it has. Raises `DeadlineError` if it is silent."""
    try:
        store.wait([what + rank], timedelta(seconds=timeout_s))
    except DistStoreError as error:
        raise DeadlineError(waiting, f"{rank} published nothing within {timeout_s:g} s") from error
    return str(store.get(what + rank).decode())


def _waiting_by_peer(bound: BoundSchedule) -> dict[int, Waiting]:
    """The ranks that this one moves bytes to or from, with the first parameter between them; in rotated order."""
    schedule = bound.schedule
    found: dict[int, Waiting] = {}
    for stage in schedule.stages:
        sends = schedule.world == "train"
        table: TransferTable = stage.sends if sends else stage.recvs
        for peer, row in zip(*(column.tolist() for column in np.unique(table.peer, return_index=True)), strict=True):
            name = schedule.parameter_name(int(table.transfer_group[row]), int(table.member[row]))
            other = schedule.name_of(other_world(schedule.world), peer)
            found.setdefault(peer, Waiting(bound.rank_name, other, stage.pp_stage, name, sends))
    size = max(schedule.train_ranks, schedule.gen_ranks)
    return dict(sorted(found.items(), key=lambda item: (item[0] - schedule.rank) % size))
