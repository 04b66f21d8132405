"""Block-FP8 layers that a backend lays out anew after loading: refits write them as loaded, and lay them out as it does."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import fp8_checkpoint
from helpers.validating import assert_golden, run_validation
from helpers.validation_cases import in_blocks
from live_refits import Tensors, same_bytes, worker_of
from rearranging import BACKENDS, finish_loading, with_backend

from mcore_reshard.engines.vllm import redone
from mcore_reshard.engines.vllm.model import after_direct_writes, kernel_layouts, load_weights, local_tensors
from mcore_reshard.engines.vllm.trace import trace_loading
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.traces import HfTensor
from mcore_reshard.session.endpoints import RefitReport
from mcore_reshard.validation import ranks
from mcore_reshard.validation.engine.slices import GenSizes, poison
from mcore_reshard.validation.engine.vllm_engine import build_engine, engine_config

SIZES, RANK = GenSizes(tp=2), 1
_LARGE = {
    "hidden_size": 256,
    "head_dim": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
CONFIGS = {  # Marlin and TRT-LLM lay out blocks of 128
    (8, 8): in_blocks("qwen3-moe", (8, 8), num_hidden_layers=2),
    (128, 128): in_blocks("qwen3-moe", (128, 128), moe_intermediate_size=256, intermediate_size=512, **_LARGE),
}
BLOCKS = {name: (128, 128) if name in ("marlin", "trtllm") else (8, 8) for name in BACKENDS}
LAYER = "model.layers.0.self_attn.o_proj"


def config_of(backend: str) -> dict[str, Any]:
    return CONFIGS[BLOCKS[backend]]


def checkpoint(backend: str, version: int) -> Tensors:
    return fp8_checkpoint(config_of(backend), BLOCKS[backend], version)


def built(backend: str, folder: Path, version: int) -> torch.nn.Module:
    """Rank 1's engine, which has loaded a version by itself and laid it out."""
    (folder / "config.json").write_text(json.dumps(config_of(backend)))
    model = build_engine(folder, SIZES, RANK)
    load_weights(model, checkpoint(backend, version).items())
    return finish_loading(model, backend)


def kernel_tensors(model: torch.nn.Module) -> Tensors:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.dim()}


def differing(one: Tensors, other: Tensors) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if one[name].shape != other[name].shape or not same_bytes(one[name], other[name])]


# --- what kernels read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_refits_write_becomes_what_an_engine_has_that_loaded_it(backend: str, tmp_path: Path) -> None:
    with with_backend(backend):
        expected = {version: kernel_tensors(built(backend, tmp_path, version)) for version in (1, 2)}
        assert differing(expected[1], expected[2])
        as_loaded = build_engine(tmp_path, SIZES, RANK)  # Triton: kernels read what is loaded
        model = built(backend, tmp_path, 1)
        where = {name: tensor.data_ptr() for name, tensor in kernel_tensors(model).items()}
        written = local_tensors(model)
        assert differing(kernel_tensors(model), expected[1]) == []  # connecting writes nothing that is live
        assert {n: (t.shape, t.dtype) for n, t in written.items()} == {
            n: (t.shape, t.dtype) for n, t in local_tensors(as_loaded).items()
        }
        for version in (2, 1, 2):
            load_weights(as_loaded, checkpoint(backend, version).items())
            for name, tensor in local_tensors(as_loaded).items():
                written[name].copy_(tensor)
            after_direct_writes(model, torch.bfloat16)
            assert differing(kernel_tensors(model), expected[version]) == [], version
            assert differing(local_tensors(model), local_tensors(as_loaded)) == []  # a refit may write a part of these
        load_weights(model, checkpoint(backend, 1).items())  # golden and misc
        after_direct_writes(model, torch.bfloat16)
        assert differing(kernel_tensors(model), expected[1]) == []
        assert where == {name: tensor.data_ptr() for name, tensor in kernel_tensors(model).items()}


def test_deepgemm_keeps_weights_once_unless_it_quantizes_them_anew(tmp_path: Path) -> None:
    kept = {}
    for backend in ("deepgemm", "deepgemm without E8M0"):
        with with_backend(backend):
            model = built(backend, tmp_path, 1)
            local_tensors(model)
            kept[backend] = {name.rpartition(".")[2] for name in redone.beside_of(model)}
    scales = {"weight_scale_inv", "w13_weight_scale_inv", "w2_weight_scale_inv"}
    assert kept == {
        "deepgemm": scales | {"weight", "w13_weight", "w2_weight"},
        "deepgemm without E8M0": scales,
    }


def test_loaders_are_traced_as_if_nothing_was_laid_out_anew(tmp_path: Path) -> None:
    with with_backend("marlin"):
        model = built("marlin", tmp_path, 1)
        tensors = {
            name: HfTensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in checkpoint("marlin", 1).items()
        }
        assert kernel_layouts(model) == {} and redone.beside_of(model)
        live = kernel_tensors(model)
        trace = trace_loading(model, tensors)
        assert all(model.get_parameter(name).data_ptr() == tensor.data_ptr() for name, tensor in live.items())
        assert trace == trace_loading(build_engine(tmp_path, SIZES, RANK), tensors)


# --- whole refits ------------------------------------------------------------------------------------------------


def generate(rank: int, job: ranks.Job, store: str, backend: str) -> ranks.Results:
    """As `ranks._generate`, by a worker whose backend lays weights out anew; kernel tensors are compared too."""
    sizes, folder = ranks.gen_sizes(job.plan.gen), job.engine_folder
    with with_backend(backend):
        engine = ranks._VllmEngine(job, rank)
        model = finish_loading(engine._model, backend)
        worker = worker_of(engine_config(folder, sizes, rank), model)
        worker.refit_rank._derive_tensors = partial(after_direct_writes, model, torch.bfloat16)
        with pytest.warns(UserWarning, match=rf"gen:{rank}: backends of this engine rearrange .* kept twice, in \d"):
            worker.connect_refit(store, transport=job.request.options.transport)
        where = {name: tensor.data_ptr() for name, tensor in kernel_tensors(model).items()}
        reports, results = [], []
        for version in range(1, job.request.refits + 1):
            for tensor in kernel_tensors(model).values():
                tensor.zero_()
            for tensor in engine.loaded.values():
                poison(tensor)
            reports.append(RefitReport(**worker.refit(version)))
            made = {name: tensor.clone() for name, tensor in kernel_tensors(model).items()}
            results.append(ranks._compare_with_golden(job, rank, version, engine, engine.loaded))
            another = ranks._VllmEngine(job, rank)
            for name, tensor in engine.loaded.items():  # what vLLM's loader made of golden
                another.loaded[name].copy_(tensor)
            assert differing(made, kernel_tensors(finish_loading(another._model, backend))) == []
            assert where == {name: tensor.data_ptr() for name, tensor in kernel_tensors(model).items()}
        worker.close_refit()
        return reports, results


REFITS = [
    ("deepgemm", "tp=2,ep=2", "gloo"),
    pytest.param("deepgemm", "tp=2,ep=2", "golden", marks=pytest.mark.slow),
    pytest.param("flashinfer", "tp=2", "gloo", marks=pytest.mark.slow),
    pytest.param("marlin", "ep=2,dp=2", "gloo", marks=pytest.mark.slow),
    pytest.param("trtllm", "pp=2", "gloo", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("backend", "train", "transport"), REFITS)
def test_refits_of_real_trainers_become_what_kernels_read(
    backend: str, train: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_generate", partial(generate, backend=backend))
    options = Options(transport=transport, timeout_s=120.0)
    report = run_validation(
        config_of(backend), train, "tp=2", engine="vllm", train_dtype="fp8", gen_dtype="fp8", refits=3, options=options
    )
    assert_golden(report)
    assert all(bool(refit.bulk_bytes) == (transport == "gloo") for refit in report.refits)


# --- refusals ----------------------------------------------------------------------------------------------------


def wide(layer: Any) -> None:
    layer.weight_scale_inv = torch.nn.Parameter(layer.weight_scale_inv.repeat(2, 1), requires_grad=False)


def renamed(layer: Any) -> None:
    layer.packed = layer.weight
    del layer.weight


def broken(layer: Any) -> None:
    raise OSError("on fire")


REFUSED = [
    (wide, r"weight_scale_inv is made as float32 \[128, 4\], kernels read float32 \[64, 4\]"),
    (renamed, "packed is made, and kernels read none; weight is not made"),
    (broken, "OSError: on fire"),
]


@pytest.mark.parametrize(("change", "why"), REFUSED)
def test_a_layer_that_would_come_out_otherwise_is_refused_by_name_and_engines_get_their_memory_back(
    change: Callable[[Any], None], why: str, tmp_path: Path
) -> None:
    with with_backend("deepgemm"):
        model = built("deepgemm", tmp_path, 1)
        before = {name: tensor.clone() for name, tensor in kernel_tensors(model).items()}
        method = model.get_submodule(LAYER).quant_method
        process = method.process_weights_after_loading
        method.process_weights_after_loading = lambda layer: (process(layer), change(layer))
        told = r"(?s)cannot write 2 parameters.*DeepGemmFp8BlockScaledMMKernel rearranges block FP8 after loading, and"
        with pytest.raises(RuntimeError, match=rf"{told} cannot do so again: {why}: {LAYER}\.weight, {LAYER}\.weight_"):
            local_tensors(model)
        assert redone.beside_of(model) == {} and differing(before, kernel_tensors(model)) == []


def test_a_layer_that_comes_out_otherwise_later_fails_its_refit_and_stays_as_it_was(tmp_path: Path) -> None:
    with with_backend("deepgemm"):
        model = built("deepgemm", tmp_path, 1)
        local_tensors(model)
        method = model.get_submodule(LAYER).quant_method
        process = method.process_weights_after_loading
        method.process_weights_after_loading = lambda layer: (process(layer), wide(layer))
        before = {name: tensor.clone() for name, tensor in model.get_submodule(LAYER).named_parameters()}
        with pytest.raises(
            RuntimeError, match=rf"{LAYER} cannot be laid out anew as its kernels read it: weight_scale"
        ):
            after_direct_writes(model, torch.bfloat16)
        assert differing(before, dict(model.get_submodule(LAYER).named_parameters())) == []


def test_a_parameter_that_vllm_has_not_recorded_may_not_be_rearranged(tmp_path: Path) -> None:
    """As a bias under Marlin: vLLM 0.32 records none."""
    with with_backend("deepgemm"):
        model = built("deepgemm", tmp_path, 1)
        layer: Any = model.get_submodule(LAYER)
        layer.bias = torch.nn.Parameter(torch.arange(64.0), requires_grad=False)
        process = layer.quant_method.process_weights_after_loading
        assert kernel_layouts(model) == {}
        redone.forget(model)

        def reverse(layer: Any) -> None:
            process(layer)
            layer.bias = torch.nn.Parameter(layer.bias.flip(0), requires_grad=False)

        layer.quant_method.process_weights_after_loading = reverse
        with pytest.raises(
            RuntimeError, match="bias is made of what vLLM has not recorded, so its loaded layout is un"
        ):
            local_tensors(model)
        assert layer.bias[0] == 0.0


def test_layers_that_vllm_has_not_recorded_are_refused(tmp_path: Path) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    with with_backend("deepgemm"):
        model = built("deepgemm", tmp_path, 1)
        get_layerwise_info(model.get_submodule(LAYER)).restore_metadata = ({}, {})
        with pytest.raises(
            RuntimeError, match="has not recorded the parameters that the layer was created with: model"
        ):
            local_tensors(model)


def test_backends_that_nobody_has_read_are_refused_by_name(tmp_path: Path) -> None:
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

    with with_backend("deepgemm"):
        model = built("deepgemm", tmp_path, 1)
        experts = "model.layers.0.mlp.experts.routed_experts"
        model.get_submodule(experts).quant_method.fp8_backend = Fp8MoeBackend.HUMMING
        with pytest.raises(
            RuntimeError, match=rf"the HUMMING backend rearranges experts after loading: {experts}\.w13_"
        ):
            local_tensors(model)
