"""Refits as methods of vLLM's own workers: `LLM(..., worker_extension_cls="mcore_reshard.vllm.RefitWorker")`.

    llm.collective_rpc("connect_refit", kwargs={"store": "10.0.0.1:29600"})
    llm.collective_rpc("refit", args=(step,))
    llm.collective_rpc("close_refit")

vLLM makes the class a base of its worker (v1/worker/worker_base.py). Arguments and results are plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.condense import CondensedTrace, ParameterNames, condense, untraceable
from mcore_reshard.planner.layout.mesh import MeshError, format_mesh
from mcore_reshard.planner.layout.traces import HfTensor, RankTrace
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.trace_check import checkpoint_of
from mcore_reshard.planner.proof.traced import is_traced
from mcore_reshard.session.endpoints import GenerationEndpoint
from mcore_reshard.session.plan_exchange import fetch_plan
from mcore_reshard.session.trace_exchange import answer_request, require_planned_layout
from mcore_reshard.tracing.recorder import TraceError

from . import model as engine
from .trace import trace_loading


class RefitWorker:
    """A generation rank's part: connect once, refit after each step, close."""

    vllm_config: Any  # this and `get_model` belong to the worker
    get_model: Callable[[], torch.nn.Module]
    _refit_endpoint: GenerationEndpoint | None = None

    def connect_refit(self, store: str, *, replica: int = 0, connect_timeout_s: float = 600.0, **options: Any) -> str:
        """Fetch the plan that the trainer publishes, bind this worker's parameters and meet all other ranks.

        `replica` counts engines of the same mesh. `connect_timeout_s` limits the wait for the plan, and again the wait for
        ranks that are still starting. `options` are the fields of `Options`. Returns the rank's name, as in "gen:3". Raises
        MeshError if the plan is for other engines, ValueError for wrong options, else as `GenerationEndpoint.prepare`.
        """
        self.close_refit()
        session = Options(**options)
        config, mesh = self.vllm_config, engine.gen_mesh_of(self.vllm_config)
        rank = engine.gen_rank_of(config) + replica * mesh.world
        answer_request(rank, self._condensed_trace, store, session.session, session.timeout_s, connect_timeout_s)
        plan = fetch_plan(store, session=session.session, timeout_s=connect_timeout_s)
        planned, actual = ((m.tp, m.pp, m.ep, m.layers) for m in (plan.gen, mesh))
        if planned != actual or rank >= plan.gen.world:
            raise MeshError(
                f"the plan is for other engines than that of generation rank {rank}",
                [
                    f"planned {format_mesh(plan.gen)}",
                    f"this engine {format_mesh(mesh)}, replica {replica}",
                    "start the engine on the planned mesh, or give connect() of the trainer this one as gen=",
                ],
            )
        if self._refit_endpoint is None and config.load_config.load_format == "dummy":
            engine.set_default_kv_scales(self.get_model())  # once: refits may bring others
        endpoint = self._refit_endpoint = GenerationEndpoint(
            schedule_of(plan, "gen", rank),
            lambda: engine.local_tensors(self.get_model()),
            store=store,
            load_weights=lambda tensors: engine.load_weights(self.get_model(), tensors),
            after_direct_writes=lambda: engine.after_direct_writes(self.get_model(), config.model_config.dtype),
            set_kv_scales=lambda scales: engine.set_kv_scales(self.get_model(), scales),
            kv_scale_names=lambda: engine.kv_scale_names(self.get_model()),
            check_layout=lambda: self._check_layout(plan, rank),
            options=session,
        )
        endpoint.prepare(timeout_s=connect_timeout_s)
        return endpoint.rank_name

    def _condensed_trace(self, checkpoint: Mapping[str, HfTensor]) -> CondensedTrace:
        try:
            return condense(self._trace(checkpoint), ParameterNames(checkpoint), is_trainer=False)
        except TraceError as error:  # the loader itself still takes whole tensors: all of the model goes by misc
            return untraceable(checkpoint, "load_weights", str(error))

    def _check_layout(self, plan: Plan, rank: int) -> None:
        if is_traced(plan):  # the plan is what the loaders do
            return
        require_planned_layout(plan, "gen", rank, self._trace(checkpoint_of(plan)), f"vLLM {version('vllm')}")

    def _trace(self, checkpoint: Mapping[str, HfTensor]) -> RankTrace:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            return trace_loading(self.get_model(), checkpoint)

    def refit(self, version: int) -> dict[str, Any]:
        """Take part in the trainer's refit of `version`; returns the fields of `RefitReport` once it is committed."""
        from vllm.config import set_current_vllm_config

        if self._refit_endpoint is None:
            raise SessionError("this worker is in no session: call connect_refit() on all workers first")
        with set_current_vllm_config(self.vllm_config):
            return asdict(self._refit_endpoint.refit(version))

    def close_refit(self) -> None:
        """Leave the session and free what it holds. May be called twice."""
        if self._refit_endpoint is not None:
            self._refit_endpoint.close()
