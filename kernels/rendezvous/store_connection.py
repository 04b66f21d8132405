"""A rank's connection to the store of its session: requests and their answers, and the seats that the server tells of.

The server tells every client at once when a seat changes: `seats` needs no round trip. A connection that breaks is made
again, and what was asked is asked again; the server does nothing twice. A store that does not answer for `timeout_s` is lost.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition, Lock, Thread, current_thread
from typing import Any
from uuid import uuid4
from weakref import WeakSet

from torch.distributed import DistNetworkError

from mcore_reshard.kernels.errors import SessionError, StoreRestarted
from mcore_reshard.kernels.events import log_event

from .address import probe, split_address
from .frames import MAX_FRAME_BYTES, MAX_REQUEST_BYTES, FrameError, pack, receive
from .polling import LOOK_S, NOTICE_S
from .seal import Sealer
from .store_opening import Opening, Seat, open_session

_LOG = logging.getLogger("mcore_reshard")
AGAIN_S = 0.2  # between attempts to connect
BEAT_S = 10.0  # without a word from the server, until a client lets it hear that its process lives
_open_connections: WeakSet[StoreConnection] = WeakSet()


Answer = tuple[dict[str, Any], list[bytes]]  # header and values


@dataclass
class _Request:
    """What was asked, and not answered yet."""

    frame: bytes  # b"": it was for a store that has been replaced, and is not sent again
    is_awaited: bool = True
    answer: Answer | None = None


class StoreConnection:
    """One client of a store's session. Any thread may use it."""

    def __init__(self, address: str, session: str, timeout_s: float, sealer: Sealer, watches: bool = False) -> None:
        self._watches = watches
        self.address, self.session, self.timeout_s = address, session, timeout_s
        self.sealer = sealer
        self._client = uuid4().hex
        self.sender = ""  # the seat that this client has
        self._facts: Mapping[str, Any] = {}
        self._seats: dict[str, Seat] = {}
        self._changes = 0  # of seats, counted
        self._listeners: list[Callable[[], Any]] = []
        self._changed = Condition()
        self._sending = Lock()  # a frame at a time
        self._requests: dict[int, _Request] = {}
        self._number = 0
        self._connection: socket.socket | None = None
        self._listener: Thread | None = None
        self._instance = ""  # of the server
        self._heard = 0.0  # time.monotonic() of the server's last word
        self._pinged = 0.0  # and of the last time that it was asked for one
        self._lost = ""  # why no call can succeed any more
        self._restarted = False
        self._closed = False
        self._pid = os.getpid()
        self._last_heard: dict[str, float] = {}
        self._silences: list[tuple[float, float]] = []  # when answers came late, and after how many seconds
        self.reconnects = 0

    @property
    def instance(self) -> str:
        """Of the server: one that starts anew is another one."""
        return self._instance

    @property
    def seats(self) -> dict[str, Seat]:
        """All seats that were ever taken in this session, as the server last said."""
        return self._seats

    @property
    def local_host(self) -> str | None:
        """The address of this host on the network that leads to the store; None while there is no connection."""
        connection = self._connection
        with suppress(OSError):
            return None if connection is None else str(connection.getsockname()[0]).partition("%")[0]
        return None

    @property
    def described(self) -> str:
        return f"the store at {self.address}"

    @property
    def needs_reopening(self) -> bool:
        """Whether no call can succeed before `reopen`."""
        return bool(self._lost or self._restarted) and not self._closed

    @property
    def is_closed(self) -> bool:
        return self._closed

    def silence(self, since: float) -> str:
        """What an error says of a server that was slow to answer since then (time.monotonic()); "" if it was not."""
        longest_s = max((seconds for at, seconds in self._silences if at >= since), default=0.0)
        return f"; {self.described} was silent for {longest_s:.1f} s meanwhile" if longest_s else ""

    def last_heard(self) -> dict[str, float]:
        """When the server last heard a word of each seat's process, by time.time() of its host.

        A process that lives sends one every BEAT_S, unless it is frozen or holds the interpreter's lock. This asks the
        server. Where it does not answer within AGAIN_S, this is what it last said.
        """
        with suppress(SessionError, DistNetworkError):  # also of a store of an earlier release, which does not know
            number = self.send({"op": "heard"})
            try:
                if self._await_answer(number, time.monotonic() + AGAIN_S, None):
                    said = self._taken(number)[0]["heard"]
                    self._last_heard = {str(name): float(at) for name, at in said.items()}
            finally:
                self._requests.pop(number, None)
        return dict(self._last_heard)

    def start(self) -> None:
        """Make the first connection, then listen on a thread of its own."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                self._connect(deadline)
                break
            except (OSError, FrameError):
                if time.monotonic() + AGAIN_S >= deadline:
                    why = probe(*split_address(self.address))
                    raise SessionError(
                        f"no store answers at {self.address} within {self.timeout_s:g} s: {why}; "
                        "start one with `mcore-reshard store`, or correct the address"
                    ) from None
                time.sleep(AGAIN_S)
        _open_connections.add(self)
        self._listener = Thread(target=_listen, args=(self,), name="store", daemon=True)
        self._listener.start()

    def take_seat(self, name: str, facts: Mapping[str, Any]) -> None:
        """Be `name` in this session. Raises SessionError while another live process is."""
        while True:
            header, _ = self.ask({"op": "sit", "seat": name, "facts": {**facts}})
            if not header.get("held"):
                break
            time.sleep(AGAIN_S)  # its holder's connection has just ended: soon it counts as gone, or comes back
        self.sender, self._facts = name, facts
        self._note_seats(header["seats"])

    def reopen(self) -> None:
        """Go on after the store was lost or started anew, perhaps empty; this client takes its seat again.

        Raises SessionError after `timeout_s` where no store answers, and DistNetworkError once this client has closed.
        """
        with self._changed:
            if self._closed:  # the seat that it has left is another's
                raise self._error()
            lost, self._lost, self._restarted = self._lost, "", False
            self._pinged = 0.0
        connection = self._connection
        if self._listener is not None and self._listener.is_alive():
            if connection is not None:
                with suppress(OSError):  # what was frozen has perhaps been replaced: the listener connects anew
                    connection.shutdown(socket.SHUT_RDWR)
        else:
            try:
                self.start()
            except SessionError:
                self._lost = lost
                raise
            with self._changed:
                self._restarted = False
        if self.sender:
            self.take_seat(self.sender, self._facts)

    def close(self) -> None:
        """End the connection. May be called twice."""
        with self._changed:
            self._closed = True
            self._lost = self._lost or "this rank has closed its connection"
            self._changed.notify_all()
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        _open_connections.discard(self)

    def _connect(self, deadline: float) -> None:
        """Open the session on a new connection. Raises OSError and FrameError; SessionError where the server refuses."""
        opening = Opening(self.session, self._client, self.timeout_s, self._watches)
        connection, opened = open_session(self.address, opening, self.sealer, deadline)
        with self._sending:
            with self._changed:
                restarted = bool(self._instance) and self._instance != opened["opened"]
                self._instance = str(opened["opened"])
                self._heard = time.monotonic()
                self._restarted = self._restarted or restarted
                self._connection = connection
                if restarted:
                    self._seats = {}
                    self._forget_requests()
                again = [each.frame for each in self._requests.values() if each.answer is None and each.frame]
                self._changed.notify_all()
            for frame in again:
                connection.sendall(frame)
            if restarted and self.sender:  # the others need not wait until this rank's next call
                connection.sendall(self._seat_frame())
        self._note_seats(opened["seats"])

    def _seat_frame(self) -> bytes:
        """Asks a store that has started anew for this client's seat. `reopen` asks again, and hears the answer."""
        with self._changed:
            self._number += 1
            header = {
                "id": self._number,
                "oldest": self._number,
                "op": "sit",
                "seat": self.sender,
                "facts": {**self._facts},
            }
        return pack(header, (), MAX_REQUEST_BYTES)

    def _forget_requests(self) -> None:
        """What was asked of a store that has been replaced must not reach the new one, now or later."""
        for number, request in [*self._requests.items()]:
            request.frame = b""
            if not request.is_awaited:
                self._requests.pop(number, None)

    def _note_seats(self, said: Mapping[str, Mapping[str, Any]]) -> None:
        with self._changed:
            self._seats = {**self._seats, **{name: Seat.from_json(name, seat) for name, seat in said.items()}}
            self._changes += 1
            self._changed.notify_all()
        for listener in self._listeners:
            try:
                listener()
            except Exception:
                _LOG.exception("a listener to seats failed")

    def _hear(self, header: dict[str, Any], blobs: list[bytes]) -> None:
        self._heard = time.monotonic()
        if header.get("id"):
            with self._changed:
                if (request := self._requests.get(header["id"])) is not None and not request.is_awaited:
                    del self._requests[header["id"]]
                elif request is not None:
                    request.answer = header, blobs
                    self._changed.notify_all()
        elif "seats" in header:
            self._note_seats(header["seats"])
        elif "error" in header:
            raise FrameError(header["error"])

    def _reconnect(self, error: Exception) -> bool:
        """Connect anew; False once this store is closed or lost."""
        start = time.monotonic()
        deadline, why = start + self.timeout_s, str(error)
        self.reconnects += 1
        about: dict[str, Any] = {"rank": self.sender or None, "session": self.session, "store": self.address}
        log_event("store_connection_lost", logging.WARNING, **about, cause=why)
        while not self._closed:
            try:
                self._connect(deadline)
                log_event("store_reconnected", **about, seconds=time.monotonic() - start)
                return True
            except SessionError as refused:
                why = str(refused)
                break
            except (OSError, FrameError) as failed:
                why = str(failed)
                if time.monotonic() > deadline:
                    break
            time.sleep(AGAIN_S)
        with self._changed:
            self._lost = (
                self._lost or f"the connection broke, and was not made again within {self.timeout_s:g} s: {why}"
            )
            self._changed.notify_all()
        if not self._closed:
            log_event("store_lost", logging.ERROR, **about, cause=why)
        return False

    # --- requests -----------------------------------------------------------------------------------------------------

    def ask(self, header: dict[str, Any], blobs: Sequence[bytes] = (), limit_s: float | None = None) -> Answer:
        """Raises DistNetworkError if no answer comes within `limit_s`, by default `timeout_s`; SessionError if refused."""
        (answer,) = self.ask_all([(header, blobs)], limit_s)
        if isinstance(answer, SessionError):
            raise answer
        return answer

    def ask_all(
        self, asked: Sequence[tuple[dict[str, Any], Sequence[bytes]]], limit_s: float | None = None
    ) -> list[Answer | SessionError]:
        """Several requests in one round trip, carried out in this order. As `ask`, but refusals are among the answers."""
        start, numbers, answers = time.monotonic(), list[int](), list[Answer | SessionError]()
        try:
            for header, blobs in asked:
                numbers.append(self.send(header, blobs))
            for number in numbers:
                if not self._await_answer(number, start + (limit_s or self.timeout_s), None):
                    self._lose()
                try:
                    answers.append(self._taken(number))
                except SessionError as error:
                    answers.append(error)
            return answers
        finally:
            for number in numbers:
                self._requests.pop(number, None)
            if (now := time.monotonic()) - start > NOTICE_S:
                self._silences = [*self._silences[-3:], (now, now - start)]

    def await_keys(
        self,
        keys: Sequence[str],
        needs_all: bool,
        timeout_s: float,
        look: Callable[[], Any] | None,
        read: Sequence[str] | None = None,
    ) -> Answer | None:
        """What the store answers once keys exist: "keys" of its header are those that do, unless it waits for all.

        With `read` the answer is also one to `get` of these keys, unless it has no "missing". None after `timeout_s`.
        """
        more = {} if read is None else {"read": [*read]}
        number = self.send({"op": "wait", "keys": [*keys], "all": needs_all, **more})
        answered = False
        try:
            answered = self._await_answer(number, time.monotonic() + max(0.0, timeout_s), look)
            if answered:
                return self._taken(number)
        finally:
            self._requests.pop(number, None)
            if not answered:
                with suppress(DistNetworkError, StoreRestarted):
                    self.ask({"op": "cancel", "wait": number})
        # The cancellation has been answered: the store is alive.
        if self._lost or self._restarted:
            raise self._error()
        return None

    def send(
        self, header: dict[str, Any], blobs: Sequence[bytes] = (), asks: bool = True, is_awaited: bool = True
    ) -> int:
        with self._changed:
            if self._lost or self._restarted or self._pid != os.getpid():
                raise self._error()
            self._number += 1
            number = self._number
            oldest = min(self._requests, default=number)  # the server may forget its answers to those before
            try:
                frame = pack({"id": number, "oldest": oldest, **header}, blobs, MAX_REQUEST_BYTES)
            except FrameError as error:
                raise SessionError(f"{self.described} was not asked: {error}") from error
            request = _Request(frame, is_awaited)
            if asks:
                self._requests[number] = request
            connection = self._connection
        if connection is not None:
            with suppress(OSError), self._sending:  # the listener connects anew, and sends it again
                try:
                    connection.sendall(request.frame)
                except BaseException:  # half a frame may be on its way
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
                    raise
        return number

    def send_at_once(self, header: dict[str, Any]) -> None:
        """Send a request, or leave it: a signal handler must not wait for a lock that its own thread may hold."""
        connection = self._connection
        if connection is None or self._pid != os.getpid() or not self._sending.acquire(timeout=AGAIN_S):
            return
        try:
            with suppress(OSError):
                connection.send(pack({"id": -1, **header}), socket.MSG_DONTWAIT)  # no other request has this number
        finally:
            self._sending.release()

    def _beat(self) -> None:
        """Let the server hear that this process lives, unless another thread is about to."""
        if not self._sending.locked():
            with suppress(SessionError, DistNetworkError):
                self.send({"op": "check", "keys": []}, asks=False)

    def _await_answer(self, number: int, deadline: float, look: Callable[[], Any] | None) -> bool:
        """Whether an answer came in time."""
        looked, changes = time.monotonic(), self._changes
        turned = looked
        while True:
            now = time.monotonic()
            self._watch(slept_s=now - turned)
            turned = now
            with self._changed:
                request = self._requests[number]
                if request.answer is not None:
                    return True
                if self._lost or self._restarted:
                    raise self._error()
                if not request.frame:  # another thread has reopened the store meanwhile
                    raise self._forgotten()
                now = time.monotonic()
                if now >= deadline:
                    return False
                if look is None or (changes == self._changes and now - looked < LOOK_S):
                    self._changed.wait(min(deadline - now, LOOK_S))
                    if request.answer is not None:
                        return True
            if look is not None and (changes != self._changes or time.monotonic() - looked >= LOOK_S):
                looked, changes = time.monotonic(), self._changes
                look()

    def _watch(self, slept_s: float) -> None:
        """Ask a server that has been quiet for a word; it is lost if none comes within `timeout_s`."""
        now = time.monotonic()
        if slept_s > 4 * LOOK_S:  # this process was frozen: what the server said meanwhile is still to be read
            self._pinged = now
        if now - self._heard < self.timeout_s / 2 or self._connection is None or self._lost:
            return
        if self._pinged < self._heard:
            self._pinged = now
            self.send({"op": "check", "keys": []}, asks=False)
        elif now - self._pinged > self.timeout_s:
            with self._changed:
                self._lost = self._lost or self._frozen
                self._changed.notify_all()

    @property
    def _frozen(self) -> str:
        return f"it has not answered for {self.timeout_s:g} s: its process is frozen, or its host is gone"

    def _taken(self, number: int) -> Answer:
        answer = self._requests[number].answer
        assert answer is not None
        if "error" in answer[0]:
            raise SessionError(str(answer[0]["error"]))
        return answer

    def _lose(self) -> None:
        with self._changed:
            self._lost = self._lost or self._frozen
            self._changed.notify_all()
        raise self._error()

    def _error(self) -> Exception:
        if self._restarted and not self._lost:
            return self._forgotten()
        return DistNetworkError(f"{self.described}: {self._lost or 'a forked process has no connection to it'}")

    def _forgotten(self) -> StoreRestarted:
        return StoreRestarted(f"{self.described} was started anew, and what the ranks had said there is gone")


def _listen(store: StoreConnection) -> None:
    """Read what the server says, until the store is closed or lost."""
    assert current_thread().daemon
    while not store._closed:
        connection = store._connection
        if connection is None:
            return
        try:
            said = select.poll()  # not select(), which takes no descriptor above 1023
            said.register(connection, select.POLLIN)
            while True:
                if said.poll(1000 * BEAT_S):
                    store._hear(*receive(connection, MAX_FRAME_BYTES))
                else:
                    store._beat()
        except (OSError, EOFError, ValueError) as error:  # FrameError; ValueError: of a connection that is closed
            connection.close()
            if store._closed or not store._reconnect(error):
                return


def _close_in_child() -> None:
    """A forked process must not hold a connection open that says that its parent lives."""
    for store in list(_open_connections):
        connection = store._connection
        if connection is not None:
            with suppress(OSError):
                os.close(connection.detach())


os.register_at_fork(after_in_child=_close_in_child)
