"""A session has one trainer at a time: another job of the same name must not change what its engines read."""

from __future__ import annotations

import os
import platform
import time

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.rendezvous.store import SessionStore

from .attempts import LEADER

_GONE_S = 2.0  # until a process that has died is known to be gone, and a little longer
_AGAIN_S = 0.1


def require_no_other_trainer(store: SessionStore) -> None:
    """Raise SessionError while another live process is training rank 0. One that has just died is waited for."""
    deadline = time.monotonic() + _GONE_S
    while (seat := store.seats.get(LEADER)) is not None and seat.status == "here":
        pid, host = seat.facts.get("pid"), seat.facts.get("host")
        if (pid, host) == (os.getpid(), platform.node()):
            return
        if time.monotonic() > deadline:
            raise SessionError(
                f"session {store.session!r} has a trainer: {LEADER} is process {pid} on {host}. Its plan stays; give every"
                " job a session name of its own, or end that process first"
            )
        time.sleep(_AGAIN_S)
