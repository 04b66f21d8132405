"""Words that ranks leave for each other on a store, and waits for them that end when the session has failed."""

from __future__ import annotations

import time
from datetime import timedelta

from torch.distributed import DistStoreError, PrefixStore, Store

from mcore_reshard.kernels.errors import SessionError

_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.001, 0.1
_NAPPING = 0.1  # share of the time waited: a key that comes is seen that much later at most


class FailFastStore(PrefixStore):
    """The keys under `name` of a store.

    `failure` is the key of `store` under which a rank that fails says why; shelves on this shelf have the same one. Once it
    is there, every `wait` on them raises, within 0.1 s. A shelf on a plain store without `failure` is a PrefixStore.

    Waits from C++ do not look there: gloo's, while it connects, end when their keys come or their time is up.
    """

    def __init__(self, name: str, store: Store, failure: str | None = None) -> None:
        super().__init__(name, store)
        self._store = store  # torch calls one that is written in Python, but does not keep it alive
        self._failure: tuple[Store, str] | None = getattr(store, "_failure", None)
        if failure is not None:
            self._failure = store, failure

    def wait(self, keys: list[str], timeout: timedelta) -> None:  # type: ignore[override]  # torch has more ways to call it
        """Until all `keys` are there. Raises `SessionError` with the reason of a failure, `DistStoreError` when time is up.

        Looks again and again: a native wait cannot be for one key or another, and logs each time that it ends in vain.
        """
        if self._failure is None:
            super().wait(keys, timeout)
            return
        store, failure = self._failure
        start = time.monotonic()
        while True:
            came = self.check(keys)
            if store.check([failure]):
                raise SessionError(store.get(failure).decode())
            if came:
                return
            waited_s = time.monotonic() - start
            if waited_s > timeout.total_seconds():
                raise DistStoreError(f"waited {timeout.total_seconds():g} s for {', '.join(keys)}")
            time.sleep(min(max(_NAPPING * waited_s, _SHORTEST_NAP_S), _LONGEST_NAP_S))
