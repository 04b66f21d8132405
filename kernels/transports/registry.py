"""The transports there are, and which one a session uses."""

from __future__ import annotations

import os
from functools import partial

import torch

from mcore_reshard.kernels.errors import TransportUnavailable
from mcore_reshard.kernels.transports.nccl.communicator import nccl_obstacle
from mcore_reshard.kernels.transports.nccl.executor import NcclExecutor

from .base import Link, Transport, gpu_obstacle
from .gloo import GlooExecutor
from .mixed import connect_by_pair
from .pipeline import Executor
from .relay import relayed, unrelayed
from .rounds import ScratchBudget

AUTO = "auto"
GOLDEN = "golden"
TRANSPORT_VARIABLE = "MCORE_RESHARD_TRANSPORT"


_transports: dict[str, Transport] = {}


def register(transport: Transport) -> None:
    """Add a transport. `auto` prefers those registered earlier."""
    if transport.name in _transports:
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
        raise TransportUnavailable(
            f"unknown transport {name!r}; known: {', '.join(dict.fromkeys((AUTO, *_transports)))}"
        )
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
    return gpu_obstacle("cuda-core", "cuda-bindings")


def _connect_direct(link: Link) -> Executor:
    from mcore_reshard.kernels.cuda.copy_kernel import KernelShape  # these need CUDA's Python packages
    from mcore_reshard.kernels.transports.direct.executor import DirectExecutor
    from mcore_reshard.kernels.transports.direct.options import DirectOptions

    shape = KernelShape() if link.ctas is None else KernelShape(ctas=link.ctas)
    return DirectExecutor(
        link.store,
        link.program,
        timeout_s=link.timeout_s,
        scratch_bytes=link.scratch_bytes,
        options=DirectOptions(shape, checksums=link.checksums),
    )


def _connect_nccl(link: Link) -> Executor:
    budget = ScratchBudget(link.scratch_bytes, checksums=link.checksums)
    return NcclExecutor(link.program, link.store, timeout_s=link.timeout_s, budget=budget)


def _connect_gloo(link: Link) -> Executor:
    return GlooExecutor(link.group, link.program)


_DIRECT = Transport(
    name="direct",
    devices=frozenset({"cuda"}),
    reach="GPUs of one host that can access each other's memory",
    obstacle=_direct_obstacle,
    connect=partial(relayed, _connect_direct),
)
_NCCL = Transport(
    name="nccl",
    devices=frozenset({"cuda"}),
    reach="any hosts that NCCL can connect",
    obstacle=nccl_obstacle,
    connect=partial(unrelayed, _connect_nccl),
)


def _obstacle_by_pair() -> str | None:
    troubles = [f"{transport.name}: {transport.obstacle()}" for transport in (_DIRECT, _NCCL) if transport.obstacle()]
    return "; ".join(troubles) if len(troubles) == 2 else None


register(
    Transport(
        name=AUTO,
        devices=frozenset({"cuda"}),
        reach="each pair of ranks by direct where it reaches, by nccl elsewhere",
        obstacle=_obstacle_by_pair,
        connect=lambda link: connect_by_pair(link, _DIRECT, _NCCL),
    )
)
register(_DIRECT)
register(_NCCL)
register(
    Transport(
        name="gloo",
        devices=frozenset({"cpu"}),
        reach="any hosts with a TCP route",
        obstacle=_no_obstacle,
        connect=partial(relayed, _connect_gloo),
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
