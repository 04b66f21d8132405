"""Refits through SGLang's own weight updates: `--custom-weight-loader mcore_reshard.integrations.sglang.load`."""

from __future__ import annotations

import importlib.util
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import sglang_server
from helpers.assembled import differences
from helpers.front_door import free_address
from helpers.sglang_server import Rank, held, in_background, post
from safetensors.torch import load_file

import mcore_reshard as mr
from mcore_reshard.engines.sglang.model import load_weights, local_tensors
from mcore_reshard.integrations.sglang import send
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.validation.engine.slices import GenSizes, poison
from mcore_reshard.validation.processes import run_processes
from mcore_reshard.validation.tiny import tiny_config, write_checkpoint

INSTALLED = importlib.util.find_spec("sglang") is not None
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not INSTALLED, reason="needs SGLang: run `make test-sglang`, which installs it for a CPU"),
]
OPTIONS = Options(transport="gloo", timeout_s=60)
SENT = {"transport": "gloo", "timeout_s": 60}
SESSION = ["begin_weight_update", "update_weights_from_tensor", "end_weight_update"]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """SGLang and Megatron, once, so that forked ranks find them."""
    from mcore_reshard.validation.trainer.build import prepare

    sglang_server.prepare()
    prepare()


def train(rank: int, folder: Path, mesh: TrainMesh, sizes: GenSizes, store: str, poison_one: bool = False) -> Any:
    """A trainer whose first rank also tells the engine, as a driver would."""
    from mcore_reshard.validation.trainer.build import build_trainer

    os.environ["MEGATRON_CONFIG_LOCK_DIR"] = str(folder / f"locks{rank}")
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store")), rank=rank, world_size=mesh.world)
    model = build_trainer(folder / "1", mesh)
    tell = partial(in_background_send, folder, sizes.tp) if rank == 0 else lambda *_, **__: lambda: None
    told = tell("connect", store=store, **SENT)
    trainer = mr.megatron.connect(
        model.model_chunks, model.bridge, folder / "1", gen=f"tp={sizes.tp},ep={sizes.ep}", store=store,
        engine="sglang", options=OPTIONS,
    )  # fmt: skip
    told()
    misc = 0
    for version in (1, 2):
        model.load(folder / str(version))
        told = tell("refit", version=version)
        misc += trainer.refit(version).misc_bytes
        told()
        if rank == 0:
            post(url_of(folder), "flush_cache", {})  # the engine writes down what it holds
        dist.barrier()
    told = tell("close")
    trainer.close()
    told()
    (folder / f"done{rank}").touch()
    return misc


def in_background_send(folder: Path, tp: int, command: str, **arguments: Any) -> Any:
    return in_background(lambda: send(partial(post, url_of(folder)), command, tp=tp, **arguments))


def url_of(folder: Path) -> str:
    while not (folder / "port").exists():  # run_processes ends this process when another one fails
        time.sleep(0.02)
    return f"http://127.0.0.1:{(folder / 'port').read_text()}"


def generate(rank: int, folder: Path, sizes: GenSizes, ranks: int) -> tuple[list[Any], list[str], Any]:
    """Names of tensors that differ from what SGLang's loader makes of each version; the routes; the weight versions."""
    engine = Rank(folder / "1", sizes, rank, folder / "gen", load=False)
    snapshots: list[dict[str, torch.Tensor]] = []
    handle = engine.handle

    def handle_and_look(route: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = handle(route, body)
        if route == "flush_cache":
            snapshots.append(held(engine.model))
            for tensor in local_tensors(engine.model).values():
                poison(tensor)
        return answer

    engine.handle = handle_and_look  # type: ignore[method-assign]
    engine.serve(folder / "port", lambda: len(list(folder.glob("done*"))) == ranks)
    wrong = []
    for version, found in enumerate(snapshots, 1):
        load_weights(engine.model, load_file(folder / str(version) / "model.safetensors").items())
        wrong.append(differences(found, held(engine.model)))
    return wrong, engine.routes, (engine.versions, engine.flushed)


def run_rank(index: int, folder: Path, mesh: TrainMesh, sizes: GenSizes, store: str) -> Any:
    if index < mesh.world:
        return train(index, folder, mesh, sizes, store)
    return generate(index - mesh.world, folder, sizes, mesh.world)


@pytest.mark.parametrize(
    ("family", "mesh", "sizes"),
    [
        ("qwen3", TrainMesh(tp=2), GenSizes(tp=1)),
        ("llama", TrainMesh(pp=2), GenSizes(tp=2)),
        ("qwen3_moe", TrainMesh(tp=2, ep=2, etp=1), GenSizes(tp=2, ep=2)),
        ("deepseek_v3", TrainMesh(tp=2), GenSizes(tp=2)),
    ],
)
def test_updates_of_sglang_bring_every_byte_that_its_loader_would_load(
    tmp_path: Path, family: str, mesh: TrainMesh, sizes: GenSizes
) -> None:
    for version in (1, 2):
        write_checkpoint(tiny_config(family), tmp_path / str(version), version)
    args = (tmp_path, mesh, sizes, free_address())
    results = run_processes(mesh.world + sizes.tp, run_rank, args, timeout_s=300)
    assert results[: mesh.world] == [0] * mesh.world  # nothing went by misc
    for wrong, routes, (versions, flushed) in results[mesh.world :]:
        assert wrong == [[], []]
        assert routes == [*SESSION, *SESSION, "flush_cache", *SESSION, "flush_cache", *SESSION]
        assert versions == [None, "1", "2", None]
        assert flushed == 2
