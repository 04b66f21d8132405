"""The machine of a benchmark: GPUs, their driver, and versions."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def command(tool: str, arguments: Sequence[str]) -> str:
    """A command as results keep it. Of absolute paths it keeps the names: folders are those of one machine."""
    return " ".join([tool, *(Path(each).name if Path(each).is_absolute() else each for each in arguments)])


def gpus() -> list[tuple[str, str]]:
    """(name, driver version) of each GPU, without using CUDA."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    return [(name, driver) for name, driver in (line.split(", ") for line in lines)]


def versions(*packages: str, **more: str) -> dict[str, str]:
    """Of Python, torch, `more` and those of `packages` that are installed."""
    by_name = {"python": platform.python_version(), "torch": torch.__version__, **more}
    for package in packages:
        try:
            by_name[package] = version(package)
        except PackageNotFoundError:
            continue
    return by_name
