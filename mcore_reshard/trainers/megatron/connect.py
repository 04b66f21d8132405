"""The refit as a policy worker sees it: connect once, refit after each optimizer step, close.

    trainer = connect(model_chunks, bridge, hf_config, gen="tp=4", store="10.0.0.1:29600")   # on every training rank
    trainer.refit(step)                                                                      # weights may change again
    trainer.close()

Trainers with other tensors or another export use the layer below: `plan_refit`, `TrainEndpoint` and the exports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from mcore_reshard.kernels.errors import RefitError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.transports.registry import resolve
from mcore_reshard.planner.layout.engines import DEFAULT_ENGINE
from mcore_reshard.planner.layout.mesh import GenMesh
from mcore_reshard.planner.model.precision import PRECISIONS
from mcore_reshard.planner.plan.plan import Plan, Policy
from mcore_reshard.planner.plan.trace_check import checkpoint_of
from mcore_reshard.planning import RefitRequest, read_refit_request, traced_format
from mcore_reshard.session.endpoints import Export, TrainEndpoint
from mcore_reshard.session.part import RankOfPlan
from mcore_reshard.session.trace_exchange import collect_traces, require_planned_layout
from mcore_reshard.trainers.quantized_export import pairs_by_name
from mcore_reshard.trainers.refit_trainer import (
    RefitTrainer,
    SessionServer,
    agree_on_model,
    collect_problems,
    meet_engines,
    session_problems,
)
from mcore_reshard.trainers.trainable import LocalTensors, freeze, watched
from mcore_reshard.trainers.world import gather_from_all, own_rank, run_on_all_ranks

from .adapters import merged_adapters
from .alternation import refuse_alternating_export
from .model import (
    decoder_of,
    export_hf,
    has_decoder,
    local_tensors,
    parameters_of_tensors,
    rank_coordinate,
    tensors_of_hf_names,
)
from .plan_refit import plan_refit
from .plan_traced_refit import plan_traced_refit
from .quantized_pairs import export_with_pairs
from .trace import kept_of_trainer, trace_live
from .whole_weights import unreadable_weights


def connect(
    model_chunks: torch.nn.Module | Sequence[torch.nn.Module],
    bridge: Any,
    hf_config: Any,
    *,
    gen: str | GenMesh,
    store: str,
    gen_dtype: str | None = None,
    policy: Policy = "exact",
    engine: str = DEFAULT_ENGINE,
    trainable_only: bool = False,
    connect_timeout_s: float = 600.0,
    options: Options = Options(),  # noqa: B008
) -> RefitTrainer:
    """Plan the refit of a live Megatron-Core model, prove the plan, publish it, and meet the engine's ranks.

    Call it on every training rank; torch's default process group must be the training world.
    - `model_chunks`: the model, or its virtual pipeline chunks.
    - `bridge`: the AutoBridge that built the model (`from_hf_pretrained`); None if no parameter takes the misc route.
    - `hf_config`: the engine's config.json, as a dict, a path or a transformers config.
    - `gen`: the engine's mesh, as in "tp=4,dp=2".
    - `store`: "host:port". Training rank 0 starts a store there unless one answers already.
    - `gen_dtype`: the engine's precision, as in "fp8". The trainer's own is read off its parameters.
    - `trainable_only`: after the first refit of a session, move only parameters with `requires_grad`, and buffers.
    - `connect_timeout_s`: how long to wait for engines that are still starting.

    Raises RefitError, listing everything wrong with the arguments: also weights that FSDP shards, and offloaded ones. Then as
    `plan_refit` and `TrainEndpoint.prepare`, and ValueError where a bridge is needed. If one rank raises, all ranks do, and
    no store stays behind.
    """
    chunks, request = run_on_all_ranks(
        lambda: _read_arguments(
            model_chunks, bridge, hf_config, gen, store, gen_dtype, policy, engine, connect_timeout_s, options
        )
    )
    model = agree_on_model(request)
    server = SessionServer(store, options.timeout_s)

    adapters = merged_adapters(bridge, chunks)

    def plan_by_rules(options: Options) -> RefitTrainer:
        plan = plan_refit(
            request.config,
            chunks,
            request.gen,
            model=model,
            policy=policy,
            gen_dtype=gen_dtype,
            engine=engine,
            adapters=adapters,
        )
        return bind(plan, options, _layout_check(plan, bridge, chunks))

    def plan_from_traces(options: Options) -> RefitTrainer:
        if bridge is None:
            raise RefitError("the engine holds more than layout rules know: give connect() the AutoBridge of the model")
        run_on_all_ranks(server.start)
        collect = partial(
            collect_traces,
            ranks=request.gen.world,
            address=store,
            options=options,
            connect_timeout_s=connect_timeout_s,
        )
        family = str(request.config.get("model_type"))
        plan = plan_traced_refit(
            family,
            bridge,
            chunks,
            request.gen,
            collect,
            model=model,
            engine=engine,
            adapters=adapters,
            form=None if request.has_rules else traced_format(request.config, gen_dtype),
        )
        return bind(plan, options, None)

    def bind(plan: Plan, options: Options, check_layout: Callable[[], None] | None) -> RefitTrainer:
        export = _choose_export(plan, bridge, chunks, options)
        tensors: LocalTensors = partial(local_tensors, chunks) if adapters is None else adapters.local_tensors
        if trainable_only:
            made_of = parameters_of_tensors(chunks) if adapters is None else adapters.parameters_of_tensors()
            plan = freeze(plan, made_of, partial(tensors_of_hf_names, bridge, chunks))
            tensors = watched(tensors, made_of)
        endpoint = TrainEndpoint(
            RankOfPlan(plan, "train", own_rank()),
            tensors,
            store=store,
            export=export,
            before_reads=None if adapters is None else adapters.merge,
            check_layout=check_layout,
            options=options,
        )
        return RefitTrainer(plan, endpoint, server)

    if not request.has_rules:
        return meet_engines(plan_from_traces, server, store, connect_timeout_s, options)
    return meet_engines(plan_by_rules, server, store, connect_timeout_s, options, plan_from_traces)


def _layout_check(plan: Plan, bridge: Any, model_chunks: Sequence[torch.nn.Module]) -> Callable[[], None] | None:
    """A check that holds what Megatron-Bridge does on this rank against the plan's rules, and raises LayoutError.

    None without a bridge, and where all ranks of an equal trainer have passed it before.
    """
    if bridge is None:
        return None
    kept = run_on_all_ranks(lambda: kept_of_trainer(bridge, model_chunks, agrees_with=plan.digest))
    if all(gather_from_all(kept.read() is not None)):
        return None

    def check() -> None:
        trace = trace_live(bridge, model_chunks, checkpoint_of(plan, quantized=False))
        loader = ", ".join(f"{name} {version(name)}" for name in ("megatron-core", "megatron-bridge"))
        require_planned_layout(plan, "train", own_rank(), trace, loader)
        kept.write([])

    return check


def _read_arguments(
    model_chunks: Any,
    bridge: Any,
    hf_config: Any,
    gen: Any,
    store: Any,
    gen_dtype: Any,
    policy: Any,
    engine: Any,
    timeout_s: Any,
    options: Any,
) -> tuple[list[torch.nn.Module], RefitRequest]:
    """The chunks, and what is asked for.

    Raises RefitError with every fault that this rank alone can see, before ranks wait for each other in `plan_refit`.
    """
    problems: list[str] = []
    with collect_problems(problems):
        chunks = _chunks_of(model_chunks)
        problems += unreadable_weights(chunks)
    with collect_problems(problems):
        request = read_refit_request(hf_config, gen, policy, engine)
        if not request.has_rules and bridge is None:
            problems.append("a model without layout rules is planned from traces: give connect() its AutoBridge")
        if not request.has_rules:
            traced_format(request.config, gen_dtype)
    problems += session_problems(store, timeout_s, options)
    if gen_dtype not in (None, *PRECISIONS):
        problems.append(f"unknown gen_dtype {gen_dtype!r}, known: {', '.join(PRECISIONS)}")
    if problems:
        raise RefitError("\n  ".join(("connect() cannot use its arguments:", *problems)))
    return chunks, request


def _chunks_of(model_chunks: Any) -> list[torch.nn.Module]:
    """The chunks as a list. Raises ValueError where one is no live Megatron-Core model."""
    chunks = list(model_chunks) if isinstance(model_chunks, Iterable) else [model_chunks]
    others = [type(chunk).__name__ for chunk in chunks if not has_decoder(chunk)]
    if others or not chunks:
        problem = f"has no decoder in {', '.join(others)}" if others else "is empty"
        raise ValueError(f"model_chunks {problem}: give the Megatron-Core model, or the list of its chunks here")
    rank_coordinate(chunks)
    local_tensors(chunks)
    return chunks


def _choose_export(plan: Plan, bridge: Any, model_chunks: Sequence[torch.nn.Module], options: Options) -> Export | None:
    """The export for the misc route and golden: one with FP8 pairs if the engine keeps some of those parameters in FP8."""
    tensors = local_tensors(model_chunks)
    golden = resolve(options.transport, next(iter(tensors.values())).device.type).connect is None
    if golden:
        refuse_alternating_export(decoder_of(model_chunks[0]).config, tensors)
    if bridge is None:
        if plan.misc or golden:
            names = "every parameter (golden)" if golden else f"{len(plan.misc_names)} parameters (the misc route)"
            raise ValueError(f"Megatron-Bridge exports {names}: give connect() the AutoBridge that built the model")
        return None
    quantized = {pair.weight for pair in plan.pairs}
    if quantized and (golden or any(entry.group in quantized for entry in plan.misc)):
        return partial(export_with_pairs, bridge, model_chunks, pairs_by_name(plan))
    return partial(export_hf, bridge, model_chunks)
