"""`plan.transfers` says of every element exactly what the schedules of both worlds do with it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from helpers import plans

from mcore_reshard.planner.layout.geometry import Region
from mcore_reshard.planner.plan.make_schedule import relays_of, schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import Schedule, StridedBox, World
from mcore_reshard.planner.plan.transfers import (
    Transfer,
    UnknownElementError,
    holders_of,
    local_tensors,
)

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
        schedule = relays_of(plan, gen)[0].receives
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


def explained(transfers: list[Transfer]) -> set[Moved]:
    found = set()
    for transfer in transfers:
        assert transfer.route == "bulk" and transfer.src is not None and transfer.dst is not None
        src, dst = transfer.src, transfer.dst
        for place in (src, dst):
            assert np.ravel_multi_index(place.index, place.shape) == place.offset
        found.add((transfer.parameter, src.rank, src.tensor, src.offset, dst.rank, dst.tensor, dst.offset))
    assert len(found) == len(transfers)
    return found


def some_indices(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All indices of a small tensor; of a large one, some that reach every row and column alignment."""
    step = max(1, prod(shape) // MOST_ELEMENTS) | 1
    return [tuple(int(i) for i in np.unravel_index(at, shape)) for at in range(0, prod(shape), step)]


cases = pytest.mark.parametrize("case", plans.TINY, ids=str)


@pytest.mark.sampled(5)
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
            transfers = [*plan.transfers(name, element=index)]
            seen |= explained(transfers)
            assert all(o.element == index and o.src in holders_of(plan, name, index) for o in transfers)
        moved = moves_of(case).of_parameter(name)
        assert seen and seen <= moved
        assert seen == moved or prod(group.shape) > MOST_ELEMENTS


@pytest.mark.slow
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
                seen |= explained([*plan.transfers(name, element=index)])
            assert seen == moves_of(case).of_parameter(name)


@pytest.mark.sampled(7)
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
                (transfer,) = plan.transfers(tensor=name, rank=f"gen:{rank}", element=index)
                offset = int(np.ravel_multi_index(index, held[name].shape))
                if transfer.route == "padding":
                    assert (name, offset) in padding and offset not in arriving
                else:
                    assert explained([transfer]) == {arriving[offset]}


@pytest.mark.sampled(7)
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
                transfers = [*plan.transfers(tensor=name, rank=f"train:{rank}", element=index)]
                offset = int(np.ravel_multi_index(index, held[name].shape))
                if [transfer.route for transfer in transfers] == ["padding"]:
                    assert not leaving[offset]
                else:
                    assert explained(transfers) == leaving[offset]


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
    (transfer,) = plan.transfers(tensor="lm_head.weight", rank="gen:7", element=(30, 3))
    assert (transfer.route, transfer.parameter, transfer.src) == ("padding", "", None)
    assert transfer.dst is not None and transfer.dst.offset == 30 * 64 + 3
    (last,) = plan.transfers(tensor="lm_head.weight", rank="gen:7", element=(25, 3))
    assert (last.route, last.parameter, last.element) == ("bulk", "lm_head.weight", (249, 3))


def test_an_explanation_in_numbers() -> None:
    """KV group 1 of a fused Megatron matrix starts at row 32: its k rows follow its two query heads of 8 rows."""
    plan = plans.Case("tiny-llama", "tp=1", "tp=2").plan()
    (transfer,) = [*plan.transfers("model.layers.3.self_attn.k_proj.weight", element=(9, 5))]
    assert transfer.src is not None and transfer.dst is not None
    assert (transfer.src.tensor, transfer.src.index) == (
        "vp0.decoder.layers.3.self_attention.linear_qkv.weight",
        (49, 5),
    )
    assert (transfer.src.offset, transfer.src.byte_offset) == (49 * 64 + 5, 2 * (49 * 64 + 5))
    assert (transfer.dst.rank, transfer.dst.tensor) == (0, "model.layers.3.self_attn.qkv_proj.weight")
    assert transfer.dst.index == (32 + 9, 5)
    assert (transfer.pp_stage, transfer.region) == (0, Region((8, 0), (16, 64)))


def test_replicas_share_the_pulls_of_a_replicated_parameter() -> None:
    plan = plans.Case("tiny-llama", "dp=4", "tp=4").plan()
    transfers = [*plan.transfers("model.norm.weight", element=(7,))]
    assert sorted(o.src.rank for o in transfers if o.src) == [0, 1, 2, 3]
    assert [o.dst.rank for o in transfers if o.dst] == [0, 1, 2, 3]
    assert [place.rank for place in holders_of(plan, "model.norm.weight", (7,))] == [0, 1, 2, 3]
    served = [*plan.transfers("model.norm.weight", rank="train:2", element=(7,))]
    assert served == [o for o in transfers if o.src is not None and o.src.rank == 2]


def test_a_replica_that_serves_nobody_has_no_transfers_but_holds_the_element() -> None:
    plan = plans.Case("tiny-llama", "dp=4", "tp=1").plan()
    serving = {o.src.rank for o in [*plan.transfers("model.norm.weight", element=(0,))] if o.src}
    idle = min(set(range(4)) - serving)
    final_norm = "vp0.decoder.final_layernorm.weight"
    assert [*plan.transfers(tensor=final_norm, rank=f"train:{idle}", element=(0,))] == []
    assert idle in {place.rank for place in holders_of(plan, "model.norm.weight", (0,))}


def test_misc_and_excluded_parameters_say_why() -> None:
    nemotron = plans.Case("tiny-nemotron-h", "tp=2", "tp=2").plan()
    (transfer,) = [*nemotron.transfers("backbone.layers.0.mixer.A_log", element=(1,))]
    assert (transfer.route, transfer.src, transfer.dst) == ("misc", None, None)
    assert "not a byte copy" in transfer.reason
    mtp = plans.Case("tiny-deepseek-v3", "tp=1", "tp=1", changes=(("num_nextn_predict_layers", 1),)).plan()
    (transfer,) = [*mtp.transfers("model.layers.4.enorm.weight", element=(0,))]
    assert transfer.route == "excluded" and "multi-token-prediction" in transfer.reason
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
    with pytest.raises(UnknownElementError, match=message):
        DENSE.plan().transfers(name, element=index)


def test_unknown_tensors_and_ranks_are_named() -> None:
    plan = DENSE.plan()
    with pytest.raises(UnknownElementError, match=r"on gen:0; did you mean .*gate_up_proj"):
        plan.transfers(tensor="model.layers.0.mlp.gate_up.weight", rank="gen:0", element=(0, 0))
    with pytest.raises(UnknownElementError, match="misc route carries 5 parameters"):
        plans.Case("tiny-nemotron-h", "tp=2", "tp=2").plan().transfers(tensor="model.layers.0.mixer.A", rank="gen:0")
    with pytest.raises(UnknownElementError, match="gen:4 is outside of the 4 gen ranks"):
        plan.transfers("model.norm.weight", rank="gen:4")
    with pytest.raises(UnknownElementError, match="train:8 is outside of the 8 train ranks"):
        plan.transfers(rank="train:8")


@pytest.mark.parametrize(
    "asked", [{"element": (0,)}, {"parameter": "*", "element": (0,)}, {"tensor": "lm_head.weight"}]
)
def test_half_a_question_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(UnknownElementError, match=r"[Nn]ame one"):
        DENSE.plan().transfers(**asked)


@cases
def test_what_a_rank_moves_is_what_its_schedule_lists(case: plans.Case) -> None:
    plan = case.plan()
    relayed = plan.relay
    for rank in range(0, plan.train.world, 3):
        stages = schedule_of(plan, "train", rank).stages
        sent = [t for t in plan.transfers(rank=f"train:{rank}") if t.relayed_by is None]
        assert sum(t.nbytes for t in sent) == sum(int(stage.sends.nbytes.sum()) for stage in stages)
        assert len(sent) == sum(len(stage.sends) for stage in stages)
    for rank in range(0, plan.gen.world, 3):
        received = [*plan.transfers(rank=f"gen:{rank}")]
        assert sum(t.nbytes for t in received) == plan.recv_bytes[rank]
        stages = schedule_of(plan, "gen", rank).stages
        assert len([t for t in received if t.relayed_by is None]) == sum(len(stage.recvs) for stage in stages)
        assert relayed or all(t.relayed_by is None for t in received)


def test_a_pattern_gives_what_its_parameters_give() -> None:
    plan = plans.Case("tiny-nemotron-h", "tp=2,ep=2,pp=2", "tp=2,pp=2").plan()
    names = [name for group in plan.groups for name in group.names()]
    apart = [transfer for name in names for transfer in plan.transfers(name)]
    together = [*plan.transfers()]
    assert set(together) == set(apart) and len(together) == len(apart)
    layer = [*plan.transfers("*.layers.1.*", rank="gen:0")]
    assert layer and set(layer) == {t for t in together if ".layers.1." in t.parameter and t.dst and t.dst.rank == 0}
    with pytest.raises(UnknownElementError, match="no parameter of the plan matches 'zzz"):
        plan.transfers("zzz*")


def test_a_tensor_gives_what_lies_in_it() -> None:
    plan = DENSE.plan()
    tensor = "model.layers.1.self_attn.qkv_proj.weight"
    asked = [*plan.transfers(tensor=tensor, rank="gen:2")]
    assert asked == [t for t in plan.transfers(rank="gen:2") if t.dst is not None and t.dst.tensor == tensor]
    assert {t.parameter.split(".")[-2] for t in asked} == {"q_proj", "k_proj", "v_proj"}


def test_the_comparison_above_can_fail() -> None:
    """Another turn of the round robin is another source rank, and an explanation from the wrong plan is caught."""
    case = plans.Case("tiny-llama", "dp=2", "tp=2")
    plan = case.plan()
    turned: Plan = replace(
        plan, transfer_groups=tuple(replace(b, first_src_replica=b.first_src_replica + 1) for b in plan.transfer_groups)
    )
    assert explained([*plan.transfers("model.norm.weight", element=(0,))]) <= moves_of(case).of_parameter(
        "model.norm.weight"
    )
    assert not explained([*turned.transfers("model.norm.weight", element=(0,))]) <= moves_of(case).of_parameter(
        "model.norm.weight"
    )
