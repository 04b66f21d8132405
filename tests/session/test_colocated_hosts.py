"""Whole sessions over `auto` on hosts whose GPUs have ranks of both sides, imitated as helpers/colocated.py says."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import planned_refits
from helpers.colocated import be_at, places_of, take_for_auto
from helpers.plans import Case
from helpers.ranks import Outcome, run_ranks, values
from helpers.ways import rounds_stand_in, stand_in

from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.transports.nccl.shared_gpus import SharedGpus
from mcore_reshard.kernels.transports.peer_access import UNREACHABLE_VARIABLE

FP8: dict[str, Any] = {"dtypes": ("bf16", "fp8"), "block": (8, 16)}
ONE = "h200-8,gpus=1"


def refit(number: int, address: str, case: Case, knows: bool = True) -> tuple[set[str], dict[str, int]]:
    """Rank `number` refits twice, at its place in the case's topology. Unless all know, NCCL is used as if no GPU was shared."""
    topology = case.plan().topology
    assert topology is not None
    be_at(*places_of(topology)[number])
    take_for_auto(stand_in("near"), rounds_stand_in("far"))
    if not knows:
        SharedGpus.is_needed = lambda *_: False  # type: ignore[method-assign]  # of this process alone
    return planned_refits.refit(number, address, case, "cpu")


CASES = {
    "2 hosts, pipelined": Case("tiny-llama", "pp=2", "dp=2", machine=ONE, hosts="train=a*1+b*1,gen=a*1+b*1"),
    "2 hosts of 2 GPUs, experts": Case("tiny-qwen3-moe", "tp=2,ep=2,pp=2", "tp=2,dp=2", machine="h200-8,gpus=2",
                                       hosts="train=a*2+b*2,gen=a*2+b*2"),
    "2 hosts, casts": Case("tiny-qwen3-moe", "ep=2,dp=2", "tp=2", machine=ONE, hosts="train=a*1+b*1,gen=a*1+b*1", **FP8),
    "3 hosts, replicas pass on": Case("tiny-llama", "pp=3,layers=1+2+1", "dp=3", machine=ONE,
                                      hosts="train=a*1+b*1+c*1,gen=a*1+b*1+c*1"),
    "3 hosts, replicas pass on, casts": Case("tiny-qwen3-moe", "pp=2", "dp=3", machine=ONE,
                                             hosts="train=a*1+b*1,gen=a*1+b*1+c*1", **FP8),
    "3 unequal hosts": Case("tiny-llama", "tp=2,pp=2", "tp=2,dp=2", machine="h200-8,gpus=2",
                            hosts="train=a*2+b*1+c*1,gen=a*1+b*2+c*1"),
    "engine ranks beside the trainer's": Case("tiny-llama", "tp=2", "tp=2,dp=2", machine="h200-8,gpus=4",
                                              hosts="train=a*2,gen=a*2@2+b*2@2"),
    "5 hosts": Case("tiny-llama", "pp=5,layers=1+1+1+1+0", "dp=5", machine=ONE,
                    hosts="train=a*1+b*1+c*1+d*1+e*1,gen=a*1+b*1+c*1+d*1+e*1"),
}  # fmt: skip


def run(case: Case, target: Any = refit, *args: Any) -> list[Outcome]:
    plan = case.plan()
    return run_ranks(plan.train.world + plan.gen.world, target, case, *args, timeout_s=240.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=name, marks=[pytest.mark.slow] * (name in ("5 hosts", "3 hosts, replicas pass on, casts"))
        )
        for name, case in CASES.items()
    ],
)
def test_ranks_that_share_gpus_on_several_hosts_refit_over_auto(case: Case) -> None:
    told = values(run(case))
    assert [wrong for _, wrong in told] == [{}] * len(told)
    ways = [way for ways, _ in told for way in ways]
    assert {*ways} <= {"near+far", "far+near", "near", "far"} and any("far" in way and "near" in way for way in ways)


def test_nccl_refuses_one_communicator_for_ranks_that_share_gpus() -> None:
    """Before there were several: all ranks failed when they connected. So the sessions above can fail."""
    outcomes = run(CASES["2 hosts, pipelined"], refit, False)
    assert {outcome.kind for outcome in outcomes} <= {"NcclError", "SessionFailed"}
    assert any("Duplicate GPU detected" in (outcome.error or "") for outcome in outcomes)


def refit_anew(number: int, address: str, case: Case, places: str, leaves: int) -> list[tuple[str, int]]:
    """Rank `number` refits twice at the host and GPU of `places[number]`, which only ranks know; replica `leaves` once.

    Returns of each refit what moved the bytes, and how many parameters are wrong.
    """
    be_at(places[number], f"{places[number]}/GPU-0")
    take_for_auto(stand_in("near"), rounds_stand_in("far"))
    refits = planned_refits.refits_of_plan(number, address, case, Options(timeout_s=60.0), leaves)
    return [(report.transport, len(wrong)) for _, report, wrong in refits]


@pytest.mark.parametrize("leaves", [1, 2])
def test_ranks_say_themselves_that_they_share_gpus_also_when_one_leaves(leaves: int) -> None:
    """Of hosts a and b, each with both sides, and c with a replica: without b's or c's the others have new communicators."""
    told = values(run(Case("tiny-llama", "pp=2", "dp=3"), refit_anew, "ababc", leaves))
    assert [len(each) for each in told] == [1 if number - 2 == leaves else 2 for number in range(5)]
    assert all(not wrong for each in told for _, wrong in each)
    assert all("far" in way for each in told[:2] for way, _ in each)


def refit_on_one_host(number: int, address: str, case: Case, unreachable: str) -> Any:
    be_at("a", f"a/GPU-{number % 2}")
    take_for_auto(stand_in("near"), rounds_stand_in("far"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(UNREACHABLE_VARIABLE, unreachable)
        return planned_refits.refit(number, address, case, "cpu")


def test_gpus_of_one_host_without_access_to_each_other_have_communicators_as_well() -> None:
    case = Case("tiny-llama", "pp=2", "dp=2")
    told = values(run(case, refit_on_one_host, "train:0-gen:1,train:1-gen:0"))
    assert told == [({"near+far"}, {})] * 4


def test_a_pair_on_one_gpu_that_cannot_share_memory_is_refused_by_nccl() -> None:
    outcomes = run(Case("tiny-llama", "pp=2", "dp=2"), refit_on_one_host, "train:0-gen:0")
    assert any("Duplicate GPU detected" in (outcome.error or "") for outcome in outcomes)
