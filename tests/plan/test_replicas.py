"""The plan for another number of replicas is the plan made for that mesh; messages name seats."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from helpers.plans import QUANTIZED, TINY, Case

from mcore_reshard.kernels.transports.group_ranks import group_names
from mcore_reshard.kernels.transports.peer_access import RankPair
from mcore_reshard.planner.layout.condense import CondensedTrace, ParameterNames, condense
from mcore_reshard.planner.layout.geometry import LocalTensor
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh, parse_gen_mesh, replica_count, replica_ranks
from mcore_reshard.planner.layout.strided import StridedCopy
from mcore_reshard.planner.layout.traced import read_layouts
from mcore_reshard.planner.layout.traces import HfTensor, RankTrace, TracedTensor
from mcore_reshard.planner.model.precision import BLOCK_FP8, FP8
from mcore_reshard.planner.plan.frozen import with_frozen
from mcore_reshard.planner.plan.make_plan import plan_traced
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.plan_file import dump_plan, parse_plan
from mcore_reshard.planner.plan.replicas import gen_seats, schedule_for, with_replicas
from mcore_reshard.planner.proof.prove import require_proof

COUNTS = (1, 2, 3, 5)
WITHOUT_EP = [case for case in (*TINY, *QUANTIZED) if parse_gen_mesh(case.gen).ep == 1]
RELAYED = Case("tiny-qwen3", "tp=1", "tp=2,dp=4")


def of_count(case: Case, count: int) -> Plan:
    gen = re.sub(r",?dp=\d+", "", case.gen).strip(",")
    return replace(case, gen=",".join(filter(None, (gen, f"dp={count}")))).plan()


@pytest.mark.parametrize(
    ("gen", "ranks", "count"),
    [
        (GenMesh(), 1, 1),
        (GenMesh(tp=2, pp=3, dp=4), 6, 4),
        (GenMesh(dp=3), 1, 3),
        (GenMesh(tp=2, dp=4, ep=8), 8, 1),
        (GenMesh(tp=2, pp=2, dp=2, ep=4), 8, 1),
    ],
)
def test_a_replica_has_tp_times_pp_ranks_or_all_that_share_experts(gen: GenMesh, ranks: int, count: int) -> None:
    assert (replica_ranks(gen), replica_count(gen)) == (ranks, count)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", WITHOUT_EP, ids=str)
def test_plans_by_rules_are_those_of_their_mesh(case: Case) -> None:
    planned = {count: of_count(case, count) for count in COUNTS}
    for before in (1, 2, 5):
        for count, plan in planned.items():
            derived = with_replicas(planned[before], count)
            assert (derived.digest, dump_plan(derived)) == (plan.digest, dump_plan(plan)), f"{before} -> {count}"
            assert all(map(np.array_equal, derived.rank_grids, plan.rank_grids))


def test_some_of_these_plans_relay_and_some_do_not() -> None:
    found = {(with_replicas(of_count(RELAYED, 1), count).relay, count) for count in COUNTS}
    assert found == {(False, 1), (True, 2), (True, 3), (True, 5)}


def test_a_plan_from_a_file_makes_the_same_plans() -> None:
    plan = of_count(RELAYED, 4)
    assert with_replicas(parse_plan(dump_plan(plan)), 3).digest == of_count(RELAYED, 3).digest


def test_frozen_layers_stay_frozen() -> None:
    def frozen(plan: Plan) -> Plan:
        return with_frozen(plan, {(2, layer) for layer in range(2)}, {})

    derived = with_replicas(frozen(of_count(RELAYED, 4)), 2)
    assert derived.frozen and derived.digest == frozen(of_count(RELAYED, 2)).digest
    later = schedule_for(frozen(of_count(RELAYED, 4)), "gen", 5, [0, 2]).later
    assert later is not None and (later.name, later.digest) == ("gen:5", derived.digest)


def test_a_derived_plan_is_proven_and_kept() -> None:
    plan = of_count(RELAYED, 4)
    require_proof(derived := with_replicas(plan, 7))
    assert with_replicas(plan, 7) is derived and with_replicas(plan, 4) is plan
    for count in range(8, 20):
        with_replicas(plan, count)
    assert len(plan.replica_plans) == 4


def test_experts_over_all_ranks_are_one_replica() -> None:
    plan = Case("tiny-qwen3-moe", "ep=2,dp=2", "tp=2,dp=2,ep=4").plan()
    assert with_replicas(plan, 1) is plan
    with pytest.raises(ValueError, match=r"experts are parallel over all 4 ranks of this engine \(ep = 4\)"):
        with_replicas(plan, 2)
    assert schedule_for(plan, "gen", 6, [1]).name == "gen:6"


# --- plans from traces

EMBED, UP, KV, NORM = (
    "model.embed.weight",
    "model.layers.{}.up.weight",
    "model.layers.{}.kv.weight",
    "model.norm.weight",
)
LOST = "model.lost.weight"
CHECKPOINT = {
    EMBED: HfTensor((4, 4), "bfloat16"),
    NORM: HfTensor((4,), "bfloat16"),
    LOST: HfTensor((4,), "bfloat16"),
} | {name.format(layer): HfTensor((8, 4), "bfloat16") for layer in range(4) for name in (UP, KV)}
NAMES = ParameterNames(CHECKPOINT)
BLOCK = replace(BLOCK_FP8, block=(2, 2))


def rows(start: int, stop: int) -> StridedCopy:
    return StridedCopy(((stop - start) * 4,), start * 4, (1,), 0, (1,))


def tensor(name: str, parameter: str, local_rows: int, start: int, stop: int, dtype: str = "bfloat16") -> TracedTensor:
    """Rows `start:stop` of a parameter, and zeros behind them."""
    held = max(stop - start, 0)
    copies = ((parameter, rows(start, stop)),) if held else ()
    padding = (StridedCopy(((local_rows - held) * 4,), 0, (0,), held * 4, (1,)),) if held < local_rows else ()
    return TracedTensor(LocalTensor(name, (local_rows, 4), dtype), copies, padding)


def norm(name: str) -> TracedTensor:
    return TracedTensor(LocalTensor(name, (4,), "bfloat16"), ((NORM, rows(0, 1)),))


def trainer(tp: int) -> CondensedTrace:
    """Rank `tp` of two, which hold halves of the matrices."""
    held = [tensor("vp0.embedding", EMBED, 2, 2 * tp, 2 * tp + 2), norm("vp0.norm")]
    for layer in range(4):
        for name in (UP, KV):
            local = "vp0.decoder.layers.{}." + name.split(".")[-2]
            held.append(tensor(local.format(layer), name.format(layer), 4, 4 * tp, 4 * tp + 4))
    return condense(RankTrace(tuple(held)), NAMES, is_trainer=True)


def engine(tp: int, pp: int, quantized: bool) -> CondensedTrace:
    """Rank (pp, tp) of 2 x 4: quarters of `up`, halves of `kv` on two ranks each, an embedding that half of them pad."""
    form = FP8 if quantized else "bfloat16"
    held = [tensor(EMBED, EMBED, 2, min(2 * tp, 4), min(2 * tp + 2, 4))] if pp == 0 else [norm(NORM)]
    for layer in (2 * pp, 2 * pp + 1):
        held.append(tensor(UP.format(layer), UP.format(layer), 2, 2 * tp, 2 * tp + 2, form))
        held.append(tensor(KV.format(layer), KV.format(layer), 4, tp // 2 * 4, tp // 2 * 4 + 4, form))
        if quantized:
            for name, blocks in ((UP, 1), (KV, 2)):
                scales = LocalTensor(name.format(layer) + "_scale_inv", (blocks, 2), "float32")
                held.append(TracedTensor(scales))
    return condense(RankTrace(tuple(held)), NAMES, is_trainer=False)


def traced(count: int, quantized: bool) -> Plan:
    train, gen = TrainMesh(tp=2, dp=2), GenMesh(tp=4, pp=2, dp=count)
    ranks = [engine(*(gen.coordinate(rank)[axis] for axis in ("tp", "pp")), quantized) for rank in range(gen.world)]
    stages = [0] * train.world, [gen.coordinate(rank)["pp"] for rank in range(gen.world)]
    sources = [trainer(train.coordinate(rank)["tp"]) for rank in range(train.world)]
    layouts = read_layouts("mystery", CHECKPOINT, sources, ranks, stages, "vllm")
    return plan_traced(layouts, train, gen, form=BLOCK if quantized else None)


@pytest.mark.parametrize("quantized", [False, True])
def test_plans_from_traces_are_those_of_their_mesh(quantized: bool) -> None:
    planned = {count: traced(count, quantized) for count in COUNTS}
    parts = {count: len(plan.transfer_groups and plan.patterns[0].dst.pieces) for count, plan in planned.items()}
    assert parts == {1: 4, 2: 8, 3: 12, 5: 20}  # of the embedding: two ranks of four have nothing but padding
    assert all(plan.excluded and bool(plan.pairs) is quantized for plan in planned.values())
    for before, base in planned.items():
        require_proof(base)
        for count, plan in planned.items():
            derived = with_replicas(base, count)
            assert (derived.digest, dump_plan(derived)) == (plan.digest, dump_plan(plan)), f"{before} -> {count}"


# --- schedules and names


def test_positions_have_the_names_of_their_seats() -> None:
    schedule = schedule_for(of_count(RELAYED, 4), "gen", 7, [0, 2, 3])
    assert (schedule.rank, schedule.name, schedule.gen_ranks) == (5, "gen:7", 6)
    assert group_names(schedule) == ["train:0", "gen:0", "gen:1", "gen:4", "gen:5", "gen:6", "gen:7"]
    train = schedule_for(of_count(RELAYED, 4), "train", 0, [0, 2, 3])
    assert train.name == "train:0" and {train.name_of("gen", peer) for peer in train.peers} == {
        "gen:0", "gen:1", "gen:4", "gen:5", "gen:6", "gen:7",
    }  # fmt: skip


def test_all_views_of_a_schedule_have_the_names_of_seats() -> None:
    schedule = schedule_for(of_count(RELAYED, 4), "gen", 7, [0, 2, 3])
    assert schedule.relayed and schedule.view is not None
    relay = schedule.view.relays()[0]
    assert (relay.sends.name, relay.receives.name) == ("relay:7", "gen:7")
    others = ("0", "1", "4", "5", "6")  # norms go to any rank, and come from any
    assert {relay.sends.name_of("gen", peer) for peer in relay.sends.peers} == {f"gen:{seat}" for seat in others}
    sources = {relay.receives.name_of("train", peer) for peer in relay.receives.peers}
    assert sources == {f"relay:{seat}" for seat in others}
    views = (schedule.view.unrelayed(), *schedule.view.waves(), schedule.with_peers({0}))
    assert {view.name for view in views} == {"gen:7"}
    waves = [wave.view.relays()[0] for wave in schedule.view.waves() if wave.view is not None]
    assert {(wave.sends.name, wave.receives.name) for wave in waves} == {("relay:7", "gen:7")} and len(waves) == 8
    assert RankPair(0, 5, 0).named(schedule) == "train:0-gen:7"
    assert RankPair(3, 5, 1).named(schedule) == "relay:5-gen:7"


@pytest.mark.parametrize("replicas", [[0, 1, 2], [3], [0, 2, 3], [1, 9]])
def test_a_schedule_among_live_replicas_is_that_of_its_position(replicas: list[int]) -> None:
    plan = of_count(RELAYED, 4)
    made = of_count(RELAYED, len(replicas))
    for position, seat in enumerate(gen_seats(plan.gen, replicas)):
        schedule = schedule_for(plan, "gen", seat, replicas)
        as_made = schedule_of(made, "gen", position)
        assert (schedule.rank, schedule.name, schedule.digest) == (position, f"gen:{seat}", made.digest)
        assert schedule.tensors == as_made.tensors
        for ours, theirs in zip(schedule.tables, as_made.tables, strict=True):
            assert np.array_equal(ours.peer, theirs.peer) and np.array_equal(ours.offset, theirs.offset)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda plan: with_replicas(plan, 0), ValueError, "at least 1 replica of the engine, not 0"),
        (lambda plan: with_replicas(plan, 1 << 16), ValueError, "ranks exceed the 65536 that a plan may have"),
        (lambda plan: schedule_for(plan, "gen", 0, []), ValueError, r"at least one, not \[\]"),
        (lambda plan: schedule_for(plan, "gen", 0, [2, 0]), ValueError, r"ascend from 0 on.* not \[2, 0\]"),
        (lambda plan: schedule_for(plan, "gen", 0, [0, 0]), ValueError, "ascend"),
        (lambda plan: schedule_for(plan, "gen", 0, [-1, 0]), ValueError, "ascend"),
        (lambda plan: schedule_for(plan, "gen", 2, [0, 2]), IndexError, r"gen:2 is in none of the live replicas \[0, 2\]"),
        (lambda plan: schedule_for(plan, "train", 1, [0, 2]), IndexError, "train rank 1 is outside"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(call: Callable[[Plan], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(of_count(RELAYED, 4))


def seats_of(replicas: Sequence[int]) -> tuple[int, ...]:
    return gen_seats(GenMesh(tp=2, dp=4), replicas)


def test_seats_do_not_depend_on_who_else_lives() -> None:
    assert seats_of([0, 2]) == (0, 1, 4, 5) and seats_of([2]) == (4, 5) and seats_of([2, 7]) == (4, 5, 14, 15)
    assert all(before < after for before, after in pairwise(seats_of([1, 3, 4])))
