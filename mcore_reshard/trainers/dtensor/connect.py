"""The refit of a DTensor trainer as a policy worker sees it: connect once, refit after each optimizer step, close.

    trainer = connect(model, hf_config, gen="tp=4", store="10.0.0.1:29600")   # on every training rank
    trainer.refit(step)                                                       # weights may change again
    trainer.close()

Layouts are read off both sides: off the placements here, and off the engine's loader there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mcore_reshard.kernels.errors import RefitError
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.engines import DEFAULT_ENGINE
from mcore_reshard.planner.layout.mesh import GenMesh
from mcore_reshard.planning import RefitRequest, read_refit_request
from mcore_reshard.session.endpoints import TrainEndpoint
from mcore_reshard.session.part import RankOfPlan
from mcore_reshard.session.trace_exchange import collect_traces
from mcore_reshard.trainers.refit_trainer import (
    RefitTrainer,
    SessionServer,
    agree_on_model,
    collect_problems,
    meet_engines,
    session_problems,
)
from mcore_reshard.trainers.trainable import LocalTensors, freeze, watched
from mcore_reshard.trainers.world import own_rank, run_on_all_ranks

from .model import checkpoint_of, export_hf, local_tensors, parameters_of_tensors, tensors_of_hf_names
from .plan_refit import plan_refit


def connect(
    module: torch.nn.Module,
    hf_config: Any,
    *,
    gen: str | GenMesh,
    store: str,
    engine: str = DEFAULT_ENGINE,
    trainable_only: bool = False,
    connect_timeout_s: float = 600.0,
    options: Options = Options(),  # noqa: B008
) -> RefitTrainer:
    """Plan the refit of a live model of DTensors, prove the plan, publish it, and meet the engine's ranks.

    Call it on every training rank; torch's default process group must be the training world, and every rank has the
    whole module, in parts: there are no pipeline stages.
    - `module`: the transformers model that the engine serves, after `parallelize_module` and `fully_shard`. Another
      module must have the checkpoint's own names. A plain tensor counts as replicated.
    - `hf_config`: the engine's config.json, as a dict, a path or a transformers config.
    - `gen`: the engine's mesh, as in "tp=4,dp=2".
    - `store`: "host:port". Training rank 0 starts a store there unless one answers already.
    - `trainable_only`: after the first refit of a session, move only parameters with `requires_grad`, and buffers.
    - `connect_timeout_s`: how long to wait for engines that are still starting, and again for their traces.

    Weights must stay as they are while `refit` runs: torch does not count writes into DTensors, so none is noticed.
    Raises RefitError, listing everything wrong with the arguments; then as `checkpoint_of`, `plan_refit` and
    `TrainEndpoint.prepare`. If one rank raises, all ranks do, and no store stays behind.
    """
    request = run_on_all_ranks(
        lambda: _read_arguments(module, hf_config, gen, store, engine, connect_timeout_s, options)
    )
    model, server = agree_on_model(request), SessionServer(store, options.timeout_s)

    def plan_and_bind(options: Options) -> RefitTrainer:
        checkpoint = run_on_all_ranks(lambda: checkpoint_of(module))
        run_on_all_ranks(server.start)
        collect = partial(
            collect_traces,
            ranks=request.gen.world,
            address=store,
            options=options,
            connect_timeout_s=connect_timeout_s,
        )
        plan = plan_refit(module, checkpoint, request.gen, collect, model=model, engine=engine)
        tensors: LocalTensors = partial(local_tensors, module)
        if trainable_only:
            made_of = parameters_of_tensors(module)
            plan = freeze(plan, made_of, lambda: tensors_of_hf_names(checkpoint))
            tensors = watched(tensors, made_of)
        endpoint = TrainEndpoint(
            RankOfPlan(plan, "train", own_rank()),
            tensors,
            store=store,
            export=partial(export_hf, module, checkpoint),
            options=options,
        )
        return RefitTrainer(plan, endpoint, server)

    return meet_engines(plan_and_bind, server, store, connect_timeout_s, options)


def _read_arguments(
    module: Any, hf_config: Any, gen: Any, store: Any, engine: Any, timeout_s: Any, options: Any
) -> RefitRequest:
    """Raises RefitError with every fault that this rank alone can see, before ranks wait for each other."""
    problems: list[str] = []
    if not isinstance(module, torch.nn.Module):
        problems.append(f"module is a {type(module).__name__}: give the live torch.nn.Module")
    with collect_problems(problems):
        request = read_refit_request(hf_config, gen, "exact", engine)
    problems += session_problems(store, timeout_s, options)
    if problems:
        raise RefitError("\n  ".join(("connect() cannot use its arguments:", *problems)))
    return request
