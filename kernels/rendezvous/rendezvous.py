"""The members of an attempt agree through the store, in phases that each have one outcome for all of them.

    phase "hello"     each rank publishes its word     the last one declares success     everyone reads all words
                      or any rank fails, or waits too long, and declares failure with the cause

Ranks write success or failure to one key by compare-and-set. The first write stands, so no rank can report success if
another reports failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from mcore_reshard.kernels.errors import ConnectError, DeadlineError, PeerLostError, SessionError, StoreRestarted

from .exchange import Failure, StoreExchange, parse_stored, seat_of, stored_text
from .polling import CAUSE_S
from .seal import ForgedError
from .store_keys import FailFastStore, StoreView

_AGREED = stored_text({"agreed": True})
_LAST = "commit"  # the last phase of an attempt
_FAILED = "failed"  # the key of the failure, for FailFastStores


class SessionFailed(SessionError):
    """A rank of the session failed; `failure` is the cause that every rank was told."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(str(failure))


def cause_of(rank_name: str, error: BaseException) -> Failure:
    """Why a rank failed: the cause that it was told, or its own error."""
    return error.failure if isinstance(error, SessionFailed) else Failure.of(rank_name, error)


class Rendezvous:
    """One rank's place among `members`, under keys of their own in `store`.

    `lost()` says which member has exited or left, if any: then no phase can succeed any more. A store that does not
    answer for `timeout_s` is lost.
    """

    def __init__(
        self,
        store: StoreView,
        rank_name: str,
        members: Sequence[str],
        *,
        timeout_s: float,
        lost: Callable[[], Failure | None] = lambda: None,
    ) -> None:
        self.rank_name = rank_name
        self.timeout_s = timeout_s
        self.store = store
        self._members = tuple(members)
        self._lost = lost
        self._start = time.monotonic()
        self._exchange = StoreExchange(store, rank_name, members, timeout_s=timeout_s)

    def store_for(self, name: str) -> FailFastStore:
        """A part of the store where waits end once a member has failed or is lost."""
        return FailFastStore(name, self.store, _FAILED, self._raise_if_lost)

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
            words = self._arrive(phase, word, parse)
            if words is None or not self._agree(phase):
                words = self._await_words(phase, parse, self.timeout_s if timeout_s is None else timeout_s)
        self._require_own_word(phase, words[self.rank_name], parse({**word}))
        return words

    def decide(self, phase: str, settle: Callable[[bool | None], bool | None], on_success: Callable[[], None]) -> None:
        """Vote for success; return once all members have, and know it. `on_success` is called once all have voted so.

        Where the store is lost after the vote, members ask each other: `settle(known)` returns the outcome as they know
        it, None where nobody can tell. Then they try the store once more, for another deadline.

        Nobody leaves before all know the outcome, unless the store or a member is lost.
        An interrupt withdraws the vote; where all have agreed by then, `on_success` is called before it is raised.
        """
        known: bool | None = None
        try:
            readers = None
            if self._arrive(phase, {}, _parse_vote) is None:
                self._await_outcome(phase)
            else:
                stands, readers = self.store.compare_set_and_add(f"{phase}/outcome", _AGREED, f"{phase}/read")
                if failure := self._outcome_of(phase, stands):
                    raise SessionFailed(failure)
            known = True
            self._await_readers(phase, readers)
        except (dist.DistNetworkError, StoreRestarted) as error:
            known = settle(known)
            if known is None:
                known = self._ask_again(phase, error)
            if not known:
                doubt = "" if known is False else "; nobody who answers knows whether the other ranks committed"
                raise SessionError(f"{self.rank_name} lost {error}{doubt}") from error
        except Exception:
            raise
        except BaseException as error:
            if known or self.declare_unless_agreed(phase, Failure.of(self.rank_name, error)) is None:
                on_success()
            if known is None:
                with suppress(Exception):  # the others need not wait for this reader
                    self._count_reader(phase)
            raise
        on_success()

    def fail(self, phase: str, error: BaseException) -> Failure:
        """Tell everyone that `phase` cannot succeed. Returns the cause that stands: perhaps an earlier one."""
        failure = Failure.of(self.rank_name, error)
        with self._store_is_up():
            if isinstance(error, (DeadlineError, PeerLostError)):
                waits = [Failure.of(self.rank_name, each) for each in (error, *error.others)]
                # A connection closes a little before or after its owner says why.
                grace = partial(self._await_cause, phase) if isinstance(error, PeerLostError) else None
                failure = self._exchange.blame(phase, waits, grace)
                if (lost := self._lost()) is not None and lost.peer != failure.peer:
                    failure = lost  # a rank that is gone keeps others waiting, not the other way round
                failure = replace(failure, message=failure.message + self.store.silence(self._start))
            elif isinstance(error, ConnectError):
                self._await_cause(phase)
                said = failure.message + self.store.silence(self._start)
                failure = self._lost() or replace(failure, message=said)
            stands = self.declare(phase, failure)
            if phase != _LAST and self._outcome(phase) is None:  # the others have gone on
                stands = self.declare(_LAST, failure)
            return stands

    def failure(self, phase: str) -> Failure | None:
        """Why `phase` cannot succeed, if a rank has said so or is lost. For ranks that have not arrived there yet."""
        with self._store_is_up():
            if self.store.check([f"{phase}/outcome"]):
                return self._outcome(phase)
            lost = self._lost()
            return None if lost is None else self.declare(phase, lost)

    def declare(self, phase: str, failure: Failure) -> Failure:
        """Write `failure` as the outcome, unless there is one; returns the failure that stands."""
        self.store.compare_set(f"{phase}/outcome", "", stored_text(asdict(failure)))
        stands = self._outcome(phase)
        if stands is not None:
            self.store.set(_FAILED, str(stands))
        return stands or failure

    @contextmanager
    def _store_is_up(self) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            raise SessionError(f"{self.rank_name} lost {error}") from error

    def _arrive(
        self, phase: str, word: Mapping[str, Any], parse: Callable[[Any], dict[str, Any]]
    ) -> dict[str, dict[str, Any]] | None:
        """Publish this rank's word. Everyone's, where it is the last to arrive: whoever declares success has read them."""
        self.store.set_soon({f"{phase}/{self.rank_name}": stored_text(dict(word))})
        exchange = self._exchange
        found = self.store.add_and_peek(
            f"{phase}/arrived", len(self._members), exchange.keys(phase), writers=exchange.writers
        )
        if found is None:
            return None
        words = dict(zip(self._members, exchange.parsed(phase, found, parse), strict=True))
        self._require_own_word(phase, words[self.rank_name], parse({**word}))
        return words

    def _agree(self, phase: str) -> bool:
        """Declare that all have agreed; whether that stands."""
        outcome = f"{phase}/outcome"
        return parse_stored(outcome, self.store.compare_set(outcome, "", _AGREED), _parse_outcome) is None

    def _await_words(
        self, phase: str, parse: Callable[[Any], dict[str, Any]], timeout_s: float
    ) -> dict[str, dict[str, Any]]:
        """Everyone's, once all have agreed."""
        exchange = self._exchange
        outcome, *found = self._await(phase, timeout_s, exchange.keys(phase), exchange.writers)
        if failure := self._outcome_of(phase, outcome):
            raise SessionFailed(failure)
        return dict(zip(self._members, exchange.parsed(phase, found, parse), strict=True))

    def _await_outcome(self, phase: str) -> None:
        """Return once all have voted for success. This rank's vote must stand as it said it: nobody reads it after that."""
        own = f"{phase}/{self.rank_name}"
        outcome, stands = self._await(phase, self.timeout_s, [own], [seat_of(self.rank_name)])
        failure = self._outcome_of(phase, outcome)
        # All have agreed, and no outsider can say so: nor can one undo it by writing over a vote.
        if failure is None and not isinstance(stands, ForgedError):
            if isinstance(stands, SessionError):
                raise stands
            self._require_own_word(phase, stands and parse_stored(own, stands, dict), {})
        if failure:
            raise SessionFailed(failure)

    def _await(
        self, phase: str, timeout_s: float, keys: Sequence[str], writers: Sequence[str]
    ) -> list[bytes | SessionError | None]:
        """The outcome of a phase, once there is one, and what was found under `keys` then."""
        outcome = f"{phase}/outcome"
        read, readable = [outcome, *keys], [None, *writers]
        try:
            found = self.store.peek_when([outcome], timeout_s, read, writers=readable, look=self._raise_if_lost)
        except SessionFailed as error:
            self.declare_unless_agreed(phase, error.failure)
            found = None
        else:
            if found is None:
                self._end_waiting(phase, timeout_s)
        return found or self.store.peek_all(read, writers=readable)

    def _end_waiting(self, phase: str, timeout_s: float) -> None:
        """Declare the outcome of a phase for which ranks are late."""
        # Where several are missing, others may wait for one of these, and are about to say for which.
        if len(self._exchange.missing(phase)) > 1:
            self._await_cause(phase)
        if missing := self._exchange.missing(phase):
            message = f"{', '.join(missing)} did not arrive at {phase!r} within {timeout_s:g} s"
            message += self.store.silence(self._start)
            self.declare(phase, Failure(self.rank_name, "DeadlineError", message, peer=missing[0]))
        else:  # the last one has come at this moment
            self._exchange.values(phase, dict)
            self._agree(phase)

    def declare_unless_agreed(self, phase: str, failure: Failure) -> Failure | None:
        """The failure that stands after `failure` was declared; None where all had agreed before."""
        self.declare(phase, failure)
        return self._outcome(phase)

    def _raise_if_lost(self) -> None:
        if lost := self._lost():
            raise SessionFailed(lost)

    def _await_readers(self, phase: str, readers: int | None) -> None:
        """Wait, CAUSE_S at most, until all members know the outcome: one that loses the store can then ask the others.

        `readers`: how many know it, where this rank has been counted.
        """
        try:
            if not self._count_reader(phase, readers):
                self.store.wait_any([f"{phase}/known"], min(CAUSE_S, self.timeout_s), look=self._raise_if_lost)
        except StoreRestarted:
            raise
        except SessionError:  # a member that is gone reads nothing; and somebody else may have written to the count
            pass

    def _ask_again(self, phase: str, error: BaseException) -> bool | None:
        """The outcome, of a store that answers again; where there is none it is a failure. None where it does not answer."""
        try:
            self.store.reopen()
            return self.declare_unless_agreed(phase, Failure.of(self.rank_name, error)) is None
        except (SessionError, dist.DistError):
            return None

    def _count_reader(self, phase: str, readers: int | None = None) -> bool:
        """Whether all members know the outcome now. The count is not sealed: whoever writes to it makes ranks leave early."""
        if (self.store.add(f"{phase}/read", 1) if readers is None else readers) < len(self._members):
            return False
        self.store.set_soon({f"{phase}/known": ""})
        return True

    def _await_cause(self, phase: str) -> None:
        """Give a rank that knows more the time to declare it; a member that is gone is cause enough."""
        with suppress(SessionFailed):
            self.store.wait_any([f"{phase}/outcome"], min(CAUSE_S, self.timeout_s), look=self._raise_if_lost)

    def _require_own_word(self, phase: str, stands: Any, said: Any) -> None:
        if stands != said:
            raise SessionError(f"the word of {self.rank_name} at {phase!r} does not stand on the store as it was said")

    def _outcome(self, phase: str) -> Failure | None:
        """Why a phase failed; None where all have agreed."""
        return self._outcome_of(phase, self.store.get(f"{phase}/outcome"))

    def _outcome_of(self, phase: str, content: bytes | SessionError | None) -> Failure | None:
        key = f"{phase}/outcome"
        if not isinstance(content, bytes):
            raise content or SessionError(f"the value of {key!r} on the store was deleted")
        return parse_stored(key, content, _parse_outcome)


def _parse_vote(said: Any) -> dict[str, Any]:
    """A vote says nothing but that it was given."""
    if said != {}:
        raise ValueError("it is no vote")
    return {}


def _parse_outcome(outcome: Any) -> Failure | None:
    return None if outcome.get("agreed") is True else Failure.from_json(outcome)
