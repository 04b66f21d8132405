"""Traces of every rank of both meshes, read in this machine's processes: no GPU, no weights, no engine that runs.

Each rank's model is built on the meta device: the trainer's in a world of torch's fake process group, the engine's with
stand-in groups. Ranks that are replicas of each other are traced once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch

from mcore_reshard.planner.layout.condense import CondensedTrace, ParameterNames, condense, untraceable
from mcore_reshard.planner.layout.engines import DEFAULT_ENGINE
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh, format_mesh
from mcore_reshard.planner.layout.trace_file import dump_checkpoint, parse_checkpoint
from mcore_reshard.planner.layout.traced import TracedLayouts, read_layouts
from mcore_reshard.planner.layout.traces import HfTensor, RankTrace
from mcore_reshard.planner.model.precision import Block
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.trace_check import checkpoint_of, trace_faults
from mcore_reshard.tracing.recorder import TraceError
from mcore_reshard.validation.errors import BuildError, ProcessError
from mcore_reshard.validation.processes import run_processes
from mcore_reshard.validation.ranks import gen_sizes
from mcore_reshard.validation.trainer import build as trainer
from mcore_reshard.validation.trainer import te_standin
from mcore_reshard.validation.trainer.checkpoint_names import exported_tensors, use_any_checkpoint, write_config

TIMEOUT_S = 3600.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class OfflineTraces:
    """The tensors of a model's checkpoint, and the trace of every rank of both worlds."""

    family: str
    checkpoint: Mapping[str, HfTensor]
    train: tuple[CondensedTrace, ...]
    gen: tuple[CondensedTrace, ...]
    train_stages: tuple[int, ...]
    gen_stages: tuple[int, ...]

    def layouts(self, engine: str) -> TracedLayouts:
        """Both layouts of the model. Raises TracedLayoutError."""
        stages = self.train_stages, self.gen_stages
        return read_layouts(self.family, self.checkpoint, self.train, self.gen, stages, engine)


def trace_offline(
    config: Mapping[str, Any],
    train: TrainMesh,
    gen: GenMesh,
    engine: str = DEFAULT_ENGINE,
    *,
    engine_config: Mapping[str, Any] | None = None,
    fp8_block: Block | None = None,
) -> OfflineTraces:
    """Trace a model of an HF config on both meshes, with the Megatron-Bridge and the engine that are installed.

    `engine_config` is the engine's, with its quantization_config. `fp8_block`: the trainer keeps its weights in such blocks.
    Raises ImportError where one is not, BuildError where one cannot build the model on its mesh or not load it, and
    ProcessError.
    """
    trainer.prepare()
    _builder_of(engine).prepare()
    with _build_errors("Megatron-Bridge cannot build this model"):
        checkpoint = parse_checkpoint(dump_checkpoint(exported_tensors(config)))  # in the order that a cache gives
    with (
        tempfile.TemporaryDirectory(prefix="mcore-reshard-trace-") as folder,
        _build_errors(
            f"Megatron-Bridge cannot build this model at {format_mesh(train)}, or not load it",
            f"{engine} cannot build this model at {format_mesh(gen)}, or not load it",
        ),
    ):
        configs = Path(folder, "train"), Path(folder, "gen")
        for place, fields in zip(configs, (config, engine_config or config), strict=True):
            place.mkdir()
            write_config(fields, place)
        args = (configs, train, gen, checkpoint, engine, fp8_block)
        sides = run_processes(2, _trace_side, args, timeout_s=TIMEOUT_S)
    stages = [tuple(mesh.coordinate(rank)["pp"] for rank in range(mesh.world)) for mesh in (train, gen)]
    return OfflineTraces(str(config.get("model_type")), checkpoint, sides[0], sides[1], stages[0], stages[1])


def faults_of_engine(plan: Plan, config: Mapping[str, Any]) -> list[str]:
    """What the engine's loader does otherwise than a plan says, of a checkpoint with the plan's FP8 weights and scales.

    `config` is the engine's. Raises as `trace_offline` does.
    """
    _builder_of(plan.engine).prepare()
    what = f"{plan.engine} cannot load this model's FP8 checkpoint at {format_mesh(plan.gen)}"
    with tempfile.TemporaryDirectory(prefix="mcore-reshard-trace-") as folder, _build_errors(what):
        write_config(config, folder)
        (faults,) = run_processes(1, _faults_of_engine, (plan, folder), timeout_s=TIMEOUT_S)
    return faults


def _faults_of_engine(_: int, plan: Plan, folder: str) -> list[str]:
    traces = trace_engine(plan.engine, folder, plan.gen, checkpoint_of(plan), lambda trace: trace)
    return [
        f"gen:{rank}: {fault}" for rank, trace in enumerate(traces) for fault in trace_faults(plan, "gen", rank, trace)
    ]


@contextmanager
def _build_errors(*what: str) -> Iterator[None]:
    """Raise BuildError for a process that raised: `what` failed, by the number of the process, and why."""
    try:
        yield
    except ProcessError as error:
        if not error.reason:  # it was killed, or is late
            raise
        raise BuildError(f"{what[error.index]}: {error.reason}") from error


def _trace_side(
    side: int,
    folders: tuple[Path, Path],
    train: TrainMesh,
    gen: GenMesh,
    checkpoint: Mapping[str, HfTensor],
    engine: str,
    fp8_block: Block | None,
) -> tuple[CondensedTrace, ...]:
    names, folder = ParameterNames(checkpoint), str(folders[side])
    if side == 0:
        return trace_trainer(
            folder, train, checkpoint, lambda trace: condense(trace, names, is_trainer=True), fp8_block
        )
    try:
        return trace_engine(engine, folder, gen, checkpoint, lambda trace: condense(trace, names, is_trainer=False))
    except TraceError as error:
        if isinstance(error.__cause__, AssertionError | IndexError | ValueError):
            raise  # the loader refuses the tensors: it takes them by no other route
        # It takes whole tensors: all of the model goes by misc.
        return (untraceable(checkpoint, "load_weights", str(error)),) * gen.world


def trace_trainer(
    folder: str,
    mesh: TrainMesh,
    checkpoint: Mapping[str, HfTensor],
    condensed: Callable[[RankTrace], _T],
    fp8_block: Block | None = None,
) -> tuple[_T, ...]:
    """What is left of the trace of every rank of a trainer, whose config is in `folder`."""
    from mcore_reshard.trainers.megatron.trace import trace_import

    def trace(rank: int) -> _T:
        with _fake_world(rank, mesh.world):
            bridge, chunks = trainer.build_on_meta(folder, mesh, fp8_block)
            use_any_checkpoint(bridge)
            with te_standin.cpu_as_device():
                tasks = bridge.get_conversion_tasks(chunks)
                return condensed(trace_import(bridge._model_bridge, chunks, tasks, checkpoint))

    def place_of(rank: int) -> tuple[int, ...]:
        place = mesh.coordinate(rank)
        return tuple(place[axis] for axis in ("tp", "pp", "etp", "ep"))

    return _once_each(mesh.world, place_of, trace)


def trace_engine(
    engine: str,
    folder: str,
    mesh: GenMesh,
    checkpoint: Mapping[str, HfTensor],
    condensed: Callable[[RankTrace], _T],
) -> tuple[_T, ...]:
    """What is left of the trace of every rank of an engine, whose config is in `folder`."""
    trace_loading = import_module(f"mcore_reshard.engines.{engine}.trace").trace_loading
    ranks = mesh.world if mesh.ep > 1 else mesh.tp * mesh.pp

    def trace(rank: int) -> _T:
        model = _builder_of(engine).build_engine(folder, gen_sizes(mesh), rank, device="meta")
        return condensed(trace_loading(model, checkpoint))

    return _once_each(mesh.world, lambda rank: (rank % ranks,), trace)


def _once_each(ranks: int, place_of: Callable[[int], tuple[int, ...]], trace: Callable[[int], _T]) -> tuple[_T, ...]:
    """The trace of every rank, where ranks of one place share theirs."""
    traced: dict[tuple[int, ...], _T] = {}
    for rank in range(ranks):
        if place_of(rank) not in traced:
            traced[place_of(rank)] = trace(rank)
    return tuple(traced[place_of(rank)] for rank in range(ranks))


def _builder_of(engine: str) -> Any:
    """The module that builds the engine's real models: validation/engine/<engine>_engine.py."""
    return import_module(f"mcore_reshard.validation.engine.{engine}_engine")


@contextmanager
def _fake_world(rank: int, world: int) -> Iterator[None]:
    """One rank of a world whose other ranks do not exist. Every gather brings this rank's value from all."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def gather_own(values: list[Any], value: Any, group: Any = None) -> None:
        values[:] = [value] * len(values)

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with mock.patch.object(torch.distributed, "all_gather_object", gather_own):
            yield
    finally:
        trainer.forget_groups()
        torch.distributed.destroy_process_group()
