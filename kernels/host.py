"""Which machine a process runs on."""

from pathlib import Path


def host() -> str:
    """What processes of one running host have in common, whatever containers they are in."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
