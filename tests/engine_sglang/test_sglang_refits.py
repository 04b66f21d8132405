"""Refits of real Megatron-Core trainers into real SGLang models, planned from what all ranks trace of themselves."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.assembled import differences, hf_tensors
from safetensors.torch import load_file

from mcore_reshard.engines.sglang.model import after_direct_writes, load_weights, local_tensors
from mcore_reshard.engines.sglang.trace import trace_loading
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.condense import CondensedTrace, ParameterNames, condense
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh, format_mesh
from mcore_reshard.planner.layout.traced import read_layouts
from mcore_reshard.planner.plan.make_plan import plan_traced
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.proof.prove import require_proof
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint
from mcore_reshard.session.store_server import serve_store
from mcore_reshard.trainers.megatron.trace import trace_import
from mcore_reshard.validation.engine.sglang_engine import build_engine
from mcore_reshard.validation.engine.slices import GenSizes, poison
from mcore_reshard.validation.processes import run_processes
from mcore_reshard.validation.tiny import tiny_config, write_checkpoint
from mcore_reshard.validation.trainer import te_standin
from mcore_reshard.validation.trainer.build import build_trainer, prepare

OPTIONS = Options(transport="gloo", timeout_s=60)
TP4 = TrainMesh(tp=4)


@pytest.fixture(scope="module", autouse=True)
def megatron(sglang: None) -> None:
    prepare()  # once, so that every forked world finds it imported


@dataclass(frozen=True)
class Job:
    """A refit as all its ranks see it; they leave their traces in the folder."""

    folder: Path
    train: TrainMesh
    gen: GenMesh
    port: int

    @property
    def store(self) -> str:
        return f"127.0.0.1:{self.port}"

    def plan(self, world: str, rank: int, trace: CondensedTrace) -> Plan:
        """The plan that this rank makes of its own trace and those of all others."""
        own = self.folder / f"{world}{rank}.trace"
        own.with_suffix(".partial").write_bytes(pickle.dumps(trace))
        own.with_suffix(".partial").rename(own)
        ends = (("train", self.train), ("gen", self.gen))
        traces = [[self._trace(side, other) for other in range(mesh.world)] for side, mesh in ends]
        stages = [[mesh.coordinate(other)["pp"] for other in range(mesh.world)] for _, mesh in ends]
        layouts = read_layouts("tiny", checkpoint_of(self.folder), *traces, (stages[0], stages[1]), "sglang")
        return plan_traced(layouts, self.train, self.gen)

    def _trace(self, world: str, rank: int) -> CondensedTrace:
        file = self.folder / f"{world}{rank}.trace"
        while not file.exists():  # run_processes ends this process when another one fails
            time.sleep(0.02)
        return pickle.loads(file.read_bytes())


def checkpoint_of(folder: Path) -> Mapping[str, Any]:
    return hf_tensors(load_file(folder / "1" / "model.safetensors"))


def train(rank: int, job: Job) -> Plan:
    os.environ["MEGATRON_CONFIG_LOCK_DIR"] = str(job.folder / f"locks{rank}")
    store = dist.FileStore(str(job.folder / "store"), job.train.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.train.world)
    trainer = build_trainer(job.folder / "1", job.train)
    tasks, checkpoint = trainer.bridge.get_conversion_tasks(trainer.model_chunks), checkpoint_of(job.folder)
    with te_standin.cpu_as_device():
        trace = trace_import(trainer.bridge._model_bridge, trainer.model_chunks, tasks, checkpoint)
    plan = job.plan("train", rank, condense(trace, ParameterNames(checkpoint), is_trainer=True))
    schedule = schedule_of(plan, "train", rank)
    endpoint = TrainEndpoint(schedule, trainer.tensors, store=job.store, export=trainer.export, options=OPTIONS)
    endpoint.prepare()
    endpoint.refit(1)
    trainer.load(job.folder / "2")
    endpoint.refit(2)
    endpoint.close()
    return plan


def generate(rank: int, job: Job) -> tuple[list[list[str]], int]:
    """Names of tensors that differ from what SGLang's loader makes of each checkpoint; bytes that went by misc."""
    sizes = GenSizes(job.gen.tp, job.gen.pp, job.gen.dp, job.gen.ep)
    model, checkpoint = build_engine(job.folder / "1", sizes, rank), checkpoint_of(job.folder)
    plan = job.plan(
        "gen", rank, condense(trace_loading(model, checkpoint), ParameterNames(checkpoint), is_trainer=False)
    )
    endpoint = GenerationEndpoint(
        schedule_of(plan, "gen", rank),
        partial(local_tensors, model),
        store=job.store,
        load_weights=partial(load_weights, model),
        after_direct_writes=partial(after_direct_writes, model),
        options=OPTIONS,
    )
    endpoint.prepare()
    wrong, misc_bytes = [], 0
    for version in (1, 2):
        for tensor in local_tensors(model).values():
            poison(tensor)
        misc_bytes += endpoint.refit(version).misc_bytes
        found = {name: tensor.clone() for name, tensor in held(model).items()}
        for tensor in local_tensors(model).values():
            poison(tensor)
        load_weights(model, load_file(job.folder / str(version) / "model.safetensors").items())
        wrong.append(differences(found, held(model)))
    endpoint.close()
    return wrong, misc_bytes


def held(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All tensors that forward reads: parameters, and what multi-head latent attention derives."""
    derived = {
        f"{prefix}.{name}": getattr(layer, name)
        for prefix, layer in model.named_modules()
        for name in ("w_kc", "w_vc")
        if getattr(layer, name, None) is not None
    }
    return local_tensors(model) | derived


def run_rank(index: int, job: Job, listening: socket.socket) -> Any:
    """Training ranks, then generation ranks, last the store: it has a thread, beside which nobody may fork."""
    if index < job.train.world:
        result = train(index, job)
    elif index < job.train.world + job.gen.world:
        result = generate(index - job.train.world, job)
    else:
        listening.close()
        with serve_store(job.port) as store:
            while len(list(job.folder.glob("done*"))) < index:
                time.sleep(0.02)
            return store.port
    (job.folder / f"done{index}").touch()
    return result


def label(value: Any) -> str:
    """A short test id: `tp=2,pp=2` without the axes of size one."""
    text = value if isinstance(value, str) else format_mesh(value)
    return ",".join(axis for axis in text.split(",") if not axis.endswith("=1")) or "one rank"


CASES = [
    ("qwen3", TrainMesh(tp=2), GenMesh(tp=2)),
    ("qwen3", TP4, GenMesh(tp=2)),
    ("llama", TrainMesh(tp=2, pp=2), GenMesh(tp=4)),
    ("llama_tied", TrainMesh(tp=2), GenMesh(tp=2)),
    ("qwen3_moe", TrainMesh(tp=2, ep=2, etp=1), GenMesh(tp=2)),
    ("qwen3_moe", TP4, GenMesh(tp=2, ep=2)),
    ("qwen3_moe", TrainMesh(dp=2, ep=2), GenMesh(tp=2, dp=2, ep=4)),
    ("qwen3_moe", TP4, GenMesh(tp=2, pp=2)),
    ("deepseek_v3", TrainMesh(tp=2, ep=2, etp=1), GenMesh(tp=2)),
    ("deepseek_v3", TrainMesh(tp=2, pp=2), GenMesh(tp=2, ep=2)),
]


@pytest.mark.parametrize(("family", "train_mesh", "gen_mesh"), CASES, ids=label)
def test_a_refit_brings_every_byte_that_sglang_would_load(
    tmp_path: Path, family: str, train_mesh: TrainMesh, gen_mesh: GenMesh
) -> None:
    for version in (1, 2):
        write_checkpoint(tiny_config(family), tmp_path / str(version), version)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        job = Job(tmp_path, train_mesh, gen_mesh, listening.getsockname()[1])
        ranks = train_mesh.world + gen_mesh.world
        results = run_processes(ranks + 1, run_rank, (job, listening), timeout_s=240)
    plan = results[0]
    require_proof(plan)
    assert {plan.groups[group.group].name_pattern: group.reason for group in (*plan.misc, *plan.excluded)} == {}
    assert [wrong for wrong, _ in results[train_mesh.world : ranks]] == [[[], []]] * gen_mesh.world
