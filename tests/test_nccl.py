"""Buckets over NCCL between real processes, a GPU each: every byte arrives, nothing hangs, and culprits are named."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu import needs_gpus
from handmade import End, Move, allocate, expected, random_moves, raw_bytes, schedule_of
from ranks import run_ranks, values
from torch.distributed import PrefixStore, TCPStore, is_initialized

from mcore_reshard.kernels.errors import RefitError
from mcore_reshard.kernels.nccl import NcclExecutor
from mcore_reshard.kernels.nccl_communicator import nccl_obstacle
from mcore_reshard.kernels.program import bind
from mcore_reshard.kernels.rounds import ScratchBudget
from mcore_reshard.planner.configs import load_config
from mcore_reshard.planner.families import catalogue_from_config
from mcore_reshard.planner.geometry import row_major_strides
from mcore_reshard.planner.mesh import parse_gen_mesh, parse_train_mesh
from mcore_reshard.planner.plan import Plan
from mcore_reshard.planner.planning import make_plan
from mcore_reshard.planner.schedule import Geometry, LocalTensor, Schedule
from mcore_reshard.planner.scheduling import schedule_of as planned_schedule
from mcore_reshard.refit import GenerationEndpoint, TrainEndpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import synthetic

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(2),
    pytest.mark.skipif(nccl_obstacle() is not None, reason=str(nccl_obstacle())),
]

Worlds = tuple[int, int]
SPAWN_S = 180.0
TIMEOUT_S = 60.0
NETWORK = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}  # what hosts that share nothing are left with
BUDGETS = (
    ScratchBudget(),
    ScratchBudget(1024, streams=1),
    ScratchBudget(4096, streams=2, slots=3, checksums=True),
    ScratchBudget(1 << 16, streams=3, slots=2),
)
TWO = pytest.param((1, 1), id="1to1")
FOUR = [
    pytest.param(worlds, marks=needs_gpus(4), id=f"{worlds[0]}to{worlds[1]}") for worlds in ((2, 2), (3, 1), (1, 3))
]


def own_device(number: int, environment: dict[str, str] | None = None) -> torch.device:
    os.environ.update(environment or {})
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def connected(address: str) -> TCPStore:
    host, port = address.split(":")
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False)


def of(moves: list[Move], number: int, worlds: Worlds) -> Schedule:
    return schedule_of(moves, *(("train", number) if number < worlds[0] else ("gen", number - worlds[0])), worlds)


def moves_of(seed: int, worlds: Worlds) -> list[Move]:
    return random_moves(np.random.default_rng(seed), worlds, parameters=25, stages=3)


# --- bytes ---------------------------------------------------------------------------------------------------------


def random_refits(number: int, address: str, worlds: Worlds, environment: dict[str, str]) -> list[dict[str, bytes]]:
    """Two runs under each budget. Returns what the tensors held after each."""
    device = own_device(number, environment)
    held = []
    for seed, budget in enumerate(BUDGETS):
        schedule = of(moves_of(seed, worlds), number, worlds)
        start = allocate(schedule, seed=seed if schedule.world == "train" else None)
        tensors = {name: tensor.to(device) for name, tensor in start.items()}
        store = PrefixStore(f"budget-{seed}", connected(address))
        executor = NcclExecutor(bind(schedule, tensors), store, timeout_s=TIMEOUT_S, budget=budget)
        assert executor.scratch_bytes <= budget.scratch_bytes
        for _ in range(2):
            reports = executor.run()
        assert [report.pp_stage for report in reports] == [stage.pp_stage for stage in schedule.stages]
        held.append({name: raw_bytes(tensor.cpu()) for name, tensor in tensors.items()})
        executor.close()
        assert executor.scratch_bytes == 0
    assert not is_initialized()
    return held


def expandable_refits(number: int, address: str, worlds: Worlds, environment: dict[str, str]) -> list[dict[str, bytes]]:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    return random_refits(number, address, worlds, environment)


def check_random_refits(worlds: Worlds, environment: dict[str, str], refits: Any = random_refits) -> None:
    outcomes = run_ranks(sum(worlds), refits, worlds, environment, timeout_s=SPAWN_S, method="spawn")
    held = values(outcomes)
    for seed in range(len(BUDGETS)):
        moves = moves_of(seed, worlds)
        sources = [allocate(schedule_of(moves, "train", rank, worlds), seed=seed) for rank in range(worlds[0])]
        for rank in range(worlds[1]):
            want = expected(moves, schedule_of(moves, "gen", rank, worlds), sources)
            got = held[worlds[0] + rank][seed]
            assert [name for name in want if got[name] != raw_bytes(want[name])] == [], (seed, rank)


@pytest.mark.parametrize("worlds", [TWO, *FOUR])
def test_random_patterns_arrive_byte_for_byte_under_every_budget(worlds: Worlds) -> None:
    check_random_refits(worlds, {})


@pytest.mark.parametrize("worlds", [TWO, FOUR[0]])
def test_the_network_path_delivers_the_same(worlds: Worlds) -> None:
    check_random_refits(worlds, NETWORK)


def test_expandable_segments_make_no_difference() -> None:
    check_random_refits((1, 1), {}, expandable_refits)


CASES = {
    "dense": ("tiny-llama", {}, "tp=1", "tp=1"),
    "moe": ("tiny-qwen3-moe", {}, "tp=1", "tp=1"),
    "two layers of qwen3-30b-a3b": ("qwen3-30b-a3b", {"num_hidden_layers": 2}, "tp=1", "tp=1"),
    "dense, tp to tp": ("tiny-llama", {}, "tp=2", "tp=2"),
    "moe, stages": ("tiny-qwen3-moe", {}, "tp=1,pp=2", "tp=2"),
    "moe, experts to slices": ("tiny-qwen3-moe", {}, "tp=1,ep=2,dp=2", "tp=2"),
    "mla": ("tiny-deepseek-v3", {}, "tp=2,ep=2", "tp=2"),
    "gpt-oss": ("tiny-gpt-oss", {}, "tp=1,ep=2,dp=2", "tp=2"),
    "hybrid": ("tiny-nemotron-h", {}, "tp=1,ep=2,dp=2", "tp=2"),
    "two layers of qwen3-30b-a3b, experts to slices": (
        "qwen3-30b-a3b", {"num_hidden_layers": 2}, "tp=1,ep=2,dp=2", "tp=2",
    ),
    "two layers of qwen3-30b-a3b, stages": ("qwen3-30b-a3b", {"num_hidden_layers": 2}, "tp=1,pp=2", "dp=2"),
}  # fmt: skip


def plan_of(case: str) -> Plan:
    config, changes, train, gen = CASES[case]
    catalogue = catalogue_from_config({**load_config(config), **changes})
    return make_plan(catalogue, parse_train_mesh(train), parse_gen_mesh(gen), model=config)


def planned_refits(number: int, address: str, cases: list[str]) -> dict[str, dict[str, int]]:
    """case -> parameters with wrong elements, of a whole model whose elements say where they belong."""
    device = own_device(number)
    wrong: dict[str, dict[str, int]] = {}
    for case in cases:
        plan = plan_of(case)
        train = number < plan.train.world
        world, rank = ("train", number) if train else ("gen", number - plan.train.world)
        schedule = planned_schedule(plan, world, rank)  # type: ignore[arg-type]
        tensors = synthetic.allocate(schedule, device)
        if train:
            synthetic.fill(plan, "train", rank, tensors)
        for scratch_bytes in (8 << 20, 256 << 20):
            store = PrefixStore(f"{case}/{scratch_bytes}", connected(address))
            budget = ScratchBudget(scratch_bytes)
            executor = NcclExecutor(bind(schedule, tensors), store, timeout_s=TIMEOUT_S, budget=budget)
            executor.run()
            if not train:
                bad = synthetic.wrong_elements(plan, "gen", rank, tensors)
                wrong.update({f"{case} {scratch_bytes}": bad} if bad else {})
                for tensor in tensors.values():
                    tensor.view(torch.uint8).fill_(synthetic.POISON)
            executor.close()
    return wrong


@pytest.mark.parametrize("gpus", [2, pytest.param(4, marks=needs_gpus(4))])
def test_whole_models_arrive_element_by_element(gpus: int) -> None:
    cases = [case for case in CASES if plan_of(case).train.world + plan_of(case).gen.world == gpus]
    assert values(run_ranks(gpus, planned_refits, cases, timeout_s=SPAWN_S, method="spawn")) == [{}] * gpus


class NoisyWire(NcclExecutor):
    """Flips one bit of what arrives first in the third round, before it is unpacked."""

    def _exchange(self, each: Any, stream: torch.cuda.Stream) -> None:
        super()._exchange(each, stream)
        if not self._sends and each is self._rounds[2]:
            with torch.cuda.stream(stream):
                each.messages[0].payload[5] ^= 1


def damaged_refit(number: int, address: str) -> None:
    device, worlds = own_device(number), (1, 1)
    schedule = of(large(worlds), number, worlds)
    tensors = {local.name: torch.ones(ELEMENTS, device=device) for local in schedule.tensors}
    budget = ScratchBudget(8 << 20, checksums=True)
    NoisyWire(bind(schedule, tensors), connected(address), timeout_s=TIMEOUT_S, budget=budget).run()


def test_a_damaged_bucket_is_reported_by_its_receiver() -> None:
    _, receiver = run_ranks(2, damaged_refit, timeout_s=SPAWN_S, method="spawn")
    assert receiver.kind == "ChecksumError", receiver
    assert receiver.error == (
        "stage 0: gen:0 waiting for train:0 to send w0: bucket 2 arrived with other bytes than it was sent with"
    )


# --- order ---------------------------------------------------------------------------------------------------------

ELEMENTS = 16 << 20


def large(worlds: Worlds) -> list[Move]:
    """Every training rank's tensor goes to every generation rank, which has one for each."""

    def end(rank: int, tensor: str) -> End:
        return End(rank, tensor, (ELEMENTS,), (0,), (0,))

    return [
        Move(0, f"w{src}", "float32", (ELEMENTS,), end(src, "w"), end(dst, f"w{src}"))
        for src in range(worlds[0])
        for dst in range(worlds[1])
    ]


def executor_of_large(number: int, address: str, worlds: Worlds, timeout_s: float) -> tuple[NcclExecutor, Any]:
    device = own_device(number)
    schedule = of(large(worlds), number, worlds)
    tensors = {local.name: torch.full((ELEMENTS,), float("nan"), device=device) for local in schedule.tensors}
    store = PrefixStore("nccl", connected(address))
    return NcclExecutor(bind(schedule, tensors), store, timeout_s=timeout_s, budget=ScratchBudget(8 << 20)), tensors


def overwrite_at_once(number: int, address: str, worlds: Worlds, refits: int) -> int:
    """The trainer queues its next step as soon as `run` returns. Counts the elements of other versions that arrived."""
    executor, tensors = executor_of_large(number, address, worlds, TIMEOUT_S)
    wrong = 0
    for version in range(refits):
        if number < worlds[0]:
            tensors["w"].fill_(-1.0)
            torch.cuda._sleep(3_000_000)  # type: ignore[no-untyped-call]  # the optimizer is still busy
            tensors["w"].fill_(float(version))
            executor.run()
            tensors["w"].fill_(-2.0)
        else:
            executor.run()
            wrong += sum(int((tensor != version).sum()) for tensor in tensors.values())
    executor.close()
    return wrong


@pytest.mark.parametrize("worlds", [TWO, FOUR[0]])
def test_weights_are_read_when_complete_and_may_change_when_run_returns(worlds: Worlds) -> None:
    assert sum(values(run_ranks(sum(worlds), overwrite_at_once, worlds, 10, timeout_s=SPAWN_S, method="spawn"))) == 0


# --- trouble -------------------------------------------------------------------------------------------------------


def with_trouble(
    number: int, address: str, worlds: Worlds, trouble: str, timeouts_s: tuple[float, ...]
) -> tuple[str, str, float] | None:
    """Rank 0 dies or falls silent after a good run; the others say how their second run failed and after how long."""
    executor, _ = executor_of_large(number, address, worlds, timeouts_s[number])
    executor.run()
    if number == 0:
        if trouble == "killed":
            os.kill(os.getpid(), 9)
        time.sleep(2 * min(timeouts_s) + 6)
        return None
    start = time.monotonic()
    with pytest.raises(RefitError) as caught:
        executor.run()
    assert executor.scratch_bytes == 0
    return type(caught.value).__name__, str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("trouble", ["killed", "silent"])
def test_a_lost_peer_is_an_error_at_the_deadline_and_named(trouble: str) -> None:
    lost, gen = run_ranks(2, with_trouble, (1, 1), trouble, (4.0, 4.0), timeout_s=SPAWN_S, method="spawn")
    assert lost.died == (trouble == "killed")
    kind, message, seconds = values([gen])[0]
    assert kind in ("DeadlineError", "NcclError"), message
    assert message.startswith("stage 0: gen:0 waiting for train:0 to send w0: ")
    assert seconds < 10


@needs_gpus(4)
def test_of_several_peers_the_silent_one_is_named() -> None:
    told = values(run_ranks(4, with_trouble, (2, 2), "silent", (4.0,) * 4, timeout_s=SPAWN_S, method="spawn"))
    for rank in (2, 3):
        assert told[rank][:2] == (
            "DeadlineError", f"stage 0: gen:{rank - 2} waiting for train:0 to send w0: nothing within 4 s",
        ), told  # fmt: skip


@needs_gpus(4)
def test_a_rank_that_gives_up_takes_the_others_along_before_their_deadline() -> None:
    timeouts_s = (60.0, 60.0, 4.0, 60.0)
    told = values(run_ranks(4, with_trouble, (2, 2), "silent", timeouts_s, timeout_s=SPAWN_S, method="spawn"))
    assert [told[rank][0] for rank in (1, 2, 3)] == ["PeerLostError", "DeadlineError", "PeerLostError"], told
    assert all(told[rank][1].endswith("gen:0 gave up") and told[rank][2] < 15 for rank in (1, 3)), told


# --- whole sessions ------------------------------------------------------------------------------------------------

MISC = "model.odd.weight"


def session(number: int, address: str, transport: str) -> Any:
    """Three refits through the endpoints: planned bytes, the misc route, zeroed padding, weights on CUDA."""
    device, worlds = own_device(number), (1, 1)
    moves = moves_of(5, worlds)
    odd = LocalTensor("odd", (3, 5), "float32")
    schedule = replace(of(moves, number, worlds), misc=(MISC,))
    schedule = replace(schedule, tensors=(*schedule.tensors, odd))
    held: list[Any] = []
    options: dict[str, Any] = {"store": address, "transport": transport, "scratch_bytes": 4096, "timeout_s": TIMEOUT_S}
    if number == 0:
        weights = {name: tensor.to(device) for name, tensor in allocate(schedule).items()}
        every = {**weights, MISC: weights["odd"]}
        train = TrainEndpoint(
            schedule, weights, export=lambda names: ((n, every[n]) for n in (names or every)), **options
        )
        train.prepare()
        for version in (1, 2, 3):
            for name, tensor in allocate(schedule, seed=version).items():
                weights[name].copy_(tensor)
            report = train.refit(version)
            held.append((report.transport, report.misc_bytes, {n: raw_bytes(t.cpu()) for n, t in weights.items()}))
        train.close()
        return held
    padding = (len(schedule.tensors) - 1, 10, Geometry((5,), row_major_strides((5,))))
    weights = {name: tensor.to(device) for name, tensor in allocate(schedule).items()}
    loaded: dict[str, bytes] = {}
    gen = GenerationEndpoint(
        replace(schedule, padding=(padding,)),
        weights,
        load_weights=lambda pairs: loaded.update((name, raw_bytes(tensor)) for name, tensor in pairs),
        **options,
    )
    gen.prepare()
    for version in (1, 2, 3):
        gen.refit(version)
        held.append(({n: raw_bytes(t.cpu()) for n, t in weights.items()}, dict(loaded)))
    gen.close()
    return held


@pytest.mark.parametrize("transport", ["nccl", "golden"])
def test_sessions_on_cuda_deliver_bytes_misc_and_padding(transport: str) -> None:
    train, gen = values(run_ranks(2, session, transport, timeout_s=SPAWN_S, method="spawn"))
    moves = moves_of(5, (1, 1))
    for version, ((name, misc_bytes, sent), (held, loaded)) in enumerate(zip(train, gen, strict=True), 1):
        assert name == transport
        assert misc_bytes >= 60
        assert loaded[MISC] == sent["odd"]
        if transport == "golden":
            assert all(loaded[tensor] == content for tensor, content in sent.items())
            continue
        sources = [allocate(schedule_of(moves, "train", 0, (1, 1)), seed=version)]
        want = expected(moves, schedule_of(moves, "gen", 0, (1, 1)), sources)
        assert held == {**{n: raw_bytes(t) for n, t in want.items()}, "odd": b"\xee" * 40 + b"\0" * 20}
