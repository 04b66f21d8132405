"""Golden against real: refit a real trainer into an engine in real processes, and compare every byte with golden.

One forked process a rank. Training ranks hold a Megatron-Core model built by Megatron-Bridge: with a transport for GPUs
a model on the GPU, of real Transformer Engine modules where it is installed, else one on the CPU. Generation ranks hold
a vLLM model where vLLM is installed, and otherwise the tensors that it would hold. The two worlds have separate process
groups and meet only at the refit. Golden is Megatron-Bridge's export of the same weights, handed over in a file and fed
to the engine's own loader; it shares neither layouts nor transport with the refit.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mcore_reshard.kernels.registry import device_of, resolve
from mcore_reshard.live import fetch_plan, plan_refit, publish_plan
from mcore_reshard.planner.families import catalogue_from_config
from mcore_reshard.planner.megatron import ExpertsModule, MegatronBuild
from mcore_reshard.planner.mesh import GenMesh, TrainMesh, format_mesh
from mcore_reshard.planner.parameters import Catalogue, Role
from mcore_reshard.planner.plan import Plan, Policy
from mcore_reshard.planner.planning import make_plan
from mcore_reshard.planner.proof import ProofError, prove
from mcore_reshard.planner.scheduling import schedule_of
from mcore_reshard.refit import GenerationEndpoint, RefitReport, TrainEndpoint

from . import te_standin, tiny, trainer, vllm_engine
from .bridge_limits import bridge_limits
from .engine_slices import GenSizes, StandInEngine, poison
from .processes import run_processes
from .report import ParameterResult, RefitResult, ValidationReport, compare

DEFAULT_TIMEOUT_S = 60.0
LARGEST_MODEL_BYTES = 2 << 30  # every rank of the check holds a golden copy on this one machine

CHANGES = ("payload 1 loaded", "payload 2 loaded in place", "an SGD step")


class ValidationError(RuntimeError):
    """The validation could not be run; this says nothing about the plan."""


def validate(
    config: Mapping[str, Any],
    train: TrainMesh,
    gen: GenMesh,
    *,
    model: str = "",
    policy: Policy = "exact",
    transport: str = "gloo",
    refits: int = 3,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    engine: str = "auto",
    experts: ExpertsModule = "grouped",
    plan: Plan | None = None,
    unknown: Iterable[Role] = (),
) -> ValidationReport:
    """Refit the model of `config` from `train` to `gen` ranks `refits` times, changing all weights in between.

    The first two sets of weights together give every element of the model an identity of its own, so an element out of
    place cannot go unseen; the third comes from an optimizer step. `engine` is "vllm", "slices" (plain slicing code,
    itself tested against vLLM) or "auto". `experts` selects TEGroupedMLP or SequentialMLP. `plan` is used instead of
    making one; it must be for the same meshes. `unknown` names roles to treat as if no layout rule knew them.

    Raises ConfigError or MeshError for what cannot be planned, ProofError for an unsound plan and ValidationError where
    the check cannot be run. Differences are not errors: they are in the report.
    """
    # Counting GPUs through the driver would spoil this process for forking.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    config = dict(config)
    known = catalogue_from_config(config)
    catalogue = _forgetting(known, frozenset(unknown))
    build = MegatronBuild(experts=experts)
    planned_here = plan is None
    plan = plan or make_plan(catalogue, train, gen, model=model, policy=policy, build=build)
    proof = prove(plan)
    if not proof.ok:
        raise ProofError(proof)
    if catalogue.nbytes > LARGEST_MODEL_BYTES:
        small = f"tiny-{config['model_type'].replace('_', '-')}"
        raise ValidationError(
            f"the model has {catalogue.nbytes / 1e9:.0f} GB, more than the {LARGEST_MODEL_BYTES >> 30} GiB that a check"
            f" on one machine is made for: validate a small config of the same family, such as {small}"
        )
    if limits := bridge_limits(known, train, experts):
        raise ValidationError(
            f"Megatron-Bridge does not make this model, so nothing can be compared: {'; '.join(limits)}"
        )
    device = device_of(transport)
    _check_gpus(resolve(transport, device).name, device, train.world + gen.world)
    kind = _engine_kind(engine, device)
    trainer.prepare(on_cuda=device == "cuda")
    if kind == "vllm":
        vllm_engine.prepare()
    versions = range(1, refits + 1)
    with tempfile.TemporaryDirectory(prefix="mcore-reshard-validate-") as name:
        folder = Path(name)
        for version in {1, *versions} & {1, 2}:
            tiny.write_checkpoint(config, folder / f"payload{version}", version)
        live = planned_here and not unknown
        job = _Job(config, plan, folder, transport, device, kind, experts, refits, timeout_s, live)
        ranks = run_processes(job.ranks + 1, _run_process, (job,), timeout_s=timeout_s * (refits + 2))[:-1]
    return ValidationReport(
        model=model or str(config["model_type"]),
        train=format_mesh(train),
        gen=format_mesh(gen),
        policy=policy,
        transport=ranks[0][0][0].transport,
        engine=f"vllm {importlib.metadata.version('vllm')}" if kind == "vllm" else "plain slices of the golden tensors",
        source=_source_versions(),
        digest=plan.digest,
        refits=tuple(_refit_result(ranks, train.world, number) for number in range(refits)),
    )


def _refit_result(ranks: list[Any], train_world: int, number: int) -> RefitResult:
    reports = [reports[number] for reports, _ in ranks]
    return RefitResult(
        version=number + 1,
        change=CHANGES[min(number, 2)],
        seconds=max(report.seconds for report in reports),
        bulk_bytes=sum(report.nbytes for report in reports[train_world:]),
        misc_bytes=sum(report.misc_bytes for report in reports[train_world:]),
        parameters=tuple(result for _, results in ranks[train_world:] for result in results[number]),
    )


def _check_gpus(transport: str, device: str, ranks: int) -> None:
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if transport == "nccl" and ranks > gpus:
        raise ValidationError(
            f"NCCL needs a GPU for each rank: {ranks} ranks, {gpus} here; --transport direct lets ranks share GPUs"
        )


def _engine_kind(engine: str, device: str) -> str:
    """What holds the destination tensors: "vllm", whose model is built on the CPU, or "slices"."""
    obstacle = None
    if importlib.util.find_spec("vllm") is None:
        obstacle = "vLLM is not installed: pip install 'mcore-reshard[vllm]', or validate against plain slices"
    elif device != "cpu":
        obstacle = "vLLM's model is built on the CPU here: use --transport gloo, or validate against plain slices"
    if engine == "vllm" and obstacle:
        raise ValidationError(obstacle)
    return "vllm" if engine in {"auto", "vllm"} and not obstacle else "slices"


def _source_versions() -> str:
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("megatron-core", "megatron-bridge")]
    if te_standin.is_real():
        return f"{', '.join(versions)}, Transformer Engine {importlib.metadata.version('transformer-engine')} on CUDA"
    return f"{', '.join(versions)}, a parameters-only stand-in for Transformer Engine on the CPU"


def _forgetting(catalogue: Catalogue, roles: frozenset[Role]) -> Catalogue:
    groups = tuple(replace(g, role=Role.UNKNOWN) if g.role in roles else g for g in catalogue.groups)
    return replace(catalogue, groups=groups)


# --- what runs in the processes


@dataclass(frozen=True, slots=True)
class _Job:
    config: dict[str, Any]
    plan: Plan
    folder: Path
    transport: str
    device: str  # torch device type of the tensors that the transport moves
    engine: str
    experts: ExpertsModule
    refits: int
    timeout_s: float
    live: bool  # the plan must be the one that the live model gives

    @property
    def ranks(self) -> int:
        return self.plan.train.world + self.plan.gen.world

    @property
    def store_file(self) -> Path:
        return self.folder / "store-address"

    def golden_file(self, version: int) -> Path:
        return self.folder / f"golden{version}.safetensors"


_Results = tuple[list[RefitReport], list[list[ParameterResult]]]


def _run_process(index: int, job: _Job) -> _Results:
    """The ranks, training first, and after them the process that hosts the store where they meet.

    The store has a thread, and forking beside threads is not safe: nothing of it may exist before the fork.
    """
    if index == job.ranks:
        _host_store(job)
        return [], []
    address = _store_address(job)
    train_world = job.plan.train.world
    results = _train(index, job, address) if index < train_world else _generate(index - train_world, job, address)
    (job.folder / f"done{index}").touch()
    return results


def _host_store(job: _Job) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    partial = job.store_file.with_suffix(".partial")
    partial.write_text(f"127.0.0.1:{store.port}")
    partial.replace(job.store_file)
    while len(list(job.folder.glob("done*"))) < job.ranks:  # ended with all others when one of them fails
        time.sleep(0.02)


def _store_address(job: _Job) -> str:
    deadline = time.monotonic() + job.timeout_s
    while not job.store_file.exists():
        if time.monotonic() > deadline:
            raise ValidationError(f"the store did not start within {job.timeout_s:g} s")
        time.sleep(0.01)
    return job.store_file.read_text()


def _join_world(job: _Job, world: str, rank: int, size: int) -> None:
    """The world's own default process group, as a trainer or an engine would have it."""
    store = dist.FileStore(str(job.folder / f"{world}.store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=job.timeout_s))


def _train(rank: int, job: _Job, store: str) -> _Results:
    mesh, device = job.plan.train, _device(job, rank)
    os.environ["MEGATRON_CONFIG_LOCK_DIR"] = str(job.folder / f"locks{rank}")  # else ranks queue for the config
    _join_world(job, "train", rank, mesh.world)
    model = trainer.build_trainer(
        job.folder / "payload1",
        mesh,
        grouped_experts=job.experts == "grouped",
        vocab_multiple=_vocab_multiple(job),
    )
    if job.live:
        _check_live_plan(job, model)
    if rank == 0:
        publish_plan(job.plan, store)
    schedule = schedule_of(job.plan, "train", rank)
    source = trainer.Source(model, device)
    endpoint = TrainEndpoint(
        schedule,
        lambda: source.tensors,
        store=store,
        export=model.export,
        transport=job.transport,
        timeout_s=job.timeout_s,
    )
    endpoint.prepare()
    reports = []
    for version in range(1, job.refits + 1):
        if version == 2:
            model.load(job.folder / "payload2")
        elif version > 2:
            model.step()
        source.refresh()
        _write_golden(job.golden_file(version), model.export(), keep=rank == 0)
        reports.append(endpoint.refit(version))
    endpoint.close()
    return reports, []


def _device(job: _Job, index: int) -> torch.device:
    """Ranks take the machine's GPUs in turn; several may share one."""
    if job.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _check_live_plan(job: _Job, model: trainer.Trainer) -> None:
    """What the model itself says of its mesh and its build must lead to the plan that was made from the config."""
    live = plan_refit(job.config, model.model_chunks, job.plan.gen, model=job.plan.model, policy=job.plan.policy)
    if live.digest != job.plan.digest:
        raise ValidationError(f"the live model gives plan {live.digest}, its config and mesh {job.plan.digest}")


def _vocab_multiple(job: _Job) -> int | None:
    """The divisor that makes Megatron pad to what the plan's embedding says; None where it does not pad."""
    plan = job.plan
    embedding = next(i for i, group in enumerate(plan.groups) if group.role in {Role.EMBEDDING, Role.UNKNOWN})
    for bundle in plan.bundles:
        if bundle.group == embedding:
            padded = len(plan.templates[bundle.template].src.pieces) * _rows(plan, bundle.template)
            return padded // plan.train.tp if padded != plan.groups[embedding].shape[0] else None
    return None


def _rows(plan: Plan, template: int) -> int:
    return next(p.tensor.shape[0] for pieces in plan.templates[template].src.pieces for p in pieces)


def _write_golden(file: Path, exported: Iterable[tuple[str, torch.Tensor]], keep: bool) -> None:
    """Every training rank takes part in the export; one writes it down, whole or not at all."""
    from safetensors.torch import save_file

    tensors = {}
    for name, tensor in exported:
        if keep:
            tensors[name] = tensor.detach().cpu().contiguous().clone()
    if keep:
        save_file(tensors, file.with_suffix(".partial"))
        file.with_suffix(".partial").replace(file)


class _Engine(Protocol):
    """What holds a generation rank's tensors: a vLLM model, or the stand-in."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Any: ...


class _VllmEngine:
    def __init__(self, job: _Job, gen_rank: int) -> None:
        from mcore_reshard.engines import vllm

        self._vllm = vllm
        self._model = vllm_engine.build_engine(job.folder / "payload1", _sizes(job.plan.gen), gen_rank)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._vllm.local_tensors(self._model)

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._vllm.load_weights(self._model, named_tensors)


def _sizes(mesh: GenMesh) -> GenSizes:
    return GenSizes(mesh.tp, mesh.pp, mesh.dp, mesh.ep)


def _generate(rank: int, job: _Job, store: str) -> _Results:
    engine: _Engine = (
        _VllmEngine(job, rank)
        if job.engine == "vllm"
        else StandInEngine(job.config, _sizes(job.plan.gen), rank, _device(job, job.plan.train.world + rank))
    )
    schedule = schedule_of(fetch_plan(store, timeout_s=job.timeout_s), "gen", rank)
    endpoint = GenerationEndpoint(
        schedule,
        engine.tensors,
        store=store,
        load_weights=engine.load_weights,
        transport=job.transport,
        timeout_s=job.timeout_s,
    )
    endpoint.prepare()
    bulk = {tensor.name for tensor in schedule.tensors}
    reports, results = [], []
    for version in range(1, job.refits + 1):
        for tensor in engine.tensors.values():
            poison(tensor)
        reports.append(endpoint.refit(version))
        results.append(
            _compare_with_golden(job, rank, version, engine, lambda name: "bulk" if name in bulk else "misc")
        )
    endpoint.close()
    return reports, results


def _compare_with_golden(
    job: _Job, rank: int, version: int, engine: _Engine, route: Callable[[str], str]
) -> list[ParameterResult]:
    """Load golden into the same engine, compare, and leave golden in place: the next refit must overwrite all of it."""
    from safetensors.torch import load_file

    got = {name: tensor.detach().clone() for name, tensor in engine.tensors.items()}
    for tensor in engine.tensors.values():
        poison(tensor)
    engine.load_weights(load_file(job.golden_file(version)).items())
    return [
        compare(name, rank, route(name), got.get(name), engine.tensors.get(name))
        for name in sorted({*got, *engine.tensors})
    ]
