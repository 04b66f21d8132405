"""Tell readers which memory of a source they may map, and read what sources tell: each export once, as long as it is the same.

A source publishes its export, and the export's digest. A reader that knows the digest does not read the export again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mcore_reshard.kernels.cuda.exported import Export
from mcore_reshard.kernels.transports.kept import Kept

from .peer_signals import PeerSignals


def share_memory(signals: PeerSignals, kept: Kept, tensors: Mapping[str, torch.Tensor]) -> None:
    """Export a source's `tensors` to all readers. Raises `TransportUnavailable` as `ipc.export` does."""
    own = kept.export(tensors)
    kept.publish(own, signals.rank_name, signals.store)
    signals.publish(own.digest)


def fetch_exports(signals: PeerSignals, kept: Kept) -> dict[int, Export]:
    """The exports of all sources, by rank. Raises `SessionError` where a source publishes none."""
    return {
        peer: kept.export_of(waiting, signals.fetch(peer, str), signals.store, signals.timeout_s)
        for peer, waiting in signals.peers.items()
    }
