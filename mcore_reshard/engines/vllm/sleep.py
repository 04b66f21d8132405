"""vLLM's sleep: weights that have no memory behind them, or that are lost.

    level 1   the weights move to the host; waking brings them back
    level 2   the weights are gone; waking gives memory with anything in it

Source: vllm/v1/worker/gpu_worker.py (sleep, wake_up), 0.26 to 0.33.
"""

from __future__ import annotations

from typing import Any


class SleepWatch:
    """What became of a worker's weights since the watch began."""

    def __init__(self) -> None:
        self.asleep = self.lost = self._watches = False

    def watch(self, worker: Any) -> None:
        """Stand before the worker's own `sleep` and `wake_up`. May be called again."""
        sleep, wake_up = getattr(worker, "sleep", None), getattr(worker, "wake_up", None)
        if sleep is None or wake_up is None or self._watches:
            return
        self._watches = True

        def watched_sleep(level: int = 1, **kwargs: Any) -> Any:
            if level > 0:
                self.asleep, self.lost = True, self.lost or level > 1
            return sleep(level, **kwargs)

        def watched_wake_up(tags: list[str] | None = None, **kwargs: Any) -> Any:
            result = wake_up(tags, **kwargs)
            if tags is None or "weights" in tags:
                self.asleep = False
            return result

        worker.sleep, worker.wake_up = watched_sleep, watched_wake_up
