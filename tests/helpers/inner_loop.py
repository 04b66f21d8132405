"""`pytest --fast`: a test is skipped as soon as it starts a process or imports Megatron or transformers.

So nobody keeps a list of such tests.
"""

from __future__ import annotations

import multiprocessing.process
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import pytest


def forbid_what_is_slow() -> None:
    """From here on in this process. Importing the namespace `megatron` alone is allowed: it loads nothing."""
    sys.meta_path.insert(0, _NoModels())  # type: ignore[arg-type]
    os.fork = _skipping("starts a process")
    multiprocessing.process.BaseProcess.start = _skipping("starts a process")  # type: ignore[method-assign]
    subprocess.Popen.__init__ = _skipping("starts a process")  # type: ignore[method-assign]


def _skipping(what: str) -> Callable[..., NoReturn]:
    def skip(*args: Any, **kwargs: Any) -> NoReturn:
        pytest.skip(f"{what}: not with --fast", allow_module_level=True)

    return skip


class _NoModels:
    """An import hook."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith("megatron.") or name == "transformers":
            _skipping(f"imports {name.partition('.')[0]}")()
