"""A rank that follows: it waits for an attempt, says its word, and reads the call. Every rank but training rank 0."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from mcore_reshard.kernels.errors import SessionClosed, SessionError
from mcore_reshard.kernels.rendezvous.exchange import Failure
from mcore_reshard.kernels.rendezvous.rendezvous import SessionFailed
from mcore_reshard.kernels.rendezvous.store import SessionStore
from mcore_reshard.kernels.rendezvous.store_opening import Seat

from .attempts import CONNECT, HEAD, LEADER, Call, Head, World, require_protocol
from .attendance import Attendance, MakeWord, describe, head_of

_GONE_S = 2.0  # until a process that has died is known to be gone, and a little longer


class Follower(Attendance):
    """Every rank but training rank 0."""

    def __init__(self, store: SessionStore, seat: str, world: World, process: str, timeout_s: float) -> None:
        super().__init__(store, seat, world, process, timeout_s)
        leader = store.seats.get(LEADER)
        self._gone_leader = None if leader is None or leader.status == "here" else leader.facts.get("process")
        self._living: dict[str, Any] = {}  # by seat: the process that this rank needs, and has last seen here

    def await_head(self, timeout_s: float, occasion: str, *, needs_company: bool = False) -> Head:
        """The next attempt that the leader begins. Raises where none begins in time, and once the leader is gone.

        With `needs_company` it also raises, once for each, where a process has died without which this rank can take part
        in no refit.
        """
        start = time.monotonic()
        deadline = start + timeout_s
        was_gone = self._leader_is_gone()

        def look() -> None:
            if needs_company:
                self._raise_if_one_died()
            self._raise_if_leader_leaves(was_gone)

        with self.store_is_up():
            head = self._read_head()
            while head is None or head == self._done:
                left_s = deadline - time.monotonic()
                began = self._next_head_key(head)
                look()
                found = self.store.peek_when([began], max(0.0, left_s), [HEAD], writers=[LEADER], look=look)
                head = self._read_head() if found is None else head_of(*found)
                if found is None and left_s <= 0:
                    failure = f"{LEADER} did not begin a {occasion} within {timeout_s:g} s"
                    leader = self.store.seats.get(LEADER)
                    if leader is not None and leader.status == "left":
                        raise SessionClosed(
                            f"{LEADER} has left the session, and no trainer came within {timeout_s:g} s"
                        )
                    if leader is not None and leader.status != "here":
                        failure += f": {describe(leader)}"
                    failure += self.store.silence(start)
                    raise SessionFailed(Failure(self.seat, "DeadlineError", failure, peer=LEADER))
            return head

    def follow(self, head: Head, make_word: MakeWord, timeout_s: float | None = None) -> Call | None:
        """Say this rank's word and return the call; None if this rank came too late for it.

        `timeout_s` is the leader's own deadline, if it is another than the session's: engines may still be starting.
        Raises `SessionFailed`, and `SessionError` where this rank's replica cannot take part, or speaks another protocol.
        """
        require_protocol(head.protocol, head.package, "trainer", "engine")
        self._done = head
        try:
            call = self._follow(head, make_word, timeout_s or self.timeout_s)
            self._note_living()
            return call
        except SessionError:
            self.forget_gone()
            raise
        except BaseException as error:  # the others must not wait for this rank
            with suppress(Exception):
                self.abandon(head.attempt, Failure.of(self.seat, error))
            raise

    def _follow(self, head: Head, make_word: MakeWord, timeout_s: float) -> Call | None:
        start = time.monotonic()
        with self.store_is_up():
            if not self._has_spoken and self._was_called_before(head.attempt):
                return None
            said = self._say(head.attempt, make_word)
            call = f"a/{head.attempt}/call"

            def look() -> None:
                self._raise_if_leader_leaves(False, head)
                if head.kind != CONNECT:
                    self._raise_if_one_died()

            # The leader waits for its own deadline, then says why; it began a little earlier or later than this rank.
            found = self.store.peek_when([call], 2 * timeout_s, [call], writers=[LEADER], look=look)
            if found is None:
                message = f"{LEADER} called nobody within {2 * timeout_s:g} s" + self.store.silence(start)
                raise SessionFailed(Failure(self.seat, "DeadlineError", message, peer=LEADER))
            called = self._call_of(call, *found)
        if self.seat in called.members:
            return self._require_own_word(called, said)
        if reason := called.left_out.get(self.seat):
            raise SessionError(f"{self.seat} is left out: {reason}")
        return None

    def _was_called_before(self, attempt: str) -> bool:
        """Whether an earlier process of this seat is a member of an attempt."""
        if not self.store.check([f"a/{attempt}/call"]):
            return False
        called = self._read_call(attempt)
        return self.seat in called.members and called.words[self.seat].get("process") != self._process

    def skip(self, head: Head) -> None:
        """Take no part in an attempt that is under way: this rank has come later."""
        require_protocol(head.protocol, head.package, "trainer", "engine")
        self._done = head

    def forget(self, head: Head) -> None:
        """Take no part in an attempt of a trainer that is here no more."""
        self._done = head

    def forget_gone(self) -> None:
        """Wait for new processes in the place of those that are gone by now: this rank has been told of a failure."""
        for seat in self._needed():
            if seat.status != "here":
                self._living.pop(seat.name, None)

    def is_stale(self, head: Head, plan: str) -> bool:
        """Whether the leader that began an attempt is here no more: since before this rank came, or within _GONE_S.

        `plan` is the digest of this rank's plan: all training ranks of one trainer have the same.
        """
        if head.leader == self._gone_leader:
            return True
        is_foreign = head.speaks_otherwise and self.seat.startswith("train:")  # an earlier trainer's, which may be gone
        if not is_foreign:
            require_protocol(head.protocol, head.package, "trainer", "engine")
        with self.store_is_up():
            if head.kind == CONNECT and not is_foreign and not self._is_over(head, plan):
                return False
            deadline = time.monotonic() + _GONE_S
            while (leader := self.store.seats.get(LEADER)) and leader.facts.get("process") == head.leader:
                left_s = deadline - time.monotonic()
                if leader.status != "here" or (left_s > 0 and self.store.wait_any([self._next_head_key(head)], left_s)):
                    return True  # gone, or on to another attempt
                if left_s <= 0:
                    require_protocol(head.protocol, head.package, "trainer", "engine")
                    return False
        return True

    def _is_over(self, head: Head, plan: str) -> bool:
        """Whether an attempt to connect has called an earlier process of this seat, or is another trainer's and has failed."""
        try:
            return self._was_called_before(head.attempt)
        except SessionFailed:
            if head.plan == plan or not self.seat.startswith("train:"):
                raise
            return True

    def _next_head_key(self, head: Head | None) -> str:
        return f"began/{0 if head is None else head.number}"

    def _leader_is_gone(self) -> bool:
        leader = self.store.seats.get(LEADER)
        return leader is None or leader.status != "here"

    def _needed(self) -> list[Seat]:
        """Those that have come of the ranks without which this one can take part in no refit."""
        seats = self.store.seats
        return [seats[name] for name in self.world.needed_by(self.seat) if name in seats]

    def _note_living(self) -> None:
        self._living |= {seat.name: seat.facts.get("process") for seat in self._needed() if seat.status == "here"}

    def _raise_if_one_died(self) -> None:
        """Raise where a process has died that this rank needs and had seen; once for each, as a new one may come."""
        for seat in self._needed():
            if seat.status == "gone" and self._living.get(seat.name) == seat.facts.get("process"):
                self.forget_gone()
                raise SessionFailed(Failure(self.seat, "PeerGone", describe(seat), peer=seat.name))
        self._note_living()
        if self._leader_is_gone():  # the rest of its trainer goes as well: this rank waits for another one
            self._living = {name: process for name, process in self._living.items() if name.startswith("gen:")}

    def _raise_if_leader_leaves(self, was_gone: bool, head: Head | None = None) -> None:
        """Raise once the leader goes. One that was gone before may come back: a trainer that restarts."""
        leader = self.store.seats.get(LEADER)
        if head is not None and (lost := self.lost([LEADER], {LEADER: head.leader})) and lost.message.endswith("place"):
            raise SessionFailed(lost)
        if leader is None or leader.status == "here" or was_gone:
            return
        if leader.status == "left":
            raise SessionClosed(f"{LEADER} has left the session; engines keep their weights, and wait for a trainer")
        raise SessionFailed(Failure(self.seat, "PeerGone", describe(leader), peer=LEADER))
