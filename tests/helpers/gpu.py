"""Marks and probes of the tests on GPUs. `make test-gpu` runs them; elsewhere they are skipped with the reason."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest
import torch


def needs_gpus(count: int) -> pytest.MarkDecorator:
    available = torch.cuda.device_count()
    return pytest.mark.skipif(available < count, reason=f"needs {count} CUDA devices, there are {available}")


def has_transformer_engine() -> bool:
    """Whether the real one is installed: in the tests' own process Megatron has the stand-in."""
    try:
        version("transformer-engine")
    except PackageNotFoundError:
        return False
    return True
