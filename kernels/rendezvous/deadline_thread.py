"""A thread for calls that may never return: its caller goes on at a deadline."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Overdue
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar
from weakref import finalize, ref

__all__ = ["DeadlineThread", "Overdue"]

T = TypeVar("T")


class DeadlineThread:
    """Makes one call after another. A call that does not return keeps the thread until the process ends.

    Not a pool of `concurrent.futures`: the interpreter would wait for its threads before it exits.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        Thread(target=_make, args=(self._calls,), name=name, daemon=True).start()
        finalize(self, self._calls.put, None).atexit = False  # exit handlers may still call
        # Of the last call; weak, as the traceback of its error may hold this.
        self._outcome: Callable[[], Future[Any] | None] = lambda: None

    @property
    def is_busy(self) -> bool:
        outcome = self._outcome()
        return outcome is not None and not outcome.done()

    def start(self, function: Callable[[], T]) -> Future[T]:
        """Call `function` once the calls before it have returned."""
        outcome = Future[T]()
        self._outcome = ref(outcome)
        self._calls.put((outcome, function))
        return outcome

    def call(self, function: Callable[[], T], limit_s: float) -> T:
        """Return or raise what `function` does. Raises `Overdue` if it does neither within `limit_s`."""
        return self.start(function).result(limit_s)


def _make(calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while call := calls.get():
        outcome, function = call
        try:
            outcome.set_result(function())
        except BaseException as error:  # raised in the caller
            outcome.set_exception(error)
        del call, outcome, function  # an idle thread keeps nothing alive
