"""What NCCL takes for itself on a GPU: measured within a host, from its source between hosts.

A communicator takes 252 MB: NCCL allocates in granules of 2 MiB, three and more for each of 32 channels. One whose ranks are
all on other hosts has few channels: 23 MB (two H200s that exchange by sockets alone, tools/results/sockets-x2.json).

Within a host, a receiver has buffers for each channel from each sender, of all three protocols. H200s of one host with NCCL
2.28.9, two communicators a rank (tools/results/refit-x2.json, refit-x4.json):

    ranks     measured at    NCCL's own    counted
    1 -> 1    the receiver   1,144 MB      2 * (252 + 32 channels * 1 sender * 10) MB
    2 -> 2    a receiver     1,785 MB      2 * (252 + 32 channels * 2 senders * 10) MB
    1 -> 3    the sender     1,103 MB      2 * (252 + 32 channels * 3 receivers * 3.1) MB

Between hosts, all peers of a rank share buffers, so that NCCL's memory does not grow with them. A communicator has a pool of
16 chunks of 128 KiB for each channel, one for what a GPU sends and one for what it receives: 64 MiB each. A message leaves
through the GPU of the host that is on the receiver's rail (PXN). That GPU has a pool for each rank of its host that it sends
for: at most 8, of 512 MiB in all. From the source, not measured: `sharedNetBuffersInit` of src/transport/net.cc and
`computeBuffSizes` of src/init.cc, 2.28.9. It holds where NICs read GPU memory (GPUDirect RDMA), else pools are in the host's;
and where NCCL allocates by cuMem, its default, else each GPU has all its pools from the start.

A process takes more with its first communicator and its first message, once: NCCL's kernels (tools/results/first-use-x1.json).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .shared_gpus import most_ctas
from .staging import Division

COMMUNICATOR_BYTES = 252_000_000
ALONE_BYTES = 23_000_000  # of a communicator whose other ranks are all on other hosts: it has few channels
KERNEL_BYTES = (100 + 248) << 20  # of a process, once: with its first communicator, and with its first message
RECEIVING_BYTES = 10_000_000  # of one channel from one sender of the host
SENDING_BYTES = 3_100_000  # of one channel to one receiver of the host
CHANNELS = 32  # of a communicator; within a host, all of them between two ranks
HOST_GPUS = 8
POOL_BYTES = 16 << 17  # of one channel, between hosts
_NET_CHANNELS = 4  # between two ranks of a communicator that spans hosts, at most: 2.28.9 takes 2, later ones up to 4
_PEER_BYTES = 640  # of each channel, for each rank of a communicator: NCCL's record of a peer


def buffer_bytes(
    rank: int,
    senders: Collection[int],
    receivers: Collection[int],
    division: Division,
    train_ranks: int,
    domains: Sequence[int] | None = None,
) -> int:
    """NCCL's own memory on a group rank that `senders` send to, and that sends to `receivers`: group ranks.

    `domains` has the NVLink domain of each group rank: its host, or a rack. By default up to 8 ranks are in one; of more,
    those of one side alone.
    """
    channels = min(CHANNELS, most_ctas(division.streams) or CHANNELS)
    nbytes = 0
    for number, members in division.communicators().items():
        if rank not in members:
            continue
        streams = len(division.streams_with(number))
        if domains is not None:
            near = {each for each in members if domains[each] == domains[rank]}
        elif len(members) <= HOST_GPUS:
            near = {*members}
        else:
            near = {each for each in members if (each < train_ranks) == (rank < train_ranks)}
        far = {*members} - near
        of_pair = (1 if division.keeps_streams else streams) * min(channels, _NET_CHANNELS if far else CHANNELS)
        near_bytes = RECEIVING_BYTES * len(near & {*senders}) + SENDING_BYTES * len(near & {*receivers})
        pools = 1 if far & {*senders} else 0
        if far:  # also for a rank that sends nothing to them: others do, through its GPU
            pools += min(HOST_GPUS, sum(each < train_ranks or "relay" in division.hops for each in near))
        communicator = COMMUNICATOR_BYTES if len(near) > 1 else ALONE_BYTES
        of_stream = communicator + channels * (pools * POOL_BYTES + len(members) * _PEER_BYTES)
        nbytes += of_pair * near_bytes + streams * of_stream
    return nbytes
