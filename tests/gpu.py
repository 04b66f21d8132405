"""What the tests on GPUs share. `make test-gpu` runs them; elsewhere they are skipped with the reason."""

from __future__ import annotations

import pytest
import torch


def needs_gpus(count: int) -> pytest.MarkDecorator:
    found = torch.cuda.device_count()
    return pytest.mark.skipif(found < count, reason=f"needs {count} CUDA devices, there are {found}")
