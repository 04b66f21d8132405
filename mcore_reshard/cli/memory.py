"""The memory that a session takes on each rank beside the model: plain data for `--json`, and a table of the largest."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType

from mcore_reshard.kernels.transports.memory import FIRST_USE, SessionMemory, counts_every_rank, session_memory
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.topology.topology import Topology
from mcore_reshard.report.memory import COLUMNS, memory_notes, memory_rows

from .render import noted, table


@contextmanager
def counted_beside(
    plan: Plan, topology: Topology | None, transports: Collection[str]
) -> Iterator[Callable[[], SessionMemory]]:
    """What tells a session's memory. For large plans another process counts it while the body runs."""
    if counts_every_rank(plan):
        yield lambda: session_memory(plan, topology=topology, transports=transports)
        return
    sent = pickle.dumps(plan)  # now: a plan keeps what the body asks it for
    with ProcessPoolExecutor(1) as beside:
        yield beside.submit(_counted, sent, topology, transports).result


def _counted(plan: bytes, topology: Topology | None, transports: Collection[str]) -> SessionMemory:
    return session_memory(pickle.loads(plan), topology=topology, transports=transports)


def as_json(memory: SessionMemory) -> dict[str, Any]:
    """Bytes of every rank, by transport and world; `staged` is what commit="staged" takes in addition.

    `first_use` is what a process takes in addition, once, if it has launched no kernel, or not used NCCL.
    """
    return {
        **{
            transport: {
                world: [{"rank": rank, **asdict(held), "total": held.total} for rank, held in enumerate(ranks)]
                for world, ranks in worlds.items()
            }
            for transport, worlds in memory.transports.items()
        },
        "staged": [{"rank": rank, "bytes": nbytes} for rank, nbytes in enumerate(memory.staging)],
        "first_use": {**FIRST_USE},
    }


def memory_parts(memory: SessionMemory) -> Iterator[RenderableType]:
    """The rank of each world that takes the most, over each transport."""
    counted = as_json(memory)
    yield table("Extra memory of a rank, at most", COLUMNS, memory_rows(counted))
    yield from noted(memory_notes(counted))
