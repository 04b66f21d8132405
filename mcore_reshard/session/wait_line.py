"""A line on a terminal that says for whom a rank waits: "train:0 waits for gen:3, gen:4 and 2 more (12 s)"."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from threading import Event, Thread

_QUIET_S = 3.0  # a wait as short as this says nothing
_EVERY_S = 1.0
_NAMED = 2  # ranks; the others are counted
_CLEAR = "\r\x1b[K"


class WaitLine:
    """Shows the line around a wait, on the first rank of either world. Writes nothing where stderr is no terminal.

    `missing()` names the ranks that have not come; once there are none, the line says that the rank connects.
    """

    def __init__(self, rank_name: str, missing: Callable[[], Sequence[str]]) -> None:
        self._rank_name, self._missing = rank_name, missing
        self._ended = Event()
        self._thread: Thread | None = None

    def __enter__(self) -> None:
        if self._rank_name in ("train:0", "gen:0") and sys.stderr is not None and sys.stderr.isatty():
            self._thread = Thread(target=self._show, name="wait line", daemon=True)
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_EVERY_S)

    def _show(self) -> None:
        start, shown = time.monotonic(), False
        wait_s = _QUIET_S
        while not self._ended.wait(wait_s):
            text = waiting_text(self._rank_name, self._missing(), time.monotonic() - start)
            print(_CLEAR + text, end="", file=sys.stderr, flush=True)
            shown, wait_s = True, _EVERY_S
        if shown:
            print(_CLEAR, end="", file=sys.stderr, flush=True)


def waiting_text(rank_name: str, missing: Sequence[str], seconds: float) -> str:
    """One line about a wait."""
    if not missing:
        return f"{rank_name}: all ranks have come, they connect ({seconds:.0f} s)"
    return f"{rank_name} waits for {some_of(missing)} ({seconds:.0f} s)"


def some_of(names: Sequence[str]) -> str:
    """'gen:3, gen:4 and 2 more'."""
    left = len(names) - _NAMED
    if left <= 0:
        return " and ".join(names)
    return f"{', '.join(names[:_NAMED])} and {left} more"
