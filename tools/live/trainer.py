"""A training rank of a case: a real Megatron-Core model that loads a checkpoint before each refit.

Where Transformer Engine is installed the model is on the GPU, and engines read its parameters. Elsewhere a stand-in holds
it on the CPU, and engines read copies of its tensors on the GPU.
"""

from __future__ import annotations

import os
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_reshard.kernels.options import Options
from mcore_reshard.planning import read_request
from mcore_reshard.session.endpoints import TrainEndpoint
from mcore_reshard.session.part import RankOfPlan
from mcore_reshard.session.plan_exchange import publish_plan
from mcore_reshard.trainers.megatron.plan_refit import plan_refit
from mcore_reshard.trainers.quantized_export import pairs_by_name
from mcore_reshard.validation.precision import side_precisions
from mcore_reshard.validation.trainer import te_standin
from mcore_reshard.validation.trainer.build import Trainer, build_trainer, prepare

from .cases import Case
from .checkpoints import VERSIONS, trainer_folder

CONNECT_S, TIMEOUT_S = 300.0, 120.0
STAND_IN = "stand-in"  # of Transformer Engine


def train(case: Case, rank: int, root: Path, store: str, device: torch.device) -> dict[str, Any]:
    """Refit three times; what it moved and how long each refit took."""
    os.environ["MEGATRON_CONFIG_LOCK_DIR"] = str(root / f"{case.name}-locks{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = dist.FileStore(str(root / f"{case.name}-world"), case.train.world)
    dist.init_process_group("gloo", store=world, rank=rank, world_size=case.train.world)
    prepare(on_cuda=device.type == "cuda")
    request = read_request(case.config, case.train, case.gen, train_dtype=case.train_dtype, gen_dtype=case.gen_dtype)
    precisions = side_precisions(request)
    model = build_trainer(trainer_folder(root, case, 1), case.train, fp8_block=precisions.trainer_block)
    plan = plan_refit(
        precisions.engine_config, model.model_chunks, case.gen, model=case.model, gen_dtype=case.gen_dtype
    )
    model = Trainer(model.bridge, model.model_chunks, pairs_by_name(plan))
    options = Options(transport=case.transport if device.type == "cuda" else "gloo", timeout_s=TIMEOUT_S)
    if rank == 0:
        publish_plan(plan, store, options)
    tensors = model.tensors_on(device)
    endpoint = TrainEndpoint(
        RankOfPlan(plan, "train", rank),
        lambda: tensors,
        store=store,
        export=model.export,
        options=options,
    )
    endpoint.prepare(timeout_s=CONNECT_S)
    refits = []
    for version, checkpoint in enumerate(VERSIONS, 1):
        if version > 1:
            model.load(trainer_folder(root, case, checkpoint))
            tensors = model.tensors_on(device)  # copied anew: not while a refit reads them
        report = endpoint.refit(version)
        refits.append({"bytes": report.nbytes, "misc_bytes": report.misc_bytes, "transport": report.transport})
    endpoint.close()
    return {"digest": plan.digest, "refits": refits, "transformer_engine": transformer_engine()}


def transformer_engine() -> str:
    """Which one holds this process's trainer, as in "transformer-engine 2.11.0"."""
    return f"transformer-engine {version_of('transformer-engine')}" if te_standin.is_real() else STAND_IN
