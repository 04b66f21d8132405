"""What the ranks of one transport tell each other through the session's store, besides the bytes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, DistStoreError, Store

from mcore_reshard.kernels.errors import SessionError

_GRACE_S = 1.0  # for others who wait as well to say so


class StoreExchange:
    """One rank's access to the words of all. `names` are the ranks in group order, as messages call them."""

    def __init__(self, store: Store, rank: int, names: Sequence[str], *, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._names = tuple(names)
        self._timeout_s = timeout_s

    def gather(self, topic: str, word: Any) -> list[Any]:
        """Say `word` (JSON) and return everyone's, in group order."""
        self._store.set(f"{topic}/{self._rank}", json.dumps(word))
        keys = [f"{topic}/{rank}" for rank in range(len(self._names))]
        self._await(topic, keys)
        return [json.loads(said) for said in self._store.multi_get(keys)]

    def publish(self, topic: str, content: bytes) -> None:
        self._store.set(topic, content.hex())

    def read(self, topic: str) -> bytes:
        """What some rank publishes under `topic`."""
        self._await(topic, [topic])
        return bytes.fromhex(self._store.get(topic).decode())

    def give_up(self) -> None:
        """Tell the others that this rank moves nothing any more."""
        with suppress(DistError):  # the store may be what failed; those that wait have their deadline
            self._store.compare_set("gave-up", "", self._names[self._rank])

    def who_gave_up(self) -> str | None:
        """The first rank that did, if any; cheap enough to ask while waiting."""
        return self._store.get("gave-up").decode() if self._store.check(["gave-up"]) else None

    def silent(self, occasion: str, peers: Sequence[int]) -> list[int]:
        """Say that this rank waited in vain, and return those of `peers` (group ranks) that do not say the same.

        They are the ones to blame: the others are waiting themselves.
        """
        self._store.set(f"{occasion}/stuck/{self._rank}", "")
        time.sleep(min(_GRACE_S, self._timeout_s))
        return [peer for peer in peers if not self._store.check([f"{occasion}/stuck/{peer}"])]

    def _await(self, topic: str, keys: list[str]) -> None:
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except DistStoreError as error:
            missing = [key for key in keys if not self._store.check([key])]
            late = [name for rank, name in enumerate(self._names) if f"{topic}/{rank}" in missing] or missing
            who = self._names[self._rank]
            raise SessionError(f"{who}: {', '.join(late)} did not come within {self._timeout_s:g} s") from error
