"""A process that ends by itself says goodbye to its sessions: at exit, and where SIGTERM would end it."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from weakref import WeakSet

from mcore_reshard.kernels.rendezvous.store import SessionStore

_seated: WeakSet[SessionStore] = WeakSet()
_registered_in = 0  # the process


def say_goodbye_at_exit(store: SessionStore) -> None:
    """Leave the seat of `store` when this process exits, or gets a SIGTERM for which nobody has a handler.

    Python runs a handler once its main thread is back from a blocking call.
    """
    global _registered_in
    _seated.add(store)
    if _registered_in == os.getpid():
        return
    _registered_in = os.getpid()
    atexit.register(_say_goodbye)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def _say_goodbye() -> None:
    for store in list(_seated):
        with suppress(Exception):
            store.leave_seat_soon()


def _end(number: int, frame: FrameType | None) -> None:
    """Say goodbye, then end as if there were no handler."""
    _say_goodbye()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
