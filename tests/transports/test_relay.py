"""Relays: what the trainer sends once, and what generation replicas pass on; when a plan relays, and that it arrives."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from helpers import planned_refits, simulate
from helpers.gpu import needs_gpus
from helpers.plans import Case
from helpers.ranks import run_ranks, values

from mcore_reshard.cli.main import main
from mcore_reshard.kernels.errors import DeadlineError, RefitError, Waiting
from mcore_reshard.kernels.transports import relay as relaying
from mcore_reshard.kernels.transports.base import Queued, StageReport
from mcore_reshard.kernels.transports.relay import RelayedExecutor
from mcore_reshard.planner.plan.loads import busiest_link
from mcore_reshard.planner.plan.make_schedule import relays_of, schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.plan_file import save_plan
from mcore_reshard.planner.plan.schedule import LocalTensor, Schedule, StridedBox, TransferTable, World
from mcore_reshard.planner.proof.prove import prove

ONE_TO_THREE = Case("tiny-qwen3", "tp=1", "dp=3")
TWO_TO_FOUR = Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=2,dp=2")

FP8_TO_FP8 = Case("tiny-qwen3-moe-fp8", "tp=1", "dp=2", dtypes=("fp8", "fp8"), block=(128, 128))
BF16_TO_FP8 = replace(FP8_TO_FP8, dtypes=("bf16", "fp8"))


def sent(plan: Plan, world: str) -> int:
    ranks = range(plan.train.world if world == "train" else plan.gen.world)
    schedules = (schedule_of(plan, "train", r) if world == "train" else relays_of(plan, r)[0].sends for r in ranks)
    return sum(int(stage.sends.nbytes.sum()) for schedule in schedules for stage in schedule.stages)


def test_a_trainer_with_three_replicas_sends_the_model_after() -> None:
    plan = ONE_TO_THREE.plan()
    assert plan.relay
    model = plan.bulk_bytes
    assert plan.send_bytes.tolist() == [model] == [sent(plan, "train")]
    assert plan.recv_bytes.tolist() == [model] * 3
    assert plan.relay_bytes.sum() == 2 * model == sent(plan, "gen")
    assert plan.relay_bytes.max() < 1.1 * plan.relay_bytes.mean()
    assert busiest_link(plan) == model


@pytest.mark.parametrize(
    ("train", "gen", "relays"),
    [
        ("tp=2", "tp=2", False),  # nothing to relay
        ("tp=2", "tp=1,dp=2", False),  # as many senders as receivers: what replicas receive is the limit
        ("tp=2,dp=2", "tp=2", False),
        ("tp=2", "tp=2,dp=2", True),
        ("tp=1", "tp=2", False),  # norms go to both, which is next to nothing
    ],
)
def test_a_plan_relays_where_that_shortens_the_busiest_link(train: str, gen: str, relays: bool) -> None:
    assert Case("tiny-qwen3", train, gen).plan().relay is relays


@pytest.mark.parametrize("case", [ONE_TO_THREE, TWO_TO_FOUR], ids=str)
def test_both_hops_together_bring_every_element_after(case: Case) -> None:
    plan = case.plan()
    assert plan.relay and prove(plan).ok and simulate.damage(plan) == []


def test_what_lands_and_what_is_passed_on_are_all_that_a_rank_holds() -> None:
    plan = TWO_TO_FOUR.plan()
    for rank in range(plan.gen.world):
        first, relay = schedule_of(plan, "gen", rank), relays_of(plan, rank)[0]
        assert set(first.tensors) == set(relay.receives.tensors)
        landed, passed_on = (
            sum(int(stage.recvs.nbytes.sum()) for stage in schedule.stages) for schedule in (first, relay.receives)
        )
        assert landed + passed_on == plan.recv_bytes[rank]
        assert sum(int(stage.sends.nbytes.sum()) for stage in relay.sends.stages) == plan.relay_bytes[rank]
        assert all((stage.sends.peer != rank).all() for stage in relay.sends.stages)
        assert relay.sends.name == f"relay:{rank}" and relay.receives.name == f"gen:{rank}"


def test_a_reader_finds_at_its_replica_what_it_wants_where_it_keeps_it_itself() -> None:
    receives = relays_of(TWO_TO_FOUR.plan(), 1)[0].receives
    assert receives.view is not None
    other_end = receives.view.other_end()
    assert other_end.tensors == receives.tensors
    for stage, table in zip(receives.stages, other_end.stages, strict=True):
        assert np.array_equal(stage.recvs.offset, table.offset) and np.array_equal(stage.recvs.peer, table.peer)


# Hosts are known: bytes enter each of them once.
THREE_HOPS = Case("tiny-qwen3", "tp=2", "tp=1,dp=4", machine="h200-8,gpus=2")
HALF_SHARED = Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=1,dp=3", machine="h200-8", hosts="train=a*2,gen=b*2+a*1@4")
CAST_TO_ONE_HOST = Case(
    "tiny-qwen3-moe", "tp=1,ep=2,dp=2", "tp=1,dp=4", dtypes=("bf16", "fp8"), block=(8, 8), machine="h200-8"
)


def waves_of(plan: Plan, world: World, rank: int) -> tuple[Schedule, ...]:
    view = schedule_of(plan, world, rank).view
    assert view is not None
    return view.waves()


def moved(schedule: Schedule) -> Iterator[Counter[tuple[Any, ...]]]:
    """A rank's sends, receives and pulls, and those of both its parts in the second hop."""
    yield rows(schedule.tensors, schedule.strided_boxes, (stage.sends for stage in schedule.stages))
    yield rows(schedule.tensors, schedule.strided_boxes, (stage.recvs for stage in schedule.stages))
    if schedule.world == "gen" and schedule.view is not None:
        other_end = schedule.view.other_end()
        yield rows(other_end.tensors, other_end.strided_boxes, other_end.stages)
    if schedule.world == "gen" and schedule.relayed and schedule.view is not None:
        relay = schedule.view.relays()[0]
        for part in (relay.sends, relay.receives):
            yield from moved(part)


def rows(
    tensors: Sequence[LocalTensor], strided_boxes: Sequence[StridedBox], tables: Iterable[TransferTable]
) -> Counter[tuple[Any, ...]]:
    return Counter(
        (tensors[tensor], strided_boxes[strided_box], *rest)
        for t in tables
        for tensor, strided_box, *rest in zip(
            *(c.tolist() for c in (t.tensor, t.strided_box, t.peer, t.offset, t.nbytes, t.transfer_group, t.member)),
            strict=True,
        )
    )


@pytest.mark.parametrize("case", [ONE_TO_THREE, TWO_TO_FOUR, FP8_TO_FP8], ids=str)
def test_waves_are_the_relay_in_parts(case: Case) -> None:
    plan = case.plan()
    for world, ranks in (("train", plan.train.world), ("gen", plan.gen.world)):
        for rank in range(ranks):
            whole = schedule_of(plan, world, rank)
            waves = waves_of(plan, world, rank)
            assert len(waves) == plan.waves == 8
            for together, *parts in zip(moved(whole), *map(moved, waves), strict=True):
                assert sum(parts, Counter()) == together


def test_a_weight_and_its_scales_are_in_the_same_wave() -> None:
    plan = FP8_TO_FP8.plan()
    assert plan.pairs
    for wave in waves_of(plan, "train", 0):
        sends = [stage.sends for stage in wave.stages]
        names = {
            plan.parameter_name(*at)
            for t in sends
            for at in zip(t.transfer_group.tolist(), t.member.tolist(), strict=True)
        }
        scales = {name for name in names if name.endswith("_scale_inv")}
        assert {name.removesuffix("_scale_inv") for name in scales} <= names
        weights = {f"{name}_scale_inv" for name in names - scales}
        assert not weights & (all_scales(plan) - scales)


def all_scales(plan: Plan) -> set[str]:
    sends = [stage.sends for stage in schedule_of(plan, "train", 0).stages]
    names = (
        plan.parameter_name(*at) for t in sends for at in zip(t.transfer_group.tolist(), t.member.tolist(), strict=True)
    )
    return {name for name in names if name.endswith("_scale_inv")}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("replicas", [2, 3, 4, 8])
def test_every_wave_brings_every_replica_its_share(replicas: int) -> None:
    plan = Case("qwen3-30b-a3b", "tp=1", f"dp={replicas}").plan()
    landed = np.array(
        [
            [sum(int(stage.recvs.nbytes.sum()) for stage in wave.stages) for wave in waves_of(plan, "gen", r)]
            for r in range(replicas)
        ]
    )
    assert (abs(landed - landed.mean(axis=0)) < 0.1 * landed.mean(axis=0)).all()


def test_what_is_cast_moves_as_a_whole() -> None:
    plan = BF16_TO_FP8.plan()
    assert plan.relay and waves_of(plan, "train", 0) == ()


def test_the_simulation_notices_a_replica_that_passes_nothing_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ONE_TO_THREE.new_plan()
    silent = relays_of(plan, 1)[0].sends
    monkeypatch.setattr(simulate, "relays_of", lambda plan, rank: (_silenced(relays_of(plan, rank)[0], silent, rank),))
    assert any("relay:1 -> gen:0" in fault for fault in simulate.damage(plan))


def _silenced(relay, silent, rank):  # type: ignore[no-untyped-def]
    return replace(relay, sends=silent.with_peers(())) if rank == 1 else relay


def test_the_command_line_says_who_passes_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(ONE_TO_THREE.plan(), path)
    assert main(["show", str(path), "--rank", "gen:1", "--json"]) == 0
    relay = json.loads(capsys.readouterr().out)["relay"]
    assert [peer["rank"] for peer in relay["sends"][0]["peers"]] == [0, 2]
    assert sum(stage["bytes"] for stage in relay["sends"]) == ONE_TO_THREE.plan().relay_bytes[1]
    assert main(["explain", str(path), "model.norm.weight[0]", "--json"]) == 0
    origins = json.loads(capsys.readouterr().out)["origins"]
    first_dst_replica = next(origin["dst"]["rank"] for origin in origins if origin["relayed_by"] is None)
    assert [origin["relayed_by"] for origin in origins if origin["dst"]["rank"] != first_dst_replica] == [
        first_dst_replica
    ] * 2


def relayed_on_gpus(number: int, address: str, case: Case, device: str) -> tuple[set[str], dict[str, int]]:
    in_waves()
    return planned_refits.refit(number, address, case, device, transport="direct")


def in_waves() -> Any:
    """Replicas of this process have five waves, however few bytes there are. Returns the module of pushes."""
    from mcore_reshard.kernels.transports.direct import chain, pushes

    chain.waves_for = lambda nbytes: 5  # type: ignore[assignment]
    return pushes


def located_over_gloo(number: int, address: str, case: Case) -> tuple[set[str], dict[str, int]]:
    return planned_refits.refit(number, address, case, "cpu", transport="gloo", bucket_bytes=8192)


@pytest.mark.parametrize("case", [THREE_HOPS, HALF_SHARED, CAST_TO_ONE_HOST], ids=str)
def test_every_byte_arrives_over_the_hops_of_known_hosts(case: Case) -> None:
    plan = case.plan()
    assert plan.later_hops
    ranks = plan.train.world + plan.gen.world
    assert values(run_ranks(ranks, located_over_gloo, case, timeout_s=120.0)) == [({"gloo"}, {})] * ranks


@pytest.mark.gpu
@pytest.mark.parametrize("device", [
    pytest.param("cuda:0", marks=needs_gpus(1), id="on one"), pytest.param("cuda", marks=needs_gpus(2), id="over nvlink"),
])  # fmt: skip
@pytest.mark.parametrize("case", [ONE_TO_THREE, TWO_TO_FOUR, FP8_TO_FP8, BF16_TO_FP8], ids=str)
def test_replicas_pass_on_over_direct(case: Case, device: str) -> None:
    plan = case.plan()
    ranks = plan.train.world + plan.gen.world
    told = values(run_ranks(ranks, relayed_on_gpus, case, device, timeout_s=120.0, method="spawn"))
    assert told == [({"direct"}, {})] * ranks


def dying_in_a_chain(number: int, address: str, dies: int) -> str:
    """A rank dies when it has queued two of five waves."""
    pushes = in_waves()
    launch = pushes.Pushes.launch

    def die(wave: int) -> int:
        if wave == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return wave

    if number == dies:
        pushes.Pushes.launch = lambda self, waves, pushed: launch(self, map(die, waves), pushed)
    try:
        planned_refits.refit(number, address, ONE_TO_THREE, "cuda:0", transport="direct", timeout_s=20.0)
    except RefitError as error:
        torch.cuda.synchronize()  # nothing on the GPU waits for the dead
        return f"{error}"
    return "no error"


@pytest.mark.gpu
@needs_gpus(1)
@pytest.mark.parametrize("dies", [0, 1, 2])
def test_who_dies_in_a_chain_is_named_and_leaves_no_gpu_waiting(dies: int) -> None:
    outcomes = run_ranks(4, dying_in_a_chain, dies, timeout_s=60.0, method="spawn")
    assert outcomes.pop(dies).kind == "died"
    names = [f"gen:{dies - 1}", f"relay:{dies - 1}"] if dies else ["train:0"]
    for outcome in outcomes:
        assert any(name in outcome.value for name in names), outcome


def failing(number: int, address: str) -> None:
    """Generation rank 1 cannot connect as a relay."""
    role = relaying._connect_role

    def broken(connect: Any, context: Any, hop: int, waves: Any) -> Any:
        if waves[0].name == "relay:1":
            raise OSError("no memory left to share")
        return role(connect, context, hop, waves)

    relaying._connect_role = broken  # this process ends with the test
    planned_refits.refit(number, address, ONE_TO_THREE, "cpu", timeout_s=20.0)


def test_a_relay_that_cannot_connect_is_everyones_error_with_its_cause_and_at_once() -> None:
    outcomes = run_ranks(4, failing, timeout_s=60.0)
    assert max(outcome.seconds for outcome in outcomes) < 10
    assert all("no memory left to share" in str(outcome.error) for outcome in outcomes)
    assert outcomes[2].kind == "OSError" and {o.kind for o in outcomes} == {"OSError", "SessionFailed"}


def failing_in_a_wave(number: int, address: str, part: str, wave: int) -> None:
    """One part of generation rank 1 fails in the second half of a wave of the second hop."""
    role = relaying._connect_role

    def broken(connect: Any, context: Any, hop: int, waves: Any) -> relaying.Role:
        found = role(connect, context, hop, waves)
        if waves[0].name == part:
            executor: Any = found.waves[wave]
            start, last = executor._start, executor._buckets[-1]

            def failing_start(bucket: Any, slot: Any) -> Any:
                if bucket is last:
                    raise OSError("the wave is on fire")
                return start(bucket, slot)

            executor._start = failing_start
        return found

    relaying._connect_role = broken  # this process ends with the test
    planned_refits.refit(number, address, ONE_TO_THREE, "cpu", timeout_s=20.0, bucket_bytes=4096)


@pytest.mark.parametrize(("part", "wave"), [("relay:1", 4), ("gen:1", 4)])
def test_a_wave_that_fails_on_one_rank_is_everyones_error_with_its_cause_and_at_once(part: str, wave: int) -> None:
    outcomes = run_ranks(4, failing_in_a_wave, part, wave, timeout_s=60.0)
    assert max(outcome.seconds for outcome in outcomes) < 10
    assert all("the wave is on fire" in str(outcome.error) for outcome in outcomes)
    assert outcomes[2].kind == "OSError" and {o.kind for o in outcomes} == {"OSError", "SessionFailed"}


class Part:
    """A part of a relay that does what it is told, and remembers that it ran."""

    name, scratch_bytes = "told", 0

    def __init__(self, does: Callable[[], Any] = lambda: None) -> None:
        self.ran, self._does = Event(), does

    def run(self) -> tuple[StageReport, ...]:
        self.ran.set()
        self._does()
        return (StageReport(0, 1, 1, 8, 0.0),)

    def close(self) -> None:
        pass


class Left:
    """A group that remembers that it was left."""

    def __init__(self) -> None:
        self.event = Event()

    def close(self) -> None:
        self.event.set()


def fail(error: Exception) -> None:
    raise error


def relaying_parts(first: list[Part], sends: list[Part], receives: list[Part]) -> tuple[RelayedExecutor, list[Event]]:
    groups: list[Any] = [Left(), Left()]
    ends = (True, sends, groups[0]), (False, receives, groups[1])
    roles = [relaying.Role(1, is_sender, tuple(parts), group) for is_sender, parts, group in ends]
    return RelayedExecutor(first, roles, None), [group.event for group in groups]


def after(event: Event) -> None:
    assert event.wait(5.0)


def test_no_wave_is_passed_on_after_one_that_failed_and_its_error_is_the_refits() -> None:
    sends, receives = [Part(), Part(), Part()], [Part(lambda: fail(OSError("on fire"))), Part(), Part()]
    first = [Part(), Part(lambda: after(left[1])), Part(lambda: fail(ValueError("a consequence")))]
    executor, left = relaying_parts(first, sends, receives)
    with pytest.raises(OSError, match="on fire"):
        executor.run()
    assert not receives[1].ran.is_set() and left[0].is_set()
    executor.close()


def test_the_first_hop_goes_on_when_the_second_has_failed() -> None:
    """The trainer may wait for this rank, and others for the trainer."""
    first = [Part(), Part(lambda: after(left[0])), Part()]
    executor, left = relaying_parts(first, [Part(lambda: fail(OSError("on fire"))), Part(), Part()], [Part()] * 3)
    with pytest.raises(OSError, match="on fire"):
        executor.run()
    assert first[2].ran.is_set()


def test_a_rank_that_fails_in_the_first_hop_lets_those_go_that_wait_for_it() -> None:
    sends, receives = [Part(), Part()], [Part(lambda: after(left[0])), Part()]
    first = [Part(), Part(lambda: (after(sends[0].ran), after(receives[0].ran), fail(OSError("on fire"))))]
    executor, left = relaying_parts(first, sends, receives)
    with pytest.raises(OSError, match="on fire"):
        executor.run()
    assert not sends[1].ran.is_set() and not receives[1].ran.is_set()


def test_a_wave_is_shared_within_a_host_after_the_part_that_brings_it_there() -> None:
    """Part 1 has wave 1 from the trainer, and wave 0 from other hosts."""
    shares = [Part(), Part()]
    first = [
        Part(),
        Part(lambda: early.append(shares[0].ran.wait(0.2))),
        Part(lambda: (after(shares[0].ran), early.append(shares[1].ran.wait(0.2)))),
    ]
    early: list[bool] = []
    group: Any = Left()
    executor = RelayedExecutor(first, [relaying.Role(2, False, shares, group)], None, joined=1)
    assert sum(report.transfers for report in executor.run()) == 5
    assert early == [False, False] and shares[1].ran.is_set()
    executor.close()


class QueuedPart(Part, Queued):
    """A part that can begin behind others; `log` has what was asked of all parts."""

    def __init__(self, number: int, log: list[tuple[str, int]], does: Callable[[], Any] = lambda: None) -> None:
        super().__init__(does)
        self._number, self._log, self.written_bytes = number, log, 0

    def queue(self) -> None:
        self._log.append(("queue", self._number))
        self.written_bytes = 10**self._number

    def run(self) -> tuple[StageReport, ...]:
        self._log.append(("run", self._number))
        return super().run()


def test_the_next_part_is_queued_before_one_is_awaited() -> None:
    log: list[tuple[str, int]] = []
    executor = RelayedExecutor([QueuedPart(number, log) for number in range(3)], [], None)
    for _ in range(2):
        assert sum(report.transfers for report in executor.run()) == 3
        assert log == [("queue", 0), ("queue", 1), ("run", 0), ("queue", 2), ("run", 1), ("run", 2)]
        log.clear()
    assert executor.written_bytes == 111
    executor.close()


def test_what_a_queued_part_may_have_written_counts_when_the_one_before_it_fails() -> None:
    log: list[tuple[str, int]] = []
    parts = [QueuedPart(0, log, lambda: fail(OSError("on fire"))), QueuedPart(1, log), QueuedPart(2, log)]
    executor = RelayedExecutor(parts, [], None)
    with pytest.raises(OSError, match="on fire"):
        executor.run()
    assert log == [("queue", 0), ("queue", 1), ("run", 0)] and executor.written_bytes == 11


def test_no_part_is_queued_where_one_needs_what_another_transport_brings() -> None:
    log: list[tuple[str, int]] = []
    executor = RelayedExecutor([Part(), QueuedPart(1, log)], [], None, joined=1)
    executor.run()
    assert log == [("run", 1)]


def test_a_rank_that_waits_in_both_its_parts_says_for_whom_in_each() -> None:
    to, of = (Waiting("gen:0", peer, 0, "model.w", sends=False) for peer in ("gen:1", "relay:2"))
    sends = [Part(lambda: (after(receives[0].ran), fail(DeadlineError(to, "nothing within 5 s"))))]
    receives = [Part(lambda: (after(left[0]), fail(DeadlineError(of, "nothing within 5 s"))))]
    executor, left = relaying_parts([Part()], sends, receives)
    with pytest.raises(DeadlineError) as raised:
        executor.run()
    assert [raised.value.waiting, *(other.waiting for other in raised.value.others)] == [to, of]
