"""verl 0.9: refits as a checkpoint engine, for trainers and rollouts on GPUs of their own.

    actor_rollout_ref:
      rollout:
        checkpoint_manager_class: mcore_reshard.integrations.verl.RefitManager
        checkpoint_engine: {backend: mcore_reshard, custom_backend_module: mcore_reshard.integrations.verl,
                            engine_kwargs: {mcore_reshard: {gen: "tp=4"}}}
        engine_kwargs: {vllm: {worker_extension_cls: mcore_reshard.integrations.verl_vllm.RefitExtension}}

verl's own CheckpointEngineManager drives every step. The engines on training ranks refit; those beside vLLM's workers
ask the vLLM server of their replica to take part. Nothing is gathered, and no tensor passes through Ray.

Importing this module registers the engine, and the adapter of vLLM that understands it (verl_vllm.py). verl does so in
all processes, because of `custom_backend_module`.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import ray
import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineManager, CheckpointEngineRegistry
from verl.workers.rollout import base as rollout

from mcore_reshard import dtensor, megatron
from mcore_reshard.kernels.errors import RefitError
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.mesh import parse_gen_mesh, replica_ranks
from mcore_reshard.session.store_server import ServedStore, serve_store
from mcore_reshard.trainers.refit_trainer import RefitTrainer

from .common import mesh_of_replicas

BACKEND = "mcore_reshard"
Call = tuple[str, dict[str, Any]]  # a method of RefitWorker, and its arguments

rollout._ROLLOUT_REGISTRY["vllm", "async"] = "mcore_reshard.integrations.verl_vllm.RefitServerAdapter"


@CheckpointEngineRegistry.register(BACKEND)
class RefitEngine(CheckpointEngine):
    """One rank's part, in both worlds. verl makes it once, and calls its methods in every step, in the order below.

    - `gen`: the mesh of one rollout replica, as in "tp=4" or "tp=4,ep=4". How many replicas there are, verl says.
    - `connect_timeout_s`: how long both worlds wait for each other in the first step.
    - `options`: the fields of `mr.Options`, but the session's name.
    """

    wire_format = BACKEND  # tells RefitServerAdapter that receive_weights yields calls instead of tensors

    def __init__(
        self, bucket_size: int, is_master: bool = False, *, gen: str, connect_timeout_s: float = 600.0, **options: Any
    ) -> None:
        self._gen, self._connect_timeout_s, self._options = gen, connect_timeout_s, options
        Options(**options)  # raises here, in the constructor, what is wrong with them
        self._is_master = is_master
        self._member = uuid.uuid4().hex  # another one after a failure, so that all members connect anew
        self._session = self._connected = ""
        self._store: ServedStore | None = None
        self._trainer: RefitTrainer | None = None
        self._version: int | None = None

    def prepare(self) -> dict[str, Any]:
        """What `build_topology` needs of this rank. Training rank 0 starts the store."""
        if self._is_master and self._store is None:
            self._store = serve_store(0, ray.util.get_node_ip_address())
        return {"member": self._member, "store": self._store.address if self._store else None}

    @classmethod
    def build_topology(
        cls, trainer_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Arguments of `init_process_group`, one a rank. The session's name says who its members are."""
        members = "".join(each["member"] for each in metadata)
        session = f"verl-{hashlib.sha256(members.encode()).hexdigest()[:16]}"
        address = next(each["store"] for each in metadata if each["store"])

        def arguments(world_size: int) -> dict[str, list[Any]]:
            return {
                "rank": [*range(world_size)],
                "rollout_world_size": [rollout_world_size] * world_size,
                "store": [address] * world_size,
                "session": [session] * world_size,
            }

        return arguments(trainer_world_size), arguments(rollout_world_size)

    def init_process_group(self, rank: int, rollout_world_size: int, store: str, session: str) -> None:
        """Note where to meet. Ranks that are in this session already stay connected."""
        if session != self._session:
            self._leave()
        self._session, self._address = session, store
        self._mesh = mesh_of_replicas(
            parse_gen_mesh(self._gen),
            rollout_world_size,
            f"let engine_kwargs.{BACKEND}.gen be the mesh of one rollout replica (with expert parallelism, of the only one)",
        )
        self._replica = rank // replica_ranks(self._mesh)

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """On a training rank: refit all replicas with the weights of verl's model engine; connect before the first time.

        `weights` is that engine (RefitManager), or what an engine of verl_engines.py exports. Blocks this actor, as NCCL
        would. Returns metrics. Raises RefitError as `connect` and `RefitTrainer.refit`; the next call connects anew.
        """
        model_engine = getattr(weights, "model_engine", weights)
        try:
            refuse_unsupported(model_engine)
            if self._trainer is None:
                self._trainer = self._connect(model_engine)
            version = (self._version or 0) + 1 if global_steps is None else global_steps
            report = self._trainer.refit(version, rollback=self._version is not None and version <= self._version)
        except BaseException:
            self._leave()
            self._member = uuid.uuid4().hex
            raise
        self._version = report.version
        return {
            "refit/seconds": report.seconds,
            "refit/bytes": float(report.nbytes),
            "refit/misc_bytes": float(report.misc_bytes),
        }

    def _connect(self, engine: Any) -> RefitTrainer:
        given: dict[str, Any] = {
            "gen": self._mesh,
            "store": self._address,
            "connect_timeout_s": self._connect_timeout_s,
            "options": Options(**self._options, session=self._session),
        }
        hf_config = engine.model_config.hf_config
        if isinstance(engine.module, torch.nn.Module):
            return dtensor.connect(engine.module, hf_config, **given)
        return megatron.connect(engine.module, engine.bridge, hf_config, **given)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[Call, None]:
        """On a rollout rank: what the vLLM workers of its replica shall be called with."""
        if self._connected != self._session:
            yield (
                "connect_refit",
                {
                    "store": self._address,
                    "replica": self._replica,
                    "connect_timeout_s": self._connect_timeout_s,
                    **self._options,
                    "session": self._session,
                },
            )
            self._connected = self._session
        yield "refit", {"version": global_steps}

    def finalize(self) -> None:
        """Nothing: ranks stay connected from step to step."""

    def _leave(self) -> None:
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.close()


class RefitManager(CheckpointEngineManager):
    """verl's manager, which hands training ranks the model engine in place of gathered weights.

    "delta_sharded" is verl's mode for that. The registered engine keeps its name, so no check for that backend applies.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        backend = self.config.backend
        if backend != BACKEND:
            raise RefitError(f"RefitManager wants checkpoint_engine.backend: {BACKEND}, not {backend}")
        self.backend = "delta_sharded"


def refuse_unsupported(engine: Any) -> None:
    """Raise RefitError, listing what this engine's configuration has that refits cannot read in place."""
    lora = getattr(engine.model_config, "lora", None) or {}
    refused = {
        "vanilla_mbridge: set it to False, for Megatron-Bridge": getattr(engine, "vanilla_bridge", False),
        "param_offload: set it to False; refits read weights where they are": getattr(
            engine, "_is_offload_param", False
        ),
        "quantization-aware training: the engine wants what verl makes of the weights": getattr(
            engine, "_qat_enabled", False
        ),
        "LoRA without merge: set model.lora.merge to True": lora.get("rank", 0) > 0 and not lora.get("merge", False),
    }
    if problems := [what for what, holds in refused.items() if holds]:
        raise RefitError("\n  ".join(("verl's model engine cannot be refitted from:", *problems)))
