"""What a transport is, and what it is given when a session connects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed import Store

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.host import is_importable
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup

from .pipeline import Executor

_MODULES = {"nccl4py": "nccl", "cuda-core": "cuda.core", "cuda-bindings": "cuda.bindings"}


def gpu_unavailable_reason(*packages: str) -> str | None:
    """What keeps a transport that needs these packages from moving tensors on this machine's GPUs; None: nothing."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    missing = [package for package in packages if not is_importable(_MODULES[package])]
    if not missing:
        return None
    return f"{' and '.join(missing)} not installed; from a clone of mcore-reshard: pip install '.[gpu]'"


@dataclass(frozen=True, slots=True)
class TransportContext:
    """What a transport may build on when it connects: all ranks of the session do so at the same time."""

    store: Store  # keys are the transport's own; in a session a FailFastStore, and so should be what is made over it
    another_store: Callable[[], Store]  # the same over a connection of its own: one who waits blocks all who share one
    group: GlooGroup  # every rank, for CPU messages
    bound: BoundSchedule
    options: Options


@dataclass(frozen=True, slots=True)
class Transport:
    """A way to move a program's bytes. `connect` is None for golden, which moves whole tensors without a program."""

    name: str
    devices: frozenset[str]  # torch device types of the tensors it can move
    reach: str  # how far apart ranks may be
    unavailable_reason: Callable[[], str | None]  # what keeps it from running on this machine
    connect: Callable[[TransportContext], Executor] | None
