"""How the ranks of two separate worlds agree: through a TCPStore, in JSON.

A meeting has exactly one outcome for everyone. The last rank to arrive declares success; a rank that fails or waits too
long declares failure, with the cause. Both write the same key by compare-and-set, so whichever comes first stands, and
no rank can report success where another reports failure.

On the way to a meeting ranks also wait for single words of each other, on shelves: such a wait ends with the failure too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from mcore_reshard.kernels.errors import DeadlineError, PeerLostError, SessionError, TransferError

from .fail_fast_store import FailFastStore
from .store import connect_store

_AGREED = json.dumps({"agreed": True})
_FAILED = "failed"  # the key of the session's failure, for those who wait on a shelf
_CAUSE_GRACE_S = 3.0  # how long a rank that lost peers waits for the cause to be published by someone who knows it
_LEAVE_GRACE_S = 5.0  # how long a rank that is done lets others learn that the last refit was committed
_STUCK_GRACE_S = 1.0  # how long a rank that waited in vain lets others say for whom they wait


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a session failed, as told to every rank."""

    rank_name: str  # who noticed
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
        peer = waiting.peer.replace("relay:", "gen:")  # the session knows a replica that passes on by its own name
        return cls(rank_name, type(error).__name__, str(error), waiting.stage, waiting.parameter, peer)

    def __str__(self) -> str:
        return f"{self.rank_name}: {self.error}: {self.message}"


class SessionFailed(SessionError):
    """A rank of the session failed; `failure` is the cause that every rank was told."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(str(failure))


class Rendezvous:
    """One rank's place among all ranks of a session.

    It has a connection of its own to the store at `address` ("host:port"). That must be up until `leave` has returned in
    the process that hosts it, and after a failure until all ranks have read the cause there: a rank that comes too late
    raises all the same, but can only say that it lost the store. So does one whom the store has not answered for
    `timeout_s`: a frozen store ends `gather` and `fail` within twice their deadline. `session` names the session on that
    store; each name serves once.
    """

    def __init__(self, address: str, session: str, rank_name: str, members: Sequence[str], *, timeout_s: float) -> None:
        self.rank_name = rank_name
        self.timeout_s = timeout_s
        self._address = address
        self._prefix = f"mcore-reshard/{session}"
        self._members = tuple(members)
        self._process = uuid4().hex
        self._past: str | None = None
        self._last: str | None = None  # the last phase that all agreed on
        self._met = False
        self.store = self._another_store()

    def store_for(self, name: str) -> FailFastStore:
        """A place for what ranks tell each other besides meetings."""
        return FailFastStore(name, self.store, _FAILED)

    def another_store_for(self, name: str) -> FailFastStore:
        """The same place, over a connection of its own."""
        return FailFastStore(name, self._another_store(), _FAILED)

    def gather(self, phase: str, word: Mapping[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        """Publish this rank's `word` and return everyone's by rank name, once all have arrived at `phase`.

        Raises `SessionFailed` with the cause if a rank failed, or naming those that did not arrive by the deadline.
        """
        with self._store_is_up():
            return self._gather(phase, word, self.timeout_s if timeout_s is None else timeout_s)

    def leave(self) -> None:
        """Wait, 5 s at most, until everyone has read the last agreement: this process may host the store and end next."""
        grace_s = min(_LEAVE_GRACE_S, self.timeout_s)
        deadline = time.monotonic() + grace_s
        with suppress(dist.DistError):  # a store that is gone has nobody left who could read it
            self.store.set_timeout(timedelta(seconds=grace_s))
            while self._last and self.store.add(f"{self._last}/read", 0) < len(self._members):
                if time.monotonic() > deadline:
                    return
                time.sleep(0.002)

    def fail(self, phase: str, error: BaseException) -> Failure:
        """Tell everyone that `phase` cannot succeed. Returns the cause that stands: perhaps an earlier one."""
        failure = Failure.of(self.rank_name, error)
        with self._store_is_up():
            if isinstance(error, (DeadlineError, PeerLostError)):
                failure = self._culprit(phase, error)
            self._declare(phase, failure)
            return self._outcome(phase) or failure

    def failure(self, phase: str) -> Failure | None:
        """Why `phase` cannot succeed, if a rank has said so. For those who have not arrived there yet."""
        with self._store_is_up():
            return self._outcome(phase) if self.store.check([f"{phase}/outcome"]) else None

    def _gather(self, phase: str, word: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        self._arrive(phase, word)
        try:
            self.store.wait([f"{phase}/outcome"], timedelta(seconds=timeout_s))
        except dist.DistStoreError:
            if len(self._missing(phase)) > 1:  # they may be waiting for one of them, and about to say for which
                self._await_cause(phase)
            missing = self._missing(phase)
            message = f"{', '.join(missing) or 'nobody'} did not arrive at {phase!r} within {timeout_s:g} s"
            self._declare(
                phase, Failure(self.rank_name, "DeadlineError", message, peer=missing[0] if missing else None)
            )
        if failure := self._outcome(phase):
            raise SessionFailed(failure)
        if not self.store.check([f"{phase}/{name}" for name in self._members]):
            raise SessionError(f"ranks disagree on how many they are: {self.rank_name} counts {len(self._members)}")
        words = self.store.multi_get([f"{phase}/{name}" for name in self._members])
        self._forget_past(phase)
        self.store.add(f"{phase}/read", 1)  # last: the store may go once all have said so
        self._last = phase
        return {name: json.loads(word) for name, word in zip(self._members, words, strict=True)}

    def _missing(self, phase: str) -> list[str]:
        return [name for name in self._members if not self.store.check([f"{phase}/{name}"])]

    def _another_store(self) -> FailFastStore:
        return FailFastStore(self._prefix, connect_store(self._address, self.timeout_s))

    @contextmanager
    def _store_is_up(self) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            raise SessionError(f"{self.rank_name} lost {error}") from error

    def _arrive(self, phase: str, word: Mapping[str, Any]) -> None:
        mine = json.dumps({**word, "process": self._process})
        if self.store.compare_set(f"{phase}/{self.rank_name}", "", mine).decode() != mine:
            raise SessionError(
                f"another process has been {self.rank_name} at {phase!r} of this session: "
                "give every session on a store a name of its own, and every process a rank of its own"
            )
        if self.store.add(f"{phase}/arrived", 1) == len(self._members):
            self.store.compare_set(f"{phase}/outcome", "", _AGREED)

    def _declare(self, phase: str, failure: Failure) -> None:
        self.store.compare_set(f"{phase}/outcome", "", json.dumps(asdict(failure)))
        if stands := self._outcome(phase):
            self.store.set(_FAILED, str(stands))

    def _outcome(self, phase: str) -> Failure | None:
        outcome = json.loads(self.store.get(f"{phase}/outcome"))
        return None if outcome.get("agreed") else Failure(**outcome)

    def _await_cause(self, phase: str) -> None:
        """Whoever knows more says so in a moment: a connection closes a little before or after its owner says why."""
        deadline = time.monotonic() + min(_CAUSE_GRACE_S, self.timeout_s)
        while time.monotonic() < deadline and not self.store.check([f"{phase}/outcome"]):
            time.sleep(0.02)

    def _culprit(self, phase: str, error: DeadlineError | PeerLostError) -> Failure:
        """Follow who waits for whom, or lost whom: a rank that says nothing of the kind is the one to name."""
        mine = [Failure.of(self.rank_name, each) for each in (error, *error.others)]
        self.store.set(f"{phase}/stuck/{self.rank_name}", json.dumps([asdict(failure) for failure in mine]))
        if isinstance(error, PeerLostError):
            self._await_cause(phase)
        else:
            time.sleep(min(_STUCK_GRACE_S, self.timeout_s))
        seen, left = {self.rank_name}, mine[::-1]
        while left:
            failure = left.pop()
            if not failure.peer or not self.store.check([stuck := f"{phase}/stuck/{failure.peer}"]):
                return failure
            if failure.peer not in seen:
                seen.add(failure.peer)
                left += [Failure(**each) for each in json.loads(self.store.get(stuck))[::-1]]
        return mine[0]  # all wait for each other

    def _forget_past(self, phase: str) -> None:
        """All have arrived at `phase`, so all have left the one before: its keys have no reader left."""
        if self._past is not None:
            self.store.delete_key(f"{self._past}/{self.rank_name}")
            if self.rank_name == self._members[0]:
                self.store.delete_key(f"{self._past}/arrived")
                self.store.delete_key(f"{self._past}/outcome")
                self.store.delete_key(f"{self._past}/read")
        # The first meeting's keys stay: they show that the session's name is taken.
        self._past = phase if self._met else None
        self._met = True
