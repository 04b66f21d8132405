"""Buckets over NCCL between real processes: every byte arrives, nothing hangs, and culprits are named."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import replace
from datetime import timedelta
from itertools import product
from typing import Any

import numpy as np
import pytest
import synthetic
import torch
from helpers.gpu import device_of, needs_gpus
from helpers.handmade import End, HandTransfer, allocate, expected, random_transfers, raw_bytes, schedule_of
from helpers.ranks import run_ranks, store_of, values
from torch.distributed import is_initialized

from mcore_reshard.kernels.copies.bind import bind
from mcore_reshard.kernels.errors import RefitError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.store import SessionStore
from mcore_reshard.kernels.transports.nccl import executor as nccl_executor
from mcore_reshard.kernels.transports.nccl.communicator import nccl_unavailable_reason
from mcore_reshard.kernels.transports.nccl.executor import NcclExecutor, connect_nccl
from mcore_reshard.kernels.transports.nccl.staging import ScratchBudget, divide, pair_count
from mcore_reshard.planner.layout.geometry import row_major_strides
from mcore_reshard.planner.layout.mesh import parse_gen_mesh, parse_train_mesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.model.families import parameters_from_config
from mcore_reshard.planner.plan.make_plan import make_plan
from mcore_reshard.planner.plan.make_schedule import schedule_of as planned_schedule
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import LocalTensor, Schedule, StridedBox
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(1),
    pytest.mark.skipif(nccl_unavailable_reason() is not None, reason=str(nccl_unavailable_reason())),
]

Worlds = tuple[int, int]
SPAWN_S = 180.0
TIMEOUT_S = 60.0
ENVIRONMENTS = {
    "nvlink": {},
    "network": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},  # what hosts that share nothing are left with
    "one queue": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},  # as Megatron's trainers often have it
}
BUDGETS = (
    ScratchBudget(),
    ScratchBudget(1024, streams=1),
    ScratchBudget(4096, streams=2, slots=3, checksums=True),
    ScratchBudget(1 << 16, streams=3, slots=2),
)
WORLDS: list[Worlds] = [(2, 2), (3, 1), (1, 3)]  # four processes play all of these, one after the other


def connected(address: str) -> SessionStore:
    return store_of(address)


def meet(store: Any, occasion: str, number: int, count: int) -> None:
    """Wait until all ranks are here: processes take longer to start than some of these deadlines, and whoever closes
    takes along what the network still holds: sessions vote first."""
    store.set(f"{occasion}/{number}", "")
    store.wait([f"{occasion}/{rank}" for rank in range(count)], timedelta(seconds=SPAWN_S))


def of(transfers: list[HandTransfer], number: int, worlds: Worlds) -> Schedule:
    return schedule_of(transfers, *(("train", number) if number < worlds[0] else ("gen", number - worlds[0])), worlds)


def transfers_of(seed: int, worlds: Worlds) -> list[HandTransfer]:
    return random_transfers(np.random.default_rng(seed), worlds, parameters=25, stages=3)


# --- bytes ---------------------------------------------------------------------------------------------------------


def random_refits(number: int, address: str, environment: dict[str, str]) -> list[dict[str, bytes]]:
    """Two runs for each of `WORLDS` and budget. Returns what the tensors held after them."""
    os.environ.update(environment)
    device = device_of(number)
    held = []
    for worlds, (seed, budget) in product(WORLDS, enumerate(BUDGETS)):
        schedule = of(transfers_of(seed, worlds), number, worlds)
        start = allocate(schedule, seed=seed if schedule.world == "train" else None)
        tensors = {name: tensor.to(device) for name, tensor in start.items()}
        store = connected(address).under(f"{worlds}/{seed}")
        (executor,) = connect_nccl([[bind(schedule, tensors)]], store, timeout_s=TIMEOUT_S, budget=budget)
        assert executor.scratch_bytes <= budget.scratch_bytes
        for _ in range(2):
            reports = executor.run()
        meet(store, "done", number, sum(worlds))
        assert [report.pp_stage for report in reports] == [stage.pp_stage for stage in schedule.stages]
        held.append({name: raw_bytes(tensor.cpu()) for name, tensor in tensors.items()})
        executor.close()
        assert executor.scratch_bytes == 0
    assert not is_initialized()
    return held


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_random_patterns_arrive_byte_for_byte_under_every_budget(environment: str) -> None:
    ranks = sum(WORLDS[0])
    held = values(run_ranks(ranks, random_refits, ENVIRONMENTS[environment], timeout_s=SPAWN_S, method="spawn"))
    for case, (worlds, seed) in enumerate(product(WORLDS, range(len(BUDGETS)))):
        transfers = transfers_of(seed, worlds)
        sources = [allocate(schedule_of(transfers, "train", rank, worlds), seed=seed) for rank in range(worlds[0])]
        for rank in range(worlds[1]):
            want = expected(transfers, schedule_of(transfers, "gen", rank, worlds), sources)
            got = held[worlds[0] + rank][case]
            assert [name for name in want if got[name] != raw_bytes(want[name])] == [], (worlds, seed, rank)


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
    "64 peers": ("qwen3-30b-a3b", {"num_hidden_layers": 2, "vocab_size": 1024}, "ep=64,dp=64", "tp=2"),
}  # fmt: skip


def plan_of(case: str) -> Plan:
    config, changes, train, gen = CASES[case]
    model_parameters = parameters_from_config({**load_config(config), **changes})
    return make_plan(model_parameters, parse_train_mesh(train), parse_gen_mesh(gen), model=config)


def planned_refits(number: int, address: str, cases: list[str]) -> dict[str, dict[str, int]]:
    """case -> parameters with wrong elements, of a whole model whose elements say where they belong."""
    device = device_of(number)
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
            store = connected(address).under(f"{case}/{scratch_bytes}")
            budget = ScratchBudget(scratch_bytes)
            (executor,) = connect_nccl([[bind(schedule, tensors)]], store, timeout_s=TIMEOUT_S, budget=budget)
            executor.run()
            if not train:
                bad = synthetic.wrong_elements(plan, "gen", rank, tensors)
                wrong.update({f"{case} {scratch_bytes}": bad} if bad else {})
                for tensor in tensors.values():
                    tensor.view(torch.uint8).fill_(synthetic.POISON)
            meet(store, "done", number, plan.train.world + plan.gen.world)
            executor.close()
    return wrong


@pytest.mark.parametrize("ranks", [2, 4])
def test_whole_models_arrive_element_by_element(ranks: int) -> None:
    cases = [case for case in CASES if plan_of(case).train.world + plan_of(case).gen.world == ranks]
    assert values(run_ranks(ranks, planned_refits, cases, timeout_s=SPAWN_S, method="spawn")) == [{}] * ranks


def refits_of_many(number: int, address: str) -> dict[str, dict[str, int]]:
    """66 processes on one GPU: few channels, so that NCCL's buffers fit."""
    os.environ.update(NCCL_MAX_NCHANNELS="1", NCCL_SOCKET_IFNAME="lo")
    return planned_refits(number, address, ["64 peers"])


@pytest.mark.slow
def test_pairs_of_many_peers_keep_pace_and_every_element_arrives() -> None:
    """It takes 91 GB of GPU memory and 60 GB of the host's."""
    gpus = [torch.cuda.get_device_properties(device) for device in range(torch.cuda.device_count())]
    if sum(gpu.total_memory for gpu in gpus) < 100e9:
        pytest.skip("66 processes need 100 GB of GPU memory")
    plan = plan_of("64 peers")
    worlds = [("train", rank) for rank in range(64)] + [("gen", rank) for rank in range(2)]
    division = divide(ScratchBudget(), [pair_count(planned_schedule(plan, *each)) for each in worlds])  # type: ignore[arg-type]
    assert division.keeps_pace
    assert values(run_ranks(66, refits_of_many, timeout_s=400.0, method="spawn")) == [{}] * 66


class NoisyWire(NcclExecutor):
    """Flips one bit of what arrives first in the third round, before it is unpacked; that is part of the graph."""

    def _communicate(self, each: Any, stream: torch.cuda.Stream) -> None:
        super()._communicate(each, stream)
        if not each.payloads[0].sends and each is self._rounds[2]:
            with torch.cuda.stream(stream):
                each.payloads[0].content[5] ^= 1


def damaged_refit(number: int, address: str) -> None:
    device, worlds = device_of(number), (1, 1)
    schedule = of(large(worlds), number, worlds)
    tensors = {local.name: torch.ones(ELEMENTS, device=device) for local in schedule.tensors}
    budget = ScratchBudget(8 << 20, checksums=True)
    nccl_executor.NcclExecutor = NoisyWire  # type: ignore[misc]  # this process ends with the test
    (executor,) = connect_nccl([[bind(schedule, tensors)]], connected(address), timeout_s=TIMEOUT_S, budget=budget)
    executor.run()


def test_a_damaged_bucket_is_reported_by_its_receiver() -> None:
    _, receiver = run_ranks(2, damaged_refit, timeout_s=SPAWN_S, method="spawn")
    assert receiver.kind == "ChecksumError", receiver
    assert receiver.error == (
        "stage 0: gen:0 waiting for train:0 to send w0: bucket 2 arrived with other bytes than it was sent with"
    )


# --- order ---------------------------------------------------------------------------------------------------------

ELEMENTS = 16 << 20


def large(worlds: Worlds) -> list[HandTransfer]:
    """Every training rank's tensor goes to every generation rank, which has one for each."""

    def end(rank: int, tensor: str) -> End:
        return End(rank, tensor, (ELEMENTS,), (0,), (0,))

    return [
        HandTransfer(0, f"w{src}", "float32", (ELEMENTS,), end(src, "w"), end(dst, f"w{src}"))
        for src in range(worlds[0])
        for dst in range(worlds[1])
    ]


def parts_of_large(
    number: int, store: Any, worlds: Worlds, timeout_s: float, parts: int, checksums: bool
) -> tuple[list[NcclExecutor], list[Any]]:
    """With checksums all messages go through slots, else all are received in place."""
    device = device_of(number)
    schedule = of(large(worlds), number, worlds)
    held = [
        {local.name: torch.full((ELEMENTS,), float("nan"), device=device) for local in schedule.tensors}
        for _ in range(parts)
    ]
    budget = ScratchBudget(8 << 20, checksums=checksums)
    bounds = [[bind(schedule, tensors)] for tensors in held]
    return connect_nccl(bounds, store, timeout_s=timeout_s, budget=budget), held


def executor_of_large(number: int, store: Any, worlds: Worlds, timeout_s: float) -> tuple[NcclExecutor, Any]:
    (executor,), (tensors,) = parts_of_large(number, store, worlds, timeout_s, 1, False)
    return executor, tensors


def overwrite_at_once(number: int, address: str, worlds: Worlds, refits: int) -> int:
    """The trainer queues its next step as soon as `run` returns. Counts the elements of other versions that arrived."""
    executor, tensors = executor_of_large(number, connected(address), worlds, TIMEOUT_S)
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
    meet(connected(address), f"done-{refits}", number, sum(worlds))
    executor.close()
    return wrong


def test_weights_are_read_when_complete_and_may_change_when_run_returns() -> None:
    worlds = WORLDS[0]
    assert sum(values(run_ranks(sum(worlds), overwrite_at_once, worlds, 10, timeout_s=SPAWN_S, method="spawn"))) == 0


def virtual_on_one_side(number: int, address: str, virtual: str) -> int:
    """NCCL can register virtual memory and not the other kind; what is whole in a tensor goes without a copy."""
    if virtual == ("train", "gen")[number]:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")  # type: ignore[no-untyped-call]
    return overwrite_at_once(number, address, (1, 1), 2)


@pytest.mark.parametrize("virtual", ["train", "gen"])
def test_memory_that_is_virtual_on_one_side_only_is_moved_like_any_other(virtual: str) -> None:
    assert sum(values(run_ranks(2, virtual_on_one_side, virtual, timeout_s=SPAWN_S, method="spawn"))) == 0


# --- trouble -------------------------------------------------------------------------------------------------------


DEADLINE_S = 5.0


def failure_of(executor: NcclExecutor) -> tuple[str, str]:
    """The error of a run, without the frames, which would keep the executor's tensors alive."""
    with pytest.raises(RefitError) as caught:
        executor.run()
    return type(caught.value).__name__, str(caught.value)


def free_at_rest() -> int:
    """Free bytes of the device once they stay the same for a second: communicators end in the background."""
    gc.collect()  # errors and their frames refer to each other
    torch.cuda.empty_cache()
    found, since = torch.cuda.mem_get_info()[0], time.monotonic()
    while time.monotonic() < since + 1.0:
        time.sleep(0.1)
        if (now := torch.cuda.mem_get_info()[0]) != found:
            found, since = now, time.monotonic()
    return found


def lose_peer(number: int, address: str) -> tuple[str, str, float] | None:
    """Rank 0 is killed after a good run; the other says how its second one failed, and after how long."""
    store = connected(address)
    device_of(number)
    meet(store, "ready", number, 2)
    executor, _ = executor_of_large(number, store.under("nccl"), (1, 1), DEADLINE_S)
    executor.run()
    meet(store, "done", number, 2)
    if number == 0:
        os.kill(os.getpid(), 9)
    start = time.monotonic()
    failure = failure_of(executor)
    assert executor.scratch_bytes == 0
    return *failure, time.monotonic() - start


def test_a_killed_peer_is_an_error_at_the_deadline_and_named() -> None:
    lost, gen = run_ranks(2, lose_peer, timeout_s=SPAWN_S, method="spawn")
    assert lost.died
    kind, message, seconds = values([gen])[0]
    assert kind in ("DeadlineError", "PeerLostError"), message
    assert message.startswith("stage 0: gen:0 waiting for train:0 to send w0: ")
    assert seconds < 3 * DEADLINE_S


def lose_one_of_two(number: int, address: str) -> tuple[str, str]:
    """Rank 0, one of two trainers, is killed after a good run; how the second one of the others failed."""
    store, count = connected(address), sum(WORLDS[0])
    device_of(number)
    meet(store, "ready", number, count)
    executor, _ = executor_of_large(number, store.under("nccl"), WORLDS[0], DEADLINE_S)
    executor.run()
    meet(store, "done", number, count)
    if number == 0:
        os.kill(os.getpid(), 9)
    failure = failure_of(executor)
    executor.close()
    return failure


def test_of_several_peers_the_killed_one_is_named() -> None:
    lost, *others = run_ranks(sum(WORLDS[0]), lose_one_of_two, timeout_s=SPAWN_S, method="spawn")
    assert lost.died
    told = values(others)
    assert {kind for kind, _ in told} <= {"DeadlineError", "PeerLostError"}, told
    assert any("train:0" in message for _, message in told), told
    assert all("train:0" in message or message.endswith("gave up") for _, message in told), told


def lose_bytes(number: int, address: str, environment: dict[str, str], parts: int) -> tuple[list[Any], int, float]:
    """The trainer is silent in a second run of several parts, of which the engine has queued all.

    Returns what the engine holds then (the values of each part), the bytes that may be written, and after how long it
    failed.
    """
    os.environ.update(environment)
    store = connected(address)
    device_of(number)
    meet(store, "ready", number, 2)
    executors, held = parts_of_large(number, store.under("nccl"), (1, 1), DEADLINE_S, parts, True)
    for tensors in held:
        for tensor in tensors.values():
            tensor.fill_(1.0)
    for executor in executors:
        executor.run()
    told: tuple[list[Any], int, float] = [], 0, 0.0
    if number:
        for tensors in held:
            tensors["w0"].fill_(2.0)  # slots still hold 1.0
        for executor in executors:
            executor.queue()
        start = time.monotonic()
        failure_of(executors[0])
        seconds = time.monotonic() - start
        executors[0].close()
        values_held = [tensors["w0"].unique().tolist() for tensors in held]
        told = values_held, sum(executor.written_bytes for executor in executors), seconds
    meet(store, "failed", number, 2)
    executors[0].close()
    return told


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("environment", [{}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}], ids=["", "one queue"])
def test_what_never_came_is_not_unpacked_when_communicators_are_aborted(
    environment: dict[str, str], parts: int
) -> None:
    _, told = values(run_ranks(2, lose_bytes, environment, parts, timeout_s=SPAWN_S, method="spawn"))
    held, written, seconds = told
    assert (held, written) == ([[2.0]] * parts, 0)
    assert seconds < 3 * DEADLINE_S


def silence(number: int, address: str, worlds: Worlds, patience_s: list[dict[int, float]]) -> list[Any]:
    """For each of `patience_s` (deadlines of ranks, 60 s where not named): a good run, and one in which rank 0 is
    silent. Returns how that failed, after how long, and the memory left; at last the elements of a good run that
    are wrong."""
    store, count = connected(address), sum(worlds)
    device_of(number)
    told: list[Any] = []
    for occasion, timeouts_s in enumerate(patience_s):
        meet(store, f"ready-{occasion}", number, count)
        prefixed = store.under(f"nccl-{occasion}")
        executor, _ = executor_of_large(number, prefixed, worlds, timeouts_s.get(number, TIMEOUT_S))
        executor.run()
        start = time.monotonic()
        failure = ("", "")
        if number > 0:
            failure = failure_of(executor)
            assert executor.scratch_bytes == 0
        seconds = time.monotonic() - start
        meet(store, f"failed-{occasion}", number, count)
        executor.close()
        del executor, _
        told.append((*failure, seconds, free_at_rest()))
    meet(store, "again", number, count)
    return [*told, overwrite_at_once(number, address, worlds, 2)]


def check_nothing_is_left(told: list[Any]) -> None:
    """Communicators take hundreds of megabytes: one that is left behind shows in what is free later.

    Not while other tests take memory of the same GPU.
    """
    for *occasions, wrong in told:
        assert wrong == 0
        free = [occasion[3] for occasion in occasions]
        assert free[-1] >= free[0] - (64 << 20), free


def test_a_silent_peer_is_named_and_no_communicator_stays_behind() -> None:
    patience_s = [{1: DEADLINE_S}, {1: DEADLINE_S}]
    told = values(run_ranks(2, silence, (1, 1), patience_s, timeout_s=SPAWN_S, method="spawn"))
    for kind, message, seconds, _ in told[1][:-1]:
        assert (kind, message) == (
            "DeadlineError", f"stage 0: gen:0 waiting for train:0 to send w0: nothing within {DEADLINE_S:g} s",
        )  # fmt: skip
        assert seconds < 3 * DEADLINE_S
    check_nothing_is_left(told)


def test_of_several_peers_the_silent_one_is_named_and_who_gives_up_takes_the_others_along() -> None:
    patience_s = [dict.fromkeys(range(4), DEADLINE_S), {2: DEADLINE_S}]
    told = values(run_ranks(4, silence, (2, 2), patience_s, timeout_s=SPAWN_S, method="spawn"))
    for rank in (2, 3):
        assert told[rank][0][:2] == (
            "DeadlineError",
            f"stage 0: gen:{rank - 2} waiting for train:0 to send w0: nothing within {DEADLINE_S:g} s",
        ), told
    assert [told[rank][1][0] for rank in (1, 2, 3)] == ["PeerLostError", "DeadlineError", "PeerLostError"], told
    for rank in (1, 3):
        _, message, seconds, _ = told[rank][1]
        assert message.endswith("gen:0 gave up") and seconds < 4 * DEADLINE_S, told
    check_nothing_is_left(told)


# --- whole sessions ------------------------------------------------------------------------------------------------

MISC = "model.odd.weight"


def session(number: int, address: str, transport: str) -> Any:
    """Three refits through the endpoints: planned bytes, the misc route, zeroed padding, weights on CUDA."""
    device, worlds = device_of(number), (1, 1)
    transfers = transfers_of(5, worlds)
    odd = LocalTensor("odd", (3, 5), "float32")
    schedule = replace(of(transfers, number, worlds), misc=(MISC,))
    schedule = replace(schedule, tensors=(*schedule.tensors, odd))
    held: list[Any] = []
    options = Options(transport=transport, scratch_bytes=4096, timeout_s=TIMEOUT_S)
    if number == 0:
        weights = {name: tensor.to(device) for name, tensor in allocate(schedule).items()}
        every = {**weights, MISC: weights["odd"]}
        train = TrainEndpoint(
            schedule,
            weights,
            store=address,
            export=lambda names: ((n, every[n]) for n in (names or every)),
            options=options,
        )
        train.prepare()
        for version in (1, 2, 3):
            for name, tensor in allocate(schedule, seed=version).items():
                weights[name].copy_(tensor)
            report = train.refit(version)
            held.append((report.transport, report.misc_bytes, {n: raw_bytes(t.cpu()) for n, t in weights.items()}))
        train.close()
        return held
    padding = (len(schedule.tensors) - 1, 10, StridedBox((5,), row_major_strides((5,))))
    weights = {name: tensor.to(device) for name, tensor in allocate(schedule).items()}
    loaded: dict[str, bytes] = {}
    gen = GenerationEndpoint(
        replace(schedule, padding=(padding,)),
        weights,
        store=address,
        load_weights=lambda pairs: loaded.update((name, raw_bytes(tensor)) for name, tensor in pairs),
        options=options,
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
    transfers = transfers_of(5, (1, 1))
    for version, ((name, misc_bytes, sent), (held, loaded)) in enumerate(zip(train, gen, strict=True), 1):
        assert name == transport
        assert misc_bytes >= 60
        assert loaded[MISC] == sent["odd"]
        if transport == "golden":
            assert all(loaded[tensor] == content for tensor, content in sent.items())
            continue
        sources = [allocate(schedule_of(transfers, "train", 0, (1, 1)), seed=version)]
        want = expected(transfers, schedule_of(transfers, "gen", 0, (1, 1)), sources)
        assert held == {**{n: raw_bytes(t) for n, t in want.items()}, "odd": b"\xee" * 40 + b"\0" * 20}
