"""What NCCL takes for itself, as measured: nothing but NCCL can count it.

A communicator takes memory of its own, and then for each channel to each peer: much at a receiver, little at a sender. All
figures are of H200s on one host with NCCL 2.28.9, two communicators a rank (tools/results/refit-x2.json, refit-x4.json):

    ranks     measured at    NCCL's own    counted
    1 -> 1    the receiver   1,144 MB      2 * (252 + 32 channels * 1 sender * 10) MB
    2 -> 2    a receiver     1,785 MB      2 * (252 + 32 channels * 2 senders * 10) MB
    1 -> 3    the sender     1,103 MB      2 * (252 + 32 channels * 3 receivers * 3.1) MB

Fewer channels across hosts are NCCL's rule (graph/paths.cc), not measured. A process that has not used NCCL before takes
some 260 MB more for its kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from .shared_gpus import most_ctas
from .staging import Division

COMMUNICATOR_BYTES = 252_000_000
RECEIVING_BYTES = 10_000_000  # of one channel from one sender
SENDING_BYTES = 3_100_000  # of one channel to one receiver
CHANNELS = 32  # of a communicator; within a host, all of them between two ranks
HOST_GPUS = 8  # a communicator of more ranks spans hosts
_NET_CHANNELS = 4  # between ranks of two hosts: 50 GB/s of NIC, at 14 GB/s for each
_PEERS_IN_A_ROUND = 8


def buffer_bytes(senders: int, receivers: int, division: Division, sizes: Sequence[int] | None = None) -> int:
    """NCCL's own memory on a rank that so many ranks send to, and that sends to so many, in a division's communicators.

    `sizes` are the ranks of each communicator, of all streams, that the rank is in; by default each stream has one, of all
    members.
    """
    if not senders and not receivers:
        return 0
    sizes = sizes or [len(division.members)] * division.streams
    streams = 1 if division.keeps_streams else len(division.streams_with(0))  # of a pair
    channels = min(_channels(min(sizes)), most_ctas(division.streams) or CHANNELS)
    connections = (senders * RECEIVING_BYTES + receivers * SENDING_BYTES) * streams
    return len(sizes) * COMMUNICATOR_BYTES + connections * channels


def _channels(ranks: int) -> int:
    """Channels between two ranks of a communicator."""
    if ranks <= HOST_GPUS:
        return CHANNELS
    channels = _NET_CHANNELS
    while channels > 1 and channels * -(-ranks // _PEERS_IN_A_ROUND) > CHANNELS:
        channels //= 2
    return channels
