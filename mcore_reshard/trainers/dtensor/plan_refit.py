"""From a live DTensor model, and traces of the engine's loaders, to the plan that both worlds run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256

import torch

from mcore_reshard.planner.layout.condense import CondensedTrace, ParameterNames, condense
from mcore_reshard.planner.layout.engines import DEFAULT_ENGINE
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.layout.traced import read_layouts
from mcore_reshard.planner.layout.traces import HfTensor
from mcore_reshard.planner.plan.make_plan import plan_traced
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.proof.prove import require_proof
from mcore_reshard.trainers.world import gather_from_all, own_rank, run_on_all_ranks

from .checkpoint import Checkpoint
from .model import trace_module

Collect = Callable[[Mapping[str, HfTensor]], list[CondensedTrace]]


def plan_refit(
    module: torch.nn.Module,
    checkpoint: Checkpoint,
    gen: GenMesh,
    collect: Collect,
    *,
    model: str = "",
    engine: str = DEFAULT_ENGINE,
) -> Plan:
    """Plan the refit of `module`, whose checkpoint this is, from its placements and traces of the engine; prove the plan.

    `collect` brings the engine ranks' traces to training rank 0, given the tensors that the trainer will send. Collective
    over the training world: all ranks get the same plan. Its training mesh is dp alone: traces say who holds what.
    Raises ValueError as `trace_module` does, TracedLayoutError, ProofError, and as `collect` does.
    """
    _refuse_other_tensors(checkpoint)
    names = ParameterNames(checkpoint.tensors)
    trace = run_on_all_ranks(lambda: condense(trace_module(module, checkpoint), names, is_trainer=True))
    traces = gather_from_all(trace)
    collected = run_on_all_ranks(lambda: collect(checkpoint.tensors) if own_rank() == 0 else [])
    engine_traces = gather_from_all(collected)[0]
    stages = [0] * len(traces), [gen.coordinate(rank)["pp"] for rank in range(gen.world)]
    layouts = read_layouts(model, checkpoint.tensors, traces, engine_traces, stages, engine)
    plan = plan_traced(layouts, TrainMesh(dp=len(traces)), gen, model=model)
    require_proof(plan)
    return plan


def _refuse_other_tensors(checkpoint: Checkpoint) -> None:
    """Raise ValueError, on every rank, unless all ranks' modules save the same tensors."""
    listed = sorted((name, tensor.shape, tensor.dtype) for name, tensor in checkpoint.tensors.items())
    digests = gather_from_all(sha256(repr(listed).encode()).hexdigest())
    if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise ValueError(
            f"train:{others[0]} would save other tensors than train:0: give every rank the whole module, sharded, and not"
            " a pipeline stage of it"
        )
