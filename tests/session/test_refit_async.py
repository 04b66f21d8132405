"""Refits whose outcome is still to come when the trainer goes on, in real processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from helpers.handmade import allocate, expected
from helpers.ranks import run_ranks, values
from test_refit_session import MISC, Engine, Trainer, bytes_of, seat, transfers_of, whole_tensor

from mcore_reshard.kernels.errors import RefitError
from mcore_reshard.session.endpoints import RefitHandle, RefitReport

WORLDS = (2, 2)
SLOW_S = 1.5


def slowly(function: Callable[..., Any], seconds: float = SLOW_S) -> Callable[..., Any]:
    def slow(*args: Any) -> Any:
        time.sleep(seconds)
        return function(*args)

    return slow


def joined(rank: int, address: str, **options: Any) -> Trainer | Engine:
    """A rank of a connected session. Generation rank 1 takes its time after all bytes have come."""
    me = seat(rank, address, WORLDS, **options)
    if rank == 3:
        me.endpoint._after_direct_writes = slowly(me.derive)  # type: ignore[union-attr]
    me.endpoint.prepare()
    return me


def begin(me: Trainer, version: int) -> RefitHandle:
    """Begin a refit, and overwrite the weights as soon as that is allowed."""
    me.step(version)
    handle = me.endpoint.refit_async(version)
    me.step(1000 + version)
    return handle


def written(me: Engine, version: int) -> bool:
    """Whether an engine's rank holds what the trainer held at that version."""
    trainers = [Trainer(rank, "127.0.0.1:1", WORLDS).schedule for rank in range(WORLDS[0])]
    sources = [allocate(schedule, seed=version) for schedule in trainers]
    tensors = expected(transfers_of(WORLDS), me.schedule, sources)
    tensors["padded"][3] = 0
    loaded = {name: whole_tensor(name, version).tolist() for name in MISC}
    return bytes_of(me.tensors) == bytes_of(tensors) and me.loaded == loaded


def train_on(rank: int, address: str, commit: str) -> Any:
    me = joined(rank, address, commit=commit)
    if isinstance(me, Engine):
        correct = []
        for version in (1, 2, 3):
            me.endpoint.refit(version)
            correct.append(written(me, version))
        return correct
    start = time.monotonic()
    handle = begin(me, 1)
    took_s = time.monotonic() - start
    early = (handle.done(), me.endpoint.committed_version, str(me.endpoint.state))
    report = handle.wait()
    late = (handle.done(), me.endpoint.committed_version, str(me.endpoint.state))
    assert handle.wait() == report
    me.step(2)
    next_handle = me.endpoint.refit_async(2)
    me.step(3)
    sync_report = me.endpoint.refit(3)  # waits for the one before
    assert next_handle.done() and next_handle.wait().version == 2
    return took_s, early, late, report, sync_report.version


@pytest.mark.parametrize("commit", ["in_place", "staged"])
def test_the_trainer_goes_on_once_its_bytes_have_been_read_and_the_engine_gets_these(commit: str) -> None:
    first, second, *engines = values(run_ranks(4, train_on, commit, timeout_s=60.0))
    for took_s, early, late, report, last in (first, second):
        assert took_s < SLOW_S and early == (False, None, "intact(None)")
        assert late == (True, 1, "complete(1)") and last == 3
        assert isinstance(report, RefitReport) and (report.version, report.state) == (1, "complete(1)")
        assert report.seconds > SLOW_S * 0.9 and report.nbytes > 0
    assert engines == [[True] * 3] * 2


def fail_after_the_reads(rank: int, address: str, commit: str) -> Any:
    me = joined(rank, address, commit=commit)
    if isinstance(me, Engine):
        if rank == 3:
            derive = me.endpoint._after_direct_writes
            me.endpoint._after_direct_writes = slowly(lambda: 1 / 0, 0.5)
        with pytest.raises(Exception, match=r"division by zero; gen:. holds a mixture of the weights .* and 1 "):
            me.endpoint.refit(1)
        mixed = str(me.endpoint.state)
        if rank == 3:
            me.endpoint._after_direct_writes = derive
        me.endpoint.refit(2)
        return mixed, written(me, 2), str(me.endpoint.state)
    handle = begin(me, 1)
    early = handle.done()
    with pytest.raises(RefitError, match="gen:1: ZeroDivisionError: division by zero"):
        handle.wait()
    told = (early, handle.done(), me.endpoint.committed_version, me.endpoint.failure)
    me.step(2)
    me.endpoint.refit(2)
    return told, me.endpoint.committed_version


@pytest.mark.parametrize("commit", ["in_place", "staged"])
def test_an_error_after_the_reads_comes_from_the_handle_and_the_next_refit_repairs(commit: str) -> None:
    first, second, *engines = values(run_ranks(4, fail_after_the_reads, commit, timeout_s=60.0))
    cause = "gen:1: ZeroDivisionError: division by zero"
    assert first == second == ((False, True, None, cause), 2)
    assert engines == [("mixed(None, 1, 1.00)", True, "complete(2)")] * 2


def close_at_once(rank: int, address: str) -> Any:
    me = joined(rank, address)
    if isinstance(me, Engine):
        me.endpoint.refit(1)
        return written(me, 1)
    handle = begin(me, 1)
    me.endpoint.close()
    assert handle.done()
    return handle.wait().version


def test_close_waits_for_a_refit_under_way() -> None:
    assert values(run_ranks(4, close_at_once)) == [1, 1, True, True]


def too_slow(rank: int, address: str) -> Any:
    """Generation rank 1 is late for the vote, which other refits would try again."""
    me = joined(rank, address, timeout_s=2.0, retries=1)
    if isinstance(me, Engine):
        if rank == 3:
            quick = me.derive
            me.endpoint._after_direct_writes = slowly(me.derive, 3.5)
        with pytest.raises(RefitError, match="gen:1 did not arrive at 'commit' within 2 s"):
            me.endpoint.refit()
        if rank == 3:
            me.endpoint._after_direct_writes = quick
        return me.endpoint.refit().version, written(me, 2), me.endpoint.state.kind
    handle = begin(me, 1)
    with pytest.raises(RefitError, match="gen:1 did not arrive at 'commit' within 2 s"):
        handle.wait()
    time.sleep(2.5)  # the engine's rank is still at it
    me.step(2)
    return me.endpoint.refit(2).version


def test_no_rank_tries_again_by_itself_when_weights_may_have_changed() -> None:
    assert values(run_ranks(4, too_slow, timeout_s=60.0)) == [2, 2, (2, True, "complete"), (2, True, "complete")]


def error_before_the_reads(rank: int, address: str) -> Any:
    def fails(names: Any) -> Any:
        raise OSError("on fire")
        yield

    me = joined(rank, address, **({"export": fails} if rank == 0 else {}))
    with pytest.raises(Exception, match="on fire"):
        if rank == 0:
            me.endpoint.refit_async(1)
        elif isinstance(me, Trainer):  # perhaps done with its own reads by then
            me.endpoint.refit_async(1).wait()
        else:
            me.endpoint.refit(1)
    return me.endpoint.committed_version


def test_an_error_before_the_reads_is_raised_at_once() -> None:
    assert values(run_ranks(4, error_before_the_reads)) == [None] * 4
