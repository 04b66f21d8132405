"""Pulls between real processes: every byte arrives, in order with what trainer and engine do before and after.

Ranks are dealt to the GPUs that there are, so with one GPU all of them share it, as colocated ranks do.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gpu import needs_gpus
from helpers.handmade import (
    End,
    HandTransfer,
    allocate,
    expected,
    other_end_of,
    random_transfers,
    raw_bytes,
    schedule_of,
)
from helpers.ranks import run_ranks, store_of, values

from mcore_reshard.kernels.copies.bind import bind
from mcore_reshard.kernels.copies.tensors import gpu_of
from mcore_reshard.kernels.cuda import engine_rows
from mcore_reshard.kernels.errors import DeadlineError, PeerLostError, SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.store_keys import FailFastStore
from mcore_reshard.kernels.transports.direct import turns
from mcore_reshard.planner.plan.schedule import OtherEndView, Schedule, World

pytestmark = [pytest.mark.gpu, needs_gpus(1)]
direct = pytest.importorskip(
    "mcore_reshard.kernels.transports.direct.executor", reason="needs cuda-core", exc_type=ImportError
)
ipc = pytest.importorskip("mcore_reshard.kernels.cuda.ipc", reason="needs cuda-bindings", exc_type=ImportError)

WORLDS = [(1, 1), (2, 2), (3, 1), (1, 3)]
SPAWN_S = 120.0


class Rank:
    """One rank of a test: its schedule, its tensors on its GPU, and its end of the direct transport."""

    def __init__(
        self, number: int, address: str, worlds: tuple[int, int], schedule: Schedule, tensors: dict[str, torch.Tensor],
        gpus: int, timeout_s: float = 30.0, scratch_bytes: int = 1 << 20, **options: Any,
    ) -> None:  # fmt: skip
        self.device = torch.device("cuda", number % gpus)
        torch.cuda.set_device(self.device)
        self.tensors = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        store = store_of(address)
        try:
            self.executor = direct.DirectExecutor(
                FailFastStore("direct", store, "failed"), bind(schedule, self.tensors), timeout_s=timeout_s,
                scratch_bytes=scratch_bytes, options=direct.DirectOptions(**options),
            )  # fmt: skip
        except Exception as error:
            store.set("failed", str(error))  # as a session does
            raise
        store.set(f"up/{number}", "")
        store.wait([f"up/{other}" for other in range(sum(worlds))])


def of(number: int, worlds: tuple[int, int], transfers: list[HandTransfer]) -> Schedule:
    world: World = "train" if number < worlds[0] else "gen"
    rank = number if world == "train" else number - worlds[0]
    return replace(schedule_of(transfers, world, rank, worlds), view=OtherEndView(other_end_of(transfers, rank, world)))


def transfers_of(seed: int, worlds: tuple[int, int]) -> list[HandTransfer]:
    return random_transfers(np.random.default_rng(seed), worlds, parameters=25, stages=3)


def refit_twice(number: int, address: str, worlds: tuple[int, int], seed: int, gpus: int) -> dict[str, bytes]:
    # The copy engine takes small copies, too, and several GPUs in any order.
    engine_rows.LEAST_BYTES, engine_rows._ROW_COST_OVER_SEVERAL, turns._STILL_FASTER = 1, 0, 9.0
    schedule = of(number, worlds, transfers_of(seed, worlds))
    tensors = allocate(schedule, seed=seed if schedule.world == "train" else None)
    rank = Rank(number, address, worlds, schedule, tensors, gpus, tile_bytes=64, checksums=seed % 2 == 1)
    if (
        schedule.world == "gen" and gpus > 1
    ):  # every reader has sources on other GPUs, and on its own where these are too few
        is_mutual, checksums = gpus < sum(worlds), seed % 2 == 1
        assert (rank.executor._end._target is not None) == (is_mutual and not checksums)
        assert (rank.executor._end._copies._engine is None) == (is_mutual or checksums)
    assert rank.executor.scratch_bytes == 0
    for _ in range(2):
        reports = rank.executor.run()
    assert [report.pp_stage for report in reports] == [stage.pp_stage for stage in schedule.stages]
    held = {name: raw_bytes(tensor.cpu()) for name, tensor in rank.tensors.items()}
    rank.executor.close()
    return held


def check_random_patterns(worlds: tuple[int, int], seed: int, gpus: int) -> None:
    held = values(run_ranks(sum(worlds), refit_twice, worlds, seed, gpus, timeout_s=SPAWN_S, method="spawn"))
    check_held(held, worlds, seed)


def check_held(held: list[dict[str, bytes]], worlds: tuple[int, int], seed: int) -> None:
    """Compare every rank's tensors with those after a refit of `transfers_of(seed, worlds)`."""
    transfers = transfers_of(seed, worlds)
    sources = [allocate(schedule_of(transfers, "train", rank, worlds), seed=seed) for rank in range(worlds[0])]
    for rank in range(worlds[1]):
        want = expected(transfers, schedule_of(transfers, "gen", rank, worlds), sources)
        assert held[worlds[0] + rank] == {name: raw_bytes(tensor) for name, tensor in want.items()}


@pytest.mark.parametrize(("worlds", "seed"), [*zip(WORLDS, range(4), strict=True)])
def test_random_patterns_on_one_gpu(worlds: tuple[int, int], seed: int) -> None:
    check_random_patterns(worlds, seed, gpus=1)


@pytest.mark.parametrize(("gpus", "worlds"), [
    pytest.param(2, (1, 1), marks=needs_gpus(2)),
    pytest.param(2, (2, 2), marks=needs_gpus(2)),
    pytest.param(4, (2, 2), marks=needs_gpus(4)),
    pytest.param(4, (4, 3), marks=needs_gpus(4)),
])  # fmt: skip
@pytest.mark.parametrize("seed", [6, 7])  # the copy engine helps, and checksums
def test_random_patterns_over_nvlink(gpus: int, worlds: tuple[int, int], seed: int) -> None:
    check_random_patterns(worlds, seed, gpus)


def refit_by_endpoint(
    number: int, address: str, worlds: tuple[int, int], seed: int, options: dict[str, Any]
) -> dict[str, bytes]:
    from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint

    schedule = of(number, worlds, transfers_of(seed, worlds))
    torch.cuda.set_device(0)
    tensors = allocate(schedule, seed=seed if schedule.world == "train" else None)
    tensors = {name: tensor.cuda() for name, tensor in tensors.items()}
    endpoint = (TrainEndpoint if schedule.world == "train" else GenerationEndpoint)(
        schedule, tensors, store=address, options=Options(transport="direct", timeout_s=30.0, **options)
    )
    endpoint.prepare()
    for version in (1, 2):
        assert endpoint.refit(version).transport == "direct"
    assert endpoint.scratch_bytes == 0
    held = {name: raw_bytes(tensor.cpu()) for name, tensor in tensors.items()}
    endpoint.close()
    return held


@pytest.mark.parametrize("options", [{}, {"checksums": True, "ctas": 8}], ids=["", "checksums, 8 CTAs"])
def test_endpoints_refit_directly(options: dict[str, Any]) -> None:
    worlds, seed = (2, 2), 5
    held = values(run_ranks(4, refit_by_endpoint, worlds, seed, options, timeout_s=SPAWN_S, method="spawn"))
    check_held(held, worlds, seed)


def opened_and_closed(number: int, address: str, worlds: tuple[int, int], times: int) -> None:
    schedule = of(number, worlds, transfers_of(1, worlds))
    store = store_of(address)
    torch.cuda.set_device(0)
    tensors = {name: tensor.cuda() for name, tensor in allocate(schedule, seed=1).items()}
    for turn in range(times):
        executor = direct.DirectExecutor(store.under(f"{turn}"), bind(schedule, tensors), timeout_s=30.0)
        executor.run()
        store.add(f"ran/{turn}", 1)
        while store.add(f"ran/{turn}", 0) < sum(worlds):
            time.sleep(0.001)
        executor.close()
        executor.close()
        with pytest.raises(SessionError, match="this executor is closed"):
            executor.run()


def test_it_can_be_opened_and_closed_often() -> None:
    values(run_ranks(4, opened_and_closed, (2, 2), 40, timeout_s=SPAWN_S, method="spawn"))


ELEMENTS = 32 << 20


def one_large_tensor(number: int, worlds: tuple[int, int]) -> Schedule:
    """Every training rank's tensor goes to every generation rank, which has one for each."""

    def end(rank: int, tensor: str) -> End:
        return End(rank, tensor, (ELEMENTS,), (0,), (0,))

    transfers = [
        HandTransfer(0, f"w{src}", "float32", (ELEMENTS,), end(src, "w"), end(dst, f"w{src}"))
        for src in range(worlds[0])
        for dst in range(worlds[1])
    ]
    return of(number, worlds, transfers)


def stress(rank: Rank, world: str, refits: int, count_wrong: Callable[[int], int]) -> int:
    """The trainer queues its next step as soon as `run` returns. Counts what arrived of other versions."""
    wrong = 0
    for version in range(1, refits + 1):
        if world == "train":
            rank.tensors["w"].fill_(-1.0)
            torch.cuda._sleep(3_000_000)  # type: ignore[no-untyped-call]  # the optimizer is still busy
            rank.tensors["w"].fill_(float(version))
            rank.executor.run()
            rank.tensors["w"].fill_(-2.0)
        else:
            rank.executor.run()
            wrong += count_wrong(version)
    rank.executor.close()
    return wrong


def overwrite_at_once(number: int, address: str, worlds: tuple[int, int], gpus: int, refits: int) -> int:
    schedule = one_large_tensor(number, worlds)
    start = {local.name: torch.full((ELEMENTS,), float("nan")) for local in schedule.tensors}
    rank = Rank(number, address, worlds, schedule, start, gpus)

    def count_wrong(version: int) -> int:
        return sum(int((tensor != version).sum()) for tensor in rank.tensors.values())

    return stress(rank, schedule.world, refits, count_wrong)


@pytest.mark.parametrize(
    ("gpus", "worlds"),
    [
        (1, (1, 1)),
        (1, (2, 2)),
        pytest.param(2, (1, 1), marks=needs_gpus(2)),
        pytest.param(2, (2, 2), marks=needs_gpus(2)),  # trainers push
        pytest.param(4, (2, 2), marks=needs_gpus(4)),
    ],
)
def test_a_trainer_may_overwrite_as_soon_as_run_returns(gpus: int, worlds: tuple[int, int]) -> None:
    outcomes = run_ranks(sum(worlds), overwrite_at_once, worlds, gpus, 10, timeout_s=SPAWN_S, method="spawn")
    assert sum(values(outcomes)) == 0


def misbehave(number: int, address: str, worlds: tuple[int, int], unavailable_reason: str) -> None:
    schedule = one_large_tensor(number, worlds)
    tensors = {local.name: torch.zeros(ELEMENTS) for local in schedule.tensors}
    # A dying process with a GPU may keep its connections for seconds.
    rank = Rank(
        number, address, worlds, schedule, tensors, 1, timeout_s=3.0 if unavailable_reason == "silent trainer" else 30.0
    )
    if unavailable_reason == "silent trainer" and number == 0:
        time.sleep(8)
        return
    if unavailable_reason == "dead reader" and number == 2:
        os._exit(1)
    if unavailable_reason == "dead reader" and number == 0:
        time.sleep(2)  # gloo tells of a peer that is gone, but not always of one that goes while a message is written
    try:
        rank.executor.run()
    finally:
        rank.executor.close()


def test_a_silent_trainer_is_named() -> None:
    silent, gen = run_ranks(2, misbehave, (1, 1), "silent trainer", timeout_s=SPAWN_S, method="spawn")
    assert silent.kind is None
    assert gen.kind == DeadlineError.__name__
    assert gen.error == "stage 0: gen:0 waiting for train:0 to send w0: nothing within 3 s"
    assert gen.seconds < SPAWN_S / 2


def test_a_dead_reader_is_named() -> None:
    train, _, dead = run_ranks(3, misbehave, (1, 2), "dead reader", timeout_s=SPAWN_S, method="spawn")
    assert dead.died
    assert train.kind == PeerLostError.__name__, train.error
    assert train.error is not None and "train:0 waiting for gen:1 to take w0" in train.error


def run_twice(rank: Rank, *, dies: bool) -> None:
    """With `dies`, the GPU is busy for a while before it comes to the second run, and the process is killed."""
    rank.executor.run()
    if dies:
        torch.cuda._sleep(40_000_000_000)  # type: ignore[no-untyped-call]  # about 20 s
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        rank.executor.run()
    finally:
        rank.executor.close()


def die_while_pulling(number: int, address: str, worlds: tuple[int, int]) -> None:
    schedule = one_large_tensor(number, worlds)
    tensors = {local.name: torch.zeros(ELEMENTS) for local in schedule.tensors}
    rank = Rank(number, address, worlds, schedule, tensors, 1, timeout_s=SPAWN_S / 2)
    run_twice(rank, dies=number == 1)


def test_a_reader_that_dies_while_it_pulls_is_named_before_the_deadline() -> None:
    train, dead = run_ranks(2, die_while_pulling, (1, 1), timeout_s=SPAWN_S, method="spawn")
    assert dead.died
    assert train.kind == PeerLostError.__name__, train
    assert train.error is not None and "train:0 waiting for gen:0 to take w0" in train.error
    assert train.seconds < SPAWN_S / 2


def without_expandable_segments(number: int, address: str, worlds: tuple[int, int]) -> None:
    if number == 0:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    misbehave(number, address, worlds, "none")


def test_expandable_segments_are_refused_on_both_sides() -> None:
    train, gen = run_ranks(2, without_expandable_segments, (1, 1), timeout_s=SPAWN_S, method="spawn")
    assert train.kind == "TransportUnavailable"
    assert train.error is not None and "expandable_segments:False" in train.error
    assert gen.kind == SessionError.__name__
    assert gen.error == train.error


def test_one_handle_for_each_allocation() -> None:
    block = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    other = torch.zeros(96 << 20, dtype=torch.uint8, device="cuda")
    tensors = {f"view{n}": block[n << 20 : (n + 1) << 20] for n in range(8)} | {"other": other}
    exported = ipc.export(tensors)
    assert len({exported.tensors[f"view{n}"][0] for n in range(8)}) == 1
    assert len(exported.allocations) == len({exported.tensors["view0"][0], exported.tensors["other"][0]})
    assert ipc.Export.from_json(exported.to_json()) == exported


def test_tensors_of_the_own_process_are_not_mapped() -> None:
    tensor = torch.zeros(1000, device="cuda")
    mappings = ipc.Mappings(tensor.device)
    exported = ipc.Export.from_json(ipc.export({"w": tensor[10:]}).to_json())
    assert mappings.addresses(exported, ["w"], "train:0") == [tensor.data_ptr() + 40]
    assert mappings._mapped == {}
    with pytest.raises(SessionError, match="train:0 does not export v"):
        mappings.addresses(exported, ["v"], "train:0")


def test_an_export_says_which_gpus_it_is_of() -> None:
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    exported = ipc.export({str(device): torch.zeros(8 << 20, device=device) for device in devices})
    assert [block.gpu for block in exported.allocations] == [gpu_of(device) for device in devices]
    assert len({block.gpu for block in exported.allocations}) == len(devices)


def damaged(change: Callable[[dict[str, Any]], None]) -> str:
    read = json.loads(ipc.export({"w": torch.zeros(8, device="cuda")}).to_json())
    change(read)
    return json.dumps(read)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"host": 1}'])
def test_what_is_no_export_is_refused(text: str) -> None:
    with pytest.raises(SessionError, match="not an export"):
        ipc.Export.from_json(text)


def test_an_export_that_points_elsewhere_is_refused() -> None:
    with pytest.raises(SessionError, match="w lies in no allocation"):
        ipc.Export.from_json(damaged(lambda read: read["tensors"].update(w=[0, 1 << 50])))
    exported = ipc.Export.from_json(damaged(lambda read: read.update(host="elsewhere")))
    with pytest.raises(Exception, match="train:3 runs on another host"):
        ipc.Mappings(torch.device("cuda", 0)).addresses(exported, ["w"], "train:3")
