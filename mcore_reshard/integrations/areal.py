"""AReaL: its Megatron engine and its vLLM worker extension, whose "xccl" weight updates become refits.

    actor.weight_update_mode: xccl
    vllm.worker_extension_cls: mcore_reshard.integrations.areal.RefitVllmExtension

    actor = RefitMegatronEngine(config)        # where the script builds its MegatronEngine; bridge_type: megatron-bridge

Training rank 0 tells the servers of the session's store, and of each refit, in the requests that AReaL sends anyway. Source:
AReaL 1.0.4, engine/megatron_engine.py, engine/vllm_remote.py and engine/vllm_ext.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.store import split_address
from mcore_reshard.session.store_server import ServedStore, serve_store
from mcore_reshard.trainers.refit_trainer import RefitTrainer
from mcore_reshard.trainers.world import gather_from_all, run_on_all_ranks

from .common import options_for_engine

CONNECT_TIMEOUT_S = 600.0


class _Refitting:
    """What `RefitMegatronEngine` puts before AReaL's MegatronEngine."""

    options = Options()  # of the session; a subclass may set others
    _refit_trainer: RefitTrainer | None = None
    _refit_store: ServedStore | None = None
    _refits = 0

    def _init_weight_update_from_distributed(self: Any, meta: Any) -> None:
        """Connect to every vLLM server's workers; `connect_engine` calls it. Raises ValueError for what is not moved."""
        from areal.utils.network import gethostip

        from mcore_reshard.megatron import connect

        if problems := _problems(self, meta):
            raise ValueError("\n  ".join(("these weight updates cannot be refits:", *problems)))
        self._refit_store = run_on_all_ranks(lambda: serve_store(host=gethostip()) if dist.get_rank() == 0 else None)
        store = gather_from_all(self._refit_store.address if self._refit_store else "")[0]
        host, port = split_address(store)
        self.weight_update_master_addr, self.weight_update_master_port = host, port
        self.weight_update_group_name = json.dumps(options_for_engine(self.options))  # AReaL hands it to workers unread
        mesh = meta.gen_allocation.parallel
        answer = self._tell_servers(lambda: self.rollout_engine.init_weights_update_group(self._refit_meta(meta)))
        self._refit_trainer = connect(
            list(self.model),
            self.bridge,
            self.hf_config,
            gen=f"tp={mesh.tp_size},pp={mesh.pp_size},dp={mesh.dp_size}",
            store=store,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            options=self.options,
        )
        run_on_all_ranks(lambda: answer and answer.result())

    def _update_weights_from_distributed(self: Any, meta: Any) -> None:
        """Refit, while generation is paused; `update_weights` calls it. After an error generation stays paused."""
        if dist.get_rank() == 0:
            self.rollout_engine.pause_generation()
        dist.barrier(group=self.cpu_group)
        self._refits += 1
        meta = self._refit_meta(meta)
        answer = self._tell_servers(lambda: self.rollout_engine.update_weights_from_distributed(meta, []))
        self._refit_trainer.refit(self._refits)
        run_on_all_ranks(lambda: answer and answer.result())
        if answer is not None:
            self.rollout_engine.continue_generation()
        dist.barrier(group=self.cpu_group)

    def destroy(self: Any) -> None:
        if self._refit_trainer is not None:
            self._refit_trainer.close()
        if self._refit_store is not None:
            self._refit_store.close()
        super().destroy()  # type: ignore[misc]

    def _tell_servers(self, call: Callable[[], Future[None]]) -> Future[None] | None:
        """Begin a request to all servers, on rank 0; they answer once their workers have met the trainer's ranks."""
        return run_on_all_ranks(lambda: call() if dist.get_rank() == 0 else None)

    def _refit_meta(self: Any, meta: Any) -> Any:
        return replace(
            meta,
            nccl_master_address=self.weight_update_master_addr,
            nccl_master_port=self.weight_update_master_port,
            nccl_group_name=self.weight_update_group_name,
        )


class _RefittingExtension:
    """What `RefitVllmExtension` puts before AReaL's worker extension. Methods answer (success, message), as AReaL's do."""

    def areal_init_update_weight_group(
        self: Any,
        master_address: str,
        master_port: str,
        rank_offset: int,
        world_size: int,
        backend: str,
        group_name: str,
    ) -> tuple[bool, str]:
        """Connect this worker; server i of engines of n ranks has the offset 1 + i * n."""
        replica = (int(rank_offset) - 1) // self.vllm_config.parallel_config.world_size
        options, store = json.loads(group_name), f"{master_address}:{master_port}"
        return _answer(
            lambda: self.connect_refit(store, replica=replica, connect_timeout_s=CONNECT_TIMEOUT_S, **options)
        )

    def areal_update_weight_xccl(self: Any) -> tuple[bool, str]:
        return _answer(self.refit)


def _answer(call: Callable[[], Any]) -> tuple[bool, str]:
    try:
        answer = call()
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"
    if isinstance(answer, dict) and "error" in answer:
        return False, str(answer["error"])
    return True, "Success"


def _problems(engine: Any, meta: Any) -> list[str]:
    problems = []
    if engine.bridge_cls != "megatron-bridge":
        problems.append(f"bridge_type is {engine.bridge_cls!r}: set megatron.bridge_type to megatron-bridge")
    if engine.config.use_lora:
        problems.append("use_lora: AReaL sends adapters alone; use weight_update_mode: disk")
    if engine.quantization_config:
        problems.append("FP8 training under AReaL is not tested with refits")
    if meta.gen_allocation is None or meta.gen_allocation.backend != "vllm":
        problems.append("the servers are not vLLM's: this adapter knows no others")
    return problems


def __getattr__(name: str) -> Any:
    """`RefitMegatronEngine` and `RefitVllmExtension`, each made where it is used: the other one's packages are absent there."""
    if name == "RefitMegatronEngine":
        from areal.engine.megatron_engine import MegatronEngine

        made = type(name, (_Refitting, MegatronEngine), {"__module__": __name__, "__doc__": _Refitting.__doc__})
    elif name == "RefitVllmExtension":
        from areal.engine.vllm_ext.vllm_worker_extension import VLLMWorkerExtension

        from mcore_reshard.vllm import RefitWorker

        bases = (_RefittingExtension, RefitWorker, VLLMWorkerExtension)
        made = type(name, bases, {"__module__": __name__, "__doc__": _RefittingExtension.__doc__})
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made
    return made
