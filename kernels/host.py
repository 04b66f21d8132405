"""Which machine a process runs on, its GPUs, and what is installed there. Imports nothing that may be missing."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch


def host() -> str:
    """What processes of one running host have in common, whatever containers they are in."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def gpu_of(device: torch.device | int | None) -> str:
    """What all processes of a host call a GPU, its UUID; "" for what is in no GPU's memory."""
    if device is None or (isinstance(device, torch.device) and device.type != "cuda"):
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
