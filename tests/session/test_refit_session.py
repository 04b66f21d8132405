"""Whole sessions of real processes: what a refit promises when all goes well, and what it says when it does not."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gloo import NoisyWire, connecting
from helpers.handmade import HandTransfer, allocate, expected, random_transfers, raw_bytes, schedule_of
from helpers.ranks import Outcome, StoreProcess, run_ranks, store_process, values
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.buckets import Bucket
from mcore_reshard.kernels.errors import BindError, RefitError, SessionError, VersionError, Waiting
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.exchange import StoreExchange, fetch
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup
from mcore_reshard.kernels.rendezvous.store import connect_store
from mcore_reshard.kernels.transports import registry
from mcore_reshard.kernels.transports.base import StageReport, TransportContext
from mcore_reshard.kernels.transports.direct.peer_signals import PeerSignals
from mcore_reshard.kernels.transports.gloo import GlooExecutor
from mcore_reshard.kernels.transports.group_ranks import group_names, group_rank
from mcore_reshard.kernels.transports.registry import TRANSPORT_VARIABLE
from mcore_reshard.planner.layout.geometry import row_major_strides
from mcore_reshard.planner.plan.schedule import LocalTensor, Schedule, StridedBox
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint
from mcore_reshard.session.gc_pause import gc_paused
from mcore_reshard.session.store_server import serve_store

MISC = ("model.odd.weight", "model.odd.bias")
TIMEOUT_S = 20.0
SHORT_S = 3.0  # where a test waits for the deadline


def transfers_of(worlds: tuple[int, int]) -> list[HandTransfer]:
    return random_transfers(np.random.default_rng(7), worlds, parameters=20, stages=2)


def whole_tensor(name: str, version: int) -> torch.Tensor:
    return torch.full((3, 5), MISC.index(name) + 10.0 * version)


class Trainer:
    """A training rank with random weights of each version."""

    def __init__(self, rank: int, address: str, worlds: tuple[int, int], **options: Any) -> None:
        options.setdefault("export", self.export)
        options.setdefault("timeout_s", TIMEOUT_S)
        self.schedule = replace(schedule_of(transfers_of(worlds), "train", rank, worlds, misc=MISC), **changed(options))
        self.tensors = allocate(self.schedule)
        self.version = 0
        live = options.pop("tensors", lambda: self.tensors)
        self.endpoint = TrainEndpoint(self.schedule, live, store=address, **arguments(bucket_bytes=128, **options))

    def step(self, version: int) -> None:
        self.version = version
        for name, tensor in allocate(self.schedule, seed=version).items():
            self.tensors[name].copy_(tensor)

    def export(self, names: Sequence[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
        for name in MISC if names is None else names:
            yield name, whole_tensor(name, self.version)


class Engine:
    """A generation rank that remembers what it was given."""

    def __init__(self, rank: int, address: str, worlds: tuple[int, int], **options: Any) -> None:
        options.setdefault("load_weights", self.load_weights)
        options.setdefault("timeout_s", TIMEOUT_S)
        padded = [LocalTensor("padded", (4, 4), "float32")]
        schedule = schedule_of(transfers_of(worlds), "gen", rank, worlds, misc=MISC, extra=padded)
        index = [local.name for local in schedule.tensors].index("padded")
        tail = (index, 12, StridedBox((1, 4), row_major_strides((1, 4))))
        self.schedule: Schedule = replace(schedule, padding=(tail,), **changed(options))
        self.tensors = allocate(self.schedule)
        self.loaded: dict[str, list[float]] = {}
        self.derived = 0
        live = options.pop("tensors", lambda: self.tensors)
        self.endpoint = GenerationEndpoint(
            self.schedule,
            live,
            store=address,
            after_direct_writes=self.derive,
            **arguments(bucket_bytes=128, **options),
        )

    def load_weights(self, tensors: Any) -> None:
        for name, tensor in tensors:
            self.loaded[name] = tensor.tolist()

    def derive(self) -> None:
        self.derived += 1


def arguments(**given: Any) -> dict[str, Any]:
    """The arguments of an endpoint, those that are options in one record."""
    options = {field.name: given.pop(field.name) for field in fields(Options) if field.name in given}
    return {**given, "options": Options(**options)}


def changed(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options.pop(name) for name in ("digest", "misc") if name in options}


def seat(rank: int, address: str, worlds: tuple[int, int], **options: Any) -> Trainer | Engine:
    if rank < worlds[0]:
        return Trainer(rank, address, worlds, **options)
    return Engine(rank - worlds[0], address, worlds, **options)


def bytes_of(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: raw_bytes(tensor) for name, tensor in tensors.items()}


def named(worlds: tuple[int, int], rank: int) -> str:
    return f"train:{rank}" if rank < worlds[0] else f"gen:{rank - worlds[0]}"


# --- refits that go well -----------------------------------------------------------------------------------------


def three_refits(rank: int, address: str, worlds: tuple[int, int]) -> Any:
    me = seat(rank, address, worlds)
    me.endpoint.prepare()
    held: list[Any] = []
    for version in (1, 2, 5):
        if isinstance(me, Trainer):
            me.step(version)
        report = me.endpoint.refit(version)
        if isinstance(me, Trainer):
            for tensor in me.tensors.values():
                tensor.view(torch.uint8).fill_(0x55)  # the next optimizer step, at once
            held.append((report, None, None))
        else:
            time.sleep(0.05)
            held.append((report, bytes_of(me.tensors), dict(me.loaded)))
    assert me.endpoint.committed_version == 5
    if isinstance(me, Engine):
        assert me.derived == 3
    me.endpoint.close()
    return held


@pytest.mark.parametrize("worlds", [(2, 2), (3, 1)])
def test_every_refit_delivers_its_own_version(worlds: tuple[int, int]) -> None:
    outcomes = values(run_ranks(sum(worlds), three_refits, worlds))
    transfers = transfers_of(worlds)
    train = [schedule_of(transfers, "train", rank, worlds) for rank in range(worlds[0])]
    for number, version in enumerate((1, 2, 5)):
        sources = [allocate(schedule, seed=version) for schedule in train]
        for rank in range(worlds[1]):
            _, held, loaded = outcomes[worlds[0] + rank][number]
            assert held.pop("padded") == b"\xee" * 48 + b"\0" * 16
            assert held == bytes_of(expected(transfers, schedule_of(transfers, "gen", rank, worlds), sources))
            assert loaded == {name: whole_tensor(name, version).tolist() for name in MISC}
        reports = [outcome[number][0] for outcome in outcomes]
        assert {(report.version, report.transport) for report in reports} == {(version, "gloo")}
        assert sum(r.nbytes for r in reports[: worlds[0]]) == sum(r.nbytes for r in reports[worlds[0] :]) > 0
        assert {report.misc_bytes for report in reports[worlds[0] :]} == {120}
        assert all(sum(stage.nbytes for stage in report.stages) == report.nbytes for report in reports)


def meets_a_slow_engine(rank: int, address: str, worlds: tuple[int, int]) -> int:
    me = seat(rank, address, worlds, timeout_s=SHORT_S)
    if isinstance(me, Engine):
        time.sleep(2.5 * SHORT_S)
    me.endpoint.prepare(timeout_s=10 * SHORT_S)
    version = 1
    if isinstance(me, Trainer):
        me.step(version)
    return me.endpoint.refit(version).version


def test_no_training_rank_gives_an_engine_up_before_the_time_to_connect_is_over() -> None:
    assert values(run_ranks(3, meets_a_slow_engine, (2, 1))) == [1, 1, 1]


def under_golden(rank: int, address: str, worlds: tuple[int, int]) -> Any:
    os.environ[TRANSPORT_VARIABLE] = "golden"
    me = seat(rank, address, worlds, tensors={})
    me.endpoint.prepare()
    if isinstance(me, Trainer):
        me.step(1)
    report = me.endpoint.refit(1)
    return report.transport, report.nbytes, report.misc_bytes, getattr(me, "loaded", None), getattr(me, "derived", 0)


def test_golden_moves_everything_by_name_and_needs_no_tensor() -> None:
    outcomes = values(run_ranks(3, under_golden, (2, 1)))
    assert outcomes[0] == ("golden", 0, 120, None, 0)
    assert outcomes[2] == ("golden", 0, 120, {name: whole_tensor(name, 1).tolist() for name in MISC}, 1)


def many_refits(rank: int, address: str, worlds: tuple[int, int]) -> int:
    me = seat(rank, address, worlds)
    me.endpoint.prepare()
    store = connect_store(address, Options())
    keys = []
    for version in range(1, 121):
        me.endpoint.refit(version)
        keys.append(store.stats()["session_keys"])
    # The leader forgets an attempt a moment after the others have left it, so a count may be one attempt higher.
    assert min(keys[-10:]) <= max(keys[5:15]), "the store fills up"
    return len(keys)


def test_refits_leave_nothing_behind_in_the_store() -> None:
    assert values(run_ranks(2, many_refits, (1, 1))) == [120, 120]


# --- ranks that do not fit together ------------------------------------------------------------------------------


def other_digest(rank: int, address: str) -> None:
    seat(rank, address, (2, 1), digest="new" if rank == 2 else "old").endpoint.prepare()


def test_a_digest_that_differs_is_reported_by_every_rank() -> None:
    outcomes = run_ranks(3, other_digest)
    assert {outcome.kind for outcome in outcomes} == {"SessionError"}
    assert {outcome.error for outcome in outcomes} == {
        "the ranks of this session do not fit together, give all of them the same:"
        "\n  different digest: old on train:0, train:1; new on gen:0"
    }


def other_checksums(rank: int, address: str) -> None:
    seat(rank, address, (2, 1), checksums=rank == 2).endpoint.prepare()


def test_checksums_are_asked_for_by_all_ranks_or_none() -> None:
    outcomes = run_ranks(3, other_checksums)
    assert {outcome.kind for outcome in outcomes} == {"SessionError"}
    assert all("different checksums: False on train:0, train:1; True on gen:0" in str(o.error) for o in outcomes)


def one_stays_away(rank: int, address: str) -> None:
    if rank != 1:
        seat(rank, address, (2, 1), timeout_s=1.0).endpoint.prepare()


def test_missing_ranks_are_named_at_the_deadline() -> None:
    outcomes = run_ranks(3, one_stays_away)
    for rank in (0, 2):
        assert outcomes[rank].kind == "SessionFailed"
        assert "train:1 did not come to connect within 1 s" in str(outcomes[rank].error)
        assert outcomes[rank].seconds < 3


def one_cannot_bind(rank: int, address: str) -> None:
    me = seat(rank, address, (2, 2))
    if rank == 3:
        me.tensors.pop("padded")
    me.endpoint.prepare()


def test_a_rank_that_cannot_bind_stops_all_at_once() -> None:
    *others, bad = run_ranks(4, one_cannot_bind)
    assert bad.kind == "BindError" and "padded: there is no such tensor" in str(bad.error)
    for outcome in others:
        assert outcome.kind == "SessionFailed"
        assert "gen:1: BindError: gen:1 cannot bind its schedule, 1 problem:" in str(outcome.error)
        assert outcome.seconds < 5


def group_of_its_own(context: TransportContext) -> None:
    schedule = context.bound.schedule
    GlooGroup(
        context.store,
        group_rank(schedule, schedule.world, schedule.rank),
        group_names(schedule),
        timeout_s=context.options.timeout_s,
    )


def words_between_peers(context: TransportContext) -> None:
    PeerSignals(context.store, context.bound, context.options.timeout_s)


def what_another_publishes(context: TransportContext) -> None:
    waiting = Waiting(context.bound.rank_name, "gen:1", 0, "model.w", sends=False)
    fetch(context.store, "gen:1", waiting, str, timeout_s=context.options.timeout_s)


def one_cannot_connect(rank: int, address: str, waits: Callable[[TransportContext], None]) -> None:
    """Generation rank 1 runs out of memory while the others wait for it in `waits`."""

    def connect(context: TransportContext) -> GlooExecutor:
        if rank == 3:
            time.sleep(0.5)
            raise MemoryError("no memory left")
        waits(context)
        raise AssertionError("nobody came")

    gloo = registry.resolve("gloo", "cpu")
    registry.register(replace(gloo, name="gloo-test", connect=connect))
    seat(rank, address, (2, 2), transport="gloo-test").endpoint.prepare()


@pytest.mark.parametrize("waits", [group_of_its_own, words_between_peers, what_another_publishes])
def test_a_rank_that_cannot_connect_stops_all_at_once(waits: Callable[[TransportContext], None]) -> None:
    *others, bad = run_ranks(4, one_cannot_connect, waits)
    assert (bad.kind, bad.error) == ("MemoryError", "no memory left")
    assert {(outcome.kind, outcome.error) for outcome in others} == {
        ("SessionFailed", "gen:1: MemoryError: no memory left")
    }
    assert max(outcome.seconds for outcome in others) < 5


def twice_the_same_rank(rank: int, address: str) -> None:
    seat(0, address, (1, 1), timeout_s=2.0).endpoint.prepare()


def test_two_processes_cannot_be_the_same_rank() -> None:
    kinds = sorted(str(outcome.error) for outcome in run_ranks(2, twice_the_same_rank))
    assert kinds[0].startswith("another process (") and "has been train:0 of this session" in kinds[0]
    assert "gen:0 did not come" in kinds[1]


def no_store(rank: int, address: str) -> None:
    seat(0, "127.0.0.1:9", (1, 1), timeout_s=1.0).endpoint.prepare()


def test_a_store_that_does_not_answer_is_an_error() -> None:
    (outcome,) = run_ranks(1, no_store)
    assert outcome.kind == "SessionError" and "no store answers at 127.0.0.1:9 within 1 s" in str(outcome.error)


def without_a_loader(rank: int, address: str) -> None:
    seat(rank, address, (1, 1), **({"load_weights": None} if rank else {})).endpoint.prepare()


def test_a_misc_route_without_a_loader_is_refused_before_any_byte() -> None:
    train, gen = run_ranks(2, without_a_loader)
    assert gen.kind == "BindError" and "2 parameters on the misc route, and no function" in str(gen.error)
    assert train.kind == "SessionFailed"


# --- versions ----------------------------------------------------------------------------------------------------


def going_back(rank: int, address: str) -> int | None:
    me = seat(rank, address, (1, 1))
    me.endpoint.prepare()
    me.endpoint.refit(3)
    for stale in (3, 2):
        with pytest.raises(RuntimeError, match=f"version {stale} does not follow 3"):
            me.endpoint.refit(stale)
    with pytest.raises(RuntimeError, match="different versions are refitted at once: 4 on train:0; 5 on gen:0"):
        me.endpoint.refit(4 + rank)
    with pytest.raises(RuntimeError, match="different versions are refitted at once: 3 on train:0; 4 on gen:0"):
        me.endpoint.refit(3 + rank)  # one rank that fell behind does not leave the others waiting
    for wrong in (True, 8.0, "9", 2**63, float("nan")):
        with pytest.raises(VersionError, match=f"a version is an integer of 64 bits, not {wrong!r} on train:0"):
            me.endpoint.refit(wrong if rank == 0 else None)  # type: ignore[arg-type]
    with pytest.raises(VersionError, match="no version was given"):
        me.endpoint.refit()
    numbers: Any = (np.int64(6), torch.tensor(7))
    for number in numbers:
        me.endpoint.refit(number)
    return me.endpoint.committed_version


def test_versions_are_integers_that_increase_and_agree() -> None:
    assert [(version, type(version)) for version in values(run_ranks(2, going_back))] == [(7, int)] * 2


# --- refits that go wrong ----------------------------------------------------------------------------------------


class Killed(GlooExecutor):
    """Dies before its third bucket."""

    def _pack(self, bucket: Bucket, message: NDArray[np.uint8]) -> None:
        if self._buckets.index(bucket) == 2:
            os.kill(os.getpid(), 9)
        super()._pack(bucket, message)


class Frozen(GlooExecutor):
    """Stops before its third bucket for longer than anyone waits."""

    def _pack(self, bucket: Bucket, message: NDArray[np.uint8]) -> None:
        if self._buckets.index(bucket) == 2:
            time.sleep(SHORT_S + 4)
        super()._pack(bucket, message)


def register(kind: type[GlooExecutor]) -> None:
    """Of this process: what the transport "gloo-test" runs."""
    gloo = registry.resolve("gloo", "cpu")
    registry.register(replace(gloo, name="gloo-test", connect=connecting(kind)))


def with_bad_executor(
    rank: int,
    address: str,
    worlds: tuple[int, int],
    bad: int,
    kind: type[GlooExecutor],
    timeout_s: float = TIMEOUT_S,
) -> None:
    register(kind if rank == bad else GlooExecutor)
    refit_and_check(seat(rank, address, worlds, transport="gloo-test", timeout_s=timeout_s))


class Noting(GlooExecutor):
    """Notes whether Python collects cycles while executors are connected, and while they run."""

    collecting: bool | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        Noting.collecting = gc.isenabled()
        super().__init__(*args, **kwargs)

    def run(self) -> tuple[StageReport, ...]:
        Noting.collecting = gc.isenabled()
        return super().run()


def collecting_before_within_and_after(rank: int, address: str) -> tuple[bool, bool | None, bool]:
    register(Noting)
    if rank:
        gc.disable()
    me = seat(rank, address, (1, 1), transport="gloo-test")
    before = gc.isenabled()
    me.endpoint.prepare()
    return before, Noting.collecting, gc.isenabled()


def test_pythons_collector_rests_while_a_session_connects() -> None:
    outcomes = run_ranks(2, collecting_before_within_and_after)
    assert values(outcomes) == [(True, False, True), (False, False, False)]


class NotingOnce(Noting):
    """Fails in the second run."""

    def run(self) -> tuple[StageReport, ...]:
        stages = super().run()
        if self._runs == 2:
            raise RuntimeError("the second run failed")
        return stages


def collecting_in_refits(rank: int, address: str, misc: Sequence[str]) -> list[bool | None]:
    """Whether Python collects: while bytes move, while tensors move by name, after a refit, after one that failed."""
    register(NotingOnce)
    by_name: list[bool] = []

    def export(names: Sequence[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
        by_name.append(gc.isenabled())
        return ((name, whole_tensor(name, 1)) for name in names or ())

    def load_weights(tensors: Any) -> None:
        by_name.append(gc.isenabled())
        dict(tensors)

    mover: dict[str, Any] = {"load_weights": load_weights} if rank else {"export": export}
    me = seat(rank, address, (1, 1), transport="gloo-test", misc=misc, **mover)
    me.endpoint.prepare()
    me.endpoint.refit(1)
    collects = [Noting.collecting, all(by_name) if by_name else None, gc.isenabled()]
    with pytest.raises(Exception, match="the second run failed"):
        me.endpoint.refit(2)
    return [*collects, gc.isenabled()]


@pytest.mark.parametrize(("misc", "by_name"), [((), None), (MISC, True)])
def test_it_rests_while_bytes_move_and_not_while_tensors_move_by_name(
    misc: Sequence[str], by_name: bool | None
) -> None:
    outcomes = run_ranks(2, collecting_in_refits, misc)
    assert values(outcomes) == [[False, by_name, True, True]] * 2


def test_the_collector_is_on_again_once_all_pauses_have_ended_and_in_processes_forked_meanwhile() -> None:
    first, second = gc_paused(), gc_paused()
    with first:
        second.__enter__()
        assert not gc.isenabled()
        if (child := os.fork()) == 0:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert not gc.isenabled()
    second.__exit__(KeyError, KeyError(), None)
    assert gc.isenabled()


def refit_and_check(me: Trainer | Engine) -> None:
    """Refit once; whatever happens, what failed is not committed, and the state says so."""
    me.endpoint.prepare()
    try:
        me.endpoint.refit(1)
    except Exception:
        assert me.endpoint.committed_version is None and me.endpoint.failure
        assert me.endpoint.state.kind in ("intact", "mixed")
        raise


def cause_of(outcome: Outcome) -> str:
    """What all ranks are told; a generation rank's error says its state too."""
    return str(outcome.error).partition("; gen:")[0]


def causes(outcomes: Sequence[Outcome]) -> set[str]:
    return {cause_of(outcome) for outcome in outcomes}


def test_a_damaged_bucket_fails_every_rank_with_the_same_cause() -> None:
    outcomes = run_ranks(4, with_bad_executor, (2, 2), 0, NoisyWire)
    (receiver,) = (outcome for outcome in outcomes if outcome.kind == "ChecksumError")
    assert "waiting for train:0 to send model.p" in str(receiver.error) and "arrived damaged" in str(receiver.error)
    others = [outcome for outcome in outcomes if outcome is not receiver]
    assert {outcome.kind for outcome in others} == {"SessionFailed"}
    (cause,) = causes(others)
    assert cause.endswith(f"ChecksumError: {cause_of(receiver)}")


def failing_but_alive(rank: int, address: str) -> float:
    start = time.monotonic()
    with pytest.raises(Exception, match="arrived damaged") as caught:
        with_bad_executor(rank, address, (1, 1), 0, NoisyWire)
    seconds = time.monotonic() - start
    time.sleep(2.0 * rank)
    assert caught.value.__traceback__ is not None, "the error, and all that its frames hold, is kept until here"
    return seconds


def test_a_rank_that_failed_and_lives_on_holds_nobody_up() -> None:
    assert max(values(run_ranks(2, failing_but_alive))) < 1.9


def test_a_rank_killed_in_a_refit_is_named_by_all_others() -> None:
    outcomes = run_ranks(4, with_bad_executor, (2, 2), 1, Killed)
    assert outcomes[1].died
    for rank in (0, 2, 3):
        assert outcomes[rank].kind in ("PeerLostError", "SessionFailed")
        told = str(outcomes[rank].error)
        assert "waiting for train:1 to send model.p" in told or "train:1 (process " in told
        assert outcomes[rank].seconds < 8


def test_a_frozen_rank_is_named_even_by_those_who_wait_for_somebody_else() -> None:
    outcomes = run_ranks(4, with_bad_executor, (2, 2), 1, Frozen, SHORT_S)
    for rank in (0, 2, 3):
        assert "waiting for train:1 to send model.p" in str(outcomes[rank].error)
        assert "nothing within 3 s" in str(outcomes[rank].error)
        assert outcomes[rank].seconds < SHORT_S + 5
    assert outcomes[1].kind in ("SessionFailed", "PeerLostError")


class Untold(GlooExecutor):
    """Waits without being told that there is nothing to wait for any more, as gloo sometimes makes a sender do."""

    told, closed = threading.Event(), threading.Event()

    def run(self) -> tuple[StageReport, ...]:
        assert self.told.wait(TIMEOUT_S)
        return ()

    def close(self) -> None:
        self.closed.set()


def untold(rank: int, address: str) -> None:
    """The executor is closed, but not while it runs."""
    if rank < 3:
        return with_bad_executor(rank, address, (2, 2), 0, NoisyWire)
    with pytest.raises(SessionError) as caught:
        with_bad_executor(rank, address, (2, 2), 3, Untold)
    assert not Untold.closed.is_set()
    Untold.told.set()
    assert Untold.closed.wait(TIMEOUT_S)
    raise caught.value


def test_a_rank_whose_transport_is_not_told_hears_of_a_failure_from_the_store() -> None:
    outcomes = run_ranks(4, untold)
    assert outcomes[3].kind == "SessionFailed" and "arrived damaged" in str(outcomes[3].error)
    assert outcomes[3].seconds < 6


class Slow(GlooExecutor):
    """Takes its time for the second bucket."""

    def _pack(self, bucket: Bucket, message: NDArray[np.uint8]) -> None:
        if self._buckets.index(bucket) == 1:
            time.sleep(1.0)
        super()._pack(bucket, message)


def interrupted(rank: int, address: str) -> tuple[str, float]:
    """The generation rank is interrupted while it waits for the second bucket."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    register(GlooExecutor if rank else Slow)
    me = seat(rank, address, (1, 1), transport="gloo-test")
    me.endpoint.prepare()
    if isinstance(me, Trainer):
        me.step(1)
    else:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    start = time.monotonic()
    with pytest.raises((KeyboardInterrupt, SessionError)) as caught:
        me.endpoint.refit(1)
    seconds, held = time.monotonic() - start, bytes_of(me.tensors)
    time.sleep(1.0)
    assert bytes_of(me.tensors) == held, "bytes landed after refit() had raised"
    return str(caught.value), seconds


def test_an_interrupt_while_bytes_move_ends_the_transfer_everywhere() -> None:
    (cause, train_s), (_, gen_s) = values(run_ranks(2, interrupted))
    assert cause == "gen:0: KeyboardInterrupt: "
    assert gen_s < 1 and train_s < 3


def left_behind(rank: int, address: str, kind: type[GlooExecutor]) -> list[tuple[int, int]]:
    """Threads and open files after each of several sessions, without the help of the garbage collector."""
    gc.disable()
    register(GlooExecutor if rank else kind)
    found = []
    for number in range(6):
        me = seat(rank, address, (1, 1), transport="gloo-test", session=f"session {number}")
        me.endpoint.prepare()
        with suppress(RefitError):
            me.endpoint.refit(1)
        me.endpoint.close()
        time.sleep(0.2)
        deadline = time.monotonic() + 15
        while (now := held()) != (found or [now])[0] and time.monotonic() < deadline:
            time.sleep(0.05)  # on a busy machine threads take their time to end
        found.append(now)
    return found


def held() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kind", [GlooExecutor, NoisyWire])
def test_sessions_leave_no_threads_and_no_connections_behind(kind: type[GlooExecutor]) -> None:
    for found in values(run_ranks(2, left_behind, kind)):
        assert len(set(found)) == 1, found


class Modes(GlooExecutor):
    """Says whether it runs in inference mode."""

    def run(self) -> tuple[StageReport, ...]:
        assert torch.is_inference_mode_enabled()
        return super().run()


def in_inference_mode(rank: int, address: str) -> None:
    with torch.inference_mode():
        with_bad_executor(rank, address, (1, 1), rank, Modes)


def test_a_refit_in_inference_mode_moves_its_bytes_in_it() -> None:
    values(run_ranks(2, in_inference_mode))


def dead_before(rank: int, address: str) -> None:
    me = seat(rank, address, (2, 1), timeout_s=10.0)
    me.endpoint.prepare()
    if rank == 1:
        os.kill(os.getpid(), 9)
    me.endpoint.refit(1)


def test_a_rank_that_died_between_refits_is_named_before_any_byte_moves() -> None:
    outcomes = run_ranks(3, dead_before)
    for rank in (0, 2):
        assert "train:1 (process " in str(outcomes[rank].error) and "has exited or was killed" in str(
            outcomes[rank].error
        )
        assert outcomes[rank].seconds < 5


def asks_in_vain(rank: int, address: str) -> list[int]:
    """Training rank 0 asks the others how a refit ended, and they are slow to answer, as after a store that froze."""
    me = seat(rank, address, (2, 2), timeout_s=2.0)
    me.endpoint.prepare()
    versions = [me.endpoint.refit(1).version]
    if rank == 0:
        assert me.endpoint._connection is not None
        assert me.endpoint._connection.group.settle(True)
    else:
        time.sleep(1.5)
    return [*versions, me.endpoint.refit(2).version, me.endpoint.refit(3).version]


def test_a_rank_that_was_too_slow_to_say_how_a_refit_ended_costs_no_further_refit() -> None:
    assert values(run_ranks(4, asks_in_vain)) == [[1, 2, 3]] * 4


def knows_while_others_go_on(rank: int, address: str) -> int:
    """Training rank 0 knows how a refit ended, and waits for others to ask; they know it too, and have gone on."""
    timeout_s = 9.0
    me = seat(rank, address, (1, 1), timeout_s=timeout_s)
    me.endpoint.prepare()
    me.endpoint.refit(1)
    if rank == 0:
        assert me.endpoint._connection is not None
        start = time.monotonic()
        assert me.endpoint._connection.group.settle(True)
        assert timeout_s / 2 <= time.monotonic() - start < timeout_s - 2.0
    return int(me.endpoint.refit(2).version)


def test_a_rank_that_knows_how_a_refit_ended_keeps_no_other_one_waiting_for_long() -> None:
    assert values(run_ranks(2, knows_while_others_go_on)) == [2, 2]


def rebound(rank: int, address: str) -> None:
    me = seat(rank, address, (2, 1))
    me.endpoint.prepare()
    me.endpoint.refit(1)
    if rank == 2:
        name = next(name for name in me.tensors if name != "padded")
        me.tensors[name] = me.tensors[name].clone()
    before = bytes_of(me.tensors)
    try:
        me.endpoint.refit(2)
    finally:
        assert bytes_of(me.tensors) == before and me.endpoint.committed_version == 1


def test_a_tensor_rebound_between_refits_stops_all_before_any_byte_moves() -> None:
    *train, gen = run_ranks(3, rebound)
    assert gen.kind == "StaleTensorError" and "bound tensors changed since prepare():\n  dst" in str(gen.error)
    assert {outcome.kind for outcome in train} == {"SessionFailed"}
    assert all("gen:0: StaleTensorError" in str(outcome.error) and outcome.seconds < 5 for outcome in train)


def rebound_source(rank: int, address: str) -> tuple[str, str]:
    me = seat(rank, address, (2, 1))
    me.endpoint.prepare()
    me.endpoint.refit(1)
    if rank == 0:
        me.tensors |= {name: tensor.clone() for name, tensor in me.tensors.items()}
    with pytest.raises(RefitError) as error:
        me.endpoint.refit(2)
    assert me.endpoint.committed_version == 1
    return type(error.value).__name__, me.endpoint.state.kind


def test_a_source_that_was_replaced_is_noticed_while_bytes_move_and_nothing_is_committed() -> None:
    errors, states = zip(*values(run_ranks(3, rebound_source)), strict=True)
    assert errors == ("StaleTensorError", "SessionFailed", "SessionFailed")
    assert states[2] == "mixed"  # bytes of the tensor that the model no longer has have moved


def failing_export(names: Sequence[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
    yield MISC[0], whole_tensor(MISC[0], 1)
    raise ValueError("the third expert is on fire")


def short_export(names: Sequence[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
    yield MISC[0], whole_tensor(MISC[0], 1)


def failing_load(tensors: Any) -> None:
    raise KeyError("lm_head.weight")


def half_load(tensors: Any) -> None:
    next(iter(tensors))


def with_bad_callback(rank: int, address: str, bad: int, name: str, function: Callable[..., Any]) -> None:
    refit_and_check(seat(rank, address, (2, 2), **({name: function} if rank == bad else {})))


@pytest.mark.parametrize(
    ("bad", "name", "function", "complaint"),
    [
        (0, "export", failing_export, "ValueError: the third expert is on fire"),
        (0, "export", short_export, "export yielded 1 of 2 tensors, without model.odd.bias"),
        (3, "load_weights", failing_load, "KeyError: 'lm_head.weight'"),
        (2, "load_weights", half_load, "load_weights left 1 tensors unread, first model.odd.bias"),
    ],
)
def test_an_error_of_trainer_or_engine_reaches_every_rank(
    bad: int, name: str, function: Callable[..., Any], complaint: str
) -> None:
    outcomes = run_ranks(4, with_bad_callback, bad, name, function)
    own = outcomes.pop(bad)
    assert own.kind in ("ValueError", "KeyError", "SessionError")
    assert {outcome.kind for outcome in outcomes} == {"SessionFailed"}
    (cause,) = causes(outcomes)
    assert cause.startswith(f"{named((2, 2), bad)}: ") and complaint in cause


class Broken(GlooExecutor):
    """Fails once its peers have gone on without it, as far as they can."""

    def run(self) -> tuple[StageReport, ...]:
        super().run()
        time.sleep(0.5)
        raise OSError("on fire")


def one_transfer_fails(rank: int, address: str) -> None:
    """Training rank 0's, and its alone: the others could enter the export."""

    def export(names: Sequence[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("an export that training rank 0 never joins")
        yield

    register(GlooExecutor if rank else Broken)
    refit_and_check(seat(rank, address, (2, 2), transport="gloo-test", **({"export": export} if rank < 2 else {})))


def test_no_training_rank_enters_an_export_while_anothers_transfer_has_failed() -> None:
    outcomes = run_ranks(4, one_transfer_fails)
    assert outcomes[0].kind == "OSError" and {o.kind for o in outcomes[1:]} == {"SessionFailed"}
    assert causes(outcomes[1:]) == {"train:0: OSError: on fire"}
    assert max(outcome.seconds for outcome in outcomes) < 5


def lockstep(rank: int, address: str) -> None:
    """Exports whose every tensor needs all training ranks, like a real one's gathers; the engine gives up early."""
    store = connect_store(address, Options())

    def export(names: Sequence[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(12):
            store.set(f"export/{number}/{rank}", "")
            store.wait([f"export/{number}/{other}" for other in range(2)])
            yield f"t{number}", torch.zeros(1 << 20)

    callback = {"load_weights": failing_load} if rank == 2 else {"export": export}
    refit_and_check(seat(rank, address, (2, 1), transport="golden", **callback))


def test_training_ranks_leave_an_export_together_when_the_engine_fails() -> None:
    outcomes = run_ranks(3, lockstep)
    assert [outcome.kind for outcome in outcomes] == ["SessionFailed", "SessionFailed", "KeyError"]
    assert max(outcome.seconds for outcome in outcomes) < 8


def _starts_the_store_and_leaves_first(rank: int, address: str, folder: str) -> int | None:
    """Training rank 0 starts the store of its own session and ends right after its last refit."""
    del address
    file = Path(folder) / "address"
    if rank == 0:
        served = serve_store()
        file.with_suffix(".new").write_text(served.address)
        file.with_suffix(".new").rename(file)
    while not file.exists():
        time.sleep(0.01)
    worlds = (2, 2)
    member = Trainer(rank, file.read_text(), worlds) if rank < 2 else Engine(rank - 2, file.read_text(), worlds)
    member.endpoint.prepare()
    for version in range(1, 6):
        member.endpoint.refit(version)
    member.endpoint.close()
    return member.endpoint.committed_version


def test_the_process_that_started_the_store_may_end_first(tmp_path: Path) -> None:
    outcomes = run_ranks(4, _starts_the_store_and_leaves_first, str(tmp_path), timeout_s=30)
    assert values(outcomes) == [5, 5, 5, 5]


def freeze_together(rank: int, address: str, host: StoreProcess) -> None:
    """Freeze the session's store when both ranks have come; go on when it is frozen. They meet at another store."""
    exchange = StoreExchange(connect_store(address, Options(session="other")), "01"[rank], "01", timeout_s=TIMEOUT_S)
    exchange.gather("here", None, lambda word: word)
    if rank == 0:
        host.freeze()
    exchange.gather("frozen", None, lambda word: word)


def store_freezes(rank: int, address: str, host: StoreProcess, where: str) -> tuple[float, str]:
    """How long the refit takes that fails because the store froze `where`, and why it does."""

    def freeze() -> None:
        freeze_together(rank, address, host)

    def export(names: Sequence[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
        freeze()
        return me.export(names)  # type: ignore[union-attr]

    def load_weights(tensors: Any) -> None:
        freeze()
        me.load_weights(tensors)  # type: ignore[union-attr]

    callbacks: dict[str, Any] = {"load_weights": load_weights} if rank else {"export": export}
    me = seat(rank, host.address, (1, 1), timeout_s=1.0, **(callbacks if where == "during a refit" else {}))
    me.endpoint.prepare(timeout_s=TIMEOUT_S)
    if where == "between refits":
        me.endpoint.refit(1)
        freeze()
    elif where == "before the first":
        freeze()
    start = time.monotonic()
    with pytest.raises(SessionError) as lost:
        me.endpoint.refit(2)
    me.endpoint.close()
    return time.monotonic() - start, str(lost.value)


@pytest.mark.parametrize("where", ["before the first", "between refits", "during a refit"])
def test_a_store_that_freezes_ends_the_session(where: str) -> None:
    with store_process() as host:
        outcomes = values(run_ranks(2, store_freezes, host, where))
        for rank, (seconds, told) in zip(("train:0", "gen:0"), outcomes, strict=True):
            assert told.startswith(f"{rank} lost the store at {host.address}: it has not answered for 1 s")
            assert seconds < 6


def closes_at_a_frozen_store(rank: int, address: str, host: StoreProcess) -> float:
    me = seat(rank, host.address, (1, 1), timeout_s=1.0)
    me.endpoint.prepare(timeout_s=TIMEOUT_S)
    me.endpoint.refit(1)
    freeze_together(rank, address, host)
    start = time.monotonic()
    me.endpoint.close()
    return time.monotonic() - start


def test_a_session_at_a_frozen_store_can_be_closed() -> None:
    with store_process() as host:
        assert max(values(run_ranks(2, closes_at_a_frozen_store, host))) < 6


def test_an_engine_tensor_that_nothing_fills_is_refused() -> None:
    schedule = schedule_of(transfers_of((1, 1)), "gen", 0, (1, 1))
    tensors = allocate(schedule) | {"model.extra.weight": torch.zeros(3), "model.empty.weight": torch.zeros(0, 3)}
    store = serve_store()
    endpoint = GenerationEndpoint(schedule, tensors, store=store, options=Options(bucket_bytes=128, timeout_s=SHORT_S))
    with pytest.raises(BindError, match=r"model\.extra\.weight: nothing in the plan fills it") as error:
        endpoint.prepare()
    assert "model.empty.weight" not in str(error.value)
