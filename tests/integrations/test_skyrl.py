"""Refits through SkyRL's own client and policy worker class, into a whole `vllm serve` on a CPU; every byte compared.

Stand-ins: the Megatron worker class, which wants Megatron-Core before 0.19 and CUDA (SkyRL's PolicyWorkerBase around a model
that Megatron-Bridge built stands for it), and Ray's actors around it, here plain processes. vLLM has no kernels: no forward runs.
"""

from __future__ import annotations

import asyncio
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_reshard.validation.engine import vllm_engine

if find_spec("skyrl") is not None:
    vllm_engine.prepare()  # before SkyRL imports vLLM, which looks at its surroundings once
pytest.importorskip("skyrl", reason="needs SkyRL: make test-frameworks")

from helpers.front_door import free_address
from test_vllm import LIMIT_S, Trainer, assert_engines_hold_golden, post, running, wait_until_healthy

import mcore_reshard as mr
from mcore_reshard.integrations import skyrl
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.validation import tiny
from mcore_reshard.validation.processes import run_processes

ENGINES = SimpleNamespace(
    weight_sync_backend="nccl", tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1,
    expert_parallel_size=1, num_engines=1, enable_prefix_caching=True,
)  # fmt: skip
MESH = TrainMesh(tp=2)
KEEPS_S = 5.0  # how long uvicorn keeps a connection that nobody uses


def policy_worker(trainer: Trainer) -> Any:
    """SkyRL's base class with refits, whose model is there already."""
    from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase
    from transformers import AutoConfig

    worker = object.__new__(type("Worker", (skyrl.RefitsWeights, PolicyWorkerBase), {}))
    lora = SimpleNamespace(merge_lora=True)
    worker.cfg = SimpleNamespace(
        placement=SimpleNamespace(colocate_all=False),
        policy=SimpleNamespace(megatron_config=SimpleNamespace(lora_config=lora)),
        fully_async=SimpleNamespace(enabled=False, clear_kv_cache_on_weight_sync=True),
    )
    worker.strategy = SimpleNamespace(hf_config=AutoConfig.from_pretrained(trainer.folder / "checkpoint"))
    worker.bridge, worker.actor_module, worker._is_lora = trainer.model.bridge, trainer.model.model_chunks, False
    worker.refit_options, worker.connect_timeout_s = mr.Options(transport="gloo", timeout_s=60.0), 240.0
    return worker


def train_as_skyrl(rank: int, folder: Path, url: str) -> list[str]:
    return asyncio.run(_train(rank, folder, url))


async def _train(rank: int, folder: Path, url: str) -> list[str]:
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

    def new_client() -> Any:
        return RemoteInferenceClient(proxy_url=url, server_urls=[url], data_parallel_size=1)

    async def as_driver(call: str) -> None:
        if rank == 0:
            client = new_client()  # the driver has one of its own
            await getattr(client, call)()
            await client.aclose()

    trainer = Trainer(rank, MESH, folder)
    worker, client = policy_worker(trainer), new_client()
    worker.cfg.placement.colocate_all = True
    with pytest.raises(mr.RefitError, match="colocate_all"):
        await worker.init_weight_sync_state(client, ENGINES)
    worker.cfg.placement.colocate_all = False
    await worker.init_weight_sync_state(client, ENGINES)

    async def sync(step: int) -> None:  # as WorkerDispatch.save_weights_for_sampler
        trainer.step(step)
        await as_driver("pause_generation")
        if step == 2:
            time.sleep(KEEPS_S + 1.0)  # as a training step keeps the loop of a worker
        await worker.broadcast_to_inference_engines(client, ENGINES)
        await as_driver("resume_generation")
        if rank == 0:
            post(f"{url}/collective_rpc", method="save_parameters", kwargs={"folder": str(folder), "step": step})

    for step in (1, 2):
        await sync(step)
    call = client._call_all_servers

    async def other_version(path: str, json: Any = None, **given: Any) -> Any:
        return await call(path, {"update_info": {"version": 99}} if path == "/update_weights" else json, **given)

    client._call_all_servers = other_version
    with pytest.raises(mr.RefitError) as caught:
        await worker.broadcast_to_inference_engines(client, ENGINES)
    client._call_all_servers = call
    await sync(3)  # an error ends no session
    await client.aclose()
    worker._refit_trainer.close()
    return [str(caught.value), *getattr(caught.value, "__notes__", [])]


def test_skyrls_policy_worker_refits_a_vllm_server(tmp_path: Path) -> None:
    from mcore_reshard.validation.trainer.build import prepare

    tiny.write_checkpoint(load_config("tiny-llama"), tmp_path / "checkpoint", 1)
    url = f"http://{free_address()}"
    command = [
        sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.cli.main", "serve", str(tmp_path / "checkpoint"),
        "--host", "127.0.0.1", "--port", url.rpartition(":")[2],
        "--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "32", "--skip-tokenizer-init", "--enforce-eager",
        "--kv-cache-memory-bytes", str(64 << 20), "--gpu-memory-utilization", "0.1",
        "--weight-transfer-config", '{"backend": "mcore_reshard"}', "--worker-cls", "kernel_free_worker.CPUWorker",
        "--worker-extension-cls", "engine_process.SavesParameters",
    ]  # fmt: skip
    with running(command, tmp_path) as server:
        prepare()
        wait_until_healthy(url, server)
        told, others = run_processes(MESH.world, train_as_skyrl, (tmp_path, url), timeout_s=LIMIT_S)
    assert "99" in told[0] and "99" in others[0]
    assert "vLLM answers: 500" in told[-1]
    assert_engines_hold_golden(tmp_path, [1, 2, 3], tp=1)


def test_the_trainer_swaps_in_the_worker_that_refits() -> None:
    from skyrl.train.trainer import RayPPOTrainer

    class Models:
        def build_models(self, *workers: Any) -> None:
            self.workers = workers

    class Swapped(skyrl.RefitsModels, Models):
        def policy_worker(self) -> Any:
            return "refits"

    swapped = Swapped()
    swapped.build_models("policy", "critic", "ref")
    assert swapped.workers == ("refits", "critic", "ref")
    trainers = skyrl.RefitPPOTrainer.__mro__
    assert trainers.index(skyrl.RefitsModels) < trainers.index(RayPPOTrainer)


def test_servers_of_one_data_parallel_engine_are_one_replica() -> None:
    told = skyrl.ConnectInfo(True, {"store": "h:1"}).for_servers(4, num_servers=4, dp_size=2)
    assert [each.to_api_payload() for each in told] == [{"store": "h:1", "replica": each} for each in (0, 0, 1, 1)]


def test_the_mesh_of_all_engines() -> None:
    def mesh(**given: int) -> mr.GenMesh:
        return skyrl.mesh_of(SimpleNamespace(**{**vars(ENGINES), **given}))

    assert mesh(tensor_parallel_size=4, num_engines=2) == mr.GenMesh(tp=4, dp=2)
    assert mesh(tensor_parallel_size=2, data_parallel_size=2, expert_parallel_size=4) == mr.GenMesh(tp=2, dp=2, ep=4)
    with pytest.raises(mr.RefitError, match="num_engines=1"):
        mesh(tensor_parallel_size=2, expert_parallel_size=2, num_engines=2)
