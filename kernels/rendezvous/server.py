"""The store of sessions: keys, seats, and who is alive. A process of its own, without torch.

    python -m mcore_reshard.kernels.rendezvous.server FD      # serves at the listening socket FD until stdin ends

Each rank holds one connection. When a process dies its kernel closes the connection, whatever the process was doing; the
server then tells all others of the session. It asks no name service, so no lost answer of one holds anybody up.
A session lives in memory, from its first connection until `linger_s` after its last one.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import select
import socket
import sys
import time
from contextlib import suppress
from typing import Any
from uuid import uuid4

from .frames import (
    LENGTHS,
    MAGIC,
    MAX_FRAME_BYTES,
    MAX_OPENING_BYTES,
    MAX_REQUEST_BYTES,
    FrameError,
    body_bytes,
    pack,
    unpack,
    watch_host,
)
from .sessions import (
    CHANGES,
    MAX_NAME,
    MAX_REMEMBERED_BYTES,
    MAX_SESSIONS,
    READS,
    REMEMBERED,
    Client,
    Refusal,
    Session,
    Totals,
    Wait,
)

GONE_S = 1.5  # for a client whose connection broke to come back, before others are told that it is gone
OPENING_S = 10.0  # for a connection to say what it wants
LINGER_S = 3600.0  # the longest that a session without connections is kept
IDLE_S = 5.0  # without connections, before a server ends whose starter has died: another one may come
MAX_UNOPENED = 2048  # connections that have not said what they want; a further one ends the oldest
MAX_AHEAD_BYTES = 128 << 10  # of requests that a client sends before its earlier ones were answered; then it waits
MAX_UNREAD_BYTES = MAX_FRAME_BYTES + (16 << 20)  # that a client leaves unread, before its connection is closed


class Connection(asyncio.Protocol):
    """One client's connection, or one that has not said yet whose it is."""

    transport: asyncio.Transport

    def __init__(self, store: StoreServer) -> None:
        self.store = store
        self.session: Session | None = None
        self.client = ""
        self.waits: dict[int, Wait] = {}
        self.said_goodbye = False
        self._nonce = uuid4().hex
        self._opening: asyncio.TimerHandle | None = None  # until the client has said what it wants
        self._arrived = bytearray()  # frames that were not read yet, the last one perhaps in part
        self._reads_soon = False  # the next frame is read once other connections had their turn
        self._is_unread = False  # the client does not read its answers, so its requests wait

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._opening = asyncio.get_running_loop().call_later(OPENING_S, transport.abort)
        with suppress(OSError):
            watch_host(transport.get_extra_info("socket"), OPENING_S)
        self.store.accepted(self)
        greeting = {"id": 0, "magic": MAGIC, "instance": self.store.instance, "nonce": self._nonce}
        self.push(pack(greeting))

    def data_received(self, data: bytes) -> None:
        self._arrived += data
        if not self._reads_soon:
            self._read_frame()
        if (self._reads_soon or self._is_unread) and len(self._arrived) > MAX_AHEAD_BYTES:
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        self._is_unread = True

    def resume_writing(self) -> None:
        self._is_unread = False
        self._take_turn()

    def connection_lost(self, error: Exception | None) -> None:
        self._has_opened()
        self.store.closed(self)

    def _take_turn(self) -> None:
        """Read the next frame after other connections have read one of theirs."""
        if not self._reads_soon:
            self._reads_soon = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._reads_soon = False
        self._read_frame()
        if not self._reads_soon and not self._is_unread and not self.transport.is_closing():
            self.transport.resume_reading()

    def _read_frame(self) -> None:
        """Answer the first frame that has arrived, if it is whole."""
        arrived = self._arrived
        if self._is_unread or len(arrived) < LENGTHS.size or self.transport.is_closing():
            return
        try:
            limit = MAX_OPENING_BYTES if self._opening is not None else MAX_FRAME_BYTES
            header_bytes, body = body_bytes(arrived[: LENGTHS.size], limit, MAX_REQUEST_BYTES)
            if len(arrived) < (end := LENGTHS.size + body):
                return
            frame = unpack(header_bytes, arrived[LENGTHS.size : end])
            del arrived[:end]
            if self._opening is not None:
                self._open(frame[0])
            elif self.session is not None:
                if (client := self.session.clients.get(self.client)) is not None:
                    client.heard = time.time()
                self._answer(*frame)
        except (FrameError, Refusal) as error:
            self.push(pack({"id": 0, "error": str(error)}))
            self.transport.close()
        if len(arrived) >= LENGTHS.size:
            self._take_turn()

    def _open(self, header: dict[str, Any]) -> None:
        """Let the client into the session that it means; it proves here that it knows the session's token."""
        if header.get("op") == "stats":
            self.push(pack({"id": header.get("id", 0), "value": self.store.stats()}))
            self.transport.close()
        else:
            self.store.open(self, header, self._nonce)
            self._has_opened()

    def _has_opened(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        self.store.unopened.pop(self, None)

    def _answer(self, header: dict[str, Any], blobs: list[bytes]) -> None:
        session, number, operation = self.session, header.get("id"), str(header.get("op"))
        if session is None:
            return  # its client has opened another connection meanwhile
        client = session.clients[self.client]
        if operation == "bye":
            self.said_goodbye = True
            return
        if not isinstance(number, int):
            raise FrameError("a request without a number")
        if isinstance(oldest := header.get("oldest"), int):  # the client has read the replies to those before
            while client.replies and next(iter(client.replies)) < oldest:
                client.replies.popitem(last=False)
        if number in client.replies:
            self.push(client.replies[number])
            return
        try:
            reply = self._carried_out(session, client, operation, header, blobs)
        except (Refusal, FrameError) as error:
            reply = pack({"id": number, "error": str(error)})
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
            reply = pack({"id": number, "error": f"a malformed request {operation:.40}: {error!r:.200}"})
        if reply is None:
            return  # a wait: it is answered later
        if operation in CHANGES and len(reply) <= MAX_REMEMBERED_BYTES:
            client.replies[number] = reply
            while len(client.replies) > REMEMBERED:
                client.replies.popitem(last=False)
        self.push(reply)

    def _carried_out(
        self, session: Session, client: Client, operation: str, header: dict[str, Any], blobs: list[bytes]
    ) -> bytes | None:
        if operation == "stats":
            own = {"session_keys": len(session.keys), "session_bytes": session.nbytes}
            return pack({"id": header["id"], "value": {**self.store.stats(), **own}})
        if client.watches and operation in CHANGES:
            raise Refusal("this connection was opened to watch: it can read alone")
        act = READS.get(operation) or CHANGES.get(operation)
        if act is None:
            raise Refusal(f"this store does not know the request {operation!r:.40}: upgrade it")
        said, values = act(self, session, header, blobs)
        return None if said is None else pack({"id": header["id"], **said}, values)

    def push(self, frame: bytes) -> None:
        """Send, without waiting for a client that does not read; one that leaves too much unread is closed."""
        if not self.transport.is_closing():
            self.transport.write(frame)
            if self.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
                self.abort()

    def abort(self) -> None:
        self.transport.abort()

    def has_ended(self) -> bool:
        """Whether its client has closed it, or has died; the event loop may not have noticed yet."""
        ended = select.poll()
        ended.register(self.transport.get_extra_info("socket"), getattr(select, "POLLRDHUP", select.POLLHUP))
        return self.transport.is_closing() or bool(ended.poll(0))


class StoreServer:
    """All sessions of one process."""

    def __init__(self) -> None:
        self.instance = uuid4().hex
        self.sessions: dict[str, Session] = {}
        self.connections: set[Connection] = set()
        self.unopened: dict[Connection, None] = {}  # the oldest first
        self.totals = Totals()
        self.idle_since = time.monotonic()
        self._max_unopened = MAX_UNOPENED

    async def serve(self, listening: socket.socket, starter: int | None = None) -> None:
        """Answer connections; without end, or until nobody is connected once the process `starter` has ended.

        A starter's end shows on stdin; a byte there says that it needs this store no more.
        """
        self._max_unopened = min(MAX_UNOPENED, _allow_descriptors() // 2)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(self), sock=listening, backlog=4096)
        async with server:
            if starter is None:
                await server.serve_forever()
            was_told, idle_s = loop.create_future(), IDLE_S
            loop.add_reader(sys.stdin.fileno(), _note_end, was_told)
            while not was_told.done() and os.getppid() == starter:  # a child of it may hold the pipe open
                await asyncio.wait([was_told], timeout=1.0)
            if was_told.done() and was_told.result():
                idle_s = 0.0
            ended = time.monotonic()
            while self.connections or time.monotonic() - max(ended, self.idle_since) < idle_s:
                await asyncio.sleep(0.1)

    def accepted(self, connection: Connection) -> None:
        """A connection has been made, and has not said yet what it wants."""
        self.connections.add(connection)
        self.unopened[connection] = None
        if len(self.unopened) > self._max_unopened:
            next(iter(self.unopened)).abort()

    def open(self, connection: Connection, header: dict[str, Any], nonce: str) -> None:
        """Let a connection into its session, which the first one begins. Raises FrameError and Refusal."""
        name, client = _text(header, "session", MAX_NAME), _text(header, "client", 64)
        owner, proof = _text(header, "owner", 200), _text(header, "proof", 400)
        linger_s, silence_s = _seconds(header, "linger_s", 0.0), _seconds(header, "silence_s", 1.0)
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
            session = self.sessions[name] = Session(name, owner, linger_s, self.totals)
        if session.ending is not None and not watches:
            session.ending.cancel()
            session.ending = None
        if not watches:
            session.linger_s = max(session.linger_s, linger_s)
        held = session.clients.setdefault(client, Client(watches=watches))
        if held.forgetting is not None:
            held.forgetting.cancel()
        if isinstance(held.connection, Connection):  # the client knows that this one is dead; the server may not yet
            _end_waits(session, held.connection)
            held.connection.session = None
            held.connection.abort()
        held.connection, connection.session, connection.client = connection, session, client
        with suppress(OSError):
            watch_host(connection.transport.get_extra_info("socket"), silence_s)
        own = [name for name, seat in session.seats.items() if seat.client == client]
        for seat in own:
            if session.seats[seat].status == "gone":
                session.set_status(seat, "here")
        opened = {"opened": session.instance, "seats": session.seats_said(), "own": own}
        connection.push(pack({"id": 0, **opened}))

    def closed(self, connection: Connection) -> None:
        """A connection has ended: after a while its client counts as gone."""
        self.connections.discard(connection)
        self.unopened.pop(connection, None)
        if not self.connections:
            self.idle_since = time.monotonic()
        session = connection.session
        if session is None:
            return
        _end_waits(session, connection)
        client = session.clients[connection.client]
        client.connection = None
        loop = asyncio.get_running_loop()
        held = [name for name, seat in session.seats.items() if seat.client == connection.client]
        if any(session.seats[name].status == "here" for name in held):
            client.forgetting = loop.call_later(GONE_S, self._is_gone, session, connection.client)
        else:
            self._forget_later(session, connection.client, at_once=connection.said_goodbye)
        if not client.watches and not any(c.connection and not c.watches for c in session.clients.values()):
            has_left = bool(session.seats) and all(seat.status == "left" for seat in session.seats.values())
            session.ending = loop.call_later(0.0 if has_left else session.linger_s, self._end, session)

    def stats(self) -> dict[str, Any]:
        return {
            "sessions": len(self.sessions),
            "connections": len(self.connections),
            "clients": sum(len(session.clients) for session in self.sessions.values()),
            "keys": sum(len(session.keys) for session in self.sessions.values()),
            "bytes": self.totals.nbytes,
            "names": sorted(name for name, session in self.sessions.items() if not session.owner)[:100],
        }

    def _is_gone(self, session: Session, client: str) -> None:
        for name, seat in session.seats.items():
            if seat.client == client and seat.status == "here":
                session.set_status(name, "gone")
        self._forget_later(session, client, at_once=False)

    def _forget_later(self, session: Session, client: str, at_once: bool) -> None:
        """Keep what a client was answered for as long as it may come back and ask again."""
        after_s = 0.0 if at_once else session.linger_s
        forget = session.clients.pop
        session.clients[client].forgetting = asyncio.get_running_loop().call_later(after_s, forget, client, None)

    def _end(self, session: Session) -> None:
        del self.sessions[session.name]
        self.totals.nbytes -= session.nbytes
        for client in session.clients.values():  # those that watch
            if isinstance(client.connection, Connection):
                client.connection.abort()
        for client in session.clients.values():
            if client.forgetting is not None:
                client.forgetting.cancel()


def _end_waits(session: Session, connection: Connection) -> None:
    for wait in [*connection.waits.values()]:
        session.end_wait(wait)


def _note_end(was_told: asyncio.Future[bool]) -> None:
    """The starter's end of stdin was closed, or has a byte."""
    asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
    was_told.set_result(bool(os.read(sys.stdin.fileno(), 1)))


def _allow_descriptors() -> int:
    """Let this process have as many connections as the system allows; how many these are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft if soft > 0 else 1 << 20


def _text(header: dict[str, Any], name: str, limit: int) -> str:
    text = header.get(name, "")
    if not isinstance(text, str) or len(text) > limit or (not text and name in ("session", "client")):
        raise FrameError(f"a malformed opening: {name} is a text of at most {limit} characters, not {text!r:.60}")
    return text


def _seconds(header: dict[str, Any], name: str, low: float) -> float:
    seconds = header.get(name)
    if not isinstance(seconds, (int, float)) or not math.isfinite(seconds):
        raise FrameError(f"a malformed opening: {name} is {seconds!r:.60}")
    return min(max(float(seconds), low), LINGER_S)


def _require_proof(owner: str, proof: str, nonce: str, session: str) -> None:
    """Raise Refusal unless the client has signed this connection's nonce with the owner's key."""
    try:
        from .seal import signature_holds

        holds = signature_holds(owner, proof, nonce, session)
    except RuntimeError as error:  # this environment lacks cryptography
        raise Refusal(f"where the store runs, {error}") from error
    if not holds:
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
    listening, starter = socket.socket(fileno=int(sys.argv[1])), os.getppid()
    with suppress(KeyboardInterrupt):
        asyncio.run(StoreServer().serve(listening, starter))


if __name__ == "__main__":
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all of a terminal; ranks need the store then
    main()
