"""What a session will hold, counted from its plan alone, is what executors hold: here over gloo, and as GPUs recorded it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
import torch
from bench.workloads import WORKLOADS, Case, case_of
from helpers.gloo import connect
from helpers.nccl_parts import joined_parts
from helpers.plans import TWO_LAYERS
from helpers.plans import Case as PlanCase
from helpers.ranks import run_ranks, values

from mcore_reshard.kernels.copies.bind import bind
from mcore_reshard.kernels.cuda import engine_rows
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.store import connect_store
from mcore_reshard.kernels.transports import memory
from mcore_reshard.kernels.transports.base import TransportContext
from mcore_reshard.kernels.transports.direct.staging import SLOTS, divide_slots, parted
from mcore_reshard.kernels.transports.memory import FIRST_USE, RankMemory, session_memory
from mcore_reshard.kernels.transports.nccl.buffers import POOL_BYTES, buffer_bytes
from mcore_reshard.kernels.transports.nccl.staging import ScratchBudget, divide, slot_bytes
from mcore_reshard.kernels.transports.reach import joined_hops
from mcore_reshard.kernels.transports.registry import resolve
from mcore_reshard.kernels.transports.source_checks import SourceChecks
from mcore_reshard.planner.plan import make_plan as planner
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.topology.topology import MACHINES, Place, Topology, parse_topology
from mcore_reshard.session.staged import StagedTensors

RESULTS = Path(__file__).parents[2] / "tools" / "results"
DIVIDED = 0.09  # they were recorded before plans divided overlaps of more than 64 MiB

DENSE = PlanCase("tiny-llama", "tp=2,pp=2,dp=2", "tp=4")
RELAYED_HOSTS = PlanCase("tiny-qwen3-moe", "tp=2,ep=2", "tp=2,dp=3", changes=TWO_LAYERS, machine="h200-8,gpus=2")
RELAYED = PlanCase("tiny-qwen3-moe", "ep=2,dp=2", "tp=1,dp=4")
CAST = PlanCase("tiny-qwen3-moe-fp8", "tp=2,ep=2,dp=2", "tp=2", dtypes=("bf16", "fp8"), block=(32, 32))


# --- executors on the CPU ------------------------------------------------------------------------------------------


def held_over_gloo(number: int, address: str, case: PlanCase, bucket_bytes: int) -> tuple[int, int, int]:
    """A rank's scratch over gloo, what its checks take, and what staging takes."""
    plan = case.plan()
    train = number < plan.train.world
    rank = number if train else number - plan.train.world
    schedule = schedule_of(plan, "train" if train else "gen", rank)
    options = Options(transport="gloo", bucket_bytes=bucket_bytes)
    bound = bind(schedule, synthetic.allocate(schedule, torch.device("cpu")))
    group = connect(address, number, plan.train.world + plan.gen.world)
    connect_executor = resolve("gloo", "cpu").connect
    assert connect_executor is not None
    executor = connect_executor(TransportContext(connect_store(address, options).under("gloo"), group, bound, options))
    strata = SourceChecks(bound, options)._strata
    staged = StagedTensors(schedule.name)
    staged.take_place_of(bound)
    held = executor.scratch_bytes, strata.nbytes, staged.nbytes
    executor.close()
    group.close()
    return held


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [DENSE, RELAYED, CAST], ids=str)
@pytest.mark.parametrize("bucket_bytes", [4096, 32 << 20])
def test_ranks_over_gloo_hold_what_was_counted(case: PlanCase, bucket_bytes: int) -> None:
    plan = case.plan()
    assert plan.relay == (case is RELAYED)
    counted = session_memory(plan, Options(bucket_bytes=bucket_bytes))
    held = values(run_ranks(plan.train.world + plan.gen.world, held_over_gloo, case, bucket_bytes))
    scratch = [rank.scratch for rank in chain.from_iterable(counted.transports["gloo"].values())]
    assert [row[0] for row in held] == pytest.approx(scratch, rel=0.1)
    checks = [rank.checks for rank in chain.from_iterable(counted.transports["direct"].values())]
    assert [row[1] for row in held] == pytest.approx(checks, rel=0.1)
    assert [row[2] for row in held[plan.train.world :]] == list(counted.staging)


@pytest.mark.parametrize(
    "case",
    [
        PlanCase("qwen3-4b", "tp=4,pp=2,dp=2,layers=17+19", "tp=4,pp=2"),
        pytest.param(PlanCase("qwen3-30b-a3b", "tp=2,pp=2,ep=4,dp=2", "tp=4"), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_ranks_that_are_counted_as_one_hold_nearly_the_same(case: PlanCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_FEW_TRANSFERS", 0)
    plan, counted = case.plan(), session_memory(case.plan())
    distinct = [np.unique(memory._alike(plan, world, None, np.zeros(1))) for world in ("train", "gen")]
    assert sum(map(len, distinct)) < plan.train.world + plan.gen.world
    monkeypatch.setattr(memory, "_FEW_TRANSFERS", 1 << 30)
    each = session_memory(plan)
    for transport, worlds in each.transports.items():
        for world, ranks in worlds.items():
            totals = [rank.total for rank in ranks]
            assert [rank.total for rank in counted.transports[transport][world]] == pytest.approx(totals, rel=0.1)
            assert min(totals) > 0
    assert counted.staging == each.staging


# --- what GPUs recorded --------------------------------------------------------------------------------------------


def recorded() -> list[tuple[str, Case, str, dict[str, Any]]]:
    """(file, workload on its ranks, method, row) of every recorded row that says what our executors held."""
    found = []
    for name, ranks in (("refit-x2-h100", 2), ("refit-x2", 2), ("refit-x4", 4), ("refit-x4-h100", 4)):
        data = json.loads((RESULTS / f"{name}.json").read_text())
        before = {row["workload"] for row in data["rows"] if row["method"] == "nccl-alone"}
        if name == "refit-x2":  # its limits were measured in the same processes; those of moe-ep-tp are kept
            before |= {"moe-fp8", "moe-bf16-fp8"}
        for row in data["rows"]:
            row = {**row, "date": data["date"], "first_of_its_process": row["workload"] not in before}
            method = row["method"].partition(":")[0]
            if method in ("direct", "nccl"):
                workload = next(each for each in WORKLOADS if each.name == row["workload"])
                found.append((name, case_of(workload, ranks), method, row))
    return found


RECORDED = recorded()
COUNTED: dict[tuple[str, str, bool, tuple[Any, ...]], dict[str, list[RankMemory]]] = {}


def counted_for(file: str, case: Case, *, checksums: bool) -> dict[str, list[RankMemory]]:
    """By transport, both worlds together; each workload is counted once."""
    patched = memory.what_is_pushed, memory.ENGINE_SHARE, memory.ENGINE_STREAMS, planner._LARGEST_OF_SMALL_MODELS
    patched += (engine_rows.LEAST_BYTES,)
    key = file, case.name, checksums, patched
    if key not in COUNTED:
        transports = session_memory(case.plan(), Options(checksums=checksums)).transports
        COUNTED[key] = {name: [*chain.from_iterable(worlds.values())] for name, worlds in transports.items()}
    return COUNTED[key]


def scale_tables(case: Case, ranks: list[RankMemory]) -> float:
    """MB of the blocks whose scales are computed, 32 bytes for each scale of 4: earlier figures of nccl lack them."""
    return max(rank.scales for rank in ranks) / 4 * 32 / 1e6


def marks_of(row: dict[str, Any]) -> list[pytest.MarkDecorator]:
    """Rows of the large model take long."""
    return [] if row["workload"].startswith("dense") else [pytest.mark.long]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("file", "case", "method", "row"),
    [
        pytest.param(*each, id=f"{each[0]} {each[3]['workload']} {each[3]['method']}", marks=marks_of(each[3]))
        for each in RECORDED
    ],
)
def test_gpus_held_what_is_counted(
    file: str, case: Case, method: str, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if row["date"] < "2026-11-25" or "engine_percent=0" in row["method"]:  # before copy engines helped
        monkeypatch.setattr(memory, "ENGINE_SHARE", 0.0)
    if row["date"] < "2026-11-27":  # before copy engines took several streams, and trainers pushed what they cast
        monkeypatch.setattr(memory, "ENGINE_STREAMS", 1)
        monkeypatch.setattr(memory, "what_is_pushed", lambda is_mutual, by_engine: "nothing")
    if file != "refit-x4-h100":  # before copy engines took rows of less than a MiB
        monkeypatch.setattr(engine_rows, "LEAST_BYTES", 1 << 20)
    if row["date"] < "2026-11-26":  # before small models were cut finer
        monkeypatch.setattr(planner, "_LARGEST_OF_SMALL_MODELS", planner._LARGEST_OVERLAP)
    ranks = counted_for(file, case, checksums="checksums" in row["method"])[method]
    tables = max(rank.tables for rank in ranks) / 1e6
    scratch = max(rank.scratch for rank in ranks) / 1e6
    assert row["scratch_mb"] == pytest.approx(scratch, rel=DIVIDED)
    if "table_mb" in row:
        lacking = scale_tables(case, ranks) * (method == "nccl" and row["date"] < "2026-11-22")
        assert row["table_mb"] == pytest.approx(tables - lacking, rel=DIVIDED, abs=0.051)
    if method == "nccl":
        largest = max(rank.total - rank.checks for rank in ranks) / 1e6
        largest += sum(FIRST_USE.values()) / 1e6 * row["first_of_its_process"]
        assert row["extra_memory_mb"] == pytest.approx(largest, rel=0.1)


@pytest.mark.long
def test_a_gpu_that_both_sides_share_held_what_is_counted() -> None:
    """The copy engine takes what lies on the other GPU; the kernel has tables of the rest. Trainers push what they cast."""
    data = json.loads((RESULTS / "refit-colocated-x2.json").read_text())
    topology = parse_topology("h200-8,shared", 2, 2)
    for row in data["rows"]:
        case = case_of(next(each for each in WORKLOADS if each.name == row["workload"]), 4)
        counted = session_memory(case.plan(), topology=topology, transports=("direct",)).transports["direct"]
        ranks = [*chain.from_iterable(counted.values())]
        assert row["scratch_mb"] == max(rank.scratch for rank in ranks) == 0
        assert row["table_mb"] == pytest.approx(max(rank.tables for rank in ranks) / 1e6, rel=DIVIDED)


def test_a_process_takes_once_what_a_gpu_recorded() -> None:
    recorded = json.loads((RESULTS / "first-use-x1.json").read_text())
    kernel, *of_nccl = recorded["bytes"].values()
    assert {"copies": kernel, "nccl": sum(of_nccl)} == FIRST_USE
    assert recorded["bytes_of_a_second_communicator_with_a_message"] == 0


def test_two_hosts_held_what_is_counted_but_for_pools() -> None:
    """Over sockets alone, as between hosts; NCCL's pools are then in the host's memory."""
    row = next(
        each for each in json.loads((RESULTS / "sockets-x2.json").read_text())["rows"] if each["method"] == "nccl"
    )
    case = case_of(next(each for each in WORKLOADS if each.name == row["workload"]), 2)
    topology = parse_topology("h200-8", 1, 1)
    counted = session_memory(case.plan(), topology=topology, transports=("nccl",)).transports["nccl"]["gen"][0]
    pools = 2 * 32 * POOL_BYTES  # of both streams, for what it receives
    assert row["extra_memory_mb"] == pytest.approx((counted.total - pools) / 1e6, rel=0.1)


def test_enough_rows_are_recorded() -> None:
    assert len(RECORDED) > 20 and {each[2] for each in RECORDED} == {"direct", "nccl"}


# --- by hand -------------------------------------------------------------------------------------------------------


def test_nccl_takes_for_communicators_and_for_each_sender_of_the_host() -> None:
    one_host = divide(ScratchBudget(), [1, 1])  # a communicator of each stream
    peers_of_two = 2 * 32 * 640
    assert buffer_bytes(1, [0], [], one_host, 1) == 2 * (252 + 320) * 10**6 + 2 * peers_of_two
    assert buffer_bytes(0, [], [1], one_host, 1) == 2 * (252 * 10**6 + 32 * 3_100_000) + 2 * peers_of_two
    stages = divide(ScratchBudget(), [2, 2, 2, 2])
    peers_of_four = 4 * 32 * 640
    assert buffer_bytes(2, [0, 1], [], stages, 2) == 2 * (252 + 2 * 320) * 10**6 + 2 * peers_of_four
    assert buffer_bytes(4, [], [], stages, 2) == 0  # no member
    assert buffer_bytes(2, [], [], stages, 2) == 2 * 252 * 10**6 + 2 * peers_of_four  # beside those that exchange bytes
    both = 2 * (252 * 10**6 + 2 * 320 * 10**6 + 32 * 3_100_000) + 2 * peers_of_four
    assert buffer_bytes(2, [0, 1], [3], stages, 2) == both


def test_between_hosts_all_peers_share_the_buffers_of_nccl() -> None:
    pool, communicator = 32 * 16 * 128 * 1024, 252 * 10**6 + 32 * 640 * 160
    division = divide(ScratchBudget(), [*[128] * 32, *[32] * 128])
    hosts = [rank // 8 for rank in range(160)]
    assert buffer_bytes(32, range(32), [], division, 32, hosts) == 2 * (communicator + pool)
    assert buffer_bytes(32, [0], [], division, 32, hosts) == 2 * (communicator + pool)
    assert buffer_bytes(0, [], range(32, 160), division, 32, hosts) == 2 * (communicator + 8 * pool)
    assert buffer_bytes(0, [], range(32, 160), division, 32) == 2 * (communicator + 8 * pool)
    assert buffer_bytes(32, range(32), [], division, 32) == 2 * (communicator + pool)
    alone = [*range(160)]  # one rank a host: no other GPU sends for it
    assert buffer_bytes(0, [], [32], division, 32, alone) == 2 * (communicator - (252 - 23) * 10**6 + pool)
    passing = replace(division, hops=("relay",))
    assert buffer_bytes(32, [0], [40], passing, 32, hosts) == 2 * (communicator + 9 * pool)


def test_a_gpu_between_trainers_and_their_receivers_has_buffers_for_these_trainers() -> None:
    """Four trainers and four engine ranks on a host, four more on another one: what these get leaves by the engine's GPUs."""
    division, hosts = divide(ScratchBudget(), [8, 8, 8, 8, *[4] * 8]), [0] * 8 + [1] * 4
    pool, communicator = 32 * 16 * 128 * 1024, 252 * 10**6 + 32 * 640 * 12
    of_pair = 4 if division.keeps_streams else 2 * 4  # channels
    beside = buffer_bytes(4, range(4), [], division, 4, hosts)
    assert beside == 2 * (communicator + 4 * pool) + of_pair * 4 * 10_000_000
    trainer = buffer_bytes(0, [], range(4, 12), division, 4, hosts)
    assert trainer == 2 * (communicator + 4 * pool) + of_pair * 4 * 3_100_000
    assert buffer_bytes(8, range(4), [], division, 4, hosts) == 2 * (communicator + pool)


def test_a_rank_of_one_tensor_holds_what_is_counted_by_hand() -> None:
    plan = PlanCase("tiny-llama", "tp=1", "tp=1").plan()
    counted = session_memory(plan)
    assert counted.staging == (int(plan.recv_bytes[0]),)  # nothing is padded
    (engine,) = counted.transports["direct"]["gen"]
    transfers = sum(len(table) for table in schedule_of(plan, "gen", 0).tables)
    assert engine == RankMemory(tables=48 * transfers)  # of 48 bytes; each fits one tile and is in one piece
    (sender,) = counted.transports["direct"]["train"]
    assert (sender.tables, sender.scratch, sender.nccl, sender.scales) == (0, 0, 0, 0)


def test_trainers_hold_slots_for_readers_that_a_copy_engine_helps_with_all_sources() -> None:
    casts = {"dtypes": ("bf16", "fp8"), "block": (8, 16)}
    alone, several = (
        PlanCase("tiny-qwen3-moe", *each, **casts).plan() for each in (("tp=1", "tp=1"), ("pp=2", "tp=1"))
    )
    shared, apart = (parse_topology(machine, 1, 1) for machine in ("h200-8,shared", "h200-8,gpus=2"))

    def scratch(plan: Plan, *, is_mutual: bool = False, **how: Any) -> list[bool]:
        held = session_memory(plan, **how).transports["direct"]
        assert all(rank.tables > 0 for rank in held["train"])
        assert all((rank.tables > 0) != is_mutual for rank in held["gen"])
        return [rank.scratch > 0 for rank in held["train"]]

    assert scratch(alone) == [True] and scratch(several) == [True, True]
    assert scratch(alone, topology=apart) == [True] and scratch(alone, topology=shared) == [False]
    with_one = parse_topology("h200-8,shared", 2, 1)
    assert scratch(several, topology=with_one, is_mutual=True) == [False, False]
    assert scratch(several, topology=with_one, options=Options(checksums=True)) == [True, True]


@pytest.mark.parametrize("checksums", [False, True], ids=["in turns", "at once"])
def test_slots_are_those_of_the_readers_that_a_trainer_casts_for_at_a_time(checksums: bool) -> None:
    plan = PlanCase("tiny-qwen3-moe", "tp=2,ep=2", "tp=2", dtypes=("bf16", "fp8"), block=(8, 16)).plan()
    held = session_memory(plan, Options(checksums=checksums, scratch_bytes=1 << 20), transports=("direct",))
    for rank, counted in enumerate(held.transports["direct"]["train"]):
        _, cast = parted(schedule_of(plan, "train", rank))
        turns = {reader: 0 if checksums else (reader + rank) % 2 for reader in range(2)}
        slots, _ = divide_slots(cast, 1 << 20, turns)
        assert counted.scratch == SLOTS * slots.slot_bytes > 0


def test_a_reader_of_slots_is_counted_beside_a_trainer_that_is_counted_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both trainers count as one, which has no slots; some readers have one source, and pull out of the slots of the other."""
    monkeypatch.setattr(memory, "_FEW_TRANSFERS", 0)
    plan = PlanCase("tiny-llama", "pp=2", "tp=2,pp=2", dtypes=("bf16", "fp8"), block=(4, 8)).plan()
    topology = parse_topology("h200-8", 2, 4, "train=a*2,gen=a*4")
    held = session_memory(plan, topology=topology, transports=("direct",)).transports["direct"]
    assert min(rank.tables for rank in held["gen"]) > 0


def test_ranks_count_as_one_only_if_like_shares_are_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four engine ranks are on the trainers' GPUs, so that trainers push to them; four others are apart."""
    plan = PlanCase("qwen3-4b", "tp=4", "tp=8", dtypes=("bf16", "fp8"), block=(128, 128)).plan()
    machine = replace(MACHINES["h200-8"], gpus=16)
    places = [Place(0, gpu) for gpu in range(8)]
    topology = Topology(machine, ("a",), tuple(places[:4]), tuple(places))
    each = session_memory(plan, topology=topology, transports=("direct",)).transports["direct"]
    monkeypatch.setattr(memory, "_FEW_TRANSFERS", 0)
    alike = session_memory(plan, topology=topology, transports=("direct",)).transports["direct"]
    assert [rank.scratch > 0 for rank in each["train"]] == [False, False, True, True]
    assert [rank.scratch for rank in alike["train"]] == [rank.scratch for rank in each["train"]]
    assert [rank.tables for rank in alike["gen"]] == pytest.approx([rank.tables for rank in each["gen"]], rel=0.02)


def test_auto_is_direct_on_one_host_and_nccl_between_hosts() -> None:
    plan = DENSE.plan()
    train, gen = plan.train.world, plan.gen.world
    assert "auto" not in session_memory(plan).transports  # nobody knows where ranks are
    for machine, same in (("h200-8,shared", "direct"), ("h200-8", "nccl")):
        counted = session_memory(plan, topology=parse_topology(machine, train, gen)).transports
        assert counted["auto"] == counted[same]


def test_auto_takes_for_pairs_of_a_host_and_for_those_between_hosts() -> None:
    """Each training rank has an engine rank on its host and others on another; replicas pass on within hosts."""
    case = PlanCase("tiny-llama", "tp=2", "tp=1,dp=4", machine="h200-8,gpus=4", hosts="train=a*2,gen=a*2@2+b*2")
    plan = case.plan()
    assert plan.later_hops == ("share",)
    counted = session_memory(plan).transports
    for world, ranks in counted["auto"].items():
        others = [counted[transport][world] for transport in ("direct", "nccl")]  # type: ignore[index]
        for rank, held in enumerate(ranks):
            direct, nccl = (other[rank] for other in others)
            assert held.tables > 0 and held.total <= direct.total + nccl.total
    near, far = counted["auto"]["gen"][:2], counted["auto"]["gen"][2:]
    assert [rank.nccl for rank in near] == [0, 0] and min(rank.nccl for rank in far) > 0
    assert min(rank.nccl for rank in counted["auto"]["train"]) > 0


def test_a_relay_between_hosts_takes_nccl_on_both_ends_of_replicas() -> None:
    """Each rank's tables are those of its messages in either direction; its buffers are for senders and receivers."""
    plan = RELAYED_HOSTS.plan()
    assert plan.later_hops == ("relay", "share")
    counted, unrelayed = (session_memory(each).transports for each in (plan, replace(plan, straight=True)))
    for rank, held in enumerate(counted["auto"]["gen"]):
        assert counted["nccl"]["gen"][rank].nccl > held.nccl > unrelayed["nccl"]["gen"][rank].nccl and held.tables > 0
    for rank, held in enumerate(counted["auto"]["train"]):
        assert held.nccl == counted["nccl"]["train"][rank].nccl <= unrelayed["nccl"]["train"][rank].nccl


@pytest.mark.sampled(3)
@pytest.mark.parametrize("transport", ["auto", "nccl"])
@pytest.mark.parametrize(
    "case",
    [
        RELAYED_HOSTS,
        PlanCase("tiny-qwen3", "tp=1", "dp=4", machine="h200-8,gpus=1"),
        PlanCase("tiny-qwen3-moe", "tp=2,pp=2", "tp=1,dp=4", machine="h200-8,gpus=4"),
    ],
    ids=str,
)
def test_slots_are_those_of_the_part_that_needs_most(case: PlanCase, transport: str) -> None:
    plan, budget = case.plan(), ScratchBudget(48 << 10)
    assert plan.waves > 1
    parts, _, _ = joined_parts(case, budget, transport=transport)
    counted = session_memory(plan, Options(scratch_bytes=budget.scratch_bytes), transports=(transport,))
    ranks = [*counted.transports[transport]["train"], *counted.transports[transport]["gen"]]
    for rank, memory_of_rank in enumerate(ranks):
        slots: dict[tuple[int, int], int] = {}
        for part in parts:
            for place, nbytes in slot_bytes(part[rank].found if rank in part else ()).items():
                slots[place] = max(nbytes, slots.get(place, 0))
        assert memory_of_rank.scratch == sum(slots.values())


def test_what_is_passed_on_within_hosts_alone_is_no_hop_of_nccl_over_auto() -> None:
    """A plan may allow relays between hosts that it has none of: every host has a trainer's replica."""
    hosts = "train=a*1+b*1,gen=a*3@1+b*3@1"
    plan = PlanCase("tiny-llama", "dp=2", "tp=1,dp=6", machine="h200-8", hosts=hosts).plan()
    assert plan.relay and plan.later_hops == ("share",)
    assert joined_hops(plan, plan.topology, "auto") == 0  # type: ignore[arg-type]
    memory_of_ranks = session_memory(plan, transports=("auto",)).transports["auto"]
    assert all(rank.nccl == 0 for world in memory_of_ranks.values() for rank in world)


def test_only_the_transports_asked_for_are_counted() -> None:
    everything = session_memory(DENSE.plan())
    assert session_memory(DENSE.plan(), transports=("nccl",)).transports == {"nccl": everything.transports["nccl"]}


def test_checksums_take_sixteen_bytes_for_each_tile() -> None:
    plan: Plan = DENSE.plan()
    plain, summed = (session_memory(plan, Options(checksums=on)).transports["direct"]["gen"] for on in (False, True))
    assert [rank.tables for rank in summed] == [rank.tables // 48 * 64 for rank in plain]


def test_too_little_scratch_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes of scratch are too few"):
        session_memory(DENSE.plan(), Options(scratch_bytes=15))
