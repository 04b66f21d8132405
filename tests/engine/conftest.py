"""Tests that need a real vLLM. Each is skipped, with the reason, where vLLM is not installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_reshard.validation.engine import vllm_engine

Config = dict[str, Any]
INSTALLED = importlib.util.find_spec("vllm") is not None
if INSTALLED:
    vllm_engine.prepare()  # before any test imports vLLM, which looks at its surroundings once


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if not INSTALLED:
                item.add_marker(pytest.mark.skip(reason="needs vLLM: run `make test-vllm`, which builds it for a CPU"))


@pytest.fixture
def config_folder(tmp_path: Path) -> Callable[[Config], Path]:
    """Writes a config into a folder that vLLM can read."""

    def write(config: Config) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


@pytest.fixture
def kv_cache_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the KV cache of engines that are built later one of this dtype; layers named by number are left out."""
    engine_config = vllm_engine.engine_config

    def of(dtype: str, *skipped: str) -> None:
        def build(*args: Any) -> Any:
            config = engine_config(*args)
            config.cache_config.cache_dtype, config.cache_config.kv_cache_dtype_skip_layers = dtype, list(skipped)
            return config

        monkeypatch.setattr(vllm_engine, "engine_config", build)

    return of
