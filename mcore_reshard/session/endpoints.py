"""Live refits: every training rank and every generation rank holds an endpoint, and they all refit together.

    train = TrainEndpoint(schedule, parameters, store="10.0.0.1:29600", export=bridge_export)
    train.prepare()                      # once: bind, meet the other ranks, compare plans, connect
    train.refit(version=step)            # after each optimizer step, on every rank of both worlds

A version is committed when every member of the refit has acknowledged it. If any member fails, all raise the same cause.
The session goes on: the next refit connects anew, without replicas that are gone, and repairs what the failed one mixed.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from operator import is_not
from threading import RLock
from typing import Any
from uuid import uuid4

import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule, WriteCounts
from mcore_reshard.kernels.cuda.streams import in_callers_context
from mcore_reshard.kernels.errors import RefitError, SessionError
from mcore_reshard.kernels.events import log_event
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.address import store_address
from mcore_reshard.kernels.rendezvous.exchange import Failure
from mcore_reshard.kernels.rendezvous.polling import HEAD_START_S, LOOK_S, NOTICE_S, DeadlineThread
from mcore_reshard.kernels.rendezvous.rendezvous import Rendezvous, SessionFailed
from mcore_reshard.kernels.rendezvous.store import SessionStore, connect_store
from mcore_reshard.kernels.transports.base import StageReport, Transport
from mcore_reshard.kernels.transports.broadcast import broadcast, receive
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import Schedule, World

from .agreement import agreed_kv_scales, check_alike, check_kv_names, kv_scales_word, parse_word
from .attempts import CONNECT, PROTOCOL, REFIT, Call, Head, next_version
from .connection import EVERYTHING as EVERYTHING
from .connection import TRAINABLE as TRAINABLE
from .connection import Connection, Program, bind_part, connect_members
from .executed_check import agree_on_executed
from .follower import Follower
from .goodbye import say_goodbye_at_exit
from .leader import Leader
from .newcomers import Rank, catch_up, serve_newcomers
from .part import Part, RankOfPlan, part_of
from .plan_exchange import fetch_plan
from .record import Record
from .staged import STAGED, StagedTensors, require_memory
from .state import WeightState, complete, intact, mixed, name_state
from .trace_events import write_trace
from .wait_line import WaitLine
from .whole_tensors import NamedTensors, check_stream, exhaust

_CLOSED = "closed"
try:
    _PACKAGE = version_of("mcore-reshard")
except PackageNotFoundError:  # a plain checkout
    _PACKAGE = "unknown"
# Failures of a machine or a network, after which another try may succeed; others need somebody to mend something.
_PASSING = {"DeadlineError", "PeerLostError", "PeerGone", "ChecksumError", "TransferError"}

_Binding = tuple[Schedule, Transport, BoundSchedule | None]
LiveTensors = Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]]
Export = Callable[[Sequence[str] | None], NamedTensors]
SetKvScales = Callable[[Mapping[str, float]], Any]
KvScaleNames = Callable[[], Collection[str]]


@dataclass(frozen=True, slots=True)
class RefitReport:
    """What one rank did in one committed refit."""

    version: int
    transport: str  # one or several, as in "direct+nccl"
    moved: str  # EVERYTHING, or TRAINABLE
    nbytes: int  # moved by the plan, sent or received by this rank
    misc_bytes: int  # of whole tensors exported and loaded by name: the misc route, or everything under golden
    seconds: float  # from the call to the commit
    stages: tuple[StageReport, ...]
    state: str  # of this rank's weights, as in "complete(3)"
    replicas: tuple[int, ...]  # of the engine, that took part
    attempts: int  # 1, and one more for each that failed and was tried again


class RefitHandle:
    """A refit whose bytes have been read, and whose outcome is still to come."""

    def __init__(self, outcome: Future[RefitReport]) -> None:
        self._outcome = outcome

    def done(self) -> bool:
        return self._outcome.done()

    def wait(self) -> RefitReport:
        """The report, once all members have acknowledged the version. Raises what `refit` would."""
        return self._outcome.result()


@dataclass
class _Attempt:
    """What one refit has reached on this rank."""

    call: Call
    version: int
    start: float
    written_by_name: int = 0  # bytes
    share_by_name: float = 0.0  # of the tensors that move by name
    kept: list[tuple[str, torch.Tensor]] | None = None  # staged: tensors that move by name, until all have everything
    kept_bytes: int = 0
    committed: bool = False


class _Endpoint(ABC):
    """One rank's end of a session: the part that TrainEndpoint and GenerationEndpoint share."""

    world: World
    by_name: str  # the argument with the function that moves whole tensors by name
    _moves_by_name: bool  # whether that function was given
    _before_reads: Callable[[], Any] | None = None  # on training ranks
    _after_direct_writes: Callable[[], Any] | None = None  # this and the next two: on generation ranks
    _set_kv_scales: SetKvScales | None = None
    _kv_scale_names: KvScaleNames | None = None

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
        self._attendance: Leader | Follower | None = None
        self._binding: tuple[tuple[int, ...], _Binding] | None = None  # and the replicas that it is for
        self._connection: Connection | None = None
        self._ended: str | None = None  # why no refit is possible any more
        self._failure: str | None = None  # of the last attempt, if it failed
        self._bulk_began = False  # of this attempt
        self._writes = WriteCounts((), ())  # of the live tensors, before this attempt
        self._turn = RLock()  # held while weights are read or written
        self._retries = options.retries  # of the refit under way
        self._pending: Future[RefitReport] | None = None  # a refit whose outcome is still to come

    def prepare(self, *, timeout_s: float | None = None) -> None:
        """Bind, meet all other ranks, compare plans and options, and connect. Call once, on every rank.

        A replica that comes to a session under way binds, and takes part from its next `refit` on.

        `timeout_s` (by default that of the options) limits the wait for ranks that are still starting.
        Raises `BindError`, `TransportUnavailable` or `SessionError`; if one rank raises, all do.
        """
        if self._store or self._ended:
            reason = self._ended or "already prepared"
            raise SessionError(f"{self.rank_name}: {reason}; call prepare() once, on a new endpoint")
        self._ended = "prepare() failed"
        timeout_s = self._options.timeout_s if timeout_s is None else timeout_s
        try:
            with self._record.attempt("prepare"), WaitLine(self.rank_name, self._absent):
                self._enter()
                self._bind_first()
                attendance = self._attendance
                if isinstance(attendance, Leader):
                    with self._record.phase("meet"):
                        call = attendance.call(attendance.begin(CONNECT), self._word, timeout_s, self._epoch)
                    self._connect(call)
                    attendance.committed(call.replicas)
                else:
                    assert attendance is not None
                    with self._record.phase("meet"):
                        head = attendance.await_head(timeout_s, "begin a session")
                    self._follow_connect(attendance, head)
                    self._welcome_newcomers()
        except BaseException as error:
            self._end(error)
            raise
        self._ended = None

    def refit(
        self,
        version: int | None = None,
        *,
        kv_scales: Mapping[str, float] | None = None,
        everything: bool = False,
        rollback: bool = False,
    ) -> RefitReport:
        """Move the weights of `version` from the trainer to the engine; return once every member has acknowledged it.

        If the plan has frozen parameters, the first refit of a session moves them too, and later ones leave them out.
        `everything`, given on any rank, moves them again: for an engine that has lost its weights.

        `kv_scales` are calibrated scales of the engine's KV cache, by checkpoint name, as in
        `model.layers.0.self_attn.attn.k_scale`. Give them on training rank 0; other ranks may be given the same.

        All ranks of both worlds must call it with one version, larger than the last; ranks of the engine may leave it
        out, and take what comes. `rollback` on the trainer allows a version that is not larger, after a restart from an
        older checkpoint. Else all ranks raise `VersionError`. They raise `KvScalesError` for scales that no rank can take.
        After these two errors nothing has moved. Each wait ends with an error after `timeout_s`. Training weights may change
        again as soon as this returns.

        After any other error `state` says what the engine holds. The next refit repairs it; `retries` of the options makes
        this call try again by itself, where a machine or the network failed.
        """
        return self._refit(version, kv_scales, everything, rollback, in_background=False).result()

    def _refit(
        self,
        version: int | None,
        kv_scales: Mapping[str, float] | None,
        everything: bool,
        rollback: bool,
        in_background: bool,
    ) -> Future[RefitReport]:
        if self._attendance is None:
            raise SessionError(f"{self.rank_name}: no refit is possible: {self._ended or 'call prepare() first'}")
        self.await_outcome()
        if self._store is not None and self._store.needs_reopening:
            self._store.reopen()
        word = {"version": version, "everything": everything, "rollback": rollback, **kv_scales_word(kv_scales)}
        word["in_background"] = in_background
        start = time.perf_counter()
        attempts = 1
        while True:
            self._retries = self._options.retries
            try:
                with self._record.attempt("refit", attempts):
                    with self._record.phase("meet"):
                        call = self._called(
                            word
                        )  # not in turn: a rank that waits for the trainer may offer its weights
                    with self._turn:
                        return self._attempt(call, start, attempts, in_background)
            except Exception as error:
                if attempts > self._retries or not isinstance(error, RefitError) or not _may_pass(error):
                    if self.world == "gen":
                        name_state(error, self._state, self.rank_name)
                    raise
                attempts += 1

    def await_outcome(self) -> None:
        """Wait for a refit that `refit_async` began, if its outcome is still to come. Its error is its handle's."""
        if self._pending is not None:
            wait([self._pending])
            self._pending = None

    @property
    def state(self) -> WeightState:
        """What this rank's tensors hold. A training rank's are its own: always intact, or complete."""
        return self._state

    @property
    def scratch_bytes(self) -> int:
        """Memory that the session holds besides the model: of the transport, and of staged tensors."""
        staged = self._staged.nbytes if self._staged is not None else 0
        return staged + (self._connection.scratch_bytes if self._connection else 0)

    @property
    def failure(self) -> str | None:
        """Why the last attempt failed, if it did."""
        return self._failure if self._ended in {None, _CLOSED} else self._ended

    def metrics(self) -> dict[str, Any]:
        """What this rank has done so far, as plain data; `prometheus_text` of session/metrics.py makes text of it.

        Counts of refits, attempts and epochs; bytes by route and transport; seconds by phase; the weights' state; the
        status of all other ranks and the Unix time of its last change; on training rank 0 the lag of each replica.
        """
        attendance = self._attendance
        return self._record.metrics(attendance.lags if isinstance(attendance, Leader) else None)

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write this rank's last attempts, TRACED_ATTEMPTS at most, as a chrome trace. Raises OSError."""
        write_trace(path, self._record)

    def close(self) -> None:
        """Say goodbye, and free connections and scratch. Members that wait for this rank get an error. May be called twice.

        After a failure it waits 1 s at most for the transport to end.
        """
        with suppress(Exception):
            self.await_outcome()
        self._ended = self._ended or _CLOSED
        self._record.leaves()
        store, self._store, self._attendance = self._store, None, None
        self._disconnect()
        self._binding = None
        if self._staged is not None:
            self._staged.free()
        if store is not None:
            with suppress(Exception):
                store.leave_seat()
            store.close()

    @abstractmethod
    def _move_by_name(
        self, connection: Connection, names: Sequence[str] | None, attempt: _Attempt, afterwards: ExitStack
    ) -> int:
        """Export or load the tensors `names`, or all if None; returns their bytes. `afterwards` runs after the outcome.

        In a staged session, a generation rank keeps them until `_copy_in`.
        """

    @abstractmethod
    def _copy_in(self, staged: StagedTensors, program: Program, attempt: _Attempt) -> None:
        """Put everything that a staged refit has brought where the engine reads it."""

    # --- meeting ---------------------------------------------------------------------------------------------------

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
        say_goodbye_at_exit(store)
        self._record.enters(store)
        common = (store, self.rank_name, seats, self._process, options.timeout_s)
        if self.rank_name == "train:0":
            leader = Leader(*common, plan=self._part.plan_digest, package=_PACKAGE)
            leader.max_lag = options.max_lag
            self._attendance = leader
        else:
            self._attendance = Follower(*common)

    def _word(self) -> dict[str, Any]:
        """What every rank says in every attempt."""
        connection = self._connection
        return {"epoch": connection.epoch if connection else None, "committed": self.committed_version}

    def _epoch(self, replicas: tuple[int, ...]) -> str | None:
        connection = self._connection
        return connection.epoch if connection is not None and connection.replicas == replicas else None

    def _absent(self) -> list[str]:
        """Planned ranks that have no seat, as the store last said. It asks nobody."""
        seats = self._store.seats if self._store is not None else {}
        here = {name for name, seat in seats.items() if seat.status == "here"}
        planned = self._part.seats
        return [seat for seat in planned.members(range(planned.replicas)) if seat not in here]

    def _follow_connect(self, follower: Follower, head: Head) -> None:
        """Take part in an attempt to connect. A replica that comes later only binds: the next refit connects it."""
        self._adopt(head)
        if head.kind != CONNECT:
            follower.skip(head)
        else:
            with self._record.phase("meet"):
                call = follower.follow(head, self._word)
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
                    version = catch_up(rank, self._after_direct_writes)
            except SessionError as error:  # the next refit brings everything
                self._set_state(mixed(None, None, 1.0))
                said = {"rank": self.rank_name, "session": store.session, "cause": f"{error}"}
                log_event("not_caught_up", logging.WARNING, **said)
            else:
                if version is not None:
                    self.committed_version = version
                    self._set_state(complete(version))
        serve_newcomers(rank, self._turn, lambda: self._state)

    def _adopt(self, head: Head) -> None:
        """Take the plan of a trainer that has another one than this rank was given."""
        if head.plan == self._part.plan_digest or self._adopt_plan is None:
            return  # where plans differ still, "hello" says so on all ranks
        plan = fetch_plan(self._store_address, self._options)
        self._part, self._binding = self._adopt_plan(plan), None
        assert self._attendance is not None
        self._attendance.world = self._record.world = self._part.seats
        self._bind_first()

    def _called(self, word: dict[str, Any]) -> Call:
        """The call of the next refit, connected with its members."""
        attendance = self._attendance
        assert attendance is not None

        # A generation rank is written to, so nothing of it may be wrong: it looks before it waits for the trainer.
        stale = self._stale_tensors() if self.world == "gen" else []

        def make_word() -> dict[str, Any]:
            if stale:
                raise stale.pop()
            if self.world == "train" and (bound := self._whole_bound()) is not None:
                # The rest is checked while bytes move: walking a model of 12,627 tensors takes 50 ms.
                self._writes = bound.check_in_place(self._writes)
            wants_all = word["everything"] or self.committed_version is None
            return {**self._word(), **word, "everything": wants_all}

        if isinstance(attendance, Leader):
            return attendance.call(attendance.begin(REFIT), make_word, self._options.timeout_s, self._epoch)
        while True:
            head = attendance.await_head(self._options.timeout_s, "begin a refit")
            if head.kind == CONNECT:
                self._follow_connect(attendance, head)
            elif (call := attendance.follow(head, make_word)) is not None:
                return call

    def _connect(self, call: Call) -> Connection:
        """The connection with the members of a call: the one that stands, or a new one."""
        connection, attendance = self._connection, self._attendance
        assert attendance is not None
        if connection is not None and connection.epoch == call.epoch:
            return connection
        self._disconnect()
        store, options = self._store, self._options
        assert store is not None
        rendezvous = Rendezvous(
            store.under(f"e/{call.epoch}"),
            self.rank_name,
            call.members,
            timeout_s=options.timeout_s,
            lost=partial(attendance.lost, call.members, call.processes),
        )
        start = time.perf_counter()
        with self._record.phase("connect"), _Published(rendezvous, "hello", self._fail):
            schedule, transport, bound = self._bound_for(call.replicas)
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
        with self._record.phase("connect"), _Published(rendezvous, "connected", self._fail):
            connection = connect_members(rendezvous, call.epoch, call.replicas, schedule, transport, bound, options)
            try:
                agree_on_executed(rendezvous, connection.programs)
            except BaseException:
                connection.close()
                raise
        self._connection = connection
        self._record.connected(call.epoch, len(call.members), call.replicas, transport.name, start)
        if bound is not None:
            self._writes = bound.check_fresh(self._live_tensors())
        return connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _bind_first(self) -> None:
        """Check the layout, and bind for the replicas that are planned: an error here needs no meeting."""
        seats = self._part.seats
        planned = tuple(range(seats.replicas))
        own = seats.replica_of(self.rank_name) if self.world == "gen" else 0
        with self._record.phase("bind"):
            if self._check_layout is not None:
                self._check_layout()
            self._bound_for(planned if own in planned else (own,))

    def _bound_for(self, replicas: tuple[int, ...]) -> _Binding:
        """This rank's schedule among these replicas, bound; the last one is kept."""
        if self._binding is None or self._binding[0] != replicas:
            schedule = self._part.schedule(replicas)
            missing = None if self._moves_by_name else self.by_name
            transport, bound = bind_part(schedule, self._live_tensors(), self._options, missing)
            if self._staged is not None:
                if bound is not None:
                    bound = self._staged.take_place_of(bound)
                by_name = self._part.bytes_by_name(everything=bound is None)
                require_memory(self.rank_name, torch.device("cpu"), by_name, "tensors that move by name")
            self._binding = replicas, (schedule, transport, bound)
        return self._binding[1]

    # --- one attempt -----------------------------------------------------------------------------------------------

    def _attempt(self, call: Call, start: float, attempts: int, in_background: bool) -> Future[RefitReport]:
        if any(said.get("in_background") for said in call.words.values()):
            self._retries = 0  # of this refit: the trainer's weights may have changed by the time that it fails
        version = next_version(call.words, self.rank_name)
        connection = self._connect(call)
        attempt = _Attempt(call, version, start)
        self._bulk_began = False
        attendance, store = self._attendance, self._store
        assert attendance is not None and store is not None
        rendezvous = Rendezvous(
            store.under(f"a/{call.attempt}"),
            self.rank_name,
            call.members,
            timeout_s=self._options.timeout_s,
            lost=partial(attendance.lost, call.members, call.processes),
        )
        wants_all = any(said.get("everything", True) for said in call.words.values())
        program = connection.programs[0 if wants_all else -1]
        all_scales = agreed_kv_scales(call.words, "train:0")
        own_scales = self._own_kv_scales(rendezvous, "kv_scales", all_scales) if all_scales else {}
        names, fail = program.names, partial(self._fail_attempt, connection, program, attempt)
        if names:  # exports are collectives: no rank may enter one while another's transfer has failed
            with _Published(rendezvous, "bulk", fail):
                with self._record.phase("bulk"):
                    stages = self._move_bulk(connection, program, rendezvous, "bulk")
                with self._record.phase("agree"):
                    rendezvous.gather("bulk", {})
        is_staged = self._options.commit == STAGED
        arrived = STAGED if is_staged else "commit"
        vote = partial(rendezvous.decide, "commit", connection.group.settle, partial(self._commit, attempt))
        decide = self._record.timed("decide", vote)
        afterwards = ExitStack()
        with afterwards:
            with _Published(rendezvous, arrived, fail):
                if not names:
                    with self._record.phase("bulk"):
                        stages = self._move_bulk(connection, program, rendezvous, arrived)
                misc_bytes = 0
                if names is None or names:
                    with self._record.phase("misc"):
                        misc_bytes = self._move_by_name(connection, names, attempt, afterwards)
                if is_staged and not in_background:
                    with self._record.phase("agree"):
                        rendezvous.gather(STAGED, {})
            with _Published(rendezvous, "commit", fail):
                if self._staged is not None:
                    with self._record.phase("copy_in"):
                        self._copy_in(self._staged, program, attempt)
                with self._record.phase("derive"):
                    if self._after_direct_writes is not None:
                        self._after_direct_writes()
                    if own_scales and self._set_kv_scales is not None:
                        self._set_kv_scales(own_scales)
                if not in_background:
                    decide()

        def report() -> RefitReport:
            nbytes = sum(stage.nbytes for stage in stages)
            moved_by = (program.executor or connection.transport).name
            seconds = time.perf_counter() - start
            state, replicas = str(self._state), call.replicas
            report = RefitReport(
                version, moved_by, program.moved, nbytes, misc_bytes, seconds, stages, state, replicas, attempts
            )
            self._record.committed(report, connection.epoch, "golden" if names is None else "gloo")
            return report

        outcome: Future[RefitReport] = Future()
        if not in_background:
            outcome.set_result(report())
            return outcome

        def await_outcome() -> RefitReport:
            if is_staged:
                with _Published(rendezvous, STAGED, fail):
                    rendezvous.gather(STAGED, {})
            with _Published(rendezvous, "commit", fail):
                decide()
            return report()

        device = None if program.bound is None else program.bound.device
        self._pending = DeadlineThread("outcome").start(in_callers_context(await_outcome, device))
        return self._pending

    def _commit(self, attempt: _Attempt) -> None:
        """All members have acknowledged the version."""
        attempt.committed = True
        self.committed_version = attempt.version
        self._failure = None
        if isinstance(self._attendance, Leader):
            self._attendance.committed(attempt.call.replicas)
        self._set_state(complete(attempt.version))

    def _fail_attempt(self, connection: Connection, program: Program, attempt: _Attempt, error: BaseException) -> None:
        """Note what a failed attempt has left, and that its connection is of no use any more."""
        if not attempt.committed and self.world == "gen":
            share = self._written_share(program, attempt)
            if share > 0:
                self._set_state(mixed(self.committed_version, attempt.version, max(share, self._state.share)))
            elif self._state.kind != "mixed":  # else it stays the mixture that it was
                self._set_state(intact(self.committed_version))
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = f"{error}"
        self._record.failed(error)
        if isinstance(self._attendance, Leader):
            failure = error.failure if isinstance(error, SessionFailed) else Failure.of(self.rank_name, error)
            self._attendance.note_failure(failure, connecting=self._connection is None)
        self._disconnect()

    def _end(self, error: BaseException) -> None:
        """Leave a session that this rank could not join, and say why."""
        self._ended = f"the session ended with: {error}"
        if self._attendance is not None:
            with suppress(Exception):
                cause = error.failure if isinstance(error, SessionFailed) else Failure.of(self.rank_name, error)
                self._attendance.say_farewell(cause)
        self.close()

    def _set_state(self, state: WeightState) -> None:
        self._state = self._record.state = state
        if self._on_state is not None:
            self._on_state(state)

    def _written_share(self, program: Program, attempt: _Attempt) -> float:
        """Of the bytes that this refit moves to this rank, how many may have been written by now."""
        if self._staged is not None:
            in_bulk = 0 if program.bound is None else self._staged.bytes_of(program.bound)
            written = self._staged.copied_bytes + attempt.written_by_name
            return written / (in_bulk + attempt.kept_bytes) if written else 0.0
        if program.bound is None or program.executor is None:
            return 1.0 if attempt.written_by_name else 0.0
        total = program.bound.nbytes
        written = min(program.executor.written_bytes, total) if self._bulk_began else 0  # else those of the last refit
        if attempt.share_by_name:
            written += attempt.written_by_name
            total += int(attempt.written_by_name / attempt.share_by_name)
        elif program.names:
            return written / total * 0.999 if total else 0.0  # something is left to load
        return written / total if total else 0.0

    def _move_bulk(
        self, connection: Connection, program: Program, rendezvous: Rendezvous, phase: str
    ) -> tuple[StageReport, ...]:
        """Run a program's transfers, on a thread; none under golden.

        The wait ends once the store reports the failure of any rank: gloo may leave a sender waiting for a lost peer.
        """
        bound, executor, whole = program.bound, program.executor, connection.programs[0].bound
        if bound is None or executor is None or whole is None or program.checks is None:
            return ()
        writes = self._writes
        if self._staged is not None:
            self._staged.begin(bound)
        if self._before_reads is not None:
            with self._record.phase("derive"):
                self._before_reads()
            writes = self._writes = WriteCounts.of(writes.tensors)
        self._bulk_began = True
        stale: list[Exception] = []
        run = connection.thread.start(in_callers_context(program.checks.around(executor.run), bound.device))
        try:
            if self.world == "train":
                wait([run], HEAD_START_S)
                stale = self._stale_tensors()
            while not wait([run], LOOK_S).done:
                failure = rendezvous.failure(phase)
                if failure and not wait([run], NOTICE_S).done:
                    raise SessionFailed(failure)
            stages = run.result()
        finally:
            del run  # it keeps its error, whose traceback would keep it in turn
        if self.world == "gen":
            bound.zero_padding()
            return stages
        if stale:
            raise stale.pop()
        whole.check_unwritten(writes)
        if self._writes is not writes:
            whole.check_unwritten(self._writes)
        return stages

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

    @cached_property
    def _pairs(self) -> Mapping[str, tuple[str, str]]:
        return self._part.schedule(self._connection.replicas if self._connection else (0,)).pair_names()

    def _own_kv_scales(self, rendezvous: Rendezvous, phase: str, scales: Mapping[str, float]) -> dict[str, float]:
        """This rank's part of `scales`. Collective: it raises unless each of them belongs to some generation rank."""
        with _Published(rendezvous, phase, self._fail):
            names = None if self._kv_scale_names is None else self._kv_scale_names()
            lacks = None if names is None else [number for number, name in enumerate(scales) if name not in names]
            words = rendezvous.gather(phase, {"lacks": lacks} if self.world == "gen" else {}, parse=parse_word)
        check_kv_names(words, scales)
        return {name: scale for name, scale in scales.items() if name in (names or ())}

    def _live_tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors() if callable(self._tensors) else self._tensors


class TrainEndpoint(_Endpoint):
    """A training rank's end of a session.

    - `tensors`: the rank's parameters by the names of `schedule.tensors`, or a function that returns them, for a model
      that may replace its parameters.
    - `export(names)` yields (HF name, whole tensor) for each of `names`, or for the whole model if None. All training
      ranks call it together, so it may run collectives. It must yield everything on training rank 0.
    - `schedule`: the rank's schedule, or a `RankOfPlan`, with which replicas of the engine may come and go.
    - `store`: what `serve_store` returned, or its "host:port".
    - `before_reads()` derives some of `tensors` from others. Each refit calls it once all ranks have begun, but not under
      golden, which exports. All training ranks call it together, so it may run collectives.
    - `check_layout()` raises where the rank keeps its tensors otherwise than the plan says; `prepare` calls it.
    - `rank_name` is as in "train:0"; `committed_version` the last version that all ranks acknowledged, None before it.

    On CUDA, weights must be complete on the current stream of their device when `refit` is called. A generation rank's
    current stream must be done with the old weights, or wait for the streams that use them. When `refit` returns, all
    streams see the new bytes.
    """

    world: World = "train"
    by_name = "export"

    def __init__(
        self,
        schedule: Schedule | Part,
        tensors: LiveTensors,
        *,
        store: Any,
        export: Export | None = None,
        before_reads: Callable[[], Any] | None = None,
        check_layout: Callable[[], None] | None = None,
        options: Options = Options(),  # noqa: B008
    ) -> None:
        super().__init__(schedule, tensors, store, options, check_layout)
        self._export = export
        self._before_reads = before_reads
        self._moves_by_name = export is not None

    def refit_async(
        self,
        version: int,
        *,
        kv_scales: Mapping[str, float] | None = None,
        everything: bool = False,
        rollback: bool = False,
    ) -> RefitHandle:
        """As `refit`, but return once this rank's bytes have been read: weights may change, the outcome is to come.

        An error before that is raised here, one after it by the handle's `wait`. The next refit waits for this one.
        """
        return RefitHandle(self._refit(version, kv_scales, everything, rollback, in_background=True))

    def _move_by_name(
        self, connection: Connection, names: Sequence[str] | None, attempt: _Attempt, afterwards: ExitStack
    ) -> int:
        assert self._export is not None, "prepare() has checked it"
        exported = iter(self._export(names))
        # An export runs collectives: a rank that left it half-way would hang the others.
        afterwards.callback(exhaust, exported)
        if self.rank_name == "train:0":
            group, tree = connection.group, connection.tree()
            return broadcast(group, tree, check_stream(names, exported, self._pairs, "export yielded"))
        exhaust(exported)
        return 0

    def _copy_in(self, staged: StagedTensors, program: Program, attempt: _Attempt) -> None:
        raise NotImplementedError("only generation ranks stage")


class GenerationEndpoint(_Endpoint):
    """A generation rank's end of a session.

    - `tensors`: the live engine's parameters by the names of `schedule.tensors`, written in place. A parameter that
      nothing in the plan fills is refused.
    - `load_weights(pairs)`: the engine's own loader. It gets (HF name, whole CPU tensor) pairs and must read them all.
    - `after_direct_writes()` derives tensors from new weights. Each refit calls it once all weights are there, under
      golden too.
    - `kv_scale_names()`: the names of this rank's scales of the KV cache. `set_kv_scales(scales)` puts scales of these
      names where attention reads them. A refit that brings scales calls it last.
    - `on_state(state)`: called at every change of `state`, on the thread that refits. An engine whose state is mixed must
      not generate.
    - `state`: that of an earlier endpoint of these tensors. What it left mixed is mixed until a refit succeeds.
    - `adopt_plan(plan)`: this rank's part in the plan of a trainer that started anew, perhaps on another mesh. It raises
      where the engine does not fit. Without it, such a trainer is refused.

    The rest is as for `TrainEndpoint`.
    """

    world: World = "gen"
    by_name = "load_weights"

    def __init__(
        self,
        schedule: Schedule | Part,
        tensors: LiveTensors,
        *,
        store: Any,
        load_weights: Callable[[NamedTensors], Any] | None = None,
        after_direct_writes: Callable[[], Any] | None = None,
        set_kv_scales: SetKvScales | None = None,
        kv_scale_names: KvScaleNames | None = None,
        check_layout: Callable[[], None] | None = None,
        on_state: Callable[[WeightState], Any] | None = None,
        adopt_plan: Callable[[Plan], Part] | None = None,
        state: WeightState | None = None,
        options: Options = Options(),  # noqa: B008
    ) -> None:
        if (set_kv_scales is None) != (kv_scale_names is None):
            raise ValueError("give set_kv_scales and kv_scale_names together: a rank gets the scales that it names")
        super().__init__(schedule, tensors, store, options, check_layout, on_state, adopt_plan)
        if state is not None and state.kind == "mixed":
            self._state = self._record.state = state
        self._load_weights = load_weights
        self._moves_by_name = load_weights is not None
        self._after_direct_writes = after_direct_writes
        self._set_kv_scales = set_kv_scales
        self._kv_scale_names = kv_scale_names

    def _move_by_name(
        self, connection: Connection, names: Sequence[str] | None, attempt: _Attempt, afterwards: ExitStack
    ) -> int:
        arriving = check_stream(names, receive(connection.group, connection.tree()), self._pairs, "there arrived")
        if self._staged is None:
            self._load(arriving, names, attempt)
            return attempt.written_by_name
        attempt.kept = [*arriving]
        attempt.kept_bytes = sum(tensor.nbytes for _, tensor in attempt.kept)
        return attempt.kept_bytes

    def _copy_in(self, staged: StagedTensors, program: Program, attempt: _Attempt) -> None:
        if program.bound is not None:
            staged.copy_in(program.bound)
        if attempt.kept is not None:
            kept, attempt.kept = attempt.kept[::-1], None
            self._load((kept.pop() for _ in range(len(kept))), program.names, attempt)

    def _load(self, tensors: NamedTensors, names: Sequence[str] | None, attempt: _Attempt) -> None:
        """Hand tensors to the engine's loader, and count what it may have written."""
        assert self._load_weights is not None, "prepare() has checked it"

        def count_bytes() -> Iterator[tuple[str, torch.Tensor]]:
            for count, (name, tensor) in enumerate(tensors, 1):
                attempt.written_by_name += tensor.nbytes
                attempt.share_by_name = 1.0 if names is None else count / len(names)
                yield name, tensor

        counted = count_bytes()
        self._load_weights(counted)
        if unread := [name for name, _ in counted]:
            left = f"load_weights left {len(unread)} tensors unread, first {unread[0]}"
            raise SessionError(f"{self.rank_name}: {left}; it must read them all")


def _may_pass(error: RefitError) -> bool:
    """Whether another attempt may succeed. All ranks know the same cause, so all of them try again, or none."""
    cause = error.failure.error if isinstance(error, SessionFailed) else type(error).__name__
    return cause in _PASSING


class _Published:
    """Publish an error raised inside, then raise its cause: this error, or an earlier one of another rank.

    `end` is called with the cause. A class, not @contextmanager: contextlib's frames would keep a replaced exception,
    and the tensors in its traceback, alive.
    """

    def __init__(self, rendezvous: Rendezvous, phase: str, end: Callable[[BaseException], None]) -> None:
        self._rendezvous, self._phase, self._end = rendezvous, phase, end

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            return
        try:
            if not isinstance(error, SessionFailed):  # this one came from the store: every rank knows its cause
                failure = self._rendezvous.fail(self._phase, error)
                if failure != Failure.of(self._rendezvous.rank_name, error) and isinstance(error, RefitError):
                    raise SessionFailed(failure) from error
        except BaseException as cause:
            self._end(cause)
            raise
        self._end(error)
