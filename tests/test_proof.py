"""The proof accepts what is sound, and the simulator agrees; each rule refuses what it is there for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import TINY, Case
from simulate import damage, held, padding_damage

from mcore_reshard.planner.configs import builtin_names, load_config
from mcore_reshard.planner.families import catalogue_from_config
from mcore_reshard.planner.geometry import Region
from mcore_reshard.planner.mesh import parse_gen_mesh, parse_train_mesh
from mcore_reshard.planner.planning import make_plan
from mcore_reshard.planner.proof import prove
from mcore_reshard.planner.tiling import overlap, tiling_fault


def box(*spans: tuple[int, int]) -> Region:
    return Region(tuple(low for low, _ in spans), tuple(high for _, high in spans))


# --- geometry of covers


def test_parts_that_tile_a_box() -> None:
    whole = box((0, 4), (0, 6))
    assert tiling_fault(whole, [whole]) == ""
    assert tiling_fault(whole, [box((0, 1), (0, 6)), box((1, 4), (0, 2)), box((1, 4), (2, 6))]) == ""
    assert tiling_fault(box((2, 2), (0, 6)), []) == ""
    assert tiling_fault(Region((), ()), [Region((), ())]) == ""


def test_parts_that_do_not_tile_a_box_are_named() -> None:
    whole = box((0, 4), (0, 6))
    assert tiling_fault(whole, []) == "0 of 24 elements are covered"
    assert tiling_fault(whole, [box((0, 3), (0, 6))]) == "18 of 24 elements are covered"
    assert tiling_fault(whole, [box((0, 5), (0, 6))]) == "[0:5, 0:6] is outside of [0:4, 0:6]"
    message = tiling_fault(whole, [box((0, 3), (0, 6)), box((2, 4), (0, 6))])
    assert message == "[0:3, 0:6] and [2:4, 0:6] overlap"


def test_a_gap_and_an_overlap_of_equal_size_do_not_cancel() -> None:
    assert "overlap" in tiling_fault(box((0, 4)), [box((0, 2)), box((1, 3))])


def test_overlap_of_none_and_of_equal_parts() -> None:
    assert overlap([]) is None
    assert overlap([box((0, 2)), box((2, 4)), box((4, 4))]) is None
    assert overlap([box((0, 2)), box((0, 2))]) == (box((0, 2)), box((0, 2)))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_overlap_and_tiling_agree_with_counting_elements(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    count = data.draw(st.integers(0, 5))
    painted = np.zeros(shape, dtype=int)
    parts = []
    for _ in range(count):
        spans = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        parts.append(box(*((low, high) for low, high in spans)))
        painted[tuple(slice(low, high) for low, high in spans)] += 1
    assert (overlap(parts) is not None) == bool((painted > 1).any())
    assert (tiling_fault(Region.whole(shape), parts) == "") == bool((painted == 1).all())


# --- sound plans


@pytest.mark.parametrize("case", TINY, ids=str)
def test_tiny_plans_prove_and_deliver_every_element(case: Case) -> None:
    plan = case.plan()
    proof = prove(plan)
    assert proof.violations == ()
    assert proof.ok and proof.covered_bytes == proof.destination_bytes == plan.recv_bytes.sum() == plan.send_bytes.sum()
    assert damage(plan) == []
    assert padding_damage(plan) == []


MESHES = (
    ("tp=2,pp=2,dp=2", "tp=4"),
    ("tp=4,dp=2", "tp=2,dp=2"),
    ("tp=1,pp=4", "tp=2,pp=2"),
)
EXPERT_MESHES = (
    ("tp=2,ep=4,dp=2", "tp=4"),
    ("tp=2,pp=2,ep=2,dp=2", "tp=2,dp=2,ep=4"),
    ("ep=8,dp=8", "tp=4,ep=4"),
)


@pytest.mark.parametrize("name", builtin_names())
def test_every_builtin_config_proves_on_several_meshes(name: str) -> None:
    catalogue = catalogue_from_config(load_config(name))
    architecture = catalogue.architecture
    for train, gen in MESHES + (EXPERT_MESHES if architecture.experts else ()):
        mesh = parse_train_mesh(train)
        if architecture.layers % mesh.pp:
            counts = [architecture.layers // mesh.pp] * mesh.pp
            counts[0] += architecture.layers % mesh.pp
            mesh = parse_train_mesh(f"{train},layers={'+'.join(map(str, counts))}")
        proof = prove(make_plan(catalogue, mesh, parse_gen_mesh(gen)))
        assert proof.violations == (), (train, gen)
        assert proof.ok


def test_the_simulator_can_fail() -> None:
    """One element written elsewhere, and the judge says where."""
    plan = TINY[0].plan()
    wanted = held(plan, "gen")
    assert len({rank for rank, _ in wanted}) == 4
    template = plan.templates[plan.bundles[0].template]
    move = template.moves[0]
    moved = replace(move, region=move.region.within(0, move.region.start[0], move.region.stop[0] - 1))
    broken = replace(plan, templates=(replace(template, moves=(moved, *template.moves[1:])), *plan.templates[1:]))
    assert plan.bundles[0].template == 0
    (first, *_) = damage(plan, broken)
    assert "elements wrong, first has -1" in first and "gen" in first
