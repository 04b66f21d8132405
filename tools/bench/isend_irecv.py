"""A message for every transfer through torch's `batch_isend_irecv`, as most stacks' point-to-point paths do.

A region that is not contiguous is packed before it is sent and copied back after it arrives. Messages are batched by
layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from mcore_reshard.planner.plan.schedule import TransferTable

from .methods import Options, Prepared, Unavailable
from .ranks import Rank

_LAYERS = 4  # in one batch


@dataclass(frozen=True, slots=True)
class _Message:
    batch: tuple[int, int]  # stage and layers: equal on both ends
    peer: int  # rank of the process group
    view: torch.Tensor


def per_tensor(rank: Rank, options: Options) -> Prepared:
    if rank.plan.later_hops:
        raise Unavailable("the plan has replicas relay, which this method does not do")
    join_world(rank)
    messages = _messages(rank, int(options.get("layers", _LAYERS)))
    batches = [list(batch) for _, batch in groupby(messages, key=lambda message: message.batch)]

    def exchange() -> None:
        for batch in batches:
            _exchange(batch, sends=rank.world == "train")

    return Prepared(exchange, dist.destroy_process_group, facts=lambda: {"messages": len(messages)})


def join_world(rank: Rank, *, connected: bool = True) -> None:
    """Torch's default process group over all ranks. Raises `Unavailable` where NCCL would lack GPUs.

    `connected`: it and every group made from it connect at once, each with buffers of its own, and not when first used.
    """
    if rank.on_cuda and rank.launch.gpus < rank.ranks:
        raise Unavailable("NCCL needs a GPU for every rank")
    dist.init_process_group(
        "nccl" if rank.on_cuda else "gloo",
        store=PrefixStore("world", rank.store),
        rank=rank.number,
        world_size=rank.ranks,
        timeout=timedelta(seconds=rank.timeout_s),
        device_id=rank.device if rank.on_cuda and connected else None,
    )


def _exchange(batch: list[_Message], *, sends: bool) -> None:
    buffers = [
        message.view if message.view.is_contiguous() else message.view.contiguous() if sends else _like(message.view)
        for message in batch
    ]
    operation = dist.isend if sends else dist.irecv
    operations = [dist.P2POp(operation, buffer, message.peer) for buffer, message in zip(buffers, batch, strict=True)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if not sends:
        for buffer, message in zip(buffers, batch, strict=True):
            if buffer is not message.view:
                message.view.copy_(buffer)


def _like(view: torch.Tensor) -> torch.Tensor:
    return torch.empty(view.shape, dtype=view.dtype, device=view.device)


def _messages(rank: Rank, layers: int) -> list[_Message]:
    schedule, plan = rank.schedule, rank.plan
    first_peer = rank.case.train_ranks if rank.world == "train" else 0
    flat = [rank.tensors[local.name].reshape(-1) for local in schedule.tensors]
    messages = []
    for stage in schedule.stages:
        table: TransferTable = stage.sends if rank.world == "train" else stage.recvs
        columns = (table.peer, table.tensor, table.strided_box, table.offset, table.transfer_group, table.member)
        for peer, tensor, strided_box, offset, transfers, member in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            group = plan.transfer_groups[transfers]
            layer = group.layers[member // group.expert_count].layer // layers
            shape = schedule.strided_boxes[strided_box]
            view = flat[tensor].as_strided(shape.extents, shape.strides, flat[tensor].storage_offset() + offset)
            messages.append(_Message((stage.pp_stage, layer), first_peer + peer, view))
    return sorted(messages, key=lambda message: message.batch)  # stable: pairs keep the order that both ends agree on
