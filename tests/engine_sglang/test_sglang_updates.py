"""Direct writes inside a weight update of SGLang's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.assembled import assembled, differences, hf_tensors

from mcore_reshard.engines.sglang.model import after_direct_writes, load_weights, local_tensors
from mcore_reshard.engines.sglang.trace import trace_loading
from mcore_reshard.validation.engine.sglang_engine import build_engine
from mcore_reshard.validation.engine.slices import GenSizes
from mcore_reshard.validation.tiny import tiny_config, write_checkpoint

WEIGHTS: dict[str, torch.Tensor] = {}  # what the loaders below write


def write(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in local_tensors(model).items():
        tensor.copy_(WEIGHTS[name])


def write_and_derive(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    write(model, named_tensors)
    after_direct_writes(model)


@pytest.mark.parametrize("loader", [write, write_and_derive])
def test_a_custom_weight_loader_that_writes_must_derive_what_attention_reads(tmp_path: Path, loader: Any) -> None:
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    config, sizes = tiny_config("deepseek_v3"), GenSizes(tp=2)
    first, second = (write_checkpoint(config, tmp_path, version) for version in (1, 2))
    expected, model = build_engine(tmp_path, sizes, 1), build_engine(tmp_path, sizes, 1)
    load_weights(expected, second.items())
    load_weights(model, first.items())
    WEIGHTS.update(assembled(trace_loading(model, hf_tensors(second)), second))
    path = f"{loader.__module__}.{loader.__name__}"
    updater = WeightUpdater(
        tp_rank=1,
        device="cpu",
        gpu_id=0,
        model_config=None,
        custom_weight_loaders=[path],
        get_model=lambda: model,
        update_model_fields=None,
        recapture_cuda_graph=None,
        get_model_runner=None,
    )
    updater.begin_weight_update()
    assert updater.update_weights_from_tensor([("version", torch.tensor(2.0))], load_format=path) == (True, "Success")
    updater.end_weight_update(run_post_load=False)  # as the scheduler ends a session that a loader ran in
    assert differences(local_tensors(model), local_tensors(expected)) == []
    derived = [torch.equal(a.self_attn.w_kc, b.self_attn.w_kc) for a, b in zip(*layers(model, expected), strict=True)]
    assert derived == [loader is write_and_derive] * len(derived)


def layers(*models: Any) -> list[Any]:
    return [model.model.layers for model in models]
