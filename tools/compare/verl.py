"""verl's own colocated update (`naive`) beside ours: its BucketedWeightSender, and its worker extension in a whole vLLM LLM.

    naive    every training rank gathers all weights, and hands them to the worker beside it, through shared memory

On GPUs verl sends handles of GPU memory instead. Stand-ins: a platform of verl's that is a CPU, and Ray: verl's model engine
gives the weights by Megatron-Bridge's export, as here.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from helpers.sglang_server import in_background

from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.validation.engine.slices import GenSizes

from .measure import Part
from .trainer import Trainer
from .vllm import Engine, VllmDriver, engine_processes, part_of

PACKAGES = ("verl", "vllm", "torch", "megatron-core", "megatron-bridge")
_BUCKETS_MB = {"naive": 2048, "naive-128": 128}  # the first is verl's update_weights_bucket_megabytes
PATHS = {
    "naive": "`naive`, through shared memory, buckets of 2 GiB",
    "naive-128": "the same, buckets of 128 MiB",
    "ours": "ours, `RefitWorker`",
}
__all__ = ["PACKAGES", "PATHS", "engine_part", "engine_processes", "prepare", "train_part"]


def prepare() -> None:
    os.environ |= {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_RAY_JOB_ID": f"compare-{os.getpid()}"}
    from . import verl_worker  # noqa: F401  with verl


def engine_part(rank: int, folder: Path, mesh: TrainMesh, sizes: GenSizes) -> Part:
    return part_of(Engine(folder, sizes, "compare.verl_worker.ComparedVerl"), [*PATHS])


def train_part(rank: int, folder: Path, mesh: TrainMesh, sizes: GenSizes) -> Part:
    if mesh.world != sizes.tp:
        raise ValueError(f"verl's naive update has a training rank beside each worker, not {mesh.world} and {sizes.tp}")
    driver = VerlDriver(Trainer(rank, mesh, folder), sizes)
    nothing = partial(driver.tell, "done")
    return Part(
        set_up={"naive": nothing, "naive-128": nothing, "ours": driver.connect},
        run={**{path: partial(driver.hand_over, size) for path, size in _BUCKETS_MB.items()}, "ours": driver.refit},
        set_weights=driver.trainer.set_weights,
        differences=lambda version: [],
    )


class VerlDriver(VllmDriver):
    """One training rank, with a vLLM worker beside it."""

    def hand_over(self, bucket_mb: int) -> tuple[int, int]:
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

        told = in_background(partial(self.tell, "receive_from_verl"))
        job, handed = os.environ["VERL_RAY_JOB_ID"], list[int]()

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self.trainer.export():
                handed.append(tensor.nbytes)
                yield name, tensor

        handle = f"ipc:///tmp/rl-colocate-zmq-{job}-replica-0-rank-{self.trainer.rank}.sock"
        sender = BucketedWeightSender(zmq_handle=handle, bucket_size_mb=bucket_mb, use_shm=True)
        asyncio.run(sender.async_send_weights(counted()))
        told()
        dist.barrier()
        self.tell("done")
        return sum(handed), 0
