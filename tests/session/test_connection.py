"""A connection that is closed while a refit is under way says whether bytes may still move."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mcore_reshard.kernels.rendezvous.polling import DeadlineThread
from mcore_reshard.session.connection import Connection, Program


class Executor:
    """One that takes long to close, as NCCL does."""

    def close(self) -> None:
        time.sleep(3.0)


@pytest.mark.parametrize(("run_s", "is_moving"), [(0.3, False), (3.0, True)])
def test_a_run_that_has_ended_moves_nothing_though_its_transport_is_not_closed_yet(
    run_s: float, is_moving: bool
) -> None:
    parts: Any = cast(Any, SimpleNamespace(close=lambda: None))
    thread = DeadlineThread("refit")
    connection = Connection("1", (0,), parts, parts, parts, [Program("all", (), parts, cast(Any, Executor()))], thread)
    thread.start(lambda: time.sleep(run_s))
    start = time.monotonic()
    connection.close()
    assert time.monotonic() - start < 2.0
    assert connection.is_moving is is_moving


def test_after_a_failure_nobody_waits_long_for_a_transport_to_close() -> None:
    parts: Any = cast(Any, SimpleNamespace(close=lambda: None))
    programs = [Program("all", (), parts, cast(Any, Executor()))]
    connection = Connection("1", (0,), parts, parts, parts, programs, DeadlineThread("refit"))
    start = time.monotonic()
    connection.close(failed=True)
    assert time.monotonic() - start < 2.0 and not connection.is_moving
