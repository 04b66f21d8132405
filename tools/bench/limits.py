"""The limits of the links: copy engines between disjoint pairs, and NCCL with large messages and no copies."""

from __future__ import annotations

import time

import torch

from .methods import Options, Prepared, Unavailable
from .ranks import Rank

_GIB, _MIB = 1 << 30, 1 << 20


def copy_engine(rank: Rank, options: Options) -> Prepared:
    """From training rank i to generation rank i, all pairs at once. Where one side has more ranks, those rest."""
    if not rank.on_cuda:
        raise Unavailable("there is no copy engine without a GPU")
    from cuda.bindings import driver

    from mcore_reshard.kernels.cuda.ipc import Export, Mappings, export

    paired = rank.rank < min(rank.case.train_ranks, rank.case.gen_ranks)
    nbytes = int(options.get("gib", 8)) * _GIB if paired else 0
    buffer = torch.zeros(nbytes, dtype=torch.uint8, device=rank.device)
    rank.settle()
    if rank.world == "train" or not paired:
        if paired:
            rank.store.set(f"memory/{rank.rank}", export({"buffer": buffer}).to_json())
        kept = [buffer]  # until all pairs are done
        return Prepared(lambda: None, kept.clear, nbytes=0, wrong=lambda: 0, weight_bytes=nbytes)
    mappings = Mappings(rank.device)
    exported = Export.from_json(rank.store.get(f"memory/{rank.rank}"))
    (source,) = mappings.addresses(exported, ["buffer"], f"train:{rank.rank}")
    stream = torch.cuda.current_stream()

    def copy() -> None:
        driver.cuMemcpyAsync(buffer.data_ptr(), int(source), nbytes, stream.cuda_stream)
        stream.synchronize()

    return Prepared(copy, mappings.close, nbytes=nbytes, wrong=lambda: 0, weight_bytes=nbytes)


def nccl_alone(rank: Rank, options: Options) -> Prepared:
    """One message from every training rank to every generation rank, in one group, four groups in a row."""
    if not rank.on_cuda:
        raise Unavailable("NCCL needs GPUs")
    if rank.launch.gpus < rank.ranks:
        raise Unavailable("NCCL needs a GPU for every rank")
    from mcore_reshard.kernels.errors import Waiting
    from mcore_reshard.kernels.transports.nccl.communicator import (
        NcclCommunicator,
        Payload,
        nccl_unavailable_reason,
        new_unique_id,
    )

    if reason := nccl_unavailable_reason():
        raise Unavailable(reason)
    sends = rank.world == "train"
    waiting = Waiting(f"rank {rank.number}", "the others", None, "the bare messages", sends)
    if rank.number == 0:
        rank.store.set("id", new_unique_id().hex())
    communicator = NcclCommunicator(bytes.fromhex(rank.store.get("id").decode()), rank.number, rank.ranks, waiting)
    train = rank.case.train_ranks
    peers = range(train, rank.ranks) if sends else range(train)
    size, groups = int(options.get("message_mib", 512)) * _MIB, 4
    buffer = torch.zeros(size * len(peers), dtype=torch.uint8, device=rank.device)
    payloads = [Payload(peer, sends, buffer[n * size : (n + 1) * size]) for n, peer in enumerate(peers)]
    stream = torch.cuda.Stream()

    def idle() -> None:
        deadline = time.monotonic() + rank.timeout_s
        while not communicator.is_idle([waiting]):
            if time.monotonic() > deadline:
                raise SystemExit(f"NCCL alone made no progress within {rank.timeout_s:g} s")

    def exchange() -> None:
        for _ in range(groups):
            communicator.start(payloads, stream, waiting)
            idle()
        stream.synchronize()

    idle()
    return Prepared(
        exchange,
        communicator.abort,
        nbytes=0 if sends else groups * buffer.numel(),
        wrong=lambda: 0,
        weight_bytes=buffer.numel(),
    )
