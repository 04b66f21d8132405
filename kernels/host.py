"""The host of this process, and the packages installed there. Imports nothing that may be missing."""

from importlib.util import find_spec
from pathlib import Path


def host() -> str:
    """The id of the running host: equal for all its processes, in whatever containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
