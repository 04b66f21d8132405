"""The refit as a policy worker sees it: connect once, refit after each optimizer step, close.

    trainer = connect(model_chunks, bridge, hf_config, gen="tp=4", store="10.0.0.1:29600")   # on every training rank
    trainer.refit(step)                                                                      # weights may change again
    trainer.close()

Trainers with other tensors or another export use the layer below: `plan_refit`, `TrainEndpoint` and the exports.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed import TCPStore

from mcore_reshard.kernels.errors import RefitError, SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.polling import CLOSE_S
from mcore_reshard.kernels.rendezvous.store import split_address
from mcore_reshard.kernels.transports.registry import resolve
from mcore_reshard.planner.layout.engines import DEFAULT_ENGINE
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.model.precision import PRECISIONS
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan, Policy
from mcore_reshard.planning import InputError, PlanRequest, read_request
from mcore_reshard.session.endpoints import Export, RefitReport, TrainEndpoint
from mcore_reshard.session.plan_exchange import publish_plan
from mcore_reshard.session.store_server import start_store_if_absent
from mcore_reshard.trainers.quantized_export import pairs_by_name

from .model import export_hf, local_tensors, rank_coordinate, unwrapped
from .plan_refit import plan_refit
from .quantized_pairs import export_with_pairs
from .world import gather_from_all, own_rank, run_on_all_ranks


class RefitTrainer:
    """One training rank, connected: `connect` makes it. Use it as a context manager, or call `close`."""

    def __init__(self, plan: Plan, endpoint: TrainEndpoint) -> None:
        self.plan = plan
        self._endpoint = endpoint
        self._store: TCPStore | None = None  # on training rank 0, unless another store answered: it serves while kept

    def refit(self, step: int, kv_scales: Mapping[str, float] | None = None) -> RefitReport:
        """Move the current weights into the engine; return once all ranks of both worlds have acknowledged them.

        Arguments and errors are those of `TrainEndpoint.refit`; `step` is the version. With `overlap_param_gather`,
        force the gather of the parameters first.
        """
        return self._endpoint.refit(step, kv_scales=kv_scales)

    def close(self) -> None:
        """Leave the session; on training rank 0 also stop the store that `connect` started. May be called twice.

        After a failure rank 0 keeps that store up for 5 s more, so that all ranks can read the cause.
        """
        failed = self._endpoint.failure is not None
        self._endpoint.close()
        if failed and self._store is not None:
            time.sleep(CLOSE_S)
        self._store = None  # the last reference: the server ends

    def __enter__(self) -> RefitTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
    - `connect_timeout_s`: how long to wait for engines that are still starting.

    Raises RefitError, listing everything wrong with the arguments; then as `plan_refit` and `TrainEndpoint.prepare`, and
    ValueError where a bridge is needed. If one rank raises, all ranks do, and no store stays behind.
    """
    chunks, request = run_on_all_ranks(
        lambda: _read_arguments(
            model_chunks, hf_config, gen, store, gen_dtype, policy, engine, connect_timeout_s, options
        )
    )
    model = gather_from_all(request.model)[0]

    def plan_and_bind() -> RefitTrainer:
        plan = plan_refit(
            request.config, chunks, request.gen, model=model, policy=policy, gen_dtype=gen_dtype, engine=engine
        )
        export = _choose_export(plan, bridge, chunks, options)
        tensors = partial(local_tensors, chunks)
        schedule = schedule_of(plan, "train", own_rank())
        return RefitTrainer(plan, TrainEndpoint(schedule, tensors, store=store, export=export, options=options))

    trainer = run_on_all_ranks(plan_and_bind)

    def publish() -> None:
        if own_rank() == 0:
            trainer._store = start_store_if_absent(store, options.timeout_s)
            publish_plan(trainer.plan, store, session=options.session, timeout_s=options.timeout_s)

    try:
        run_on_all_ranks(publish)
        trainer._endpoint.prepare(timeout_s=connect_timeout_s)
    except BaseException:
        trainer.close()
        raise
    return trainer


def _read_arguments(
    model_chunks: Any,
    hf_config: Any,
    gen: Any,
    store: Any,
    gen_dtype: Any,
    policy: Any,
    engine: Any,
    timeout_s: Any,
    options: Any,
) -> tuple[list[torch.nn.Module], PlanRequest]:
    """The chunks, and a request with the config and the generation mesh, but not yet the model's training mesh.

    Raises RefitError with every fault that this rank alone can see, before ranks wait for each other in `plan_refit`.
    """
    problems: list[str] = []
    with _collect_problems(problems):
        chunks = _chunks_of(model_chunks)
    with _collect_problems(problems):
        request = read_request(hf_config, TrainMesh(), gen, policy, engine=engine)
    with _collect_problems(problems):
        split_address(str(store))
    if not isinstance(options, Options):
        problems.append(f"options is a {type(options).__name__}: give mr.Options(...)")
    if not isinstance(timeout_s, int | float) or not timeout_s > 0:
        problems.append(f"connect_timeout_s must be a number of seconds above 0, not {timeout_s!r}")
    if gen_dtype not in (None, *PRECISIONS):
        problems.append(f"unknown gen_dtype {gen_dtype!r}, known: {', '.join(PRECISIONS)}")
    if problems:
        raise RefitError("\n  ".join(("connect() cannot use its arguments:", *problems)))
    return chunks, request


@contextmanager
def _collect_problems(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        problems += filter(None, (*error.problems, error.remedy))
    except (ValueError, SessionError) as error:
        problems.append(str(error))


def _chunks_of(model_chunks: Any) -> list[torch.nn.Module]:
    """The chunks as a list. Raises ValueError where one is no live Megatron-Core model."""
    chunks = list(model_chunks) if isinstance(model_chunks, Iterable) else [model_chunks]
    others = [type(chunk).__name__ for chunk in chunks if not hasattr(unwrapped(chunk), "decoder")]
    if others or not chunks:
        problem = f"has no decoder in {', '.join(others)}" if others else "is empty"
        raise ValueError(f"model_chunks {problem}: give the Megatron-Core model, or the list of its chunks here")
    rank_coordinate(chunks)
    local_tensors(chunks)
    return chunks


def _choose_export(plan: Plan, bridge: Any, model_chunks: Sequence[torch.nn.Module], options: Options) -> Export | None:
    """The export for the misc route and golden: one with FP8 pairs if the engine keeps some of those parameters in FP8."""
    device = next(iter(local_tensors(model_chunks).values())).device.type
    golden = resolve(options.transport, device).connect is None
    if bridge is None:
        if plan.misc or golden:
            names = "every parameter (golden)" if golden else f"{len([*plan.misc_names()])} parameters (the misc route)"
            raise ValueError(f"Megatron-Bridge exports {names}: give connect() the AutoBridge that built the model")
        return None
    quantized = {pair.weight for pair in plan.pairs}
    if quantized and (golden or any(entry.group in quantized for entry in plan.misc)):
        return partial(export_with_pairs, bridge, model_chunks, pairs_by_name(plan))
    return partial(export_hf, bridge, model_chunks)
