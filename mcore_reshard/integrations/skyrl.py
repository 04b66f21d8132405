"""SkyRL 0.3: a Megatron policy worker that refits, and a trainer that uses it, for engines on GPUs of their own.

    class Exp(BasePPOExp):                                                 # SkyRL's way to bring one's own trainer
        def get_trainer(self, **given):
            return mcore_reshard.integrations.skyrl.RefitPPOTrainer(**given)

    generator.inference_engine.engine_init_kwargs.weight_transfer_config.backend=mcore_reshard

SkyRL has no registry of weight transfers, and its senders get no model: so two methods of the worker are overridden. vLLM is
reached through SkyRL's client at vLLM's own routes, so `weight_sync_backend` keeps its default, which SkyRL checks.

`RefitPolicyWorker` is made when it is first asked for: its base imports Transformer Engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import ray
import torch
from skyrl.backends.skyrl_train.weight_sync.transfer_strategy import WeightSyncInitInfo
from skyrl.train.trainer import RayPPOTrainer

from mcore_reshard import megatron
from mcore_reshard.kernels.errors import RefitError, SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.mesh import GenMesh
from mcore_reshard.session.store_server import serve_store
from mcore_reshard.trainers.refit_trainer import RefitTrainer
from mcore_reshard.trainers.world import gather_from_all

from .common import mesh_of_replicas, options_for_engine

if TYPE_CHECKING:
    RefitPolicyWorker: type

_OWN_ERROR_S = 5.0  # how long an error of vLLM's waits for the trainer's own, which says more
Result = TypeVar("Result")


@dataclass
class ConnectInfo(WeightSyncInitInfo):
    """What SkyRL's client sends to every server as `init_info` of vLLM's engine."""

    init_info: dict[str, Any]

    def for_servers(self, world_size_per_server: int, num_servers: int, dp_size: int = 1) -> list[ConnectInfo]:
        """One a server; the servers of one data-parallel engine come together, and are one replica."""
        return [replace(self, init_info=self.init_info | {"replica": each // dp_size}) for each in range(num_servers)]

    def to_api_payload(self) -> dict[str, Any]:
        return self.init_info


class RefitsWeights:
    """The two methods of a Megatron policy worker that move weights. Put it before SkyRL's class.

    A subclass sets `refit_options`, and `connect_timeout_s`: how long both worlds wait for each other once.
    """

    refit_options = Options()
    connect_timeout_s = 600.0
    cfg: Any  # this and the next four are MegatronPolicyWorkerBase's
    strategy: Any
    bridge: Any
    actor_module: Any
    _is_lora: bool
    _refit_trainer: RefitTrainer | None = None
    _refit_version = 0

    async def init_weight_sync_state(self, inference_engine_client: Any, inference_engine_cfg: Any) -> None:
        """Plan, and meet the vLLM workers of all servers. On every rank. Raises RefitError, with vLLM's answer."""
        self._refuse_unsupported()
        if self._refit_trainer is not None:
            self._refit_trainer.close()
        own = serve_store(0, ray.util.get_node_ip_address()) if torch.distributed.get_rank() == 0 else None
        self._refit_store = own  # it ends with this worker
        store = gather_from_all(own.address if own else "")[0]
        told = {"store": store, "connect_timeout_s": self.connect_timeout_s}
        told["options"] = options_for_engine(self.refit_options)
        self._refit_trainer = await _beside(
            lambda: megatron.connect(
                self.actor_module,
                self.bridge,
                self.strategy.hf_config,
                gen=mesh_of(inference_engine_cfg),
                store=store,
                connect_timeout_s=self.connect_timeout_s,
                options=self.refit_options,
            ),
            lambda: inference_engine_client.init_weight_update_communicator(ConnectInfo(True, told)),
        )
        torch.distributed.barrier()

    async def broadcast_to_inference_engines(
        self, inference_engine_client: Any, inference_engine_cfg: Any, *_: Any, **__: Any
    ) -> None:
        """Refit all engines. On every rank; SkyRL has paused them. Raises RefitError, and may be called again then."""
        if self._refit_trainer is None:
            raise SessionError("this policy rank is in no session: SkyRL must call init_weight_sync_state first")
        trainer, client = self._refit_trainer, inference_engine_client
        version = self._refit_version + 1

        async def ask() -> None:
            await client._call_all_servers("/start_weight_update", {})
            await client._call_all_servers("/update_weights", {"update_info": {"version": version}})
            await client._call_all_servers("/finish_weight_update", {"weight_version": str(version)})
            asynchronous = self.cfg.fully_async
            if inference_engine_cfg.enable_prefix_caching and (
                not asynchronous.enabled or asynchronous.clear_kv_cache_on_weight_sync
            ):
                await client.reset_prefix_cache(reset_running_requests=True)

        await _beside(lambda: trainer.refit(version), ask)
        self._refit_version = version
        torch.distributed.barrier()

    def _refuse_unsupported(self) -> None:
        refused = {
            "trainer.placement.colocate_all: engines need GPUs of their own": self.cfg.placement.colocate_all,
            "lora_config.merge_lora=false: adapters alone go by disk, through SkyRL's own worker": self._is_lora
            and not self.cfg.policy.megatron_config.lora_config.merge_lora,
        }
        if problems := [what for what, holds in refused.items() if holds]:
            raise RefitError("\n  ".join(("this configuration of SkyRL cannot be refitted from:", *problems)))


class RefitsModels:
    """The method of a trainer that makes the workers. Put it before SkyRL's class, also before FullyAsyncRayPPOTrainer."""

    def build_models(self, PolicyWorker: Any, CriticWorker: Any, RefWorker: Any) -> None:
        super().build_models(self.policy_worker(), CriticWorker, RefWorker)  # type: ignore[misc]

    def policy_worker(self) -> Any:
        """The Ray actor class in place of SkyRL's; a subclass with other options overrides this."""
        from mcore_reshard.integrations.skyrl import RefitPolicyWorker

        return ray.remote(num_gpus=1)(RefitPolicyWorker)


class RefitPPOTrainer(RefitsModels, RayPPOTrainer):  # type: ignore[misc]
    """SkyRL's trainer, whose policy worker refits."""


def mesh_of(inference_engine_cfg: Any) -> GenMesh:
    """The mesh of all engines. Raises RefitError for several engines with expert parallelism."""
    engine = inference_engine_cfg
    tp, pp, dp = engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.data_parallel_size
    mesh = GenMesh(tp=tp, pp=pp, dp=dp, ep=tp * dp if engine.expert_parallel_size > 1 else 1)
    remedy = "set num_engines=1, since expert_parallel_size > 1 spreads experts over one engine"
    return mesh_of_replicas(mesh, mesh.world * engine.num_engines, remedy)


async def _beside(own: Callable[[], Result], ask: Callable[[], Awaitable[Any]]) -> Result:
    """Run this rank's part on a thread, while rank 0 asks vLLM for the engines': its routes answer once they are done."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def on_thread() -> Result:
        if device is not None:
            torch.cuda.set_device(device)  # each thread has its own
        return own()

    task = asyncio.ensure_future(asyncio.to_thread(on_thread))
    if torch.distributed.get_rank() != 0:
        return await task
    asked = asyncio.ensure_future(
        ask()
    )  # a task: before it runs, the loop sees which connections the server has closed
    await asyncio.wait({task, asked}, return_when=asyncio.FIRST_EXCEPTION)
    await asyncio.wait({task, asked}, timeout=_OWN_ERROR_S)
    answer = asked.exception() if asked.done() else None
    if not asked.done():
        asked.cancel()
    told = f"vLLM answers: {_told(answer)}" if answer is not None else ""
    if not task.done():
        raise SessionError(told) from answer
    if (error := task.exception()) is not None:
        if told:
            error.add_note(told)
        raise error
    if answer is not None:
        raise SessionError(told) from answer
    return task.result()


def _told(error: BaseException) -> str:
    return f"{error.status}: {error.message}" if isinstance(error, aiohttp.ClientResponseError) else str(error)


def __getattr__(name: str) -> Any:
    if name != "RefitPolicyWorker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import MegatronPolicyWorkerBase

    made = type(
        name, (RefitsWeights, MegatronPolicyWorkerBase), {"__module__": __name__, "__doc__": "SkyRL's, with refits."}
    )
    globals()[name] = made
    return made
