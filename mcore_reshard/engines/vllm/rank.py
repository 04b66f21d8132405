"""A live vLLM rank's part in refits, whoever calls it: `RefitWorker`, or vLLM's weight transfer (integrations/vllm.py).

    rank = VllmRank(worker)                  # vLLM's own worker of this process
    rank.connect("10.0.0.1:29600")           # on all workers, while the trainer connects
    rank.refit(step)
    rank.close()

While an engine holds a mixture of versions, a step of it raises `MixedWeightsError`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from importlib.metadata import version
from typing import Any

import torch

from mcore_reshard.engines.rank import EngineRank, require_own_mesh
from mcore_reshard.kernels.errors import LayoutError, MixedWeightsError, RefitError, SessionError, TracesNeeded
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.transports.registry import resolve
from mcore_reshard.planner.bounded_json import MAX_PLAN_BYTES, parse_json
from mcore_reshard.planner.layout.condense import CondensedTrace, ParameterNames, condense, untraceable
from mcore_reshard.planner.layout.mesh import format_mesh, replica_ranks
from mcore_reshard.planner.layout.trace_file import dump_checkpoint, dump_trace, parse_trace
from mcore_reshard.planner.layout.traces import HfTensor, RankTrace
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.trace_check import checkpoint_of
from mcore_reshard.planner.proof.traced import is_traced
from mcore_reshard.session.endpoints import GenerationEndpoint, RefitReport
from mcore_reshard.session.part import RankOfPlan
from mcore_reshard.session.plan_exchange import fetch_plan
from mcore_reshard.session.trace_exchange import (
    answer_request,
    has_refitted,
    needs_traces,
    require_planned_layout,
    session_under_way,
    traced_session,
)
from mcore_reshard.session.whole_tensors import NamedTensors
from mcore_reshard.tracing.fingerprint import fingerprint
from mcore_reshard.tracing.kept import KeptFile
from mcore_reshard.tracing.recorder import TraceError

from . import model as engine
from .adapters import without_adapters
from .draft import PREFIX, draft_of, load_both, own_tensors, trace_draft
from .rearranged import rearranged_parameters
from .redone import beside_of
from .sleep import SleepWatch
from .trace import trace_loading
from .walked import Walks


class VllmRank(EngineRank):
    """The refits of one vLLM worker. `worker` has a `vllm_config`, a `model_runner` and `get_model()`."""

    def __init__(self, worker: Any) -> None:
        super().__init__()
        self._worker = worker
        self._config = worker.vllm_config
        self._sleep = SleepWatch()
        self._walks = Walks()
        self._plan: Plan
        self._draft: torch.nn.Module | None = None  # the draft model, if the trainer sends its layers
        self._names_of_draft: frozenset[str] | None = None  # the HF tensors that it is made of; None: unknown
        self._is_traced = False  # the plan was made of this worker's trace: tensors are written as kernels read them
        self._rearranged: frozenset[str] = frozenset()  # the HF tensors of which rearranged parameters are made

    @property
    def _model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._worker.get_model()
        return model

    def connect(
        self,
        store: str,
        *,
        replica: int = 0,
        connect_timeout_s: float = 600.0,
        generate_while_mixed: bool = False,
        **options: Any,
    ) -> str:
        """Fetch the plan that the trainer publishes, bind this worker's parameters and meet all other ranks.

        `replica` counts engines of the same mesh; one that the plan does not have joins a session under way, and takes part
        from its next refit on. `connect_timeout_s` limits the wait for the store, for the plan, and for ranks that are still
        starting, each time anew. With `generate_while_mixed` the engine generates also from a mixture of two versions.
        `options` are the fields of `Options`. Returns the rank's name, as in "gen:3". Warns of a draft model that refits
        leave as it is, and of the memory that layers take which are laid out anew (`redone`). Raises MeshError if the plan is
        for other engines, ValueError for wrong options, else as `GenerationEndpoint.prepare`.
        """
        self.close()
        self._mixed_may_generate = generate_while_mixed
        self._walks.forget()
        self._guard_steps()
        self._sleep.watch(self._worker)
        asked = Options(**options)
        session = session_under_way(store, asked)
        with self._as_vllm_configured(), self._base_layers():
            try:
                self._meet_trainer(store, replica, connect_timeout_s, session)
            except RefitError as error:
                if not needs_traces(error) or session != asked or has_refitted(store, asked):
                    raise
                self.close()
                self._meet_trainer(store, replica, connect_timeout_s, traced_session(session))
        if self._draft is None and (reason := self._why_draft_stays()):
            warnings.warn(f"refits leave the draft model of this engine as it is: {reason}", stacklevel=2)
        if beside := [
            t for model in (self._model, self._draft) if model is not None for t in beside_of(model).values()
        ]:
            megabytes = sum(tensor.nbytes for tensor in beside) / 1e6
            warnings.warn(
                f"{self.connected.rank_name}: backends of this engine rearrange weights after loading, as each refit does"
                f" again: {len(beside)} parameters are kept twice, in {megabytes:,.1f} MB more",
                stacklevel=2,
            )
        return self.connected.rank_name

    def refit(self, version: int | None = None, *, everything: bool = False) -> RefitReport:
        """Take part in the trainer's next refit, as `GenerationEndpoint.refit`.

        After a sleep of level 2 it asks for everything, once. Raises SessionError before `connect`, and while vLLM sleeps.
        """
        if self._sleep.asleep:
            raise SessionError(
                f"{self.connected.rank_name}: this engine sleeps, and has no memory for weights: call wake_up first, with"
                " tags=['weights'] at least"
            )
        with self._as_vllm_configured(), self._base_layers():
            report = super().refit(version, everything=everything or self._sleep.lost)
        self._sleep.lost = False
        return report

    def refuse_mixture(self) -> None:
        if self._sleep.lost:
            raise MixedWeightsError("this engine lost its weights in a sleep of level 2: refit before it generates")
        super().refuse_mixture()

    def _meet_trainer(self, store: str, replica: int, connect_timeout_s: float, session: Options) -> None:
        self._draft = self._names_of_draft = None
        self._is_traced, self._rearranged = False, frozenset()
        config, mesh = self._config, engine.gen_mesh_of(self._config)
        rank = engine.gen_rank_of(config) + replica * mesh.world
        answer_request(rank, self._condensed_trace, store, session, connect_timeout_s)
        plan = fetch_plan(store, session, timeout_s=connect_timeout_s)
        require_own_mesh(plan, mesh, rank, replica)
        if self.endpoint is None and config.load_config.load_format == "dummy":
            for model in (self._model, draft_of(self._worker.model_runner, config)[0]):
                if model is not None:
                    engine.set_default_kv_scales(model)  # once: refits may bring others
        self._plan = plan

        def adopt(newer: Plan) -> RankOfPlan:
            require_own_mesh(newer, mesh, rank, replica)
            self._plan = newer
            return RankOfPlan(newer, "gen", rank)

        endpoint = self.endpoint = GenerationEndpoint(
            RankOfPlan(plan, "gen", rank),
            self._tensors,
            store=store,
            load_weights=self._load_whole_tensors,
            after_direct_writes=self._derive_tensors,
            set_kv_scales=lambda scales: engine.set_kv_scales(self._model, scales),
            kv_scale_names=lambda: engine.kv_scale_names(self._model),
            check_layout=lambda: self._check_layout(self._plan, rank, session),
            adopt_plan=adopt,
            state=None if self.endpoint is None else self.endpoint.state,
            options=session,
        )
        endpoint.prepare(timeout_s=connect_timeout_s)

    def _tensors(self) -> dict[str, torch.Tensor]:
        model, draft = self._model, self._draft
        tensors = engine.local_tensors(self._walks.of(model), as_kernels_read=self._is_traced)
        return tensors | ({} if draft is None else own_tensors(draft, model))

    def _load_whole_tensors(self, tensors: NamedTensors) -> None:
        if self._draft is None:
            engine.load_weights(self._model, tensors, as_kernels_read=self._is_traced)
        else:
            load_both(self._model, self._draft, self._names_of_draft, tensors)

    def _derive_tensors(self) -> None:
        for model in (self._model, self._draft):
            if model is not None:
                engine.after_direct_writes(self._walks.of(model), self._config.model_config.dtype)

    def _condensed_trace(self, checkpoint: Mapping[str, HfTensor]) -> CondensedTrace:
        """What this rank's loaders do; what they did with an equal model and checkpoint before will do."""
        names = ParameterNames(checkpoint)
        draft = draft_of(self._worker.model_runner, self._config)[0]
        models = {"": self._model} if draft is None else {"": self._model, PREFIX: draft}
        self._is_traced = True
        for model in models.values():
            engine.refuse_unknown_layouts(model, as_kernels_read=True)
        order = {prefix: sorted(rearranged_parameters(model)) for prefix, model in models.items()}
        kept = self._kept(checkpoint=dump_checkpoint(checkpoint), rearranged=order)
        if (lines := kept.read()) is None:
            try:
                trace, of_draft = self._trace(draft, checkpoint)
            except TraceError as error:  # the loader itself still takes whole tensors: all of the model goes by misc
                for model in models.values():
                    engine.refuse_traced_layouts(model, dict.fromkeys(rearranged_parameters(model), str(error)))
                self._draft = draft
                return untraceable(checkpoint, "load_weights", str(error))
            rearranged = [name for prefix, model in models.items() for name in _rearranged_of(trace, prefix, model)]
            lines = [dump_trace(condense(trace, names, is_trainer=False)), json.dumps([of_draft, rearranged])]
            kept.write(lines)
        of_draft, rearranged = parse_json(lines[1], "the file of a trace", max_bytes=MAX_PLAN_BYTES)
        self._rearranged = frozenset(rearranged)
        if of_draft is not None:
            self._draft, self._names_of_draft = draft, frozenset(of_draft)
        return parse_trace(lines[0])

    def _trace(
        self, draft: torch.nn.Module | None, checkpoint: Mapping[str, HfTensor]
    ) -> tuple[RankTrace, list[str] | None]:
        """The trace of this rank's models, and the tensors that the draft model reads; None if it reads none of its own."""
        model = self._model
        with self._as_vllm_configured():
            trace = trace_loading(model, checkpoint, as_kernels_read=True)
            of_draft = None if draft is None else trace_draft(draft, model, checkpoint)
        if of_draft is None:
            return trace, None
        read = sorted({name for tensor in of_draft.tensors for name in tensor.names})
        return RankTrace(trace.tensors + of_draft.tensors), read

    def _kept(self, **parts: Any) -> KeptFile:
        """What was seen of models like this rank's. vLLM counts and draws numbers in its configs, which say nothing of them."""
        from vllm.config import CompilationConfig, VllmConfig

        models = self._model, draft_of(self._worker.model_runner, self._config)[0]
        digests = [fingerprint(model, (VllmConfig, CompilationConfig)) for model in models if model is not None]
        place = engine.gen_rank_of(self._config), format_mesh(engine.gen_mesh_of(self._config))
        return KeptFile.of("vllm", models=digests, place=place, **parts)

    def _check_layout(self, plan: Plan, rank: int, options: Options) -> None:
        engine.kernel_layouts(self._model)  # loaders are traced into the tensors that it puts beside layers
        if is_traced(plan):
            self._refuse_loading_of_rearranged(plan, rank, options)
            if not plan.pairs:  # the plan is what the loaders do; the places of scales are derived
                return
        kept = self._kept(agrees_with=plan.digest, rank=rank)
        if kept.read() is None:
            if is_traced(plan):
                trace = self._trace(draft_of(self._worker.model_runner, self._config)[0], checkpoint_of(plan))[0]
            else:
                with self._as_vllm_configured():
                    trace = trace_loading(self._model, checkpoint_of(plan))
            planned = rank % replica_ranks(plan.gen)  # replicas are alike, also those that are not in the plan
            require_planned_layout(plan, "gen", planned, trace, f"vLLM {version('vllm')}")
            kept.write([])
        if plan.pairs:  # made of traces already, or of a family with rules, whose quantized tensors no traces plan
            return
        if draft_of(self._worker.model_runner, self._config)[0] is not None:
            raise TracesNeeded("this engine has a draft model, which no layout rules know")
        if rearranged_parameters(self._model):
            raise TracesNeeded("a backend of this engine has rearranged experts, as no layout rules know")

    def _refuse_loading_of_rearranged(self, plan: Plan, rank: int, options: Options) -> None:
        """Raise LayoutError where whole tensors would go through the loader into parameters that a backend has rearranged."""
        if not self._rearranged:
            return
        device = next(self._model.parameters()).device.type
        golden = resolve(options.transport, device).connect is None
        if loaded := self._rearranged.intersection(self._rearranged if golden else plan.misc_names):
            raise LayoutError(
                f"gen:{rank}: {len(loaded)} tensors would go through vLLM's loader, which corrupts experts that a backend has"
                f" rearranged, first {min(loaded)}: start vLLM with moe_backend='triton'"
            )

    def _why_draft_stays(self) -> str:
        """Why refits do not write this rank's draft model; "" if it has none."""
        draft, reason = draft_of(self._worker.model_runner, self._config)
        if draft is None:
            return reason
        return "the trainer sends none of its layers, or FP8, which is planned by rules; they know no draft models"

    def _base_layers(self) -> AbstractContextManager[None]:
        return without_adapters(self._model) if getattr(self._config, "lora_config", None) else nullcontext()

    def _as_vllm_configured(self) -> AbstractContextManager[None]:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self._config)

    def _guard_steps(self) -> None:
        """Make every step of the engine raise while its weights are mixed.

        An extension cannot override a method of vLLM's worker, so the model runner's gets an attribute before it.
        """
        step = getattr(self._worker.model_runner, "execute_model", None)
        if step is None or getattr(step, "refit_guards", False):
            return

        @wraps(step)
        def guarded(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(scheduled, "total_num_scheduled_tokens", 1):  # steps without tokens are for vLLM's own accounts
                self.refuse_mixture()
            return step(scheduled, *args, **kwargs)

        guarded.refit_guards = True  # type: ignore[attr-defined]
        self._worker.model_runner.execute_model = guarded


def _rearranged_of(trace: RankTrace, prefix: str, model: torch.nn.Module) -> list[str]:
    """The Hugging Face tensors that rearranged parameters are made of. Raises RuntimeError for those that are computed."""
    own = {prefix + name: name for name in rearranged_parameters(model)}
    traced = [tensor for tensor in trace.tensors if tensor.tensor.name in own]
    engine.refuse_traced_layouts(model, {own[t.tensor.name]: t.computed for t in traced if t.computed})
    return sorted({name for tensor in traced for name in tensor.names})
