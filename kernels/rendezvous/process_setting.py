"""A setting of the whole process that blocks of code change while they run, also where they overlap."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class ProcessSetting(Generic[T]):
    """Changed when the first block begins, and put back when the last one ends. A process forked meanwhile puts it back.

    `change()` returns what was set before, `restore` takes it.
    """

    def __init__(self, change: Callable[[], T], restore: Callable[[T], object]) -> None:
        self._change, self._restore = change, restore
        self._lock = Lock()
        self._depth = 0
        self._before: T
        os.register_at_fork(after_in_child=self._restore_in_child)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._depth:
                self._before = self._change()
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                if self._depth:  # a block that was forked in has ended already
                    self._depth -= 1
                    if not self._depth:
                        self._restore(self._before)

    def _restore_in_child(self) -> None:
        self._lock = Lock()
        if self._depth:
            self._depth = 0
            self._restore(self._before)
