"""`auto` on GPUs: direct where memory is reachable, nccl elsewhere, in one refit, also where replicas relay."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from helpers import planned_refits
from helpers.colocated import be_at, places_of
from helpers.gpu import needs_gpus
from helpers.plans import TWO_LAYERS, Case
from helpers.ranks import run_ranks, values
from helpers.ways import rounds_stand_in, stand_in

from mcore_reshard.kernels.transports import registry
from mcore_reshard.kernels.transports.mixed import connect_by_pair
from mcore_reshard.kernels.transports.nccl.connection import NcclConnection
from mcore_reshard.kernels.transports.peer_access import UNREACHABLE_VARIABLE
from mcore_reshard.kernels.transports.reach import joined_hops

MOE = Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=2")
RELAYED = Case("tiny-qwen3-moe", "tp=1", "dp=3")
CAST = Case("tiny-qwen3-moe", "ep=2,dp=2", "tp=2", dtypes=("bf16", "fp8"), block=(8, 16))
RELAYED_CAST = Case("tiny-qwen3-moe", "tp=1", "dp=3", dtypes=("bf16", "fp8"), block=(8, 16))
ALONE = Case("tiny-qwen3-moe", "tp=1", "tp=1")
PIPELINED = Case("tiny-qwen3-moe", "pp=2", "tp=1")
PIPELINED_CAST = Case("tiny-qwen3-moe", "pp=2", "tp=1", dtypes=("bf16", "fp8"), block=(8, 16))
# Between hosts, and within each, shared.
RELAYED_HOSTS = Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=2,dp=3", changes=TWO_LAYERS, machine="h200-8,gpus=2")
TRAINER_BESIDE = Case("tiny-qwen3-moe", "tp=1", "dp=3", machine="h200-8,gpus=2", hosts="train=a*1,gen=a*1@1+b*1+c*1")
NO_OPTIONS: Mapping[str, Any] = {}
TRAINER_ALONE = "train:0-gen:0,train:0-gen:1,train:0-gen:2"
ALL_RELAYS = "relay:0-gen:1,relay:0-gen:2,relay:1-gen:0,relay:1-gen:2,relay:2-gen:0,relay:2-gen:1"
ALL_PAIRS = "train:0-gen:0,train:0-gen:1,train:1-gen:0,train:1-gen:1"


def apart(case: Case) -> str:
    """The pairs of a plan that knows its hosts that are on different ones, as MCORE_RESHARD_UNREACHABLE has them."""
    topology = case.plan().topology
    assert topology is not None
    train, gen = topology.host_of("train"), topology.host_of("gen")
    pairs = [f"train:{src}-gen:{dst}" for src in range(len(train)) for dst in range(len(gen)) if train[src] != gen[dst]]
    pairs += [f"relay:{src}-gen:{dst}" for src in range(len(gen)) for dst in range(len(gen)) if gen[src] != gen[dst]]
    return ",".join(pairs)


def on_cpu(number: int, address: str, case: Case, unreachable: str, far_unavailable: str | None) -> Any:
    """A refit by `auto`, with transports `near` and `far` in the places of direct and nccl."""
    near, far = stand_in("near"), rounds_stand_in("far", far_unavailable)
    auto = replace(registry._transports["auto"], devices=frozenset({"cpu"}), unavailable_reason=lambda: None,
                   connect=lambda context: connect_by_pair(context, near, far))  # fmt: skip
    registry._transports["auto"] = auto  # this process ends with the test
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(UNREACHABLE_VARIABLE, unreachable)
        return planned_refits.refit(number, address, case, "cpu")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("case", "unreachable", "ways"),
    [
        (MOE, "", [{"near"}] * 4),
        (MOE, ALL_PAIRS, [{"far"}] * 4),
        (MOE, "train:0-gen:1, train:1-gen:0", [{"near+far"}] * 4),
        (MOE, "train:9-gen:0", [{"near"}] * 4),
        (RELAYED, "", [{"near"}] * 4),
        (RELAYED, "relay:0-gen:1", [{"far+near"}] * 4),
        (RELAYED, TRAINER_ALONE, [{"far"}, {"far+near"}, {"far+near"}, {"far+near"}]),
        (RELAYED, "train:0-gen:2", [{"far+near"}] * 4),
        (RELAYED, "train:0-gen:2,relay:0-gen:1", [{"far+near"}] * 4),
        (RELAYED_CAST, TRAINER_ALONE, [{"far"}, {"far+near"}, {"far+near"}, {"far+near"}]),
        (RELAYED_CAST, "train:0-gen:2,relay:0-gen:1", [{"far+near"}] * 4),
        (RELAYED, f"{TRAINER_ALONE},{ALL_RELAYS}", [{"far"}] * 4),
        (RELAYED, ALL_RELAYS, [{"far+near"}] * 4),
        (RELAYED_CAST, f"{TRAINER_ALONE},{ALL_RELAYS}", [{"far"}] * 4),
    ],
    ids=[
        *("all near", "all far", "two hosts", "no such pair", "relayed", "a relay is far"),
        *("the trainer is far", "one replica is far from it", "relays over two hosts"),
        *("casts, the trainer is far", "cast over two hosts"),
        *("every replica has a host", "only replicas are far from each other", "casts, every replica has a host"),
    ],
)
def test_each_pair_goes_by_what_reaches_it(case: Case, unreachable: str, ways: list[set[str]]) -> None:
    found = values(run_ranks(4, on_cpu, case, unreachable, None, timeout_s=60.0))
    assert [way for way, _ in found] == ways
    assert [wrong for _, wrong in found] == [{}] * 4


@pytest.mark.parametrize(
    ("case", "trainer", "engine"),
    [(RELAYED_HOSTS, "far", "far+near"), (TRAINER_BESIDE, "far+near", "far+near")],
    ids=str,
)
def test_replicas_pass_on_to_other_hosts_by_the_rounds_of_nccl(case: Case, trainer: str, engine: str) -> None:
    plan = case.plan()
    assert plan.topology is not None and joined_hops(plan, plan.topology, "auto") == 1
    ranks = plan.train.world + plan.gen.world
    found = values(run_ranks(ranks, on_cpu, case, apart(case), None, timeout_s=120.0))
    assert [ways for ways, _ in found] == [{trainer}] * plan.train.world + [{engine}] * plan.gen.world
    assert [wrong for _, wrong in found] == [{}] * ranks


def test_pairs_that_nothing_reaches_are_named() -> None:
    outcomes = run_ranks(4, on_cpu, MOE, "train:1-gen:0", "the far library is not installed", timeout_s=60.0)
    assert {outcome.kind for outcome in outcomes} <= {"TransportUnavailable", "SessionFailed"}
    said = next(o.error for o in outcomes if o.kind == "TransportUnavailable")
    assert said == (
        "1 pair of ranks cannot share memory (train:1-gen:0: declared in MCORE_RESHARD_UNREACHABLE), "
        "and nccl cannot take their place: train:0: the far library is not installed"
    )


def lacking(number: int, address: str, case: Case, unreachable: str, who: int) -> Any:
    return on_cpu(number, address, case, unreachable, "the far library is not installed" if number == who else None)


@pytest.mark.parametrize("who", [0, 2])
def test_where_one_rank_has_no_nccl_every_byte_comes_from_the_trainer(who: int) -> None:
    """All ranks decide alike, also those that have it."""
    found = values(run_ranks(4, lacking, RELAYED, "relay:0-gen:1", who, timeout_s=60.0))
    assert found == [({"near"}, {})] * 4


def test_what_is_no_pair_is_an_error_of_all_ranks() -> None:
    outcomes = run_ranks(4, on_cpu, MOE, "train:0-gen:1,gen:0-train:0;train:1-gen:1", None, timeout_s=60.0)
    assert {outcome.kind for outcome in outcomes} <= {"TransportUnavailable", "SessionFailed"}
    said = next(o.error for o in outcomes if o.kind == "TransportUnavailable")
    assert said == (
        "MCORE_RESHARD_UNREACHABLE has 'gen:0-train:0;train:1-gen:1': pairs are written train:0-gen:1 or relay:1-gen:0,"
        " with commas between them"
    )


def on_gpus(
    number: int, address: str, case: Case, transport: str, unreachable: str, options: Mapping[str, Any] = NO_OPTIONS
) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(UNREACHABLE_VARIABLE, unreachable)
        return planned_refits.refit(number, address, case, "cuda", transport=transport, **options)


@pytest.mark.gpu
@needs_gpus(1)
@pytest.mark.parametrize(
    ("case", "transport", "unreachable", "way"),
    [
        (ALONE, "auto", "train:0-gen:0", "nccl"),
        (PIPELINED, "auto", "", "direct"),
        (PIPELINED, "auto", "train:0-gen:0", "direct+nccl"),
        (PIPELINED_CAST, "auto", "train:0-gen:0", "direct+nccl"),
        (MOE, "auto", "", "direct"),
        (MOE, "auto", ALL_PAIRS, "nccl"),
        (MOE, "auto", "train:0-gen:1,train:1-gen:0", "direct+nccl"),
        (RELAYED, "direct", "", "direct"),
        (RELAYED, "nccl", "", "nccl"),
        (RELAYED, "auto", "train:0-gen:2,relay:0-gen:1", "direct+nccl"),
        (CAST, "direct", "", "direct"),
        (CAST, "nccl", "", "nccl"),
        (RELAYED_CAST, "auto", "train:0-gen:2,relay:0-gen:1", "direct+nccl"),
        (RELAYED_CAST, "nccl", "", "nccl"),
        (RELAYED_HOSTS, "nccl", "", "nccl"),
    ],
    ids=[
        *("a pair by nccl", "stages near", "a stage is far", "a stage is far, cast"),
        *("all near", "all far", "two hosts", "relayed directly", "relayed by nccl", "relays over two hosts"),
        *("cast directly", "cast by nccl", "cast over two hosts", "relayed cast by nccl", "three hops by nccl"),
    ],
)
def test_auto_on_gpus(case: Case, transport: str, unreachable: str, way: str) -> None:
    plan = case.plan()
    ranks = plan.train.world + plan.gen.world
    found = values(run_ranks(ranks, on_gpus, case, transport, unreachable, timeout_s=120.0, method="spawn"))
    assert all(ways == {way} for ways, _ in found)
    assert [wrong for _, wrong in found] == [{}] * ranks


@pytest.mark.gpu
@needs_gpus(1)
@pytest.mark.parametrize("case", [RELAYED, RELAYED_CAST], ids=["plain", "cast"])
def test_replicas_pass_on_directly_what_came_by_nccl(case: Case) -> None:
    found = values(run_ranks(4, on_gpus, case, "auto", TRAINER_ALONE, timeout_s=120.0, method="spawn"))
    assert [ways for ways, _ in found] == [{"nccl"}, *[{"direct+nccl"}] * 3]
    assert [wrong for _, wrong in found] == [{}] * 4


@pytest.mark.gpu
@needs_gpus(1)
@pytest.mark.parametrize("checksums", [False, True], ids=["plain", "checksums"])
@pytest.mark.parametrize(
    ("case", "trainer", "engine"),
    [
        (RELAYED_HOSTS, "nccl", "direct+nccl"),
        (TRAINER_BESIDE, "direct+nccl", "direct+nccl"),
        (RELAYED_CAST, "nccl", "nccl"),
    ],
    ids=["shared within hosts", "a replica beside the trainer", "cast"],
)
def test_replicas_pass_on_to_other_hosts_by_nccl(case: Case, trainer: str, engine: str, checksums: bool) -> None:
    plan = case.plan()
    ranks = plan.train.world + plan.gen.world
    unreachable = apart(case) if case.machine else f"{TRAINER_ALONE},{ALL_RELAYS}"
    told = run_ranks(
        ranks, on_gpus, case, "auto", unreachable, {"checksums": checksums, "scratch_bytes": 256 << 10},
        timeout_s=180.0, method="spawn",
    )  # fmt: skip
    found = values(told)
    assert [ways for ways, _ in found] == [{trainer}] * plan.train.world + [{engine}] * plan.gen.world
    assert [wrong for _, wrong in found] == [{}] * ranks


BESIDE = Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=2,dp=2", machine="h200-8,gpus=4", hosts="train=a*2,gen=a*2@2+b*2@2")


def beside(number: int, address: str, case: Case, options: Mapping[str, Any]) -> Any:
    """Refit as `on_gpus` does, and say that the rank is where the case has it; then the ranks of its communicators."""
    topology = case.plan().topology
    assert topology is not None
    be_at(*places_of(topology)[number])
    joined: list[int] = []
    join = NcclConnection._join

    def counted(self: NcclConnection, *args: Any) -> Any:
        joined.append(len(args[2]))
        return join(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NcclConnection, "_join", counted)
        return *planned_refits.refit(number, address, case, "cuda", transport="auto", **options), joined


@pytest.mark.gpu
@needs_gpus(1)
def test_engine_ranks_beside_a_trainer_join_communicators_in_which_they_exchange_nothing() -> None:
    """What training ranks send to host b leaves by the NICs of GPUs 2 and 3 of host a, those of gen:0 and gen:1."""
    found = values(run_ranks(6, beside, BESIDE, {"scratch_bytes": 256 << 10}, timeout_s=180.0, method="spawn"))
    assert [ways for ways, *_ in found] == [{"direct+nccl"}] * 6
    assert [wrong for _, wrong, _ in found] == [{}] * 6
    assert [joined for *_, joined in found] == [[6, 6]] * 6  # of two streams


def alone_on_a_gpu(number: int, address: str) -> Any:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(number)  # CUDA reads it when it is first used
    return planned_refits.refit(number, address, ALONE, "cuda:0", transport="auto")


@pytest.mark.gpu
@needs_gpus(2)
def test_a_reader_maps_memory_of_a_gpu_that_it_does_not_see() -> None:
    found = values(run_ranks(2, alone_on_a_gpu, timeout_s=120.0, method="spawn"))
    assert found == [({"direct"}, {}), ({"direct"}, {})]
