"""The register of transports, and the choice of the one that a session uses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.errors import TransportUnavailable
from mcore_reshard.kernels.options import TRANSPORTS
from mcore_reshard.planner.plan.schedule import Chain

from .base import Executor, Transport, TransportContext, gpu_unavailable_reason
from .gloo import GlooExecutor
from .mixed import Way, connect_by_pair
from .nccl.communicator import nccl_unavailable_reason
from .nccl.executor import connect_nccl
from .nccl.staging import ScratchBudget
from .relay import connect_each, connect_joined, connect_relayed

AUTO = "auto"
GOLDEN = "golden"
TRANSPORT_VARIABLE = "MCORE_RESHARD_TRANSPORT"

_transports: dict[str, Transport] = {}


def register(transport: Transport) -> None:
    """Add a transport. `auto` prefers those registered earlier."""
    if transport.name in _transports:
        raise ValueError(f"a transport named {transport.name!r} is already registered")
    _transports[transport.name] = transport
    if transport.name not in TRANSPORTS:
        TRANSPORTS.append(transport.name)


def transports() -> tuple[Transport, ...]:
    return tuple(_transports.values())


def resolve(requested: str, device: str) -> Transport:
    """The transport of that name; for 'auto' the first one that can move tensors of `device` (a torch device type).

    MCORE_RESHARD_TRANSPORT in the environment overrides `requested`. Raises `TransportUnavailable` saying what is
    missing: no other transport is ever taken in its place.
    """
    name = os.environ.get(TRANSPORT_VARIABLE) or requested
    if name == AUTO:
        reasons = []
        for transport in _transports.values():
            if transport.connect is not None:
                reason = _unavailable_reason(transport, device)
                if reason is None:
                    return transport
                reasons.append(f"{transport.name}: {reason}")
        raise TransportUnavailable(f"no transport can move {device} tensors here ({'; '.join(reasons)})")
    if name not in _transports:
        raise TransportUnavailable(
            f"unknown transport {name!r}; known: {', '.join(dict.fromkeys((AUTO, *_transports)))}"
        )
    if unavailable_reason := _unavailable_reason(_transports[name], device):
        raise TransportUnavailable(f"transport {name} cannot be used: {unavailable_reason}")
    return _transports[name]


def device_of(requested: str) -> str:
    """The torch device type of tensors that `requested` moves here: "cuda" or "cpu". Raises `TransportUnavailable`."""
    first, second = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu", "cuda")
    try:
        resolve(requested, first)
    except TransportUnavailable:
        resolve(requested, second)
        return second
    return first


def _unavailable_reason(transport: Transport, device: str) -> str | None:
    if device not in transport.devices:
        return f"it moves {' and '.join(sorted(transport.devices))} tensors, these are on {device}"
    return transport.unavailable_reason()


def _connect_direct(context: TransportContext, chain: Chain | None = None) -> Executor:
    from mcore_reshard.kernels.cuda.copy_kernel import KernelShape  # these need CUDA's Python packages

    from .direct.executor import DirectExecutor
    from .direct.pull import DirectOptions

    options = context.options
    shape = None if options.ctas is None else KernelShape(ctas=options.ctas)
    return DirectExecutor(
        context.store,
        context.bound,
        timeout_s=options.timeout_s,
        scratch_bytes=options.scratch_bytes,
        options=DirectOptions(shape, checksums=options.checksums),
        kept=context.kept,
        chain=chain,
    )


def _connect_whole(context: TransportContext) -> Executor:
    """Connect the direct executor of a plan whose ranks are all within reach of each other.

    Where replicas pass on and are no chain, ranks go wave by wave together; so they do with checksums, which only ranks that
    pull compute of what is cast.
    """
    schedule = context.bound.schedule
    chain = None if schedule.view is None or context.options.checksums else schedule.view.chain()
    if schedule.relayed and chain is None:
        return connect_relayed(_direct_parts, _direct_parts, context)
    return _connect_direct(context, chain)


def _connect_nccl(context: TransportContext, parts: Sequence[Sequence[BoundSchedule]]) -> Sequence[Executor]:
    options = context.options
    budget = ScratchBudget(options.scratch_bytes, checksums=options.checksums)
    shared, device = context.shared, context.bound.device
    return connect_nccl(parts, context.store, timeout_s=options.timeout_s, budget=budget, shared=shared, device=device)


def _connect_gloo(context: TransportContext) -> Executor:
    return GlooExecutor(context.group, context.bound, bucket_bytes=context.options.bucket_bytes)


_direct_parts = connect_each(_connect_direct)
_gloo_parts = connect_each(_connect_gloo)
_DIRECT = Transport(
    name="direct",
    devices=frozenset({"cuda"}),
    reach="GPUs of one host that can access each other's memory",  # which ones shows when it connects
    unavailable_reason=partial(gpu_unavailable_reason, "cuda-core", "cuda-bindings"),
    connect=_connect_whole,
)
_NCCL = Transport(
    name="nccl",
    devices=frozenset({"cuda"}),
    reach="any hosts that NCCL can connect",
    unavailable_reason=nccl_unavailable_reason,
    connect=partial(connect_joined, _connect_nccl),
)


def _unavailable_reason_by_pair() -> str | None:
    reasons = {transport.name: transport.unavailable_reason() for transport in (_DIRECT, _NCCL)}
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) if all(reasons.values()) else None


register(
    Transport(
        name=AUTO,
        devices=frozenset({"cuda"}),
        reach="each pair of ranks by direct where it reaches, by nccl elsewhere",
        unavailable_reason=_unavailable_reason_by_pair,
        connect=lambda context: connect_by_pair(context, Way(_DIRECT, _direct_parts), Way(_NCCL, _connect_nccl)),
    )
)
register(_DIRECT)
register(_NCCL)
_TCP = "any hosts with a TCP route"
_GLOO = Transport(
    name="gloo",
    devices=frozenset({"cpu"}),
    reach=_TCP,
    unavailable_reason=lambda: None,
    connect=partial(connect_relayed, _gloo_parts, _gloo_parts),
)
register(_GLOO)
register(Transport(GOLDEN, frozenset({"cpu", "cuda"}), reach=_TCP, unavailable_reason=lambda: None, connect=None))
