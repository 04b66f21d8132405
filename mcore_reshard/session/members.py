"""Who takes part in an attempt. Training rank 0 leads: it begins attempts and calls their members; the others follow.

    leader     begins attempt 7          waits for all training ranks and replicas       calls: members, epoch, all words
    follower   waits for an attempt      says its word                                   reads the call

An attempt is one try to connect, or to refit. An epoch is a set of members whose transports are connected. It serves many
attempts, until its members change or an attempt fails. A replica is the smallest part of an engine that can come or go.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NoReturn

from torch.distributed import DistNetworkError, DistStoreError

from mcore_reshard.kernels.errors import SessionClosed, SessionError, VersionError
from mcore_reshard.kernels.rendezvous.exchange import Failure, parse_stored, stored_text
from mcore_reshard.kernels.rendezvous.polling import LOOK_S
from mcore_reshard.kernels.rendezvous.rendezvous import SessionFailed
from mcore_reshard.kernels.rendezvous.store import SessionStore
from mcore_reshard.kernels.rendezvous.store_connection import Seat

from .agreement import parse_word

PROTOCOL = 8  # version of all that ranks say to each other; both worlds must have the same
CONNECT, REFIT = "connect", "refit"
LEADER = "train:0"
HEAD = "head"
_NEWCOMERS_S = 0.05  # how often a leader without any replica looks for one
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
_KEPT_ATTEMPTS = 4  # of which keys stay: a rank that wakes late reads there how its attempt ended


@dataclass(frozen=True, slots=True)
class Head:
    """The attempt under way, as the leader announces it."""

    leader: str  # the leader's process: a trainer that restarts is another one
    number: int  # counts the attempts of a session
    kind: str  # CONNECT or REFIT
    plan: str  # the digest of the plan that the leader published; "" if none is
    protocol: int = PROTOCOL
    package: str = ""

    @property
    def attempt(self) -> str:
        return f"{self.number}-{self.leader[:8]}"

    @classmethod
    def from_json(cls, value: Any) -> Head:
        head = cls(**value)
        if head.protocol != PROTOCOL:
            return head
        if not all(isinstance(text, str) for text in (head.leader, head.kind, head.plan, head.package)):
            raise TypeError("a text is none")
        if not isinstance(head.number, int) or head.kind not in (CONNECT, REFIT):
            raise TypeError("no number, or no kind of an attempt")
        return head


@dataclass(frozen=True, slots=True)
class Call:
    """The members of an attempt, and what each of them said."""

    attempt: str
    kind: str
    members: tuple[str, ...]  # seats, training ranks first
    replicas: tuple[int, ...]  # the engine's replicas among them
    epoch: str  # the attempt in which these members connected, or connect
    words: Mapping[str, Mapping[str, Any]]  # by seat
    plan: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)  # seats that came and are no members: why

    @property
    def processes(self) -> dict[str, Any]:
        """Who the members are, by seat."""
        return {seat: word["process"] for seat, word in self.words.items() if "process" in word}

    @classmethod
    def from_json(cls, value: Any) -> Call:
        call = cls(**value)
        words = {str(seat): parse_word(word) for seat, word in call.words.items()}
        if not set(call.members) == set(words) or not all(isinstance(each, int) for each in call.replicas):
            raise TypeError("its members, and those that said something, differ")
        return replace(call, members=tuple(call.members), replicas=tuple(call.replicas), words=words)


@dataclass(frozen=True, slots=True)
class World:
    """The seats of a session, as one rank knows them."""

    train_ranks: int
    replica_ranks: int  # seats of one replica
    replicas: int  # of the engine, as planned

    def train_seats(self) -> list[str]:
        return [f"train:{rank}" for rank in range(self.train_ranks)]

    def seats_of(self, replica: int) -> list[str]:
        first = replica * self.replica_ranks
        return [f"gen:{rank}" for rank in range(first, first + self.replica_ranks)]

    def replica_of(self, seat: str) -> int:
        return int(seat.partition(":")[2]) // self.replica_ranks

    def members(self, replicas: Iterable[int]) -> tuple[str, ...]:
        return (*self.train_seats(), *(seat for replica in replicas for seat in self.seats_of(replica)))


MakeWord = Callable[[], dict[str, Any]]


class Attendance:
    """One rank's part in the calls of a session."""

    def __init__(self, store: SessionStore, seat: str, world: World, process: str, timeout_s: float) -> None:
        self.store = store
        self.seat = seat
        self.world = world
        self.timeout_s = timeout_s
        self._process = process
        self._done: Head | None = None  # of the last attempt that this rank took part in, or was left out of

    @property
    def leads(self) -> bool:
        return self.seat == LEADER

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
                if before != process and self.store.check([farewell := _farewell(name, before)]):
                    return parse_stored(farewell, self.store.get(farewell), Failure.from_json, written_by=name)
                if before != process:
                    return Failure(
                        self.seat, "PeerGone", f"{name} has exited; {_place(seat)} has taken its place", peer=name
                    )
            else:
                if self.store.check([farewell := _farewell(name, seat.facts.get("process"))]):
                    return parse_stored(farewell, self.store.get(farewell), Failure.from_json, written_by=name)
                return Failure(self.seat, "PeerGone", f"{_describe(seat)}", peer=name)
        return None

    def say_farewell(self, failure: Failure) -> None:
        """Leave word why this rank goes: others that see its empty seat raise this."""
        self.store.set(_farewell(self.seat, self._process), stored_text(asdict(failure)))

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

    def _say(self, attempt: str, make_word: MakeWord) -> dict[str, Any]:
        """Publish this rank's word; an error of `make_word` fails the attempt for all."""
        try:
            word = {**make_word(), "process": self._process}
        except BaseException as error:
            with self.store_is_up():
                stands = self.fail_call(attempt, Failure.of(self.seat, error))
            if stands is not None and stands.rank_name != self.seat and isinstance(error, SessionError):
                raise SessionFailed(stands) from error
            raise
        self.store.set_soon({f"a/{attempt}/word/{self.seat}": stored_text(word)})
        return word

    def _read_call(self, attempt: str) -> Call:
        key = f"a/{attempt}/call"
        return _parse_call(key, self.store.get(key))

    def _read_head(self) -> Head | None:
        head = self.store.peek(HEAD, writer=LEADER)
        return None if head is None else parse_stored(HEAD, head, Head.from_json, written_by=LEADER)


class Follower(Attendance):
    """Every rank but training rank 0."""

    def await_head(self, timeout_s: float, occasion: str) -> Head:
        """The next attempt that the leader begins. Raises where none begins in time, and once the leader is gone."""
        start = time.monotonic()
        deadline = start + timeout_s
        was_gone = self._leader_is_gone()
        with self.store_is_up():
            while True:
                head = self._read_head()
                if head is not None and head != self._done:
                    require_protocol(head.protocol, head.package, "trainer", "engine")
                    return head
                left_s = deadline - time.monotonic()
                began = self._next_head_key(head)
                came = self.store.wait_any(
                    [began], max(0.0, left_s), look=lambda: self._raise_if_leader_leaves(was_gone)
                )
                if not came and left_s <= 0:
                    failure = f"{LEADER} did not {occasion} within {timeout_s:g} s"
                    leader = self.store.seats.get(LEADER)
                    if leader is not None and leader.status == "left":
                        raise SessionClosed(
                            f"{LEADER} has left the session, and no trainer came within {timeout_s:g} s"
                        )
                    if leader is not None and leader.status != "here":
                        failure += f": {_describe(leader)}"
                    failure += self.store.silence(start)
                    raise SessionFailed(Failure(self.seat, "DeadlineError", failure, peer=LEADER))

    def follow(self, head: Head, make_word: MakeWord) -> Call | None:
        """Say this rank's word and return the call; None if this rank came too late for it.

        Raises `SessionFailed`, and `SessionError` where this rank's replica cannot take part.
        """
        self._done = head
        try:
            return self._follow(head, make_word)
        except SessionError:
            raise
        except BaseException as error:  # the others must not wait for this rank
            with suppress(Exception):
                self._abandon(head.attempt, Failure.of(self.seat, error))
            raise

    def _follow(self, head: Head, make_word: MakeWord) -> Call | None:
        start = time.monotonic()
        with self.store_is_up():
            self._say(head.attempt, make_word)
            call = f"a/{head.attempt}/call"
            # The leader waits for its own deadline, then says why; it began a little earlier or later than this rank.
            came = self.store.wait_any(
                [call], 2 * self.timeout_s, look=lambda: self._raise_if_leader_leaves(False, head)
            )
            if not came:
                message = f"{LEADER} called nobody within {2 * self.timeout_s:g} s" + self.store.silence(start)
                raise SessionFailed(Failure(self.seat, "DeadlineError", message, peer=LEADER))
            called = self._read_call(head.attempt)
        if self.seat in called.members:
            if called.words[self.seat].get("process") != self._process:
                raise SessionError(f"the word of {self.seat} does not stand in the call as it was said")
            return called
        if reason := called.left_out.get(self.seat):
            raise SessionError(f"{self.seat} is left out: {reason}")
        return None

    def _abandon(self, attempt: str, failure: Failure) -> None:
        """Fail an attempt for all, whether its members are called already or not."""
        if self.fail_call(attempt, failure) is not None:
            return
        call = self._read_call(attempt)
        phases = [f"e/{call.epoch}/hello"] if call.epoch == attempt else []
        for phase in (*phases, f"a/{attempt}/bulk", f"a/{attempt}/commit"):
            self.store.compare_set(f"{phase}/outcome", "", stored_text(asdict(failure)))

    def skip(self, head: Head) -> None:
        """Take no part in an attempt that is under way: this rank has come later."""
        self._done = head

    def _next_head_key(self, head: Head | None) -> str:
        return f"began/{0 if head is None else head.number}"

    def _leader_is_gone(self) -> bool:
        leader = self.store.seats.get(LEADER)
        return leader is None or leader.status != "here"

    def _raise_if_leader_leaves(self, was_gone: bool, head: Head | None = None) -> None:
        """Raise once the leader goes. One that was gone before may come back: a trainer that restarts."""
        leader = self.store.seats.get(LEADER)
        if head is not None and (lost := self.lost([LEADER], {LEADER: head.leader})) and lost.message.endswith("place"):
            raise SessionFailed(lost)
        if leader is None or leader.status == "here" or was_gone:
            return
        if leader.status == "left":
            raise SessionClosed(f"{LEADER} has left the session; engines keep their weights, and wait for a trainer")
        raise SessionFailed(Failure(self.seat, "PeerGone", _describe(leader), peer=LEADER))


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
        self._began_with: dict[str, Any] = {}  # the processes, by seat, when the attempt under way began
        self._uncalled: Failure | None = None  # why the last attempt was not called, where the store may not know it
        self._epoch = 0  # the attempt in which those who are called now connected
        self._old: list[int] = []  # attempts whose keys still stand
        self._led_at = ""  # the store at which the last attempt began
        self._said: dict[str, int] = {}  # by seat: the last attempt that it took part in
        self.max_lag = 0

    @property
    def lags(self) -> dict[int, int]:
        """How many committed refits each replica has missed."""
        return dict(self._lags)

    def begin(self, kind: str) -> Head:
        """Announce an attempt."""
        with self.store_is_up():
            if self._done is not None and self._uncalled is not None:
                self.fail_call(self._done.attempt, self._uncalled)
            self._uncalled = None
            # Nobody else leads while this process has the seat. A store that started anew is empty: what it has counts.
            last = self._done if self._led_at == self.store.instance else self._read_head()
            self._led_at = self.store.instance
            number = 1 + max(0 if each is None else each.number for each in (last, self._done))
            head = Head(self._process, number, kind, self._plan, package=self._package)
            began = f"began/{0 if last is None else last.number}"
            self.store.set_soon({HEAD: stored_text(asdict(head)), began: ""})
            self._done = head
            self._began_with = {name: seat.facts.get("process") for name, seat in self.store.seats.items()}
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
            self._uncalled = error.failure if isinstance(error, SessionFailed) else Failure.of(self.seat, error)
            with suppress(Exception):
                self.fail_call(head.attempt, self._uncalled)
            raise

    def _call(
        self, head: Head, make_word: MakeWord, timeout_s: float, epoch: Callable[[tuple[int, ...]], str | None]
    ) -> Call:
        prefix = f"a/{head.attempt}/word/"
        with self.store_is_up():
            self._say(head.attempt, make_word)
            replicas = self._await_words(head, prefix, timeout_s)
            members = self.world.members(replicas)
            said = self.store.multi_get([prefix + seat for seat in members], writers=members)
            words = {
                seat: parse_stored(prefix + seat, word, parse_word, written_by=seat)
                for seat, word in zip(members, said, strict=True)
            }
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
            self._epoch = int(call.epoch.partition("-")[0])
            key = f"a/{head.attempt}/call"
            return _parse_call(key, self.store.compare_set(key, "", stored_text(asdict(call))))

    def committed(self, replicas: Sequence[int]) -> None:
        """Note which replicas have the newest version."""
        lagging = {replica: lag + 1 for replica, lag in self._lags.items() if replica in self._present()}
        self._lags = {**lagging, **dict.fromkeys(replicas, 0)}

    def note_failure(self, failure: Failure, connecting: bool) -> None:
        """Set aside a replica that kept the others waiting, or that cannot connect, so that the next attempt can do without."""
        name = failure.peer if failure.error in ("DeadlineError", "PeerLostError", "PeerGone") else failure.rank_name
        if not name or not name.startswith("gen:"):
            return
        if failure.error in ("DeadlineError", "PeerLostError"):
            self._late[self.world.replica_of(name)] = f"{name} kept the others waiting"
        elif connecting and failure.error not in _MAY_PASS and (seat := self.store.seats.get(name)) is not None:
            self._refused[str(seat.facts.get("process"))] = f"{name} could not connect: {failure.message}"

    def _await_words(self, head: Head, prefix: str, timeout_s: float) -> tuple[int, ...]:
        """The replicas of an attempt, once all that must come have said a word."""
        deadline, is_first = time.monotonic() + timeout_s, True
        while True:
            required = self._required(head)
            keys = [prefix + seat for seat in self.world.members(required)]
            if is_first and required and self.store.wait_all(keys, min(timeout_s, LOOK_S)):
                missing: list[str] = []  # the usual case, in one question to the store
            else:
                self._raise_if_hopeless(head)
                missing = self._without_word(keys)
            is_first = False
            optional = [] if missing else self._optional(prefix, required)
            self._said |= dict.fromkeys(self.world.members([*required, *optional]), head.number) if not missing else {}
            if not missing and (required or optional):
                self._late = {replica: why for replica, why in self._late.items() if replica not in optional}
                return tuple(sorted({*required, *optional}))
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
        needed = self.world.members(range(self.world.replicas)) if head.kind == CONNECT else self.world.train_seats()
        if lost := self.lost(needed, self._began_with):
            raise SessionFailed(self.fail_call(head.attempt, lost) or lost)

    def _optional(self, prefix: str, required: Sequence[int]) -> list[int]:
        """Replicas that need not come, and have."""
        others = [replica for replica in self._present() if replica not in required]
        return [
            each for each in others if not self._without_word([prefix + name for name in self.world.seats_of(each)])
        ]

    def _required(self, head: Head) -> tuple[int, ...]:
        """Replicas without whose word no call is made."""
        if head.kind == CONNECT:
            return tuple(range(self.world.replicas))
        new = {
            name for name, seat in self.store.seats.items() if seat.facts.get("process") != self._began_with.get(name)
        }
        changed = {
            self.world.replica_of(name) for name in new if name.startswith("gen:")
        }  # they wait for the next attempt
        present = [replica for replica in self._present() if replica not in self._late and replica not in changed]
        return tuple(replica for replica in present if self._lags.get(replica, -1) >= self.max_lag)

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
                    crippled[replica] = f"{name} has not come" if seat is None else _describe(seat)
                elif reason := self._refused.get(str(seat.facts.get("process"))):
                    crippled[replica] = reason
        return crippled

    def _without_word(self, keys: Sequence[str]) -> list[str]:
        if not keys or self.store.check([*keys]):
            return []
        return [key for key in keys if not self.store.check([key])]

    def _end_waiting(self, head: Head, late: Sequence[str], timeout_s: float, deadline: float) -> NoReturn:
        who = ", ".join(late) or "no replica of the engine"
        did = "did not come" if late else "came"
        message = f"{who} {did} to {head.kind} within {timeout_s:g} s" + self.store.silence(deadline - timeout_s)
        failure = Failure(self.seat, "DeadlineError", message, peer=late[0] if late else None)
        came = [seat for seat in self.store.seats if self.store.check([f"a/{head.attempt}/word/{seat}"])]
        self._said |= dict.fromkeys(came, head.number)
        for seat in late:
            if seat.startswith("gen:"):
                self._late[self.world.replica_of(seat)] = f"{seat} kept the others waiting"
        raise SessionFailed(self.fail_call(head.attempt, failure) or failure)

    def _forget(self, number: int) -> None:
        """Delete the keys of attempts that nobody reads any more. A rank that was frozen reads how its last one ended."""
        self._old = [*self._old, number] if self._old else [*range(max(1, number - 2 * _KEPT_ATTEMPTS), number + 1)]
        needed = {self._said.get(name) for name, seat in self.store.seats.items() if seat.status == "here"}
        needed.add(self._epoch)
        for past in [each for each in self._old[:-_KEPT_ATTEMPTS] if each not in needed]:
            self._old.remove(past)
            self.store.delete_soon([f"a/{past}-", f"e/{past}-"], [f"began/{past}"])


def _parse_call(key: str, content: bytes) -> Call:
    """What the leader called, or its failure as SessionFailed."""
    said = parse_stored(key, content, dict, written_by=LEADER)
    if "failure" in said:
        raise SessionFailed(parse_stored(key, stored_text(said["failure"]).encode(), Failure.from_json))
    return parse_stored(key, stored_text(said).encode(), Call.from_json, written_by=LEADER)


def require_protocol(theirs: int, package: str, whose: str, ours: str) -> None:
    """Raise SessionError where the other side speaks another version of the protocol."""
    if theirs == PROTOCOL:
        return
    older = ours if theirs > PROTOCOL else whose
    raise SessionError(
        f"the {whose} speaks protocol {theirs} (mcore-reshard {package or 'unknown'}), the {ours} protocol {PROTOCOL}:"
        f" upgrade mcore-reshard of the {older}"
    )


def next_version(words: Mapping[str, Mapping[str, Any]], seat: str) -> int:
    """The version that all ranks refit: that of the trainer; ranks of the engine may leave it open (None).

    Raises VersionError unless it is larger than what every member has, or the trainer says that it goes back.
    """
    given: dict[int, list[str]] = {}
    for name, word in words.items():
        if word.get("version") is not None:
            given.setdefault(word["version"], []).append(name)
    if len(given) != 1:
        listed = "; ".join(f"{version} on {', '.join(names)}" for version, names in given.items())
        raise VersionError(f"different versions are refitted at once: {listed}; pass one to all ranks")
    (version,) = given
    held = max((word["committed"] for word in words.values() if word.get("committed") is not None), default=-math.inf)
    if version <= held and not any(word.get("rollback") for word in words.values()):
        raise VersionError(
            f"{seat}: version {version} does not follow {held}: pass a larger one, or rollback=True on the trainer"
        )
    return version


def _farewell(seat: str, process: Any) -> str:
    return f"farewell/{seat}/{process}"


def _place(seat: Seat) -> str:
    return f"process {seat.facts.get('pid', '?')} on {seat.facts.get('host', '?')}"


def _describe(seat: Seat) -> str:
    """What became of a rank: 'gen:3 (process 77 on node2) has exited'."""
    return f"{seat.name} ({_place(seat)}) {'has left the session' if seat.status == 'left' else 'has exited or was killed'}"
