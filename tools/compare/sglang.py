"""SGLang's own weight updates beside ours: real `WeightUpdater`s of a tensor-parallel engine over gloo.

    distributed         training rank 0 broadcasts every whole tensor to all engine ranks
    distributed, 64     the same in buckets of 64 MiB in place of 512 MiB
    disk                training rank 0 writes a checkpoint, engine ranks read it

Both begin with Megatron-Bridge's export, which gathers whole tensors on every training rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.front_door import free_address
from helpers.sglang_server import Rank, _handler, held, in_background, post, prepare

import mcore_reshard as mr
from mcore_reshard.engines.sglang.model import load_weights, local_tensors
from mcore_reshard.integrations.sglang import send
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.validation.engine.slices import GenSizes, poison

from .driver import Driver
from .measure import Part
from .trainer import OPTIONS, SENT, VERSIONS, Trainer, buckets, counting

PACKAGES = ("sglang", "torch", "megatron-core", "megatron-bridge")
GROUP = "weights"
_BUCKETS = {"distributed": 512 << 20, "distributed-64": 64 << 20}  # slime's default is the first
PATHS = {
    "distributed": "`update_weights_from_distributed`, buckets of 512 MiB",
    "distributed-64": "the same, buckets of 64 MiB",
    "disk": "`update_weights_from_disk`",
    "ours": "ours, `--custom-weight-loader`",
}
__all__ = ["PACKAGES", "PATHS", "engine_part", "engine_processes", "prepare", "train_part"]


def engine_processes(sizes: GenSizes) -> int:
    return sizes.world


class Engine(Rank):
    """A rank that also answers the requests of SGLang's own paths, and `done`, which ends a turn."""

    def __init__(self, folder: Path, sizes: GenSizes, rank: int, groups: Path) -> None:
        from sglang.srt.managers.tp_worker import BaseTpWorker

        super().__init__(folder, sizes, rank, groups, load=False)
        worker = self.manager.tp_worker
        worker.init_weights_update_group = partial(BaseTpWorker.init_weights_update_group, worker)
        self.read = 0  # bytes that the last update from disk handed to the model's loader
        self.http: HTTPServer | None = None
        if rank == 0:
            self.http = HTTPServer(("127.0.0.1", 0), _handler(self))
        self._use_model_config(folder)

    def _use_model_config(self, folder: Path) -> None:
        """What `update_weights_from_disk` asks of a model runner."""
        from dataclasses import replace

        from sglang.srt.configs.model_config import ModelConfig

        from mcore_reshard.validation.engine import sglang_engine

        arguments = sglang_engine._server_args(folder, self.sizes, self.sizes.tp, 1)
        runner = self.manager.tp_worker.model_runner
        runner.weight_updater = replace(
            runner.weight_updater,
            model_config=ModelConfig.from_server_args(arguments),
            update_model_fields=lambda model, **_: None,
        )

    def handle(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        from sglang.srt.managers import io_struct

        records = {
            "init_weights_update_group": io_struct.InitWeightsUpdateGroupReqInput,
            "update_weights_from_distributed": io_struct.UpdateWeightsFromDistributedReqInput,
            "update_weights_from_disk": io_struct.UpdateWeightFromDiskReqInput,
        }
        self.last_route = route
        if route == "done":
            return {"success": True, "message": ""}
        if route not in records:
            return super().handle(route, body)
        with counting(self.model) as handed:
            answer = getattr(self.manager, route)(records[route](**body))
        self.read = sum(handed) if route == "update_weights_from_disk" else 0
        return {"success": answer.success, "message": answer.message}

    def turn(self) -> tuple[int, int]:
        """Answer requests, in step on all ranks, until `done`. Returns the bytes of files written and handed over."""
        self.last_route, self.read = "", 0
        while self.last_route != "done":
            if self.http is not None:
                self.http.handle_request()
            else:
                self.handle(*self._share(None))
        return 0, self.read


def engine_part(rank: int, folder: Path, mesh: TrainMesh, sizes: GenSizes) -> Part:
    engine = Engine(folder / "1", sizes, rank, folder / "gen")
    if engine.http is not None:
        (folder / "port").write_text(str(engine.http.server_port))
    from safetensors.torch import load_file

    expected = {}
    for version in VERSIONS:
        load_weights(engine.model, load_file(folder / str(version) / "model.safetensors").items())
        expected[version] = held(engine.model)

    def destroy(version: int) -> None:
        for tensor in local_tensors(engine.model).values():
            poison(tensor)

    def differences(version: int) -> list[str]:
        found = local_tensors(engine.model)
        return [
            name for name, tensor in expected[version].items()
            if not tensor.view(torch.uint8).equal(found[name].view(torch.uint8))
        ]  # fmt: skip

    turns: dict[str, Callable[[], tuple[int, int]]] = dict.fromkeys(PATHS, engine.turn)
    return Part(set_up=turns, run=turns, set_weights=destroy, differences=differences)


def train_part(rank: int, folder: Path, mesh: TrainMesh, sizes: GenSizes) -> Part:
    driver = SglangDriver(Trainer(rank, mesh, folder), sizes)
    nothing = partial(driver.tell, "done")
    return Part(
        set_up={"distributed": driver.join_group, "distributed-64": nothing, "disk": nothing, "ours": driver.connect},
        run={
            **{path: partial(driver.broadcast, nbytes) for path, nbytes in _BUCKETS.items()},
            "disk": driver.through_disk,
            "ours": driver.refit,
        },
        set_weights=driver.trainer.set_weights,
        differences=lambda version: [],
    )


class SglangDriver(Driver):
    """One training rank; the first one also tells SGLang what to do."""

    def __init__(self, trainer: Trainer, sizes: GenSizes) -> None:
        super().__init__(trainer)
        self.sizes = sizes
        self.group: Any = None

    # SGLang's own.

    def join_group(self) -> None:
        from sglang.srt.utils import init_custom_process_group

        if self.trainer.rank == 0:
            host, _, port = free_address().rpartition(":")
            world = 1 + self.sizes.tp
            wait = in_background(
                partial(
                    self.tell, "init_weights_update_group", master_address=host, master_port=int(port), rank_offset=1,
                    world_size=world, group_name=GROUP, backend="gloo",
                )
            )  # fmt: skip
            self.group = init_custom_process_group(
                "gloo", init_method=f"tcp://{host}:{port}", world_size=world, rank=0, group_name=GROUP
            )
            wait()
        self.tell("done")

    def broadcast(self, bucket_bytes: int) -> None:
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        self.tell("begin_weight_update", selector="target")
        for named in buckets(self.trainer.export(), bucket_bytes):
            if self.trainer.rank == 0:
                told = in_background(
                    partial(
                        self.tell, "update_weights_from_distributed", names=[name for name, _ in named],
                        dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
                        shapes=[[*tensor.shape] for _, tensor in named], group_name=GROUP,
                        load_format="flattened_bucket", selector="target",
                    )
                )  # fmt: skip
                dist.broadcast(FlattenedTensorBucket(named_tensors=named).get_flattened_tensor(), 0, group=self.group)
                told()
            del named
        self.tell("end_weight_update")
        self.tell("done")

    def through_disk(self) -> tuple[int, int]:
        saved = self.trainer.folder / "saved"
        written = self.trainer.save(saved)
        self.tell("update_weights_from_disk", model_path=str(saved), load_format="auto")
        self.tell("done")
        return written, 0

    # Ours.

    def connect(self) -> None:
        address = self.trainer.store_address()
        told = self._send("connect", store=address, **SENT)
        model = self.trainer.model
        self.ours = mr.megatron.connect(
            model.model_chunks, model.bridge, self.trainer.folder / "1", gen=f"tp={self.sizes.tp}", store=address,
            engine="sglang", options=OPTIONS,
        )  # fmt: skip
        told()
        self.tell("done")

    def refit(self) -> None:
        self.version += 1
        told = self._send("refit", version=self.version)
        self.ours.refit(self.version)
        told()
        self.tell("done")

    def _send(self, command: str, **arguments: Any) -> Callable[[], Any]:
        if self.trainer.rank != 0:
            return lambda: None
        return in_background(lambda: send(partial(post, self.url), command, tp=self.sizes.tp, **arguments))
