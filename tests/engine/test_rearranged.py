"""Experts that a backend rearranges after loading: traces of vLLM's own rearrangement, and refits into what it leaves."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoints import tiny
from helpers.assembled import hf_tensors, wrong_tensors
from live_refits import Tensors, refit, refits, worker_of

from mcore_reshard.engines.vllm.model import load_weights, local_tensors
from mcore_reshard.engines.vllm.rearranged import rearranged_parameters
from mcore_reshard.engines.vllm.trace import trace_loading
from mcore_reshard.kernels.errors import LayoutError
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.planner.layout.traces import HfTensor
from mcore_reshard.validation.engine.slices import GenSizes
from mcore_reshard.validation.engine.vllm_engine import build_engine, engine_config
from mcore_reshard.validation.tiny import checkpoint_shapes, payload


def finish_loading(model: torch.nn.Module, backend: str = "FLASHINFER_CUTLASS") -> torch.nn.Module:
    """What vLLM does to experts once a model is loaded, its own code, for a backend that no CPU has. No kernel is built."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if type(method).__name__ == "UnquantizedFusedMoEMethod":
            method.unquantized_backend = UnquantizedMoeBackend[backend]
            with mock.patch.object(
                type(method), "_init_moe_kernel", lambda self, _: setattr(self, "moe_kernel", mock.Mock())
            ):
                method.process_weights_after_loading(layer)
    return model


def loaded(name: str, sizes: GenSizes, folder: Path) -> tuple[torch.nn.Module, Tensors]:
    """Rank 1's model, loaded and rearranged, and the checkpoint."""
    (folder / "config.json").write_text(json.dumps(tiny(name)))
    model, data = build_engine(folder, sizes, 1), dict(payload(checkpoint_shapes(tiny(name)), 1))
    load_weights(model, ((name, tensor.clone()) for name, tensor in data.items()))
    return finish_loading(model), data


CASES = [
    ("qwen3-moe", GenSizes(tp=2)),
    ("deepseek-v3", GenSizes(tp=2, ep=2)),
    ("nemotron-h", GenSizes(tp=2)),
    ("glm4-moe", GenSizes(tp=2)),
    ("olmoe", GenSizes(pp=2)),
]


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=str)
def test_traces_say_where_vllms_rearrangement_puts_every_element(name: str, sizes: GenSizes, tmp_path: Path) -> None:
    model, data = loaded(name, sizes, tmp_path)
    live = local_tensors(model, as_kernels_read=True)
    trace = trace_loading(model, hf_tensors(data), as_kernels_read=True)
    experts = rearranged_parameters(model)
    assert experts and not [t for t in trace.tensors if t.tensor.name in experts and t.computed]
    assert wrong_tensors(trace, data, live) == []
    found = wrong_tensors(trace_loading(model, hf_tensors(data)), data, live)  # as loaded
    gated = {name for name in experts if name.endswith("w13_weight")} if name != "nemotron-h" else set()
    assert set(found) == gated


def generate(rank: int, sizes: GenSizes, folder: Path, address: str) -> tuple[int, list[str]]:
    """How many rearranged tensors were compared, and which of all differ from what vLLM makes of golden, rearranged too."""
    model = finish_loading(build_engine(folder / "1", sizes, rank))

    def load(golden: Tensors) -> Tensors:
        another = build_engine(folder / "1", sizes, rank)
        load_weights(another, golden.items())
        return local_tensors(finish_loading(another), as_kernels_read=True)

    worker = worker_of(engine_config(folder / "1", sizes, rank), model)
    tensors = partial(local_tensors, model, as_kernels_read=True)
    differing = [*refits(worker, tensors, folder, address, load)]
    return len(rearranged_parameters(model) & tensors().keys()), differing


REFITS = {
    "qwen3-moe": (TrainMesh(tp=2, ep=2), GenSizes(tp=2), "tp=2", 8),
    "deepseek-v3": (TrainMesh(tp=2), GenSizes(tp=2, ep=2), "tp=2,ep=2", 6),
    "glm4-moe": (TrainMesh(tp=2), GenSizes(tp=2), "tp=2", 4),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "qwen3-moe")) for n in REFITS])
def test_refits_write_experts_as_kernels_read_them(name: str, tmp_path: Path) -> None:
    mesh, sizes, gen, count = REFITS[name]
    _, engines = refit(name, mesh, sizes, gen, tmp_path, generate)
    assert engines == [(count, [])] * sizes.world


@pytest.fixture
def traced_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, HfTensor]]:
    """A worker whose experts are rearranged, and the checkpoint. It was never traced before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, data = loaded("qwen3-moe", GenSizes(tp=2), tmp_path)
    return worker_of(engine_config(tmp_path, GenSizes(tp=2), 1), model), hf_tensors(data)


NAMED = r"(?s)cannot write 8 parameters .*the {} backend rearranges experts after loading; {}.*: model\.layers\.0\."


def test_a_rearrangement_that_computes_is_refused_by_name(traced_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    worker, checkpoint = traced_worker
    monkeypatch.setattr(unquantized, "swap_w13_to_w31", lambda w13: w13 * 2)
    with pytest.raises(
        RuntimeError, match=NAMED.replace("8", "4").format("FlashInfer CUTLASS", r"aten\.mul\.Tensor at ")
    ):
        worker.refit_rank._condensed_trace(checkpoint)


def test_a_loader_that_cannot_be_traced_is_refused_beside_rearranged_experts(
    traced_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere the whole model would go through this loader, which corrupts them."""
    worker, checkpoint = traced_worker
    model = worker.get_model()
    monkeypatch.setattr(type(model), "load_weights", lambda self, weights: next(iter(weights))[1].item())
    with pytest.raises(RuntimeError, match=NAMED.format("FlashInfer CUTLASS", "vLLM's loader cannot be traced")):
        worker.refit_rank._condensed_trace(checkpoint)


def test_backends_that_nobody_has_traced_are_refused_by_name(traced_worker: Any) -> None:
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    worker, checkpoint = traced_worker
    for layer in worker.get_model().modules():
        if type(getattr(layer, "quant_method", None)).__name__ == "UnquantizedFusedMoEMethod":
            layer.quant_method.unquantized_backend = UnquantizedMoeBackend.AITER
    with pytest.raises(RuntimeError, match="the ROCm AITER backend rearranges experts after loading: "):
        worker.refit_rank._condensed_trace(checkpoint)


@pytest.mark.parametrize(
    ("transport", "misc", "refused"),
    [("gloo", "model.layers.1.mlp.experts.3.up_proj.weight", True), ("gloo", "model.norm.weight", False),
     ("golden", "model.norm.weight", True)],
)  # fmt: skip
def test_nothing_is_loaded_into_rearranged_experts(
    traced_worker: Any, transport: str, misc: str, refused: bool
) -> None:
    worker, checkpoint = traced_worker
    worker.refit_rank._condensed_trace(checkpoint)
    plan = SimpleNamespace(misc_names=(misc,))
    check = partial(worker.refit_rank._refuse_loading_of_rearranged, plan, 1, Options(transport=transport))
    with pytest.raises(LayoutError, match=r"gen:1: .* would go through vLLM's loader") if refused else nullcontext():
        check()
