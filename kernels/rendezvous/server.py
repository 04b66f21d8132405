"""The store of sessions: keys, seats, and who is alive. A process of its own, without torch.

    python -m mcore_reshard.kernels.rendezvous.server FD      # serves at the listening socket FD until stdin ends

Each rank holds one connection. When a process dies its kernel closes the connection, whatever the process was doing; the
server then tells all others of the session. It asks no name service, so no lost answer of one holds anybody up.
A session lives in memory, from its first connection until `linger_s` after its last one.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from .frames import LENGTHS, MAGIC, MAX_FRAME_BYTES, MAX_OPENING_BYTES, FrameError, body_bytes, pack, unpack

GONE_S = 1.5  # for a client whose connection broke to come back, before others are told that it is gone
OPENING_S = 10.0  # for a connection to say what it wants
LINGER_S = 3600.0  # the longest that a session without connections is kept
IDLE_S = 5.0  # without connections, before a server ends whose starter has died: another one may come
MAX_SESSIONS = 10_000
MAX_KEYS = 1_000_000  # of a session
MAX_BYTES = 2 << 30  # of a session's values
REMEMBERED = 512  # replies of a client that are kept, in case it asks again after a lost connection
_READING = {"get", "check", "list", "wait", "cancel", "stats"}  # all that a client may do that only watches
_LASTING = {"set", "add", "compare_set", "delete", "delete_prefix", "sit", "rise"}  # must not be done twice


class Refusal(Exception):
    """A request that the server does not carry out; the client raises the text."""


@dataclass
class Seat:
    """A rank's place in a session, and the client that has it."""

    client: str
    facts: dict[str, Any]
    status: str  # here, gone or left
    since: float  # time.time()


@dataclass
class Wait:
    """A request that is answered once keys exist."""

    number: int
    keys: list[str]
    needs_all: bool
    connection: Connection


@dataclass
class Client:
    """One process in a session, over all its connections."""

    connection: Connection | None = None
    watches: bool = False
    replies: OrderedDict[int, bytes] = field(default_factory=OrderedDict)


@dataclass
class Session:
    """All that ranks have said to each other."""

    name: str
    owner: str  # public key; "" for a session without a token
    linger_s: float
    keys: dict[str, bytes] = field(default_factory=dict)
    nbytes: int = 0
    seats: dict[str, Seat] = field(default_factory=dict)
    clients: dict[str, Client] = field(default_factory=dict)
    waits: list[Wait] = field(default_factory=list)
    ending: asyncio.TimerHandle | None = None

    def put(self, key: str, value: bytes) -> None:
        before = len(self.keys.get(key, b""))
        if self.nbytes - before + len(value) > MAX_BYTES or (key not in self.keys and len(self.keys) >= MAX_KEYS):
            raise Refusal(f"session {self.name!r} is full: {len(self.keys)} keys, {self.nbytes} bytes")
        self.keys[key] = value
        self.nbytes += len(value) - before

    def drop(self, key: str) -> bool:
        value = self.keys.pop(key, None)
        self.nbytes -= len(value or b"")
        return value is not None

    def seats_said(self) -> dict[str, Any]:
        return {
            name: {"status": seat.status, "facts": seat.facts, "since": seat.since} for name, seat in self.seats.items()
        }


class Connection:
    """One client's connection, or one that has not said yet whose it is."""

    def __init__(self, store: StoreServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.store, self.reader, self.writer = store, reader, writer
        self.session: Session | None = None
        self.client = ""

    async def serve(self) -> None:
        try:
            opened = await asyncio.wait_for(self._open(), OPENING_S)
            while opened:
                header, blobs = await self._read(MAX_FRAME_BYTES)
                self._answer(header, blobs)
                await self.writer.drain()
        except (FrameError, Refusal) as error:
            with suppress(OSError, FrameError):
                self.writer.write(pack({"id": 0, "error": str(error)}))
        except (OSError, EOFError, asyncio.IncompleteReadError, TimeoutError, asyncio.TimeoutError):
            pass
        finally:
            self.store.closed(self)
            self.writer.close()

    async def _read(self, limit: int) -> tuple[dict[str, Any], list[bytes]]:
        header_bytes, body = body_bytes(await self.reader.readexactly(LENGTHS.size), limit)
        return unpack(header_bytes, await self.reader.readexactly(body))

    async def _open(self) -> bool:
        """Greet, and read which session the client means; it proves there that it knows the session's token."""
        nonce = uuid4().hex
        self.writer.write(pack({"id": 0, "magic": MAGIC, "instance": self.store.instance, "nonce": nonce}))
        header, _ = await self._read(MAX_OPENING_BYTES)
        if header.get("op") == "stats":
            self.writer.write(pack({"id": header.get("id", 0), "value": self.store.stats()}))
            return False
        self.store.open(self, header, nonce)
        return True

    def _answer(self, header: dict[str, Any], blobs: list[bytes]) -> None:
        session, number = self.session, header.get("id")
        assert session is not None
        client = session.clients[self.client]
        if not isinstance(number, int):
            raise FrameError("a request without a number")
        if number in client.replies:
            self.writer.write(client.replies[number])
            return
        operation = header.get("op")
        try:
            act = _OPERATIONS[str(operation)]
        except KeyError:
            raise FrameError(f"an unknown request {operation!r:.40}") from None
        try:
            if client.watches and operation not in _READING:
                raise Refusal("this connection was opened to watch: it can read alone")
            said, values = act(self, session, header, blobs)
        except Refusal as error:
            said, values = {"error": str(error)}, []
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise FrameError(f"a malformed request {operation!r:.40}: {error!r:.80}") from error
        if said is None:
            return  # a wait: it is answered later
        reply = pack({"id": number, **said}, values)
        if operation in _LASTING:
            client.replies[number] = reply
            while len(client.replies) > REMEMBERED:
                client.replies.popitem(last=False)
        self.writer.write(reply)

    def push(self, frame: bytes) -> None:
        with suppress(OSError, RuntimeError):
            self.writer.write(frame)


class StoreServer:
    """All sessions of one process."""

    def __init__(self) -> None:
        self.instance = uuid4().hex
        self.sessions: dict[str, Session] = {}
        self.connections: set[Connection] = set()
        self.idle_since = time.monotonic()

    async def serve(self, listening: socket.socket, starter_ends: bool) -> None:
        """Answer connections. A starter's end shows on stdin, with a byte if it said so: then until nobody is connected."""
        server = await asyncio.start_server(self._accept, sock=listening, limit=1 << 20, backlog=4096)
        async with server:
            if not starter_ends:
                await server.serve_forever()
            was_told = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read, 1)
            ended, idle_s = time.monotonic(), 0.0 if was_told else IDLE_S
            while self.connections or time.monotonic() - max(ended, self.idle_since) < idle_s:
                await asyncio.sleep(0.1)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(self, reader, writer)
        self.connections.add(connection)
        await connection.serve()

    def open(self, connection: Connection, header: dict[str, Any], nonce: str) -> None:
        """Let a connection into its session, which the first one begins. Raises Refusal."""
        try:
            name, client = str(header["session"])[:500], str(header["client"])[:64]
            owner, proof = str(header.get("owner", ""))[:200], str(header.get("proof", ""))[:400]
            linger_s = min(float(header["linger_s"]), LINGER_S)
            silence_s = min(max(float(header["silence_s"]), 1.0), 3600.0)
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"a malformed opening: {error!r:.80}") from error
        session, watches = self.sessions.get(name), header.get("watches") is True
        if owner:
            _require_proof(owner, proof, nonce, name)
        if session is not None and session.owner != owner:
            raise Refusal(_other_owner(session.owner, owner, name))
        if session is None:
            if watches:
                raise Refusal(f"this store has no session {name!r}")
            if len(self.sessions) >= MAX_SESSIONS:
                raise Refusal(f"this store has {MAX_SESSIONS} sessions already")
            session = self.sessions[name] = Session(name, owner, linger_s)
        if session.ending is not None and not watches:
            session.ending.cancel()
            session.ending = None
        if not watches:
            session.linger_s = max(session.linger_s, linger_s)
        held = session.clients.setdefault(client, Client(watches=watches))
        if held.connection is not None:  # the client knows that this one is dead; the server may not yet
            held.connection.writer.close()
            held.connection.session = None
        held.connection, connection.session, connection.client = connection, session, client
        _watch_host(connection.writer.get_extra_info("socket"), silence_s)
        connection.push(pack({"id": 0, "opened": True, "seats": session.seats_said()}))
        for name, seat in session.seats.items():
            if seat.client == client and seat.status == "gone":
                self._set_status(session, name, "here")

    def closed(self, connection: Connection) -> None:
        """A connection has ended: after a while its client counts as gone."""
        self.connections.discard(connection)
        if not self.connections:
            self.idle_since = time.monotonic()
        session = connection.session
        if session is None:
            return
        session.waits = [wait for wait in session.waits if wait.connection is not connection]
        client = session.clients.get(connection.client)
        if client is None or client.connection is not connection:
            return
        client.connection = None
        loop = asyncio.get_running_loop()
        held = [name for name, seat in session.seats.items() if seat.client == connection.client]
        if any(session.seats[name].status == "here" for name in held):
            loop.call_later(GONE_S, self._is_gone, session, connection.client)
        else:
            session.clients.pop(connection.client)
        if not client.watches and not any(c.connection and not c.watches for c in session.clients.values()):
            has_left = bool(session.seats) and all(seat.status == "left" for seat in session.seats.values())
            session.ending = loop.call_later(0.0 if has_left else session.linger_s, self._end, session)

    def stats(self) -> dict[str, Any]:
        return {
            "sessions": len(self.sessions),
            "connections": len(self.connections),
            "keys": sum(len(session.keys) for session in self.sessions.values()),
            "bytes": sum(session.nbytes for session in self.sessions.values()),
            "names": sorted(name for name, session in self.sessions.items() if not session.owner)[:100],
        }

    def _is_gone(self, session: Session, client: str) -> None:
        held = session.clients.get(client)
        if held is None or held.connection is not None:
            return
        for name, seat in session.seats.items():
            if seat.client == client and seat.status == "here":
                self._set_status(session, name, "gone")

    def _end(self, session: Session) -> None:
        if self.sessions.get(session.name) is session and session.ending is not None:
            del self.sessions[session.name]
            for client in session.clients.values():  # those that watch
                if client.connection is not None:
                    client.connection.writer.close()

    def _set_status(self, session: Session, name: str, status: str) -> None:
        session.seats[name].status = status
        session.seats[name].since = time.time()
        said = pack({"id": 0, "seats": {name: session.seats_said()[name]}})
        for client in session.clients.values():
            if client.connection is not None:
                client.connection.push(said)


Answer = tuple[dict[str, Any] | None, list[bytes]]


def _set(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    for key, value in zip(_keys(header), blobs, strict=True):
        session.put(key, value)
    _wake(session, header["keys"])
    return {}, []


def _get(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    """The values of keys that exist, and which do."""
    found = [key for key in _keys(header) if key in session.keys]
    return {"keys": found}, [session.keys[key] for key in found]


def _check(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    return {"keys": [key for key in _keys(header) if key in session.keys]}, []


def _add(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    (key,), amount = _keys(header), header["amount"]
    try:
        total = int(session.keys.get(key, b"0")[:30]) + int(amount)
    except ValueError:
        raise Refusal(f"the value of {key!r} on the store is malformed: it is no number") from None
    session.put(key, str(total).encode())
    _wake(session, [key])
    return {"value": total}, []


def _compare_set(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    """Set a key that does not exist yet; the value that stands."""
    (key,), (desired,) = _keys(header), blobs
    if key not in session.keys:
        session.put(key, desired)
        _wake(session, [key])
    return {}, [session.keys[key]]


def _wait(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    wait = Wait(int(header["id"]), _keys(header), bool(header["all"]), connection)
    if (found := _found(session, wait)) is not None:
        return {"keys": found}, []
    session.waits.append(wait)
    return None, []


def _cancel(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    number = header["wait"]
    session.waits = [w for w in session.waits if w.connection is not connection or w.number != number]
    return {}, []


def _delete(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    return {"value": sum(session.drop(key) for key in _keys(header))}, []


def _delete_prefix(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    prefix = str(header["prefix"])
    return {"value": sum(session.drop(key) for key in [*session.keys] if key.startswith(prefix))}, []


def _list(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    prefix = str(header["prefix"])
    return {"keys": sorted(key for key in session.keys if key.startswith(prefix))}, []


def _sit(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    name, facts = str(header["seat"])[:100], dict(header["facts"])
    seat = session.seats.get(name)
    if seat is not None and seat.client != connection.client and seat.status == "here":
        since = time.strftime("%H:%M:%S", time.gmtime(seat.since))
        raise Refusal(
            f"another process ({seat.facts.get('pid', '?')} on {seat.facts.get('host', '?')}, since {since} UTC) has been"
            f" {name} of this session: give every session on a store a name of its own, and every process a rank of its own"
        )
    session.seats[name] = Seat(connection.client, facts, "here", time.time())
    connection.store._set_status(session, name, "here")
    return {"seats": session.seats_said()}, []


def _rise(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    for name, seat in session.seats.items():
        if seat.client == connection.client and seat.status != "left":
            connection.store._set_status(session, name, "left")
    return {}, []


def _stats(connection: Connection, session: Session, header: dict[str, Any], blobs: list[bytes]) -> Answer:
    return {
        "value": {**connection.store.stats(), "session_keys": len(session.keys), "session_bytes": session.nbytes}
    }, []


_OPERATIONS: dict[str, Callable[[Connection, Session, dict[str, Any], list[bytes]], Answer]] = {
    "set": _set,
    "get": _get,
    "check": _check,
    "add": _add,
    "compare_set": _compare_set,
    "wait": _wait,
    "cancel": _cancel,
    "delete": _delete,
    "delete_prefix": _delete_prefix,
    "list": _list,
    "sit": _sit,
    "rise": _rise,
    "stats": _stats,
}


def _keys(header: dict[str, Any]) -> list[str]:
    keys = header["keys"]
    if not isinstance(keys, list) or not all(isinstance(key, str) and len(key) <= 1000 for key in keys):
        raise TypeError("keys are texts of at most 1,000 characters")
    return keys


def _found(session: Session, wait: Wait) -> list[str] | None:
    found = [key for key in wait.keys if key in session.keys]
    return found if len(found) == len(wait.keys) or (found and not wait.needs_all) else None


def _wake(session: Session, keys: list[str]) -> None:
    """Answer the waits that these keys end."""
    changed, left = set(keys), []
    for wait in session.waits:
        if changed.isdisjoint(wait.keys) or (found := _found(session, wait)) is None:
            left.append(wait)
        else:
            wait.connection.push(pack({"id": wait.number, "keys": found}))
    session.waits = left


def _watch_host(connection: socket.socket, silence_s: float) -> None:
    """Let the kernel close a connection whose host has been silent for so long. Frozen processes still answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe_s = max(1, int(silence_s / 4))
    for name, value in (("TCP_KEEPIDLE", probe_s), ("TCP_KEEPINTVL", probe_s), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silence_s))


def _require_proof(owner: str, proof: str, nonce: str, session: str) -> None:
    """Raise Refusal unless the client has signed this connection's nonce with the owner's key."""
    from .seal import signature_holds

    if not signature_holds(owner, proof, nonce, session):
        raise Refusal(f"session {session!r}: the signature of this connection does not hold: its token is another one")


def _other_owner(first: str, second: str, session: str) -> str:
    if not second:
        return f"session {session!r} was begun with a token: give this process the token too"
    if not first:
        return f"session {session!r} was begun without a token: give all its ranks the token, or none"
    return (
        f"session {session!r} was begun with another token: another job has this name, or this process the wrong token"
    )


def main() -> None:
    listening = socket.socket(fileno=int(sys.argv[1]))
    with suppress(KeyboardInterrupt):
        asyncio.run(StoreServer().serve(listening, starter_ends=True))


if __name__ == "__main__":
    import signal

    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C goes to all processes of a terminal; ranks need the store then
    main()
