"""Our own transports: as the product connects them, or with options of their own for sweeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mcore_reshard.kernels.copies.bind import BoundSchedule, bind
from mcore_reshard.kernels.errors import TransportUnavailable
from mcore_reshard.kernels.options import Options as SessionOptions
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup
from mcore_reshard.kernels.transports.base import Executor, TransportContext
from mcore_reshard.kernels.transports.registry import AUTO, resolve
from mcore_reshard.kernels.transports.relay import connect_joined
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint

from .methods import Options, Prepared, Unavailable
from .ranks import Rank

_MIB = 1 << 20


def direct(rank: Rank, options: Options) -> Prepared:
    return _prepared(rank, "direct", partial(_direct_with, options) if options else None)


def nccl(rank: Rank, options: Options) -> Prepared:
    if rank.on_cuda and rank.launch.gpus < rank.ranks:
        raise Unavailable("NCCL needs a GPU for every rank")
    return _prepared(rank, "nccl", partial(connect_joined, partial(_nccl_with, options)) if options else None)


def auto(rank: Rank, options: Options) -> Prepared:
    return _prepared(rank, AUTO, None)


def gloo(rank: Rank, options: Options) -> Prepared:
    return _prepared(rank, "gloo", None)


def session(rank: Rank, options: Options) -> Prepared:
    """A whole refit as a policy worker calls it: agreement before and after, and planning counted as preparation."""
    schedule = schedule_of(rank.case.plan(), rank.world, rank.rank)
    transport, checks = options.get("transport", AUTO), options.get("source_checks", "sampled")
    _check(rank, transport)
    kind = TrainEndpoint if rank.world == "train" else GenerationEndpoint
    endpoint = kind(
        schedule,
        rank.tensors,
        store=rank.address,
        options=SessionOptions(
            transport=transport, session=f"bench-{transport}", timeout_s=rank.timeout_s, source_checks=checks
        ),
    )
    endpoint.prepare()

    moved_by = set()

    def refit() -> None:
        moved_by.add(endpoint.refit((endpoint.committed_version or 0) + 1).transport)

    def facts() -> dict[str, Any]:
        return {"moved_by": ", ".join(moved_by), "scratch_mb": round(endpoint.scratch_bytes / 1e6, 1)}

    return Prepared(refit, endpoint.close, facts=facts)


def _prepared(rank: Rank, transport: str, connect: Callable[[TransportContext], Executor] | None) -> Prepared:
    usual = _check(rank, transport)
    assert usual is not None, "golden is not an executor"
    group = GlooGroup(rank.store.under("group"), rank.number, rank.names, timeout_s=rank.timeout_s)
    executor = (connect or usual)(
        TransportContext(
            store=rank.store.under("link"),
            group=group,
            bound=bind(rank.schedule, rank.tensors),
            options=SessionOptions(timeout_s=rank.timeout_s),
        ),
    )

    def close() -> None:
        executor.close()
        group.close()

    def facts() -> dict[str, Any]:
        columns = {
            "moved_by": executor.name,
            "relayed": rank.schedule.relayed,
            "misc_bytes": rank.plan.misc_bytes,
        }
        columns["scratch_mb"] = round(executor.scratch_bytes / 1e6, 1)
        if isinstance(table_bytes := getattr(executor, "table_bytes", None), int):  # not a MixedExecutor
            columns["table_mb"] = round(table_bytes / 1e6, 1)
        return columns

    return Prepared(executor.run, close, facts=facts)


def _check(rank: Rank, transport: str) -> Callable[[TransportContext], Executor] | None:
    try:
        return resolve(transport, rank.device.type).connect
    except TransportUnavailable as reason:
        raise Unavailable(str(reason)) from reason


def _direct_with(options: Options, context: TransportContext) -> Executor:
    from mcore_reshard.kernels.cuda.copy_kernel import KernelShape
    from mcore_reshard.kernels.transports.direct.executor import DirectExecutor
    from mcore_reshard.kernels.transports.direct.pull import DirectOptions

    shape = {name: int(options[name]) for name in ("ctas", "threads", "batch") if name in options}
    usual = DirectOptions()
    return DirectExecutor(
        context.store,
        context.bound,
        timeout_s=context.options.timeout_s,
        scratch_bytes=_scratch_bytes(options, context.options.scratch_bytes),
        options=DirectOptions(
            KernelShape(**shape) if shape else None,
            int(options["tile_kib"]) << 10 if "tile_kib" in options else usual.tile_bytes,
            bool(int(options.get("checksums", 0))),
            int(options["engine_percent"]) / 100 if "engine_percent" in options else usual.engine_share,
        ),
        chain=view.chain() if (view := context.bound.schedule.view) is not None else None,
    )


def _nccl_with(
    options: Options, context: TransportContext, parts: Sequence[Sequence[BoundSchedule]]
) -> Sequence[Executor]:
    from mcore_reshard.kernels.transports.nccl.executor import DEFAULT_COPY_CTAS, connect_nccl
    from mcore_reshard.kernels.transports.nccl.staging import ScratchBudget

    usual = ScratchBudget()
    budget = ScratchBudget(
        _scratch_bytes(options, usual.scratch_bytes),
        int(options.get("streams", usual.streams)),
        int(options.get("slots", usual.slots)),
        bool(int(options.get("checksums", 0))),
    )
    return connect_nccl(
        parts,
        context.store,
        timeout_s=context.options.timeout_s,
        budget=budget,
        shared=context.shared,
        copy_ctas=int(options.get("ctas", DEFAULT_COPY_CTAS)),
    )


def _scratch_bytes(options: Options, usual: int) -> int:
    return int(options["scratch_mib"]) * _MIB if "scratch_mib" in options else usual
