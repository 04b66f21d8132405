"""Refits as methods of vLLM's own worker, mixed in by vLLM and called as its executors call them."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import tiny
from helpers.validating import OPTIONS, assert_golden, run_validation
from helpers.validation_cases import in_blocks

import mcore_reshard as mr
from mcore_reshard.engines.vllm.trace import trace_loading
from mcore_reshard.engines.vllm.worker import RefitWorker
from mcore_reshard.kernels.errors import KvScalesError, SessionError
from mcore_reshard.planner.layout.condense import CondensedTrace
from mcore_reshard.planner.layout.mesh import MeshError, parse_gen_mesh
from mcore_reshard.planner.layout.traces import HfTensor
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planning import read_traced_request
from mcore_reshard.session.endpoints import GenerationEndpoint, RefitReport, TrainEndpoint
from mcore_reshard.session.metrics import prometheus_text
from mcore_reshard.validation import ranks
from mcore_reshard.validation.engine.slices import GenSizes, poison
from mcore_reshard.validation.engine.vllm_engine import build_engine, engine_config
from mcore_reshard.validation.runner import ValidationRequest, validate
from mcore_reshard.validation.tiny import checkpoint_shapes
from mcore_reshard.validation.trainer.build import build_trainer

EXTENSION = "mcore_reshard.vllm.RefitWorker"


def worker_of(folder: Path, sizes: GenSizes, gen_rank: int) -> Any:
    """vLLM's wrapper of a worker that vLLM has extended. The GPU worker: the CPU worker's constructor needs kernels."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    config = engine_config(folder, sizes, gen_rank)
    config.parallel_config.worker_cls = "vllm.v1.worker.gpu_worker.Worker"
    config.parallel_config.worker_extension_cls = EXTENSION
    wrapper = WorkerWrapperBase()
    arguments = {
        "vllm_config": config, "local_rank": 0, "rank": config.parallel_config.rank,
        "distributed_init_method": "", "is_driver_worker": False,
    }  # fmt: skip
    wrapper.init_worker([arguments])
    return wrapper


@pytest.fixture(autouse=True)
def vllm_worker_unextended():
    """vLLM extends its class for good."""
    from vllm.v1.worker.gpu_worker import Worker

    bases = Worker.__bases__
    yield
    Worker.__bases__ = bases


def called(worker: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    from vllm.v1.serial_utils import run_method

    return run_method(worker, method, args, json.loads(json.dumps(kwargs)))


def generate_by_worker(rank: int, job: ranks.Job, store: str) -> ranks.Results:
    """As `ranks._generate`, through the worker's methods."""
    engine, sizes = ranks._VllmEngine(job, rank), ranks.gen_sizes(job.plan.gen)
    worker = worker_of(job.engine_folder, sizes, rank)
    worker.worker.model_runner = SimpleNamespace(get_model=lambda: engine._model)
    replica = 0 if sizes.ep > 1 else rank // (sizes.tp * sizes.pp)
    prepared = called(worker, "connect_refit", store=store, replica=replica, transport=job.request.options.transport)
    assert prepared == f"gen:{rank}"
    reports, results = [], []
    for version in range(1, job.request.refits + 1):
        for tensor in engine.tensors.values():
            poison(tensor)
        told = called(worker, "refit", version)
        reports.append(RefitReport(**json.loads(json.dumps(told))))
        results.append(ranks._compare_with_golden(job, rank, version, engine, engine.loaded))
    metrics = json.loads(json.dumps(called(worker, "refit_metrics")))
    assert metrics["refits"]["committed"] == len(reports) and f'rank="gen:{rank}"' in prometheus_text(metrics)
    trace = json.loads(Path(called(worker, "write_refit_trace", str(job.folder))).read_text())
    assert {"refit 1", "prepare"} <= {event["name"] for event in trace["traceEvents"]}
    called(worker, "close_refit")
    called(worker, "close_refit")
    return reports, results


@pytest.mark.parametrize(
    ("family", "train", "gen"),
    [
        ("qwen3-moe", "tp=2,ep=2", "tp=2,dp=2"),
        ("deepseek-v3", "pp=2", "tp=2,dp=2,ep=4"),
        ("nemotron-h", "tp=2", "pp=2"),  # its A_log and router go by name
    ],
)
def test_refits_through_vllm_workers_equal_golden(family, train, gen, monkeypatch):
    monkeypatch.setattr(ranks, "_generate", generate_by_worker)
    report = run_validation(load_config(f"tiny-{family}"), train, gen, engine="vllm")
    assert_golden(report)
    assert all(refit.bulk_bytes and bool(refit.misc_bytes) == (family == "nemotron-h") for refit in report.refits)


def train_by_connect(rank: int, job: ranks.Job, store: str) -> ranks.Results:
    """As `ranks._train`, through the front door: the plan is made of live traces of both sides."""
    import torch.distributed as dist

    mesh = job.plan.train
    dist.init_process_group("gloo", store=dist.FileStore(str(job.folder / "world")), rank=rank, world_size=mesh.world)
    model = build_trainer(job.payload_folder(1), mesh, fp8_block=job.precisions.trainer_block, pairs=job.pairs)
    connected = mr.megatron.connect(
        model.model_chunks, model.bridge, job.precisions.engine_config, gen=job.plan.gen, gen_dtype="fp8", store=store,
        options=job.request.options,
    )  # fmt: skip
    reports = []
    for version in range(1, job.request.refits + 1):
        model.load(job.payload_folder(version))
        ranks._write_golden(job, rank, model, version)
        reports.append(connected.refit(version))
    connected.close()
    return reports, []


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp8", marks=pytest.mark.slow)])
def test_a_refit_into_fp8_planned_from_traces_goes_through_vllm_workers(dtype, monkeypatch, tmp_path):
    """Each worker holds the places of scales, which the plan derives, against its own loader."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ranks, "_generate", generate_by_worker)
    monkeypatch.setattr(ranks, "_train", train_by_connect)
    request = read_traced_request(in_blocks("olmoe", (8, 8)), "tp=2", "tp=2", "exact", dtype, "fp8")
    report = validate(ValidationRequest(request, options=OPTIONS, engine="vllm", refits=2))
    assert_golden(report)
    assert all(refit.bulk_bytes and not refit.misc_bytes for refit in report.refits)


KV_SCALES = {f"model.layers.{layer}.self_attn.attn.k_scale": 1.5 + layer for layer in range(4)}


def test_kv_scales_land_on_the_stages_of_their_layers_and_a_wrong_name_costs_nothing(monkeypatch, kv_cache_in):
    kv_cache_in("fp8")
    refit, compare = TrainEndpoint.refit, ranks._compare_with_golden

    def with_scales(self, version, **_):
        scales = KV_SCALES if self.rank_name == "train:0" else {}
        with pytest.raises(KvScalesError, match=r"1 of 5 scales .* cache has scales: model\.layers\.0\.k_scale; name"):
            refit(self, version, kv_scales=scales and {**scales, "model.layers.0.k_scale": 1.0})
        return refit(self, version, kv_scales=scales)

    def compare_scales_too(job, rank, version, engine, bulk):
        held = {name: m._k_scale.item() for name, m in engine._model.named_modules() if hasattr(m, "_k_scale")}
        assert len(held) == 2 and held.items() <= {n.removesuffix(".k_scale"): s for n, s in KV_SCALES.items()}.items()
        return compare(job, rank, version, engine, bulk)

    monkeypatch.setattr(ranks, "_generate", generate_by_worker)
    monkeypatch.setattr(ranks, "_compare_with_golden", compare_scales_too)
    for endpoint in (TrainEndpoint, GenerationEndpoint):
        monkeypatch.setattr(endpoint, "refit", with_scales)
    report = run_validation(load_config("tiny-qwen3"), "tp=2", "pp=2", engine="vllm")
    assert report.ok


@pytest.mark.parametrize(
    ("module", "name"), [("gpu_worker", "Worker"), ("cpu_worker", "CPUWorker"), ("worker_base", "WorkerWrapperBase")]
)
def test_no_name_is_one_of_vllms(module, name):
    source = importlib.import_module(f"vllm.v1.worker.{module}")
    names = [name for name in dir(RefitWorker) if not name.startswith("__")]
    assert {"connect_refit", "refit", "close_refit"} < set(names)
    assert not [own for own in names if hasattr(getattr(source, name), own)]
    assert not [own for own in names if f"self.{own} " in inspect.getsource(source)], "an attribute of its instances"


def test_a_worker_of_other_engines_than_the_plan_is_for_is_refused(config_folder, monkeypatch):
    folder = config_folder(tiny("llama"))
    plan = SimpleNamespace(gen=parse_gen_mesh("tp=2,dp=2"))
    monkeypatch.setattr("mcore_reshard.engines.vllm.rank.answer_request", lambda *_: None)
    monkeypatch.setattr("mcore_reshard.engines.vllm.rank.fetch_plan", lambda *_, **__: plan)
    monkeypatch.setattr("mcore_reshard.engines.vllm.rank.session_under_way", lambda _, options: options)
    told = r"planned tp=2,.*this engine tp=4,.*, replica 0"
    with pytest.raises(MeshError, match=told):
        called(worker_of(folder, GenSizes(tp=4), 3), "connect_refit", store="127.0.0.1:1")
    for rank in range(3):  # vLLM reads their answers first
        answer = called(worker_of(folder, GenSizes(tp=4), rank), "connect_refit", store="127.0.0.1:1")
        assert list(answer) == ["error"] and answer["error"].startswith("MeshError: the plan is for other engines")


def test_a_refit_needs_a_session(config_folder):
    with pytest.raises(SessionError, match="in no session: connect all workers first"):
        called(worker_of(config_folder(tiny("llama")), GenSizes(), 0), "refit", 1)
    with pytest.raises(SessionError, match="in no session: connect all workers first"):
        called(worker_of(config_folder(tiny("llama")), GenSizes(), 0), "refit_metrics")


def test_what_a_loader_did_with_an_equal_model_is_not_traced_again(config_folder, monkeypatch):
    folder = config_folder(tiny("qwen3"))
    shapes = checkpoint_shapes(tiny("qwen3"))
    checkpoint = {name: HfTensor(shape, "bfloat16") for name, shape in shapes.items()}
    traced = []

    def count(model, *args, **kwargs):
        traced.append(model)
        return trace_loading(model, *args, **kwargs)

    monkeypatch.setattr("mcore_reshard.engines.vllm.rank.trace_loading", count)

    def trace_of(rank: int, change: Callable[[Any], None] = lambda model: None, of: Any = checkpoint) -> CondensedTrace:
        engine = build_engine(folder, GenSizes(tp=2), rank)
        change(engine)
        worker = worker_of(folder, GenSizes(tp=2), rank)
        worker.worker.model_runner = SimpleNamespace(get_model=lambda: engine)
        return worker.worker.refit_rank._condensed_trace(of)

    first = trace_of(0)
    assert trace_of(0) == first and len(traced) == 1
    assert trace_of(1) != first and len(traced) == 2
    trace_of(0, lambda model: setattr(model.model.layers[0].mlp.down_proj, "reduce_results", False))
    trace_of(0, of=dict([*checkpoint.items()][:-1]))
    assert len(traced) == 4
    monkeypatch.setattr(type(traced[0]), "load_weights", lambda self, weights: None)  # what frameworks patch
    assert trace_of(0) != first and len(traced) == 5
