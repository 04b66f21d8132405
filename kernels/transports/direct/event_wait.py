"""Wait for events of peers' GPUs, or of the own one, with a deadline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import torch

from mcore_reshard.kernels.errors import DeadlineError, TransferError
from mcore_reshard.kernels.rendezvous.polling import EventPoller

from .peer_signals import PeerSignals


class EventWait:
    """Waits for one event of each peer, again in every refit."""

    def __init__(self, signals: PeerSignals, what: str) -> None:
        self._signals = signals
        self._what = what
        self._poller = EventPoller(signals.timeout_s)

    def wait(
        self,
        events: Mapping[int, torch.cuda.Event],
        begin: float | None = None,
        when_late: Callable[[], None] | None = None,
    ) -> None:
        """Raises `DeadlineError`, or the GPU's error. Calls `when_late` after twice the fastest time: a peer may be dead.

        `begin` (`time.monotonic`) is when this rank began to queue the work, which may take it long, and not always equally
        long; None: now.
        """
        left = deque(events.items())

        def all_have_happened() -> bool:
            try:
                while left and left[0][1].query():
                    left.popleft()
            except RuntimeError as error:
                raise TransferError(self._signals.peers[left[0][0]], f"the GPU reports: {error}") from error
            return not left

        def look(waited_s: float) -> None:
            if when_late is not None and waited_s > 2 * self._poller.fastest_s:
                when_late()

        if not self._poller.until(all_have_happened, look=look, since=begin):
            late = self._signals.peers[left[0][0]]
            raise DeadlineError(late, f"{self._what} did not end within {self._signals.timeout_s:g} s")
