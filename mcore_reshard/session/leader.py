"""Training rank 0 leads: it begins attempts, waits for the ranks that must come, and calls the members.

    leader     begins attempt 7          waits for all training ranks and replicas       calls: members, epoch, all words
    follower   waits for an attempt      says its word                                   reads the call

Replicas that miss a deadline, or cannot connect, are set aside until they come again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import DistStoreError

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.rendezvous.exchange import Failure, StoreExchange, stored_text
from mcore_reshard.kernels.rendezvous.polling import LOOK_S
from mcore_reshard.kernels.rendezvous.rendezvous import SessionFailed, cause_of
from mcore_reshard.kernels.rendezvous.store import SessionStore
from mcore_reshard.kernels.rendezvous.store_opening import Seat

from .agreement import parse_word
from .attempts import CONNECT, HEAD, PROTOCOL, Call, Head, World, parse_call, require_protocol
from .attendance import PREPARED, WAITS, Attendance, MakeWord, describe, farewell_key, ready_key

_NEWCOMERS_S = 0.05  # how often a leader without any replica looks for one
_PROMPT_S = 0.05  # after which a replica that took part in the last refit, and may lag, does
_BACK_S = 2.0  # until all who live have come back to a store that has started anew
# Errors after which a replica may connect the next time; after others somebody must mend something first.
_MAY_PASS = {
    "KeyboardInterrupt",
    "SessionError",
    "ConnectError",
    "SessionFailed",
    "DeadlineError",
    "PeerLostError",
    "PeerGone",
    "StoreRestarted",
}
_ATTEMPT = re.compile(r"(?:a/|e/|began/)([1-9][0-9]{0,17})(?:-|$)", re.ASCII)
_KEPT_ATTEMPTS = 4  # of which keys stay: a rank that wakes late reads there how its attempt ended


class Leader(Attendance):
    """Training rank 0."""

    def __init__(
        self, store: SessionStore, seat: str, world: World, process: str, timeout_s: float, *, plan: str, package: str
    ) -> None:
        super().__init__(store, seat, world, process, timeout_s)
        self._plan, self._package = plan, package
        self._late: dict[int, str] = {}  # replicas that missed a deadline, until they say a word; why
        self._refused: dict[str, str] = {}  # seats by process that could not connect; why
        self._lags: dict[int, int] = {}  # by replica: how many committed refits it has missed
        self._known: set[Any] = set()  # processes that took part in an attempt
        self._began_with: dict[str, Any] = {}  # the processes, by seat, when the attempt under way began
        self._gone_before: dict[str, Any] = {}  # those of them that were gone by then
        self._uncalled: Failure | None = None  # why the last attempt was not called, where the store may not know it
        self._epoch = 0  # the attempt in which those who are called now connected
        self._old: list[int] = []  # attempts whose keys still stand
        self._led_at = ""  # the store at which the last attempt began
        self._said: dict[str, int] = {}  # by seat: the last attempt that it took part in
        self._called: tuple[str, ...] = ()  # members of the last attempt, if it went well
        self.max_lag = 0

    @property
    def lags(self) -> dict[int, int]:
        """How many committed refits each replica has missed."""
        return dict(self._lags)

    def begin(self, kind: str) -> Head:
        """Announce an attempt."""
        with self.store_is_up():
            if self._done is not None and self._uncalled is not None:
                self.abandon(self._done.attempt, self._uncalled)
            self._uncalled = None
            if self._led_at not in ("", self.store.instance):
                self._await_return()
            # Nobody else leads while this process has the seat. A store that started anew is empty: what it has counts.
            last = self._done if self._led_at == self.store.instance else self._read_head()
            self._led_at = self.store.instance
            number = 1 + max(0 if each is None else each.number for each in (last, self._done))
            head = Head(self._process, number, kind, self._plan, PROTOCOL, self._package)
            began = f"began/{0 if last is None else last.number}"
            self.store.set_soon({HEAD: stored_text(asdict(head)), began: ""})
            self._done = head
            seats = self.store.seats
            self._began_with = {name: seat.facts.get("process") for name, seat in seats.items()}
            self._gone_before = {
                name: process for name, process in self._began_with.items() if seats[name].status != "here"
            }
            self._forget(number)
        return head

    def call(
        self, head: Head, make_word: MakeWord, timeout_s: float, epoch: Callable[[tuple[int, ...]], str | None]
    ) -> Call:
        """Say this rank's word, wait for those that must come, and call the members.

        `epoch(replicas)` is the epoch in which this rank is connected with them, None if it is in none. Raises
        `SessionFailed` on all ranks if a training rank is gone, or a replica that must come is late.
        """
        try:
            return self._call(head, make_word, timeout_s, epoch)
        except BaseException as error:
            self._uncalled = cause_of(self.seat, error)
            with suppress(Exception):
                self.abandon(head.attempt, self._uncalled)
            raise

    def _call(
        self, head: Head, make_word: MakeWord, timeout_s: float, epoch: Callable[[tuple[int, ...]], str | None]
    ) -> Call:
        prefix = f"a/{head.attempt}/word/"
        with self.store_is_up():
            own = self._say(head.attempt, make_word)
            replicas, found = self._await_words(head, prefix, timeout_s)
            self._lags = {**dict.fromkeys(replicas, 0), **self._lags}  # also one whose first refit this is
            members = self.world.members(replicas)
            exchange, topic = StoreExchange(self.store, self.seat, members, timeout_s), prefix.rstrip("/")
            said = exchange.parsed(topic, found, parse_word) if found else exchange.values(topic, parse_word)
            words = dict(zip(members, said, strict=True))
            known = epoch(replicas)
            same = known is not None and all(word.get("epoch") == known for word in words.values())
            left_out = {
                seat: reason for replica, reason in self._crippled().items() for seat in self.world.seats_of(replica)
            }
            call = Call(
                head.attempt,
                head.kind,
                members,
                replicas,
                known if same and known else head.attempt,
                words,
                self._plan,
                left_out,
            )
            self._known |= set(call.processes.values())
            self._epoch, self._called = int(call.epoch.partition("-")[0]), members
            key = f"a/{head.attempt}/call"
            stands = parse_call(key, self.store.compare_set(key, "", stored_text(asdict(call))))
            return self._require_own_word(stands, own)

    def _await_return(self) -> None:
        """Wait until those of the last refit have seats at a store that has started anew. Who has died has none."""
        deadline, last = time.monotonic() + _BACK_S, {*self.world.members(self._lags)}
        while last - self.store.seats.keys() and time.monotonic() < deadline:
            time.sleep(_NEWCOMERS_S)

    def committed(self, replicas: Sequence[int]) -> None:
        """Note which replicas have the newest version."""
        lagging = {replica: lag + 1 for replica, lag in self._lags.items() if replica in self._present()}
        self._lags = {**lagging, **dict.fromkeys(replicas, 0)}

    def note_failure(self, failure: Failure, connecting: bool) -> None:
        """Set aside a replica that kept the others waiting, or that cannot connect, so that the next attempt can do without."""
        self._called = ()
        name = failure.peer if failure.error in ("DeadlineError", "PeerLostError", "PeerGone") else failure.rank_name
        if not name or not name.startswith("gen:"):
            return
        if failure.error in ("DeadlineError", "PeerLostError"):
            self._late[self.world.replica_of(name)] = f"{name} kept the others waiting"
        elif connecting and failure.error not in _MAY_PASS and (seat := self.store.seats.get(name)) is not None:
            self._refused[str(seat.facts.get("process"))] = f"{name} could not connect: {failure.message}"

    def _await_words(
        self, head: Head, prefix: str, timeout_s: float
    ) -> tuple[tuple[int, ...], Sequence[bytes | SessionError | None]]:
        """The replicas of an attempt, once all that must come have said a word; and their words, if these were read."""
        start, is_first = time.monotonic(), True
        deadline, prompt_until = start + timeout_s, start + _PROMPT_S
        while True:
            required, found = self._required(head), None
            members = self.world.members(required)
            keys = [prefix + seat for seat in members]
            if is_first and required:
                found = self.store.peek_when(keys, min(timeout_s, LOOK_S), keys, writers=members)
            if found is not None:
                missing: list[str] = []  # the usual case, in one question to the store
            else:
                self._raise_if_hopeless(head)
                missing = self.store.missing(keys)
            is_first = False
            optional = [] if missing else self._optional(prefix, required)
            self._said |= dict.fromkeys(self.world.members([*required, *optional]), head.number) if not missing else {}
            if not missing and (required or optional):
                late = self._prompt_till_now({*required, *optional})
                if late and (left_s := prompt_until - time.monotonic()) > 0:
                    self.store.wait_all([f"{prefix}{name}" for name in late], left_s)
                    continue
                self._late = {replica: why for replica, why in self._late.items() if replica not in optional}
                return tuple(sorted({*required, *optional})), [] if optional or found is None else found
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._end_waiting(head, [key.removeprefix(prefix) for key in missing], timeout_s, deadline)
            with suppress(DistStoreError):  # then look again who must come
                wait_s = min(left_s, LOOK_S) if missing else min(left_s, _NEWCOMERS_S)
                self.store.wait(missing or [f"{prefix}nobody"], timedelta(seconds=wait_s))

    def _raise_if_hopeless(self, head: Head) -> None:
        """Raise where a rank has failed instead of saying its word, or one that the attempt needs is gone."""
        if self.store.check([f"a/{head.attempt}/call"]):
            self._read_call(head.attempt)
        needed, began_with = self.world.train_seats(), self._began_with
        if head.kind == CONNECT:
            needed = [seat for seat in self.world.members(range(self.world.replicas)) if not self._may_come_back(seat)]
            began_with = {}  # whoever has a seat now may come: one that was killed before may seem alive for a moment
        if lost := self.lost(needed, began_with) or self._last_one_gone():
            raise SessionFailed(self.fail_call(head.attempt, lost) or lost)
        for name in needed:
            if (seat := self.store.seats.get(name)) is not None and (reason := _speaks_otherwise(seat)):
                raise SessionError(reason)

    def _last_one_gone(self) -> Failure | None:
        """Why no replica of the last refit can come any more. Told once: the next attempt waits for others."""
        if set(self._present()) - self._changed():
            return None
        return self.lost([name for name in self._called if name.startswith("gen:")], self._began_with)

    def _may_come_back(self, name: str) -> bool:
        """Whether a seat has been empty since before the attempt: its rank may be starting again, as this one has.

        A rank of the engine that said why it went does not.
        """
        seat = self.store.seats.get(name)
        process = None if seat is None else seat.facts.get("process")
        if seat is None or seat.status == "here" or self._gone_before.get(name) != process:
            return False
        return name.startswith("train:") or not self.store.check([farewell_key(name, process)])

    def _prompt_till_now(self, came: set[int]) -> list[str]:
        """The seats of replicas that may lag, have not yet, and have not come to this attempt."""
        absent = {*self._present()} - came - self._late.keys() - self._changed()
        return [
            name for replica in sorted(absent) if self._lags.get(replica) == 0 for name in self.world.seats_of(replica)
        ]

    def _optional(self, prefix: str, required: Sequence[int]) -> list[int]:
        """Replicas that need not come, and have."""
        others = [replica for replica in self._present() if replica not in required]
        return [
            each for each in others if not self.store.missing([prefix + name for name in self.world.seats_of(each)])
        ]

    def _required(self, head: Head) -> tuple[int, ...]:
        """Replicas without whose word no call is made."""
        if head.kind == CONNECT:
            return tuple(range(self.world.replicas))
        changed = self._changed()
        present = [replica for replica in self._present() if replica not in self._late and replica not in changed]
        return tuple(replica for replica in present if self._is_due(replica))

    def _is_due(self, replica: int) -> bool:
        """Whether an attempt needs a replica. One whose processes are new may still be catching up.

        It is waited for once it has called `refit`; in the place of one that took part, once it has ended `prepare`.
        """
        names, lag = self.world.seats_of(replica), self._lags.get(replica)
        new = {name: process for name in names if (process := self._process_of(name)) not in self._known}
        if not new:
            return lag is not None and lag >= self.max_lag
        if self.store.missing(keys := [ready_key(name) for name in new]):
            return False
        said = [value.decode(errors="replace") for value in self.store.multi_get(keys, writers=[*new])]
        return all(
            value == f"{process} {WAITS}" or (lag is not None and value == f"{process} {PREPARED}")
            for process, value in zip(new.values(), said, strict=True)
        )

    def _process_of(self, name: str) -> Any:
        seat = self.store.seats.get(name)
        return None if seat is None else seat.facts.get("process")

    def _changed(self) -> set[int]:
        """Replicas with a rank whose process is not that of the attempt's beginning: they wait for the next attempt."""
        seats = self.store.seats.items()
        new = {name for name, seat in seats if seat.facts.get("process") != self._began_with.get(name)}
        return {self.world.replica_of(name) for name in new if name.startswith("gen:")}

    def _present(self) -> list[int]:
        """Replicas all of whose seats are taken by live processes that can connect."""
        crippled = self._crippled()
        found = {self.world.replica_of(seat) for seat in self.store.seats if seat.startswith("gen:")}
        return sorted(found - crippled.keys())

    def _crippled(self) -> dict[int, str]:
        """Replicas that lack a rank, or have one that cannot connect: why."""
        seats, crippled = self.store.seats, dict[int, str]()
        for replica in sorted({self.world.replica_of(seat) for seat in seats if seat.startswith("gen:")}):
            for name in self.world.seats_of(replica):
                seat = seats.get(name)
                if seat is None or seat.status != "here":
                    crippled[replica] = f"{name} has not come" if seat is None else describe(seat)
                elif reason := self._refused.get(str(seat.facts.get("process"))) or _speaks_otherwise(seat):
                    crippled[replica] = reason
        return crippled

    def _end_waiting(self, head: Head, late: Sequence[str], timeout_s: float, deadline: float) -> NoReturn:
        silence = self.store.silence(deadline - timeout_s)
        if late:
            message = f"{', '.join(late)} did not come to {head.kind} within {timeout_s:g} s{silence}"
        else:
            message = f"no replica of the engine came to {head.kind} within {timeout_s:g} s{silence}"
            message = "; ".join((message, *self._crippled().values()))
        failure = Failure(self.seat, "DeadlineError", message, peer=late[0] if late else None)
        came = [seat for seat in self.store.seats if self.store.check([f"a/{head.attempt}/word/{seat}"])]
        self._said |= dict.fromkeys(came, head.number)
        for seat in late:
            if seat.startswith("gen:"):
                self._late[self.world.replica_of(seat)] = f"{seat} kept the others waiting"
        raise SessionFailed(self.fail_call(head.attempt, failure) or failure)

    def _forget(self, number: int) -> None:
        """Delete the keys of attempts that nobody reads any more. A rank that was frozen reads how its last one ended."""
        self._old = [*self._old, number] if self._old else sorted({*self._standing(), number})
        needed = {self._said.get(name) for name, seat in self.store.seats.items() if seat.status == "here"}
        needed.add(self._epoch)
        for past in [each for each in self._old[:-_KEPT_ATTEMPTS] if each not in needed]:
            self._old.remove(past)
            self.store.delete_soon([f"a/{past}-", f"e/{past}-"], [f"began/{past}"])

    def _standing(self) -> set[int]:
        """The attempts of which keys stand, also those of an earlier trainer."""
        return {int(found[1]) for key in self.store.keys("") if (found := _ATTEMPT.match(key))}


def _speaks_otherwise(seat: Seat) -> str:
    """What is wrong with the protocol of a rank's package; "" if it is the trainer's."""
    side = "engine" if seat.name.startswith("gen:") else "rank"
    protocol = seat.facts.get("protocol", PROTOCOL)
    try:
        require_protocol(protocol if isinstance(protocol, int) else 0, str(seat.facts.get("package")), side, "trainer")
    except SessionError as error:
        return f"{seat.name}: {error}"
    return ""
