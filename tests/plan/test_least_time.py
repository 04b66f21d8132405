"""The least time of a refit: worked by hand, and below what any plan's links need."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.plans import Case

from mcore_reshard.planner.plan.least_time import LeastTime, least_time
from mcore_reshard.planner.plan.loads import busiest_link

# tiny-qwen3: embedding and head of 32,768 bytes each; 4 layers of 61,440 in matrices and 288 in norms; a norm of 128.
MODEL = 2 * 32_768 + 4 * (61_440 + 288) + 128
HALF = 2 * 16_384 + 4 * (30_720 + 288) + 128  # what two of four ranks want: half of the matrices, and all norms
GB = 10**9
TWO = "h200-8,gpus=2,nic=1"  # hosts of two GPUs; 1 GB/s into and out of each NIC

REPLICAS = Case("tiny-qwen3", "tp=2", "tp=1,dp=4", machine=TWO)
STAGES = Case("tiny-qwen3", "tp=2,pp=2,layers=3+1", "tp=4", machine=TWO)
SHARED = Case("tiny-qwen3", "tp=2", "tp=2,dp=2", machine=TWO, hosts="train=a*2,gen=a*2+b*2")


def test_two_engine_hosts_take_the_model_once_each() -> None:
    """Both NICs of a host take half of it; its NVLink brings each GPU the other half."""
    least = least_time(REPLICAS.plan())
    assert (least.nic_in, least.nic_out) == pytest.approx([MODEL / 2 / GB] * 2)
    assert least.gpu == pytest.approx(MODEL / (401 * GB))


def test_the_host_of_a_large_stage_sends_longest() -> None:
    stage = 32_768 + 3 * (61_440 + 288)
    least = least_time(STAGES.plan())
    assert (least.nic_in, least.nic_out) == pytest.approx([HALF / 2 / GB, stage / 2 / GB])
    assert least.seconds == least.nic_out


def test_what_the_readers_own_gpu_has_crosses_no_nic() -> None:
    least = least_time(SHARED.plan())
    assert (least.nic_in, least.nic_out) == pytest.approx([MODEL / 2 / GB] * 2)  # of host b
    here = replace(SHARED, gen="tp=2", hosts="train=a*2,gen=a*2")
    rank = MODEL / 2 + 544  # and half of the norms once more: 4 of 128, 16, 16 and 128 bytes, and one of 128
    assert least_time(here.plan()) == LeastTime(0.0, 0.0, pytest.approx(rank / (2100 * GB), rel=2e-3))


def test_no_nic_is_counted_where_all_ranks_are_in_one_domain() -> None:
    here = replace(REPLICAS, train="tp=1", gen="tp=1", hosts="train=a*1,gen=a*1@1")
    assert least_time(here.plan()) == LeastTime(0.0, 0.0, pytest.approx(MODEL / (400 * GB)))
    there = replace(here, hosts="train=a*1,gen=b*1").plan()
    assert least_time(there).gpu == pytest.approx(MODEL / (401 * GB))


def test_bytes_of_which_one_host_is_the_only_holder_leave_by_its_nics() -> None:
    """One trainer host, three of the engine, which can pass on: all three copies leave by the NICs of four hosts."""
    least = least_time(replace(REPLICAS, gen="tp=1,dp=6").plan())
    assert (least.nic_in, least.nic_out) == pytest.approx([MODEL / 2 / GB] * 2)
    many = least_time(replace(REPLICAS, train="tp=1", gen="tp=1,dp=6", hosts="train=a*1,gen=b*2+c*2+d*2").plan())
    assert (many.nic_in, many.nic_out) == pytest.approx([MODEL / 2 / GB, MODEL / GB])


def test_a_plan_that_moves_nothing_takes_no_time() -> None:
    assert least_time(replace(REPLICAS.plan(), transfer_groups=())) == LeastTime(0.0, 0.0, 0.0)


CASES = [
    REPLICAS, STAGES, SHARED,
    Case("tiny-qwen3-moe", "tp=2,ep=2,dp=2", "tp=2,dp=2", machine="h200-8,gpus=2,shared"),
    Case("tiny-deepseek-v3", "tp=2,pp=2,ep=2,dp=2", "tp=2,dp=2,ep=4", machine="h200-8,gpus=4"),
    Case("tiny-llama-tied", "pp=2,vpp=2", "tp=2,pp=2", machine="h200-8,gpus=4"),  # both stages want the embedding
    Case("tiny-qwen3-moe", "tp=1,ep=2,dp=2", "tp=1,dp=4", dtypes=("bf16", "fp8"), block=(8, 8), machine=TWO),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_plan_is_faster_and_the_located_one_hardly_slower(case: Case) -> None:
    plan = case.plan()
    least = least_time(plan).seconds
    assert 0 < least <= busiest_link(plan) * (1 + 1e-12)
    turned = tuple(replace(each, first_src_replica=0, first_dst_replica=0) for each in plan.transfer_groups)
    assert least <= busiest_link(replace(plan, transfer_groups=turned)) * (1 + 1e-12)
    assert least <= busiest_link(replace(plan, straight=True)) * (1 + 1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bound_is_that_of_the_layouts_whatever_the_plans_turns(case: Case) -> None:
    plan = case.plan()
    shuffled = np.random.default_rng(0).permutation(len(plan.transfer_groups)).tolist()
    other = replace(plan, relay=not plan.relay, transfer_groups=tuple(plan.transfer_groups[i] for i in shuffled))
    assert least_time(other).seconds == pytest.approx(least_time(plan).seconds, rel=1e-12)
