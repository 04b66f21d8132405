"""Keys of a session on its store, as torch's stores have them: all of them, or those under a prefix.

    view = store.under("a/7")                   # a StoreView: "call" there is "a/7/call"
    FailFastStore("gloo", view, "failed")       # waits there end once a rank has written "a/7/failed"

All of them speak through one StoreConnection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import DistStoreError, Store

from mcore_reshard.kernels.errors import SessionError

from .frames import MAX_VALUE_BYTES
from .seal import ReplayError
from .store_connection import Answer, StoreConnection
from .store_opening import Seat


class StoreKeys(Store):
    """Keys as torch's stores have them, and waits that end at once; what SessionStore and its views share.

    torch calls such an object from C++ but does not keep it alive: whoever gives one to torch keeps a reference.
    """

    _root: StoreConnection
    _prefix: str

    @property
    def local_host(self) -> str | None:
        """The address of this host on the network that leads to the store; None while there is no connection."""
        return self._root.local_host

    def under(self, prefix: str) -> StoreView:
        """The keys that begin with `prefix/`."""
        return StoreView(self._root, f"{self._prefix}{prefix}/")

    def set(self, key: str, value: str | bytes) -> None:
        self._root.ask({"op": "set", "keys": [self._prefix + key]}, [self._sealed(key, _as_bytes(value))])

    def set_soon(self, values: Mapping[str, str]) -> None:
        """Set keys without waiting for the store: what this connection asks for later comes after it."""
        sealed = [self._sealed(key, value.encode()) for key, value in values.items()]
        self._root.send({"op": "set", "keys": [self._prefix + key for key in values]}, sealed, is_awaited=False)

    def delete_soon(self, prefixes: Sequence[str], keys: Sequence[str] = ()) -> None:
        """Delete keys, and those that begin with prefixes, without waiting for the store."""
        for prefix in prefixes:
            self._root.send({"op": "delete_prefix", "prefix": self._prefix + prefix}, is_awaited=False)
        if keys:
            self._root.send({"op": "delete", "keys": [self._prefix + key for key in keys]}, is_awaited=False)

    def peek(self, key: str, *, writer: str | None = None) -> bytes | None:
        """The value of a key; None if it does not exist."""
        root, full = self._root, self._prefix + key
        _, blobs = root.ask({"op": "get", "keys": [full]})
        return self._opened(full, blobs[0], writer) if blobs else None

    def peek_all(self, keys: Sequence[str], *, writers: Sequence[str | None]) -> list[bytes | SessionError | None]:
        """For each key its value, what is wrong with its value, or None where it does not exist."""
        return self._found(self._root.ask({"op": "get", "keys": [self._prefix + key for key in keys]}), keys, writers)

    def peek_when(
        self,
        awaited: Sequence[str],
        timeout_s: float,
        keys: Sequence[str],
        *,
        writers: Sequence[str | None],
        look: Callable[[], Any] | None = None,
    ) -> list[bytes | SessionError | None] | None:
        """`peek_all` of `keys` once all keys `awaited` exist, in one round trip; None after `timeout_s`.

        `look` is as for `wait_any`.
        """
        full, read = ([self._prefix + key for key in each] for each in (awaited, keys))
        answer = self._root.await_keys(full, True, timeout_s, look, read)
        if answer is None:
            return None
        if "missing" not in answer[0]:  # they are long, or the store is of an earlier release
            return self.peek_all(keys, writers=writers)
        return self._found(answer, keys, writers)

    def _found(
        self, answer: Answer, keys: Sequence[str], writers: Sequence[str | None]
    ) -> list[bytes | SessionError | None]:
        (header, blobs), found = answer, list[bytes | SessionError | None]()
        missing, values = {*header["missing"]}, iter(blobs)
        for key, writer in zip([self._prefix + key for key in keys], writers, strict=True):
            try:
                found.append(None if key in missing else self._opened(key, next(values), writer))
            except SessionError as error:
                found.append(error)
        return found

    def get(self, key: str, *, writer: str | None = None) -> bytes:
        """The value of a key, once it exists. `writer`: the seat that must have written it. Raises DistStoreError."""
        (value,) = self.multi_get([key], writers=[writer])
        return value

    def multi_get(self, keys: Sequence[str], *, writers: Sequence[str | None] = ()) -> list[bytes]:
        """The values of keys, once all exist; raises DistStoreError if one does not in time."""
        root, full = self._root, [self._prefix + key for key in keys]
        header, blobs = root.ask({"op": "get", "keys": full})
        if len(blobs) != len(full):
            self.wait(keys)
            header, blobs = root.ask({"op": "get", "keys": full})
        if header["missing"]:
            raise DistStoreError(f"{header['missing'][0]} was deleted")
        expected = [*writers, *[None] * (len(full) - len(writers))]
        return [self._opened(*each) for each in zip(full, blobs, expected, strict=True)]

    def _sealed(self, key: str, value: bytes) -> bytes:
        root, full = self._root, self._prefix + key
        sealed = root.sealer.seal(full, root.sender, value)
        if len(sealed) > MAX_VALUE_BYTES:
            raise SessionError(
                f"{root.sender or 'a rank'} has {len(sealed):,} bytes for {full!r}; a store keeps {MAX_VALUE_BYTES:,} at most"
            )
        return sealed

    def _opened(self, full_key: str, sealed: bytes, writer: str | None) -> bytes:
        root = self._root
        try:
            return root.sealer.open(full_key, sealed, writer)
        except ReplayError:  # or another thread has asked later, and opened first
            _, blobs = root.ask({"op": "get", "keys": [full_key]})
            if not blobs:
                raise
            return root.sealer.open(full_key, blobs[0], writer)

    def add(self, key: str, value: int) -> int:
        header, _ = self._root.ask({"op": "add", "keys": [self._prefix + key], "amount": value})
        return int(header["value"])

    def add_and_peek(
        self, counter: str, full_at: int, keys: Sequence[str], *, writers: Sequence[str | None]
    ) -> list[bytes | SessionError | None] | None:
        """Add 1 to a counter; `peek_all` of `keys` once it is `full_at` and all of them exist, else None. One round trip."""
        full = [self._prefix + key for key in keys]
        add = {"op": "add", "keys": [self._prefix + counter], "amount": 1}
        added, found = self._root.ask_all([(add, ()), ({"op": "get", "keys": full, "all": True}, ())])
        if int(_said(added)[0]["value"]) < full_at or _said(found)[0]["missing"]:  # anybody may write to the counter
            return None
        return self._found(_said(found), keys, writers)

    def compare_set_and_add(self, key: str, desired_value: str, counter: str) -> tuple[bytes, int | None]:
        """`compare_set` of a key that does not exist, and 1 added to a counter, in one round trip.

        Returns the value that stands, and the counter; None where it is no number.
        """
        blobs = [self._sealed(key, desired_value.encode())]
        full = self._prefix + key
        add = {"op": "add", "keys": [self._prefix + counter], "amount": 1}
        written, added = self._root.ask_all([({"op": "compare_set", "keys": [full]}, blobs), (add, ())])
        count = None if isinstance(added, SessionError) else int(added[0]["value"])
        return self._standing(full, desired_value.encode(), _said(written)), count

    def _standing(self, full: str, desired: bytes, answer: Answer) -> bytes:
        header, others = answer
        return desired if header["stands"] else others[0] and self._opened(full, others[0], None)

    def check(self, keys: Sequence[str]) -> bool:
        full = [self._prefix + key for key in keys]
        return not self._root.ask({"op": "check", "keys": full})[0]["missing"]

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Those of `keys` that do not exist."""
        missing = self._root.ask({"op": "check", "keys": [self._prefix + key for key in keys]})[0]["missing"]
        return [key.removeprefix(self._prefix) for key in missing]

    def compare_set(self, key: str, expected_value: str, desired_value: str | bytes) -> bytes:
        """Set a key that has `expected_value`, or does not exist where that is empty; the value that stands."""
        root, full = self._root, self._prefix + key
        blobs = [self._sealed(key, _as_bytes(desired_value))]
        if expected_value:
            _, before = root.ask({"op": "get", "keys": [full]})
            stands = self._opened(full, before[0], None) if before else b""
            if stands != expected_value.encode():
                return stands
            blobs += before
        return self._standing(full, _as_bytes(desired_value), root.ask({"op": "compare_set", "keys": [full]}, blobs))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        """Return once all keys exist; raises DistStoreError when the time is up."""
        limit_s = (self.timeout if timeout is None else timeout).total_seconds()  # type: ignore[attr-defined]
        if not self.wait_all(keys, limit_s):
            raise DistStoreError(f"waited {limit_s:g} s for {', '.join(keys)}")

    def wait_all(self, keys: Sequence[str], timeout_s: float, look: Callable[[], Any] | None = None) -> bool:
        """Whether all keys exist within `timeout_s`. `look` is as for `wait_any`."""
        full = [self._prefix + key for key in keys]
        return not full or self._root.await_keys(full, True, timeout_s, look) is not None

    def wait_any(self, keys: Sequence[str], timeout_s: float, look: Callable[[], Any] | None = None) -> list[str]:
        """The keys that exist, once one does; none after `timeout_s`.

        `look()` is called whenever a seat has changed, and every LOOK_S; it raises to end the wait.
        """
        answer = self._root.await_keys([self._prefix + key for key in keys], False, timeout_s, look)
        return [] if answer is None else [str(key).removeprefix(self._prefix) for key in answer[0]["keys"]]

    def delete_key(self, key: str) -> bool:
        return bool(self._root.ask({"op": "delete", "keys": [self._prefix + key]})[0]["value"])

    deleteKey = delete_key  # as torch calls it from C++

    def delete_prefix(self, prefix: str) -> int:
        """Delete all keys that begin with `prefix`; how many there were."""
        return int(self._root.ask({"op": "delete_prefix", "prefix": self._prefix + prefix})[0]["value"])

    def reopen(self) -> None:
        """Connect anew with a store that was lost or started anew. Raises SessionError where none answers."""
        self._root.reopen()

    @property
    def described(self) -> str:
        return self._root.described

    def silence(self, since: float) -> str:
        return self._root.silence(since)

    def keys(self, prefix: str = "") -> list[str]:
        """All keys that begin with `prefix`."""
        found = self._root.ask({"op": "list", "prefix": self._prefix + prefix})[0]["keys"]
        return [key.removeprefix(self._prefix) for key in found]


class StoreView(StoreKeys):
    """The keys of a session that begin with a prefix."""

    def __init__(self, root: StoreConnection, prefix: str) -> None:
        super().__init__()
        self._root, self._prefix = root, prefix
        self.set_timeout(timedelta(seconds=root.timeout_s))

    @property
    def seats(self) -> dict[str, Seat]:
        """All seats of the session, as the server last said."""
        return self._root.seats


class FailFastStore(StoreView):
    """The keys under `name` of a view, on which a wait ends at once when the session has failed.

    A rank that fails writes why under the key `failure` of `store`. From then on every wait raises, here and on each
    FailFastStore made on this one. On a plain view without `failure` it is a StoreView. `look` is as for `wait_any`.
    """

    def __init__(
        self, name: str, store: StoreKeys, failure: str | None = None, look: Callable[[], Any] | None = None
    ) -> None:
        super().__init__(store._root, f"{store._prefix}{name}/")
        self._look: Callable[[], Any] | None = getattr(store, "_look", None) if look is None else look
        self._failure: str | None = getattr(store, "_failure", None) if failure is None else store._prefix + failure

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        """Raises `SessionError` with the reason of a failure, `DistStoreError` when the time is up."""
        if self._failure is None:
            super().wait(keys, timeout)
            return
        root, left = self._root, [self._prefix + key for key in keys]
        limit_s = (self.timeout if timeout is None else timeout).total_seconds()  # type: ignore[attr-defined]
        deadline = time.monotonic() + limit_s
        while left:  # one key after another, or the failure
            answer = root.await_keys([left[0], self._failure], False, deadline - time.monotonic(), self._look)
            if answer is None:
                raise DistStoreError(f"waited {limit_s:g} s for {', '.join(keys)}")
            if self._failure in answer[0]["keys"]:
                self._raise_failure(self._failure)
            left = left[1:]

    def raise_if_failed(self) -> None:
        """Raise SessionError with the reason if a rank has failed, and what `look` raises."""
        if self._look is not None:
            self._look()
        if self._failure is not None and StoreView(self._root, "").check([self._failure]):
            self._raise_failure(self._failure)

    def _raise_failure(self, full_key: str) -> NoReturn:
        raise SessionError(StoreView(self._root, "").get(full_key).decode(errors="replace"))

    def wait_all(self, keys: Sequence[str], timeout_s: float, look: Callable[[], Any] | None = None) -> bool:
        if self._failure is None:
            return super().wait_all(keys, timeout_s, look)
        try:
            self.wait(keys, timedelta(seconds=timeout_s))
        except DistStoreError:
            return False
        return True


def _said(answer: Answer | SessionError) -> Answer:
    if isinstance(answer, SessionError):
        raise answer
    return answer


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
