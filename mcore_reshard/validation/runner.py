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
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mcore_reshard.kernels.transports.registry import device_of, resolve
from mcore_reshard.planner.layout.megatron import ExpertsModule, MegatronBuild
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh, format_mesh
from mcore_reshard.planner.model.families import as_published, parameters_from_config
from mcore_reshard.planner.model.parameters import ModelParameters, Role
from mcore_reshard.planner.plan.make_plan import make_plan
from mcore_reshard.planner.plan.plan import Plan, Policy
from mcore_reshard.planner.proof.prove import ProofError, prove
from mcore_reshard.trainers.quantized_export import pairs_by_name
from mcore_reshard.validation import tiny
from mcore_reshard.validation.engine import vllm_engine
from mcore_reshard.validation.engine.slices import StandInEngine
from mcore_reshard.validation.trainer import build as trainer
from mcore_reshard.validation.trainer import te_standin
from mcore_reshard.validation.trainer.bridge_limits import bridge_limits

from .errors import ValidationError
from .precision import Precision, precision_of
from .processes import run_processes
from .ranks import Job, gen_sizes, run_process
from .report import RefitResult, ValidationReport

__all__ = ["ValidationError", "validate"]

DEFAULT_TIMEOUT_S = 60.0
LARGEST_MODEL_BYTES = 2 << 30  # every rank of the check holds a golden copy on this one machine

CHANGES = ("payload 1 loaded", "payload 2 loaded in place", "an SGD step")


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
    train_dtype: str | None = None,
    gen_dtype: str | None = None,
) -> ValidationReport:
    """Refit the model of `config` from `train` to `gen` ranks `refits` times, changing all weights in between.

    The first two sets of weights together give every element of the model an identity of its own, so an element out of
    place cannot go unseen; the third comes from an optimizer step. `engine` is "vllm", "slices" (plain slicing code,
    itself tested against vLLM) or "auto". `experts` selects TEGroupedMLP or SequentialMLP. `plan` is used instead of
    making one; it must be for the same meshes. `unknown` names roles to treat as if no layout rule knew them.
    `train_dtype` and `gen_dtype` are "fp8" where a side keeps its linear layers in block FP8, as the config's
    quantization_config says, and "bf16" or None where it does not.

    Raises ConfigError or MeshError for what cannot be planned, ProofError for an unsound plan and ValidationError where
    the check cannot be run. Differences are not errors: they are in the report.
    """
    # Counting GPUs through the driver would spoil this process for forking.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    config = as_published(config)
    precision = precision_of(config, train_dtype, gen_dtype)
    known = parameters_from_config(precision.engine_config)
    model_parameters = _forgetting(known, frozenset(unknown))
    build = MegatronBuild(experts=experts)
    planned_here = plan is None
    plan = plan or make_plan(
        model_parameters, train, gen, model=model, policy=policy, build=build,
        train_dtype=precision.train_dtype, gen_dtype=precision.gen_dtype,
    )  # fmt: skip
    proof = prove(plan)
    if not proof.ok:
        raise ProofError(proof)
    if model_parameters.nbytes > LARGEST_MODEL_BYTES:
        small = f"tiny-{config['model_type'].replace('_', '-')}"
        raise ValidationError(
            f"the model has {model_parameters.nbytes / 1e9:.0f} GB, more than the {LARGEST_MODEL_BYTES >> 30} GiB that a check"
            f" on one machine is made for: validate a small config of the same family, such as {small}"
        )
    if limits := bridge_limits(known, train, experts):
        raise ValidationError(
            f"Megatron-Bridge does not make this model, so nothing can be compared: {'; '.join(limits)}"
        )
    device = device_of(transport)
    _check_gpus(resolve(transport, device).name, device, train.world + gen.world)
    kind = _engine_kind(engine, device)
    if kind == "slices":
        _check_slices(precision.engine_config, gen)
    trainer.prepare(on_cuda=device == "cuda")
    if kind == "vllm":
        vllm_engine.prepare()
    versions, deadline_s = range(1, refits + 1), timeout_s * (refits + 2)
    with tempfile.TemporaryDirectory(prefix="mcore-reshard-validate-") as name:
        folder = Path(name)
        pairs = pairs_by_name(plan)
        live = planned_here and not unknown
        job = Job(precision, plan, pairs, folder, transport, device, kind, experts, refits, timeout_s, live)
        job.engine_folder.mkdir()
        (job.engine_folder / "config.json").write_text(json.dumps(precision.engine_config))
        if kind == "vllm":
            _check_vllm(job, deadline_s)
        for version in {1, *versions} & {1, 2}:
            blocks = {name: pair.block for name, pair in pairs.items()}
            tiny.write_checkpoint(precision.trainer_config, folder / f"payload{version}", version, blocks)
        ranks = run_processes(job.ranks + 1, run_process, (job,), timeout_s=deadline_s)[:-1]
    return ValidationReport(
        model=model or str(config["model_type"]),
        train=format_mesh(train),
        gen=format_mesh(gen),
        policy=policy,
        transport=ranks[0][0][0].transport,
        engine=f"vllm {importlib.metadata.version('vllm')}" if kind == "vllm" else "plain slices of the golden tensors",
        source=_source_versions(),
        precision=_words(precision),
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


def _check_slices(config: Mapping[str, Any], gen: GenMesh) -> None:
    try:
        for rank in range(gen.world):
            StandInEngine(config, gen_sizes(gen), rank, "meta")
    except ValueError as error:
        raise ValidationError(
            f"the engine would not hold this model in this way: {error}; tiny models with matrices of several blocks are"
            " tiny-qwen3-fp8, tiny-qwen3-moe-fp8 and tiny-deepseek-v3-fp8"
        ) from error


def _check_vllm(job: Job, timeout_s: float) -> None:
    """In a process of its own: vLLM leaves its groups and its environment behind."""
    checkpoint = {}
    for name, shape in tiny.checkpoint_shapes(job.precision.trainer_config).items():
        pair = job.pairs.get(name)
        dtype = torch.float8_e4m3fn if pair else tiny.checkpoint_dtype(name)
        checkpoint[name] = torch.empty(shape, dtype=dtype, device="meta")
        if pair:
            checkpoint[pair.name] = torch.empty(pair.shape, dtype=torch.float32, device="meta")

    def ask(_: int) -> str | None:
        return vllm_engine.refusal(job.engine_folder, gen_sizes(job.plan.gen), checkpoint)

    (refusal,) = run_processes(1, ask, timeout_s=timeout_s)
    if refusal:
        raise ValidationError(
            f"vLLM refuses this model, so nothing can be compared: {refusal.rstrip('.')}; change the config or --gen to what"
            " vLLM holds"
        )


def _engine_kind(engine: str, device: str) -> str:
    """What holds the destination tensors: "vllm", whose model is built on the CPU, or "slices"."""
    unavailable_reason = None
    if importlib.util.find_spec("vllm") is None:
        unavailable_reason = (
            "vLLM is not installed: validate against plain slices, or from a clone: pip install '.[vllm]'"
        )
    elif device != "cpu":
        unavailable_reason = (
            "vLLM's model is built on the CPU here: use --transport gloo, or validate against plain slices"
        )
    if engine == "vllm" and unavailable_reason:
        raise ValidationError(unavailable_reason)
    return "vllm" if engine in {"auto", "vllm"} and not unavailable_reason else "slices"


def _source_versions() -> str:
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("megatron-core", "megatron-bridge")]
    if te_standin.is_real():
        return f"{', '.join(versions)}, Transformer Engine {importlib.metadata.version('transformer-engine')} on CUDA"
    return f"{', '.join(versions)}, a parameters-only stand-in for Transformer Engine on the CPU"


def _words(precision: Precision) -> str:
    if precision.block is None:
        return ""
    block = "x".join(map(str, precision.block))
    made = "quantized on the way" if precision.quantized_on_the_way else "kept by the trainer"
    return f"{precision.train_dtype} -> {precision.gen_dtype} in blocks of {block}, {made}"


def _forgetting(model_parameters: ModelParameters, roles: frozenset[Role]) -> ModelParameters:
    groups = tuple(replace(g, role=Role.UNKNOWN) if g.role in roles else g for g in model_parameters.groups)
    return replace(model_parameters, groups=groups)
