"""How this package waits: the one loop that polls, a thread for calls that may never return, and every tuned time."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar
from weakref import finalize, ref

from .process_setting import ProcessSetting

T = TypeVar("T")

FINE_SHARE = 0.001  # a nap's share of the wait for a GPU so far: naps delay a refit by half a thousandth
COARSE_SHARE = 0.05  # a nap's share of the wait for keys so far: every look is a message to the store's server
DUE_SHARE = 0.95  # no look before this share of the fastest refit's time: few refits are more than 5% faster
_RECENT = 8  # waits, of which the fastest counts
LOOK_S = 0.25  # how often a rank that waits looks whether another rank has failed
HEAD_START_S = 0.005  # for a transport to begin, before this rank's own checks take the interpreter's lock
CASTING_SHARE = 0.3  # of a refit's time: the head start where a transport casts, and queues its work round by round
TURN_S = 0.0002  # at the interpreter's lock while a transport may need it; Python's own is 5 ms
NOTICE_S = 1.0  # for other ranks to report that their time is up too, and for this rank's transport to notice a failure
CAUSE_S = 3.0  # for the rank that knows the cause of a failure to tell it; that rank may wait NOTICE_S first
CLOSE_S = 5.0  # for a GPU to end what was queued


@dataclass
class EventPoller:
    """Polls a condition: rarely enough to spare the CPU, often enough to be late by at most a thousandth.

        nothing known yet              a look after every 0.1% of the time waited so far
        fastest of 8 waits was 40 ms   no look until 38 ms (95%), then one every 40 us (0.1%)
        a wait was over by then        nobody knows since when: it counts as 20 ms

    Keep one poller for waits that take equally long. `share` is the thousandth above. With `watches` there are some looks
    before 95% too, for a condition that notes how far things are.
    """

    timeout_s: float
    share: float = FINE_SHARE
    watches: bool = False
    fastest_s: float = 0.0
    _recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def until(
        self,
        has_happened: Callable[[], bool],
        *,
        look: Callable[[float], None] | None = None,
        progress: Callable[[], int] | None = None,
        since: float | None = None,
    ) -> bool:
        """Poll until `has_happened()`; False if it does not within `timeout_s` of the last change of `progress()`.

        What is waited for began at `since` (`time.monotonic`), now by default; the deadline counts from now. It calls
        `look(waited_s)` every LOOK_S; `look` raises if the wait cannot succeed.
        """
        changed = looked = time.monotonic()
        start = changed if since is None else since
        stage = progress() if progress is not None else 0
        last_s: float | None = None  # of the last look, if it came before one was due
        while not has_happened():
            now = time.monotonic()
            if progress is not None and (reached := progress()) != stage:
                stage, changed = reached, now
            if now - changed > self.timeout_s:
                return False
            if look is not None and now - looked > LOOK_S:
                look(now - start)
                looked = now = time.monotonic()
            left_s = self.timeout_s - (now - changed)
            last_s = now - start if now - start < DUE_SHARE * self.fastest_s else None
            time.sleep(max(1e-6, min(self._nap_s(now - start), left_s)))  # Linux adds its timer slack, about 50 us
        took_s = time.monotonic() - start
        self._recent_s.append(took_s if last_s is None else max(last_s, took_s / 2))
        self.fastest_s = min(self._recent_s)
        return True

    def _nap_s(self, waited_s: float) -> float:
        due_s = DUE_SHARE * self.fastest_s - waited_s
        if due_s > 0:
            return min(due_s, COARSE_SHARE * self.fastest_s if self.watches else LOOK_S)
        return min(self.share * max(waited_s, self.fastest_s), LOOK_S)


def _shorten() -> float:
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(min(usual_s, TURN_S))
    return usual_s


# This process's threads take turns of TURN_S at the interpreter's lock. Beside the checks of 12,627 tensors, which take 24 ms,
# a transport would wait 5 ms for each turn.
short_turns = ProcessSetting(_shorten, sys.setswitchinterval)


class DeadlineThread:
    """Makes one call after another. A call that never returns does not keep the process from ending, unlike in a pool."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        Thread(target=_make_calls, args=(self._calls,), name=name, daemon=True).start()
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
        """Return or raise what `function` does, or raise `concurrent.futures.TimeoutError` after `limit_s`."""
        return self.start(function).result(limit_s)


def _make_calls(calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while call := calls.get():
        outcome, function = call
        try:
            outcome.set_result(function())
        except BaseException as error:  # raised in the caller
            outcome.set_exception(error)
        del call, outcome, function  # an idle thread keeps nothing alive
