"""A store on which a wait ends at once when the session has failed."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import DistStoreError, PrefixStore, Store

from mcore_reshard.kernels.errors import SessionError

from .polling import COARSE_SHARE, EventPoller


class FailFastStore(PrefixStore):
    """The keys under `name` of a store.

    A rank that fails writes why under the key `failure` of `store`. From then on every `wait` raises, here and on each
    FailFastStore made on this one. A FailFastStore on a plain store without `failure` is a PrefixStore.

    C++ code does not see this `wait`: what is given the store itself waits natively.
    """

    def __init__(self, name: str, store: Store, failure: str | None = None) -> None:
        super().__init__(name, store)
        self._store = store  # torch calls one that is written in Python, but does not keep it alive
        self._failure: tuple[Store, str] | None = getattr(store, "_failure", None)
        if failure is not None:
            self._failure = store, failure

    def wait(self, keys: list[str], timeout: timedelta) -> None:  # type: ignore[override]  # torch has more ways to call it
        """Wait for all `keys`. Raises `SessionError` with the reason of a failure, `DistStoreError` when the time is up.

        It polls: a native wait cannot be for one key or another, and logs each time that it ends in vain.
        """
        if self._failure is None:
            super().wait(keys, timeout)
            return
        store, failure = self._failure

        def has_come() -> bool:
            came: bool = self.check(keys)
            if store.check([failure]):
                raise SessionError(store.get(failure).decode(errors="replace"))
            return came

        if not EventPoller(timeout.total_seconds(), share=COARSE_SHARE).until(has_come):
            raise DistStoreError(f"waited {timeout.total_seconds():g} s for {', '.join(keys)}")
