"""The proof accepts what is sound, and the simulator agrees; each rule refuses what it is there for."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attack.mutants.edits import (
    edit_transfers,
    moved,
    recut,
    retensor,
    transfer_groups_of,
    without_transfers,
)
from helpers.plans import TINY, Case
from helpers.simulate import damage, numbered_tensors, padding_damage
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_reshard.planner.layout.geometry import LocalTensor, Piece, Region
from mcore_reshard.planner.layout.mesh import parse_gen_mesh, parse_train_mesh
from mcore_reshard.planner.model.configs import builtin_names, load_config
from mcore_reshard.planner.model.families import parameters_from_config
from mcore_reshard.planner.model.parameters import Role
from mcore_reshard.planner.plan.balance import Turns
from mcore_reshard.planner.plan.make_plan import make_plan
from mcore_reshard.planner.plan.plan import Plan, TransferPattern
from mcore_reshard.planner.proof import prove as proof
from mcore_reshard.planner.proof.prove import ProofError, Violation, prove
from mcore_reshard.planner.proof.storage import FUSED, MEGATRON, order_fault, sections_fault, storage_fault
from mcore_reshard.planner.proof.tiling import overlap, tiling_fault


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
    assert proof.ok and proof.covered_bytes == proof.destination_bytes == plan.recv_bytes.sum()
    assert plan.recv_bytes.sum() == plan.send_bytes.sum() + plan.relay_bytes.sum()
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", builtin_names())
def test_every_builtin_config_proves_on_several_meshes(name: str) -> None:
    model_parameters = parameters_from_config(load_config(name))
    architecture = model_parameters.architecture
    for train, gen in MESHES + (EXPERT_MESHES if architecture.experts else ()):
        mesh = parse_train_mesh(train)
        if architecture.layers % mesh.pp:
            counts = [architecture.layers // mesh.pp] * mesh.pp
            counts[0] += architecture.layers % mesh.pp
            mesh = parse_train_mesh(f"{train},layers={'+'.join(map(str, counts))}")
        proof = prove(make_plan(model_parameters, mesh, parse_gen_mesh(gen)))
        assert proof.violations == (), (train, gen)
        assert proof.ok


def test_the_simulator_can_fail() -> None:
    """One element written elsewhere, and the judge says where."""
    plan = TINY[0].plan()
    wanted = numbered_tensors(plan, "gen")
    assert len({rank for rank, _ in wanted}) == 4
    pattern = plan.patterns[plan.transfer_groups[0].pattern]
    overlap = pattern.overlaps[0]
    moved = replace(overlap, region=overlap.region.within(0, overlap.region.start[0], overlap.region.stop[0] - 1))
    broken = replace(
        plan,
        patterns=(
            replace(pattern, overlaps=(moved, *pattern.overlaps[1:])),
            *plan.patterns[1:],
        ),
    )
    assert plan.transfer_groups[0].pattern == 0
    (first, *_) = damage(plan, broken)
    assert "elements wrong, first has -1" in first and "gen" in first


# --- one rule at a time


LLAMA = Case("tiny-llama", "tp=2,pp=2", "tp=2,pp=2")
PADDED = Case("tiny-llama", "tp=2", "tp=2", changes=(("vocab_size", 250),))


def first(plan: Plan, role: Role) -> int:
    return transfer_groups_of(plan, role)[0]


def pattern_of(plan: Plan, role: Role) -> tuple[int, TransferPattern]:
    index = plan.transfer_groups[first(plan, role)].pattern
    return index, plan.patterns[index]


def with_pattern(plan: Plan, role: Role, change: Callable[[TransferPattern], TransferPattern]) -> Plan:
    index, pattern = pattern_of(plan, role)
    return replace(
        plan,
        patterns=(
            *plan.patterns[:index],
            change(pattern),
            *plan.patterns[index + 1 :],
        ),
    )


def without_a_move(plan: Plan) -> Plan:
    return with_pattern(plan, Role.O, lambda t: replace(t, overlaps=t.overlaps[1:]))


def move_from_a_stranger(plan: Plan) -> Plan:
    def change(pattern: TransferPattern) -> TransferPattern:
        return replace(pattern, overlaps=(replace(pattern.overlaps[0], src=1), *pattern.overlaps[1:]))

    return with_pattern(plan, Role.O, change)


def other_dtype(plan: Plan) -> Plan:
    return retensor(plan, Role.O, lambda tensor: replace(tensor, dtype="float16"), source=True)


def literal_layer(plan: Plan) -> Plan:
    return retensor(plan, Role.O, lambda t: replace(t, name=t.name.replace("{layer}", "0")), source=False)


def _swapped_dims(part: int, pieces: Sequence[Piece]) -> list[Piece]:
    return [replace(piece, dims=piece.dims[::-1]) for piece in pieces]


def partition_exchanged(plan: Plan) -> Plan:
    pieces = pattern_of(plan, Role.O)[1].dst.pieces
    return recut(plan, Role.O, dst=lambda part, _: pieces[1 - part])


def out_of_its_tensor(plan: Plan) -> Plan:
    return recut(plan, Role.O, src=lambda _, pieces: [moved(piece, 1) for piece in pieces])


def half_wanted(plan: Plan) -> Plan:
    pieces = pattern_of(plan, Role.O)[1].dst.pieces
    return recut(plan, Role.O, dst=lambda _, __: pieces[0])


def other_transfers(plan: Plan, role: Role, **changes: Any) -> Plan:
    return edit_transfers(plan, [first(plan, role)], lambda transfers: replace(transfers, **changes))


FP8 = Case("tiny-llama", "tp=2", "tp=2", dtypes=("fp8", "fp8"), block=(8, 8))
MASTER = Case("tiny-llama", "tp=2", "tp=2", dtypes=("fp32", "bf16"))


def lost_leg(plan: Plan) -> Plan:
    """The first leg of a parameter's paths is left out."""
    plan = with_pattern(plan, Role.O, replace)
    paths = plan.paths(plan.transfer_groups[first(plan, Role.O)])
    overlap, pulls, landings = paths._first_hop
    vars(paths)["_first_hop"] = overlap[1:], *(Turns.of(turns.rows, turns.row[1:]) for turns in (pulls, landings))
    return plan


RULES: list[tuple[str, Case, Callable[[Plan], Plan], str]] = [
    (
        "references", LLAMA, lambda plan: other_transfers(plan, Role.O, pattern=99),
        "[references] transfer group 5 (train 0-3 -> gen 0-3): pattern 99 does not exist, the plan has 12",
    ),
    (
        "bounds", LLAMA, out_of_its_tensor,
        "[bounds] model.layers.0.self_attn.o_proj.weight (train 0 -> gen 0-1): origin (1, 0) puts (64, 32) outside of"
        " vp{vp}.decoder.layers.{layer}.self_attention.linear_proj.weight (64, 32)",
    ),
    (
        "paths", LLAMA, lost_leg,
        "[paths] model.layers.0.self_attn.o_proj.weight (train 0-1 -> gen 0-1): overlap 0 of member 0 reaches replica 0 0"
        " times, not once",
    ),
    (
        "groups", LLAMA, lambda plan: without_transfers(plan, transfer_groups_of(plan, Role.O)),
        "[groups] model.layers.{layer}.self_attn.o_proj.weight (train 0-3 -> gen 0-3): travels by no route; every"
        " parameter has exactly one route",
    ),
    (
        "source", LLAMA, lambda plan: recut(plan, Role.O, src=lambda part, held: held if part else []),
        "[source] model.layers.0.self_attn.o_proj.weight (train 0-1 -> gen 0-1): source parts do not tile the"
        " parameter [0:64, 0:64]: 2048 of 4096 elements are covered",
    ),
    (
        "consumed", LLAMA, half_wanted,
        "[consumed] model.layers.0.self_attn.o_proj.weight (train 0-1 -> gen 0-1): destination parts do not tile the"
        " parameter [0:64, 0:64]: 2048 of 4096 elements are covered",
    ),
    (
        "cover", LLAMA, without_a_move,
        "[cover] model.layers.0.self_attn.o_proj.weight (train 0-1 -> gen 0): [0:64, 0:32] is not written exactly"
        " once: 0 of 2048 elements are covered",
    ),
    (
        "cover", LLAMA, move_from_a_stranger,
        "[cover] model.layers.0.self_attn.o_proj.weight (train 1 -> gen 0): [0:64, 0:32] is sent by a part that holds"
        " [0:64, 32:64]",
    ),
    (
        "bytes", LLAMA, other_dtype,
        "[bytes] model.layers.0.self_attn.o_proj.weight (train 0 -> gen 0): "
        "vp{vp}.decoder.layers.{layer}.self_attention.linear_proj.weight is float16,"
        " model.layers.{layer}.self_attn.o_proj.weight is bfloat16, and no cast is declared",
    ),
    (
        "storage", Case("tiny-llama", "tp=1", "tp=1"), lambda plan: recut(plan, Role.O, dst=_swapped_dims),
        "[storage] model.layers.0.self_attn.o_proj.weight (train 0 -> gen 0): model.layers.{layer}.self_attn.o_proj"
        ".weight keeps dims in order (1, 0), declared for 'o' is (0, 1)",
    ),
    (
        "order", LLAMA, partition_exchanged,
        "[order] model.layers.0.self_attn.o_proj.weight (train 0-1 -> gen 1): part 1 holds [0:64, 0:32], part 0"
        " before it [0:64, 32:64]",
    ),
    (
        "names", LLAMA, literal_layer,
        "[names] model.layers.0.self_attn.o_proj.weight (train 0-1 -> gen 0): model.layers.0.self_attn.o_proj.weight"
        " varies with nothing, must vary with ['layer']",
    ),
    (
        "tensors", PADDED, lambda plan: with_pattern(
            plan, Role.LM_HEAD, lambda t: replace(t, dst=replace(t.dst, padding=()))
        ),
        "[tensors] lm_head.weight (gen 1): lm_head.weight: (128, 64) are not held by exactly one parameter each:"
        " 7808 of 8192 elements are covered",
    ),
    (
        "holders", LLAMA, lambda plan: other_transfers(plan, Role.O, src=plan.transfer_groups[-1].src),
        "[holders] model.layers.0.self_attn.o_proj.weight (train 2-3 -> gen 0-1): train ranks [2 | 3] hold the parts"
        " on paper, [0 | 1] on the mesh",
    ),
    (
        "places", LLAMA, lambda plan: other_transfers(
            plan, Role.O, layers=(replace(plan.transfer_groups[first(plan, Role.O)].layers[0], local=1),)
        ),
        "[places] model.layers.0.self_attn.o_proj.weight (train 0-1 -> gen 0-1): layer 0 is read from stage 0 chunk 0"
        " index 1, the pipeline keeps it on stage 0 chunk 0 index 0",
    ),
    (
        "arrivals", LLAMA, lambda plan: other_transfers(
            plan, Role.O, layers=plan.transfer_groups[first(plan, Role.O)].layers[:1]
        ),
        "[arrivals] model.layers.1.self_attn.o_proj.weight (train 0-3 -> gen 0-1): never arrives on stage 0 of the"
        " engine",
    ),
    (
        "pairs", FP8, lambda plan: replace(plan, pairs=plan.pairs[1:]),
        "[pairs] model.layers.0.self_attn.q_proj.weight (train 0-1 -> gen 0-1): float8_e4m3fn arrives, and no scales are"
        " paired with it",
    ),
    (
        "casts", MASTER, lambda plan: replace(plan, casts=(*plan.casts, plan.casts[0])),
        "[casts] model.embed_tokens.weight (train 0-1 -> gen 0-1): cast once, and on the bulk route only",
    ),
    (
        "stages", LLAMA, lambda plan: replace(plan, transfer_groups=(plan.transfer_groups[-1], *plan.transfer_groups[:-1])),
        "[stages] model.embed_tokens.weight (train 0-1 -> gen 0-1): stage 0 follows stage 1; stages run in order",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "case", "breaks", "message"), RULES, ids=[entry[0] for entry in RULES])
def test_each_rule_names_parameter_ranks_and_cause(
    rule: str, case: Case, breaks: Callable[[Plan], Plan], message: str
) -> None:
    assert prove(case.plan()).ok
    violations = prove(breaks(case.plan())).violations
    assert message in [str(violation) for violation in violations]
    assert all(isinstance(violation, Violation) for violation in violations)


def test_every_rule_that_the_proof_states_has_a_test() -> None:
    stated = re.findall(r"^  ([a-z]+)  +\S", proof.__doc__ or "", re.MULTILINE)
    assert len(stated) == 18
    assert {rule for rule, *_ in RULES} == set(stated)


def test_an_unsound_plan_is_an_error_that_lists_violations() -> None:
    broken = prove(without_a_move(LLAMA.plan()))
    assert not broken.ok and broken.covered_bytes < broken.destination_bytes
    with pytest.raises(ProofError, match=r"not sound, \d+ violations:\n  \[cover\] model.layers.0.self_attn.o_proj"):
        raise ProofError(broken)


def test_at_most_twenty_violations_of_a_rule_are_kept() -> None:
    plan = replace(LLAMA.plan(), transfer_groups=())
    groups = [violation for violation in prove(plan).violations if violation.rule == "groups"]
    assert len(groups) == min(20, len(plan.groups))


# --- declared storage


@pytest.mark.parametrize(
    ("roles", "is_src", "message"),
    [
        ("gate up", False, ""),
        ("q k v q k v", True, ""),
        ("k v", True, ""),
        ("q", True, ""),
        ("up gate", False, "it holds up, gate in this order; declared is gate, up"),
        ("gate", False, "it holds gate in this order; declared is gate, up"),
        ("gate", True, "it holds gate in this order; declared is gate, up"),
        ("k v", False, "it holds k, v in this order; declared is q, k, v"),
        ("q q k v", True, "it holds q, q, k, v in this order; declared is q, k, v"),
        ("q v", True, "it holds q, v in this order; declared is q, k, v"),
        ("v q", True, "it holds v, q in this order; declared is q, k, v"),
        ("k v q", True, "it holds k, v, q in this order; declared is q, k, v"),
        ("o down", False, "down, o share a tensor, and no order is declared"),
    ],
)
def test_the_order_of_parameters_that_share_a_tensor(roles: str, is_src: bool, message: str) -> None:
    held = [Role(role) for role in roles.split()]
    served = next((set(fused) for fused in FUSED if set(held) <= set(fused)), set(held))
    assert order_fault(held, served, is_src) == message


def test_parameters_that_are_alone_under_a_name_need_no_order() -> None:
    assert order_fault([Role.UP], {Role.UP}, False) == ""  # non-gated
    assert order_fault([], {Role.GATE, Role.UP}, False) == ""


def test_what_lies_otherwise_than_hugging_face_has_it_must_be_declared() -> None:
    matrix = Piece(box((0, 4), (0, 4)), LocalTensor("w", (4, 4), "bfloat16"), (0, 0), (0, 1))
    assert storage_fault(matrix, Role.O, MEGATRON) == ""
    assert storage_fault(replace(matrix, dims=(1, 0)), Role.O, MEGATRON) == (
        "w keeps dims in order (1, 0), declared for 'o' is (0, 1)"
    )
    expert = replace(matrix, tensor=LocalTensor("w", (8, 4), "bfloat16"), view=(2, 4, 4), origin=(0, 0, 0), dims=(2, 1))
    assert storage_fault(replace(expert, slot_dim=0), Role.EXPERT_DOWN, MEGATRON) == ""
    assert storage_fault(replace(expert, slot_dim=0), Role.DOWN, MEGATRON) == (
        "w (8, 4) is viewed as (2, 4, 4), which is not declared for 'down'"
    )


def test_sections_are_cut_one_by_one() -> None:
    tensor = LocalTensor("conv", (6,), "bfloat16")

    def share(*spans: tuple[int, int]) -> list[Piece]:
        return [Piece(box(span), tensor, (0,), (0,)) for span in spans]

    good = [share((0, 2), (4, 5), (6, 7)), share((2, 4), (5, 6), (7, 8))]
    assert sections_fault(good, Role.MAMBA_CONV, False) is None
    assert sections_fault([share((0, 4)), share((4, 8))], Role.MAMBA_CONV, False) == (
        0, "a part has 1 pieces, 'mamba_conv' is made of 3 sections",
    )  # fmt: skip
    crossed = [share((0, 2), (4, 5), (5, 6)), share((2, 4), (6, 7), (7, 8))]
    assert sections_fault(crossed, Role.MAMBA_CONV, False) == (
        0, "section 2 of 'mamba_conv' begins at [5:6], inside of the one before",
    )  # fmt: skip


def test_gate_and_up_of_a_trainer_may_take_turns() -> None:
    tensor = LocalTensor("linear_fc1", (16, 4), "bfloat16")

    def share(*blocks: tuple[int, int, int]) -> list[Piece]:
        return [Piece(box((start, stop), (0, 4)), tensor, (local, 0), (0, 1)) for start, stop, local in blocks]

    gate, up = share((8, 12, 0), (12, 16, 8)), share((8, 12, 4), (12, 16, 12))
    for role, good in ((Role.EXPERT_GATE, gate), (Role.SHARED_UP, up), (Role.EXPERT_GATE, share((0, 8, 0)))):
        assert sections_fault([good], role, True) is None
    assert sections_fault([gate], Role.EXPERT_GATE, False) == (
        0, "a part has 2 pieces, 'expert_gate' is made of 1 sections",
    )  # fmt: skip
    assert sections_fault([gate], Role.GATE, True) is not None  # no dense MLP is planned so
    for wrong, rows in (
        (share((8, 12, 0), (12, 16, 4)), "12:16 at 4"),  # not in turns
        (share((8, 12, 8), (12, 16, 0)), "12:16 at 0"),  # exchanged
        (share((8, 10, 0), (10, 16, 8)), "10:16 at 8"),  # unequal
        (share((8, 12, 2), (12, 16, 10)), "8:12 at 2"),  # one half late
    ):
        part, message = sections_fault([gate, wrong], Role.EXPERT_GATE, True) or (0, "")
        assert part == 1
        assert message.startswith(f"rows {rows} are no blocks of ")
