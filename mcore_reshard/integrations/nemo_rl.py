"""NeMo-RL: a checkpoint engine whose bytes our refit moves, and subclasses of the two workers that hold the models.

    policy.generation:
      refit_transport: "mcore_reshard.integrations.nemo_rl:RefitEngine"
      refit_cfg: {"mcore_reshard.integrations.nemo_rl:RefitEngine": {transport: auto}}     # fields of Options
      vllm_kwargs: {worker_cls: mcore_reshard.integrations.nemo_rl.VllmWorker}

    Policy(..., worker_extension_cls_fqn=register_policy_worker())                          # no key sets this one

NeMo-RL builds an engine in every policy worker and in every vLLM worker, and hands it neither model. So both workers are
subclasses that say where they are. Source: NeMo-RL of August 2026, utils/checkpoint_engines/base.py, whose driver is
weight_sync/checkpoint_engine_weight_synchronizer.py.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.mesh import format_mesh, parse_gen_mesh
from mcore_reshard.session.store_server import ServedStore, serve_store
from mcore_reshard.trainers.refit_trainer import RefitTrainer

from .common import mesh_of_replicas

if TYPE_CHECKING:
    from mcore_reshard.engines.vllm.worker import RefitWorker

POLICY_WORKER = "mcore_reshard.integrations.nemo_rl.PolicyWorker"
VLLM_WORKER = "mcore_reshard.integrations.nemo_rl.VllmWorker"
_NO_WORKER = (
    "the checkpoint engine of mcore-reshard finds no worker in this process: give Policy"
    f" worker_extension_cls_fqn={POLICY_WORKER!r}, and policy.generation.vllm_kwargs worker_cls: {VLLM_WORKER}"
)

Metadata = list[dict[str, Any]]  # what every engine's `prepare` returned: of policy ranks first, then of vLLM's


_workers: list[Any] = []  # of this process: none, or the one that has its engine


class FoundWorker:
    """A base of workers whose checkpoint engine finds them: put it before NeMo-RL's or vLLM's own class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _workers[:] = [self]


class RefitEngine(CheckpointEngine):
    """A policy rank's or a vLLM worker's end of the refits.

    `options` are those of `refit_cfg`: fields of `Options`, and `connect_timeout_s`. NeMo-RL's `bucket_size` is not used:
    transports have scratch of their own (`scratch_bytes`). Raises TypeError and ValueError for wrong options.
    """

    def __init__(
        self, bucket_size: int, *, release_after_refit: bool = False, connect_timeout_s: float = 600.0, **options: Any
    ) -> None:
        self._connect_timeout_s, self._options = connect_timeout_s, Options(**options)
        self._version = 0
        self._trainer: RefitTrainer | None = None
        self._store: ServedStore | None = None

    def prepare(self) -> dict[str, Any]:
        """What the other ranks must know: of policy rank 0 the store that it serves, of a vLLM worker its model and mesh."""
        worker = _found_worker()
        if _is_policy(worker):
            if torch.distributed.get_rank() == 0:
                self._store = serve_store(host=_own_host())
            return {} if self._store is None else {"store": self._store.address}
        return _describe_engine(worker.vllm_config)

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: Metadata
    ) -> None:
        """Plan, publish the plan and meet vLLM's workers, which connect at the same time. Raises as `megatron.connect`."""
        from mcore_reshard.megatron import connect

        worker, engine = _found_worker(), metadata[train_world_size]
        if getattr(worker, "draft_model", None) is not None:
            raise ValueError("policy.draft: refits do not move the draft model that NeMo-RL trains beside the policy")
        self._trainer = connect(
            [worker.model],
            worker.megatron_bridge,
            json.loads(engine["config"]),
            gen=mesh_of_replicas(
                parse_gen_mesh(engine["mesh"]),
                rollout_world_size,
                "NeMo-RL's vLLM engines are replicas; with experts in parallel over tp * dp run one engine alone",
            ),
            store=metadata[0]["store"],
            connect_timeout_s=self._connect_timeout_s,
            options=self._options,
        )

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: Metadata
    ) -> None:
        """Meet the trainer. Raises as `RefitWorker.connect_refit`."""
        mesh = parse_gen_mesh(metadata[train_world_size]["mesh"])
        _found_worker().connect_refit(
            metadata[0]["store"],
            replica=rollout_rank // mesh.world,
            connect_timeout_s=self._connect_timeout_s,
            **asdict(self._options),
        )

    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        """Refit. `weights`, Megatron-Bridge's export of whole tensors, is never begun."""
        weights.close()
        if self._trainer is None:
            raise SessionError("this policy rank is in no session: NeMo-RL must call init_policy_process_group first")
        self._version += 1
        self._trainer.refit(self._version)

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Refit. It yields no batch: the tensors are in place, and NeMo-RL's loader has nothing to load."""
        _found_worker().refit()
        nothing: tuple[list[tuple[str, torch.Tensor]], ...] = ()
        for batch in nothing:
            yield batch

    def finalize(self) -> None:
        """Leave the session; NeMo-RL calls it when it shuts down, and after every refit with `release_after_refit`."""
        if self._trainer is not None:
            self._trainer.close()
        elif not _is_policy(worker := _found_worker()):
            worker.close_refit()
        if self._store is not None:
            self._store.close()
        self._trainer = self._store = None


def register_policy_worker() -> str:
    """The name for `Policy(..., worker_extension_cls_fqn=...)`; its actors run in the Python of NeMo-RL's own worker."""
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY, MCORE_EXECUTABLE

    ACTOR_ENVIRONMENT_REGISTRY[POLICY_WORKER] = MCORE_EXECUTABLE
    return POLICY_WORKER


def __getattr__(name: str) -> Any:
    """`PolicyWorker` and `VllmWorker`, each made where it is used: the other one's packages are absent there."""
    if name not in ("PolicyWorker", "VllmWorker"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = _policy_worker() if name == "PolicyWorker" else _vllm_worker()
    return value


def _policy_worker() -> Any:
    """NeMo-RL's Megatron policy worker, as its module makes one of the same implementation."""
    import ray
    from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
    from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

    class PolicyWorker(FoundWorker, MegatronPolicyWorkerImpl):
        pass

    return ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))(PolicyWorker)


def _vllm_worker() -> type[RefitWorker]:
    """vLLM's worker of this platform, which can refit."""
    from vllm.platforms import current_platform

    from mcore_reshard.engines.vllm.worker import RefitWorker

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker as Worker
    else:
        from vllm.v1.worker.gpu_worker import Worker  # type: ignore[assignment]

    class VllmWorker(FoundWorker, RefitWorker, Worker):
        pass

    return VllmWorker


def _found_worker() -> Any:
    if not _workers:
        raise SessionError(_NO_WORKER)
    return _workers[0]


def _is_policy(worker: Any) -> bool:
    return hasattr(worker, "megatron_bridge")


def _own_host() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _describe_engine(vllm_config: Any) -> dict[str, Any]:
    """The engine's config.json and its mesh, as text. Raises ValueError for what NeMo-RL would undo after a refit."""
    from mcore_reshard.vllm import gen_mesh_of

    if (cache_dtype := str(vllm_config.cache_config.cache_dtype)).startswith("fp8"):
        raise ValueError(
            f"kv_cache_dtype {cache_dtype}: after each refit NeMo-RL processes all of vLLM's weights anew, and this transport"
            " brings no scales of the KV cache; use kv_cache_dtype: auto, or another refit_transport"
        )
    config = vllm_config.model_config.hf_config
    return {"config": config.to_json_string(use_diff=False), "mesh": format_mesh(gen_mesh_of(vllm_config))}
