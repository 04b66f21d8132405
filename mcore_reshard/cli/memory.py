"""The memory that a session takes on each rank beside the model: plain data for `--json`, and a table of the largest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType

from mcore_reshard.kernels.transports.memory import RankMemory, SessionMemory

from .render import Cell, noted, size, table

_COLUMNS = "transport, world, >tables, >slots, >NCCL, >checks, >total, most on"
_NOTE = "NCCL's own buffers are as measured on one host of H200s; across hosts they are estimated"


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
    rows: list[tuple[Cell, ...]] = []
    for transport, worlds in memory.transports.items():
        for world, ranks in worlds.items():
            most = max(ranks, key=lambda held: held.total)
            rows.append((transport, world, *map(size, _parts(most)), _named(world, [held.total for held in ranks])))
    rows.append(("staged", "gen", *[""] * 4, size(max(memory.staging)), _named("gen", list(memory.staging))))
    yield table("Extra memory of a rank, at most", _COLUMNS, rows)
    yield from noted([_NOTE])


def _parts(held: RankMemory) -> tuple[int, ...]:
    return held.tables + held.scales, held.scratch, held.nccl, held.checks, held.total


def _named(world: str, totals: list[int]) -> str:
    """The first rank that takes the most, and how many take as much."""
    others = totals.count(most := max(totals)) - 1
    return f"{world}:{totals.index(most)}" + (f" and {others} more" if others else "")
