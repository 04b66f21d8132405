"""A plan of any model that Megatron-Bridge and the engine can load: from traces of their loaders on this machine."""

from __future__ import annotations

from mcore_reshard.kernels.host import is_importable
from mcore_reshard.planner.layout.traced import TracedLayoutError, TracedLayouts
from mcore_reshard.planner.plan.make_plan import plan_traced
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planning import TracedRequest

from .offline_traces import faults_of_engine, trace_offline
from .trace_cache import TraceCache

_NOTES_SHOWN = 5


def plan_offline(request: TracedRequest) -> tuple[Plan, tuple[str, ...]]:
    """The plan, not proven yet, and notes on it. No GPU and no weights are needed.

    The first time the loaders run, for seconds or minutes. Their traces are kept in a cache of the user's. Raises
    ImportError, which says what to install, BuildError, ProcessError and TracedLayoutError.
    """
    _require_packages(request.engine)
    cache = TraceCache.of(request)
    if (traces := cache.read()) is None:
        traces = trace_offline(
            request.trainer_config,
            request.train,
            request.gen,
            request.engine,
            engine_config=request.engine_config,
            fp8_block=request.form.block if request.form and request.quantized_trainer else None,
        )
        plan = _plan(request, traces.layouts(request.engine))
        if plan.pairs and (faults := faults_of_engine(plan, request.engine_config)):
            raise TracedLayoutError(faults)
        cache.write(traces)
    layouts = traces.layouts(request.engine)
    notes = layouts.notes[:_NOTES_SHOWN]
    if more := len(layouts.notes) - len(notes):
        notes += (f"and {more} more tensors of the trainer that no Hugging Face tensor fills",)
    return _plan(request, layouts), notes


def _plan(request: TracedRequest, layouts: TracedLayouts) -> Plan:
    return plan_traced(layouts, request.train, request.gen, model=request.model, form=request.form)


def _require_packages(engine: str) -> None:
    modules = {"torch": "torch", "megatron-core": "megatron.core", "megatron-bridge": "megatron.bridge", engine: engine}
    if missing := [name for name, module in modules.items() if not is_importable(module)]:
        raise ImportError(
            f"a plan from traces runs the loaders of Megatron-Bridge and {engine}:"
            f" {', '.join(missing)} not installed; from a clone of mcore-reshard: pip install '.[megatron,{engine}]'"
        )
