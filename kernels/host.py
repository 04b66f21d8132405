"""The host of this process, its GPUs by NVML, and the packages installed there. Imports nothing that may be missing."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path

_GROUPS = Path("/proc/self/cgroup")
_CONTROLLERS = Path("/sys/fs/cgroup")


def host() -> str:
    """The id of the running host: equal for all its processes, in whatever containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@cache
def number_of_gpu(uuid: str) -> int | None:
    """The number of a GPU among those of its host, as NVML counts them; None where NVML does not say.

    NCCL knows rails by it: `ncclTopoGetNetDev` of graph/search.cc (2.28.9) looks for the NIC beside the peer's `nvmlDev`.
    """
    device, number = ctypes.c_void_p(), ctypes.c_uint()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        failed = (
            nvml.nvmlInit_v2()
            or nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(device))
            or nvml.nvmlDeviceGetIndex(device, ctypes.byref(number))
        )
    except (OSError, AttributeError):  # no library, or an older one
        return None
    return None if failed else number.value


def gpu_numbers(places: Sequence[tuple[str, str, int | None]]) -> list[int]:
    """The number of each rank's GPU on its host; `places` are its host, the GPU's name there, and the number that it says.

    GPUs whose number nobody says take the lowest free ones. If ranks of a host contradict each other, its GPUs are numbered
    as they come: containers may see one GPU each, whose number is 0.
    """
    of_hosts: dict[str, list[tuple[str, int | None]]] = {}
    for host_name, gpu, number in places:
        of_hosts.setdefault(host_name, []).append((gpu, number))
    numbered = {host_name: _numbered(said) for host_name, said in of_hosts.items()}
    return [numbered[host_name][gpu] for host_name, gpu, _ in places]


def _numbered(gpus: Sequence[tuple[str, int | None]]) -> dict[str, int]:
    """The number of each GPU of one host."""
    told = {(gpu, number) for gpu, number in gpus if number is not None}
    numbers = dict(told)
    if not len(told) == len(numbers) == len({*numbers.values()}):
        numbers = {}
    free = (number for number in count() if number not in numbers.values())
    return numbers | {gpu: next(free) for gpu in dict.fromkeys(gpu for gpu, _ in gpus) if gpu not in numbers}


def is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def available_memory() -> int | None:
    """Bytes of memory that this process can still take: of the host, and of its control groups. None if nobody says."""
    limits = [*_free_in_control_groups()]
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return min(limits, default=None)


def _free_in_control_groups() -> Iterator[int]:
    """What the memory controller of this process's control group, and of those above it, leaves free."""
    files = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
    for line in _GROUPS.read_text().splitlines() if _GROUPS.exists() else []:
        _, controllers, group = line.split(":", 2)  # "0::/a/b", or "5:memory:/a/b" of version 1
        if controllers not in files:
            continue
        root, (most, taken) = _CONTROLLERS / controllers, files[controllers]
        for folder in {root, *(root / part for part in (Path(group.strip("/")), *Path(group.strip("/")).parents))}:
            with suppress(OSError, ValueError):  # no limit is "max"; a container may not see the groups above its own
                free = int((folder / most).read_text()) - int((folder / taken).read_text())
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield max(0, free + int(stat.get("inactive_file", 0)))  # cached files make room
