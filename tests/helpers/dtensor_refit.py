"""Whole refits out of sharded transformers models: FSDP2 training processes, engine processes, every byte compared."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from helpers.dtensor_trainer import join, load, refill, shard
from helpers.front_door import free_address

import mcore_reshard as mr
from mcore_reshard.planner.layout.condense import CondensedTrace, ParameterNames, condense
from mcore_reshard.planner.layout.traces import HfTensor, RankTrace
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.session.endpoints import GenerationEndpoint
from mcore_reshard.session.plan_exchange import fetch_plan
from mcore_reshard.session.trace_exchange import answer_request
from mcore_reshard.validation import tiny
from mcore_reshard.validation.engine.slices import GenSizes, poison
from mcore_reshard.validation.processes import run_processes

STEPS = 2
Checkpoint = Mapping[str, HfTensor]


class Engine(Protocol):
    """One generation rank: what a refit writes, and a loader of its own."""

    tensors: dict[str, torch.Tensor]

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Any: ...

    def trace(self, checkpoint: Checkpoint) -> RankTrace: ...


OpenEngine = Callable[[Path, GenSizes, int], Engine]  # of a folder with a config.json, sizes and a rank


@dataclass(frozen=True)
class Case:
    family: str
    kind: str
    world: int
    sizes: GenSizes
    dtype: torch.dtype = torch.bfloat16
    frozen: str = ""  # names of parameters that are not trained, as a regular expression; then trainable_only

    def __str__(self) -> str:
        gen = self.sizes
        return f"{self.family} {self.kind} on {self.world} to tp{gen.tp} pp{gen.pp} ep{gen.ep}"


def assert_every_byte_arrives(case: Case, open_engine: OpenEngine, folder: Path) -> None:
    """Refit twice into poisoned engines; compare with what their own loaders make of the checkpoints."""
    for step in range(1, STEPS + 1):
        tiny.write_checkpoint(tiny.TINY[case.family], folder / str(step), step)
    given = (case, open_engine, folder, free_address())
    outcomes = run_processes(case.world + case.sizes.world, _refit, given, timeout_s=180)
    assert outcomes[case.world :] == [[]] * case.sizes.world
    bulk, misc = zip(*outcomes[: case.world], strict=True)
    assert sum(bulk) > 0 and sum(misc) == 0


def _refit(index: int, case: Case, open_engine: OpenEngine, folder: Path, address: str) -> Any:
    if index < case.world:
        return _train(index, case, folder, address)
    rank = index - case.world
    return _generate(open_engine(folder / "1", case.sizes, rank), rank, case, address)


def _train(rank: int, case: Case, folder: Path, address: str) -> tuple[int, int]:
    """Refit every step; returns the bytes by bulk and by misc of the last one."""
    join(rank, case.world, folder)
    model, sizes = load(folder / "1", case.dtype), case.sizes
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not case.frozen or not re.search(case.frozen, name))
    model = shard(model, case.kind)
    gen = mr.GenMesh(tp=sizes.tp, pp=sizes.pp, dp=sizes.dp, ep=sizes.ep)
    options = mr.Options(timeout_s=20.0)
    with mr.dtensor.connect(
        model,
        folder / "1",
        gen=gen,
        store=address,
        trainable_only=bool(case.frozen),
        connect_timeout_s=90.0,
        options=options,
    ) as trainer:
        for step in range(1, STEPS + 1):
            refill(model, load(folder / str(step), case.dtype).state_dict())
            report = trainer.refit(step)
            assert report.moved == ("trainable parameters" if case.frozen and step > 1 else "everything")
    return report.nbytes, report.misc_bytes


def _generate(engine: Engine, rank: int, case: Case, address: str) -> list[str]:
    """Names of tensors that differ from what the engine's loader makes of the checkpoint, in the dtypes that the trainer holds."""
    held: dict[str, HfTensor] = {}

    def trace(checkpoint: Checkpoint) -> CondensedTrace:
        held.update(checkpoint)
        return condense(engine.trace(checkpoint), ParameterNames(checkpoint), is_trainer=False)

    answer_request(rank, trace, address, mr.Options(timeout_s=20.0), 90.0)
    schedule = schedule_of(fetch_plan(address, mr.Options(timeout_s=90.0)), "gen", rank)
    endpoint = GenerationEndpoint(
        schedule, engine.tensors, store=address, load_weights=engine.load_weights, options=mr.Options(timeout_s=20.0)
    )
    endpoint.prepare(timeout_s=90.0)
    wrong = []
    for step in range(1, STEPS + 1):
        if step == 1 or not case.frozen:
            refill_with_poison(engine)
        endpoint.refit(step)
        arrived = {name: tensor.clone() for name, tensor in engine.tensors.items()}
        refill_with_poison(engine)
        first, golden = (dict(tiny.payload(tiny.checkpoint_shapes(tiny.TINY[case.family]), of)) for of in (1, step))
        golden |= {name: tensor for name, tensor in first.items() if case.frozen and re.search(case.frozen, name)}
        engine.load_weights((name, tensor.to(getattr(torch, held[name].dtype))) for name, tensor in golden.items())
        wrong += [f"{step}: {name}" for name, tensor in engine.tensors.items() if not tensor.equal(arrived[name])]
    endpoint.close()
    return wrong


def refill_with_poison(engine: Engine) -> None:
    for tensor in engine.tensors.values():
        poison(tensor)
