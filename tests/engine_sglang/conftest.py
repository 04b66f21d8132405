"""Tests that need a real SGLang. Each is skipped, with the reason, where SGLang is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from mcore_reshard.validation.engine import sglang_engine

INSTALLED = importlib.util.find_spec("sglang") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            if not INSTALLED:
                reason = "needs SGLang: run `make test-sglang`, which installs it for a CPU"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def sglang() -> None:
    """Imports SGLang once, so that forked ranks find it imported."""
    if INSTALLED:
        sglang_engine.prepare()
