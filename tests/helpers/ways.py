"""Stand-ins for the two ways of `auto`, direct and nccl, that need no GPU."""

from __future__ import annotations

from functools import partial

from helpers.nccl_over_gloo import connect_rounds

from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup
from mcore_reshard.kernels.transports.base import Transport, TransportContext
from mcore_reshard.kernels.transports.gloo import GlooExecutor
from mcore_reshard.kernels.transports.group_ranks import group_names, group_rank
from mcore_reshard.kernels.transports.mixed import Way
from mcore_reshard.kernels.transports.relay import connect_each


class OverGloo(GlooExecutor):
    """A stand-in for a GPU transport that keeps its name, with connections of its own."""

    def __init__(self, name: str, context: TransportContext) -> None:
        schedule = context.bound.schedule
        me = group_rank(schedule, schedule.world, schedule.rank)
        self._own = GlooGroup(context.store, me, group_names(schedule), timeout_s=context.options.timeout_s)
        super().__init__(self._own, context.bound)
        self.name = name

    def close(self) -> None:
        self._own.close()
        super().close()


def stand_in(name: str, unavailable_reason: str | None = None) -> Way:
    transport = Transport(name, frozenset({"cpu"}), "", lambda: unavailable_reason, None)
    return Way(transport, connect_each(partial(OverGloo, name)))


def rounds_stand_in(name: str, unavailable_reason: str | None = None) -> Way:
    """A stand-in for nccl, with its rounds."""
    transport = Transport(name, frozenset({"cpu"}), "", lambda: unavailable_reason, None)
    return Way(transport, partial(connect_rounds, name, 64 << 10))
