"""Refits through verl's own manager, worker groups and adapter: Ray actors, a real trainer, whole vLLMs, every byte compared."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs verl: make test-frameworks")

import ray
from verl_worlds import CONFIG, CPU, Replica, Trainer, runtime_env, server

import mcore_reshard as mr
from mcore_reshard.integrations.verl import RefitEngine, RefitManager
from mcore_reshard.validation import tiny

REPLICAS = 1
IN_STEP = ["abort_all_requests", "release_kv_cache", "refit", "clear_kv_cache", "resume_kv_cache", "resume_generation"]
START_S = 400


@dataclass
class Worlds:
    folder: Path
    actor: Any
    replicas: list[Replica]
    config: Any

    @property
    def servers(self) -> list[Any]:
        return [replica.servers[0] for replica in self.replicas]

    def manager(self, kind: type = RefitManager) -> Any:
        return kind(config=self.config, actor_wg=self.actor, replicas=self.replicas)

    def on_trainers(self, method: str, *arguments: Any) -> None:
        ray.get(self.actor.execute_all_async(method, *arguments), timeout=START_S)

    def differences(self, golden: str) -> list[list[str]]:
        return ray.get([each.differences.remote(golden) for each in self.servers], timeout=START_S)


def start_ray() -> None:
    """Ray gives its own processes 30 s to start, too few on a busy machine."""
    for attempt in range(4):
        try:
            ray.init(num_cpus=4, include_dashboard=False, runtime_env=runtime_env())
            return
        except Exception:
            ray.shutdown()
            if attempt == 3:
                raise


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """Two training ranks, and one rollout replica of one rank with a vLLM of its own."""
    from transformers import AutoConfig
    from verl.checkpoint_engine import CheckpointEngineWorker
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.workers.config import CheckpointEngineConfig, RolloutConfig

    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0", "RAY_DEDUP_LOGS": "0"}
    folder = tmp_path_factory.mktemp("verl")
    for version in (1, 2, 3):
        tiny.write_checkpoint(tiny.TINY["qwen3"], folder / str(version), version)
    start_ray()

    def group(cls: type, size: int, name: str, **given: Any) -> Any:
        pool = RayResourcePool(process_on_nodes=[size], use_gpu=False, name_prefix=name, max_colocate_count=1)
        made = RayClassWithInitArgs(cls=ray.remote(cls), **given)
        return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, name_prefix=name, use_gpu=False)

    try:
        config = CheckpointEngineConfig(**CONFIG)
        rollout = RolloutConfig(name="vllm", tensor_model_parallel_size=1, checkpoint_engine=config)
        model_config = AutoConfig.from_pretrained(folder / "1")
        servers = [server(number, folder) for number in range(REPLICAS)]
        actor = group(Trainer, 2, "trainer", folder=str(folder))
        workers = group(CheckpointEngineWorker, REPLICAS, "rollout", rollout_config=rollout, model_config=model_config)
        replicas = [Replica(number, rollout, model_config, gpus_per_node=1) for number in range(REPLICAS)]
        for number, replica in enumerate(replicas):
            replica.workers, replica.servers = [workers.workers[number]], [servers[number]]
        ray.get([each.seen.remote() for each in servers], timeout=START_S)
        yield Worlds(folder, actor, replicas, config)
    finally:
        ray.shutdown()


def test_verls_manager_refits_a_megatron_trainer(worlds: Worlds) -> None:
    worlds.on_trainers("hold", "megatron")
    manager = worlds.manager()
    assert all(worlds.differences("1"))  # vLLM's dummy weights: the comparison can fail
    for step in (1, 2):
        worlds.on_trainers("train", str(step))
        worlds.on_trainers("export")
        ray.get([each.seen.remote() for each in worlds.servers])
        metrics = manager.update_weights(global_steps=step)
        assert metrics["refit/bytes"] > 0 and metrics["refit/misc_bytes"] == 0
        for calls, steps in ray.get([each.seen.remote() for each in worlds.servers]):
            assert calls == [*IN_STEP[:2], *(["connect_refit"] if step == 1 else []), *IN_STEP[2:]]
            assert steps[-1] == step
        assert worlds.differences("golden") == [[]] * REPLICAS
    assert all(worlds.differences("3"))


def test_an_error_reaches_the_driver_as_ours_and_the_next_step_connects_anew(worlds: Worlds) -> None:
    worlds.on_trainers("hold", "megatron")
    worlds.on_trainers("offload", True)
    manager = worlds.manager()
    with pytest.raises(mr.RefitError, match="param_offload"):
        manager.update_weights(global_steps=3)
    worlds.on_trainers("offload", False)
    worlds.on_trainers("train", "3")
    worlds.on_trainers("export")
    manager.update_weights(global_steps=3)
    assert worlds.differences("golden") == [[]] * REPLICAS


def test_verls_fixed_manager_refits_an_fsdp_trainer(worlds: Worlds) -> None:
    """The model engine is ours, as VERL_USE_EXTERNAL_MODULES registers it; the manager is verl's."""
    from verl.checkpoint_engine import CheckpointEngineManager

    worlds.on_trainers("hold", "fsdp")
    worlds.on_trainers("train", "3")
    manager = worlds.manager(CheckpointEngineManager)
    assert manager.update_weights(global_steps=4)["refit/bytes"] > 0
    assert worlds.differences("3") == [[]] * REPLICAS


def test_verl_takes_our_model_engines_where_the_environment_names_them() -> None:
    code = (
        "from mcore_reshard.validation.trainer import te_standin; te_standin.install()\n"
        "from verl.workers.engine import EngineRegistry\n"
        "for backend in ('megatron', 'fsdp', 'fsdp2'):\n"
        "    print(EngineRegistry.get_engine_cls('language_model', backend).__name__)"
    )
    env = {**os.environ, **CPU, "VERL_USE_EXTERNAL_MODULES": "mcore_reshard.integrations.verl_engines"}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=True)
    assert out.stdout.split()[-3:] == ["RefitMegatronEngine", "RefitFSDPEngine", "RefitFSDPEngine"]


def test_wrong_options_are_refused_when_verl_makes_the_engine() -> None:
    with pytest.raises(ValueError, match="timeout_s must be above 0"):
        RefitEngine(1 << 20, gen="tp=1", timeout_s=-1)


def test_another_member_means_another_session() -> None:
    metadata = [{"member": name, "store": "h:1" if name == "a" else None} for name in "abc"]
    others = [*metadata[:2], {**metadata[2], "member": "d"}]
    first, second = (RefitEngine.build_topology(1, 2, given)[1] for given in (metadata, others))

    assert first["session"] != second["session"] and first["store"] == ["h:1", "h:1"]
