"""Trainers with adapters of Megatron-Bridge, or with frozen parameters, refitted in real processes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from helpers.dtensor_refit import Checkpoint, OpenEngine
from helpers.front_door import Optimizer, golden_file
from helpers.ranks import store_process

import mcore_reshard as mr
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.condense import CondensedTrace, ParameterNames, condense
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.plan.frozen import without_frozen
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.session.endpoints import GenerationEndpoint
from mcore_reshard.session.plan_exchange import fetch_plan
from mcore_reshard.session.trace_exchange import answer_request
from mcore_reshard.trainers.quantized_export import pairs_by_name
from mcore_reshard.validation import tiny
from mcore_reshard.validation.engine.slices import GenSizes
from mcore_reshard.validation.processes import run_processes

STEPS = 3


@dataclass(frozen=True)
class Case:
    model: str
    mesh: TrainMesh
    adapt: Callable[[list[torch.nn.Module]], None]
    trained: str  # HF names of what later refits move, as a regular expression
    gen_dtype: str | None = None

    def __str__(self) -> str:
        return f"{self.model} {self.adapt.__name__} tp={self.mesh.tp},pp={self.mesh.pp},ep={self.mesh.ep}"


def lora(chunks: list[torch.nn.Module]) -> None:
    from megatron.bridge.peft.lora import LoRA

    LoRA(dim=4, alpha=6)(chunks)
    fill_adapters(chunks)


def lora_on_attention(chunks: list[torch.nn.Module]) -> None:
    from megatron.bridge.peft.lora import LoRA

    LoRA(target_modules=["*.layers.1.*.linear_qkv", "*.layers.1.*.linear_proj"], dim=4, alpha=6)(chunks)
    fill_adapters(chunks)


def canonical_lora(chunks: list[torch.nn.Module]) -> None:
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA

    CanonicalLoRA(dim=4, alpha=3)(chunks)
    fill_adapters(chunks)


def frozen_embeddings(chunks: list[torch.nn.Module]) -> None:
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_("embedding" not in name and "layers.0." not in name)


def lora_on_mamba(chunks: list[torch.nn.Module]) -> None:
    from megatron.bridge.peft.lora import LoRA

    LoRA(target_modules=["linear_qkv", "linear_proj", "in_proj", "out_proj"], dim=4, alpha=6)(chunks)
    fill_adapters(chunks)


def lora_on_latent_attention(chunks: list[torch.nn.Module]) -> None:
    from megatron.bridge.peft.lora import LoRA

    latent = [f"linear_{part}_{way}_proj" for part in ("q", "kv") for way in ("down", "up")]
    LoRA(target_modules=[*latent, "linear_proj", "linear_fc1", "linear_fc2"], dim=4, alpha=6)(chunks)
    fill_adapters(chunks)


def lora_on_routers(chunks: list[torch.nn.Module]) -> None:
    from megatron.bridge.peft.lora import LoRA

    LoRA(target_modules=["router", "linear_qkv"], dim=4, alpha=6)(chunks)
    fill_adapters(chunks)


def frozen_first_layer(chunks: list[torch.nn.Module]) -> None:
    for name, parameter in ((name, each) for chunk in chunks for name, each in chunk.named_parameters()):
        parameter.requires_grad_("layers.0." not in name)


def fill_adapters(chunks: list[torch.nn.Module]) -> None:
    """Adapters begin as zeros: fill them, alike on replicas."""
    for name, parameter in ((name, each) for chunk in chunks for name, each in chunk.named_parameters()):
        if ".adapter." in name:
            values = torch.sin(torch.arange(parameter.numel()) * 0.61 + len(name)) * 0.1
            parameter.data.copy_(values.reshape(parameter.shape))


def build(rank: int, case: Case, folder: Path) -> Any:
    from mcore_reshard.validation.trainer.build import build_trainer

    store = dist.FileStore(str(folder / "store"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.mesh.world)
    pairs = None
    if case.gen_dtype is not None:
        pairs = pairs_by_name(
            mr.plan(folder / "engine", case.mesh, "tp=2", train_dtype="bf16", gen_dtype=case.gen_dtype)
        )
    return build_trainer(folder / "checkpoint", case.mesh, pairs=pairs)


def train(rank: int, case: Case, folder: Path, address: str) -> tuple[list[tuple[str, int]], list[int]]:
    model = build(rank, case, folder)
    with mock.patch(
        "megatron.bridge.peft.utils.version", lambda package: "2.11.0"
    ):  # of Transformer Engine, stood in for
        case.adapt(model.model_chunks)
    optimizer = Optimizer(model, folder, rank)
    reports = []

    def connect(session: str) -> Any:
        return mr.megatron.connect(
            model.model_chunks,
            model.bridge,
            folder / "engine",
            gen="tp=2",
            gen_dtype=case.gen_dtype,
            store=address,
            trainable_only=True,
            connect_timeout_s=90.0,
            options=Options(timeout_s=30.0, session=session),
        )

    with connect("first") as trainer:
        for step in range(1, STEPS + 1):
            optimizer.step()  # of all weights, of frozen ones too
            report = trainer.refit(step, everything=step == 3)
            reports.append((report.moved, report.nbytes))
        whole, later = trainer.plan, without_frozen(trainer.plan)

    dist.barrier()
    with connect("second") as trainer:  # a new engine: it gets everything
        optimizer.step()
        report = trainer.refit(1)
        reports.append((report.moved, report.nbytes))
    return reports, [int(plan.send_bytes[rank]) for plan in (whole, later)]


def generate(rank: int, case: Case, folder: Path, address: str, open_engine: OpenEngine) -> tuple[list[str], list[str]]:
    """Names of tensors that differ from what they should be, and what every refit moved."""
    from safetensors.torch import load_file

    engine = open_engine(folder / "engine", GenSizes(tp=2), rank)
    expected = {name: tensor.clone() for name, tensor in engine.tensors.items()}
    wrong, moved, step = [], [], 0

    def trace(checkpoint: Checkpoint) -> CondensedTrace:
        return condense(engine.trace(checkpoint), ParameterNames(checkpoint), is_trainer=False)

    for session, refits in (("first", STEPS), ("second", 1)):
        options = Options(timeout_s=30.0, session=session)
        answer_request(rank, trace, address, options, 90.0)
        schedule = schedule_of(fetch_plan(address, options, timeout_s=90.0), "gen", rank)
        endpoint = GenerationEndpoint(
            schedule, engine.tensors, store=address, load_weights=engine.load_weights, options=options
        )
        endpoint.prepare(timeout_s=90.0)
        for number in range(1, refits + 1):
            moved.append(endpoint.refit(number).moved)
            step += 1
            arrived = {name: tensor.clone() for name, tensor in engine.tensors.items()}
            for name, tensor in engine.tensors.items():
                tensor.copy_(expected[name])
            everything, golden = moved[-1] == "everything", load_file(golden_file(folder, step)).items()
            engine.load_weights((n, whole) for n, whole in golden if everything or re.search(case.trained, n))
            expected = {name: tensor.clone() for name, tensor in engine.tensors.items()}
            wrong += [f"{step}: {name}" for name, tensor in arrived.items() if not tensor.equal(expected[name])]
        endpoint.close()
    return wrong, moved


def refit(index: int, case: Case, folder: Path, address: str, open_engine: OpenEngine) -> Any:
    if index < case.mesh.world:
        return train(index, case, folder, address)
    return generate(index - case.mesh.world, case, folder, address, open_engine)


def assert_the_engine_has_what_bridge_exports_merged(case: Case, open_engine: OpenEngine, folder: Path) -> None:
    """Four refits: of everything, of what is trained, of everything as it was asked for, and of a new session."""
    config = load_config(case.model)
    tiny.write_checkpoint(config, folder / "engine", 1)
    unquantized = {name: value for name, value in config.items() if name != "quantization_config"}
    tiny.write_checkpoint(unquantized, folder / "checkpoint", 1)
    with store_process() as store:  # it outlives the sessions
        given = (case, folder, store.address, open_engine)
        outcomes = run_processes(case.mesh.world + 2, refit, given, timeout_s=240)
    everything, trainable = "everything", "trainable parameters"
    moved = [everything, trainable, everything, everything]
    assert outcomes[case.mesh.world :] == [([], moved)] * 2
    for reports, (whole, later) in outcomes[: case.mesh.world]:
        assert reports == [(what, later if what == trainable else whole) for what in moved]
    sent = [sum(nbytes) for nbytes in zip(*(nbytes for _, nbytes in outcomes[: case.mesh.world]), strict=True)]
    assert 0 < sent[1] < sent[0]
