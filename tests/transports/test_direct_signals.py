"""The signals of the direct transport between real processes, without a GPU: nobody waits for ever, whoever casts for whom.

Events, slots and copies are stand-ins; the executor's two ends and their connections are real.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from helpers.plans import QUANTIZED, Case
from helpers.ranks import run_ranks, store_of, values

from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan

REFITS = 3
WAVES = 3
PROJECTIONS = [
    *(f"self_attn.{projection}_proj" for projection in "qkvo"),
    *(f"mlp.{projection}_proj" for projection in ("gate", "up", "down")),
]
KEPT = [f"model.layers.{layer}.{each}" for layer in range(4) for each in PROJECTIONS]
KEPT.remove("model.layers.2.self_attn.o_proj")
ONE_CAST = Case("tiny-qwen3", "tp=1", "dp=3", dtypes=("bf16", "fp8"), block=(8, 8), kept=tuple(KEPT))
PASSED_ON = [Case("tiny-qwen3", "tp=1", "dp=3"), Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=2,dp=2"), ONE_CAST]
CASTS = [case for case in QUANTIZED if case.dtypes[0] != case.dtypes[1]]


class Slots:
    """Two rounds with every peer that is cast for, as `SlotSource` and `SlotReader` tell and hear them."""

    began = None
    shares_gpu = False
    stream = MagicMock()

    def __init__(self, signals: Any, peers: set[int], *, sends: bool) -> None:
        self._signals, self.readers, self.sources, self._sends = (
            signals,
            dict.fromkeys(peers),
            dict.fromkeys(peers),
            sends,
        )

    def rounds(self, run: int) -> None:
        for number in range(2 * bool(self.readers)):
            first, then = ("tell", "hear") if self._sends else ("hear", "tell")
            getattr(self._signals, first)(run, number, self.readers.keys())
            getattr(self._signals, then)(run, number, self.readers.keys())

    def check_sums(self) -> None: ...


def end_of(kind: Any, signals: Any, **parts: Any) -> Any:
    """An end of a connection whose events, streams and copies are stand-ins."""
    end = kind.__new__(kind)
    nothing = (
        *("settling", "settled", "casting", "reading", "pulling", "pushing", "stream", "copies", "pulled", "pushed"),
        *("table", "mappings", "plain", "cast"),
    )
    stand_in = MagicMock()
    parts = {"signals": signals, "device": None, "bound": MagicMock(), "engine_streams": [stand_in]} | parts
    parts = dict.fromkeys(nothing, stand_in) | parts
    vars(end).update({f"_{name}": part for name, part in parts.items()})
    return end


def end_of_chain(signals: Any, bound: Any, passes: Any) -> Any:
    """The end of a training rank, or of a replica, in a chain."""
    from mcore_reshard.kernels.transports.base import connect_together
    from mcore_reshard.kernels.transports.direct import chain
    from mcore_reshard.kernels.transports.direct.peer_signals import PeerSignals

    if passes is None:
        telling = chain._Telling(signals, dict.fromkeys(signals.peers, WAVES), None)
        pushes = pushes_of(signals, {*signals.peers})
        return end_of(chain.ChainSource, signals, count=WAVES, pushes=pushes, telling=telling)
    ends = [SimpleNamespace(schedule=end, rank_name=end.name, nbytes=1) for end in (passes.sends, passes.receives)]
    store = signals.store.under("replicas")
    behind, before = connect_together([partial(PeerSignals, store, end, 10.0) for end in ends], None)  # type: ignore
    sources = before if before.peers else signals
    end = end_of(chain.Replica, (before, behind), count=WAVES, gets=bound)
    end._pushes = pushes_of(behind, {*behind.peers}) if behind.peers else None
    end._telling = chain._Telling(behind, dict.fromkeys(behind.peers, WAVES), None)
    end._target = target_of(sources, {*sources.peers})
    return end


def waves_that(launch: Callable[[int], None]) -> dict[int, Any]:
    """The copies of each wave, which only say that they are queued."""
    return {wave: SimpleNamespace(queue=lambda stream, wave=wave: launch(wave)) for wave in range(WAVES)}


def pushes_of(signals: Any, peers: Any) -> Any:
    from mcore_reshard.kernels.transports.direct import pushes

    end = end_of(pushes.Pushes, signals)
    end.peers = peers
    return end


def target_of(signals: Any, peers: Any) -> Any:
    from mcore_reshard.kernels.transports.direct import pushes

    return end_of(pushes.Target, signals, run=0, left=set(), peers=peers, is_overdue=False, not_done=None)


def end_and_signals(
    number: int, address: str, plan: Plan, sleeping: frozenset[int] = frozenset(), *, mutual: bool = False
) -> tuple[Any, Any]:
    """(the signals of rank `number`, training ranks first, its end). Nobody can map the memory of `sleeping` readers.

    `mutual`: everything is pushed.
    """
    for name in ("cuda", "cuda.bindings", "cuda.core"):  # of this process alone
        sys.modules[name] = MagicMock()
    from mcore_reshard.kernels.transports.direct import ends
    from mcore_reshard.kernels.transports.direct.peer_signals import PeerSignals
    from mcore_reshard.kernels.transports.direct.staging import parted

    torch.cuda.current_stream = torch.cuda.Stream = MagicMock()
    ends.check_sums = lambda *_: None
    world, rank = ("train", number) if number < plan.train.world else ("gen", number - plan.train.world)
    schedule = schedule_of(plan, world, rank)  # type: ignore[arg-type]
    chain = schedule.view.chain() if schedule.view is not None else None
    schedule = schedule if chain is None else chain.from_trainer
    bound: Any = SimpleNamespace(schedule=schedule, rank_name=schedule.name, nbytes=1)
    signals = PeerSignals(store_of(address).under("direct"), bound, 10.0)
    if chain is not None:
        return signals, end_of_chain(signals, bound, chain.among_replicas)
    cast = parted(schedule)[1].peers
    written = cast - sleeping if world == "train" else frozenset() if rank in sleeping else cast
    if mutual:
        written = frozenset(signals.peers)
    slots = Slots(signals, {*cast - written}, sends=world == "train")
    kind: Any = ends.Source if world == "train" else ends.Reader
    read = {} if mutual else dict.fromkeys(signals.peers)
    end = end_of(kind, signals, not_done=None, read=read, pulls=not mutual, slots=slots, bound=bound)
    end._pushes = pushes_of(signals, written) if written else None
    end._target = target_of(signals, written) if written else None
    return signals, end


def refit(number: int, address: str, plan: Plan, sleeping: frozenset[int] = frozenset(), mutual: bool = False) -> int:
    """Returns how many refits rank `number` has run."""
    signals, end = end_and_signals(number, address, plan, sleeping, mutual=mutual)
    for run in range(1, REFITS + 1):
        end.run(run)
    if number < plan.train.world and not plan.later_hops:
        end._hear_done()
    ranks = plan.train.world + plan.gen.world
    signals.store.set(f"over/{number}", "")
    signals.store.wait([f"over/{other}" for other in range(ranks)])  # who leaves closes its connections
    return REFITS


@pytest.mark.long
@pytest.mark.parametrize("case", [*CASTS, *PASSED_ON], ids=lambda case: f"{case}"[:80])
def test_no_rank_waits_for_ever(case: Case) -> None:
    plan = case.plan()
    ranks = plan.train.world + plan.gen.world
    assert values(run_ranks(ranks, refit, plan, timeout_s=60.0)) == [REFITS] * ranks


@pytest.mark.long
@pytest.mark.parametrize("sleeping", [{0}, {0, 1, 2, 3}], ids=["one engine rank", "the engine"])
@pytest.mark.parametrize("case", CASTS, ids=lambda case: f"{case}"[:80])
def test_no_rank_waits_for_ever_where_nobody_can_map_the_memory_of(sleeping: set[int], case: Case) -> None:
    plan = case.plan()
    ranks = plan.train.world + plan.gen.world
    assert values(run_ranks(ranks, refit, plan, frozenset(sleeping), timeout_s=60.0)) == [REFITS] * ranks


@pytest.mark.long
@pytest.mark.parametrize("case", CASTS, ids=lambda case: f"{case}"[:80])
def test_no_rank_waits_for_ever_where_everything_is_pushed(case: Case) -> None:
    plan = case.plan()
    ranks = plan.train.world + plan.gen.world
    assert values(run_ranks(ranks, refit, plan, frozenset(), True, timeout_s=60.0)) == [REFITS] * ranks


WRITES_S = 2.0


def fail_while_written(number: int, address: str, plan: Plan, writer_fails: bool) -> str:
    """gen:1 fails while gen:0 still writes to it; returns what gen:1 knows when it has closed."""
    from mcore_reshard.kernels.errors import TransferError
    from mcore_reshard.kernels.rendezvous.polling import EventPoller

    signals, end = end_and_signals(number, address, plan)
    name, store, begun = signals.rank_name, signals.store, time.monotonic()

    def fail(run: int) -> None:
        raise OSError(f"{name} is on fire")

    def written(*_: Any) -> bool:
        time.sleep(0.01)
        if (is_over := time.monotonic() - begun > WRITES_S) and not store.check(["written"]):
            store.set("written", "")
        return is_over

    if name == "gen:1":
        end._target.end = fail
    if name == "gen:0":
        end._pushes._stream = MagicMock(query=written)
        end._pushes._pushing.wait = lambda events: EventPoller(5.0).until(written)
        if writer_fails:
            end._pushes.end = partial(fail, 1)
    said = ""
    try:
        end.run(1)
    except (OSError, TransferError):
        if name in ("gen:0", "gen:1"):
            end.end_writes()
            said = "" if name == "gen:0" else "no more writes" if store.check(["written"]) else "still written"
    store.set(f"over/{number}", "")
    store.wait([f"over/{other}" for other in range(plan.train.world + plan.gen.world)])
    return said


@pytest.mark.parametrize("writer_fails", [False, True])
def test_a_replica_that_fails_closes_when_it_is_written_no_more(writer_fails: bool) -> None:
    plan = Case("tiny-qwen3", "tp=1", "dp=3").plan()
    said = values(run_ranks(4, fail_while_written, plan, writer_fails, timeout_s=60.0))
    assert said == ["", "", "no more writes", ""]


def fail_before_the_trainer_is_ready(number: int, address: str, plan: Plan) -> int:
    """gen:2 fails while the trainer is late. Returns how many waves a rank has pushed, or of gen:2 what counts as written."""
    from mcore_reshard.kernels.errors import TransferError

    signals, end = end_and_signals(number, address, plan)
    pushed = []
    if number == 0:
        end._settling.wait = lambda events: time.sleep(2.0)
    if number == 3:
        end._target.hear = MagicMock(side_effect=OSError("on fire"))
    else:
        end._pushes._plain = waves_that(pushed.append)
    try:
        end.run(1)
    except (OSError, TransferError):
        end.end_writes()
    signals.close()
    signals.store.set(f"over/{number}", "")
    signals.store.wait([f"over/{other}" for other in range(4)])
    return end.written_bytes if number == 3 else len(pushed)


def test_nobody_writes_to_a_replica_that_has_left_before_the_trainer_is_ready() -> None:
    plan = Case("tiny-qwen3", "tp=1", "dp=3").plan()
    *_, before, last = values(run_ranks(4, fail_before_the_trainer_is_ready, plan, timeout_s=60.0))
    assert (before, last) == (0, 0)


def stall_between_waves(number: int, address: str, plan: Plan) -> tuple[int, str]:
    """The trainer is late with a wave, for longer than gen:1 waits. Returns (waves pushed by a rank, what it says)."""
    from mcore_reshard.kernels.errors import TransferError

    signals, end = end_and_signals(number, address, plan)
    from mcore_reshard.kernels.transports.direct import pushes

    pushes.CLOSE_S = 2.0  # of this process
    launched, said = [], ""

    def launch(wave: int) -> None:
        if number == 0 and wave == 1:
            time.sleep(3.0)
        launched.append(wave)

    if number < 3:
        end._pushes._plain = waves_that(launch)
    if number == 2:  # gen:1 waits a second for gen:0
        before, _ = end._signals
        before.timeout_s = before._group.timeout_s = 1.0
    try:
        end.run(1)
    except (OSError, TransferError) as error:
        said = f"{error}"
        end.end_writes()
    signals.close()
    signals.store.set(f"over/{number}", "")
    signals.store.wait([f"over/{other}" for other in range(4)])
    return len(launched), said


def test_who_waits_no_more_for_a_wave_is_not_written() -> None:
    plan = Case("tiny-qwen3", "tp=1", "dp=3").plan()
    _, first, second, _ = values(run_ranks(4, stall_between_waves, plan, timeout_s=60.0))
    assert first[0] == 1 and ("it gave up 2 s before this wave" in first[1] or "closed" in first[1]), first
    assert second[0] == 1 and "nothing within 1 s" in second[1], second


def written_by_others(number: int, address: str, plan: Plan) -> int:
    """What counts as written; 0 on the trainer."""
    signals, end = end_and_signals(number, address, plan)
    end.run(1)
    signals.store.set(f"over/{number}", "")
    signals.store.wait([f"over/{other}" for other in range(plan.train.world + plan.gen.world)])
    return end.written_bytes if number else 0


def test_what_others_write_counts_as_written() -> None:
    plan = Case("tiny-qwen3", "tp=1", "dp=3").plan()
    assert values(run_ranks(4, written_by_others, plan, timeout_s=60.0)) == [0, 1, 1, 1]


def test_in_some_of_them_trainers_cast_for_one_reader_and_send_plain_bytes_to_another() -> None:
    from mcore_reshard.kernels.transports.direct.staging import parted

    mixed = 0
    for case in CASTS:
        plan = case.plan()
        for rank in range(plan.train.world):
            plain, cast = parted(schedule_of(plan, "train", rank))
            mixed += bool({*cast.peers} and {*plain.peers} - {*cast.peers})
    assert mixed > 2


def last_signal(number: int, address: str, plan: Plan) -> str:
    """The trainer leaves behind its signal; the reader takes that late, and then awaits another one."""
    from mcore_reshard.kernels.errors import PeerLostError
    from mcore_reshard.kernels.transports.direct.peer_signals import PeerSignals, Signal

    schedule = schedule_of(plan, "gen" if number else "train", 0)
    bound: Any = SimpleNamespace(schedule=schedule, rank_name=schedule.name)
    signals = PeerSignals(store_of(address).under("direct"), bound, 10.0)
    if not number:
        signals.tell(1, Signal.CAST)
        signals.close()
        return "left"
    with pytest.raises(PeerLostError):  # until gloo has noticed
        for _ in range(1000):
            signals._group.recv(torch.empty(24, dtype=torch.uint8), 0, signals.peers[0])
            time.sleep(0.01)
    signals.hear(1, Signal.CAST)
    signals.tell_last(1, Signal.DONE)  # no error: everything is here
    with pytest.raises(PeerLostError) as raised:
        signals.hear(2, Signal.READY)
    return str(raised.value)


def test_a_peer_that_leaves_after_its_last_signal_is_missed_when_the_next_one_is_due() -> None:
    left, said = values(run_ranks(2, last_signal, Case("tiny-llama", "tp=1", "tp=1").plan(), timeout_s=60.0))
    assert left == "left" and "gen:0 waiting for train:0" in said and "the connection was closed" in said


def leave_at_once(number: int, address: str, plan: Plan) -> int:
    """Trainers leave as soon as readers have begun, at about the time of the readers' last word."""
    from mcore_reshard.kernels.transports.direct.peer_signals import PeerSignals, Signal

    world, rank = ("train", number) if number < plan.train.world else ("gen", number - plan.train.world)
    schedule = schedule_of(plan, world, rank)  # type: ignore[arg-type]
    bound: Any = SimpleNamespace(schedule=schedule, rank_name=schedule.name)
    for turn in range(25):
        signals = PeerSignals(store_of(address).under(f"direct/{turn}"), bound, 5.0)
        for run in range(2):
            if world == "train":
                if run:
                    signals.hear(run - 1, Signal.DONE)
                signals.tell(run, Signal.READY)
                signals.hear(run, Signal.STARTED)
            else:
                signals.hear(run, Signal.READY)
                signals.tell(run, Signal.STARTED)
                time.sleep(run * turn * 1e-4)
                signals.tell_last(run, Signal.DONE)
        signals.close()
    return len(signals._group._pending)


@pytest.mark.long
def test_readers_wait_for_no_trainer_that_has_left() -> None:
    plan = Case("tiny-llama", "tp=2", "tp=2").plan()
    assert values(run_ranks(4, leave_at_once, plan, timeout_s=60.0)) == [0] * 4


def reads_in_order(number: int, address: str, shares_gpu: bool) -> list[str]:
    """What a reader of slots does, in its order."""
    for name in ("cuda", "cuda.bindings", "cuda.core"):  # of this process alone
        sys.modules[name] = MagicMock()
    from mcore_reshard.kernels.transports.direct import ends
    from mcore_reshard.kernels.transports.direct.peer_signals import Signal

    torch.cuda.current_stream = MagicMock()
    ends.check_sums = lambda *_: None
    done: list[str] = []

    def note(what: str) -> Any:
        return lambda *said, **_: done.append(f"{what} {Signal(said[1]).name}" if len(said) > 1 else what)

    signals = SimpleNamespace(peers={0: None}, hear=note("hear"), tell=note("tell"), tell_last=note("tell"))
    slots = SimpleNamespace(
        shares_gpu=shares_gpu, sources={0}, rounds=lambda *_: done.append("casts"), check_sums=lambda: None
    )
    copies = SimpleNamespace(
        fork=note("wait for what is queued"),
        launch=note("all the rest"),
        launch_forked=note("the rest"),
        damaged=list,
    )
    pulled = SimpleNamespace(record=lambda _: done.append("record"))
    reader = end_of(ends.Reader, signals, slots=slots, copies=copies, target=None, pulled=pulled, pulls=True)
    reader.run(1)
    return done


def test_readers_pull_casts_last_but_for_those_that_share_a_gpu_with_the_source() -> None:
    (apart,), (shared,) = (values(run_ranks(1, reads_in_order, shares_gpu)) for shares_gpu in (False, True))
    last = ["tell STARTED", "hear CAST", "tell DONE"]
    begin = ["wait for what is queued", "hear READY"]
    assert apart == [*begin, "the rest", "casts", "record", *last]
    assert shared == [*begin, "casts", "hear CAST", "all the rest", "record", last[0], last[2]]


class OrderedStream:
    """A stream that knows what is done before anything that is queued on it now."""

    def __init__(self) -> None:
        self.before: set[str] = set()

    def queue(self, work: str) -> set[str]:
        before, self.before = self.before, self.before | {work}
        return before

    def wait_stream(self, other: OrderedStream) -> None:
        self.before = self.before | other.before


def order_of_a_pull(number: int, address: str) -> tuple[list[set[str]], set[str]]:
    """What is done before each part of a pull that was forked early, and before what comes after it."""
    for name in ("cuda", "cuda.bindings", "cuda.core"):  # of this process alone
        sys.modules[name] = MagicMock()
    from mcore_reshard.kernels.transports.direct.pull import Pull

    begun: list[set[str]] = []
    stream, *others = (OrderedStream() for _ in range(3))
    pull: Any = Pull.__new__(Pull)
    pull._engine_streams = others
    pull._kernel = SimpleNamespace(launch=lambda stream: begun.append(stream.queue("kernel")))
    pull._engine = SimpleNamespace(launch=lambda streams: begun.extend(each.queue("rows") for each in streams))
    stream.queue("settled")
    pull.fork(stream)
    pull.launch_forked(stream)
    return begun, stream.queue("pulled")


def test_a_pull_begins_after_what_was_queued_when_it_was_forked_and_ends_before_what_comes_later() -> None:
    ((begun, ended),) = values(run_ranks(1, order_of_a_pull))
    assert begun == [{"settled"}] * 3 and ended == {"settled", "kernel", "rows"}


def come_late(number: int, address: str, plan: Plan) -> str:
    """gen:1 lets the trainer write two seconds after gen:0 has, which is too long for that. Returns what the trainer says."""
    from mcore_reshard.kernels.errors import TransferError

    signals, end = end_and_signals(number, address, plan)
    if signals.rank_name == "train:0":
        end._pushes.launch = MagicMock(side_effect=AssertionError("it must not write"))
    if signals.rank_name == "gen:0":
        signals.timeout_s = 1.0  # until when it says that it waits
    if signals.rank_name == "gen:1":
        time.sleep(2.0)
    said = ""
    try:
        end.run(1)
    except TransferError as error:
        said = str(error)
    end.end_writes()
    signals.close()
    return said if number == 0 else ""


def test_who_has_waited_for_longer_than_the_deadline_is_not_written() -> None:
    case = Case("tiny-qwen3", "tp=1", "tp=2", dtypes=("bf16", "fp8"), block=(8, 8))
    said, *_ = values(run_ranks(3, come_late, case.plan(), timeout_s=60.0))
    assert "train:0 waiting for gen:0" in said and "it gave up 1 s before others were ready" in said


TWO_STAGES = Case("tiny-qwen3-moe", "pp=2", "tp=1", dtypes=("bf16", "fp8"), block=(8, 16))
TWO_READERS = Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=2", dtypes=("bf16", "fp8"), block=(8, 16))


def run_and_leave(number: int, signals: Any, end: Any) -> str:
    """One of three ranks runs, and leaves once all have run. Returns what gen:0 knows when it has closed after a failure."""
    from mcore_reshard.kernels.errors import TransferError

    store, said = signals.store, ""
    try:
        end.run(1)
    except (OSError, TransferError):
        if signals.rank_name == "gen:0":
            end.end_writes()
            said = "no more writes" if store.check(["written"]) else "still written"
    signals.close()
    store.set(f"over/{number}", "")
    store.wait([f"over/{other}" for other in range(3)])
    return said


def queue_slowly(number: int, address: str, plan: Plan) -> str:
    """A source takes longer to queue its pushes than gen:0 waits for it. Returns what gen:0 knows when it has closed."""
    signals, end = end_and_signals(number, address, plan)

    def launch(waves: Any) -> None:
        time.sleep(WRITES_S)
        signals.store.set("written", "")

    if signals.rank_name == "gen:0":
        signals.timeout_s = signals._group.timeout_s = 1.0
    if signals.rank_name == "train:1":
        end._pushes.launch = launch
    return run_and_leave(number, signals, end)


def test_a_reader_that_gives_up_before_a_source_is_ready_waits_for_what_it_writes() -> None:
    assert values(run_ranks(3, queue_slowly, TWO_STAGES.plan(), timeout_s=60.0))[2] == "no more writes"


def lose_a_source_while_written(number: int, address: str, plan: Plan, lost: str, is_ready: bool) -> str:
    """A source dies, once it is ready or before, while the other one still writes. Returns what gen:0 knows when it has closed."""
    signals, end = end_and_signals(number, address, plan)
    name, store = signals.rank_name, signals.store

    def write(events: Any) -> None:
        store.set("writing", "")
        time.sleep(WRITES_S)
        store.set("written", "")

    if name == lost:
        store.wait(["writing"])
        end._pushes.end = MagicMock(side_effect=OSError("on fire"))
    elif name == "gen:0":  # the other one's event does not happen in time
        end._target._pushing = SimpleNamespace(wait=lambda events, begin, when_late: when_late())
    else:
        end._pushes._pushing.wait = write
    if name == lost and not is_ready:
        end.run = lambda run: None
    return run_and_leave(number, signals, end)


def begin_late(number: int, address: str, plan: Plan, mutual: bool) -> str:
    """train:1 begins its second refit once train:0 has said READY in its own."""
    signals, end = end_and_signals(number, address, plan, mutual=mutual)
    name, store, tell = signals.rank_name, signals.store, signals.tell

    def tell_and_note(run: int, signal: int, *peers: Any) -> None:
        tell(run, signal, *peers)
        if (run, signal) == (2, -1):
            store.set("ready", "")

    if name == "train:0":
        signals.tell = tell_and_note
    for run in (1, 2):
        if name == "train:1" and run == 2:
            store.wait(["ready"], timedelta(seconds=10))
        end.run(run)
    store.set(f"over/{number}", "")
    store.wait([f"over/{other}" for other in range(3)])
    return "over"


@pytest.mark.parametrize("mutual", [False, True])
def test_a_source_that_is_late_holds_up_no_other(mutual: bool) -> None:
    assert values(run_ranks(3, begin_late, TWO_STAGES.plan(), mutual, timeout_s=60.0)) == ["over"] * 3


def leave_when_written(number: int, address: str, plan: Plan) -> str:
    """Readers see by an event that everything has landed, and leave before their sources say so."""
    signals, end = end_and_signals(number, address, plan)
    store, ranks = signals.store, plan.train.world + plan.gen.world
    if number < plan.train.world:
        end._pushes.end = lambda: store.wait([f"left/{other}" for other in range(plan.train.world, ranks)])
    end.run(1)
    if number >= plan.train.world:
        signals.close()
        store.set(f"left/{number}", "")
    store.set(f"over/{number}", "")
    store.wait([f"over/{other}" for other in range(ranks)])
    return "over"


def test_readers_may_leave_before_they_hear_that_everything_is_written() -> None:
    assert values(run_ranks(4, leave_when_written, TWO_READERS.plan(), timeout_s=60.0)) == ["over"] * 4


@pytest.mark.parametrize("is_ready", [False, True])
@pytest.mark.parametrize("lost", ["train:0", "train:1"])
def test_a_reader_that_loses_one_source_waits_for_what_the_other_one_writes(lost: str, is_ready: bool) -> None:
    said = values(run_ranks(3, lose_a_source_while_written, TWO_STAGES.plan(), lost, is_ready, timeout_s=60.0))
    assert said == ["", "", "no more writes"]


def fail_when_admitted(admit: Any, run: int) -> None:
    admit(run)
    raise OSError("on fire")


def leave_before_others_come(number: int, address: str, plan: Plan) -> str:
    """gen:0 fails once it may be written, and leaves; gen:1 comes later. Returns what trainers say."""
    from mcore_reshard.kernels.errors import TransferError

    signals, end = end_and_signals(number, address, plan)
    from mcore_reshard.kernels.transports.direct import pushes

    store, said = signals.store, ""
    pushes.CLOSE_S = 1.0  # of this process
    if signals.rank_name == "gen:0":
        end._target.admit = partial(fail_when_admitted, end._target.admit)
    elif signals.rank_name == "gen:1":
        store.wait(["left"])
        time.sleep(0.5)  # until gloo has noticed
    else:
        end._pushes.launch = MagicMock(side_effect=AssertionError("it must not write"))
    try:
        end.run(1)
    except (OSError, TransferError) as error:
        said = f"{error}" if end._pushes is not None else ""
    if signals.rank_name == "gen:0":
        end.end_writes()
        signals.close()
        store.set("left", "")
    signals.close()
    store.set(f"over/{number}", "")
    store.wait([f"over/{other}" for other in range(4)])
    return said


def test_who_has_left_is_not_written() -> None:
    said = values(run_ranks(4, leave_before_others_come, TWO_READERS.plan(), timeout_s=60.0))
    assert ["gen:0" in each for each in said] == [True, True, False, False], said
