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

import torch

from mcore_reshard.engines.rank_checks import refuse_mixture, require_own_mesh
from mcore_reshard.kernels.errors import LayoutError, SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.condense import CondensedTrace, ParameterNames, condense, untraceable
from mcore_reshard.planner.layout.mesh import GenMesh, MeshError
from mcore_reshard.planner.layout.traces import HfTensor
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.replicas import replica_ranks
from mcore_reshard.planner.plan.trace_check import checkpoint_of
from mcore_reshard.session.endpoints import GenerationEndpoint, RefitReport
from mcore_reshard.session.part import RankOfPlan
from mcore_reshard.session.plan_exchange import fetch_plan
from mcore_reshard.session.trace_exchange import answer_request, require_planned_layout
from mcore_reshard.tracing.recorder import TraceError

from .model import after_direct_writes, load_weights, local_tensors
from .trace import trace_loading


class SglangRank:
    """The part of the process that holds `model`, which SGLang has loaded. Its parallel state is read from SGLang."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.endpoint: GenerationEndpoint | None = None
        self._mixed_may_generate = False

    def connect(
        self,
        store: str,
        *,
        replica: int = 0,
        connect_timeout_s: float = 600.0,
        generate_while_mixed: bool = False,
        options: Options = Options(),  # noqa: B008
    ) -> None:
        """Say what the loader does, fetch the plan that the trainer makes of it, bind, and meet all other ranks.

        Arguments are those of vLLM's `RefitWorker.connect_refit`. May be called again, for another session.
        Raises MeshError, LayoutError, RuntimeError for parameters that no refit can write, else as `prepare`.
        """
        self.close()
        self._mixed_may_generate = generate_while_mixed
        local_tensors(self.model)  # refuses what cannot be written, before the trainer waits for this rank
        mesh, own_rank = sglang_place()
        rank = own_rank + replica * mesh.world
        answer_request(rank, self._condensed_trace, store, options, connect_timeout_s)

        def part_in(plan: Plan) -> RankOfPlan:
            if plan.engine != "sglang":
                raise LayoutError(f"the plan is for {plan.engine}: give connect() of the trainer engine='sglang'")
            require_own_mesh(plan, mesh, rank, replica)
            self._plan = plan
            return RankOfPlan(plan, "gen", rank)

        self.endpoint = GenerationEndpoint(
            part_in(fetch_plan(store, options, timeout_s=connect_timeout_s)),
            partial(local_tensors, self.model),
            store=store,
            load_weights=partial(load_weights, self.model),
            after_direct_writes=partial(after_direct_writes, self.model),
            check_layout=lambda: self._check_layout(rank),
            adopt_plan=part_in,
            state=None if self.endpoint is None else self.endpoint.state,
            options=options,
        )
        self.endpoint.prepare(timeout_s=connect_timeout_s)

    def refit(self, version: int | None = None, *, everything: bool = False) -> RefitReport:
        """Take part in the trainer's next refit, as `GenerationEndpoint.refit`."""
        if self.endpoint is None:
            raise SessionError("this engine is in no session: send it the command `connect` first")
        return self.endpoint.refit(version, everything=everything)

    def refuse_mixture(self) -> None:
        """Raise MixedWeightsError while the weights are of two versions, unless `connect` allowed to generate."""
        if not self._mixed_may_generate:
            refuse_mixture(self.endpoint)

    def close(self) -> None:
        """Leave the session and free what it holds. May be called twice."""
        if self.endpoint is not None:
            self.endpoint.close()

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
