"""slime's weight updates as refits: `--custom-megatron-init-path mcore_reshard.integrations.slime.install`.

Besides, engines need `--sglang-custom-weight-loader mcore_reshard.integrations.sglang.load`, and SGLang 0.5.23.

slime calls `install` in every training process before it chooses the class of its updater by a global name
(slime/backends/megatron_utils/actor.py). Pausing, flushing, barriers and metrics stay slime's.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ray
import torch.distributed as dist
from slime.backends.megatron_utils.update_weight.update_weight_from_distributed import UpdateWeightFromDistributed
from slime.utils.distributed_utils import get_gloo_group

from mcore_reshard import megatron
from mcore_reshard.kernels.errors import RefitError
from mcore_reshard.kernels.options import Options
from mcore_reshard.trainers.refit_trainer import RefitTrainer

from .common import run_beside
from .sglang import LOADER, send

_STORE = "MCORE_RESHARD_STORE"  # "host:port" of a store of the user's; without it training rank 0 starts one
_CONNECT_S = 600.0


class RefitUpdater(UpdateWeightFromDistributed):
    """slime's updater, whose weights move point to point. Every training rank has one; rank 0 tells the engines."""

    _trainer: RefitTrainer | None = None
    _sessions = 0
    _is_pp_src_rank = False  # the base class would show progress of its buckets

    def connect_rollout_engines(
        self,
        rollout_engines: Sequence[Any],
        rollout_engine_lock: Any,
        engine_gpu_counts: Sequence[int] | None = None,
        engine_gpu_offsets: Sequence[int] | None = None,
        engine_parallel_configs: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Meet all engines in a new session. slime calls it on all ranks whenever engines are new.

        Raises RefitError for engines that no one plan describes, else as `mr.megatron.connect`.
        """
        from megatron.bridge import AutoBridge

        self.disconnect_rollout_engines()
        self.rollout_engines = rollout_engines
        counts = engine_gpu_counts or [self.args.rollout_num_gpus_per_engine] * len(rollout_engines)
        self._tp, gen = _mesh_of(counts, engine_parallel_configs)
        self._sessions += 1
        session = f"slime/{self._sessions}"
        store = _agreed_store()
        tell = self._tell("connect", store=store, connect_timeout_s=_CONNECT_S, session=session)
        self._trainer = run_beside(
            [partial(call, replica=replica) for replica, call in enumerate(tell)],
            lambda: megatron.connect(
                self.model,
                AutoBridge.from_hf_pretrained(self.args.hf_checkpoint),
                self.args.hf_checkpoint,
                gen=gen,
                store=store,
                engine="sglang",
                connect_timeout_s=_CONNECT_S,
                options=Options(session=session),
            ),
        )

    def disconnect_rollout_engines(self) -> None:
        """Leave the session. Engines leave theirs when they are told to connect again, or end."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.close()

    def _send_weights(self, pbar: Any) -> None:
        if self._trainer is None:
            raise RefitError("no engine is connected: slime calls connect_rollout_engines before update_weights")
        refit = partial(self._trainer.refit, self.weight_version)
        report = run_beside(self._tell("refit", version=self.weight_version), refit)
        self.update_weight_metrics |= {"refit/seconds": report.seconds, "refit/bytes": float(report.nbytes)}

    def _tell(self, command: str, **arguments: Any) -> list[Any]:
        """On rank 0: a call for each engine, which sends it the command and waits for its answer."""
        if dist.get_rank() != 0:
            return []
        return [
            partial(send, partial(_post, engine), command, tp=self._tp, **arguments) for engine in self.rollout_engines
        ]


def install(args: Any) -> None:
    """Put `RefitUpdater` in place of slime's own class. Raises RefitError for arguments with which slime would not use it."""
    import slime.backends.megatron_utils.actor as actor

    check_arguments(args)
    actor.UpdateWeightFromDistributed = RefitUpdater


def check_arguments(args: Any) -> None:
    """Raise RefitError, with all that is wrong, for arguments under which slime updates weights in another way."""
    problems = []
    if getattr(args, "colocate", False):
        problems.append("--colocate: slime hands engines tensors of their own GPU; start engines on other GPUs")
    if getattr(args, "update_weight_mode", "full") != "full":
        problems.append(f"--update-weight-mode {args.update_weight_mode}: take full")
    if getattr(args, "update_weight_transport", "nccl") != "nccl":
        problems.append(f"--update-weight-transport {args.update_weight_transport}: take nccl, slime's default")
    if LOADER not in (getattr(args, "sglang_custom_weight_loader", None) or ()):
        problems.append(f"engines do not know the loader: give --sglang-custom-weight-loader {LOADER}")
    if problems:
        raise RefitError("\n  ".join(("refits cannot take the place of slime's weight updates:", *problems)))


def _mesh_of(counts: Sequence[int], configs: Sequence[Mapping[str, Any]] | None) -> tuple[int, str]:
    """The tensor-parallel degree of each engine, and the mesh of all. Engines are replicas of each other."""
    degrees = [
        (int(config.get("tp_size", count)), int(config.get("pp_size", 1)), int(config.get("ep_size", 1)))
        for count, config in zip(counts, configs or [{}] * len(counts), strict=True)
    ]
    tp, pp, ep = degrees[0]
    problems = []
    if len({*degrees}) > 1:
        problems.append(f"engines differ, as (tp, pp, ep): {', '.join(map(str, dict.fromkeys(degrees)))}")
    if pp > 1:
        problems.append(f"engines have {pp} pipeline stages, which SGLang tells of updates one after the other")
    if ep > 1 and len(degrees) > 1:
        problems.append(
            f"{len(degrees)} engines with expert parallelism: start one, or engines with --sglang-ep-size 1"
        )
    if problems:
        raise RefitError("\n  ".join(("no refit reaches these engines:", *problems)))
    return tp, f"tp={tp},ep={ep}" if ep > 1 else f"tp={tp},dp={len(degrees)}"


def _agreed_store() -> str:
    """Where the session's store is, on all ranks: the user's, or a free port of training rank 0's node."""
    address = [os.environ.get(_STORE)]
    if dist.get_rank() == 0 and address[0] is None:
        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as free:
            address[0] = f"{host}:{free.getsockname()[1]}"
    dist.broadcast_object_list(address, src=0, group=get_gloo_group())
    assert address[0] is not None
    return address[0]


def _post(engine: Any, route: str, body: Mapping[str, Any]) -> Any:
    """A POST of slime's SGLangEngine actor to its server; SGLang's refusal too is an answer."""
    try:
        return ray.get(engine._make_request.remote(route, dict(body)))
    except ray.exceptions.RayTaskError as error:  # HTTPError of `requests`, with the answer's text as a note
        return {"success": False, "message": str(error)}
