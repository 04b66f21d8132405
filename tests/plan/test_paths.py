"""Paths over known hosts: what is near comes from there, each byte enters a host once, and every element arrives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import simulate
from helpers.plans import Case

from mcore_reshard.planner.plan.locate import located
from mcore_reshard.planner.plan.make_schedule import relays_of, schedule_of
from mcore_reshard.planner.plan.paths import NIC, NVLINK, OWN_GPU, Paths
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.plan_file import PlanFileError, dump_plan, load_plan, parse_plan
from mcore_reshard.planner.plan.replicas import with_replicas
from mcore_reshard.planner.proof.paths import path_fault
from mcore_reshard.planner.proof.prove import prove
from mcore_reshard.planner.topology.topology import parse_topology

APART = Case("tiny-qwen3", "tp=2,dp=2", "tp=1,dp=4", machine="h200-8,gpus=2")  # 2 hosts, then 2 hosts
ONE_HOST_TO_THREE = Case("tiny-qwen3", "tp=2", "tp=1,dp=6", machine="h200-8,gpus=2")
SHARED = Case("tiny-qwen3-moe", "tp=2,ep=2,dp=2", "tp=2,dp=2", machine="h200-8,gpus=2,shared")
HALF_SHARED = Case(  # the engine's second replica is on the trainer's host, on other GPUs
    "tiny-qwen3-moe", "tp=2,pp=2", "tp=2,dp=3", machine="h200-8", hosts="train=a*4,gen=b*2+a*2@4+c*2"
)
UNEVEN = Case("tiny-qwen3", "tp=2", "tp=1,dp=5", machine="h200-8", hosts="train=a*2,gen=b*3+c*2")
EXPERTS = Case("tiny-deepseek-v3", "tp=2,pp=2,ep=2,dp=2", "tp=2,dp=2,ep=4", machine="h200-8,gpus=4")
FP8 = Case(
    "tiny-qwen3-moe", "tp=1,ep=2,dp=2", "tp=1,dp=4", dtypes=("bf16", "fp8"), block=(8, 8), machine="h200-8,gpus=2"
)
BESIDE = Case(  # the trainer serves a host of its own and one that it shares with two of the engine's ranks
    "tiny-qwen3", "tp=1", "tp=1,dp=4", machine="h200-8", hosts="train=a*1,gen=a*2@1+b*2"
)
OWN_RAILS = Case(
    "tiny-qwen3", "tp=2,dp=2", "tp=1,dp=8", machine="h200-8,gpus=4"
)  # each part enters at two of four NICs
CASES = [APART, BESIDE, OWN_RAILS, ONE_HOST_TO_THREE, SHARED, HALF_SHARED, UNEVEN, EXPERTS, FP8]


def unique_bytes_into(plan: Plan, domain: int) -> int:
    """Bytes of the distinct (parameter, region) that ranks of a domain need and none of its training ranks holds."""
    assert plan.topology is not None
    gen, train = plan.topology.domains("gen"), plan.topology.domains("train")
    needed: dict[tuple[object, ...], int] = {}
    for transfers in plan.transfer_groups:
        pattern = plan.patterns[transfers.pattern]
        for number, overlap in enumerate(pattern.overlaps):
            holders = plan.rank_grids[transfers.src][overlap.src]
            readers = plan.rank_grids[transfers.dst][overlap.dst]
            if (gen[readers] == domain).any() and not (train[holders] == domain).any():
                for member in range(transfers.members):
                    key = transfers.group, transfers.layers, transfers.experts, member, overlap.dst, overlap.region
                    needed[key] = int(pattern.overlap_bytes[number])
    return sum(needed.values())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_element_arrives_over_all_hops(case: Case) -> None:
    plan = case.plan()
    assert prove(plan).ok
    assert simulate.damage(plan) == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loads_are_those_of_the_ranks_schedules(case: Case) -> None:
    plan = case.plan()
    sent = [sum(int(t.nbytes.sum()) for t in schedule_of(plan, "train", r).tables) for r in range(plan.train.world)]
    assert sent == plan.send_bytes.tolist()
    for rank in range(plan.gen.world):
        relays = relays_of(plan, rank)
        got = sum(int(table.nbytes.sum()) for table in schedule_of(plan, "gen", rank).tables)
        got += sum(int(table.nbytes.sum()) for relay in relays for table in relay.receives.tables)
        passed = sum(int(table.nbytes.sum()) for relay in relays for table in relay.sends.tables)
        assert (got, passed) == (plan.recv_bytes[rank], plan.relay_bytes[rank])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_links_are_those_between_the_ranks_places(case: Case) -> None:
    plan = case.plan()
    topology = plan.topology
    assert topology is not None
    received = np.zeros_like(plan.loads.received)
    for rank in range(plan.gen.world):
        hops = [("train", schedule_of(plan, "gen", rank)), *(("gen", r.receives) for r in relays_of(plan, rank))]
        for world, schedule in hops:
            for table in schedule.tables:
                for peer, nbytes in zip(table.peer.tolist(), table.nbytes.tolist(), strict=True):
                    own_gpu = topology.gpus(world)[peer] == topology.gpus("gen")[rank]  # type: ignore[arg-type]
                    near = topology.domains(world)[peer] == topology.domains("gen")[rank]  # type: ignore[arg-type]
                    received[OWN_GPU if own_gpu else NVLINK if near else NIC, rank] += nbytes
    assert received.tolist() == plan.loads.received.tolist()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_byte_enters_a_host_once(case: Case) -> None:
    plan = case.plan()
    assert plan.topology is not None
    domains = plan.topology.domains("gen")
    for domain in np.unique(domains).tolist():
        entered = int(plan.loads.received[NIC][domains == domain].sum())
        assert entered == unique_bytes_into(plan, domain), f"host {domain}"


def test_a_replica_reads_its_own_gpu_where_that_has_the_bytes() -> None:
    plan = Case("tiny-llama", "tp=2,dp=2", "tp=2,dp=2", machine="h200-8,gpus=2,shared").plan()
    assert not plan.later_hops
    assert plan.loads.received[OWN_GPU].sum() == plan.recv_bytes.sum()


def test_a_replica_on_the_trainers_host_gets_nothing_over_the_network() -> None:
    plan = HALF_SHARED.plan()
    assert plan.loads.received[NIC].tolist()[2:4] == [0, 0]
    assert plan.loads.received[NIC].min(initial=1, where=np.array([1, 1, 0, 0, 1, 1], bool)) > 0


def test_where_the_trainer_is_the_bottleneck_bytes_leave_it_once_and_enter_each_host_once() -> None:
    plan = ONE_HOST_TO_THREE.plan()
    assert plan.later_hops == ("relay", "share")
    model = sum(t.members * int(plan.patterns[t.pattern].overlap_bytes.sum()) for t in plan.transfer_groups)
    assert plan.send_bytes.sum() == model
    assert plan.loads.received[NIC].sum() == 3 * model
    assert plan.loads.received[NVLINK].sum() == 3 * model  # each host has two replicas


def test_on_one_host_replicas_pass_on_as_they_do_where_nobody_knows_the_hosts() -> None:
    unknown = Case("tiny-qwen3", "tp=1", "tp=1,dp=3")
    known = replace(unknown, machine="h200-8", hosts="train=a*1,gen=a*3@1")
    assert (unknown.plan().later_hops, known.plan().later_hops) == (("relay",), ("share",))
    for rank in range(3):
        for told in zip(*(list(all_rows(case.plan(), rank)) for case in (unknown, known)), strict=True):
            assert told[0] == told[1]


def all_rows(plan: Plan, rank: int) -> Iterator[list[list[int]]]:
    """What a generation rank gets from the trainer, gets from replicas, and passes on."""
    (relay,) = relays_of(plan, rank)
    for schedule in (schedule_of(plan, "gen", rank), relay.receives, relay.sends):
        for table in schedule.tables:
            yield [column.tolist() for column in (table.peer, table.tensor, table.offset, table.nbytes)]


def test_one_hop_more_is_not_taken_where_it_does_not_pay() -> None:
    assert APART.plan().later_hops == ("share",)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_plan_is_the_same_from_whichever_plan_it_is_located(case: Case) -> None:
    plan = case.plan()
    assert located(case.new_plan(), plan.topology).digest == plan.digest
    assert located(plan, None).digest == case.new_plan().digest
    elsewhere = located(plan, parse_topology("h100-8,gpus=3", plan.train.world, plan.gen.world))
    assert located(elsewhere, plan.topology).digest == plan.digest


def test_a_plan_file_keeps_where_ranks_live(tmp_path: Path) -> None:
    plan = HALF_SHARED.plan()
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again == plan and again.topology == plan.topology and again.digest == plan.digest


def test_a_topology_of_other_ranks_is_refused() -> None:
    plan = APART.new_plan()
    with pytest.raises(ValueError, match="its topology has 4 training and 3 generation ranks, its meshes 4 and 4"):
        located(plan, parse_topology("h200-8", 4, 3))


@pytest.mark.parametrize(
    ("old", "new"), [('"gpus":2', '"gpus":0'), ('"nic":50000000000', '"nic":-1'), ('"hosts":["host0",', '"hosts":[')]
)
def test_a_file_with_a_topology_that_cannot_be_is_refused(old: str, new: str) -> None:
    import hashlib
    import json

    from mcore_reshard.planner.layout.record_forms import canonical

    text = dump_plan(APART.plan())
    assert old in text
    document = json.loads(text.replace(old, new))
    document["digest"] = hashlib.sha256(canonical(document["plan"]).encode()).hexdigest()
    with pytest.raises(PlanFileError, match="damaged"):
        parse_plan(json.dumps(document))


def test_the_plan_for_more_replicas_forgets_where_ranks_live() -> None:
    plan = Case("tiny-qwen3", "tp=2", "tp=1,dp=2", machine="h200-8").plan()
    assert with_replicas(plan, 3).topology is None


@pytest.mark.parametrize(
    "damage", ["a mate is left out", "a mate is told twice", "it is passed on by one that lacks it"]
)
def test_a_broken_path_is_found(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ONE_HOST_TO_THREE.new_plan()
    plan = located(plan, ONE_HOST_TO_THREE.plan().topology)
    transfers = plan.transfer_groups[0]
    paths = plan.paths(transfers)
    assert path_fault(paths, transfers.members, 0) == ""
    mates = paths._mates
    if damage == "a mate is left out":
        vars(paths)["_mates"] = tuple(column[2:] for column in mates)  # of one host: nobody gets it there
        expected = "0 times, not once"
    elif damage == "a mate is told twice":
        vars(paths)["_mates"] = tuple(np.append(column, column[-2:]) for column in mates)
        expected = "2 times, not once"
    else:
        later_hops = Paths.later_hops
        monkeypatch.setattr(Paths, "later_hops", lambda self, first, member: later_hops(self, first + 1, member))
        expected = "which it does not have yet"
    assert expected in path_fault(paths, transfers.members, 0)
