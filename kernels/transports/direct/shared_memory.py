"""Tell peers which memory of a rank they may map, and read what they tell: each export once, as long as it is the same.

A rank publishes its export, and the export's digest. A peer that knows the digest does not read the export again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.copy_table import ends_of
from mcore_reshard.kernels.copies.peer_table import PeerTable
from mcore_reshard.kernels.cuda.exported import Export
from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.transports.kept import Kept, Mappings

from .peer_signals import PeerSignals


def share_memory(signals: PeerSignals, kept: Kept, tensors: Mapping[str, torch.Tensor], *, prefix: str = "") -> None:
    """Export a rank's `tensors` to all its peers. Raises `TransportUnavailable` as `ipc.export` does."""
    own = kept.export(tensors)
    kept.publish(own, signals.rank_name, signals.store)
    signals.publish(own.digest, prefix=prefix)


def fetch_exports(signals: PeerSignals, kept: Kept, peers: Collection[int], *, prefix: str = "") -> dict[int, Export]:
    """The exports of `peers`, by rank. Raises `SessionError` where a peer publishes none."""
    waiting = {peer: each for peer, each in signals.peers.items() if peer in peers}
    return {
        peer: kept.export_of(each, signals.fetch(peer, str, prefix=prefix), signals.store, signals.timeout_s)
        for peer, each in waiting.items()
    }


def addresses_of(
    table: PeerTable, bound: BoundSchedule, exports: Mapping[int, Export], mappings: Mappings
) -> NDArray[np.uint64]:
    """Where each base of the table's copies begins: own tensors, then those of peers, mapped.

    Raises `SessionError` where a peer exports fewer bytes of a tensor than are copied.
    """
    own = [tensor.data_ptr() for tensor in bound.tensors]
    theirs = np.zeros(len(table.theirs), np.uint64)
    ranks = np.array([each.rank for each in table.theirs])
    used = np.isin(np.arange(len(theirs)) + len(own), table.copies[table.there])  # not: empty tensors
    ends = np.zeros(len(own) + len(theirs), np.int64)
    np.maximum.at(ends, table.copies[table.there], ends_of(table.copies, table.there))
    for rank, exported in exports.items():
        rows = np.flatnonzero((ranks == rank) & used)
        names = [table.theirs[row].tensor for row in rows.tolist()]
        owner = bound.schedule.name_of("train" if table.here == "dst" else "gen", rank)
        for name, end in zip(names, ends[rows + len(own)].tolist(), strict=True):
            if end > exported.bytes_from(name):  # the GPU would go beyond what is mapped
                raise SessionError(f"{owner} exports {name} with {exported.bytes_from(name)} bytes, {end} are needed")
        theirs[rows] = mappings.addresses(exported, names, owner)
    return np.concatenate([np.array(own, np.uint64), theirs])
