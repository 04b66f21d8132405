"""Elastic replicas: the plan for another number of engine replicas, made from a plan alone.

A replica is the smallest part of an engine that holds all weights. One of tp * pp ranks may die, leave or join. The ranks
of the live ones are numbered without gaps in the plan; messages name them by their seats, which never change:

    replicas 0, 2, 3 of two ranks each    position in the plan    0  1  2  3  4  5
                                          seat                    0  1  4  5  6  7     "gen:4" is position 2

    schedule = schedule_for(plan, "gen", 4, [0, 2, 3])      # of a plan that was made for any number of replicas

Only ranks, turns and relays depend on the number of replicas. Groups, routes and parts stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.layout.mesh import GenMesh, replica_count, replica_ranks
from mcore_reshard.planner.layout.partitions import Partition
from mcore_reshard.planner.model.parameters import Role
from mcore_reshard.planner.topology.topology import Topology

from .locate import located
from .make_plan import balance_plan
from .make_schedule import RankView
from .plan import Plan, TransferGroup, TransferPattern
from .schedule import Schedule, World

_KEPT = 4  # plans that a plan keeps, of the latest numbers of replicas

_EqualParts = tuple[tuple[int, ...], ...]  # parts of a destination that are the same, for each distinct one


def with_replicas(plan: Plan, count: int) -> Plan:
    """The plan for `count` replicas of the plan's engine: the same as if it were planned for that mesh, digest included.

    A plan of another number knows nothing of where ranks are; one of as many is returned as it is.

    Pure, so that every rank makes the same plan. Not proven yet: `require_proof` does that. Raises ValueError for less
    than one replica, and for another number where experts are parallel over all ranks; MeshError for too many ranks.
    """
    if count == replica_count(plan.gen):
        return plan
    if count < 1:
        raise ValueError(f"a plan needs at least 1 replica of the engine, not {count}")
    if plan.gen.ep > 1:
        raise ValueError(
            f"experts are parallel over all {plan.gen.world} ranks of this engine (ep = {plan.gen.ep}), which are one"
            f" replica: there is no plan for {count}"
        )
    if count not in plan.replica_plans:
        if len(plan.replica_plans) >= _KEPT:
            plan.replica_plans.pop(next(iter(plan.replica_plans)))
        plan.replica_plans[count] = _Replicas(plan, count).plan()
    return plan.replica_plans[count]


def gen_seats(gen: GenMesh, replicas: Sequence[int]) -> tuple[int, ...]:
    """The seat of each generation rank if these replicas live: replicas 0 and 2 of two ranks -> (0, 1, 4, 5).

    Raises ValueError for replicas that do not ascend: all ranks must list them in one order.
    """
    if not replicas or replicas[0] < 0 or any(before >= after for before, after in pairwise(replicas)):
        raise ValueError(f"live replicas are numbers that ascend from 0 on, at least one, not {list(replicas)}")
    size = replica_ranks(gen)
    return tuple(replica * size + rank for replica in replicas for rank in range(size))


def schedule_for(
    plan: Plan, world: World, rank: int, replicas: Sequence[int], topology: Topology | None = None
) -> Schedule:
    """The schedule of a rank among the live replicas; `rank` is its seat if it is a generation rank.

    `topology` says where all of them are; None: as the plan has it. `Schedule.rank` and peers are positions in the plan of
    that many replicas, names are those of seats. The plan for a topology is not proven yet, see `located`. Raises as
    `with_replicas` does, ValueError for replicas that do not ascend, and IndexError for a rank that is in none of them.
    """
    seats = gen_seats(plan.gen, replicas)
    if world == "gen":
        if rank not in seats:
            raise IndexError(f"gen:{rank} is in none of the live replicas {list(replicas)}")
        rank = seats.index(rank)
    plan = with_replicas(plan, len(replicas))
    if topology is not None:
        plan = located(plan, topology)
    return RankView(plan, world, rank, gen_seats=seats).schedule()


class _Replicas:
    """The tables that depend on the number of replicas, while they are made anew: rank grids, and some patterns.

    A layout that was traced has a part for each rank where some parts are on more ranks than others. Its patterns repeat
    those parts for each replica.
    """

    def __init__(self, plan: Plan, count: int) -> None:
        self._plan, self._count = plan, count
        self._before, self._size = replica_count(plan.gen), replica_ranks(plan.gen)
        self._traced = any(group.role is Role.TRACED for group in plan.groups)
        self._patterns = [*plan.patterns]
        self._equal_parts: dict[int, _EqualParts | None] = {}  # by pattern
        self._pattern_index: dict[tuple[int, _EqualParts], int] = {}
        self._replaced: set[int] = set()
        self._rank_grids: list[NDArray[np.int32]] = []
        self._rank_grid_index: dict[tuple[tuple[int, ...], bytes], int] = {}
        self._dst_grids: dict[tuple[int, _EqualParts | None], int] = {}

    def plan(self) -> Plan:
        plan = self._plan
        scales = {pair.scales for pair in plan.pairs}
        old = {i: transfers for i, transfers in enumerate(plan.transfer_groups) if transfers.group not in scales}
        patterns, scale_patterns = {}, {}
        for index, transfers in old.items():
            parts = self._parts_of(transfers.pattern)
            patterns[index] = self._pattern(transfers.pattern, parts)
            if (of_scales := plan.scale_patterns.get(index)) is not None:
                scale_patterns[transfers.group, patterns[index]] = self._pattern(of_scales, parts)
        grids = {}
        for index in self._in_order_of_first_use(old):  # rank grids are numbered so
            transfers = old[index]
            src = self._number(plan.rank_grids[transfers.src])
            grids[index] = src, self._dst_grid(transfers.dst, self._parts_of(transfers.pattern))
        unbalanced = [
            replace(
                transfers,
                pattern=patterns[index],
                src=grids[index][0],
                dst=grids[index][1],
                first_src_replica=0,
                first_dst_replica=0,
            )
            for index, transfers in old.items()
        ]
        blank = replace(
            plan,
            gen=replace(plan.gen, dp=self._count),
            patterns=tuple(self._patterns),
            rank_grids=tuple(self._rank_grids),
            transfer_groups=(),
            topology=None,
            carriers=(),
        )
        return balance_plan(blank, unbalanced, scale_patterns)

    def _in_order_of_first_use(self, transfer_groups: Mapping[int, TransferGroup]) -> list[int]:
        """The numbers of transfer groups as the planner meets them: by group, owners at the source, owners at the engine."""
        first_layers: dict[tuple[int, int, int, int], int] = {}  # of the owners at the source

        def source(transfers: TransferGroup) -> tuple[int, int, int, int]:
            return transfers.group, transfers.pp_stage, transfers.src, transfers.experts[0] - transfers.src_slot

        for transfers in transfer_groups.values():
            first = transfers.layers[0].layer
            first_layers[source(transfers)] = min(first, first_layers.get(source(transfers), first))

        def met(item: tuple[int, TransferGroup]) -> tuple[int, ...]:
            index, transfers = item
            group, pp_stage, _, first_expert = source(transfers)
            gen_stage = int(self._plan.rank_grids[transfers.dst].min()) // self._plan.gen.tp
            return group, pp_stage, first_layers[source(transfers)], first_expert, gen_stage, *transfers.experts, index

        return [index for index, _ in sorted(transfer_groups.items(), key=met)]

    def _parts_of(self, pattern: int) -> _EqualParts | None:
        """The equal parts of a destination that has one for each rank; None where replicas of a part are in its row."""
        if pattern not in self._equal_parts:
            dst = self._plan.patterns[pattern].dst
            equal = _equal_parts(dst) if self._traced else ()  # rules list parts of replicated heads one by one
            self._equal_parts[pattern] = equal if 0 < len(equal) < len(dst.pieces) else None
        return self._equal_parts[pattern]

    def _pattern(self, old: int, parts: _EqualParts | None) -> int:
        """The number of the pattern with these destination parts: its old one, unless two patterns come of it."""
        if parts is None:
            return old
        if (old, parts) not in self._pattern_index:
            times = {equal[0]: len(equal) // self._before * self._count for equal in parts}
            made = _repeat_parts(self._plan.patterns[old], times)
            if old in self._replaced:
                self._pattern_index[old, parts] = len(self._patterns)
                self._patterns.append(made)
            else:
                self._pattern_index[old, parts] = old
                self._patterns[old] = made
                self._replaced.add(old)
        return self._pattern_index[old, parts]

    def _dst_grid(self, old: int, parts: _EqualParts | None) -> int:
        """The number of the grid of engine ranks, in which the ranks of replica 0 are repeated for each replica."""
        if (old, parts) not in self._dst_grids:
            grid, replicas = self._plan.rank_grids[old], np.arange(self._count, dtype=np.int32) * self._size
            held_by = grid if parts is None else [grid[list(equal)].reshape(-1) for equal in parts]
            rows = [(ranks[ranks < self._size][:, None] + replicas).reshape(-1) for ranks in held_by]
            if self._traced:  # in the order of ranks; rules have them by their rank within a replica
                rows = [np.sort(row) for row in rows]
            if parts is not None:
                rows = [rank for row in rows for rank in row.reshape(-1, 1)]
            self._dst_grids[old, parts] = self._number(np.array(rows, dtype=np.int32))
        return self._dst_grids[old, parts]

    def _number(self, ranks: NDArray[np.int32]) -> int:
        key = ranks.shape, ranks.tobytes()
        if key not in self._rank_grid_index:
            self._rank_grid_index[key] = len(self._rank_grids)
            self._rank_grids.append(ranks)
        return self._rank_grid_index[key]


def _equal_parts(partition: Partition) -> _EqualParts:
    """The parts of a partition that are the same, in the order of the first of each."""
    equal: dict[object, list[int]] = {}
    for part, pieces in enumerate(partition.pieces):
        equal.setdefault((pieces, partition.padding_of(part)), []).append(part)
    return tuple(map(tuple, equal.values()))


def _repeat_parts(pattern: TransferPattern, times: Mapping[int, int]) -> TransferPattern:
    """The pattern with only some parts of its destination, each so many times in a row: {0: 1, 2: 2} -> parts 0, 2, 2."""
    parts = [part for part, count in times.items() for _ in range(count)]
    padding = tuple(pattern.dst.padding[part] for part in parts) if pattern.dst.padding else ()
    dst = Partition(tuple(pattern.dst.pieces[part] for part in parts), padding)
    overlaps = [
        replace(overlap, dst=number)
        for number, part in enumerate(parts)
        for overlap in pattern.overlaps
        if overlap.dst == part
    ]
    return TransferPattern(pattern.src, dst, tuple(overlaps))
