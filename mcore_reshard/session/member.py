"""A rank among the members of a session: its seat, its bound tensors, and its connection with the others."""

from __future__ import annotations

import logging
import os
import platform
import time
from abc import ABC
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from operator import is_not
from threading import RLock
from typing import Any
from uuid import uuid4

import torch
from torch.distributed import DistError

from mcore_reshard.kernels.copies.bind import BoundSchedule, WriteCounts
from mcore_reshard.kernels.errors import SessionError, StoreRestarted
from mcore_reshard.kernels.events import log_event
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.address import store_address
from mcore_reshard.kernels.rendezvous.polling import NOTICE_S
from mcore_reshard.kernels.rendezvous.rendezvous import Rendezvous, cause_of
from mcore_reshard.kernels.rendezvous.store import SessionStore, connect_store
from mcore_reshard.kernels.transports.base import Transport
from mcore_reshard.kernels.transports.kept import Kept
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import Schedule, World

from .agreement import check_alike, parse_word
from .attempts import CONNECT, PROTOCOL, REFIT, Call, Head
from .attendance import WAITS
from .connection import Connection, bind_part, connect_members
from .executed_check import agree_on_executed
from .follower import Follower
from .gc_pause import gc_paused
from .goodbye import say_goodbye_at_exit
from .leader import Leader
from .newcomers import Rank, catch_up, serve_newcomers
from .part import Part, RankOfPlan, part_of
from .places import decide, own_place
from .plan_exchange import fetch_plan, keep_newest, publish_again
from .published import Published
from .record import Record
from .report import RefitReport
from .staged import STAGED, StagedTensors, require_memory
from .state import WeightState, complete, intact, mixed
from .trace_exchange import CONNECT_AGAIN, awaits_trace

CLOSED = "closed"
try:
    _PACKAGE = version_of("mcore-reshard")
except PackageNotFoundError:  # a plain checkout
    _PACKAGE = "unknown"

_Binding = tuple[Schedule, Transport, BoundSchedule | None]
_Among = tuple[tuple[int, ...], tuple[str, ...]]  # replicas, and where all ranks are
LiveTensors = Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]]


class Member(ABC):
    """One rank's place in a session: it takes its seat, binds its tensors, and connects with the members of an epoch."""

    world: World
    by_name: str  # the argument with the function that moves whole tensors by name
    _moves_by_name: bool  # whether that function was given
    _after_direct_writes: Callable[[], Any] | None = None  # on generation ranks

    def __init__(
        self,
        schedule: Schedule | Part,
        tensors: LiveTensors,
        store: Any,
        options: Options,
        check_layout: Callable[[], None] | None,
        on_state: Callable[[WeightState], Any] | None = None,
        adopt_plan: Callable[[Plan], Part] | None = None,
    ) -> None:
        part = part_of(schedule)
        if part.world != self.world:
            raise ValueError(f"{type(self).__name__} needs the schedule of a {self.world} rank, not of {part.seat}")
        self.rank_name = part.seat
        self.committed_version: int | None = None
        self._part = part
        self._tensors = tensors
        self._store_address = store_address(store)
        self._options = options
        self._check_layout = check_layout
        self._on_state = on_state
        self._adopt_plan = adopt_plan
        self._record = Record(options.session, part.seat, part.seats)
        self._state = intact(None)
        # On generation ranks of a staged session: where bytes land before they are copied in.
        self._staged = StagedTensors(part.seat) if self.world == "gen" and options.commit == STAGED else None
        self._process = uuid4().hex
        self._store: SessionStore | None = None
        self._published_at = ""  # the store that has the plan, on training rank 0
        self._attendance: Leader | Follower | None = None
        self._binding: tuple[_Among, _Binding] | None = None  # and whom it is for
        self._bound: BoundSchedule | None = None  # of the live tensors, for whomever
        self._kept = Kept()
        self._place = ""
        self._connection: Connection | None = None
        self._ended: str | None = None  # why no refit is possible any more
        self._failure: str | None = None  # of the last attempt, if it failed
        self._bulk_began = False  # of this attempt
        self._writes = WriteCounts((), ())  # of the live tensors, before this attempt
        self._turn = RLock()  # held while weights are read or written
        self._retries = options.retries  # of the refit under way
        self._pending: Future[RefitReport] | None = None  # a refit whose outcome is still to come

    def await_outcome(self) -> None:
        """Wait for a refit that `refit_async` began, if its outcome is still to come. Its error is its handle's."""
        if self._pending is not None:
            wait([self._pending])
            self._pending = None

    def close(self) -> None:
        """Say goodbye, and free connections and scratch. Members that wait for this rank get an error. May be called twice.

        It waits 1 s at most for a transport at work to end, and for a store that is silent.
        """
        with suppress(Exception):
            self.await_outcome()
        self._ended = self._ended or CLOSED
        self._record.leaves()
        store, self._store, self._attendance = self._store, None, None
        self._disconnect()
        self._binding = self._bound = None
        self._kept.close()
        if store is not None:
            with suppress(Exception):
                store.leave_seat()
            store.close()
        if self._staged is not None and self._turn.acquire(timeout=NOTICE_S):  # a refit on another thread may use it
            self._staged.free()
            self._turn.release()

    # --- meeting ------------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Open the session on its store, and take this rank's seat."""
        options, seats = self._options, self._part.seats
        store = self._store = connect_store(self._store_address, options)
        facts = {
            "process": self._process,
            "pid": os.getpid(),
            "host": platform.node(),
            "package": _PACKAGE,
            "protocol": PROTOCOL,
        }
        store.take_seat(self.rank_name, facts)
        self._published_at = store.instance
        say_goodbye_at_exit(store)
        self._record.enters(store)
        common = (store, self.rank_name, seats, self._process, options.timeout_s)
        if self.rank_name == "train:0":
            leader = Leader(*common, plan=self._part.plan_digest, package=_PACKAGE)
            leader.max_lag = options.max_lag
            self._attendance = leader
            if isinstance(self._part, RankOfPlan):
                keep_newest(self._part.plan, store)
        else:
            self._attendance = Follower(*common)
        self._attendance.hang_up = partial(self._disconnect, failed=True)

    def _word(self) -> dict[str, Any]:
        """What every rank says in every attempt."""
        connection = self._connection
        epoch = connection.epoch if connection else None
        return {"epoch": epoch, "committed": self.committed_version, "place": self._place}

    def _epoch(self, replicas: tuple[int, ...]) -> str | None:
        connection = self._connection
        return connection.epoch if connection is not None and connection.replicas == replicas else None

    def _absent(self) -> list[str]:
        """Planned ranks that have no seat, as the store last said. It asks nobody."""
        seats = self._store.seats if self._store is not None else {}
        here = {name for name, seat in seats.items() if seat.status == "here"}
        planned = self._part.seats
        return [seat for seat in planned.members(range(planned.replicas)) if seat not in here]

    def _follow_connect(self, follower: Follower, head: Head, timeout_s: float | None = None) -> None:
        """Take part in an attempt to connect. A replica that comes later only binds: the next refit connects it."""
        if head.kind != CONNECT:
            follower.skip(head)
            self._adopt(head)
            return

        def make_word() -> dict[str, Any]:
            self._adopt(head)  # a plan that does not fit fails the attempt for all
            return self._word()

        with self._record.phase("meet"):
            call = follower.follow(head, make_word, timeout_s)
        if call is not None:
            self._connect(call)

    def _welcome_newcomers(self) -> None:
        """Get the version that other replicas have, on a rank that came later; then offer it to those that come."""
        store, seats = self._store, self._part.seats
        if self.world != "gen" or store is None or not isinstance(self._part, RankOfPlan):
            return
        rank = Rank(store, self.rank_name, seats, self._live_tensors, self._options)
        if self._connection is None:
            try:
                with self._turn, self._record.phase("catch_up"):
                    version = catch_up(rank, self._after_direct_writes, self._note_arriving)
            except SessionError as error:  # the next refit brings everything
                said = {"rank": self.rank_name, "session": store.session, "cause": f"{error}"}
                log_event("not_caught_up", logging.WARNING, **said)
            else:
                if version is not None:
                    self.committed_version = version
                    self._set_state(complete(version))
        serve_newcomers(rank, self._turn, lambda: self._state)

    def _note_arriving(self, version: int) -> None:
        """Before a copy of another replica's weights writes its first byte."""
        self._set_state(mixed(self.committed_version, version, 1.0))

    def _adopt(self, head: Head) -> None:
        """Take the plan of a trainer that has another one than this rank was given."""
        if head.plan == self._part.plan_digest:
            return
        if self._adopt_plan is None:
            if self._ended is None or head.kind != CONNECT:
                raise SessionError(
                    f"{self.rank_name}: a trainer with another plan has taken over, and this engine takes no plan but its"
                    " own: give GenerationEndpoint adopt_plan=, or make a new endpoint with the plan that fetch_plan() returns"
                )
            return  # "hello" says on all ranks which plan each of them has
        plan = fetch_plan(self._store_address, self._options, digest=head.plan or None)
        self._part, self._binding, self._bound = self._adopt_plan(plan), None, None
        assert self._attendance is not None
        self._attendance.world = self._record.world = self._part.seats
        self._bind_first()

    def _called(self, word: dict[str, Any]) -> Call:
        """The call of the next refit, connected with its members. A store that starts anew before it costs no refit."""
        attendance = self._attendance
        assert attendance is not None
        if self._connection is not None and self._connection.group.is_broken:
            self._disconnect()  # the last refit went well, although ranks could not be asked by the end of it
        if self._connection is None:
            self._forget_gone()

        # A generation rank is written to, so nothing of it may be wrong: it looks before it waits for the trainer.
        stale = self._stale_tensors() if self.world == "gen" else []

        def make_word() -> dict[str, Any]:
            if stale:
                raise stale.pop()
            if self.world == "train" and (bound := self._whole_bound()) is not None:
                bound.check_in_place(self._writes.tensors)  # the rest is checked while bytes move
            wants_all = word["everything"] or self.committed_version is None
            return {**self._word(), **word, "everything": wants_all}

        assert self._store is not None
        while True:
            with suppress(StoreRestarted):  # nothing has moved: all say again what they said
                if self._store.needs_reopening:
                    self._store.reopen()
                return self._meet(attendance, make_word)

    def _meet(self, attendance: Leader | Follower, make_word: Callable[[], dict[str, Any]]) -> Call:
        """The next attempt to refit that calls this rank. Raises StoreRestarted where what was said is gone."""
        if isinstance(attendance, Leader):
            self._keep_plan_published()
            return attendance.call(attendance.begin(REFIT), make_word, self._options.timeout_s, self._epoch)
        attendance.say_ready(WAITS)
        while True:
            try:
                head = attendance.await_head(self._options.timeout_s, "refit", needs_company=True)
            except SessionError as error:
                self._raise_if_asked_for_traces(error)
                raise
            if head.kind == CONNECT:
                self._follow_connect(attendance, head)
                continue
            if self.world == "gen":
                self._adopt(head)  # of a trainer that connected while this rank was not here, or was busy
            if (call := attendance.follow(head, make_word)) is not None:
                return call

    def _keep_plan_published(self) -> None:
        """Publish the plan again where the store has started anew; the refit itself finds out what else is wrong there."""
        store = self._store
        if store is None or store.instance == self._published_at or not isinstance(self._part, RankOfPlan):
            return
        with suppress(DistError, StoreRestarted, SessionError):
            publish_again(self._part.plan, store)
            self._published_at = store.instance

    def _raise_if_asked_for_traces(self, error: SessionError) -> None:
        """Say so where no refit has begun because a trainer that started again waits for this rank's trace."""
        store = self._store
        with suppress(DistError, StoreRestarted, ValueError):
            if store is not None and self.world == "gen" and awaits_trace(store, self.rank_name):
                raise SessionError(
                    f"{self.rank_name}: a trainer has started again, of a model without layout rules, and asks how its"
                    f" engines load it: {CONNECT_AGAIN}; before that: {error}"
                ) from error

    def _connect(self, call: Call) -> Connection:
        """The connection with the members of a call: the one that stands, or a new one."""
        connection, attendance = self._connection, self._attendance
        assert attendance is not None
        if connection is not None and connection.epoch == call.epoch:
            return connection
        self._disconnect()
        options, rendezvous = self._options, self._rendezvous(f"e/{call.epoch}", call)
        start = time.perf_counter()
        with gc_paused(), self._record.phase("connect"), Published(rendezvous, "hello", self._fail):
            schedule, transport, bound = self._bound_for(call.replicas, call.places)
            hello = {
                "digest": schedule.digest,
                "transport": transport.name,
                "bucket_bytes": options.bucket_bytes,
                "checksums": options.checksums,
                "retries": options.retries,
                "commit": options.commit,
                "train_ranks": schedule.train_ranks,
                "gen_ranks": schedule.gen_ranks,
            }
            words = rendezvous.gather("hello", hello, parse=parse_word)
        check_alike(words)
        kept = self._kept
        kept.meet(call.processes)
        with gc_paused(), self._record.phase("connect"), Published(rendezvous, "connected", self._fail):
            connection = connect_members(
                rendezvous, call.epoch, call.replicas, schedule, transport, bound, options, kept
            )
            try:
                agree_on_executed(rendezvous, connection.programs)
            except BaseException:
                connection.close()
                raise
        kept.sweep()
        self._connection = connection
        self._record.connected(call.epoch, len(call.members), call.replicas, transport.name, start)
        if bound is not None:
            self._writes = bound.check_fresh(self._live_tensors())
        return connection

    def _rendezvous(self, prefix: str, call: Call) -> Rendezvous:
        """This rank's place among the members of a call, under keys that begin with `prefix`."""
        store, attendance = self._store, self._attendance
        assert store is not None and attendance is not None
        lost = partial(attendance.lost, call.members, call.processes)
        return Rendezvous(
            store.under(prefix), self.rank_name, call.members, timeout_s=self._options.timeout_s, lost=lost
        )

    def _disconnect(self, *, failed: bool = False) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(failed=failed)

    def _bind_first(self) -> None:
        """Check the layout, and bind for the replicas that are planned: an error here needs no meeting."""
        seats = self._part.seats
        planned = tuple(range(seats.replicas))
        own = seats.replica_of(self.rank_name) if self.world == "gen" else 0
        with gc_paused(), self._record.phase("bind"):
            if self._check_layout is not None:
                self._check_layout()
            _, _, bound = self._bound_for(planned if own in planned else (own,))
        self._place = own_place(self.rank_name, None if bound is None else bound.device)

    def _bound_for(self, replicas: tuple[int, ...], places: tuple[str, ...] = ()) -> _Binding:
        """This rank's schedule among these replicas, bound; the last one is kept, and its tensors serve for others."""
        among = replicas, places if decide(places, self._part.seats.train_ranks) else ()
        if self._binding is None or self._binding[0] != among:
            schedule = self._part.schedule(*among)
            missing = None if self._moves_by_name else self.by_name
            transport, bound = bind_part(
                schedule, self._live_tensors(), self._options, missing, self._bound, self._kept
            )
            self._bound = bound
            if self._staged is not None:
                if bound is not None:
                    bound = self._staged.take_place_of(bound)
                by_name = self._part.bytes_by_name(everything=bound is None)
                require_memory(self.rank_name, torch.device("cpu"), by_name, "tensors that move by name")
            self._binding = among, (schedule, transport, bound)
        return self._binding[1]

    # --- tensors ------------------------------------------------------------------------------------------------------

    def _live_tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors() if callable(self._tensors) else self._tensors

    def _whole_bound(self) -> BoundSchedule | None:
        """What a refit of everything moves to or from this rank; None without a connection, and under golden."""
        return None if self._connection is None else self._connection.programs[0].bound

    def _stale_tensors(self) -> list[Exception]:
        """The error of a live model that has changed since it was bound, to be raised when all ranks can hear of it.

        Notes tensors that are other objects by now.
        """
        if (bound := self._whole_bound()) is None:
            return []
        try:
            live = bound.check_fresh(self._live_tensors())
        except Exception as error:
            return [error]
        if any(map(is_not, live.tensors, self._writes.tensors)):
            self._writes = live
        return []

    # --- failure ------------------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        self._failure = f"{error}"
        self._record.failed(error)
        if isinstance(self._attendance, Leader):
            self._attendance.note_failure(cause_of(self.rank_name, error), connecting=self._connection is None)
        elif self._attendance is not None:
            self._attendance.forget_gone()
        self._disconnect(failed=True)
        self._forget_gone()

    def _forget_gone(self) -> None:
        """Let go of the memory of ranks that are gone: a trainer that starts again needs it."""
        seats = self._store.seats if self._store is not None else {}
        self._kept.meet({name: seat.facts.get("process") for name, seat in seats.items() if seat.status == "here"})

    def _end(self, error: BaseException) -> None:
        """Leave a session that this rank could not join, and say why."""
        self._ended = f"the session ended with: {error}"
        if self._attendance is not None:
            with suppress(Exception):
                self._attendance.say_farewell(cause_of(self.rank_name, error))
        self.close()

    def _set_state(self, state: WeightState) -> None:
        self._state = self._record.state = state
        if self._on_state is not None:
            self._on_state(state)
