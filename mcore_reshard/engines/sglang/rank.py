"""One tensor-parallel rank of a live SGLang in a session: connect once, refit after each step, close.

    rank = SglangRank(model)
    rank.connect("10.0.0.1:29600", replica=0)
    rank.refit(step)

File names below are SGLang 0.5.23's, under sglang/srt.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from mcore_reshard.engines.rank import EngineRank, require_own_mesh
from mcore_reshard.kernels.errors import LayoutError
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.condense import CondensedTrace, ParameterNames, condense, untraceable
from mcore_reshard.planner.layout.mesh import GenMesh, MeshError, replica_ranks
from mcore_reshard.planner.layout.traces import HfTensor
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.trace_check import checkpoint_of
from mcore_reshard.session.endpoints import GenerationEndpoint
from mcore_reshard.session.part import RankOfPlan
from mcore_reshard.session.plan_exchange import fetch_plan
from mcore_reshard.session.trace_exchange import answer_request, require_planned_layout
from mcore_reshard.tracing.recorder import TraceError

from .model import after_direct_writes, load_weights, local_tensors
from .trace import trace_loading


class SglangRank(EngineRank):
    """The part of the process that holds `model`, which SGLang has loaded. Its parallel state is read from SGLang."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self._plan: Plan

    def connect(
        self,
        store: str,
        *,
        replica: int = 0,
        connect_timeout_s: float = 600.0,
        generate_while_mixed: bool = False,
        **options: Any,
    ) -> None:
        """Say what the loader does, fetch the plan that the trainer makes of it, bind, and meet all other ranks.

        Arguments are those of `VllmRank.connect`. May be called again, for another session.
        Raises MeshError, LayoutError, RuntimeError for parameters that no refit can write, else as `prepare`.
        """
        self.close()
        self._mixed_may_generate = generate_while_mixed
        local_tensors(self.model)  # refuses what cannot be written, before the trainer waits for this rank
        mesh, own_rank = sglang_place()
        session = Options(**options)
        rank = own_rank + replica * mesh.world
        answer_request(rank, self._condensed_trace, store, session, connect_timeout_s)

        def part_in(plan: Plan) -> RankOfPlan:
            if plan.engine != "sglang":
                raise LayoutError(f"the plan is for {plan.engine}: give connect() of the trainer engine='sglang'")
            require_own_mesh(plan, mesh, rank, replica)
            self._plan = plan
            return RankOfPlan(plan, "gen", rank)

        self.endpoint = GenerationEndpoint(
            part_in(fetch_plan(store, session, timeout_s=connect_timeout_s)),
            partial(local_tensors, self.model),
            store=store,
            load_weights=partial(load_weights, self.model),
            after_direct_writes=partial(after_direct_writes, self.model),
            check_layout=lambda: self._check_layout(rank),
            adopt_plan=part_in,
            state=None if self.endpoint is None else self.endpoint.state,
            options=session,
        )
        self.endpoint.prepare(timeout_s=connect_timeout_s)

    def _condensed_trace(self, checkpoint: Mapping[str, HfTensor]) -> CondensedTrace:
        try:
            trace = trace_loading(self.model, checkpoint)
        except TraceError as error:  # the loader itself still takes whole tensors: all of the model goes by misc
            return untraceable(checkpoint, "load_weights", str(error))
        return condense(trace, ParameterNames(checkpoint), is_trainer=False)

    def _check_layout(self, rank: int) -> None:
        """A replica that came later has not told the trainer what its loader does; all say it again of this plan."""
        planned, loader = rank % replica_ranks(self._plan.gen), f"SGLang {version('sglang')}"
        try:
            trace = trace_loading(self.model, checkpoint_of(self._plan))
        except TraceError:
            if self._plan.bulk_bytes:
                raise
            return  # everything goes through the loader
        require_planned_layout(self._plan, "gen", planned, trace, loader)


def sglang_place() -> tuple[GenMesh, int]:
    """The mesh of this process's engine, and this process's rank in it.

    Raises MeshError for meshes that cannot be refitted: SGLang tells the ranks of one tensor-parallel group alone at the
    same time (managers/scheduler_pp_mixin.py, managers/tokenizer_control_mixin.py).
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    tp, ep = parallel.tp_size, parallel.ep_size
    problems = []
    if parallel.pp_size > 1:
        problems.append(
            f"pp_size = {parallel.pp_size}: SGLang's stages take a command one after the other; start with 1"
        )
    if parallel.dp_size > 1:
        problems.append(
            f"dp_size = {parallel.dp_size}: SGLang refuses updates from tensors; start one engine a replica"
        )
    if ep not in (1, tp):
        problems.append(f"ep_size = {ep}: experts must be cut by tp_size alone, or ep_size be tp_size = {tp}")
    for name in ("attn_cp_size", "moe_dp_size", "dcp_size"):
        if getattr(parallel, name) > 1:
            problems.append(f"{name} = {getattr(parallel, name)} is not known to refits; start with 1")
    if problems:
        raise MeshError("no refit reaches this SGLang engine", problems)
    return GenMesh(tp=tp, ep=ep), parallel.tp_rank
