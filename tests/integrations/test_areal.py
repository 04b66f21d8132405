"""AReaL's Megatron engine, HTTP client and worker extension around real models: an `xccl` update brings golden's bytes.

MCORE_RESHARD_AREAL: folders, joined by ":", from which `areal` 1.0.4 and what it imports can be imported.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from json import dumps, loads
from logging import getLogger
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.validation import tiny
from mcore_reshard.validation.engine.slices import GenSizes, poison
from mcore_reshard.validation.engine.vllm_engine import build_engine, engine_config
from mcore_reshard.validation.engine.vllm_engine import prepare as prepare_engine
from mcore_reshard.validation.processes import run_processes
from mcore_reshard.validation.trainer.build import build_trainer
from mcore_reshard.validation.trainer.build import prepare as prepare_trainer

PATHS = [path for path in os.environ.get("MCORE_RESHARD_AREAL", "").split(os.pathsep) if path]
sys.path += PATHS
if not PATHS or find_spec("areal") is None:
    pytest.skip("set MCORE_RESHARD_AREAL to folders with AReaL 1.0.4 and what it imports", allow_module_level=True)
if missing := [name for name in ("vllm", "megatron.bridge") if find_spec(name) is None]:
    pytest.skip(f"AReaL's parts need {', '.join(missing)}", allow_module_level=True)

TRAIN, SERVERS, STEPS, LIMIT_S = 2, 2, 2, 150.0
ROUTES = {  # of areal/engine/vllm_ext/areal_vllm_server.py, which vLLM 0.32 cannot import: route -> (method, arguments)
    "/areal_init_weights_update_group": (
        "areal_init_update_weight_group",
        ("master_address", "master_port", "rank_offset", "world_size", "backend", "group_name"),
    ),
    "/areal_set_update_weight_meta": ("areal_set_weight_meta", ("names", "dtypes", "shapes", "group_name")),
    "/areal_update_weights_xccl": ("areal_update_weight_xccl", ()),
    "/areal_pause_generation": (None, ()),
    "/areal_continue_generation": (None, ()),
}


def run(index: int, folder: Path) -> list[str]:
    return train(index, folder) if index < TRAIN else serve(index - TRAIN, folder)


def awaited(file: Path) -> str:
    deadline = monotonic() + LIMIT_S
    while not file.exists() and monotonic() < deadline:
        sleep(0.1)
    return file.read_text()


def train(rank: int, folder: Path) -> list[str]:
    """Two updates by the real MegatronEngine and the real client; then one after a server's workers have left."""
    import torch.distributed as dist
    from areal.api.alloc_mode import ModelAllocation, ParallelStrategy, SchedulingStrategy
    from areal.api.cli_args import InferenceEngineConfig
    from areal.api.io_struct import WeightUpdateMeta
    from areal.engine.vllm_remote import VLLMBackend
    from areal.infra.remote_inf_engine import RemoteInfEngine

    from mcore_reshard.integrations.areal import RefitMegatronEngine

    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store")), rank=rank, world_size=TRAIN)
    trainer = build_trainer(folder / "checkpoint", TrainMesh(tp=TRAIN))
    engine = RefitMegatronEngine.__new__(RefitMegatronEngine)  # initialize() needs CUDA: these are what it sets
    engine.model, engine.bridge, engine.bridge_cls = trainer.model_chunks, trainer.bridge, "megatron-bridge"
    engine.hf_config, engine.config = trainer.bridge.hf_pretrained.config, SimpleNamespace(use_lora=False)
    engine.rollout_engine = engine.quantization_config = None
    engine.weight_update_group_initialized = engine.is_offload = False
    engine._cpu_group, engine.process_group_initialized = dist.group.WORLD, True
    engine.options = Options(transport="gloo", timeout_s=30.0)
    client = RemoteInfEngine(InferenceEngineConfig(request_timeout=LIMIT_S, request_retries=1), VLLMBackend())
    client.logger = engine.logger = getLogger("areal")
    client.addresses = [awaited(folder / f"address{server}") for server in range(SERVERS)]
    strategy = ParallelStrategy(data_parallel_size=SERVERS)
    allocation = ModelAllocation("vllm", "rollout", strategy, SchedulingStrategy("separation"))
    meta = WeightUpdateMeta("xccl", gen_allocation=allocation)
    engine.connect_engine(client, meta)
    for step in range(1, STEPS + 1):
        trainer.step()
        golden = {name: tensor.detach().clone().contiguous() for name, tensor in trainer.export()}
        if rank == 0:
            save_file(golden, folder / f"golden{step}")
            (folder / f"stepped{step}").write_text("")
        engine.update_weights(meta)
    told = []
    if rank == 0:
        (folder / "leave").write_text("")
    awaited(folder / "left")
    try:
        engine.update_weights(meta)
    except Exception as error:
        told.append(f"{type(error).__name__}: {error}")
    (folder / f"done{rank}").write_text("")
    engine._refit_trainer.close()
    return told


def serve(server: int, folder: Path) -> list[str]:
    """A real vLLM model behind AReaL's requests; returns the tensors that differ from what its loader makes of golden."""
    from mcore_reshard.engines.vllm.model import load_weights, local_tensors
    from mcore_reshard.integrations.areal import RefitVllmExtension

    model = build_engine(folder / "checkpoint", GenSizes(), 0)
    worker: Any = RefitVllmExtension()
    worker.vllm_config, worker.get_model = engine_config(folder / "checkpoint", GenSizes(), 0), lambda: model
    worker.model_runner, arrived = SimpleNamespace(), {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            method, names = ROUTES[self.path]
            if method == "areal_update_weight_xccl":
                for tensor in local_tensors(model).values():
                    poison(tensor)
            success, message = getattr(worker, method)(*(body[name] for name in names)) if method else (True, "")
            if method == "areal_update_weight_xccl" and success:
                arrived[len(arrived) + 1] = {name: tensor.clone() for name, tensor in local_tensors(model).items()}
            answer = dumps({"success": success, "message": message}).encode()
            self.send_response(200 if success else 400)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=http.serve_forever, daemon=True).start()
    (folder / f"address{server}.tmp").write_text(f"127.0.0.1:{http.server_port}")
    (folder / f"address{server}.tmp").rename(folder / f"address{server}")
    awaited(folder / "leave")
    if server == SERVERS - 1:
        worker.close_refit()
        (folder / "left").write_text("")
    for rank in range(TRAIN):
        awaited(folder / f"done{rank}")
    http.shutdown()
    worker.close_refit()
    assert sorted(arrived)[:STEPS] == [*range(1, STEPS + 1)]
    differing = []
    for step in range(1, STEPS + 1):
        load_weights(model, load_file(folder / f"golden{step}").items())
        expected = local_tensors(model)
        assert arrived[step].keys() == expected.keys()
        differing += [f"{step}: {name}" for name, tensor in expected.items() if not tensor.equal(arrived[step][name])]
    return differing


def test_an_xccl_update_of_areal_brings_goldens_bytes(tmp_path: Path) -> None:
    """Two training ranks, two servers of one rank; once a server's worker has left, `update_weights` says so."""
    prepare_trainer()
    prepare_engine()
    tiny.write_checkpoint(load_config("tiny-qwen3"), tmp_path / "checkpoint", 1)
    told = run_processes(TRAIN + SERVERS, partial(run, folder=tmp_path), timeout_s=LIMIT_S)
    assert told[TRAIN:] == [[]] * SERVERS
    assert ["/areal_update_weights_xccl" in "".join(errors) for errors in told[:TRAIN]] == [True] * TRAIN, told[:TRAIN]


def test_what_areal_does_otherwise_is_refused_in_one_error() -> None:
    from mcore_reshard.integrations.areal import RefitMegatronEngine

    engine = RefitMegatronEngine.__new__(RefitMegatronEngine)
    engine.bridge_cls, engine.quantization_config, engine.config = "mbridge", {"a": 1}, SimpleNamespace(use_lora=True)
    with pytest.raises(ValueError, match=r"(?s)bridge_type is 'mbridge'.*use_lora.*FP8.*not vLLM's"):
        engine._init_weight_update_from_distributed(SimpleNamespace(gen_allocation=None))
