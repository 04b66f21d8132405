"""The ranks of two separate worlds agree through a TCPStore, in phases that each have one outcome for all ranks.

    phase "hello"     each rank publishes its word     the last one declares success     everyone reads all words
                      or any rank fails, or waits too long, and declares failure with the cause

Ranks write success or failure to one key by compare-and-set. The first write stands, so no rank can report success if
another reports failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from mcore_reshard.kernels.errors import DeadlineError, PeerLostError, SessionError

from .exchange import Failure, StoreExchange, parse_stored, stored_text
from .polling import CAUSE_S, CLOSE_S, COARSE_SHARE, EventPoller
from .store import FailFastStore, connect_store

_AGREED = stored_text({"agreed": True})
_FAILED = "failed"  # the key of the session's failure, for FailFastStores


class SessionFailed(SessionError):
    """A rank of the session failed; `failure` is the cause that every rank was told."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(str(failure))


class Rendezvous:
    """One rank's place among all ranks of a session, with a connection of its own to the store at `address`.

    The process that hosts the store must keep it up until its `leave` has returned; after a failure, until all ranks have
    read the cause. Each name of a `session` serves once on a store. A store that does not answer for `timeout_s` is lost:
    `gather` and `fail` then end within twice their deadline.
    """

    def __init__(self, address: str, session: str, rank_name: str, members: Sequence[str], *, timeout_s: float) -> None:
        self.rank_name = rank_name
        self.timeout_s = timeout_s
        self._address = address
        self._session = session
        self._members = tuple(members)
        self._process = uuid4().hex
        self._agreed: list[str] = []  # the first phase that all agreed on, and the last
        self.store = self._connect()
        self._exchange = StoreExchange(self.store, rank_name, members, timeout_s=timeout_s)

    def store_for(self, name: str, *, connect: bool = False) -> FailFastStore:
        """A part of the store where waits end with the session. `connect` opens a connection of its own to it."""
        return FailFastStore(name, self._connect() if connect else self.store, _FAILED)

    def gather(
        self,
        phase: str,
        word: Mapping[str, Any],
        *,
        parse: Callable[[Any], dict[str, Any]] = dict,
        timeout_s: float | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Publish this rank's `word` and return everyone's by rank name, parsed, once all have arrived at `phase`.

        Raises `SessionFailed` with the cause if a rank failed, or with the names of ranks that are late.
        """
        with self._store_is_up():
            self._arrive(phase, word)
            self._await_outcome(phase, self.timeout_s if timeout_s is None else timeout_s)
            if not self.store.check(self._exchange.keys(phase)):
                raise SessionError(f"ranks disagree on how many they are: {self.rank_name} counts {len(self._members)}")
            words = self._exchange.values(phase, partial(_parse_word, parse))
            self._forget()
            self._agreed.append(phase)
            self.store.add(f"{phase}/read", 1)  # last: the store may go once all ranks have read
        return dict(zip(self._members, words, strict=True))

    def leave(self) -> None:
        """Wait, CLOSE_S at most, until all ranks have read the last outcome: the store may end with this process."""
        if not self._agreed:
            return
        grace_s = min(CLOSE_S, self.timeout_s)
        with suppress(dist.DistError):  # a store that is gone has nobody left who could read it
            self.store.set_timeout(timedelta(seconds=grace_s))
            EventPoller(grace_s, share=COARSE_SHARE).until(
                lambda: self.store.add(f"{self._agreed[-1]}/read", 0) >= len(self._members)
            )

    def fail(self, phase: str, error: BaseException) -> Failure:
        """Tell everyone that `phase` cannot succeed. Returns the cause that stands: perhaps an earlier one."""
        failure = Failure.of(self.rank_name, error)
        with self._store_is_up():
            if isinstance(error, (DeadlineError, PeerLostError)):
                waits = [Failure.of(self.rank_name, each) for each in (error, *error.others)]
                # A connection closes a little before or after its owner says why.
                grace = partial(self._await_cause, phase) if isinstance(error, PeerLostError) else None
                failure = self._exchange.blame(phase, waits, grace)
            self._declare(phase, failure)
            return self._outcome(phase) or failure

    def failure(self, phase: str) -> Failure | None:
        """Why `phase` cannot succeed, if a rank has said so. For ranks that have not arrived there yet."""
        with self._store_is_up():
            return self._outcome(phase) if self.store.check([f"{phase}/outcome"]) else None

    def _connect(self) -> FailFastStore:
        return FailFastStore(f"mcore-reshard/{self._session}", connect_store(self._address, self.timeout_s))

    @contextmanager
    def _store_is_up(self) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            raise SessionError(f"{self.rank_name} lost {error}") from error

    def _arrive(self, phase: str, word: Mapping[str, Any]) -> None:
        content = stored_text({**word, "process": self._process})
        if self.store.compare_set(f"{phase}/{self.rank_name}", "", content) != content.encode():
            raise SessionError(
                f"another process has been {self.rank_name} at {phase!r} of this session: "
                "give every session on a store a name of its own, and every process a rank of its own"
            )
        if self.store.add(f"{phase}/arrived", 1) == len(self._members):
            self.store.compare_set(f"{phase}/outcome", "", _AGREED)

    def _await_outcome(self, phase: str, timeout_s: float) -> None:
        try:
            self.store.wait([f"{phase}/outcome"], timedelta(seconds=timeout_s))
        except dist.DistStoreError:
            if (
                len(self._exchange.missing(phase)) > 1
            ):  # other ranks may wait for one of these, and are about to say for which
                self._await_cause(phase)
            if missing := self._exchange.missing(phase):
                message = f"{', '.join(missing)} did not arrive at {phase!r} within {timeout_s:g} s"
                self._declare(phase, Failure(self.rank_name, "DeadlineError", message, peer=missing[0]))
            else:  # the last one has come at this moment
                self.store.compare_set(f"{phase}/outcome", "", _AGREED)
        if failure := self._outcome(phase):
            raise SessionFailed(failure)

    def _await_cause(self, phase: str) -> None:
        """Give a rank that knows more the time to declare it."""
        grace_s = min(CAUSE_S, self.timeout_s)
        EventPoller(grace_s, share=COARSE_SHARE).until(lambda: self.store.check([f"{phase}/outcome"]))

    def _declare(self, phase: str, failure: Failure) -> None:
        self.store.compare_set(f"{phase}/outcome", "", stored_text(asdict(failure)))
        if stands := self._outcome(phase):
            self.store.set(_FAILED, str(stands))

    def _outcome(self, phase: str) -> Failure | None:
        key = f"{phase}/outcome"
        return parse_stored(key, self.store.get(key), _parse_outcome)

    def _forget(self) -> None:
        """Delete the keys of the last phase: all ranks have arrived at the next one, so none reads them any more."""
        if len(self._agreed) < 2:  # the first phase's keys stay: they show that the session's name is taken
            return
        past = self._agreed.pop()
        self.store.delete_key(f"{past}/{self.rank_name}")
        if self.rank_name == self._members[0]:
            for key in ("arrived", "outcome", "read"):
                self.store.delete_key(f"{past}/{key}")


def _parse_word(parse: Callable[[Any], dict[str, Any]], word: Any) -> dict[str, Any]:
    if not isinstance(word["process"], str):
        raise TypeError("no process wrote it")
    return parse(word)


def _parse_outcome(outcome: Any) -> Failure | None:
    return None if outcome.get("agreed") is True else Failure.from_json(outcome)
