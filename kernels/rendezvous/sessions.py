"""What a store knows of its sessions, and what each request does to them. No torch, no numpy.

    keys     "head" -> bytes                 waits    requests that are answered once their keys exist
    seats    "gen:3" -> here, gone, left     clients  processes, over all their connections

Everything is bounded: whoever reaches the store's port may open a session, and must not exhaust its memory.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from .frames import MAX_HEADER_BYTES, MAX_KEY, MAX_VALUE_BYTES, pack

MAX_SESSIONS = 10_000
MAX_NAME = 500  # characters of a session's name
MAX_KEYS = 1_000_000  # of a session
MAX_SESSION_BYTES = 2 << 30  # of a session's keys and values
MAX_STORE_BYTES = 8 << 30  # of all sessions' keys and values
MAX_SEATS = 16_384  # of a session
_SEAT = re.compile("(train|gen):(0|[1-9][0-9]{0,8})", re.ASCII)
MAX_FACTS_BYTES = 768  # of what a rank says of itself
MAX_REQUEST_KEYS = 1 << 17  # named in one request
MAX_WAITS = 10_000  # of a connection, at once
MAX_AWAITED = 1 << 17  # keys of all waits of a connection; the server keeps some 300 bytes for each
MAX_COUNT = 1 << 63  # of `add`
MAX_READ_BYTES = 4 << 20  # of values in the answer to a wait
REMEMBERED = 512  # replies of a client that are kept, in case it asks again after a lost connection
MAX_REMEMBERED_BYTES = 4096  # of a reply; a longer one brings a value that stands: its request has changed nothing


class Refusal(Exception):
    """A request that the server does not carry out; the client raises the text."""


class Connection(Protocol):
    """What requests need of a client's connection."""

    client: str
    waits: dict[int, Wait]

    def push(self, frame: bytes) -> None: ...

    def has_ended(self) -> bool: ...


@dataclass
class Seat:
    """A rank's place in a session, and the client that has it."""

    client: str
    facts: dict[str, Any]
    status: str  # here, gone or left
    since: float  # time.time()

    def said(self) -> dict[str, Any]:
        return {"status": self.status, "facts": self.facts, "since": self.since}


@dataclass(eq=False)
class Wait:
    """A request that is answered once keys exist."""

    number: int
    keys: frozenset[str]
    needs_all: bool
    missing: int  # of the keys
    connection: Connection
    read: tuple[str, ...] | None = None  # the answer brings what these keys are then

    @property
    def names(self) -> int:
        return len(self.keys) + len(self.read or ())


@dataclass
class Client:
    """One process in a session, over all its connections."""

    connection: Connection | None = None
    watches: bool = False
    replies: OrderedDict[int, bytes] = field(default_factory=OrderedDict)  # to requests that must not be done twice
    forgetting: asyncio.TimerHandle | None = None  # once its connection has ended
    heard: float = field(default_factory=time.time)  # when it last sent a frame


@dataclass
class Totals:
    """Of all sessions of a store."""

    nbytes: int = 0


@dataclass(eq=False)
class Session:
    """All that ranks have said to each other."""

    name: str
    owner: str  # public key; "" for a session without a token
    linger_s: float
    totals: Totals
    instance: str = field(default_factory=lambda: uuid4().hex)  # another one where a session of this name begins anew
    keys: dict[str, bytes] = field(default_factory=dict)
    nbytes: int = 0
    seats: dict[str, Seat] = field(default_factory=dict)
    clients: dict[str, Client] = field(default_factory=dict)
    waits: dict[str, set[Wait]] = field(default_factory=dict)  # by each of their keys
    changed: set[str] = field(default_factory=set)  # seats of which clients have not heard yet
    ending: asyncio.TimerHandle | None = None

    def put(self, key: str, value: bytes) -> None:
        if len(value) > MAX_VALUE_BYTES:
            raise Refusal(f"the value of {key!r} has {len(value):,} bytes; a store keeps {MAX_VALUE_BYTES:,} at most")
        before, is_new = len(self.keys.get(key, b"")), key not in self.keys
        grows = len(value) - before + (len(key) if is_new else 0)
        if self.nbytes + grows > MAX_SESSION_BYTES or (is_new and len(self.keys) >= MAX_KEYS):
            raise Refusal(f"session {self.name!r} is full: {len(self.keys)} keys, {self.nbytes} bytes")
        if self.totals.nbytes + grows > MAX_STORE_BYTES:
            raise Refusal(f"this store is full: all its sessions have {self.totals.nbytes} bytes")
        self.keys[key] = value
        self.nbytes += grows
        self.totals.nbytes += grows
        if is_new:
            self._wake(key)

    def drop(self, key: str) -> bool:
        value = self.keys.pop(key, None)
        if value is None:
            return False
        self.nbytes -= len(value) + len(key)
        self.totals.nbytes -= len(value) + len(key)
        for wait in self.waits.get(key, ()):
            wait.missing += 1
        return True

    def found(self, keys: Iterable[str]) -> list[str]:
        return [key for key in keys if key in self.keys]

    def said_of(self, read: Iterable[str] | None) -> tuple[dict[str, Any], list[bytes]]:
        """What a wait's answer says of the keys that it reads; nothing where that is long: then its client asks."""
        if read is None:
            return {}, []
        values = [self.keys[key] for key in read if key in self.keys]
        if sum(map(len, values)) > MAX_READ_BYTES:
            return {}, []
        return {"missing": [key for key in read if key not in self.keys]}, values

    def await_keys(self, wait: Wait) -> None:
        wait.connection.waits[wait.number] = wait
        for key in wait.keys:
            self.waits.setdefault(key, set()).add(wait)

    def end_wait(self, wait: Wait) -> None:
        wait.connection.waits.pop(wait.number, None)
        for key in wait.keys:
            if waits := self.waits.get(key):
                waits.discard(wait)
                if not waits:
                    del self.waits[key]

    def seats_said(self) -> dict[str, Any]:
        return {name: seat.said() for name, seat in self.seats.items()}

    def set_status(self, name: str, status: str) -> None:
        """Note what became of a seat, and tell all clients: once for all that changes at this moment."""
        self.seats[name].status, self.seats[name].since = status, time.time()
        if not self.changed:  # a client that hears the answer to its request may rely on others having heard of this
            asyncio.get_running_loop().call_soon(self._tell_seats)
        self.changed.add(name)

    def _tell_seats(self) -> None:
        said = pack({"id": 0, "seats": {name: self.seats[name].said() for name in self.changed}})
        self.changed.clear()
        for client in self.clients.values():
            if client.connection is not None:
                client.connection.push(said)

    def _wake(self, key: str) -> None:
        """Answer the waits that this new key ends."""
        for wait in [*self.waits.get(key, ())]:
            wait.missing -= 1
            if not wait.needs_all or not wait.missing:
                self.end_wait(wait)
                found = [] if wait.needs_all else self.found(wait.keys)
                said, values = self.said_of(wait.read)
                wait.connection.push(pack({"id": wait.number, "keys": found, **said}, values))


Answer = tuple[dict[str, Any] | None, list[bytes]]  # None: the answer comes later


def _set(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    for key, value in zip(_keys(header), blobs, strict=True):
        session.put(key, value)
    return {}, []


def _get(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    """The values of the keys that exist, and which do not. With "all": of all, or the first that does not exist."""
    keys = _keys(header)
    missing = [key for key in keys if key not in session.keys]
    if header.get("all") and missing:
        return {"missing": missing[:1]}, []
    return {"missing": missing}, [session.keys[key] for key in keys if key in session.keys]


def _check(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    return {"missing": [key for key in _keys(header) if key not in session.keys]}, []


def _add(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    (key,), amount = _keys(header), int(header["amount"])
    text = session.keys.get(key, b"0")
    if len(text) > 20 or not text.removeprefix(b"-").isdigit():
        raise Refusal(f"the value of {key!r} on the store is malformed: it is no number")
    total = int(text) + amount
    if abs(total) >= MAX_COUNT:
        raise Refusal(f"the value of {key!r} on the store would be malformed: {total:.3e} has more than 63 bits")
    session.put(key, str(total).encode())
    return {"value": total}, []


def _compare_set(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    """Set a key that does not exist yet, or has the value that was expected, if one was.

    Answers with the value that stands, or none where it is the one that was brought.
    """
    (key,), (desired, *expected) = _keys(header), blobs
    if session.keys.get(key) == (expected[0] if expected else None):
        session.put(key, desired)
    stands = session.keys.get(key, b"")
    return {"stands": stands == desired}, [] if stands == desired else [stands]


def _wait(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    number, keys, needs_all = int(header["id"]), frozenset(_keys(header)), bool(header["all"])
    read = tuple(_keys(header, "read")) if "read" in header else None
    found = session.found(keys)
    if len(found) == len(keys) or (found and not needs_all):
        said, values = session.said_of(read)
        return {"keys": [] if needs_all else found, **said}, values
    if len(connection.waits) >= MAX_WAITS:
        raise Refusal(f"a connection has {MAX_WAITS} waits at most")
    if sum(each.names for each in connection.waits.values()) + len(keys) + len(read or ()) > MAX_AWAITED:
        raise Refusal(f"a connection waits for {MAX_AWAITED} keys at most")
    if number not in connection.waits:  # else it asks again, after a lost connection
        session.await_keys(Wait(number, keys, needs_all, len(keys) - len(found), connection, read))
    return None, []


def _cancel(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    if (wait := connection.waits.get(header["wait"])) is not None:
        session.end_wait(wait)
    return {}, []


def _delete(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    return {"value": sum([session.drop(key) for key in _keys(header)])}, []


def _delete_prefix(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    prefix = str(header["prefix"])
    return {"value": sum([session.drop(key) for key in [*session.keys] if key.startswith(prefix)])}, []


def _list(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    prefix = str(header["prefix"])
    keys = sorted(key for key in session.keys if key.startswith(prefix))
    if sum(map(len, keys)) + 4 * len(keys) > MAX_HEADER_BYTES:
        raise Refusal(f"{len(keys)} keys are more than a store lists at once: {MAX_HEADER_BYTES} bytes of names")
    return {"keys": keys}, []


def _heard(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    """When each seat's client last sent a frame; of one that is forgotten, when its seat last changed."""
    clients = session.clients
    heard = {
        name: clients[seat.client].heard if seat.client in clients else seat.since
        for name, seat in session.seats.items()
    }
    return {"heard": heard}, []


def _sit(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    """Take a seat, unless a live process has it; "held" where its holder's connection has just ended."""
    name, facts = str(header["seat"]), dict(header["facts"])
    if _SEAT.fullmatch(name) is None:
        raise Refusal(f"a seat is a world and the number of a rank, as in gen:3, not {name[:100]!r}")
    if len(json.dumps(facts)) > MAX_FACTS_BYTES or not all(isinstance(fact, (str, int)) for fact in facts.values()):
        raise Refusal(f"what a rank says of itself are texts and integers, of {MAX_FACTS_BYTES} bytes in all")
    seat = session.seats.get(name)
    if seat is not None and seat.client != connection.client and seat.status == "here":
        holder = session.clients.get(seat.client)
        if holder is None or holder.connection is None or holder.connection.has_ended():
            return {"held": True}, []
        since = time.strftime("%H:%M:%S", time.gmtime(seat.since))
        raise Refusal(
            f"another process ({seat.facts.get('pid', '?')} on {seat.facts.get('host', '?')}, since {since} UTC) has been"
            f" {name} of this session: give every session on a store a name of its own, and every process a rank of its own"
        )
    if seat is None and len(session.seats) >= MAX_SEATS:
        raise Refusal(f"session {session.name!r} has {MAX_SEATS} seats already")
    session.seats[name] = Seat(connection.client, facts, "here", time.time())
    session.set_status(name, "here")
    return {"seats": {name: session.seats[name].said()}}, []


def _rise(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    for name, seat in session.seats.items():
        if seat.client == connection.client and seat.status != "left":
            session.set_status(name, "left")
    return {}, []


Act = Callable[[Connection, Session, dict[str, Any], list[bytes]], Answer]

READS: dict[str, Act] = {
    "get": _get,
    "check": _check,
    "list": _list,
    "wait": _wait,
    "cancel": _cancel,
    "heard": _heard,
}
CHANGES: dict[str, Act] = {  # they must not be done twice
    "set": _set,
    "add": _add,
    "compare_set": _compare_set,
    "delete": _delete,
    "delete_prefix": _delete_prefix,
    "sit": _sit,
    "rise": _rise,
}


def _keys(header: dict[str, Any], name: str = "keys") -> list[str]:
    keys = header[name]
    if not isinstance(keys, list) or not all(isinstance(key, str) and len(key) <= MAX_KEY for key in keys):
        raise TypeError(f"keys are texts of at most {MAX_KEY} characters")
    if len(keys) > MAX_REQUEST_KEYS:
        raise Refusal(f"a request names {MAX_REQUEST_KEYS} keys at most, not {len(keys)}")
    return keys
