"""Rails: bytes leave and enter by NICs of one number where NICs still carry as much, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.plans import Case

from mcore_reshard.planner.plan.balance import Row, Rows, Turns
from mcore_reshard.planner.plan.loads import busy_seconds, rail_bytes
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.paths import NIC
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.rails import Rails, exchanged, rows_on_rails, rows_that_exchange
from mcore_reshard.simulate.simulate import simulate

TWO_HOSTS = "h200-8,gpus=2"  # the trainer on one, the engine on the other: rank r of each is on rail r
HALVES = Case("tiny-llama", "tp=1,dp=2", "tp=2", machine=TWO_HOSTS)
PARTS = Case("tiny-llama", "tp=2", "tp=1,dp=2", machine=TWO_HOSTS)
REPLICAS = Case("tiny-llama", "tp=1,dp=2", "tp=1,dp=2", machine=TWO_HOSTS)
ONE_END = Case("tiny-llama", "tp=1,dp=2", "tp=1", machine=TWO_HOSTS)
OWN_RAILS = Case("tiny-qwen3", "tp=2,dp=4", "tp=1,dp=8", machine="h200-8,gpus=4")


def pairs_of_layers(plan: Plan) -> set[tuple[int, int]]:
    """Which training ranks send matrices of layers to which generation ranks, by NIC. There are four layers."""
    assert plan.topology is not None
    pairs: set[tuple[int, int]] = set()
    for transfers in plan.transfer_groups:
        group = plan.groups[transfers.group]
        if group.layers and len(group.shape) == 2:
            hop, pattern = plan.first_hop(transfers, np.arange(transfers.members)), plan.patterns[transfers.pattern]
            src = plan.rank_grids[transfers.src][pattern.parts["train"][hop.overlap], hop.src]
            dst = plan.rank_grids[transfers.dst][pattern.parts["gen"][hop.overlap], hop.dst]
            pairs.update(zip(src[:, hop.link == NIC].flat, dst[:, hop.link == NIC].flat, strict=True))
    return pairs


@pytest.mark.parametrize("case", [HALVES, PARTS, REPLICAS], ids=str)
def test_where_both_rails_are_possible_each_matrix_takes_its_own(case: Case) -> None:
    """Both training ranks hold what an engine rank wants, or both engine ranks can pass on what a training rank holds."""
    assert pairs_of_layers(case.plan()) == {(0, 0), (1, 1)}
    assert case.plan().loads.sent[NIC].min() > 0.9 * case.plan().loads.sent[NIC].max()


def test_balance_wins_where_one_nic_gets_everything() -> None:
    """The source on its rail could send all. Then the other NIC would idle, and the refit would take twice as long."""
    plan = ONE_END.plan()
    assert pairs_of_layers(plan) == {(0, 0), (1, 0)}
    assert plan.loads.sent[NIC].min() > 0.9 * plan.loads.sent[NIC].max()
    rails = rail_bytes(plan)
    assert rails.on_rail == plan.loads.sent[NIC][0]
    assert 0.45 * rails.nbytes < rails.on_rail < 0.55 * rails.nbytes


def test_replicas_of_a_host_get_the_part_of_their_rail() -> None:
    """Two hosts of four GPUs on each side. Even training ranks have part 0, odd ones part 1; matrices go to the same rails."""
    plan = OWN_RAILS.plan()
    pairs = pairs_of_layers(plan)
    assert plan.later_hops == ("share",) and all(src % 4 == dst % 4 for src, dst in pairs)
    assert {dst for _, dst in pairs} == {src for src, _ in pairs} == {*range(8)}


@pytest.mark.parametrize("case", [HALVES, PARTS, REPLICAS, ONE_END, OWN_RAILS], ids=str)
def test_rails_change_no_load(case: Case) -> None:
    plan = case.plan()
    sent = [sum(int(t.nbytes.sum()) for t in schedule_of(plan, "train", r).tables) for r in range(plan.train.world)]
    assert sent == plan.send_bytes.tolist()


@pytest.mark.parametrize("case", [HALVES, ONE_END, OWN_RAILS], ids=str)
def test_a_simulation_sees_the_same_rails(case: Case) -> None:
    plan = case.plan()
    assert plan.topology is not None
    outcome, rails = simulate(plan, plan.topology), rail_bytes(plan)
    assert (outcome.route_bytes["NIC"], outcome.on_rail_bytes) == (rails.nbytes, rails.on_rail)
    sending = [link.seconds for link in outcome.links if link.kind == "NIC out"]
    assert rails.left.max() / plan.topology.machine.nic == pytest.approx(max(sending), rel=1e-12)


def test_ranks_that_exchange_nothing_by_nic_lend_none() -> None:
    """The second host has one training rank, which sends to its own host alone."""
    hosts = "train=a*3+b*1,gen=a*3+b*3"
    plan = Case("tiny-qwen3", "tp=2,dp=2", "tp=1,dp=6", machine="h200-8,gpus=3", hosts=hosts).plan()
    assert plan.topology is not None
    sending = [link.nbytes for link in simulate(plan, plan.topology).links if link.kind == "NIC out"]
    assert rail_bytes(plan).left.max() == max(sending)


def test_bytes_that_replicas_pass_on_between_hosts_count() -> None:
    plan = Case("tiny-qwen3", "tp=2", "tp=1,dp=6", machine=TWO_HOSTS).plan()
    assert plan.later_hops == ("relay", "share")
    rails = rail_bytes(plan)
    assert rails.nbytes == plan.loads.received[NIC].sum()
    assert 0 < rails.on_rail < rails.nbytes


def test_within_a_host_and_where_nobody_knows_the_hosts_rails_are_no_matter() -> None:
    for case in (replace(HALVES, machine=""), replace(HALVES, hosts="train=a*2,gen=a*2@2", machine="h200-8")):
        plan = case.plan()
        for transfers in plan.transfer_groups:
            member = np.arange(transfers.members)
            firsts = transfers.first_src_replica, transfers.first_dst_replica
            hop, turns = plan.first_hop(transfers, member), plan.paths(transfers).first_hop(*firsts, member)
            assert hop.src.tolist() == turns.src.tolist()


# --- the tables by hand


def order(sources: list[int], ends: list[int], nbytes: list[int], row: list[int] | None = None) -> list[int]:
    """The sources after the exchange; a source's number is its rail."""
    src = np.array(sources)
    rows = np.zeros(len(src), np.int64) if row is None else np.array(row)
    return exchanged(src, src, np.array(ends), rows, np.array(nbytes)).tolist()


def test_the_example_of_an_exchange() -> None:
    assert order([0, 0, 1, 1], [0, 1, 0, 1], [8] * 4) == [0, 1, 0, 1]


def test_only_legs_of_as_many_bytes_and_of_one_row_exchange() -> None:
    assert order([0, 1], [1, 0], [8, 8]) == [1, 0]
    assert order([0, 1], [1, 0], [8, 4]) == [0, 1]
    assert order([0, 1], [1, 0], [8, 8], row=[0, 1]) == [0, 1]


def test_the_least_time_of_nics_is_that_of_the_better_way_to_leave() -> None:
    """Half of the trainer's GPUs have what other hosts want. By rails, the NICs of all send it."""
    shared = Case("qwen3-30b-a3b", "tp=4,pp=2,dp=4,ep=2", "tp=2,dp=16,ep=32", machine="h200-8,shared").plan()
    assert shared.topology is not None
    least = max(busy_seconds(shared, rail_bytes(shared)))
    assert least < simulate(shared, shared.topology).seconds < 0.7 * max(busy_seconds(shared))


def test_those_that_find_no_rail_keep_their_order() -> None:
    assert order([0, 2, 3, 4], [1, 1, 0, 1], [8] * 4) == [2, 3, 0, 4]


def test_ends_that_meet_their_source_are_spread_over_those_of_their_rail() -> None:
    """Two sources of rail 0 and two of rail 9, for four ends on rail 0."""
    assert order([0, 0, 9, 9], [0, 0, 0, 0], [8] * 4) == [9, 0, 9, 0]


def test_each_part_enters_at_its_rails_if_all_nics_get_as_much() -> None:
    rows, on_rail = Rows(), np.array([[[1, 0, 1, 0]], [[0, 1, 0, 1]]], bool)
    row = rows.number_of(0, (0, 1, 2, 3), NIC)

    def taken(*nbytes: int) -> list[int]:
        numbers = np.full(len(nbytes), row)
        return rows_on_rails(rows, numbers, np.arange(len(nbytes)), np.array(nbytes), on_rail).tolist()

    assert [rows[number] for number in taken(6, 6)] == [
        Row(0, (0, 2), NIC, rows[row].replicas),
        Row(0, (1, 3), NIC, rows[row].replicas),
    ]
    assert taken(6, 5) == [row, row], "NICs 0 and 2 would get more"
    assert taken(6) == [row], "NICs 1 and 3 would get nothing"


@pytest.mark.parametrize(("rails_of_ends", "exchanges"), [([0, 1], True), ([0, 2], False), ([1, 1], False)])
def test_sources_exchange_where_their_rails_are_those_of_the_ends(rails_of_ends: list[int], exchanges: bool) -> None:
    """Two sources of one part, on rails 0 and 1; one end each of two parts."""
    pulls = Turns.of([Row(0, (0, 1), NIC)], np.array([0, 0]))
    landings = Turns.of([Row(0, (0,), NIC), Row(1, (0,), NIC)], np.array([0, 1]))
    rails = Rails(np.array([[0, 1]]), np.array(rails_of_ends)[:, None], 4)
    assert rows_that_exchange(pulls, landings, np.array([8, 8]), rails, NIC).tolist() == [exchanges]
