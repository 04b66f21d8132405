"""The transports there are, and which one a session uses."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch.distributed import Store

from .errors import TransportUnavailable
from .gloo import GlooExecutor, GlooGroup
from .nccl import NcclExecutor
from .nccl_communicator import nccl_obstacle
from .pipeline import Executor
from .program import Program
from .rounds import DEFAULT_SCRATCH_BYTES, ScratchBudget

AUTO = "auto"
GOLDEN = "golden"
TRANSPORT_VARIABLE = "MCORE_RESHARD_TRANSPORT"


@dataclass(frozen=True, slots=True)
class Link:
    """What a transport may build on when it connects: all ranks of the session do so at the same time."""

    store: Store  # keys are the transport's own
    group: GlooGroup  # every rank, for CPU messages
    program: Program
    timeout_s: float
    scratch_bytes: int = DEFAULT_SCRATCH_BYTES  # of device memory, per rank; for transports that stage on the device


@dataclass(frozen=True, slots=True)
class Transport:
    """A way to move a program's bytes. `connect` is None for golden, which moves whole tensors without a program."""

    name: str
    devices: frozenset[str]  # torch device types of the tensors it can move
    reach: str  # how far apart ranks may be
    obstacle: Callable[[], str | None]  # what keeps it from running on this machine
    connect: Callable[[Link], Executor] | None


_transports: dict[str, Transport] = {}


def register(transport: Transport) -> None:
    """Add a transport. `auto` prefers those registered earlier."""
    if transport.name in _transports or transport.name == AUTO:
        raise ValueError(f"a transport named {transport.name!r} is already registered")
    _transports[transport.name] = transport


def transports() -> tuple[Transport, ...]:
    return tuple(_transports.values())


def resolve(requested: str, device: str) -> Transport:
    """The transport of that name, or for 'auto' the first that can move tensors of `device` (a torch device type).

    The environment variable MCORE_RESHARD_TRANSPORT, where set, is asked instead of `requested`; nothing else reads it.
    Raises `TransportUnavailable` saying what is missing; another transport is never taken in its place.
    """
    name = os.environ.get(TRANSPORT_VARIABLE) or requested
    if name == AUTO:
        planned = [transport for transport in _transports.values() if transport.connect is not None]
        usable = [transport for transport in planned if _trouble(transport, device) is None]
        if not usable:
            reasons = "; ".join(f"{transport.name}: {_trouble(transport, device)}" for transport in planned)
            raise TransportUnavailable(f"no transport can move {device} tensors here ({reasons})")
        return usable[0]
    if name not in _transports:
        raise TransportUnavailable(f"unknown transport {name!r}; known: {', '.join((AUTO, *_transports))}")
    if trouble := _trouble(_transports[name], device):
        raise TransportUnavailable(f"transport {name} cannot be used: {trouble}")
    return _transports[name]


def device_of(requested: str) -> str:
    """The torch device type whose tensors `requested` moves on this machine, GPUs first where there are any.

    Raises `TransportUnavailable` where it can move neither.
    """
    devices = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu", "cuda")
    troubles = []
    for device in devices:
        try:
            resolve(requested, device)
        except TransportUnavailable as error:
            troubles.append(error)
        else:
            return device
    raise troubles[-1]


def _trouble(transport: Transport, device: str) -> str | None:
    if device not in transport.devices:
        return f"it moves {' and '.join(sorted(transport.devices))} tensors, these are on {device}"
    return transport.obstacle()


def _no_obstacle() -> None:
    return None


def _direct_obstacle() -> str | None:
    """What keeps a rank of this machine from reading other ranks' GPU memory; whether they can be reached shows later."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    try:
        found = find_spec("cuda.core") is not None
    except ModuleNotFoundError:
        found = False
    return None if found else "cuda-core not installed: pip install mcore-reshard[gpu]"


def _connect_direct(link: Link) -> Executor:
    from .direct import DirectExecutor  # needs CUDA's Python packages

    return DirectExecutor(link.store, link.program, timeout_s=link.timeout_s)


register(
    Transport(
        name="nccl",
        devices=frozenset({"cuda"}),
        reach="any hosts that NCCL can connect",
        obstacle=nccl_obstacle,
        connect=lambda link: NcclExecutor(
            link.program, link.store, timeout_s=link.timeout_s, budget=ScratchBudget(link.scratch_bytes)
        ),
    )
)
register(
    Transport(
        name="direct",
        devices=frozenset({"cuda"}),
        reach="GPUs of one host that can access each other's memory",
        obstacle=_direct_obstacle,
        connect=_connect_direct,
    )
)
register(
    Transport(
        name="gloo",
        devices=frozenset({"cpu"}),
        reach="any hosts with a TCP route",
        obstacle=_no_obstacle,
        connect=lambda link: GlooExecutor(link.group, link.program),
    )
)
register(
    Transport(
        name=GOLDEN,
        devices=frozenset({"cpu", "cuda"}),
        reach="any hosts with a TCP route",
        obstacle=_no_obstacle,
        connect=None,
    )
)
