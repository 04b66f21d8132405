"""The transports there are, and which one a session uses."""

from __future__ import annotations

import os
from functools import partial

import torch

from mcore_reshard.kernels.errors import TransportUnavailable
from mcore_reshard.kernels.transports.nccl.communicator import nccl_unavailable_reason
from mcore_reshard.kernels.transports.nccl.executor import NcclExecutor
from mcore_reshard.kernels.transports.nccl.staging import ScratchBudget

from .base import Executor, Transport, TransportContext, gpu_unavailable_reason
from .gloo import GlooExecutor
from .mixed import connect_by_pair
from .relay import relayed, unrelayed

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
    """The transport of that name; for 'auto' the first one that can move tensors of `device` (a torch device type).

    MCORE_RESHARD_TRANSPORT in the environment overrides `requested`; nothing else reads it. Raises `TransportUnavailable`
    saying what is missing: no other transport is ever taken instead.
    """
    name = os.environ.get(TRANSPORT_VARIABLE) or requested
    if name == AUTO:
        planned = [transport for transport in _transports.values() if transport.connect is not None]
        usable = [transport for transport in planned if _unavailable_reason(transport, device) is None]
        if not usable:
            reasons = "; ".join(f"{transport.name}: {_unavailable_reason(transport, device)}" for transport in planned)
            raise TransportUnavailable(f"no transport can move {device} tensors here ({reasons})")
        return usable[0]
    if name not in _transports:
        raise TransportUnavailable(
            f"unknown transport {name!r}; known: {', '.join(dict.fromkeys((AUTO, *_transports)))}"
        )
    if unavailable_reason := _unavailable_reason(_transports[name], device):
        raise TransportUnavailable(f"transport {name} cannot be used: {unavailable_reason}")
    return _transports[name]


def device_of(requested: str) -> str:
    """The torch device type whose tensors `requested` moves on this machine: "cuda" where it can, else "cpu".

    Raises `TransportUnavailable` where it can move neither.
    """
    devices = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu", "cuda")
    unavailable_reasons = []
    for device in devices:
        try:
            resolve(requested, device)
        except TransportUnavailable as error:
            unavailable_reasons.append(error)
        else:
            return device
    raise unavailable_reasons[-1]


def _unavailable_reason(transport: Transport, device: str) -> str | None:
    if device not in transport.devices:
        return f"it moves {' and '.join(sorted(transport.devices))} tensors, these are on {device}"
    return transport.unavailable_reason()


def _always_available() -> None:
    return None


def _direct_unavailable_reason() -> str | None:
    """Why no rank of this machine can read other ranks' GPU memory. Which ranks it reaches shows when it connects."""
    return gpu_unavailable_reason("cuda-core", "cuda-bindings")


def _connect_direct(context: TransportContext) -> Executor:
    from mcore_reshard.kernels.cuda.copy_kernel import KernelShape  # these need CUDA's Python packages
    from mcore_reshard.kernels.transports.direct.executor import DirectExecutor
    from mcore_reshard.kernels.transports.direct.options import DirectOptions

    options = context.options
    shape = KernelShape() if options.ctas is None else KernelShape(ctas=options.ctas)
    return DirectExecutor(
        context.store,
        context.bound,
        timeout_s=options.timeout_s,
        scratch_bytes=options.scratch_bytes,
        options=DirectOptions(shape, checksums=options.checksums),
    )


def _connect_nccl(context: TransportContext) -> Executor:
    options = context.options
    budget = ScratchBudget(options.scratch_bytes, checksums=options.checksums)
    return NcclExecutor(context.bound, context.store, timeout_s=options.timeout_s, budget=budget)


def _connect_gloo(context: TransportContext) -> Executor:
    return GlooExecutor(context.group, context.bound, bucket_bytes=context.options.bucket_bytes)


_DIRECT = Transport(
    name="direct",
    devices=frozenset({"cuda"}),
    reach="GPUs of one host that can access each other's memory",
    unavailable_reason=_direct_unavailable_reason,
    connect=partial(relayed, _connect_direct),
)
_NCCL = Transport(
    name="nccl",
    devices=frozenset({"cuda"}),
    reach="any hosts that NCCL can connect",
    unavailable_reason=nccl_unavailable_reason,
    connect=partial(unrelayed, _connect_nccl),
)


def _unavailable_reason_by_pair() -> str | None:
    unavailable_reasons = [
        f"{transport.name}: {transport.unavailable_reason()}"
        for transport in (_DIRECT, _NCCL)
        if transport.unavailable_reason()
    ]
    return "; ".join(unavailable_reasons) if len(unavailable_reasons) == 2 else None


register(
    Transport(
        name=AUTO,
        devices=frozenset({"cuda"}),
        reach="each pair of ranks by direct where it reaches, by nccl elsewhere",
        unavailable_reason=_unavailable_reason_by_pair,
        connect=lambda context: connect_by_pair(context, _DIRECT, _NCCL),
    )
)
register(_DIRECT)
register(_NCCL)
register(
    Transport(
        name="gloo",
        devices=frozenset({"cpu"}),
        reach="any hosts with a TCP route",
        unavailable_reason=_always_available,
        connect=partial(relayed, _connect_gloo),
    )
)
register(
    Transport(
        name=GOLDEN,
        devices=frozenset({"cpu", "cuda"}),
        reach="any hosts with a TCP route",
        unavailable_reason=_always_available,
        connect=None,
    )
)
