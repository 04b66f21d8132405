"""The memory that a session takes on each rank beside the model: plain data for `--json`, and a table of the largest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType

from mcore_reshard.kernels.transports.memory import SessionMemory
from mcore_reshard.report.memory import COLUMNS, NOTE, memory_rows

from .render import noted, table


def as_json(memory: SessionMemory) -> dict[str, Any]:
    """Bytes of every rank, by transport and world; `staged` is what commit="staged" takes in addition."""
    return {
        **{
            transport: {
                world: [{"rank": rank, **asdict(held), "total": held.total} for rank, held in enumerate(ranks)]
                for world, ranks in worlds.items()
            }
            for transport, worlds in memory.transports.items()
        },
        "staged": [{"rank": rank, "bytes": nbytes} for rank, nbytes in enumerate(memory.staging)],
    }


def memory_parts(memory: SessionMemory) -> Iterator[RenderableType]:
    """The rank of each world that takes the most, over each transport."""
    yield table("Extra memory of a rank, at most", COLUMNS, memory_rows(as_json(memory)))
    yield from noted([NOTE])
