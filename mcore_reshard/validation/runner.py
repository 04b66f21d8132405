"""Golden against real: refit a real trainer into an engine in real processes, and compare every byte with golden.

Each rank is a forked process. Training ranks hold a Megatron-Core model built by Megatron-Bridge. It lies on the GPU if
the transport is for GPUs and Transformer Engine is installed, else on the CPU. Generation ranks hold a vLLM model, or
the tensors of one where vLLM is not installed. The two worlds meet only at the refit. Golden is Megatron-Bridge's export of
the same weights, handed over in a file to the engine's own loader: it shares neither layouts nor transport.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import socket
import tempfile
from dataclasses import replace
from importlib.metadata import version as version_of
from pathlib import Path

import torch

from mcore_reshard.kernels.rendezvous.seal import find_token, load_cryptography
from mcore_reshard.kernels.transports.registry import device_of, resolve
from mcore_reshard.planner.layout.megatron import MegatronBuild
from mcore_reshard.planner.layout.mesh import format_mesh
from mcore_reshard.planner.model.parameters import Role
from mcore_reshard.planner.plan.make_plan import make_plan
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.proof.prove import require_proof
from mcore_reshard.planning import TracedRequest
from mcore_reshard.trainers.quantized_export import pairs_by_name
from mcore_reshard.validation import tiny
from mcore_reshard.validation.engine import vllm_engine
from mcore_reshard.validation.engine.slices import StandInEngine
from mcore_reshard.validation.trainer import build as trainer
from mcore_reshard.validation.trainer import te_standin
from mcore_reshard.validation.trainer.bridge import bridge_limits

from .errors import ValidationError
from .offline_plan import plan_offline
from .precision import side_precisions
from .processes import run_processes
from .ranks import Job, Results, ValidationRequest, gen_sizes, run_process
from .report import RefitResult, ValidationReport

LARGEST_MODEL_BYTES = 2 << 30  # every rank of the check holds a golden copy on this one machine

CHANGES = ("payload 1 loaded", "payload 2 loaded in place", "an SGD step")


def validate(request: ValidationRequest) -> ValidationReport:
    """Refit the model between the ranks of both meshes `refits` times, changing all weights in between.

    No two elements of the model agree in both of the first two sets of weights, so an element out of place shows.
    Later sets come from optimizer steps.

    Raises MeshError if no plan is possible, ProofError for an unsound plan and ValidationError if the check cannot run.
    Differences are not errors: they are in the report.
    """
    # Counting GPUs through the driver would spoil this process for forking.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    planning = request.planning
    precisions = side_precisions(planning)
    device = device_of(request.options.transport)
    engine = _engine_kind(request, device)
    plan = request.plan or _make_plan(request)
    require_proof(plan)
    _check_model(request, plan)
    ranks, gpus = planning.train.world + planning.gen.world, torch.cuda.device_count() if device == "cuda" else 0
    if resolve(request.options.transport, device).name == "nccl" and ranks > gpus:
        raise ValidationError(
            f"NCCL needs a GPU for each rank: {ranks} ranks, {gpus} here; --transport direct lets ranks share GPUs"
        )
    load_cryptography()
    trainer.prepare(on_cuda=device == "cuda")
    if engine == "vllm":
        vllm_engine.prepare()
    deadline_s = request.options.timeout_s * (request.refits + 2)
    with (
        tempfile.TemporaryDirectory(prefix="mcore-reshard-validate-") as folder,
        socket.create_server(("127.0.0.1", 0)) as store_socket,
    ):
        options = request.options
        token = None if find_token(options.token, options.token_file) else secrets.token_hex()
        job = Job(request, plan, precisions, pairs_by_name(plan), Path(folder), device, engine, store_socket, token)
        job.engine_folder.mkdir()
        (job.engine_folder / "config.json").write_text(json.dumps(precisions.engine_config))
        if isinstance(planning, TracedRequest):
            pass  # vLLM's own loader has just run, to be traced
        elif engine == "vllm":
            _check_vllm(job, deadline_s)
        else:
            _check_slices(job)
        blocks = {name: scales.block for name, scales in job.pairs.items()}
        for version in range(1, min(request.refits, 2) + 1):
            tiny.write_checkpoint(precisions.trainer_config, job.payload_folder(version), version, blocks)
        results = run_processes(job.ranks + 1, run_process, (job,), timeout_s=deadline_s)[:-1]
    source = ", ".join(f"{name} {version_of(name)}" for name in ("megatron-core", "megatron-bridge"))
    if te_standin.is_real():
        source += f", Transformer Engine {version_of('transformer-engine')} on CUDA"
    else:
        source += ", a parameters-only stand-in for Transformer Engine on the CPU"
    return ValidationReport(
        model=planning.model,
        train=format_mesh(planning.train),
        gen=format_mesh(planning.gen),
        policy=plan.policy,
        transport=results[0][0][0].transport,
        engine=f"vllm {version_of('vllm')}" if engine == "vllm" else "plain slices of the golden tensors",
        source=source,
        precision=str(precisions),
        digest=plan.digest,
        refits=tuple(_refit_result(results, planning.train.world, number) for number in range(request.refits)),
    )


def _make_plan(request: ValidationRequest) -> Plan:
    planning = request.planning
    if isinstance(planning, TracedRequest):
        return plan_offline(planning)[0]
    groups = planning.model_parameters.groups
    known = tuple(replace(g, role=Role.UNKNOWN) if g.role in request.unknown else g for g in groups)
    return make_plan(
        replace(planning.model_parameters, groups=known),
        planning.train,
        planning.gen,
        model=planning.model,
        policy=planning.policy,
        build=MegatronBuild(experts=request.experts),
        train_dtype=planning.train_dtype,
        gen_dtype=planning.gen_dtype,
    )


def _refit_result(results: list[Results], train_world: int, number: int) -> RefitResult:
    reports = [reports[number] for reports, _ in results]
    return RefitResult(
        version=number + 1,
        change=CHANGES[min(number, 2)],
        seconds=max(report.seconds for report in reports),
        bulk_bytes=sum(report.nbytes for report in reports[train_world:]),
        misc_bytes=sum(report.misc_bytes for report in reports[train_world:]),
        parameters=tuple(result for _, compared in results[train_world:] for result in compared[number]),
    )


def _check_model(request: ValidationRequest, plan: Plan) -> None:
    planning, nbytes = request.planning, sum(group.count * group.nbytes for group in plan.groups)
    if nbytes > LARGEST_MODEL_BYTES:
        small = f"tiny-{str(planning.config['model_type']).replace('_', '-')}"
        raise ValidationError(
            f"the model has {nbytes / 1e9:.0f} GB, more than the {LARGEST_MODEL_BYTES >> 30} GiB that a check"
            f" on one machine is made for: validate a small config of the same family, such as {small}"
        )
    if isinstance(planning, TracedRequest):
        return
    if limits := "; ".join(bridge_limits(planning.model_parameters, planning.train, request.experts)):
        raise ValidationError(f"Megatron-Bridge does not make this model, so nothing can be compared: {limits}")


def _check_slices(job: Job) -> None:
    try:
        for rank in range(job.plan.gen.world):
            StandInEngine(job.precisions.engine_config, gen_sizes(job.plan.gen), rank, "meta")
    except ValueError as error:
        raise ValidationError(
            f"the engine would not hold this model in this way: {error}; tiny models with matrices of several blocks are"
            " tiny-qwen3-fp8, tiny-qwen3-moe-fp8 and tiny-deepseek-v3-fp8"
        ) from error


def _check_vllm(job: Job, timeout_s: float) -> None:
    """In a process of its own: vLLM leaves its groups and its environment behind."""
    checkpoint = {}
    for name, shape in tiny.checkpoint_shapes(job.precisions.trainer_config).items():
        scales = job.pairs.get(name)
        dtype = torch.float8_e4m3fn if scales else tiny.checkpoint_dtype(name)
        checkpoint[name] = torch.empty(shape, dtype=dtype, device="meta")
        if scales:
            checkpoint[scales.name] = torch.empty(scales.shape, dtype=torch.float32, device="meta")
    args = (job.engine_folder, gen_sizes(job.plan.gen), checkpoint)
    (refusal,) = run_processes(1, lambda _: vllm_engine.refusal(*args), timeout_s=timeout_s)
    if refusal:
        raise ValidationError(
            f"vLLM refuses this model, so nothing can be compared: {refusal.rstrip('.')}; change the config or --gen to what"
            " vLLM holds"
        )


def _engine_kind(request: ValidationRequest, device: str) -> str:
    """The holder of destination tensors: "vllm", whose model is built on the CPU, or "slices"."""
    engine = request.engine
    if isinstance(request.planning, TracedRequest):
        if engine == "slices":
            raise ValidationError("plain slices know only models with layout rules: validate a traced plan with vLLM")
        engine = "vllm"
    if engine == "slices":
        return engine
    if importlib.util.find_spec("vllm") is None:
        unavailable_reason = "vLLM is not installed: --engine slices needs none; from a clone: pip install '.[vllm]'"
    elif device != "cpu":
        unavailable_reason = "vLLM's model is built on the CPU here: use --transport gloo, or plain slices"
    else:
        return "vllm"
    if engine == "vllm":
        raise ValidationError(unavailable_reason)
    return "slices"
