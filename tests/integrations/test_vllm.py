"""vLLM's own weight transfer: a whole LLM and a whole server on a CPU, refitted by real Megatron-Core processes.

Everything is vLLM's own but its kernels, which are not built: no forward runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.front_door import free_address
from safetensors.torch import load_file, save_file

import mcore_reshard as mr
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.session.store_server import serve_store
from mcore_reshard.validation import tiny
from mcore_reshard.validation.engine import vllm_engine
from mcore_reshard.validation.engine.slices import GenSizes
from mcore_reshard.validation.processes import run_processes

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,  # whole vLLMs take minutes to start
    pytest.mark.skipif(
        find_spec("vllm") is None,
        reason="needs vLLM and Megatron: `make test-frameworks` builds both for a CPU, `make nightly` runs this there",
    ),
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron beside vLLM"),
]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STEPS = 2
LIMIT_S = 330
OPTIONS = mr.Options(transport="gloo", timeout_s=60.0)
CPU = {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_SERVER_DEV_MODE": "1",
}  # fmt: skip
_SERVER_MODULES = (
    "uvicorn",
    "multipart",
    "prometheus_fastapi_instrumentator",
    "setproctitle",
    "mistral_common",
    "ijson",
    "model_hosting_container_standards",
)


# --- processes ---------------------------------------------------------------------------------------------------


def environment(folder: Path) -> dict[str, str]:
    """A process that sees this checkout and its entry points, whatever version is installed."""
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11 or newer")
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    installed = folder / "site" / "entry_points_of_the_checkout-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: entry-points-of-the-checkout\nVersion: 0\n")
    lines = ["[vllm.general_plugins]", *(f"{name} = {target}" for name, target in entries.items())]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    paths = [folder / "site", ROOT, ROOT / "tests", ROOT / "tests" / "engine", HERE]
    return {**os.environ, **CPU, "PYTHONPATH": os.pathsep.join(map(str, paths))}


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with open(folder / "engine.log", "wb") as log:
        process = subprocess.Popen(
            command, env=environment(folder), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process
        except BaseException:
            print((folder / "engine.log").read_text()[-6000:])
            raise
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def skip_without_server_modules() -> None:
    if missing := [name for name in _SERVER_MODULES if find_spec(name) is None]:
        pytest.skip(f"vllm serve needs {', '.join(missing)}: install them beside vLLM")


def serve(folder: Path, url: str, *more: str, extension: str = "engine_process.SavesParameters") -> list[str]:
    """`vllm serve` of the checkpoint, with random weights."""
    return [
        sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.cli.main", "serve", str(folder / "checkpoint"),
        "--host", "127.0.0.1", "--port", url.rpartition(":")[2],
        "--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "32", "--skip-tokenizer-init", "--enforce-eager",
        "--kv-cache-memory-bytes", str(64 << 20), "--gpu-memory-utilization", "0.1",
        "--worker-cls", "kernel_free_worker.CPUWorker", "--worker-extension-cls", extension, *more,
    ]  # fmt: skip


class Trainer:
    """A training rank, which writes golden of each step: Megatron-Bridge's export."""

    def __init__(self, rank: int, mesh: TrainMesh, folder: Path) -> None:
        import torch.distributed as dist

        from mcore_reshard.validation.trainer.build import build_trainer

        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "world")), rank=rank, world_size=mesh.world)
        self.model, self.rank, self.folder = build_trainer(folder / "checkpoint", mesh), rank, folder

    def connects(self, gen: str) -> Callable[..., Any]:
        return partial(
            mr.megatron.connect, self.model.model_chunks, self.model.bridge, self.folder / "checkpoint", gen=gen
        )

    def step(self, step: int) -> None:
        self.model.step()
        self.write_golden(step)

    def write_golden(self, step: int) -> None:
        golden = {name: tensor.detach().clone().contiguous() for name, tensor in self.model.export()}
        if self.rank == 0:
            save_file(golden, golden_file(self.folder, step))


def golden_file(folder: Path, step: int) -> Path:
    return folder / f"golden{step}.safetensors"


def loaded_by_vllm(rank: int, folder: Path, sizes: GenSizes, step: int) -> dict[str, torch.Tensor]:
    """What the loader of a vLLM rank makes of golden, in a process of its own."""
    from mcore_reshard.engines.vllm.model import load_weights, local_tensors
    from mcore_reshard.validation.engine.vllm_engine import build_engine

    model = build_engine(folder / "checkpoint", sizes, rank)
    load_weights(model, load_file(golden_file(folder, step)).items())
    return {name: tensor.clone() for name, tensor in local_tensors(model).items()}


def assert_engines_hold_golden(folder: Path, steps: list[int], tp: int, replicas: int = 1) -> None:
    vllm_engine.prepare()  # late: the engine has its cores for itself while it starts
    for step in steps:
        expected = run_processes(tp, loaded_by_vllm, (folder, GenSizes(tp=tp), step), timeout_s=LIMIT_S)
        for rank, tensors in enumerate(expected):
            for replica in range(replicas):
                arrived = load_file(folder / f"engine{step}-{replica}-{rank}.safetensors")
                assert arrived.keys() == tensors.keys()
                assert [name for name, tensor in tensors.items() if not tensor.equal(arrived[name])] == []


# --- a whole LLM -------------------------------------------------------------------------------------------------


def train_two_sessions(rank: int, mesh: TrainMesh, folder: Path, address: str, gen: str) -> None:
    trainer = Trainer(rank, mesh, folder)
    connect = partial(trainer.connects(gen), store=address, connect_timeout_s=240.0)
    with connect(options=OPTIONS) as connected:
        for step in range(1, STEPS + 1):
            trainer.step(step)
            connected.refit(step)
        connected.refit(STEPS + 1)
    with connect(options=replace(OPTIONS, session="second")) as connected:
        trainer.step(STEPS + 2)
        connected.refit(STEPS + 2)


@pytest.mark.parametrize(
    ("name", "mesh", "tp", "lora"),
    [
        ("tiny-llama", TrainMesh(tp=2), 1, []),
        ("tiny-qwen3", TrainMesh(pp=2), 2, ["lora"]),
    ],  # CPU kernels rearrange experts
)
def test_a_whole_llm_is_refitted_by_vllms_own_calls(
    name: str, mesh: TrainMesh, tp: int, lora: list[str], tmp_path: Path
) -> None:
    from mcore_reshard.validation.trainer.build import prepare

    tiny.write_checkpoint(load_config(name), tmp_path / "checkpoint", 1)
    command = [sys.executable, str(HERE / "engine_process.py"), str(tmp_path)]
    with (
        serve_store() as store,
        running([*command, store.address, str(tp), str(STEPS), *lora], tmp_path) as engine,
    ):
        prepare()
        while not (tmp_path / "started").exists():
            assert engine.poll() is None, "the engine ended before it was refitted"
            time.sleep(0.5)
        run_processes(mesh.world, train_two_sessions, (mesh, tmp_path, store.address, f"tp={tp}"), timeout_s=LIMIT_S)
        assert engine.wait(LIMIT_S) == 0
    assert_engines_hold_golden(tmp_path, [1, STEPS, STEPS + 2], tp)
    told = json.loads((tmp_path / "told.json").read_text())
    for wrong in ("store must be", "no 'stor'", "replica must be", "transport must be one of", "no field 'bucket'"):
        assert wrong in told["wrong"]
    assert "in no session: call init_weight_transfer_engine first" in told["early"]
    for level in (1, 2):
        assert "this engine sleeps, and has no memory for weights: call wake_up first" in told[f"asleep_{level}"]
    assert told["woken_2"].startswith("MixedWeightsError: this engine lost its weights in a sleep of level 2")
    for step in (told["woken_1"], told["awake"]):
        assert step and "MixedWeightsError" not in step
    assert bool(told["layers_with_lora"]) == bool(lora)


# --- workers by collective_rpc, over HTTP --------------------------------------------------------------------------


def train_beside_calls(rank: int, mesh: TrainMesh, folder: Path, address: str, url: str) -> list[Any]:
    """Refits while rank 0 posts `connect_refit` and `refit` to the workers; returns the answers that it was given."""
    trainer, answers = Trainer(rank, mesh, folder), []

    def beside(own: Callable[[], Any], method: str, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(post, f"{url}/collective_rpc", method=method, kwargs=kwargs) if rank == 0 else None
            result = own()
            if asked is not None:
                answers.append([asked.result().status_code, asked.result().text])
        return result

    connect = partial(trainer.connects("tp=2"), store=address, connect_timeout_s=240.0, options=OPTIONS)
    info = {"store": address, "connect_timeout_s": 240.0, "transport": "gloo", "timeout_s": 60.0}
    with beside(connect, "connect_refit", **info) as connected:
        for step in range(1, STEPS + 1):
            trainer.step(step)
            beside(partial(connected.refit, step), "refit", version=step)
            if rank == 0:
                post(f"{url}/collective_rpc", method="save_parameters", kwargs={"folder": str(folder), "step": step})
    return answers


def test_a_server_whose_workers_are_called_by_collective_rpc_is_refitted_with_tp2(tmp_path: Path) -> None:
    from mcore_reshard.validation.trainer.build import prepare

    skip_without_server_modules()
    tiny.write_checkpoint(load_config("tiny-llama"), tmp_path / "checkpoint", 1)
    url, mesh = f"http://{free_address()}", TrainMesh(pp=2)
    command = serve(tmp_path, url, "--tensor-parallel-size", "2", extension="engine_process.RefitsAndSavesParameters")
    with running(command, tmp_path) as server, serve_store() as store:
        prepare()
        wait_until_healthy(url, server)
        early = post(f"{url}/collective_rpc", method="refit", kwargs={"version": 1})
        assert early.status_code == 500 and "in no session: connect all workers first" in early.text
        told, none = run_processes(
            mesh.world, train_beside_calls, (mesh, tmp_path, store.address, url), timeout_s=LIMIT_S
        )
    assert none == [] and [status for status, _ in told] == [200] * (1 + STEPS), told
    assert_engines_hold_golden(tmp_path, list(range(1, STEPS + 1)), tp=2)


# --- a whole server ----------------------------------------------------------------------------------------------


def post(url: str, **body: Any) -> Any:
    import requests

    return requests.post(url, json=body or None, timeout=LIMIT_S)


class Frozen:
    """A request to a paused server, which is not answered before it is aborted: without kernels it could not run."""

    def __init__(self, url: str) -> None:
        body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}}
        self.url, self.pool = url, ThreadPoolExecutor(1)
        self.answer = self.pool.submit(post, f"{url}/inference/v1/generate", **body)
        time.sleep(3.0)  # until the scheduler has it

    def end(self) -> None:
        assert not self.answer.done(), self.answer.result().text
        deadline = time.monotonic() + 60.0
        while not self.answer.done() and time.monotonic() < deadline:  # one of vLLM's API servers has it
            post(f"{self.url}/abort_requests", request_ids=[])
            time.sleep(0.2)
        assert self.answer.result(0).json()["choices"][0]["finish_reason"] == "abort"
        self.pool.shutdown()


def train_over_http(rank: int, mesh: TrainMesh, folder: Path, address: str, url: str) -> list[str]:
    """Refits through vLLM's trainer factory and its HTTP client, as its examples do; returns what rank 0 was told."""
    import requests
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, WeightTransferTrainerFactory

    from mcore_reshard.integrations.vllm import ReshardTrainerInit

    trainer, told = Trainer(rank, mesh, folder), []
    init = ReshardTrainerInit(
        rank=rank, connect=trainer.connects("tp=1,dp=2"), store=address, connect_timeout_s=240.0, options=OPTIONS
    )
    client = HTTPVLLMWeightSyncClient(url, timeout=LIMIT_S)
    engine = WeightTransferTrainerFactory.trainer_init(init, client=client)
    for step in range(1, STEPS + 1):
        trainer.step(step)
        if rank == 0:
            post(f"{url}/pause?mode=keep")
            told.append(str(requests.get(f"{url}/is_paused", timeout=60).json()["is_paused"]))
            frozen = Frozen(url)
        engine.send_weights(step)
        if rank == 0:
            frozen.end()
            assert post(f"{url}/reset_prefix_cache").ok
            post(f"{url}/resume")
            told.append(requests.get(f"{url}/weight_info", timeout=60).json()["weight_version"])
            post(f"{url}/collective_rpc", method="save_parameters", kwargs={"folder": str(folder), "step": step})
    update, client.update_weights = client.update_weights, lambda _: update({"version": 99})
    with pytest.raises(mr.RefitError) as caught:
        engine.send_weights(STEPS + 1)
    client.update_weights = update
    told += getattr(caught.value, "__notes__", [])
    trainer.step(STEPS + 1)
    engine.send_weights(STEPS + 1)  # an error ends no session
    if rank == 0:
        post(f"{url}/collective_rpc", method="save_parameters", kwargs={"folder": str(folder), "step": STEPS + 1})
    engine.shutdown()
    return told


def test_a_server_with_data_parallel_replicas_is_refitted_over_http(tmp_path: Path) -> None:
    from mcore_reshard.validation.trainer.build import prepare

    skip_without_server_modules()
    tiny.write_checkpoint(load_config("tiny-llama"), tmp_path / "checkpoint", 1)
    url = f"http://{free_address()}"
    weight_transfer = ("--weight-transfer-config", '{"backend": "mcore_reshard"}')
    command = serve(tmp_path, url, "--data-parallel-size", "2", "--enable-scale-out", *weight_transfer)
    mesh = TrainMesh(tp=2)
    with running(command, tmp_path) as server:
        prepare()
        wait_until_healthy(url, server)
        refusal = post(f"{url}/init_weight_transfer_engine", init_info={"stor": "x"})
        assert refusal.status_code == 500 and "no 'stor'" in refusal.text and "store must be" in refusal.text
        told, none = run_processes(
            mesh.world, train_over_http, (mesh, tmp_path, free_address(), url), timeout_s=LIMIT_S
        )
    assert none == [] and told[:4] == ["True", "1", "True", "2"]
    assert "500 Server Error" in told[4] and "99" in told[4]
    assert_engines_hold_golden(tmp_path, [1, STEPS, STEPS + 1], tp=1, replicas=2)


def wait_until_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    import requests

    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if requests.get(f"{url}/health", timeout=10).ok:
                return
        except requests.RequestException:
            pass
        time.sleep(1.0)
    raise TimeoutError(f"the server is not healthy; exit status {server.poll()}")
