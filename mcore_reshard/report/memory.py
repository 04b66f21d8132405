"""The memory that a session takes on each rank beside the model, as rows of a table; the data is that of `plan --json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .text import size

COLUMNS = "transport, world, >tables, >slots, >NCCL, >checks, >total, most on"
_OTHERS = ("staged", "first_use")  # of the data: no transports


def memory_rows(memory: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The rank of each world that takes the most, over each transport, and what commit="staged" takes in addition."""
    for transport, worlds in memory.items():
        for world, ranks in worlds.items() if transport not in _OTHERS else ():
            most = max(ranks, key=lambda rank: int(rank["total"]))
            parts = (most["tables"] + most["scales"], *(most[name] for name in ("scratch", "nccl", "checks", "total")))
            yield (transport, world, *map(size, parts), _named(world, [rank["total"] for rank in ranks]))
    staging = [rank["bytes"] for rank in memory["staged"]]
    yield ("staged", "gen", *[""] * 4, size(max(staging)), _named("gen", staging))


def memory_notes(memory: Mapping[str, Any]) -> list[str]:
    """What the rows leave open."""
    counted = [
        rank for name, worlds in memory.items() if name not in _OTHERS for ranks in worlds.values() for rank in ranks
    ]
    kernels, nccl = (size(memory["first_use"][name]) for name in ("copies", "nccl"))
    notes = [
        f"once, a process also takes {kernels} with its first CUDA kernel, and {nccl} with its first message over NCCL"
    ]
    if any(rank["nccl"] for rank in counted):
        notes.insert(0, "NCCL's own buffers are as measured on one host of H200s, across hosts as in its source")
    return notes


def memory_totals(memory: Mapping[str, Any], world: str) -> list[tuple[str, list[int]]]:
    """(transport, [ranks] bytes) of a world."""
    return [
        (transport, [rank["total"] for rank in worlds[world]])
        for transport, worlds in memory.items()
        if transport not in _OTHERS
    ]


def _named(world: str, totals: Sequence[int]) -> str:
    """The first rank that takes the most, and how many take as much."""
    others = totals.count(most := max(totals)) - 1
    return f"{world}:{totals.index(most)}" + (f" and {others} more" if others else "")
