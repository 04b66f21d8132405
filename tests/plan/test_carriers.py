"""Carriers: engine ranks whose NICs bring in what others of their NVLink domain want."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import simulate
from helpers.plans import Case

from mcore_reshard.planner.layout.record_forms import canonical
from mcore_reshard.planner.plan import bounds, carriers, make_plan
from mcore_reshard.planner.plan.carriers import TURNS, Carried
from mcore_reshard.planner.plan.least_time import least_time
from mcore_reshard.planner.plan.loads import busiest_link
from mcore_reshard.planner.plan.locate import located
from mcore_reshard.planner.plan.make_schedule import relays_of, schedule_of
from mcore_reshard.planner.plan.paths import NIC
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.plan_file import PlanFileError, digest_of, dump_plan, load_plan, parse_plan, save_plan
from mcore_reshard.planner.plan.replicas import with_replicas
from mcore_reshard.planner.proof.prove import prove

# On hosts of three GPUs, host c holds part 0 at gen:0 and gen:2, part 1 at gen:1 alone; host d the other way round.
STRADDLED = Case("tiny-qwen3", "tp=2,dp=4", "tp=2,dp=3", machine="h200-8,gpus=3")
MOE = Case("tiny-qwen3-moe", "tp=2,ep=2,dp=3", "tp=2,dp=3", machine="h200-8,gpus=3")
FP8 = Case(
    "tiny-qwen3-moe-fp8", "tp=2,ep=2,dp=3", "tp=2,dp=3", dtypes=("fp8", "fp8"), block=(8, 8), machine="h200-8,gpus=3"
)
CARRYING = [STRADDLED, MOE, FP8]


def without_carriers(case: Case) -> Plan:
    """The plan before anybody carries: balanced for its hosts alone."""
    topology = case.plan().topology
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_plan, "carriers_for", lambda plan: ())
        return located(case.new_plan(), topology)


def by_nic(plan: Plan) -> list[int]:
    return [int(nbytes) for nbytes in plan.loads.received[NIC]]


def test_all_nics_of_a_host_bring_in_about_as_much() -> None:
    alone, plan = without_carriers(STRADDLED), STRADDLED.plan()
    assert max(by_nic(alone)) > 1.4 * np.mean(by_nic(alone))
    assert max(by_nic(plan)) < 1.15 * np.mean(by_nic(plan)) and sum(by_nic(plan)) == sum(by_nic(alone))
    assert [each.rank for each in plan.carriers] == [1, 4] and plan.carrier_ranks.tolist() == [0, 2, 3, 5]
    assert all(len(each.turns) == TURNS for each in plan.carriers)


def test_a_rack_with_replicas_that_straddle_it_is_near_the_least_time() -> None:
    """DeepSeek-V3 on racks of 72: the second has one replica of tp=32, and three quarters of another."""
    case = Case("deepseek-v3", "tp=8,pp=8,ep=32,dp=4,layers=8+8+8+8+8+7+7+7", "tp=32,dp=4", machine="gb200-nvl72")  # fmt: skip
    without = busiest_link(without_carriers(case)) / least_time(case.plan()).seconds
    assert without > 1.7 and busiest_link(case.plan()) / least_time(case.plan()).seconds < 1.1
    assert [each.rank for each in case.plan().carriers] == [*range(96, 104)]


@pytest.mark.parametrize(
    "case",
    [
        replace(STRADDLED, train="tp=2,dp=2"),  # what leaves the trainer takes as long
        replace(STRADDLED, train="tp=2"),  # it relays
        replace(STRADDLED, machine="h200-8,gpus=4"),  # replicas fill hosts
        replace(STRADDLED, machine=""),
        replace(FP8, dtypes=("bf16", "fp8")),  # what is cast is one wave: all of it would have to be held
    ],
    ids=str,
)
def test_nobody_carries_where_it_does_not_help(case: Case) -> None:
    assert case.plan().carriers == () and prove(case.plan()).ok


def test_ranks_share_what_they_carry_where_they_have_little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("qwen3-30b-a3b", "tp=4,ep=8,dp=8", "tp=4,dp=3", machine="h200-8,gpus=6")
    alone, plan = without_carriers(case), case.plan()
    limit = int(plan.carried.sum(axis=0).max()) // 2
    monkeypatch.setattr(carriers, "_MOST", limit)
    less = located(case.new_plan(), plan.topology)
    assert less.carriers and prove(less).ok and max(less.carried.sum(axis=0)) < 1.2 * limit
    assert 1.1 * max(by_nic(plan)) < max(by_nic(less)) < 0.9 * max(by_nic(alone))


@pytest.mark.parametrize("case", CARRYING, ids=str)
def test_what_is_carried_is_what_schedules_say(case: Case) -> None:
    plan = case.plan()
    for rank in range(plan.gen.world):
        schedule = schedule_of(plan, "gen", rank)
        found = np.zeros(plan.waves, np.int64)
        for table in schedule.tables:
            rows = table.rows(np.isin(table.tensor, [*schedule.carried]))
            np.add.at(found, rows.wave, rows.nbytes)
        assert plan.carried[:, rank].tolist() == found.tolist()


@pytest.mark.parametrize("case", CARRYING, ids=str)
def test_every_element_arrives_and_the_proof_holds(case: Case) -> None:
    plan = case.plan()
    assert plan.carriers and prove(plan).ok and simulate.damage(plan) == []


def test_what_a_rank_carries_it_passes_on_in_the_same_wave() -> None:
    plan = MOE.plan()
    for rank in plan.carrier_ranks.tolist():
        receives, sends = schedule_of(plan, "gen", rank), relays_of(plan, rank)[0].sends
        landed, passed = (
            {
                (schedule.tensors[tensor].name, wave)
                for table in schedule.tables
                for tensor, wave in zip(table.tensor.tolist(), table.wave.tolist(), strict=True)
                if tensor in schedule.carried
            }
            for schedule in (receives, sends)
        )
        assert landed and landed == passed


def test_readers_find_at_a_carrier_what_it_holds_for_them() -> None:
    plan = MOE.plan()
    for each in plan.carriers:
        receives = relays_of(plan, each.rank)[0].receives
        assert receives.view is not None
        there = receives.view.other_end()
        for stage, table in zip(receives.tables, there.stages, strict=True):
            for peer in {*each.turns} - {each.rank}:
                sends = relays_of(plan, peer)[0].sends
                named = [sends.tensors[n].name for t in sends.tables for n in t.tensor[t.peer == each.rank]]
                assert [there.tensors[n].name for n in table.tensor[stage.peer == peer]] == named
                assert any(name.startswith("carried:") for name in named)


def test_the_plan_is_the_same_from_whichever_it_is_made_and_a_file_keeps_it(tmp_path: Path) -> None:
    plan = STRADDLED.plan()
    assert located(without_carriers(STRADDLED), None).digest == located(plan, None).digest
    assert located(located(plan, None), plan.topology).digest == plan.digest
    save_plan(plan, tmp_path / "plan.json")
    read = load_plan(tmp_path / "plan.json")
    assert read == plan and read.digest == plan.digest and prove(read).ok
    assert "carriers" in dump_plan(plan) and "carriers" not in dump_plan(without_carriers(STRADDLED))


def test_another_number_of_replicas_has_carriers_of_its_own() -> None:
    plan = STRADDLED.plan()
    assert plan.topology is not None
    fewer = with_replicas(plan, 2)
    assert fewer.carriers == ()
    assert located(fewer, plan.topology.with_gen(range(4))).carriers == ()  # on c part 0 twice, but d has one NIC
    assert located(with_replicas(fewer, 3), plan.topology).digest == plan.digest


def changed(plan: Plan, **fields: object) -> Plan:
    changed = replace(plan, **fields)  # type: ignore[arg-type]
    object.__setattr__(changed, "digest", digest_of(changed))
    return changed


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda plan: (*plan.carriers, plan.carriers[0]), "have carriers, some of them twice"),
        (lambda plan: (Carried(1, (1, 4)), plan.carriers[1]), "carriers of gen 1 are in other NVLink domains"),
    ],
    ids=["twice", "far"],
)
def test_the_proof_refuses_carriers_that_cannot_be(
    change: Callable[[Plan], tuple[Carried, ...]], expected: str
) -> None:
    (violation,) = prove(changed(STRADDLED.plan(), carriers=change(STRADDLED.plan()))).violations
    assert violation.rule == "paths" and expected in violation.message


def test_the_proof_refuses_carriers_without_known_places() -> None:
    (violation, *_) = prove(changed(STRADDLED.plan(), topology=None)).violations
    assert "only where it is known where they are" in violation.message


@pytest.mark.parametrize(
    "impossible",
    [Carried(6, (6, 0)), Carried(0, (0, -1)), Carried(0, ()), Carried(0, (1, 2)), Carried(0, (0, 1) * 500)],
    ids=str,
)
def test_a_file_with_impossible_carriers_is_no_plan(impossible: Carried) -> None:
    with pytest.raises(PlanFileError, match="carriers"):
        parse_plan(dump_plan(changed(STRADDLED.plan(), carriers=(impossible,))))


def test_a_file_whose_carriers_would_fill_memory_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_RECEIVERS", 11)
    with pytest.raises(PlanFileError, match="ranks carry for parts"):
        parse_plan(dump_plan(STRADDLED.plan()))


def test_no_model_has_a_tensor_of_a_carriers_name() -> None:
    text = dump_plan(STRADDLED.plan()).replace("model.norm.weight", "carried:model.norm.weight")
    document = json.loads(text)
    document["digest"] = hashlib.sha256(canonical(document["plan"]).encode()).hexdigest()
    with pytest.raises(PlanFileError, match="no model has a tensor carried:model"):
        parse_plan(json.dumps(document))


@pytest.mark.parametrize("seed", range(12))
def test_damaged_turns_are_refused_or_do_no_harm(seed: int) -> None:
    plan, draw = MOE.plan(), random.Random(seed)
    carriers = [*plan.carriers]
    number = draw.randrange(len(carriers))
    turns, rank = [*carriers[number].turns], draw.randrange(plan.gen.world)
    match seed % 4:
        case 0:
            turns[draw.randrange(TURNS)] = rank
        case 1:
            turns.pop(draw.randrange(TURNS))
        case 2:
            turns.insert(0, rank)
    carriers[number] = Carried(rank if seed % 4 == 3 else carriers[number].rank, tuple(turns))
    damaged = changed(plan, carriers=tuple(carriers))
    assert not prove(damaged).ok or simulate.damage(damaged) == []


def test_ranks_that_are_not_there_are_refused_by_name() -> None:
    plan = MOE.plan()
    grids = [grid.copy() for grid in plan.rank_grids]
    grids[plan.transfer_groups[0].dst][0, 0] = 77
    rules = {violation.rule for violation in prove(changed(plan, rank_grids=tuple(grids))).violations}
    assert "holders" in rules
