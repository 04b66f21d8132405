"""The ranks of a session say where they are. On several hosts, and where both sides share a GPU, they plan for these places.

On one host without shared GPUs they refit by the plan as it is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import planned_refits
from helpers.gpu import needs_gpus
from helpers.plans import TWO_LAYERS, Case
from helpers.ranks import run_ranks, values

from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.plan.make_schedule import RankView
from mcore_reshard.planner.plan.paths import NIC, OWN_GPU
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.topology.topology import MACHINES, Place, Topology
from mcore_reshard.session import member, places
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint
from mcore_reshard.session.places import own_place, topology_of

REPLICAS = Case("tiny-llama", "tp=2", "tp=1,dp=4", changes=TWO_LAYERS)
COLOCATED = Case("tiny-qwen3-moe", "tp=2,ep=2,dp=2", "tp=2,dp=2")


def refit(
    number: int, address: str, case: Case, hosts: str, leaves: int = -1, gpus: str = ""
) -> list[tuple[int, list[str], int, Any]]:
    """Rank `number`, training ranks first, refits twice as if it were on the host `hosts[number]`, on GPU `gpus[number]`.

    Generation rank `leaves` goes after the first. Returns of each refit the hosts in the plan, its later hops, bytes into
    NICs, and how many elements are wrong.
    """
    places.host = lambda: hosts[number]  # of this process alone
    if gpus:
        member.own_place = lambda *_: f"{hosts[number]}/{gpus[number]}"
    options = Options(transport="gloo", timeout_s=60.0, bucket_bytes=8192)
    told = []
    for endpoint, _, wrong in planned_refits.refits_of_plan(number, address, case, options, leaves):
        used = plan_of(endpoint)
        known = 0 if used.topology is None else len(used.topology.hosts)
        told.append((known, [*used.later_hops], int(used.loads.received[NIC].sum()), wrong))
    return told


def plan_of(endpoint: TrainEndpoint | GenerationEndpoint) -> Plan:
    assert endpoint._connection is not None
    view = endpoint._connection.schedule.view
    assert isinstance(view, RankView)
    return view.plan


def model_bytes(case: Case) -> int:
    return case.plan().bulk_bytes


def test_replicas_of_one_host_pass_on_what_entered_it_once() -> None:
    """The trainer's host sends each byte to one of the engine's hosts, and that one to the other."""
    told = values(run_ranks(6, refit, REPLICAS, "aabbcc", timeout_s=120.0))
    assert told == [[(3, ["relay", "share"], 2 * model_bytes(REPLICAS), {})] * 2] * 6


def test_on_one_host_the_plan_stays_as_it_is() -> None:
    told = values(run_ranks(6, refit, REPLICAS, "aaaaaa", timeout_s=120.0))
    assert told == [[(0, [*REPLICAS.plan().later_hops], told[0][0][2], {})] * 2] * 6


def own_gpu_bytes(number: int, address: str, case: Case, gpus: str) -> tuple[int, int, str]:
    """What all ranks take from their own GPUs, what they take in all, and the digest; each rank is on host a."""
    used: list[Plan] = []
    seen = plan_of

    def keep(endpoint: Any) -> Plan:
        used.append(seen(endpoint))
        return used[-1]

    globals()["plan_of"] = keep
    told = refit(number, address, case, "a" * len(gpus), gpus=gpus)
    assert all(wrong == {} for *_, wrong in told)
    loads = used[-1].loads
    return int(loads.received[OWN_GPU].sum()), int(loads.received.sum()), used[-1].digest


SHARED = Case("tiny-llama", "tp=2,dp=2", "tp=2,dp=2")


def test_on_one_host_all_that_the_own_gpu_has_comes_from_there() -> None:
    told = values(run_ranks(8, own_gpu_bytes, SHARED, "01230123", timeout_s=120.0))
    own, everything, digest = told[0]
    assert own == everything == SHARED.plan().recv_bytes.sum()
    assert told == [(own, everything, digest)] * 8 and digest != SHARED.plan().digest


def test_on_one_host_without_a_shared_gpu_the_digest_is_that_of_the_plan() -> None:
    told = values(run_ranks(8, own_gpu_bytes, SHARED, "01234567", timeout_s=120.0))
    assert {digest for *_, digest in told} == {SHARED.plan().digest}


def test_what_the_own_host_has_does_not_come_from_another() -> None:
    told = values(run_ranks(8, refit, COLOCATED, "aabbaabb", timeout_s=120.0))
    anywhere = COLOCATED.plan().recv_bytes.sum()
    assert [[wrong for *_, wrong in each] for each in told] == [[{}, {}]] * 8
    assert {(hosts, nbytes) for each in told for hosts, _, nbytes, _ in each} == {(2, told[0][0][2])}
    assert told[0][0][2] < 0.5 * anywhere


def test_a_replica_that_leaves_takes_its_host_along() -> None:
    told = values(run_ranks(6, refit, REPLICAS, "aabbcd", 3, timeout_s=120.0))
    sizes = [[(hosts, nbytes) for hosts, _, nbytes, _ in each] for each in told]
    three, four = 2 * model_bytes(REPLICAS), 3 * model_bytes(REPLICAS)
    assert sizes == [[(4, four), (3, three)]] * 5 + [[(4, four)]]
    assert all(wrong == {} for each in told for *_, wrong in each)


def carried(number: int, address: str, case: Case, hosts: str) -> list[tuple[list[int], Any]]:
    """Of each refit, the ranks that carry for others, and how many elements are wrong."""
    places.host = lambda: hosts[number]  # of this process alone
    options = Options(transport="gloo", timeout_s=60.0, bucket_bytes=8192)
    return [
        (plan_of(endpoint).carrier_ranks.tolist(), wrong)
        for endpoint, _, wrong in planned_refits.refits_of_plan(number, address, case, options)
    ]


def test_ranks_that_say_where_they_are_carry_for_each_other() -> None:
    """Replicas of two ranks on hosts of three: host d has part 0 twice, host e part 1."""
    told = values(
        run_ranks(14, carried, Case("tiny-llama", "tp=2,dp=4", "tp=2,dp=3"), "aaaabbbbdddeee", timeout_s=120.0)
    )
    assert told == [[([0, 2, 3, 5], {})] * 2] * 14


def test_places_become_a_topology() -> None:
    topology = topology_of(["a/0", "a/1", "b/7", "b/7", "b/3"], 2)
    assert topology is not None
    assert topology.hosts == ("a", "b")
    assert topology.train == (Place(0, 0), Place(0, 1))
    assert topology.gen == (Place(1, 0), Place(1, 0), Place(1, 1))
    assert topology.machine.gpus == 2 and topology.machine.nvlink == MACHINES["h100-8"].nvlink


def test_a_gpu_has_the_number_that_its_ranks_say_and_else_that_in_which_it_comes() -> None:
    """By it NCCL knows rails. Containers that see one GPU each all say 0, and a rank may not know."""

    def numbers(*said: str) -> list[int]:
        topology = topology_of(["other/x", *said], 1)
        assert topology is not None
        return [place.gpu for place in topology.gen]

    assert numbers("a/u#7", "a/v#4", "a/u#7") == [7, 4, 7]
    assert numbers("a/u#0", "a/v#0") == numbers("a/u#3", "a/u#5", "a/v#7")[1:] == numbers("a/u", "a/v") == [0, 1]
    assert numbers("a/u#7", "a/v", "a/w#0", "a/x") == [7, 1, 0, 2]
    assert numbers("a/u#7", "b/v#0", "b/w#0") == [7, 0, 1]  # host by host
    topology = topology_of(["a/u#7", "b/v#3"], 1)
    assert topology is not None and topology.machine.gpus == 8


def test_links_are_those_that_the_plan_was_made_for() -> None:
    rack = MACHINES["gb200-nvl72"]
    planned = Topology(rack, ("x",), (Place(0, 0),), (Place(0, 1),))
    topology = topology_of(["a/0", "b/0"], 1, planned)
    assert topology is not None and topology.machine.nvlink == rack.nvlink
    assert topology.domains("train") != topology.domains("gen")


def test_a_gpu_with_ranks_of_both_sides_makes_a_topology_of_one_host() -> None:
    topology = topology_of(["a/0", "a/1", "a/1"], 2)
    assert topology is not None and topology.gen == (Place(0, 1),)
    assert topology_of(["a/0", "a/0", "a/1"], 2) is None  # both of the trainer


@pytest.mark.parametrize("said", [["a/0", "a/1"], ["a/0", ""], []], ids=["one host", "one is silent", "nobody"])
def test_without_several_hosts_or_a_shared_gpu_there_is_none(said: list[str]) -> None:
    assert topology_of(said, 1) is None


def test_ranks_without_gpus_have_places_of_their_own_on_one_host() -> None:
    first, second = own_place("gen:0", None), own_place("gen:1", torch.device("cpu"))
    assert first != second and first.partition("/")[0] == second.partition("/")[0]


@pytest.mark.gpu
@needs_gpus(1)
def test_ranks_of_one_gpu_have_one_place() -> None:
    cuda = torch.device("cuda", 0)
    assert own_place("gen:0", cuda) == own_place("train:0", cuda)
    numbers = [
        own_place("gen:0", torch.device("cuda", gpu)).rpartition("#")[2] for gpu in range(torch.cuda.device_count())
    ]
    assert sorted(map(int, numbers)) == [*range(len(numbers))]  # of a machine of which all GPUs are visible
