"""An engine that vLLM has reloaded by itself is traced as before: what the reload wraps around loaders loads nothing later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_reshard.planner.layout.traces import HfTensor
from mcore_reshard.validation import tiny
from mcore_reshard.validation.engine.slices import GenSizes
from mcore_reshard.validation.engine.vllm_engine import build_engine, engine_config


@pytest.mark.parametrize("family", ["llama_tied", "qwen2", "qwen3"])  # experts want kernels
def test_a_reload_by_vllm_changes_no_trace(family: str, config_folder: Callable[[dict[str, Any]], Path]) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    from mcore_reshard.engines.vllm.trace import trace_loading

    config = tiny.tiny_config(family)
    folder = config_folder(config)
    shapes = tiny.checkpoint_shapes(config)
    model, vllm_config = build_engine(folder, GenSizes(), 0), engine_config(folder, GenSizes(), 0)
    checkpoint = {
        name: HfTensor(shape, str(tiny.checkpoint_dtype(name)).removeprefix("torch.")) for name, shape in shapes.items()
    }
    before = trace_loading(model, checkpoint)
    with set_current_vllm_config(vllm_config):
        initialize_layerwise_reload(model)
        model.load_weights(tiny.payload(shapes, 1))
        finalize_layerwise_reload(model, vllm_config.model_config)
    assert trace_loading(model, checkpoint) == before
