"""Ranks exchange values through a store, and find the one that keeps the others waiting: JSON under keys of each rank.

    exchange = StoreExchange(store, "gen:0", ("train:0", "gen:0"), timeout_s=60.0)
    exchange.gather("budget", 512)      # [256, 512]: everyone's, in the order of the ranks

Any process that knows a store's address can write to it. So `parse_stored` checks each value; its error names key and rank.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistError, DistStoreError

from mcore_reshard.kernels.errors import DeadlineError, SessionError, TransferError, Waiting
from mcore_reshard.planner.bounded_json import MAX_WORD_BYTES, BoundsError, check_counts, parse_json

from .polling import NOTICE_S
from .store_keys import StoreKeys

T = TypeVar("T")


def stored_text(value: Any) -> str:
    """A value as it lies on the store; `parse_stored` reads it."""
    return json.dumps(value)


def parse_stored(key: str, content: bytes, parse: Callable[[Any], T], *, written_by: str = "") -> T:
    """`parse(value)` of a key's content. Raises `SessionError` for no JSON, beyond its bounds, or where `parse` raises."""
    try:
        return parse(parse_json(content, "it", max_bytes=MAX_WORD_BYTES))
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        owner = f", which {written_by} wrote," if written_by else ""
        raise SessionError(
            f"the value of {key!r} on the store{owner} is malformed: {content[:60]!r} ({error!r:.120}); give"
            " every session on a store a name of its own, and let nothing else write there"
        ) from error


def publish(store: StoreKeys, key: str, value: Any) -> None:
    """Tell all ranks `value`, as JSON."""
    store.set(key, stored_text(value))


def fetch(store: StoreKeys, key: str, waiting: Waiting, parse: Callable[[Any], T], *, timeout_s: float) -> T:
    """The value that `waiting.peer` publishes as `key`. Raises `DeadlineError` if it publishes none."""
    content = fetch_content(store, key, waiting, timeout_s=timeout_s)
    return parse_stored(key, content, parse, written_by=waiting.peer)


def fetch_content(store: StoreKeys, key: str, waiting: Waiting, *, timeout_s: float) -> bytes:
    """The same, as it lies on the store."""
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except DistStoreError as error:
        raise DeadlineError(waiting, f"{waiting.peer} published nothing within {timeout_s:g} s") from error
    return store.get(key, writer=seat_of(waiting.peer))


def seat_of(name: str) -> str:
    """The seat of a rank: the session knows a replica that passes on, "relay:3", as "gen:3"."""
    return name.replace("relay:", "gen:")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a session failed, as told to every rank."""

    rank_name: str  # the rank that noticed
    error: str  # the error's class
    message: str
    stage: int | None = None
    parameter: str | None = None
    peer: str | None = None  # for whom it waited, if it did

    @classmethod
    def of(cls, rank_name: str, error: BaseException) -> Failure:
        if not isinstance(error, TransferError):
            return cls(rank_name, type(error).__name__, str(error))
        waiting = error.waiting
        return cls(rank_name, type(error).__name__, str(error), waiting.stage, waiting.parameter, seat_of(waiting.peer))

    @classmethod
    def from_json(cls, value: Any) -> Failure:
        """Raises TypeError or ValueError for what no rank wrote."""
        failure = cls(**value)
        kinds = (str, str, str, int | None, str | None, str | None)
        for (name, fact), kind in zip(asdict(failure).items(), kinds, strict=True):
            if not isinstance(fact, kind):
                raise ValueError(f"{name} is {fact!r}")
            str(fact).encode()  # half of a surrogate pair cannot be passed on
        return failure

    def __str__(self) -> str:
        return f"{self.rank_name}: {self.error}: {self.message}"


@dataclass(frozen=True)
class StoreExchange:
    """One rank's access to the values of all."""

    store: StoreKeys
    rank_name: str
    members: Sequence[str]  # the names of all ranks, in the order of the group
    timeout_s: float

    def gather(self, topic: str, value: Any, parse: Callable[[Any], T]) -> list[T]:
        """Publish `value` (JSON) and return everyone's, parsed. Raises `SessionError` naming ranks that publish none."""
        publish(self.store, f"{topic}/{self.rank_name}", value)
        try:
            self.store.wait(self.keys(topic), timedelta(seconds=self.timeout_s))
        except DistStoreError as error:
            missing = ", ".join(self.missing(topic)) or "the last rank"
            raise SessionError(f"{self.rank_name}: {missing} did not come within {self.timeout_s:g} s") from error
        return self.values(topic, parse)

    def keys(self, topic: str) -> list[str]:
        return [f"{topic}/{name}" for name in self.members]

    def missing(self, topic: str) -> list[str]:
        """The ranks that have published nothing yet."""
        return [key.removeprefix(f"{topic}/") for key in self.store.missing(self.keys(topic))]

    @property
    def writers(self) -> list[str]:
        """The seats that write what `keys` names."""
        return [seat_of(name) for name in self.members]

    def values(self, topic: str, parse: Callable[[Any], T]) -> list[T]:
        """The values of all ranks, which must be there."""
        return self.parsed(topic, self.store.multi_get(self.keys(topic), writers=self.writers), parse)

    def parsed(self, topic: str, found: Sequence[bytes | SessionError | None], parse: Callable[[Any], T]) -> list[T]:
        """The values of all ranks, as they were found under `keys`."""
        keys, contents = self.keys(topic), list[bytes]()
        for key, content in zip(keys, found, strict=True):
            if not isinstance(content, bytes):
                raise content or DistStoreError(f"{key} was deleted")
            contents.append(content)
        try:
            check_counts(contents, f"all that ranks say at {topic!r}")
        except BoundsError as error:
            raise SessionError(
                f"{self.rank_name} reads no further: {error}; let nothing else write to the store"
            ) from error
        named = zip(keys, contents, self.members, strict=True)
        return [parse_stored(key, content, parse, written_by=name) for key, content, name in named]

    def blame(self, occasion: str, waits: Sequence[Failure], grace: Callable[[], None] | None = None) -> Failure:
        """Of all waits past their deadline, the one for a rank that does not wait itself: the culprit.

            gen:1 waits for gen:0, gen:0 waits for train:1, train:1 says nothing    ->    gen:0 waits for train:1

        `waits` are this rank's, the one that ended first. The others publish theirs during `grace`, by default NOTICE_S.
        A rank that has come to `occasion`, as `gather` has it there, has nothing left to do that others wait for.
        """
        publish(self.store, f"{occasion}/stuck/{self.rank_name}", [asdict(failure) for failure in waits])
        if grace is None:
            time.sleep(min(NOTICE_S, self.timeout_s))
        else:
            grace()
        followed, left = {self.rank_name}, list(waits[::-1])
        while left:
            failure = left.pop()
            if failure.error == "DeadlineError" and self.store.check([f"{occasion}/{failure.peer}"]):
                continue
            if not failure.peer or not self.is_stuck(occasion, failure.peer):
                return failure
            if failure.peer in followed:
                continue
            followed.add(failure.peer)
            with suppress(SessionError):  # a malformed chain ends here; this rank's own error matters more
                stuck = f"{occasion}/stuck/{failure.peer}"
                said = self.store.get(stuck, writer=seat_of(failure.peer))
                chain = parse_stored(stuck, said, lambda value: [*map(Failure.from_json, value)])
                left += chain[::-1]
        return waits[0]  # all wait for each other

    def is_stuck(self, occasion: str, seat: str) -> bool:
        """Whether a rank has said at `blame` that it waits past its deadline."""
        return self.store.check([f"{occasion}/stuck/{seat}"])

    def give_up(self) -> None:
        """Tell the others that this rank moves nothing any more."""
        with suppress(DistError):  # the store may be what failed; ranks that wait have their deadline
            self.store.compare_set("gave-up", "", self.rank_name)

    def who_gave_up(self) -> str | None:
        """The first rank that did, if any; cheap enough to ask while waiting."""
        return self.store.get("gave-up").decode(errors="replace") if self.store.check(["gave-up"]) else None
