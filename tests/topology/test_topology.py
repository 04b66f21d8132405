"""Topologies as the command line gives them, and as plan files keep them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_reshard.planner.topology.topology import (
    GB,
    MACHINES,
    Place,
    TopologyError,
    parse_topology,
    topology_violations,
)


def test_ranks_fill_hosts_in_order_and_the_engine_has_hosts_of_its_own() -> None:
    topology = parse_topology("h200-8", 12, 9)
    assert topology.host_of("train").tolist() == [0] * 8 + [1] * 4
    assert topology.host_of("gen").tolist() == [2] * 8 + [3]
    assert topology.hosts == ("host0", "host1", "host2", "host3")
    assert topology.gpus("gen").tolist() == list(range(16, 25))
    assert topology.rails("gen").tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0]


def test_a_shared_engine_rank_lives_on_the_gpu_of_its_training_rank() -> None:
    topology = parse_topology("h100-8,shared,nic=25,gpus=4", 8, 6)
    assert topology.gen == topology.train[:6]
    assert topology.machine.nic == 25 * GB
    assert topology.train[5] == Place(1, 1)


def test_a_rack_of_hosts_is_one_domain_and_trainer_and_engine_do_not_share_one_unless_told() -> None:
    topology = parse_topology("gb200-nvl72", 80, 72)
    assert set(topology.domains("train").tolist()) == {0, 1}
    assert set(topology.domains("gen").tolist()) == {2}


def test_hosts_say_where_ranks_live() -> None:
    topology = parse_topology("h200-8", 12, 4, "train=a*8+b*4,gen=b*4@4")
    assert topology.hosts == ("a", "b")
    assert topology.host_of("gen").tolist() == [1] * 4
    assert [place.gpu for place in topology.gen] == [4, 5, 6, 7]
    again = parse_topology("h200-8", 4, 4, "train=a*2+a*2,gen=a*4")  # the engine on the same GPUs
    assert again.train == again.gen


@pytest.mark.parametrize(
    ("text", "hosts", "reasons"),
    [
        ("h3", "", ["no machine 'h3'", "h200-8"]),
        ("h200-8,fast,nic=0,gpus=2.5", "", ["'fast'", "nic must be positive", "'gpus=2.5'"]),
        ("h200-8,shared", "train=a*4,gen=a*4", ["leave out 'shared'"]),
        ("h200-8", "train=a*9,gen=b*4,gen=c*4", ["'a*9': a host of h200-8 has 8 GPUs", "given once"]),
        ("h200-8", "train=a*3,gen=a*-1", ["'a*-1'", "hosts have 3 train ranks, the mesh has 4"]),
        (
            "h200-8",
            "train=a*8,gen=b*9",
            ["'b*9': a host", "have 8 train ranks", "hosts have 9 gen ranks, the mesh has 4"],
        ),
        ("h200-8", "train=a*4,gen=a*4+b*0", ["'b*0' is not HOST*RANKS"]),
        (
            "h200-8,nic=-50,nvlink=nan,nic=1000000",
            "",
            ["'nic=-50': nic is GB/s, more than 0", "'nvlink=nan'", "'nic=1000000'"],
        ),
        ("h200-8,nic=25,nic=50", "", ["nic is given twice"]),
        ("h200-8", "train=a*1@0+a*3@0,gen=a*4", ["puts two ranks on GPU 0 of host a"]),
        ("h3,fast", "train=a*x,gen=b*4", ["no machine 'h3'", "'fast'", "'a*x'"]),
        ("h200-8", "train=a*3,gen=a*1@7", ["hosts have 3 train ranks, the mesh has 4", "hosts have 1 gen ranks"]),
    ],
)
def test_all_that_is_wrong_is_said_at_once(text: str, hosts: str, reasons: list[str]) -> None:
    with pytest.raises(TopologyError) as raised:
        parse_topology(text, 4, 4, hosts)
    assert all(reason in str(raised.value) for reason in reasons), raised.value


def test_what_is_wrong_with_any_number_of_ranks_is_known_without_it() -> None:
    assert topology_violations("h200-8") == topology_violations("h200-8", "train=a*8,gen=b*2") == []
    (machine, ranks) = topology_violations("h3", "train=a*8,gen=b*")
    assert "no machine 'h3'" in machine and "'b*'" in ranks
    assert len(topology_violations("h200-8,gpus=0,shared", "train=a*9,gen=b*1")) == 2
    for text, hosts in (("h200-8,gpus=16,nic=0", "train=a*16,gen=b*16"), ("h3", "train=a*9,gen=b*4")):
        with pytest.raises(TopologyError) as raised:  # nothing is said of hosts whose GPUs nobody knows
            parse_topology(text, 4, 4, hosts)
        assert len(raised.value.violations) == 1
    assert topology_violations("h3", "train=" + "a*999999+" * 9_000 + "a*1,gen=b*1")[0].startswith(
        "there is no machine"
    )


def test_more_engine_ranks_than_gpus_cannot_share() -> None:
    with pytest.raises(TopologyError, match="8 generation ranks cannot share the GPUs of 4"):
        parse_topology("h200-8,shared", 4, 8)


def test_a_machine_without_bandwidth_is_refused() -> None:
    with pytest.raises(TopologyError, match="nic must be positive, not 0"):
        replace(MACHINES["h200-8"], nic=0)


def test_every_machine_is_named_by_its_key() -> None:
    assert all(name == machine.name for name, machine in MACHINES.items())
