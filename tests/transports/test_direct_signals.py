"""The signals of the direct transport between real processes, without a GPU: nobody waits for ever, whoever casts for whom.

Events, slots and copies are stand-ins; the executor's two ends and their connections are real.
"""

from __future__ import annotations

import sys
import time
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
PASSED_ON = [Case("tiny-qwen3", "tp=1", "dp=3"), Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=2,dp=2")]
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

    def rounds(self, run: int, before_writes: Any = None) -> None:
        for number in range(2 * bool(self.readers)):
            first, then = ("tell", "hear") if self._sends else ("hear", "tell")
            getattr(self._signals, first)(run, number, self.readers.keys())
            getattr(self._signals, then)(run, number, self.readers.keys())

    def await_casts(self) -> None: ...

    def check_sums(self) -> None: ...


def end_of(kind: Any, signals: Any, **parts: Any) -> Any:
    """An end of a connection whose events, streams and copies are stand-ins."""
    end = kind.__new__(kind)
    nothing = ("settling", "settled", "reading", "pulling", "pushing", "stream", "copies", "pulled", "pushed", "table")
    parts = dict.fromkeys(nothing, MagicMock()) | {"signals": signals, "device": None, "bound": MagicMock()} | parts
    vars(end).update({f"_{name}": part for name, part in parts.items()})
    return end


def replica_of(reader: Any, view: Any) -> Any:
    """The end of a replica that pushes, around that of a reader."""
    from mcore_reshard.kernels.transports.base import connect_together
    from mcore_reshard.kernels.transports.direct import replica
    from mcore_reshard.kernels.transports.direct.peer_signals import PeerSignals

    replica.check_sums = lambda *_: None
    (relay,) = view.relays()
    store = reader._signals.store.under("replicas")
    bounds: list[Any] = [
        SimpleNamespace(schedule=end, rank_name=end.name, nbytes=1) for end in (relay.sends, relay.receives)
    ]
    signals = connect_together([partial(PeerSignals, store, bound, 10.0) for bound in bounds], None)
    end = replica.Replica.__new__(replica.Replica)
    end._reader = reader
    end._pushes = end_of(replica._Pushes, signals[0])
    end._landings = end_of(replica._Landings, signals[1], awaited=None)
    return end


def refit(number: int, address: str, plan: Plan) -> int:
    """Rank `number`, training ranks first; returns how many refits it has run."""
    for name in ("cuda", "cuda.bindings", "cuda.core"):  # of this process alone
        sys.modules[name] = MagicMock()
    from mcore_reshard.kernels.transports.direct import ends
    from mcore_reshard.kernels.transports.direct.peer_signals import PeerSignals
    from mcore_reshard.kernels.transports.direct.staging import parted

    torch.cuda.current_stream = MagicMock()
    ends.check_sums = lambda *_: None
    world, rank = ("train", number) if number < plan.train.world else ("gen", number - plan.train.world)
    schedule = schedule_of(plan, world, rank)  # type: ignore[arg-type]
    bound: Any = SimpleNamespace(schedule=schedule, rank_name=schedule.name, nbytes=1)
    signals = PeerSignals(store_of(address).under("direct"), bound, 10.0)
    slots = Slots(signals, set(parted(schedule)[1].peers), sends=world == "train")
    kind: Any = ends.Source if world == "train" else ends.Reader
    end = end_of(kind, signals, not_done=None, read={}, slots=slots, bound=bound)
    if world == "gen" and schedule.relayed:
        end = replica_of(end, schedule.view)
    for run in range(1, REFITS + 1):
        end.run(run)
    if world == "train":
        end._hear_done()
    ranks = plan.train.world + plan.gen.world
    signals.store.set(f"over/{number}", "")
    signals.store.wait([f"over/{other}" for other in range(ranks)])  # who leaves closes its connections
    return REFITS


@pytest.mark.long
@pytest.mark.parametrize("case", [*CASTS, *PASSED_ON], ids=str)
def test_no_rank_waits_for_ever(case: Case) -> None:
    plan = case.plan()
    ranks = plan.train.world + plan.gen.world
    assert values(run_ranks(ranks, refit, plan, timeout_s=60.0)) == [REFITS] * ranks


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
            signals._group.recv(torch.empty(16, dtype=torch.uint8), 0, signals.peers[0])
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
