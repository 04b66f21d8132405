"""A policy worker's whole part in a refit: connect once, refit after each optimizer step, close.

    trainer = connect(model_chunks, bridge, hf_config, gen="tp=4", store="10.0.0.1:29600")   # on every training rank
    trainer.refit(step)                                                                      # weights may change again
    trainer.close()

`connect` reads the mesh, the build and the precision off the live model. Trainers with other tensors or another export
use the layer below: `plan_refit`, `TrainEndpoint` and the exports.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any

import torch

from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.store import split_address
from mcore_reshard.kernels.transports.registry import resolve
from mcore_reshard.planner.layout.engines import DEFAULT_ENGINE
from mcore_reshard.planner.layout.mesh import GenMesh, parse_gen_mesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.model.families import parameters_from_config
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan, Policy
from mcore_reshard.session.endpoints import Export, RefitReport, TrainEndpoint
from mcore_reshard.session.plan_exchange import publish_plan
from mcore_reshard.session.store_server import StoreServer, start_store_if_absent
from mcore_reshard.trainers.quantized_export import pairs_by_name

from .model import export_hf, local_tensors
from .plan_refit import plan_refit
from .quantized_pairs import export_with_pairs
from .world import gather_from_all, own_rank, run_on_all_ranks

_GRACE_S = 5.0  # after a failure: time for all ranks to read its cause before rank 0 stops the store


class RefitTrainer:
    """One training rank, connected: `connect` makes it. Use it as a context manager, or call `close`."""

    def __init__(self, plan: Plan, endpoint: TrainEndpoint, server: StoreServer | None) -> None:
        self.plan = plan
        self._endpoint = endpoint
        self._server = server  # on training rank 0, unless another store answered

    def refit(self, step: int, kv_scales: Mapping[str, float] | None = None) -> RefitReport:
        """Move the current weights into the engine; return once all ranks of both worlds have acknowledged them.

        All ranks call it with the same `step`, larger than the last. `kv_scales` and the errors are those of
        `TrainEndpoint.refit`. With `overlap_param_gather`, force the gather of the parameters first.
        """
        return self._endpoint.refit(step, kv_scales=kv_scales)

    def close(self) -> None:
        """Leave the session; on training rank 0 also stop the store that `connect` started. May be called twice.

        After a failure rank 0 keeps that store up for 5 s more, so that all ranks can read the cause.
        """
        failed = self._endpoint.failure is not None
        self._endpoint.close()
        server, self._server = self._server, None
        if server is not None:
            if failed:
                time.sleep(_GRACE_S)
            server.close()

    def __enter__(self) -> RefitTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(
    model_chunks: Sequence[torch.nn.Module],
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
    - `bridge`: the AutoBridge that built the model (`from_hf_pretrained`); None if no parameter takes the misc route.
    - `hf_config`: the engine's config.json, as a dict, a path or a transformers config.
    - `gen`: the engine's mesh, as in "tp=4,dp=2".
    - `store`: "host:port". Training rank 0 starts a store there unless one answers already.
    - `gen_dtype`: the engine's precision, as in "fp8". The trainer's own is read off its parameters.
    - `connect_timeout_s`: how long to wait for engines that are still starting.

    Raises ConfigError, MeshError, ProofError, BindError, TransportUnavailable, SessionError or ValueError. If one rank
    raises, all ranks do, and no store stays behind.
    """
    config, gen_mesh = run_on_all_ranks(lambda: _read_inputs(model_chunks, hf_config, gen, store))
    model = gather_from_all(_model_name(hf_config, config))[0]

    def plan_and_bind() -> tuple[Plan, TrainEndpoint]:
        plan = plan_refit(
            config, model_chunks, gen_mesh, model=model, policy=policy, gen_dtype=gen_dtype, engine=engine
        )
        export = _choose_export(plan, bridge, model_chunks, options)
        tensors = partial(local_tensors, model_chunks)
        schedule = schedule_of(plan, "train", own_rank())
        return plan, TrainEndpoint(schedule, tensors, store=store, export=export, options=options)

    plan, endpoint = run_on_all_ranks(plan_and_bind)
    server = run_on_all_ranks(lambda: _publish(plan, store, options) if own_rank() == 0 else None)
    trainer = RefitTrainer(plan, endpoint, server)
    try:
        endpoint.prepare(timeout_s=connect_timeout_s)
    except BaseException:
        trainer.close()
        raise
    return trainer


def _read_inputs(
    model_chunks: Sequence[torch.nn.Module], hf_config: Any, gen: str | GenMesh, store: str
) -> tuple[dict[str, Any], GenMesh]:
    """Run every step that may fail on one rank alone, before ranks wait for each other in `plan_refit`."""
    split_address(store)
    local_tensors(model_chunks)
    config = _config_of(hf_config)
    parameters_from_config(config)
    return config, parse_gen_mesh(gen) if isinstance(gen, str) else gen


def _config_of(hf_config: Any) -> dict[str, Any]:
    if isinstance(hf_config, Mapping):
        return dict(hf_config)
    if isinstance(hf_config, (str, PathLike)):
        return load_config(str(hf_config))
    if hasattr(hf_config, "to_dict"):
        return dict(hf_config.to_dict())
    raise ValueError(f"hf_config is a {type(hf_config).__name__}: give a dict, a path or a transformers config")


def _model_name(hf_config: Any, config: Mapping[str, Any]) -> str:
    """The model's name in the plan: the last part of its path or repository, else its model_type."""
    path = hf_config if isinstance(hf_config, (str, PathLike)) else config.get("_name_or_path")
    name = str(path or "").rstrip("/").removesuffix("/config.json").rpartition("/")[2]
    return name or str(config.get("model_type", ""))


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


def _publish(plan: Plan, store: str, options: Options) -> StoreServer | None:
    """On training rank 0: start a store if none answers, and put the plan there."""
    server = start_store_if_absent(store, options.timeout_s)
    try:
        publish_plan(plan, store, session=options.session, timeout_s=options.timeout_s)
    except BaseException:
        if server is not None:
            server.close()
        raise
    return server
