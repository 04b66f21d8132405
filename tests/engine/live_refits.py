"""Whole refits of real trainers into vLLM workers, through both front doors, and every byte compared with golden."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from checkpoints import Config, tiny
from helpers.front_door import free_address
from safetensors.torch import load_file, save_file

import mcore_reshard as mr
from mcore_reshard.engines.vllm.worker import RefitWorker
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.planner.model.families import FAMILIES
from mcore_reshard.planner.plan.trace_check import checkpoint_of
from mcore_reshard.validation.engine.slices import GenSizes, poison
from mcore_reshard.validation.processes import run_processes
from mcore_reshard.validation.tiny import payload, write_checkpoint

STEPS, TIMEOUT_S = 3, 240.0
OPTIONS: dict[str, Any] = {"timeout_s": 60.0, "transport": "gloo"}
Tensors = dict[str, torch.Tensor]
Generate = Callable[[int, GenSizes, Path, str], Any]  # rank, sizes, folder, address


def refit(
    name: str, mesh: TrainMesh, sizes: GenSizes, gen: str, folder: Path, generate: Generate, **fields: Any
) -> tuple[list[list[str]], list[Any]]:
    """Run all ranks: the names that went by misc, for each training rank, and what `generate` returned on each other one."""
    from mcore_reshard.validation.trainer.build import prepare

    prepare()
    config = tiny(name, **fields)
    for version in (1, 2):
        write_checkpoint(config, folder / str(version), version)
        if config["model_type"] in FAMILIES and config.get("num_nextn_predict_layers"):
            # transformers, of which the names are, leaves prediction layers out
            tensors = dict(payload(shapes_by_rules(config), version))
            save_file(tensors, folder / str(version) / "model.safetensors", metadata={"format": "pt"})
    arguments = (mesh, sizes, gen, folder, free_address(), generate)
    found = run_processes(mesh.world + sizes.world, _run, arguments, timeout_s=TIMEOUT_S)
    return found[: mesh.world], found[mesh.world :]


def shapes_by_rules(config: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of a published checkpoint, as the planner's rules name them."""
    return {name: tensor.shape for name, tensor in sorted(checkpoint_of(mr.plan(config, "tp=1", "tp=1")).items())}


def _run(index: int, mesh: TrainMesh, sizes: GenSizes, gen: str, folder: Path, address: str, generate: Generate) -> Any:
    if index < mesh.world:
        return _train(index, mesh, gen, folder, address)
    return generate(index - mesh.world, sizes, folder, address)


def _train(rank: int, mesh: TrainMesh, gen: str, folder: Path, address: str) -> list[str]:
    """Refit three versions of the weights, and write down what Megatron-Bridge exports of each; returns the plan's misc."""
    import torch.distributed as dist

    from mcore_reshard.validation.trainer.build import build_trainer

    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store")), rank=rank, world_size=mesh.world)
    model = build_trainer(folder / "1", mesh)
    given = {"gen": gen, "store": address, "connect_timeout_s": TIMEOUT_S, "options": mr.Options(**OPTIONS)}
    with mr.megatron.connect(model.model_chunks, model.bridge, folder / "1", **given) as trainer:
        for step in range(1, STEPS + 1):
            if step == 2:
                model.load(folder / "2")
            elif step > 2:
                model.step()
            golden = {name: tensor.detach().clone().contiguous() for name, tensor in model.export()}
            if rank == 0:
                save_file(golden, folder / f"golden{step}")
            trainer.refit(step)
        return [*trainer.plan.misc_names]


def worker_of(config: Any, model: torch.nn.Module, **runner: Any) -> Any:
    """vLLM's worker as `RefitWorker` sees it; `runner` are attributes of its model runner."""
    worker: Any = RefitWorker()
    worker.vllm_config, worker.get_model, worker.model_runner = config, lambda: model, SimpleNamespace(**runner)
    worker.refit_rank._derive_tensors = lambda: None  # absorbed weights of attention take kernels
    return worker


def refits(
    worker: Any, tensors: Callable[[], Tensors], folder: Path, address: str, load: Callable[[Tensors], Tensors]
) -> Iterator[str]:
    """Connect, refit into poisoned tensors; yields those that differ from what `load` makes of golden."""
    worker.connect_refit(address, connect_timeout_s=TIMEOUT_S, **OPTIONS)
    for step in range(1, STEPS + 1):
        refill(tensors())
        worker.refit(step)
        arrived = {name: tensor.clone() for name, tensor in tensors().items()}
        refill(tensors())
        expected = load(load_file(folder / f"golden{step}"))
        assert arrived.keys() == expected.keys()
        yield from (f"{step}: {name}" for name, tensor in expected.items() if not same_bytes(tensor, arrived[name]))
    worker.close_refit()


def refill(tensors: Tensors) -> None:
    for tensor in tensors.values():
        poison(tensor)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8))
