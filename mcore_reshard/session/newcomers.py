"""A replica that comes to a session under way gets the current version at once, from another replica.

    joiner   gen:4, gen:5 sit down, agree on a donor    ask gen:0 and gen:1    take    derive    complete(7)
    donor    gen:0, gen:1 generate meanwhile            offer: each sends all that it has to the rank of its place

The trainer takes no part, and need not stop. A donor's refit waits until its copy is over; what it generates does not.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from threading import RLock, Thread
from typing import Any

import torch
from torch.distributed import DistError

from mcore_reshard.kernels.cuda.streams import in_callers_context
from mcore_reshard.kernels.errors import DeadlineError, RefitError, SessionError, StoreRestarted
from mcore_reshard.kernels.events import log_event
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.exchange import parse_stored
from mcore_reshard.kernels.rendezvous.store import SessionStore

from .attempts import World
from .replica_copy import offer, take
from .state import WeightState

_AGAIN_S = 0.1
_STORE_AGAIN_S = 0.5
_ASLEEP_S = 3600.0
_TRIES = 2  # donors may begin a refit between the copies of two of their ranks

LiveTensors = Callable[[], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Rank:
    """A generation rank, as donor or as joiner."""

    store: SessionStore
    seat: str
    world: World
    tensors: LiveTensors
    options: Options

    @property
    def replica(self) -> int:
        return self.world.replica_of(self.seat)

    @property
    def place(self) -> int:
        """Within its replica."""
        return self.world.seats_of(self.replica).index(self.seat)

    @property
    def first(self) -> str:
        """The first seat of its replica."""
        return self.world.seats_of(self.replica)[0]

    @property
    def company(self) -> str:
        """The process in the first seat of its replica, by whose name its ranks meet."""
        return str(self.store.seats[self.first].facts.get("process"))

    def is_whole(self, replica: int) -> bool:
        """Whether all ranks of a replica are here."""
        seats = self.store.seats
        return all(name in seats and seats[name].status == "here" for name in self.world.seats_of(replica))


def serve_newcomers(rank: Rank, turn: RLock, state: Callable[[], WeightState]) -> None:
    """Offer this rank's weights to those that ask, on a thread, until the store is closed. `turn` guards the weights."""
    device = next((tensor.device for tensor in rank.tensors().values()), None)
    wanted = f"want/{rank.seat}"

    def serve() -> None:
        while not rank.store.is_closed:
            try:
                if rank.store.wait_any([wanted], _ASLEEP_S):
                    _offer(rank, _next_wish(rank.store, wanted), turn, state)
            except (DistError, StoreRestarted):
                time.sleep(_STORE_AGAIN_S)  # the next refit opens the store again
            except SessionError as error:  # what somebody else wrote there
                log_event("offer_failed", logging.WARNING, rank=rank.seat, session=rank.store.session, cause=f"{error}")

    Thread(target=in_callers_context(serve, device), name="newcomers", daemon=True).start()


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a joiner asks of a donor's rank."""

    peer: str  # the joiner's seat
    process: str  # and process
    copy: str  # names the keys of the copy

    @classmethod
    def from_json(cls, said: Any) -> _Wish:
        wish = cls(**said)
        if not all(isinstance(text, str) for text in (wish.peer, wish.process, wish.copy)):
            raise TypeError("a text is none")
        return wish


def _next_wish(store: SessionStore, wanted: str) -> _Wish:
    try:
        return parse_stored(wanted, store.get(wanted), _Wish.from_json)
    finally:
        store.delete_key(wanted)


def _offer(rank: Rank, wish: _Wish, turn: RLock, state: Callable[[], WeightState]) -> None:
    """One copy. Its failure is the joiner's to report: this rank has what it had."""
    peer, number = wish.peer, wish.copy
    seat = rank.store.seats.get(peer)
    if seat is None or seat.facts.get("process") != wish.process:
        return  # who wished is here no more: nobody would take it
    keys = rank.store.under(f"copy/{number}")
    with turn:
        held = state()
        try:
            if held.kind == "mixed" or held.version is None:
                keys.set("failed", f"{rank.seat} has no whole version to offer: it is {held}")
                return
            # A refit that begins meanwhile waits for the copy: a joiner that is frozen must not take all of its time.
            options = replace(rank.options, timeout_s=rank.options.timeout_s / 2)
            offer(keys, rank.seat, peer, rank.tensors(), options, version=held.version)
        except (RefitError, DistError, RuntimeError, OSError, ValueError) as error:
            said: dict[str, Any] = {"rank": rank.seat, "session": rank.store.session, "peer": peer}
            log_event("offer_failed", logging.WARNING, **said, cause=f"{error}")


class _CompanyChanged(Exception):
    """The first rank of the replica is another process than this rank had seen."""


def catch_up(rank: Rank, derive: Callable[[], Any] | None, before_writes: Callable[[int], Any]) -> int | None:
    """Fill this rank's weights from another replica; the version. None where no other replica has one.

    All ranks of the replica call it. `before_writes(version)` is called before a first byte is written. Raises SessionError
    where their copies failed, or are of different versions: once it was called, the weights may then be of any.
    """
    deadline = time.monotonic() + rank.options.timeout_s
    while not rank.is_whole(rank.replica):
        if time.monotonic() > deadline:
            raise SessionError(f"{rank.seat}: not all ranks of its replica came within {rank.options.timeout_s:g} s")
        time.sleep(_AGAIN_S)
    while True:
        try:
            return _catch_up(rank, rank.company, derive, before_writes)
        except _CompanyChanged:  # a seat says "here" for a moment after its process has died
            continue


def _catch_up(
    rank: Rank, company: str, derive: Callable[[], Any] | None, before_writes: Callable[[int], Any]
) -> int | None:
    """As `catch_up`, together with the ranks that see the same process in the first seat of the replica."""

    def require_company() -> None:
        if rank.company != company:
            raise _CompanyChanged

    failures: list[str] = []
    if rank.seat == rank.first:
        _forget_earlier(rank, company)
    for number in range(_TRIES):
        key = f"join/{rank.first}/{company}/{number}"
        own_choice = json.dumps(_donors(rank))
        donors = parse_stored(key, rank.store.compare_set(key, "", own_choice), _parse_donors)
        if not donors:
            return None
        donor = donors[(rank.replica + number) % len(donors)]
        version = _take(rank, donor, f"{rank.first}/{company}/{number}/{rank.place}", failures, before_writes)
        if version is not None and derive is not None:
            derive()
        rank.store.set(f"{key}/{rank.seat}", json.dumps(version))
        seats_of_replica = rank.world.seats_of(rank.replica)
        ends = [f"{key}/{seat}" for seat in seats_of_replica]
        if not rank.store.wait_all(ends, 2 * rank.options.timeout_s, require_company):
            raise SessionError(f"{rank.seat}: another rank of its replica did not end its copy")
        versions = {
            parse_stored(end, value, _parse_version)
            for end, value in zip(ends, rank.store.multi_get(ends, writers=seats_of_replica), strict=True)
        }
        if versions == {version} and version is not None:
            return version
        failures.append(f"its ranks got different versions: {versions}")
    raise SessionError(f"{rank.seat}: no replica could give it its weights: {'; '.join(failures)}")


def _forget_earlier(rank: Rank, company: str) -> None:
    """Delete what earlier processes in the seats of this replica have said of their joins: nobody reads it any more."""
    for prefix in (f"join/{rank.first}/", f"copy/{rank.first}/"):
        earlier = [key for key in rank.store.keys(prefix) if not key.startswith(f"{prefix}{company}/")]
        if earlier:
            rank.store.delete_soon([], earlier)


def _donors(rank: Rank) -> list[int]:
    """Other replicas, all ranks of which are here."""
    taken = {rank.world.replica_of(name) for name in rank.store.seats if name.startswith("gen:")}
    return sorted(replica for replica in taken - {rank.replica} if rank.is_whole(replica))


def _take(rank: Rank, donor: int, number: str, failures: list[str], before_writes: Callable[[int], Any]) -> int | None:
    """The version that a donor's rank gave; None where it could not."""
    peer = rank.world.seats_of(donor)[rank.place]
    wanted, process = f"want/{peer}", rank.store.seats[rank.seat].facts.get("process")
    wish = json.dumps({"peer": rank.seat, "process": process, "copy": number})
    deadline = time.monotonic() + rank.options.timeout_s
    while rank.store.compare_set(wanted, "", wish) != wish.encode():  # it serves another newcomer
        if time.monotonic() > deadline:
            failures.append(f"{peer} was busy for {rank.options.timeout_s:g} s")
            return None
        time.sleep(_AGAIN_S)
    try:
        keys = rank.store.under(f"copy/{number}")
        report = take(keys, rank.seat, peer, rank.tensors(), rank.options, before_writes)
    except (SessionError, DeadlineError, RefitError) as error:
        failures.append(f"{error}")
        return None
    finally:
        rank.store.delete_prefix(f"copy/{number}/")
        if rank.store.peek(wanted) == wish.encode():  # the donor has died: its next process must not serve it
            rank.store.delete_key(wanted)
    said: dict[str, Any] = {"rank": rank.seat, "session": rank.store.session, "peer": peer, "version": report.version}
    log_event("caught_up", **said, seconds=report.seconds, bytes=report.nbytes)
    return report.version


def _parse_donors(said: Any) -> list[int]:
    if not all(isinstance(each, int) for each in said):
        raise TypeError("a replica is a number")
    return list(said)


def _parse_version(said: Any) -> int | None:
    if said is not None and not isinstance(said, int):
        raise TypeError("a version is a number")
    return said
