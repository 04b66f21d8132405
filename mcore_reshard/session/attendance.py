"""One rank's part in the attempts of a session: its word, its farewell, and the loss of others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, cast

from torch.distributed import DistNetworkError

from mcore_reshard.kernels.errors import SessionError, StoreRestarted
from mcore_reshard.kernels.rendezvous.exchange import Failure, parse_stored, stored_text
from mcore_reshard.kernels.rendezvous.rendezvous import SessionFailed
from mcore_reshard.kernels.rendezvous.seal import WrongWriterError
from mcore_reshard.kernels.rendezvous.store import SessionStore
from mcore_reshard.kernels.rendezvous.store_opening import Seat

from .attempts import HEAD, LEADER, Call, Head, World, parse_call

MakeWord = Callable[[], dict[str, Any]]
PREPARED, WAITS = "has prepared", "waits"  # how far a new rank of the engine is


class Attendance:
    """One rank's part in the calls of a session."""

    def __init__(self, store: SessionStore, seat: str, world: World, process: str, timeout_s: float) -> None:
        self.store = store
        self.seat = seat
        self.world = world
        self.timeout_s = timeout_s
        self._process = process
        self._done: Head | None = None  # of the last attempt that this rank took part in, or was left out of
        self._has_spoken = False  # in any attempt
        self.hang_up: Callable[[], None] = lambda: None  # closes this rank's connections with the others

    def lost(self, members: Sequence[str], processes: Mapping[str, Any] = MappingProxyType({})) -> Failure | None:
        """The first of `members` that has exited or left, as every rank may tell it.

        `processes`: who they were, by seat. A process that has taken the seat of another one tells that this one is gone.
        """
        seats = self.store.seats
        for name in members:
            if name == self.seat or (seat := seats.get(name)) is None:
                continue
            if seat.status == "here":
                before = processes.get(name, process := seat.facts.get("process"))
                if before != process and self.store.check([farewell := farewell_key(name, before)]):
                    return _read_farewell(self.store, farewell, name)
                if before != process:
                    return Failure(
                        self.seat, "PeerGone", f"{name} has exited; {_place(seat)} has taken its place", peer=name
                    )
            else:
                if self.store.check([farewell := farewell_key(name, seat.facts.get("process"))]):
                    return _read_farewell(self.store, farewell, name)
                return Failure(self.seat, "PeerGone", f"{describe(seat)}", peer=name)
        return None

    def say_farewell(self, failure: Failure) -> None:
        """Leave word why this rank goes: others that see its empty seat raise this. An earlier process's word goes."""
        self.store.delete_prefix(f"farewell/{self.seat}/")
        self.store.set(farewell_key(self.seat, self._process), stored_text(asdict(failure)))

    def say_ready(self, how: str) -> None:
        """Say that this rank, which took part in no attempt yet, has PREPARED, or that it WAITS for one."""
        if not self._has_spoken:
            with self.store_is_up():
                self.store.set_soon({ready_key(self.seat): f"{self._process} {how}"})

    @contextmanager
    def store_is_up(self) -> Iterator[None]:
        try:
            yield
        except DistNetworkError as error:
            raise SessionError(f"{self.seat} lost {error}") from error

    def fail_call(self, attempt: str, failure: Failure) -> Failure | None:
        """Tell all that an attempt has no members, unless they are called already: then None."""
        key = f"a/{attempt}/call"
        self.store.compare_set(key, "", stored_text({"failure": asdict(failure)}))
        said = parse_stored(key, self.store.get(key), dict)
        return Failure.from_json(said["failure"]) if "failure" in said else None

    def abandon(self, attempt: str, failure: Failure) -> None:
        """Fail an attempt for all. Where its members are called already, those that move bytes notice that this rank hangs up.

        Nobody is called any more where the store has started anew.
        """
        is_called = True  # unless the store says otherwise
        try:
            is_called = self.fail_call(attempt, failure) is None
            if is_called:
                call = self._read_call(attempt)
                phases = [f"e/{call.epoch}/hello"] if call.epoch == attempt else []
                for phase in (*phases, f"a/{attempt}/bulk", f"a/{attempt}/commit"):
                    self.store.compare_set(f"{phase}/outcome", "", stored_text(asdict(failure)))
        except StoreRestarted:
            is_called = False
            raise
        finally:
            if is_called:
                self.hang_up()

    def _say(self, attempt: str, make_word: MakeWord) -> dict[str, Any]:
        """Publish this rank's word and return it as others read it; an error of `make_word` fails the attempt for all."""
        try:
            word = {**make_word(), "process": self._process}
        except BaseException as error:
            with self.store_is_up():
                stands = self.fail_call(attempt, Failure.of(self.seat, error))
            if stands is not None and stands.rank_name != self.seat and isinstance(error, SessionError):
                raise SessionFailed(stands) from error
            raise
        said = stored_text(word)
        self.store.set_soon({f"a/{attempt}/word/{self.seat}": said})
        self._has_spoken = True
        return cast(dict[str, Any], json.loads(said))

    def _require_own_word(self, call: Call, said: Mapping[str, Any]) -> Call:
        """Raise SessionError unless the call has this rank's word as it was said."""
        if call.words[self.seat] != said:
            raise SessionError(f"the word of {self.seat} does not stand in the call as it was said")
        return call

    def _read_call(self, attempt: str) -> Call:
        """The leader's call."""
        key = f"a/{attempt}/call"
        (found,) = self.store.peek_all([key], writers=[LEADER])
        return self._call_of(key, found)

    def _call_of(self, key: str, found: bytes | SessionError | None) -> Call:
        """The leader's call, as it was found. Others may only write that there is none."""
        if isinstance(found, WrongWriterError):
            parse_call(key, self.store.get(key))
        if not isinstance(found, bytes):
            raise found or SessionError(f"the value of {key!r} on the store was deleted")
        return parse_call(key, found)

    def _read_head(self) -> Head | None:
        (found,) = self.store.peek_all([HEAD], writers=[LEADER])
        return head_of(found)


def head_of(found: bytes | SessionError | None) -> Head | None:
    if isinstance(found, SessionError):
        raise found
    return None if found is None else parse_stored(HEAD, found, Head.from_json, written_by=LEADER)


def _read_farewell(store: SessionStore, key: str, name: str) -> Failure:
    return parse_stored(key, store.get(key, writer=name), Failure.from_json, written_by=name)


def farewell_key(seat: str, process: Any) -> str:
    """Where a rank that could not join says why it goes."""
    return f"farewell/{seat}/{process}"


def ready_key(seat: str) -> str:
    """Where a new rank of the engine says which process it is, and how far."""
    return f"ready/{seat}"


def _place(seat: Seat) -> str:
    return f"process {seat.facts.get('pid', '?')} on {seat.facts.get('host', '?')}"


def describe(seat: Seat) -> str:
    """What became of a rank: 'gen:3 (process 77 on node2) has exited'."""
    return f"{seat.name} ({_place(seat)}) {'has left the session' if seat.status == 'left' else 'has exited or was killed'}"
