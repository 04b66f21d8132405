"""Overlaps are cut in bands, and cut anew where a plan's ranks are placed elsewhere."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import pytest

import mcore_reshard
from mcore_reshard.planner.layout.geometry import LocalTensor, Piece, Region
from mcore_reshard.planner.layout.partitions import Partition
from mcore_reshard.planner.plan.bands import in_bands
from mcore_reshard.planner.plan.locate import located
from mcore_reshard.planner.plan.plan import Overlap, Plan
from mcore_reshard.planner.plan.replicas import with_replicas
from mcore_reshard.planner.proof.prove import require_proof
from mcore_reshard.planner.topology.topology import parse_topology

MIB, KIB = 1 << 20, 1 << 10


def part(dtype: str, shape: tuple[int, ...]) -> Partition:
    tensor = LocalTensor("weight", shape, dtype)
    origin = (0,) * len(shape)
    return Partition(((Piece(Region(origin, shape), tensor, origin, tuple(range(len(shape))), shape),),))


def whole(*shape: int) -> Overlap:
    return Overlap(0, 0, 0, 0, Region((0,) * len(shape), shape))


def rows(overlaps: tuple[Overlap, ...], dim: int = 0) -> list[tuple[int, int]]:
    return [(each.region.start[dim], each.region.stop[dim]) for each in overlaps]


def test_bands_by_hand() -> None:
    matrix, expert = (1024, 1536), (1, 1024, 1536)  # 3 MiB each
    assert rows(in_bands([whole(*matrix)], part("bfloat16", matrix), MIB)) == [(0, 341), (341, 682), (682, 1024)]
    assert rows(in_bands([whole(*expert)], part("bfloat16", expert), 2 * MIB), dim=1) == [(0, 512), (512, 1024)]
    assert in_bands([whole(*matrix)], part("float8_e4m3fn", matrix), MIB) == (whole(*matrix),), "it has scales"
    assert in_bands([whole(4)], part("bfloat16", (4,)), 1) == (*map(band, (0, 1, 2, 3)),), "a row at least"
    assert in_bands([whole()], part("bfloat16", ()), 1) == (whole(),)


def band(row: int) -> Overlap:
    return replace(whole(4), region=Region((row,), (row + 1,)))


@pytest.mark.parametrize("largest", [MIB, 300 * KIB, 7, 64 * MIB])
def test_bands_of_bands_are_those_of_the_whole(largest: int) -> None:
    dst = part("bfloat16", (1000, 1536))
    for before in (MIB, 256 * KIB, 100_001):
        divided = in_bands([whole(1000, 1536)], dst, before)
        assert in_bands(divided, dst, largest) == in_bands([whole(1000, 1536)], dst, largest)
        assert all(above == below for (_, above), (below, _) in pairwise(rows(divided)))


def placed(plan: Plan, machine: str = "h200-8", hosts: str = "") -> Plan:
    return located(plan, parse_topology(machine, plan.train.world, plan.gen.world, hosts))


def largest_of(plan: Plan) -> int:
    return max(int(pattern.overlap_bytes.max()) for pattern in plan.patterns)


def planned(gen: str) -> Plan:
    return mcore_reshard.plan("qwen3-4b", train="tp=2,dp=4", gen=gen)


def test_relays_between_hosts_have_finer_bands_and_no_other_plan_has() -> None:
    plan, near = planned("tp=2,dp=12"), planned("tp=2,dp=4")
    far = placed(plan)
    assert "relay" in far.later_hops
    assert largest_of(far) < 288 * KIB < largest_of(plan) < 1.1 * MIB  # to a row
    require_proof(far)
    within_a_host = placed(near, hosts="train=a*8,gen=b*8")
    assert within_a_host.spans_hosts and "relay" not in within_a_host.later_hops
    assert within_a_host.patterns == near.patterns


def test_more_bands_than_any_plan_has_are_refused_before_they_are_cut() -> None:
    plan = mcore_reshard.plan("tiny-qwen3", train="tp=1", gen="tp=1")
    pattern = next(pattern for pattern in plan.patterns if len(pattern.overlaps[0].region.start) == 2)
    huge = replace(pattern.overlaps[0], region=Region((0, 0), (1 << 27, 1 << 20)))
    patterns = [replace(each, overlaps=(huge,)) if each is pattern else each for each in plan.patterns]
    begin = time.process_time()
    with pytest.raises(ValueError, match=r"it has [0-9,]+ transfers, more than"):
        placed(replace(plan, patterns=tuple(patterns)))
    assert time.process_time() - begin < 1.0


def test_what_is_placed_elsewhere_or_has_other_replicas_is_cut_anew() -> None:
    plan = planned("tp=2,dp=12")
    far = placed(plan)
    assert located(far, None).digest == plan.digest
    assert with_replicas(far, 4).digest == planned("tp=2,dp=4").digest
    assert placed(with_replicas(far, 10)).digest == placed(planned("tp=2,dp=10")).digest
    assert placed(far, "gb200-nvl72").digest == placed(plan, "gb200-nvl72").digest
