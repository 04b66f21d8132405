"""`explain` says of every element exactly what the schedules of both worlds do with it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import prod

import numpy as np
import pytest
from helpers import plans

from mcore_reshard.planner.layout.geometry import Region
from mcore_reshard.planner.plan.explain import (
    ExplainError,
    Origin,
    explain_engine_tensor,
    explain_parameter,
    explain_trainer_tensor,
    holders_of,
    local_tensors,
    parse_element,
)
from mcore_reshard.planner.plan.make_schedule import relay_of, schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import Schedule, StridedBox, World

# parameter, train rank, tensor, offset, gen rank, tensor, offset
Moved = tuple[str, int, str, int, int, str, int]

DENSE = plans.Case("tiny-llama", "tp=2,pp=2,dp=2", "tp=4")
MOST_ELEMENTS = 100  # explained per tensor, spread over all of it


@dataclass(frozen=True)
class Moves:
    """Every element that moves, as rows of one transfer each; elements are only listed for what a test asks about."""

    rows: tuple[tuple[str, int, str, StridedBox, int, int, str, StridedBox, int], ...]

    def of_parameter(self, name: str) -> set[Moved]:
        return self._elements(row for row in self.rows if row[0] == name)

    def from_tensor(self, train_rank: int, tensor: str) -> set[Moved]:
        return self._elements(row for row in self.rows if (row[1], row[2]) == (train_rank, tensor))

    def into_tensor(self, gen_rank: int, tensor: str) -> set[Moved]:
        return self._elements(row for row in self.rows if (row[5], row[6]) == (gen_rank, tensor))

    @staticmethod
    def _elements(rows: Iterable[tuple[str, int, str, StridedBox, int, int, str, StridedBox, int]]) -> set[Moved]:
        return {
            (name, train, src, here, gen, dst, there)
            for name, train, src, held, a, gen, dst, wanted, b in rows
            for here, there in zip(_offsets(held, a), _offsets(wanted, b), strict=True)
        }


@cache
def moves_of(case: plans.Case) -> Moves:
    """Read off the schedules alone: both ends list the transfers of a pair of ranks in one order."""
    plan = case.plan()
    sends, receives = _by_pair(plan, "train"), _by_pair(plan, "gen")
    assert sends.keys() == receives.keys()
    found = []
    for (train, gen), rows in sends.items():
        for (name, src, held, a), (same, dst, wanted, b) in zip(rows, receives[train, gen], strict=True):
            assert name == same
            found.append((name, train, src, held, a, gen, dst, wanted, b))
    landed = {(gen, name, dst, b): row for row in found for name, *_, gen, dst, _, b in [row]}
    for gen in range(plan.gen.world if plan.relay else 0):  # replicas keep a parameter in the same place
        schedule = relay_of(plan, gen).receives
        for _, peer, name, tensor, _, offset in _rows(schedule):
            name, train, src, held, a, _, dst, wanted, b = landed[peer, name, tensor, offset]
            found.append((name, train, src, held, a, gen, dst, wanted, b))
    return Moves(tuple(found))


def _by_pair(plan: Plan, world: World) -> dict[tuple[int, int], list[tuple[str, str, StridedBox, int]]]:
    """The transfers of every (train rank, gen rank), in the order in which one world lists them."""
    found = defaultdict(list)
    for rank in range(plan.train.world if world == "train" else plan.gen.world):
        for me, peer, name, tensor, strided_box, offset in _rows(schedule_of(plan, world, rank)):
            pair = (me, peer) if world == "train" else (peer, me)
            found[pair].append((name, tensor, strided_box, offset))
    return found


def _rows(schedule: Schedule) -> Iterator[tuple[int, int, str, str, StridedBox, int]]:
    """(rank, peer, parameter, tensor, geometry, offset) of every transfer."""
    for stage in schedule.stages:
        table = stage.sends if schedule.world == "train" else stage.recvs
        for i, peer in enumerate(table.peer.tolist()):
            name = schedule.parameter_name(int(table.transfer_group[i]), int(table.member[i]))
            tensor, strided_box = schedule.tensors[table.tensor[i]].name, schedule.strided_boxes[table.strided_box[i]]
            yield schedule.rank, peer, name, tensor, strided_box, int(table.offset[i])


def _offsets(strided_box: StridedBox, start: int) -> list[int]:
    indices = np.indices(strided_box.extents).reshape(len(strided_box.extents), -1)
    return (start + np.array(strided_box.strides, dtype=np.int64) @ indices).reshape(-1).tolist()


def explained(origins: list[Origin]) -> set[Moved]:
    found = set()
    for origin in origins:
        assert origin.route == "bulk" and origin.src is not None and origin.dst is not None
        src, dst = origin.src, origin.dst
        for place in (src, dst):
            assert np.ravel_multi_index(place.index, place.shape) == place.offset
        found.add((origin.parameter, src.rank, src.tensor, src.offset, dst.rank, dst.tensor, dst.offset))
    assert len(found) == len(origins)
    return found


def some_indices(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All indices of a small tensor; of a large one, some that reach every row and column alignment."""
    step = max(1, prod(shape) // MOST_ELEMENTS) | 1
    return [tuple(int(i) for i in np.unravel_index(at, shape)) for at in range(0, prod(shape), step)]


cases = pytest.mark.parametrize("case", plans.TINY, ids=str)


@cases
def test_parameters_are_explained_as_they_move(case: plans.Case) -> None:
    plan = case.plan()
    unplanned = {entry.group for entry in (*plan.misc, *plan.excluded)}
    for number, group in enumerate(plan.groups):
        name = list(group.names())[-1]
        if number in unplanned:
            continue
        seen = set()
        for index in some_indices(group.shape):
            origins = explain_parameter(plan, name, index)
            seen |= explained(origins)
            assert all(o.index == index and o.src in holders_of(plan, name, index) for o in origins)
        moved = moves_of(case).of_parameter(name)
        assert seen and seen <= moved
        assert seen == moved or prod(group.shape) > MOST_ELEMENTS


def test_every_element_of_large_tensors_is_explained_as_it_moves() -> None:
    by_case = {
        DENSE: ("model.layers.1.self_attn.k_proj.weight",),
        plans.Case("tiny-qwen3-moe", "tp=2,ep=2,etp=2,dp=2", "tp=2,dp=2,ep=4"): (
            "model.layers.2.mlp.experts.5.up_proj.weight",
        ),
        plans.Case("tiny-nemotron-h", "tp=2,ep=2,pp=2", "tp=2,pp=2"): ("backbone.layers.0.mixer.in_proj.weight",),
        plans.Case("tiny-gpt-oss", "tp=2,ep=2", "tp=2"): ("model.layers.0.mlp.experts.gate_up_proj",),
    }
    for case, names in by_case.items():
        plan = case.plan()
        for name in names:
            shape = next(group.shape for group in plan.groups if name in set(group.names()))
            seen = set()
            for index in product(*map(range, shape)):
                seen |= explained(explain_parameter(plan, name, index))
            assert seen == moves_of(case).of_parameter(name)


@cases
def test_engine_tensors_are_explained_as_they_are_written(case: plans.Case) -> None:
    plan = case.plan()
    for rank in {0, plan.gen.world - 1}:
        padding = _padding(schedule_of(plan, "gen", rank))
        held = local_tensors(plan, "gen", rank)
        assert set(held.values()) == set(schedule_of(plan, "gen", rank).tensors)
        for name in _spread(sorted(held)):
            arriving = {overlap[-1]: overlap for overlap in moves_of(case).into_tensor(rank, name)}
            for index in some_indices(held[name].shape):
                (origin,) = explain_engine_tensor(plan, name, index, rank)
                offset = int(np.ravel_multi_index(index, held[name].shape))
                if origin.route == "padding":
                    assert (name, offset) in padding and offset not in arriving
                else:
                    assert explained([origin]) == {arriving[offset]}


@cases
def test_trainer_tensors_are_explained_as_they_are_sent(case: plans.Case) -> None:
    plan = case.plan()
    for rank in {0, plan.train.world - 1}:
        held = local_tensors(plan, "train", rank)
        for name in _spread(sorted(held)):
            leaving = defaultdict(set)
            for overlap in moves_of(case).from_tensor(rank, name):
                leaving[overlap[3]].add(overlap)
            for index in some_indices(held[name].shape):
                origins = explain_trainer_tensor(plan, name, index, rank)
                offset = int(np.ravel_multi_index(index, held[name].shape))
                if [origin.route for origin in origins] == ["padding"]:
                    assert not leaving[offset]
                else:
                    assert explained(origins) == leaving[offset]


def _spread(names: list[str]) -> list[str]:
    """One name of every kind of tensor, from different layers and experts."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in names:
        kinds["".join(c for c in name if not c.isdigit())].append(name)
    return [alike[number % len(alike)] for number, alike in enumerate(kinds.values())]


def _padding(schedule: Schedule) -> set[tuple[str, int]]:
    return {
        (schedule.tensors[tensor].name, offset)
        for tensor, start, strided_box in schedule.padding
        for offset in _offsets(strided_box, start)
    }


def test_padded_vocabulary_rows_come_from_nowhere() -> None:
    narrow = (("num_key_value_heads", 2), ("vocab_size", 250))  # 250 rows, padded by the engine to 256 over 8 ranks
    plan = plans.Case("tiny-llama", "tp=4", "tp=8", changes=narrow).plan()
    (origin,) = explain_engine_tensor(plan, "lm_head.weight", (30, 3), gen_rank=7)
    assert (origin.route, origin.parameter, origin.src) == ("padding", "", None)
    assert origin.dst is not None and origin.dst.offset == 30 * 64 + 3
    (last,) = explain_engine_tensor(plan, "lm_head.weight", (25, 3), gen_rank=7)
    assert (last.route, last.parameter, last.index) == ("bulk", "lm_head.weight", (249, 3))


def test_an_explanation_in_numbers() -> None:
    """KV group 1 of a fused Megatron matrix starts at row 32: its k rows follow its two query heads of 8 rows."""
    plan = plans.Case("tiny-llama", "tp=1", "tp=2").plan()
    (origin,) = explain_parameter(plan, "model.layers.3.self_attn.k_proj.weight", (9, 5))
    assert origin.src is not None and origin.dst is not None
    assert (origin.src.tensor, origin.src.index) == ("vp0.decoder.layers.3.self_attention.linear_qkv.weight", (49, 5))
    assert (origin.src.offset, origin.src.byte_offset) == (49 * 64 + 5, 2 * (49 * 64 + 5))
    assert (origin.dst.rank, origin.dst.tensor) == (0, "model.layers.3.self_attn.qkv_proj.weight")
    assert origin.dst.index == (32 + 9, 5)
    assert (origin.pp_stage, origin.region) == (0, Region((8, 0), (16, 64)))


def test_replicas_share_the_pulls_of_a_replicated_parameter() -> None:
    plan = plans.Case("tiny-llama", "dp=4", "tp=4").plan()
    origins = explain_parameter(plan, "model.norm.weight", (7,))
    assert sorted(o.src.rank for o in origins if o.src) == [0, 1, 2, 3]
    assert [o.dst.rank for o in origins if o.dst] == [0, 1, 2, 3]
    assert [place.rank for place in holders_of(plan, "model.norm.weight", (7,))] == [0, 1, 2, 3]
    served = explain_parameter(plan, "model.norm.weight", (7,), train_rank=2)
    assert served == [o for o in origins if o.src is not None and o.src.rank == 2]


def test_a_replica_that_serves_nobody_has_no_origins_but_holds_the_element() -> None:
    plan = plans.Case("tiny-llama", "dp=4", "tp=1").plan()
    serving = {o.src.rank for o in explain_parameter(plan, "model.norm.weight", (0,)) if o.src}
    idle = min(set(range(4)) - serving)
    assert explain_trainer_tensor(plan, "vp0.decoder.final_layernorm.weight", (0,), idle) == []
    assert idle in {place.rank for place in holders_of(plan, "model.norm.weight", (0,))}


def test_misc_and_excluded_parameters_say_why() -> None:
    nemotron = plans.Case("tiny-nemotron-h", "tp=2", "tp=2").plan()
    (origin,) = explain_parameter(nemotron, "backbone.layers.0.mixer.A_log", (1,))
    assert (origin.route, origin.src, origin.dst) == ("misc", None, None)
    assert "not a byte copy" in origin.reason
    mtp = plans.Case("tiny-deepseek-v3", "tp=1", "tp=1", changes=(("num_nextn_predict_layers", 1),)).plan()
    (origin,) = explain_parameter(mtp, "model.layers.4.enorm.weight", (0,))
    assert origin.route == "excluded" and "multi-token-prediction" in origin.reason
    assert holders_of(mtp, "model.layers.4.enorm.weight", (0,)) == []


@pytest.mark.parametrize(
    ("name", "index", "message"),
    [
        ("model.layers.9.self_attn.q_proj.weight", (0, 0), "has layers 0 to 3"),
        ("model.layers.0.self_attn.q_prj.weight", (0, 0), "did you mean model.layers.0.self_attn.q_proj.weight"),
        ("model.norm.weight", (64,), r"\[64\] is outside of model.norm.weight, which has shape \[64\]"),
        ("model.norm.weight", (0, 0), r"write \[0\] to \[63\]"),
        ("model.norm.weight", (-1,), "outside"),
    ],
)
def test_unknown_elements_are_named(name: str, index: tuple[int, ...], message: str) -> None:
    with pytest.raises(ExplainError, match=message):
        explain_parameter(DENSE.plan(), name, index)


def test_unknown_tensors_and_ranks_are_named() -> None:
    plan = DENSE.plan()
    with pytest.raises(ExplainError, match=r"on gen:0; did you mean .*gate_up_proj"):
        explain_engine_tensor(plan, "model.layers.0.mlp.gate_up.weight", (0, 0), 0)
    with pytest.raises(ExplainError, match="misc route carries 5 parameters"):
        explain_engine_tensor(plans.Case("tiny-nemotron-h", "tp=2", "tp=2").plan(), "model.layers.0.mixer.A", (0,), 0)
    with pytest.raises(ExplainError, match="generation rank 4 is outside of the 4 ranks"):
        explain_parameter(plan, "model.norm.weight", (0,), gen_rank=4)
    with pytest.raises(ExplainError, match="training rank 8 is outside"):
        explain_trainer_tensor(plan, "vp0.decoder.final_layernorm.weight", (0,), 8)


def test_elements_are_read_and_misread() -> None:
    element = parse_element(" a.b[5, 3] ")
    assert (element.name, element.index) == ("a.b", (5, 3))
    assert parse_element("a.b").index is None
    for text in ("a[1", "a[x]", "a[]", "[1]", "a b[1]", "a[1:2]", "a[1][2]"):
        with pytest.raises(ExplainError, match="write"):
            parse_element(text)


def test_the_comparison_above_can_fail() -> None:
    """Another turn of the round robin is another source rank, and an explanation from the wrong plan is caught."""
    case = plans.Case("tiny-llama", "dp=2", "tp=2")
    plan = case.plan()
    turned: Plan = replace(
        plan, transfer_groups=tuple(replace(b, first_src_replica=b.first_src_replica + 1) for b in plan.transfer_groups)
    )
    assert explained(explain_parameter(plan, "model.norm.weight", (0,))) <= moves_of(case).of_parameter(
        "model.norm.weight"
    )
    assert not explained(explain_parameter(turned, "model.norm.weight", (0,))) <= moves_of(case).of_parameter(
        "model.norm.weight"
    )
