"""Do boxes tile a box? The question behind every cover that the proof asks for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mcore_reshard.planner.layout.geometry import Region


def tiling_fault(box: Region, parts: Sequence[Region]) -> str:
    """Why `parts` do not tile `box` ("" when they do): a part outside, a gap, or an overlap."""
    outside = next((part for part in parts if len(part.start) != len(box.start) or not box.contains(part)), None)
    if outside is not None:
        return f"{outside} is outside of {box}"
    if clash := overlap(parts):
        return f"{clash[0]} and {clash[1]} overlap"
    covered = sum(part.elements for part in parts)
    return "" if covered == box.elements else f"{covered} of {box.elements} elements are covered"


def overlap(parts: Sequence[Region]) -> tuple[Region, Region] | None:
    """Two parts that share an element, if any; all have the same number of dims.

    Sorts along one dim at a time; parts with equal extents there recurse to the next dim. Only clusters that are cut
    differently in several dims are compared pair by pair.
    """
    return _overlap_along([part for part in parts if part.elements], 0)


def _overlap_along(parts: Sequence[Region], dim: int) -> tuple[Region, Region] | None:
    if len(parts) < 2:
        return None
    if dim == len(parts[0].start):
        return parts[0], parts[1]
    clusters: list[list[Region]] = []
    reach = -1
    for part in sorted(parts, key=lambda p: p.start[dim]):
        if part.start[dim] >= reach:
            clusters.append([])
        clusters[-1].append(part)
        reach = max(reach, part.stop[dim])
    return next(filter(None, (_clash(cluster, dim) for cluster in clusters)), None)


def _clash(cluster: Sequence[Region], dim: int) -> tuple[Region, Region] | None:
    """Two parts of a cluster that share an element; the cluster's spans along `dim` hang together."""
    if len(cluster) < 2:
        return None
    if len({(part.start[dim], part.stop[dim]) for part in cluster}) == 1:
        return _overlap_along(cluster, dim + 1)
    start, stop = (np.array([getattr(part, end) for part in cluster]) for end in ("start", "stop"))
    for i in range(len(cluster) - 1):
        hit = ((start[i] < stop[i + 1 :]) & (start[i + 1 :] < stop[i])).all(axis=1)
        if hit.any():
            return cluster[i], cluster[i + 1 + int(hit.argmax())]
    return None
