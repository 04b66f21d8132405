"""The processes of a validation: training ranks, generation ranks, and one that hosts their store."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from mcore_reshard.engines.vllm import model as vllm_model
from mcore_reshard.engines.vllm import refined_scales as vllm_refined_scales
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.seal import TOKEN_VARIABLE
from mcore_reshard.kernels.rendezvous.server import StoreServer
from mcore_reshard.planner.layout.engines import engine_named
from mcore_reshard.planner.layout.megatron import ExpertsModule
from mcore_reshard.planner.layout.mesh import GenMesh
from mcore_reshard.planner.model.parameters import Role
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planning import PlanRequest, TracedRequest
from mcore_reshard.session.endpoints import GenerationEndpoint, RefitReport, TrainEndpoint
from mcore_reshard.session.part import RankOfPlan
from mcore_reshard.session.plan_exchange import fetch_plan, publish_plan
from mcore_reshard.trainers.megatron.plan_refit import plan_refit
from mcore_reshard.trainers.quantized_export import Pairs
from mcore_reshard.validation.engine import vllm_engine
from mcore_reshard.validation.engine.slices import GenSizes, StandInEngine, poison
from mcore_reshard.validation.trainer import build as trainer

from .errors import ValidationError
from .precision import SidePrecisions, quantized_by_engine
from .report import ParameterResult, compare

_DEFAULT_OPTIONS = Options(transport="gloo")


@dataclass(frozen=True, slots=True)
class ValidationRequest:
    """A model and two meshes, as they are read for a plan, and how to refit between them on this machine."""

    planning: PlanRequest | TracedRequest
    plan: Plan | None = None  # used instead of making one; it must be for the same meshes
    options: Options = _DEFAULT_OPTIONS
    engine: str = "auto"  # "vllm", "slices" (plain slicing code, tested against vLLM), or vLLM where it is installed
    refits: int = 3
    experts: ExpertsModule = "grouped"  # TEGroupedMLP, or "sequential": SequentialMLP
    unknown: frozenset[Role] = frozenset()  # roles to treat as if no layout rule knew them


@dataclass(frozen=True, slots=True)
class Job:
    """A validation as all its processes see it."""

    request: ValidationRequest
    plan: Plan
    precisions: SidePrecisions
    pairs: Pairs
    folder: Path
    device: str  # torch device type of the tensors that the transport moves
    engine: str  # "vllm" or "slices"
    store_socket: socket.socket  # listens since before the fork: no rank has to wait for the store's process
    token: str | None = None  # of this run's own, where none is given: others on this machine stay out

    @property
    def ranks(self) -> int:
        return self.plan.train.world + self.plan.gen.world

    @property
    def engine_folder(self) -> Path:
        return self.folder / "engine"

    def payload_folder(self, version: int) -> Path:
        """The checkpoint that the trainer loads before refit 1 or 2."""
        return self.folder / f"payload{version}"

    def golden_file(self, version: int) -> Path:
        return self.folder / f"golden{version}.safetensors"


Results = tuple[list[RefitReport], list[list[ParameterResult]]]


def run_process(index: int, job: Job) -> Results:
    """Run one process: a training rank, then generation ranks, and last the process that hosts their store."""
    if job.token is not None:
        os.environ[TOKEN_VARIABLE] = job.token
    port = job.store_socket.getsockname()[1]
    if index == job.ranks:
        asyncio.run(_serve_store(job))
        return [], []
    address, gen_rank = f"127.0.0.1:{port}", index - job.plan.train.world
    results = _train(index, job, address) if gen_rank < 0 else _generate(gen_rank, job, address)
    (job.folder / f"done{index}").touch()
    return results


async def _serve_store(job: Job) -> None:
    serving = asyncio.ensure_future(StoreServer().serve(job.store_socket))
    while len(list(job.folder.glob("done*"))) < job.ranks:  # the launcher ends this process when a rank fails
        await asyncio.sleep(0.02)
    serving.cancel()


def _train(rank: int, job: Job, store: str) -> Results:
    mesh, device = job.plan.train, _device(job, rank)
    os.environ["MEGATRON_CONFIG_LOCK_DIR"] = str(job.folder / f"locks{rank}")  # else ranks queue for the config
    world_store = dist.FileStore(str(job.folder / "train.store"), mesh.world)
    timeout = timedelta(seconds=job.request.options.timeout_s)
    dist.init_process_group("gloo", store=world_store, rank=rank, world_size=mesh.world, timeout=timeout)
    model = trainer.build_trainer(
        job.payload_folder(1),
        mesh,
        grouped_experts=job.request.experts == "grouped",
        vocab_multiple=_vocab_multiple(job),
        fp8_block=job.precisions.trainer_block,
        pairs=job.pairs,
    )
    if isinstance(job.request.planning, PlanRequest) and job.request.plan is None and not job.request.unknown:
        live = plan_refit(
            job.precisions.engine_config,
            model.model_chunks,
            job.plan.gen,
            model=job.plan.model,
            policy=job.plan.policy,
            gen_dtype=job.precisions.gen_dtype,
        )
        if live.digest != job.plan.digest:
            raise ValidationError(f"the live model gives plan {live.digest}, its config and mesh {job.plan.digest}")
    if rank == 0:
        publish_plan(job.plan, store, job.request.options)
    tensors = model.tensors_on(device)
    endpoint = TrainEndpoint(
        RankOfPlan(job.plan, "train", rank),
        lambda: tensors,
        store=store,
        export=model.export,
        options=job.request.options,
    )
    endpoint.prepare()
    reports = []
    for version in range(1, job.request.refits + 1):
        if version == 2:
            model.load(job.payload_folder(2))
        elif version > 2:
            model.step()
        tensors = model.tensors_on(device)  # copied anew on a GPU: not while a refit reads them
        _write_golden(job, rank, model, version)
        reports.append(endpoint.refit(version))
    endpoint.close()
    return reports, []


def _write_golden(job: Job, rank: int, model: trainer.Trainer, version: int) -> None:
    """Every rank takes part in the export; rank 0 writes it down, whole or not at all."""
    from safetensors.torch import save_file

    golden = model.export_unquantized() if job.precisions.quantized_on_the_way else model.export()
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in golden if rank == 0}
    if rank == 0:
        partial_file = job.golden_file(version).with_suffix(".partial")
        save_file(tensors, partial_file)
        partial_file.replace(job.golden_file(version))


def _device(job: Job, index: int) -> torch.device:
    """Ranks take the machine's GPUs in turn; several may share one."""
    if job.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _vocab_multiple(job: Job) -> int | None:
    """The divisor with which Megatron pads the vocabulary as the plan says; None where it does not pad.

    A plan from traces was made of models without a divisor, which pad as this trainer does.
    """
    plan = job.plan
    if isinstance(job.request.planning, TracedRequest):
        return None
    embedding = next(i for i, group in enumerate(plan.groups) if group.role in {Role.EMBEDDING, Role.UNKNOWN})
    pattern = next((transfers.pattern for transfers in plan.transfer_groups if transfers.group == embedding), None)
    if pattern is None:
        return None
    parts = plan.patterns[pattern].src.pieces
    rows = len(parts) * next(piece.tensor.shape[0] for pieces in parts for piece in pieces)
    return rows // plan.train.tp if rows != plan.groups[embedding].shape[0] else None


class _VllmEngine:
    """A vLLM model with the methods of `StandInEngine`."""

    def __init__(self, job: Job, gen_rank: int) -> None:
        self._model = vllm_engine.build_engine(job.engine_folder, gen_sizes(job.plan.gen), gen_rank)
        self.load_weights = partial(vllm_model.load_weights, self._model)
        # Tensors that attention derives are left out: they take kernels, and nothing here reads them.
        self.after_direct_writes = partial(vllm_refined_scales.refine, self._model)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return vllm_model.local_tensors(self._model)

    @property
    def loaded(self) -> Mapping[str, torch.Tensor]:
        return vllm_model.loaded_tensors(self._model)


_Engine = StandInEngine | _VllmEngine


def gen_sizes(mesh: GenMesh) -> GenSizes:
    return GenSizes(mesh.tp, mesh.pp, mesh.dp, mesh.ep, mesh.layers)


def _generate(rank: int, job: Job, store: str) -> Results:
    engine: _Engine
    if job.engine == "vllm":
        engine = _VllmEngine(job, rank)
    else:
        device = _device(job, job.plan.train.world + rank)
        engine = StandInEngine(job.precisions.engine_config, gen_sizes(job.plan.gen), rank, device)
    schedule = schedule_of(fetch_plan(store, job.request.options), "gen", rank)
    endpoint = GenerationEndpoint(
        schedule,
        engine.tensors,
        store=store,
        load_weights=engine.load_weights,
        after_direct_writes=engine.after_direct_writes,
        options=job.request.options,
    )
    endpoint.prepare()
    repeated_tensor = engine_named(job.plan.engine).repeated_tensor
    bulk = {repeated_tensor(tensor.name) or tensor.name for tensor in schedule.tensors}
    reports, results = [], []
    for version in range(1, job.request.refits + 1):
        for tensor in engine.loaded.values():
            poison(tensor)
        reports.append(endpoint.refit(version))
        results.append(_compare_with_golden(job, rank, version, engine, bulk))
    endpoint.close()
    return reports, results


def _compare_with_golden(
    job: Job, rank: int, version: int, engine: _Engine, bulk: Collection[str]
) -> list[ParameterResult]:
    """Load golden into the same engine, compare, and leave golden in place: the next refit must overwrite all of it."""
    from safetensors.torch import load_file

    refitted = {name: tensor.detach().clone() for name, tensor in engine.loaded.items()}
    for tensor in engine.loaded.values():
        poison(tensor)
    golden: Iterable[tuple[str, torch.Tensor]] = load_file(job.golden_file(version)).items()
    if job.precisions.quantized_on_the_way:
        device = next(iter(engine.tensors.values())).device
        golden = quantized_by_engine(golden, job.pairs, device, by_vllm=job.engine == "vllm")
    engine.load_weights(golden)
    names, expected = sorted({*refitted, *engine.loaded}), engine.loaded
    return [compare(n, rank, "bulk" if n in bulk else "misc", refitted.get(n), expected.get(n)) for n in names]
